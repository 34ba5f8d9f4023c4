"""The job table, mapped: :class:`JobRecord`, or :class:`JobRecordMixin` for an application's own Base."""

from __future__ import annotations

import datetime as dt
import enum
import uuid
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import DeclarativeBase, Mapped, Mapper, mapped_column

from enlist.exceptions import ConfigurationError, InvalidOption

__all__ = ["JobRecord", "JobRecordMixin", "JobStatus"]

MAX_NAME_BYTES: Final = 200
"""Longest kind or queue name, in bytes of UTF-8."""

MAX_KEY_BYTES: Final = 2000
"""Longest unique or concurrency key, in bytes of UTF-8.

A PostgreSQL B-tree entry takes 2,704 bytes at most, and the unique index holds the kind beside the key.
"""

PRIORITY_RANGE: Final = (-32768, 32767)
"""What a PostgreSQL smallint holds; higher is claimed first."""

MAX_SMALLINT: Final = 32767

STORAGE_PARAMETERS: Final = {
    # A claim and a completion write a new row version each: room on the page for both saves 12 % of their WAL
    # (933 bytes a job at 100, 873 at 85, 824 at 70, 758 at 50, which makes the table a quarter larger than 70).
    "fillfactor": 70,
    # By count, not by a share of the table: with a long history the default (20 %) would leave millions of dead
    # entries in front of the claim.
    "autovacuum_vacuum_scale_factor": 0,
    "autovacuum_vacuum_threshold": 10000,
    "autovacuum_vacuum_insert_scale_factor": 0,
    "autovacuum_vacuum_insert_threshold": 50000,
    "autovacuum_analyze_scale_factor": 0,
    "autovacuum_analyze_threshold": 10000,
    "autovacuum_vacuum_cost_delay": 0,
}


class JobStatus(enum.StrEnum):
    """The life of a job. A delayed job, or one that waits for its retry, is ``QUEUED``, its ``run_at`` to come."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    DEAD = "dead"
    CANCELLED = "cancelled"

    @classmethod
    def _missing_(cls, value: object) -> JobStatus:
        known = ", ".join(cls)
        raise InvalidOption(f"unknown job status {value!r}: it is one of {known}")


class JobStatusType(sa.types.TypeDecorator[JobStatus]):
    """Text in the database, :class:`JobStatus` in Python; an unknown value is refused before it is sent."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: str | None, _dialect: sa.Dialect) -> str | None:
        return None if value is None else JobStatus(value).value

    def process_result_value(self, value: str | None, _dialect: sa.Dialect) -> JobStatus | None:
        return None if value is None else JobStatus(value)


class UTCDateTime(sa.types.TypeDecorator[dt.datetime]):
    """A point in time, read back in UTC: psycopg gives it in the time zone of the session.

    There Python finds no time of the hour that the clocks go through twice equal to one of another zone.
    """

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_result_value(self, value: dt.datetime | None, _dialect: sa.Dialect) -> dt.datetime | None:
        return value if value is None or value.tzinfo is None else value.astimezone(dt.UTC)


