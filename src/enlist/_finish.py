"""The end of a handler's transaction: its effects and the job's status are committed together, or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import sqlalchemy as sa
from sqlalchemy.orm import Session

from enlist._deferred import Deferred
from enlist._direct import direct
from enlist._driver import is_transaction_failed, sqlstate
from enlist._staging import has_waiting, write_waiting
from enlist._statements import of_this_minute
from enlist._transactions import IN_FAILED_TRANSACTION
from enlist.exceptions import LeaseLost, TransactionAborted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from enlist._guard import Guard
    from enlist._session import GuardedSession
    from enlist._slots import Run

__all__ = ["close_member", "finish", "finish_group", "needs_commit"]

SWALLOWED = (
    "the handler returned though its transaction was aborted by an earlier error, which it swallowed; let the error"
    " out, or put the statement that may fail into a savepoint (session.begin_nested())"
)


def needs_commit(session: GuardedSession) -> bool:
    """Whether :func:`finish` has something to do; no IO.

    :raises TransactionAborted: as there.
    """
    return _is_used(session, _checked(session))


def finish(session: GuardedSession) -> bool:
    """Commit a handler's effects together with the job's status.

    :return: False if the session was never used: then there is nothing to commit, and the job is still running.
    :raises TransactionAborted: the transaction had failed and the handler swallowed the error.
    :raises CommitRefused: the handler ended the transaction by some way that could not be refused at once.
    :raises LeaseLost: the job is not this attempt's any more.
    """
    guard = _checked(session)
    if not _is_used(session, guard):
        return False
    try:
        connection = _connection(session, guard)
        statement = direct(of_this_minute(guard.statements.finish))
        done = statement.rows(connection, {"job_id": guard.job_id, "token": guard.token})
    except sa.exc.SQLAlchemyError as error:
        _tell_of_swallowed(error)
        raise
    if not done:
        raise LeaseLost(guard.job_id)
    _commit(session, guard)
    return True


def close_member(session: GuardedSession) -> bool:
    """End one job's part of a group's transaction; return whether another may follow in it.

    :raises TransactionAborted, CommitRefused: as :func:`finish`.
    """
    guard = _checked(session)
    if guard.used:
        try:
            guard.check_roots()
            while (left_open := session.get_nested_transaction()) is not None:
                left_open.commit()  # else the next could undo it
            if not _defer(session, guard):
                session.flush()
        except sa.exc.SQLAlchemyError as error:
            _tell_of_swallowed(error)
            raise
        for used, _ in guard.roots:
            if is_transaction_failed(used.connection.driver_connection):
                raise TransactionAborted(SWALLOWED)
    if len(session.identity_map):  # the flush has left objects nowhere else
        session.expunge_all()
    session.as_it_was()
    # A row that is locked, since its version is that of the transaction's snapshot, is the only one that can be.
    return not guard.locked and not guard.alone and not has_waiting(session)


def finish_group(session: GuardedSession, runs: Sequence[Run]) -> bool:
    """Commit the effects of several jobs together with their statuses.

    :return: False if none has used the session.
    :raises LeaseLost: one of the jobs is not this attempt's any more; nothing is committed.
    """
    guard = _checked(session)
    if not _is_used(session, guard):
        return False
    try:
        connection = _connection(session, guard)
        statement = of_this_minute(guard.statements.finish_group)
        held = {"ids": [run.id for run in runs], "tokens": [run.token for run in runs]}
        result = connection.execute(statement, held)
        are_all = result.rowcount == len(runs)  # no row is updated twice; to read 200 ids takes 0.5 ms
        done = set() if are_all else {(row.id, row.lease_token) for row in result}
        result.close()
    except sa.exc.SQLAlchemyError as error:
        _tell_of_swallowed(error)
        raise
    for run in () if are_all else runs:
        # With the token: a job that was lost may have been claimed again, by this worker, into this very group.
        if (run.id, run.token) not in done:
            raise LeaseLost(run.id, run.token)
    _commit(session, guard)
    return True


def _defer(session: GuardedSession, guard: Guard) -> bool:
    """Have what a job has added wait for the others' of its group, if that is wanted and possible."""
    if not guard.flushes_together or type(session).get_bind is not Session.get_bind:  # it may choose by job
        return False
    # The first job's own flush begins the transaction: so it is known whether others may follow in it.
    if not guard.roots:
        return False
    guard.deferred = guard.deferred or Deferred(session)
    return guard.deferred.take()


def _checked(session: GuardedSession) -> Guard:
    guard = session.guard
    assert guard is not None
    if guard.broken is not None:
        raise TransactionAborted(
            f"the handler returned after {guard.broken} on its session: what it wrote is not there,"
            " so the attempt counts as failed; return to commit, raise to roll back"
        )
    return guard


def _is_used(session: Session, guard: Guard) -> bool:
    if guard.savepoints and (session.new or session.dirty or session.deleted):
        return True
    return guard.used or guard.always


def _connection(session: Session, guard: Guard) -> sa.Connection:
    """The connection for the jobs' status, when all that the handler has added is sent."""
    guard.check_roots()
    session.flush()
    # The UPDATE, for sessions that send reads elsewhere, and tell them by the statement.
    arguments = {"mapper": sa.inspect(guard.record), "clause": guard.statements.written}
    connection = session.connection(bind_arguments=arguments)
    guard.check_connections()
    guard.check_roots()  # what the flush's listeners have done: the next statement may pass the guard by
    for other in [used for used, _ in guard.roots if used is not connection]:
        _check_failed(other)
    return connection


def _check_failed(other: sa.Connection) -> None:
    """Notice a failed transaction on another database than the jobs' own, where their UPDATE tells.

    :raises TransactionAborted: an error there was swallowed.
    """
    failed = is_transaction_failed(other.connection.driver_connection)
    if failed is None:  # asyncpg doesn't tell; the server does
        other.exec_driver_sql("SELECT 1")
    elif failed:
        raise TransactionAborted(SWALLOWED)


def _commit(session: GuardedSession, guard: Guard) -> None:
    write_waiting(session)
    guard.ours = guard.committing = True
    session.commit()


def _tell_of_swallowed(error: sa.exc.SQLAlchemyError) -> None:
    """Say what an error means that tells of another before it, which the handler has swallowed.

    Not a context manager, which would be made for each job.

    :raises TransactionAborted: it does.
    """
    if isinstance(error, sa.exc.PendingRollbackError):
        # from None: its text has that of the flush's error, bound parameters and all.
        raise TransactionAborted(
            "the handler returned after a flush that failed, whose error it swallowed: the transaction is rolled back;"
            " let the error out, or flush inside of a savepoint (session.begin_nested())"
        ) from None
    if isinstance(error, sa.exc.DBAPIError) and sqlstate(error) == IN_FAILED_TRANSACTION:
        raise TransactionAborted(SWALLOWED) from error
