"""What a job is between ``enqueue`` and its row."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import sqlalchemy as sa

from enlist._statements import Statements, statements_for
from enlist.handle import JobHandle
from enlist.models import JobRecordMixin

if TYPE_CHECKING:
    import uuid

    from sqlalchemy.orm import Mapper

    from enlist.handle import Batch
    from enlist.payload import PayloadOptions

__all__ = [
    "NO_OPTIONS",
    "CallOptions",
    "LatePayload",
    "Notify",
    "StagedJob",
    "Target",
    "UniqueKey",
    "Values",
]

Notify: TypeAlias = Literal["after_commit", "transaction"] | None


@dataclass(frozen=True, eq=False, slots=True)
class Target:
    """Where the jobs of a repository go."""

    mapper: Mapper[Any]
    statements: Statements
    notify: Notify
    columns: Mapping[str, sa.Column[Any]]
    """The application's own columns of the table, by the names of their attributes."""
    required: frozenset[str]
    """Those that have no default and cannot be NULL."""
    has_defaults: bool
    """Whether some have a default that is made in Python, row by row."""

    @classmethod
    def of(cls, mapper: Mapper[Any], notify: Notify) -> Target:
        """Describe a mapped job class."""
        table = mapper.local_table
        assert isinstance(table, sa.Table)
        columns = {
            attribute.key: column
            for attribute in mapper.column_attrs
            for column in attribute.columns
            if isinstance(column, sa.Column) and column.table is table and attribute.key not in _OWN
        }
        required = frozenset(
            name
            for name, column in columns.items()
            if not (column.nullable or column.default or column.server_default or column.identity or column.computed)
        )
        has_defaults = any(column.default is not None for column in columns.values())
        return cls(mapper, statements_for(table), notify, columns, required, has_defaults)


_OWN = frozenset(JobRecordMixin.__annotations__)


@dataclass(frozen=True, eq=False, slots=True)
class LatePayload:
    """A payload that is made at the flush, when the domain rows have their keys."""

    make: Callable[[], tuple[PayloadOptions, str]]
    source: str
    """File and line of the call of ``enqueue``."""


@dataclass(frozen=True, eq=False, slots=True)
class UniqueKey:
    """A unique key, and what becomes of it."""

    key: str
    until: str
    hold: dt.timedelta | None
    """How long it is held at least, from the server's clock at the flush."""
    replace: bool
    """Whether payload and run_at go to a queued job that holds the key."""


@dataclass(frozen=True, eq=False, slots=True)
class Values:
    """Values for the application's own columns; those of functions are made at the flush."""

    given: Mapping[str, Any]
    source: str


@dataclass(frozen=True, eq=False, slots=True)
class CallOptions:
    """What a call of ``enqueue`` says of its job that a payload's class cannot."""

    unique: UniqueKey | None = None
    concurrency_key: str | None = None
    concurrency_limit: int | None = None
    run_at: dt.datetime | None = None
    delay: dt.timedelta | None = None
    meta: str | None = None
    values: Values | None = None


NO_OPTIONS: Final = CallOptions()


class StagedJob(JobHandle):
    """A job on its way into the table. Its producer knows it as its handle.

    One object for both, and one for the options that many jobs share: of 100,000 jobs, the objects that Python's
    garbage collector goes through again and again are what takes the time.
    """

    __slots__ = ("call", "options", "payload", "target")

    def __init__(self, target: Target, options: PayloadOptions, payload: str | LatePayload, call: CallOptions) -> None:
        self.target = target
        self.options = options
        """Those of the payload's class, or the call's; not known of a late payload."""
        self.payload = payload
        self.call = call
        self._existing_id = None
        self._replaced = False

    @property
    def number(self) -> int:
        """The id as an integer."""
        return self._number

    def stage(self, number: int, batch: Batch) -> None:
        """Give the job its id, and the batch that it is written with. For ``enqueue`` alone."""
        self._number = number
        self._batch = batch

    def move_to(self, batch: Batch) -> None:
        """Share the fate of another batch. For the flush alone."""
        self._batch = batch

    def stage_again(self, batch: Batch) -> None:
        """Be as if not refused, in another batch. For the commit alone."""
        self._batch = batch
        self._existing_id = None

    def refused_by(self, holder: uuid.UUID, *, replaced: bool = False) -> None:
        """Note the job that holds the unique key, and whether it has got the payload. For the flush alone."""
        self._existing_id = holder
        self._replaced = replaced

    def release(self) -> None:
        """Let go of what the row was made of, once it is written or discarded: the handle may live long."""
        self.payload = ""
        self.call = NO_OPTIONS