class JobRecordMixin:
    """Columns of a job. Mix it into a class of your own Base to have the table in your metadata.

    Give the class a ``__tablename__`` (and a ``schema`` in ``__table_args__`` if you like); further columns are
    yours. Constraints, partial indexes and storage parameters are added to the table when the class is mapped, so
    a ``__table_args__`` of your own does not lose them.
    """

    id: Mapped[uuid.UUID] = mapped_column(sa.Uuid, primary_key=True, sort_order=-100)
    kind: Mapped[str] = mapped_column(sa.Text, sort_order=-99)
    queue: Mapped[str] = mapped_column(sa.Text, server_default="default", sort_order=-98)
    status: Mapped[JobStatus] = mapped_column(JobStatusType, server_default="queued", sort_order=-97)
    # How often the job was started, the running attempt included.
    attempt: Mapped[int] = mapped_column(sa.Integer, server_default="0", sort_order=-96)
    max_attempts: Mapped[int] = mapped_column(sa.Integer, server_default="20", sort_order=-95)
    # How often a worker died while the job's handler was running.
    lost: Mapped[int] = mapped_column(sa.Integer, server_default="0", sort_order=-94)
    priority: Mapped[int] = mapped_column(sa.SmallInteger, server_default="0", sort_order=-93)
    payload: Mapped[dict[str, Any]] = mapped_column(JSONB, server_default="{}", sort_order=-92)
    unique_key: Mapped[str | None] = mapped_column(sa.Text, sort_order=-91)
    # Whether the row holds its unique key: stored, since it is the predicate of the unique index.
    unique_held: Mapped[bool] = mapped_column(sa.Boolean, server_default=sa.false(), sort_order=-90)
    concurrency_key: Mapped[str | None] = mapped_column(sa.Text, sort_order=-89)
    concurrency_limit: Mapped[int | None] = mapped_column(sa.SmallInteger, sort_order=-88)
    # Which of the key's slots 1 .. concurrency_limit the running job has.
    concurrency_slot: Mapped[int | None] = mapped_column(sa.SmallInteger, sort_order=-87)
    # The fence: changed by each claim, requeue, reap and cancel; kept by done.
    lease_token: Mapped[int] = mapped_column(sa.BigInteger, server_default="0", sort_order=-86)
    locked_by: Mapped[str | None] = mapped_column(sa.Text, sort_order=-85)
    locked_until: Mapped[dt.datetime | None] = mapped_column(UTCDateTime, sort_order=-84)
    run_at: Mapped[dt.datetime] = mapped_column(
        UTCDateTime, server_default=sa.func.statement_timestamp(), sort_order=-83
    )
    created_at: Mapped[dt.datetime] = mapped_column(
        UTCDateTime, server_default=sa.func.statement_timestamp(), sort_order=-82
    )
    # When the handler of the latest attempt was started; NULL while claimed and not started.
    started_at: Mapped[dt.datetime | None] = mapped_column(UTCDateTime, sort_order=-81)
    finished_at: Mapped[dt.datetime | None] = mapped_column(UTCDateTime, sort_order=-80)
    last_error: Mapped[str | None] = mapped_column(sa.Text, sort_order=-79)
    # The latest errors, oldest first, at most 10: [{"attempt": 1, "at": "...", "error": "..."}].
    errors: Mapped[list[dict[str, Any]]] = mapped_column(JSONB, server_default="[]", sort_order=-78)
    meta: Mapped[dict[str, Any]] = mapped_column(JSONB, server_default="{}", sort_order=-77)
    # When the key is released: "started", "finished"; anything else, NULL too, means "pruned".
    unique_until: Mapped[str | None] = mapped_column(sa.Text, sort_order=-76)
    # Before this it is not, unless the job is dead or cancelled.
    unique_hold_until: Mapped[dt.datetime | None] = mapped_column(UTCDateTime, sort_order=-75)
    # Whether the jobs of its concurrency key run one after the other, in the order in which they were made.
    ordered: Mapped[bool] = mapped_column(sa.Boolean, server_default=sa.false(), sort_order=-74)
    # The version of the payload's class that wrote it; of a plain dict, and of a producer that knows none, 1.
    payload_version: Mapped[int] = mapped_column(sa.SmallInteger, server_default="1", sort_order=-73)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.kind} {self.status}>"


@event.listens_for(JobRecordMixin, "instrument_class", propagate=True)
def _complete_table(mapper: Mapper[Any], _class: type[JobRecordMixin]) -> None:
    """Add what declarative columns cannot say; on the mapped table, so that no ``__table_args__`` can lose it."""
    table = mapper.local_table
    name = mapper.class_.__name__
    if mapper.inherits is not None or mapper.polymorphic_on is not None:
        raise ConfigurationError(
            f"{name} is mapped with inheritance, and a job class has a table for itself: derive each from"
            " JobRecordMixin and your Base, or keep what differs in a column of your own"
        )
    if missing := sorted(JobRecordMixin.__annotations__.keys() - table.c.keys()):
        raise ConfigurationError(
            f"the table of {name} has no column {missing[0]!r}: the columns of JobRecordMixin keep their names"
        )
    if isinstance(table, sa.Table) and "enlist" not in table.info:
        table.info["enlist"] = True
        add_constraints_and_indexes(table)
        rate_table_of(table)
        event.listen(table, "after_create", _SetStorageParameters())


class _SetStorageParameters(sa.schema.ExecutableDDLElement):
    """ALTER TABLE ... SET: SQLAlchemy 2.0 has no option of the dialect for it, and ``DDL()`` doubles a % in a name."""


@compiles(_SetStorageParameters)
def _alter_table(element: _SetStorageParameters, compiler: Any, **_: Any) -> str:
    parameters = ", ".join(f"{name} = {value}" for name, value in STORAGE_PARAMETERS.items())
    return f"ALTER TABLE {compiler.preparer.format_table(element.target)} SET ({parameters})"


@event.listens_for(Mapper, "mapper_configured")
def _refuse_writing_relationships(mapper: Mapper[Any], _class: type) -> None:
    """Refuse a relationship to or from a job class that could write.

    A job is written after the flush of the domain rows, by a statement of its own: what the unit of work would set on
    either side would be NULL, in silence.
    """
    for relationship in mapper.relationships:
        jobs = [end for end in (mapper, relationship.mapper) if issubclass(end.class_, JobRecordMixin)]
        if jobs and not relationship.viewonly:
            raise ConfigurationError(
                f"the relationship {mapper.class_.__name__}.{relationship.key} could write, and a job is not written by"
                " the unit of work as other objects are: make it viewonly=True, give a job's foreign key by the values="
                " of enqueue, and store handle.id where a row of the domain refers to its job"
            )


