"""Staged jobs to rows, in the session's transaction: late payloads and values resolved, each table written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NoReturn

import sqlalchemy as sa
from pydantic import ValidationError

from enlist._driver import is_autocommit, sqlstate
from enlist._encoding import describe_invalid
from enlist._inserting import Insertion, insert_jobs
from enlist._ordered_keys import line_up
from enlist._staged import LatePayload, Values
from enlist._transactions import note
from enlist.exceptions import EnlistError, InvalidOption, PayloadError, SchemaError, SessionError

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from enlist._staged import Notify, StagedJob, Target
    from enlist._statements import Statements
    from enlist.handle import Batch

__all__ = ["autocommit_error", "notify_in_time", "unbound_error", "write"]

NOTIFYING: Final[tuple[Notify, ...]] = (None, "after_commit", "transaction")
"""How repositories notify: where several write to one table, all do as the one that does most."""

_SCHEMA_STATES: Final = {"42P01", "42703", "42P10"}
"""No such table, no such column, no unique index that ON CONFLICT could use."""


def write(session: Session, jobs: Sequence[StagedJob], batch: Batch, insertion: Insertion) -> None:
    """Write the jobs in the session's transaction, and note in the batch where they went.

    Those that are to be looked at again are in the insertion then.
    """
    # By table, whatever the repositories: of one key the order of the calls counts.
    by_table: dict[Statements, list[StagedJob]] = {}
    with_key: dict[Statements, list[StagedJob]] = {}
    for job in jobs:
        _resolve(job)
        by_table.setdefault(job.target.statements, []).append(job)
        if job.call.concurrency_key is not None:
            with_key.setdefault(job.target.statements, []).append(job)
    # In one order everywhere: transactions that write to several tables must not wait for each other in a circle.
    for statements in sorted(by_table, key=lambda statements: statements.channel):
        staged = by_table[statements]
        target = max({job.target for job in staged}, key=lambda target: NOTIFYING.index(target.notify))
        _write_table(session, target, staged, batch, insertion, with_key=with_key.get(statements, []))


def _write_table(
    session: Session,
    target: Target,
    jobs: list[StagedJob],
    batch: Batch,
    insertion: Insertion,
    *,
    with_key: list[StagedJob],
) -> None:
    connection = connection_for(session, target)
    written = note(connection, target, batch)
    try:
        insertion.created_at = line_up(connection, target.statements, with_key) if with_key else None
        insert_jobs(connection, target, jobs, written.queues, insertion)
    except sa.exc.DBAPIError as error:
        if sqlstate(error) in _SCHEMA_STATES:
            raise _schema_error(target, error) from error
        raise
    written.is_sent = True
    notify_in_time(session, connection, target, written.queues)


def notify_in_time(
    session: Session,
    connection: sa.Connection,
    target: Target,
    queues: set[str],
    messages: Sequence[str] = (),
    *,
    asking: bool = False,
) -> None:
    """Notify the workers of queues in the transaction itself, if that is how the repository does it.

    :param messages: what to tell of jobs that were cancelled.
    :param asking: nothing but the message is there for some of them: so it goes with the COMMIT, not after it.
    """
    # PostgreSQL refuses to prepare a transaction that has notified.
    if session.twophase:
        return
    if target.notify == "transaction":
        for queue in sorted(queues):
            connection.execute(target.statements.notify, {"queue": queue})
    if messages and (asking or target.notify == "transaction"):
        connection.execute(target.statements.notify_cancelled, {"messages": list(messages)})


def connection_for(session: Session, target: Target) -> sa.Connection:
    """Return the connection that the session has for the job table, in its transaction.

    :raises SessionError: there is none, or it commits each statement by itself.
    """
    try:
        connection = session.connection(bind_arguments={"mapper": target.mapper})
    except sa.exc.UnboundExecutionError as error:
        raise unbound_error(target) from error
    if is_autocommit(connection):
        raise autocommit_error()
    return connection


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


def _resolve(job: StagedJob) -> None:
    """Call the functions of a job. What they return is kept: a job that waits for another is written later."""
    if isinstance(job.payload, LatePayload):
        late = job.payload
        try:
            job.options, job.payload = late.make()
        except Exception as error:
            _fail(f"late payload of the enqueue at {late.source}", error)
    if job.call.values is not None:
        values = job.call.values
        job.call = replace(job.call, values=Values(dict(_resolved_values(values)), values.source))


def _resolved_values(values: Values) -> Iterator[tuple[str, Any]]:
    for name, value in values.given.items():
        try:
            yield name, value() if callable(value) else value
        except Exception as error:
            _fail(f"value of {name!r} of the enqueue at {values.source}", error)


def _fail(what: str, error: Exception) -> NoReturn:
    """Fail the flush, since something of the application's that it called has failed."""
    if isinstance(error, sa.exc.DBAPIError):
        # The database's own word (a deadlock, a lost connection) stays what it is: callers retry by it.
        error.add_note(f"while the {what} was made")
        raise error
    if isinstance(error, InvalidOption):
        raise InvalidOption(f"{what}: {error}") from error
    if isinstance(error, EnlistError):
        raise PayloadError(f"{what}: {error}") from error
    if isinstance(error, ValidationError):
        raise PayloadError(f"{what} does not fit {error.title}: {describe_invalid(error)}") from error
    raise PayloadError(f"{what} could not be made: {type(error).__name__}: {error}") from error
