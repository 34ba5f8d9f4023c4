"""Staged jobs to rows, in the session's transaction: late payloads and values resolved, each table written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

import sqlalchemy as sa
from pydantic import ValidationError

from enlist._driver import is_autocommit, sqlstate
from enlist._encoding import describe_invalid
from enlist._inserting import Row, insert_rows
from enlist._staged import LatePayload
from enlist.exceptions import EnlistError, PayloadError, SchemaError, SessionError
from enlist.handle import Batch, Write

if TYPE_CHECKING:
    import uuid

    from sqlalchemy.orm import Session

    from enlist._staged import StagedJob, Target

__all__ = ["autocommit_error", "unbound_error", "write"]

_SCHEMA_STATES: Final = {"42P01", "42703", "42P10"}
"""No such table, no such column, no unique index that ON CONFLICT could use."""


def write(
    session: Session, jobs: Sequence[StagedJob], batch: Batch, running: uuid.UUID | None = None
) -> list[StagedJob]:
    """Write the jobs in the session's transaction, and note in the batch where they went.

    :param running: the job whose handler's session this is.
    :return: the jobs whose unique key is held by that job, which are not written.
    """
    rows: dict[Target, list[Row]] = {}
    for job in jobs:
        rows.setdefault(job.target, []).append(_resolved(job))
    own: list[StagedJob] = []
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
            own += [row.job for row in insert_rows(connection, target, rows[target], written.queues, running)]
        except sa.exc.DBAPIError as error:
            if sqlstate(error) in _SCHEMA_STATES:
                raise _schema_error(target, error) from error
            raise
        # PostgreSQL refuses to prepare a transaction that has notified.
        if target.notify == "transaction" and not session.twophase:
            for queue in sorted(written.queues):
                connection.execute(target.statements.notify, {"queue": queue})
    return own


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


def _resolved(job: StagedJob) -> Row:
    content = job.content
    if isinstance(content, LatePayload):
        late = content
        try:
            # Kept: a job that waits for its handler's own to be done is written later, and made once.
            job.content = content = late.make()
        except Exception as error:
            _fail(f"late payload of the enqueue at {late.source}", error)
    return Row(job, content, _resolved_values(job) if job.values is not None else {})


def _resolved_values(job: StagedJob) -> dict[str, Any]:
    assert job.values is not None
    values = {}
    for name, value in job.values.given.items():
        try:
            values[name] = value() if callable(value) else value
        except Exception as error:
            _fail(f"value of {name!r} of the enqueue at {job.values.source}", error)
    return values


def _fail(what: str, error: Exception) -> NoReturn:
    """Fail the flush, since something of the application's that it called has failed."""
    if isinstance(error, sa.exc.DBAPIError):
        # The database's own word (a deadlock, a lost connection) stays what it is: callers retry by it.
        error.add_note(f"while the {what} was made")
        raise error
    if isinstance(error, EnlistError):
        raise PayloadError(f"{what}: {error}") from error
    if isinstance(error, ValidationError):
        raise PayloadError(f"{what} does not fit {error.title}: {describe_invalid(error)}") from error
    raise PayloadError(f"{what} could not be made: {type(error).__name__}: {error}") from error