def add_constraints_and_indexes(table: sa.Table) -> None:
    """Checks and indexes of the job table, named after it."""
    c = table.c
    final = sa.sql.elements.conv  # a naming convention of the application's metadata must not rename these
    statuses = ", ".join(f"'{status}'" for status in JobStatus)
    for name, condition in {
        "status": f"status IN ({statuses})",
        "attempt": "attempt >= 0 AND max_attempts >= 1 AND lost >= 0",
        "lease": "(status = 'running') = (locked_until IS NOT NULL)",
        "unique": "NOT unique_held OR unique_key IS NOT NULL",
        "limit": "concurrency_limit >= 1 AND (concurrency_key IS NULL) = (concurrency_limit IS NULL)",
        # With the unique index on the slot: never more than `concurrency_limit` jobs of a key run.
        "slot": (
            "(status = 'running' AND concurrency_key IS NOT NULL) = (concurrency_slot IS NOT NULL)"
            " AND concurrency_slot BETWEEN 1 AND concurrency_limit"
        ),
        "ordered": "NOT ordered OR (concurrency_key IS NOT NULL AND concurrency_limit = 1)",
    }.items():
        table.append_constraint(sa.CheckConstraint(condition, name=final(f"{table.name}_{name}_check")))

    running = sa.text("status = 'running' AND locked_until IS NOT NULL")
    queued_plain = sa.text("status = 'queued' AND concurrency_key IS NULL")
    # By columns that are NULL or not together with the key. Were it the key itself, either index of queued jobs with
    # one could serve the other's statements, and of running ones the reaper's; and what planners expect of a table
    # that was never analyzed, a row each, is no reason to choose the right one.
    queued_limit = sa.text("status = 'queued' AND concurrency_limit IS NOT NULL")
    queued_key = sa.text("status = 'queued' AND concurrency_key IS NOT NULL")
    slot = sa.text("status = 'running' AND concurrency_slot IS NOT NULL")
    # The claim, in its order. Two lines: jobs that wait for a key's slot must not stand before those without a key.
    line = (c.queue, c.priority.desc(), c.run_at, c.id)
    sa.Index(final(f"{table.name}_ready"), *line, postgresql_where=queued_plain)
    sa.Index(final(f"{table.name}_ready_key"), *line, postgresql_where=queued_limit)
    # Which keys a queue has jobs of, and the next job of each.
    sa.Index(
        final(f"{table.name}_queue_key"),
        c.queue,
        c.concurrency_key,
        c.priority.desc(),
        c.run_at,
        c.id,
        postgresql_where=queued_key,
    )
    # The earliest job of an ordered key, whatever its queue and when it is due.
    sa.Index(
        final(f"{table.name}_ordered"),
        c.concurrency_key,
        c.created_at,
        c.id,
        postgresql_where=sa.text("ordered AND status IN ('queued', 'running')"),
    )
    # The limit of a key, and how many of it run.
    sa.Index(
        final(f"{table.name}_slot"),
        c.concurrency_key,
        c.concurrency_slot,
        unique=True,
        postgresql_where=slot,
    )
    # The reaper.
    sa.Index(final(f"{table.name}_lease"), c.locked_until, postgresql_where=running)
    # One holder of a unique key.
    sa.Index(
        final(f"{table.name}_unique"),
        c.kind,
        c.unique_key,
        unique=True,
        postgresql_where=sa.text("unique_held"),
    )


def rate_table_of(table: sa.Table) -> sa.Table:
    """The table beside a job table that has a row for each of its queues with a rate limit.

    :raises ConfigurationError: the application has another table of that name.
    """
    rates = sa.Table(
        f"{table.name}_rate",
        table.metadata,
        sa.Column("queue", sa.Text, primary_key=True),
        # When the queue will have nothing spent: each job that is claimed puts it off, see RateLimit.
        sa.Column("free_at", UTCDateTime, nullable=False, server_default="-infinity"),
        schema=table.schema,
        keep_existing=True,
    )
    if rates.c.keys() != ["queue", "free_at"]:
        raise ConfigurationError(
            f"{rates.fullname} is the name of the table of rate limits beside {table.fullname}: give yours another name"
        )
    return rates


class EnlistBase(DeclarativeBase):
    """enlist's own metadata: it never mixes with the application's."""

    metadata = sa.MetaData()


class JobRecord(JobRecordMixin, EnlistBase):
    """A job: table ``enlist_job``."""

    __tablename__ = "enlist_job"
