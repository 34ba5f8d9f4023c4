"""Staged jobs to rows: late payloads resolved, one INSERT for up to 1,000 jobs, duplicates told apart."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import sqlalchemy as sa
from pydantic import ValidationError

from enlist._driver import is_autocommit, sqlstate
from enlist._encoding import describe_invalid
from enlist._statements import INSERT_LIMIT, Statements
from enlist.exceptions import EnlistError, PayloadError, SchemaError, SessionError, UniqueKeyContended
from enlist.handle import Batch, JobHandle, Write

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlalchemy.orm import Mapper, Session

__all__ = ["Content", "LatePayload", "Notify", "StagedJob", "Target", "autocommit_error", "unbound_error", "write"]

Notify: TypeAlias = Literal["after_commit", "transaction"] | None

INSERT_TRIES: Final = 3
"""How often a job is inserted whose unique key was held, yet by nobody when looked for."""

INSERT_CHARACTERS: Final = 1_000_000
"""Most characters of payloads and metas in one INSERT: the server's time for an array grows with its square
(300 payloads of 1 MB take 50 s in one statement and 7 in many), and its length ends at 1 GB."""

_PLAIN: Final = {"stream_results": False, "yield_per": None}
"""Whatever the engine's options say: there is no cursor on the server for an INSERT."""

_SCHEMA_STATES: Final = {"42P01", "42703", "42P10"}
"""No such table, no such column, no unique index that ON CONFLICT could use."""


@dataclass(frozen=True, eq=False, slots=True)
class Target:
    """Where the jobs of a repository go."""

    mapper: Mapper[Any]
    statements: Statements
    notify: Notify


@dataclass(eq=False, slots=True)
class Content:
    """What a payload says of its job; the call's own options have been put in already."""

    kind: str
    queue: str
    priority: int
    max_attempts: int
    payload: str


@dataclass(frozen=True, eq=False, slots=True)
class LatePayload:
    """A payload that is made at the flush, when the domain rows have their keys."""

    make: Callable[[], Content]
    source: str
    """File and line of the call of ``enqueue``."""


@dataclass(eq=False, slots=True)
class StagedJob:
    """A job on its way into the table."""

    id: uuid.UUID
    target: Target
    content: Content | LatePayload
    unique_key: str | None
    concurrency_key: str | None
    concurrency_limit: int | None
    run_at: dt.datetime | None
    delay: dt.timedelta | None
    meta: str
    handle: JobHandle


@dataclass(eq=False, slots=True)
class _Row:
    job: StagedJob
    content: Content


def write(session: Session, jobs: Sequence[StagedJob], batch: Batch) -> None:
    """Write the jobs in the session's transaction, and note in the batch where they went."""
    rows: dict[Target, list[_Row]] = {}
    for job in jobs:
        rows.setdefault(job.target, []).append(_Row(job, _resolved(job)))
    # In one order everywhere: transactions that write to several tables must not wait for each other in a circle.
    for target in sorted(rows, key=lambda target: target.statements.channel):
        try:
            connection = session.connection(bind_arguments={"mapper": target.mapper})
        except sa.exc.UnboundExecutionError as error:
            raise unbound_error(target) from error
        if is_autocommit(connection):
            raise autocommit_error()
        written = Write(connection, connection.connection.driver_connection, target, set())
        batch.writes.append(written)
        try:
            _insert(connection, target, rows[target], written.queues)
        except sa.exc.DBAPIError as error:
            if sqlstate(error) in _SCHEMA_STATES:
                raise _schema_error(target, error) from error
            raise
        # PostgreSQL refuses to prepare a transaction that has notified.
        if target.notify == "transaction" and not session.twophase:
            for queue in sorted(written.queues):
                connection.execute(target.statements.notify, {"queue": queue})


def unbound_error(target: Target) -> SessionError:
    """The session has no connection for the job table."""
    name = target.mapper.class_.__name__
    return SessionError(
        f"the session has no bind for {name}, the table of the jobs: jobs are written in the transaction of the domain"
        f" rows, so give it the same engine: Session(binds={{..., {name}: engine}})"
    )


def autocommit_error() -> SessionError:
    """The session's connection commits each statement by itself."""
    return SessionError(
        "the session's connection is in AUTOCOMMIT mode: the job would be committed apart from the domain rows; use an"
        " engine without isolation_level='AUTOCOMMIT' (and without autocommit=True of the driver) for this session"
    )


def _schema_error(target: Target, error: sa.exc.DBAPIError) -> SchemaError:
    table = target.statements.table
    return SchemaError(
        f"jobs cannot be written to the table {table.fullname}: {str(error.orig).splitlines()[0]}; it is made and kept"
        " up to date by `enlist migrate` (for a mapping of your own, by your own migrations)"
    )


