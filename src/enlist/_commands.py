"""What operators do with jobs, in the caller's transaction: pick them, change them, count them, delete old ones."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import sqlalchemy as sa
from sqlalchemy.orm.attributes import set_committed_value

from enlist._cancelling import cancel_by_conditions, cancel_by_ids, messages_of, refuse_own
from enlist._driver import constraint_name, is_autocommit
from enlist._options import MAX_INTEGER, Duration, as_timedelta, check_integer, shown
from enlist._staging import RUNNING, flush_staged, note_write
from enlist._statements import PLAIN
from enlist._writing import notify_in_time, unbound_error
from enlist.exceptions import InvalidOption, SessionError, UniqueKeyContended
from enlist.models import JobStatus

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from enlist._staged import Target
    from enlist._statements import Command

__all__ = ["Changes", "Condition", "Which", "change", "count", "oldest_queued_age", "prune"]

Condition: TypeAlias = sa.ColumnExpressionArgument[bool]
"""A condition on the record class: ``JobRecord.status == JobStatus.DEAD``."""

Which: TypeAlias = uuid.UUID | Iterable[uuid.UUID] | Condition
"""Which jobs: an id, several ids, or a condition."""

RETRY_TRIES: Final = 3
"""How often a retry looks for the holders of unique keys, when others take and release them meanwhile."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What a command has done. True if it changed a job; its length is the number of jobs changed."""

    changed: list[uuid.UUID] = field(default_factory=list)
    """The jobs that were changed, in the order of their ids."""
    asked: list[uuid.UUID] = field(default_factory=list)
    """The running jobs whose rows their handlers have locked (``cancel`` alone), in the order of their ids.

    Nothing is written of them: once the session has committed, their workers are asked to give them up, and then write
    that they are cancelled. A job that ends before its worker hears of it stays what it has become.
    """
    superseded: list[uuid.UUID] = field(default_factory=list)
    """The jobs that were not queued again, since another holds their unique key (``retry`` alone); by id."""
    unchanged: dict[uuid.UUID, JobStatus] = field(default_factory=dict)
    """The jobs whose ids were given and that are in no state for the command, with their status; by id."""
    missing: list[uuid.UUID] = field(default_factory=list)
    """The ids that were given and that no job has, in their order."""

    def __len__(self) -> int:
        return len(self.changed)


class _Picked(NamedTuple):
    """What a caller has said about which jobs: one of the two."""

    ids: list[uuid.UUID] | None
    conditions: list[Any]


def change(
    session: Session, target: Target, command: Command, which: Sequence[Any], limit: int | None, **parameters: Any
) -> Changes:
    """Run a command of the statements on the jobs that a caller has picked."""
    picked = _picked(target, which, limit)
    if picked.ids == []:
        return Changes()
    connection = _connection(session, target)
    if is_autocommit(connection):
        raise SessionError(
            "the session's connection is in AUTOCOMMIT mode: cancel, retry and reschedule lock jobs and then change"
            " them, in one transaction; use an engine without isolation_level='AUTOCOMMIT' for this session"
        )
    unchanged: dict[uuid.UUID, JobStatus] = {}
    held: dict[uuid.UUID, int] = {}
    if command is target.statements.cancel:
        rows, held = _cancel(session, connection, target, picked, limit)
    else:
        ids = picked.ids
        if ids is None:
            free = [] if limit is None or command.free is None else [command.free]
            found = target.statements.picked(command.fits, [*free, *picked.conditions], limit)
            ids = list(connection.execute(found, execution_options=PLAIN).scalars())
        if command is target.statements.cancel_waiting:
            refuse_own(session.info.get(RUNNING), ids)
        rows = _run(connection, target, command, ids, parameters) if ids else []
    verdicts: dict[str, list[uuid.UUID]] = {"changed": [], "superseded": []}
    queues: set[str] = set()
    for row in sorted(rows, key=lambda row: row.id):
        if row.verdict == "unchanged":
            unchanged[row.id] = row.status
        else:
            verdicts[row.verdict].append(row.id)
        if row.woken is not None:
            queues.add(row.woken)
    if rows or held:
        fenced = {row.id: row.token for row in rows if getattr(row, "token", None) is not None}
        messages = messages_of(fenced | held)
        notify_in_time(session, connection, target, queues, messages, asking=bool(held))
        note_write(session, target, connection, queues, messages)
    _refresh(session, target, connection, verdicts["changed"])
    known = {row.id for row in rows} | held.keys()
    missing = [job_id for job_id in picked.ids or [] if job_id not in known]
    return Changes(**verdicts, asked=sorted(held), unchanged=unchanged, missing=missing)


def _cancel(
    session: Session, connection: sa.Connection, target: Target, picked: _Picked, limit: int | None
) -> tuple[list[Any], dict[uuid.UUID, int]]:
    own = session.info.get(RUNNING)
    if picked.ids is not None:
        return cancel_by_ids(connection, target.statements, picked.ids, own)
    return cancel_by_conditions(connection, target.statements, picked.conditions, limit, own)


def _run(
    connection: sa.Connection, target: Target, command: Command, ids: list[uuid.UUID], parameters: dict[str, Any]
) -> list[Any]:
    """Run a command by ids; with a unique key that is taken in that moment, look again."""
    statements = target.statements
    if command is not statements.retry:
        return list(connection.execute(command.run, {"ids": ids, **parameters}, execution_options=PLAIN))
    rows: list[Any] = []
    for _ in range(RETRY_TRIES):
        try:
            # A savepoint, so that the transaction outlives the index's refusal.
            with connection.begin_nested():
                found = connection.execute(command.run, {"ids": ids}, execution_options=PLAIN).all()
        except sa.exc.IntegrityError as error:
            if constraint_name(error) != f"{statements.table.name}_unique":
                raise
            continue
        rows += [row for row in found if row.verdict != "lapsed"]
        ids = [row.id for row in found if row.verdict == "lapsed"]
        if not ids:
            return rows
        connection.execute(statements.release_lapsed, {"ids": ids}, execution_options=PLAIN)
    raise UniqueKeyContended(
        f"the unique key of one of {len(ids)} jobs was taken by another transaction at each of {RETRY_TRIES} tries to"
        f" queue it again, such as {ids[0]}: retry the transaction"
    )


def count(session: Session, target: Target, conditions: Sequence[Any]) -> dict[JobStatus, int]:
    """Count the jobs that meet conditions, by status; each status is there."""
    counts = target.statements.counts(_conditions(target, conditions))
    found = _connection(session, target).execute(counts, execution_options=PLAIN)
    return dict.fromkeys(JobStatus, 0) | {row.status: row.jobs for row in found}


def oldest_queued_age(session: Session, target: Target, conditions: Sequence[Any]) -> dt.timedelta | None:
    """Read how long the oldest due job that meets conditions has been due."""
    age = target.statements.oldest_queued_age(_conditions(target, conditions))
    found: dt.timedelta | None = _connection(session, target).execute(age, execution_options=PLAIN).scalar_one()
    return found


def prune(session: Session, target: Target, conditions: Sequence[Any], older_than: Duration, limit: int) -> int:
    """Delete old jobs that meet conditions; return their number."""
    parameters = {
        "older_than": as_timedelta("older_than", older_than),
        "limit": check_integer("limit", limit, 1, MAX_INTEGER),
    }
    statement = target.statements.prune(_conditions(target, conditions))
    found = _connection(session, target).execute(statement, parameters, execution_options=PLAIN)
    deleted = list(found.scalars())
    loaded = _loaded(session, target, deleted)
    # Undocumented; what SQLAlchemy does for its own DELETE of many rows: a rollback brings them back.
    session._remove_newly_deleted([sa.inspect(record) for record in loaded.values()])
    return len(deleted)


def _connection(session: Session, target: Target) -> sa.Connection:
    """The connection that jobs are written on, when what is staged has been.

    The UPDATE is there for sessions that send reads elsewhere, and tell them by the statement.
    """
    flush_staged(session)
    table = target.statements.table
    try:
        return session.connection(bind_arguments={"mapper": target.mapper, "clause": sa.update(table)})
    except sa.exc.UnboundExecutionError as error:
        raise unbound_error(target) from error