def _resolved(job: StagedJob) -> Content:
    content = job.content
    if not isinstance(content, LatePayload):
        return content
    try:
        return content.make()
    except sa.exc.DBAPIError as error:
        # The database's own word (a deadlock, a lost connection) stays what it is: callers retry by it.
        error.add_note(f"while the late payload of the enqueue at {content.source} was made")
        raise
    except EnlistError as error:
        raise PayloadError(f"late payload of the enqueue at {content.source}: {error}") from error
    except ValidationError as error:
        raise PayloadError(
            f"late payload of the enqueue at {content.source} does not fit {error.title}: {describe_invalid(error)}"
        ) from error
    except Exception as error:
        raise PayloadError(
            f"late payload of the enqueue at {content.source} could not be made: {type(error).__name__}: {error}"
        ) from error


def _insert(connection: sa.Connection, target: Target, rows: list[_Row], queues: set[str]) -> None:
    """Insert the rows; of those whose key is held, note the holder."""
    pending = _ordered(rows)
    for _ in range(INSERT_TRIES):
        made: set[uuid.UUID] = set()
        for chunk in _chunks(pending):
            made.update(
                connection.execute(target.statements.insert, _parameters(chunk), execution_options=_PLAIN).scalars()
            )
        if len(made) == len(pending):
            queues.update(row.content.queue for row in pending)
            return
        queues.update(row.content.queue for row in pending if row.job.id in made)
        refused = [row for row in pending if row.job.id not in made]
        if any(row.job.unique_key is None for row in refused):
            raise SchemaError(
                f"jobs without a unique key were not inserted into the table {target.statements.table.fullname}, and"
                " there was no error: a trigger or a rule of the table keeps them out; it must let them in or raise"
            )
        holders = _holders(connection, target, refused)
        pending = []
        for row in refused:
            holder = holders.get((row.content.kind, row.job.unique_key))
            if holder is None:  # gone since: the key is free again
                pending.append(row)
            else:
                row.job.handle.refused_by(holder)
        if not pending:
            return
    first = pending[0]
    raise UniqueKeyContended(
        f"unique key {first.job.unique_key!r} of kind {first.content.kind!r} was held at each of {INSERT_TRIES}"
        " tries to insert, and its holder was gone each time it was looked for: retry the transaction"
    )


def _chunks(rows: list[_Row]) -> Iterator[list[_Row]]:
    """The rows of each INSERT: at most :data:`INSERT_LIMIT`, and of :data:`INSERT_CHARACTERS` or a single one."""
    chunk: list[_Row] = []
    characters = 0
    for row in rows:
        length = len(row.content.payload) + len(row.job.meta)
        if chunk and (len(chunk) >= INSERT_LIMIT or characters + length > INSERT_CHARACTERS):
            yield chunk
            chunk, characters = [], 0
        chunk.append(row)
        characters += length
    if chunk:
        yield chunk


def _ordered(rows: list[_Row]) -> list[_Row]:
    """Keyed rows in the order of their keys: two transactions with the same keys wait instead of deadlocking."""
    keyed = [row for row in rows if row.job.unique_key is not None]
    if not keyed:
        return rows
    keyed.sort(key=lambda row: (row.content.kind, row.job.unique_key or ""))
    return [row for row in rows if row.job.unique_key is None] + keyed


def _parameters(rows: list[_Row]) -> dict[str, list[Any]]:
    return {
        "ids": [row.job.id for row in rows],
        "kinds": [row.content.kind for row in rows],
        "queues": [row.content.queue for row in rows],
        "max_attempts": [row.content.max_attempts for row in rows],
        "priorities": [row.content.priority for row in rows],
        "payloads": [row.content.payload for row in rows],
        "unique_keys": [row.job.unique_key for row in rows],
        "concurrency_keys": [row.job.concurrency_key for row in rows],
        "concurrency_limits": [row.job.concurrency_limit for row in rows],
        "run_ats": [row.job.run_at for row in rows],
        "delays": [row.job.delay for row in rows],
        "metas": [row.job.meta for row in rows],
    }


def _holders(
    connection: sa.Connection, target: Target, rows: Iterable[_Row]
) -> dict[tuple[str, str | None], uuid.UUID]:
    wanted = list({(row.content.kind, row.job.unique_key) for row in rows})
    found = connection.execute(
        target.statements.holders,
        {"kinds": [kind for kind, _ in wanted], "keys": [key for _, key in wanted]},
        execution_options=_PLAIN,
    )
    return {(kind, key): job_id for kind, key, job_id in found}