# -- objects that the session has loaded ------------------------------------------------------------------------------


def _loaded(session: Session, target: Target, ids: Iterable[uuid.UUID]) -> dict[uuid.UUID, Any]:
    if not session.identity_map:
        return {}
    keys = ((job_id, target.mapper.identity_key_from_primary_key((job_id,))) for job_id in ids)
    found = ((job_id, session.identity_map.get(key)) for job_id, key in keys)
    return {job_id: record for job_id, record in found if record is not None}


def _refresh(session: Session, target: Target, connection: sa.Connection, ids: list[uuid.UUID]) -> None:
    """Give loaded objects what was written; not by expiring them, since an AsyncSession would load nothing.

    What else the application has set and not flushed stays.
    """
    loaded = _loaded(session, target, ids)
    if not loaded:
        return
    # Undocumented; what SQLAlchemy does for its own UPDATE of many rows: a savepoint's rollback expires them.
    session._register_altered([sa.inspect(record) for record in loaded.values()])
    for row in connection.execute(target.statements.present, {"ids": list(loaded)}, execution_options=PLAIN):
        as_it_was = sa.inspect(loaded[row.id]).unmodified
        for name, value in row._mapping.items():
            if name != "id" and name in as_it_was:
                set_committed_value(loaded[row.id], name, value)


# -- what the caller has said -----------------------------------------------------------------------------------------


def _picked(target: Target, which: Sequence[Any], limit: int | None) -> _Picked:
    """Tell ids from conditions."""
    if limit is not None:
        check_integer("limit", limit, 1, MAX_INTEGER)
    if any(_is_expression(item) for item in which):
        return _Picked(None, _conditions(target, which))
    ids = _ids(which[0]) if len(which) == 1 else None
    if ids is None:
        given = ", ".join(map(shown, which)) or "nothing"
        raise InvalidOption(
            "which jobs? Give one id (a uuid.UUID, such as handle.id), an iterable of ids, or conditions such as"
            f" {target.mapper.class_.__name__}.status == JobStatus.DEAD, not {given}"
        )
    if limit is not None:
        raise InvalidOption(f"limit={limit} is for jobs that are picked by conditions: with ids leave it out")
    return _Picked(sorted(set(ids)), [])


def _ids(value: Any) -> list[uuid.UUID] | None:
    """The ids that are meant; None if it is something else."""
    if isinstance(value, uuid.UUID):
        return [value]
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        return None
    ids = list(value)
    for index, item in enumerate(ids):
        if _is_expression(item):
            raise InvalidOption("conditions are arguments of their own, not a list: unpack it, *conditions")
        if not isinstance(item, uuid.UUID):
            raise InvalidOption(f"ids[{index}] must be a uuid.UUID, not {shown(item)}")
    return ids


def _is_expression(value: Any) -> bool:
    return isinstance(value, sa.ClauseElement) or hasattr(value, "__clause_element__")


def _conditions(target: Target, values: Sequence[Any]) -> list[Any]:
    """The conditions as SQL expressions on the job table."""
    name = target.mapper.class_.__name__
    conditions = []
    for value in values:
        condition = value.__clause_element__() if hasattr(value, "__clause_element__") else value
        is_boolean = isinstance(getattr(condition, "type", None), (sa.Boolean, sa.types.NullType))
        if not isinstance(condition, sa.ColumnElement) or not is_boolean:
            raise InvalidOption(
                f"a condition is an SQL expression such as {name}.status == JobStatus.DEAD, not {shown(value)}"
            )
        if isinstance(condition, sa.sql.elements.BooleanClauseList) and not condition.clauses:
            raise InvalidOption(
                "an empty condition, and_() or or_(): it would mean all jobs; if so, say sqlalchemy.true()"
            )
        conditions.append(condition)
    table = target.statements.table
    others = [other for other in sa.select(table.c.id).where(*conditions).get_final_froms() if other is not table]
    if others:
        raise InvalidOption(
            f"conditions must be on {name} alone, not on {shown(others[0].description)}: put other tables into a"
            f" sub-select, {name}.id.in_(select(...))"
        )
    return conditions
