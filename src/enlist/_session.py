"""The session that a handler gets: guarded, so that its effects and the job's status are one commit or nothing.

The guard works by transaction events, since refusing methods alone leaves holes: ``with session.begin()``,
``session.get_transaction().commit()`` and ``session.connection().commit()`` end the transaction as well.
"""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any, Final, cast

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Session, SessionTransaction

from enlist._driver import is_autocommit, is_transaction_over, sqlstate
from enlist._staging import RUNNING, write_waiting
from enlist._statements import of_this_minute
from enlist._transactions import ENDING_STATEMENT, IN_FAILED_TRANSACTION
from enlist.exceptions import CommitRefused, LeaseLost, SessionError, TransactionAborted

if TYPE_CHECKING:
    import uuid

    from enlist._statements import Statements
    from enlist.models import JobRecordMixin

__all__ = ["Guard", "GuardedSession", "finish", "guarded"]

SNAPSHOT_LEVELS: Final = frozenset({"REPEATABLE READ", "SERIALIZABLE"})


class Guard:
    """What is known of a handler's session during one attempt."""

    __slots__ = (
        "_hold_lock",
        "broken",
        "committing",
        "idle_limit",
        "isolation",
        "job_id",
        "ours",
        "record",
        "roots",
        "spoken",
        "statements",
        "token",
        "used",
    )

    def __init__(
        self,
        statements: Statements,
        record: type[JobRecordMixin],
        job_id: uuid.UUID,
        token: int,
        *,
        lease: dt.timedelta,
        hold_lock: bool = False,
        isolation: str | None = None,
    ) -> None:
        self.statements = statements
        self.record = record
        self.job_id = job_id
        self.token = token
        self.isolation = isolation
        self.idle_limit = f"{max(1, int(lease.total_seconds() * 1000))}ms"
        self._hold_lock = hold_lock
        self.ours = False
        """enlist itself is ending the transaction now."""
        self.committing = False
        """The COMMIT with the job's status was begun: whatever is raised then, it may have landed."""
        self.used = False
        """A transaction was begun at some time: the attempt's effects may be in it."""
        self.broken: str | None = None
        """How the handler ended the transaction, if it did."""
        self.spoken: set[sa.Connection] = set()
        """The connections that statements were sent on: only then the server has begun a transaction."""
        self.roots: list[tuple[sa.Connection, sa.RootTransaction | None]] = []

    def refuse(self, verb: str) -> CommitRefused:
        self.broken = self.broken or verb
        return CommitRefused(
            f"the handler called {verb} on its session, which enlist commits together with the job's status;"
            " leave it to enlist: return to commit, raise to roll back, use begin_nested() for a savepoint"
        )

    def refuse_ending_statement(self, connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        """Refuse SQL text that would end the transaction behind SQLAlchemy's back; a connection's listener."""
        self.spoken.add(connection)
        if not self.ours and (ending := ENDING_STATEMENT.match(statement)) is not None:
            raise self.refuse(ending[1])

    def detach(self) -> None:
        """Stop listening to the connections: for those that are not closed after the attempt."""
        for connection, _ in self.roots:
            if event.contains(connection, "before_cursor_execute", self.refuse_ending_statement):
                event.remove(connection, "before_cursor_execute", self.refuse_ending_statement)

    def holds_lock(self, connection: sa.Connection) -> bool:
        """Whether the row must be locked for the whole transaction."""
        level = connection.get_execution_options().get("isolation_level", self.isolation) or ""
        return self._hold_lock or level.replace("_", " ").upper() in SNAPSHOT_LEVELS


class GuardedSession(Session):
    """Base of the session classes made by :func:`guarded`; refuses by name what a handler must not do."""

    guard: Guard | None = None

    def guard_by(self, guard: Guard) -> None:
        """Begin to guard the session for one attempt."""
        self.guard = guard
        self.info[RUNNING] = guard.job_id

    def _check(self, verb: str) -> None:
        if self.guard is not None and not self.guard.ours:
            raise self.guard.refuse(verb)

    def begin(self, nested: bool = False) -> SessionTransaction:
        if not nested:
            self._check("begin()")
        return super().begin(nested=nested)

    def commit(self) -> None:
        self._check("commit()")
        super().commit()

    def prepare(self) -> None:
        self._check("prepare()")
        super().prepare()

    def rollback(self) -> None:
        self._check("rollback()")
        super().rollback()

    def close(self) -> None:
        self._check("close()")
        super().close()

    def reset(self) -> None:
        self._check("reset()")
        super().reset()

    def invalidate(self) -> None:
        self._check("invalidate()")
        super().invalidate()


_GUARDED: dict[type[Session], type[GuardedSession]] = {}


def guarded(session_class: type[Session]) -> type[GuardedSession]:
    """Return a guarded subclass of a session class; its listeners are on the class, once."""
    if issubclass(session_class, GuardedSession):
        return session_class
    made = _GUARDED.get(session_class)
    return _GUARDED.setdefault(session_class, _subclass(session_class)) if made is None else made


def _subclass(session_class: type[Session]) -> type[GuardedSession]:
    name = f"Guarded{session_class.__name__}"
    made = cast("type[GuardedSession]", type(name, (GuardedSession, session_class), {}))
    event.listen(made, "after_transaction_create", _after_transaction_create)
    event.listen(made, "after_begin", _after_begin)
    event.listen(made, "before_commit", _before_commit)
    event.listen(made, "after_soft_rollback", _after_soft_rollback)
    event.listen(made, "after_transaction_end", _after_transaction_end)
    return made


def _after_transaction_create(session: GuardedSession, _transaction: SessionTransaction) -> None:
    if session.guard is not None:
        session.guard.used = True


def _after_begin(session: GuardedSession, transaction: SessionTransaction, connection: sa.Connection) -> None:
    guard = session.guard
    if guard is None:
        return
    if is_autocommit(connection):
        guard.broken = "an AUTOCOMMIT connection"
        raise SessionError(
            "the handler's session is on a connection in AUTOCOMMIT mode: its effects could not commit together with"
            " the job's status; give the worker an engine without isolation_level='AUTOCOMMIT'"
        )
    if not transaction.nested:
        guard.roots.append((connection, connection.get_transaction()))
        event.listen(connection, "before_cursor_execute", guard.refuse_ending_statement)
    # Only on the job's own database: a session may write to others as well.
    if guard.holds_lock(connection) and _is_jobs_bind(session, guard, connection) and not transaction.nested:
        parameters = {"job_id": guard.job_id, "token": guard.token, "idle_limit": guard.idle_limit}
        if connection.execute(of_this_minute(guard.statements.lock_row), parameters).first() is None:
            raise LeaseLost(guard.job_id)


def _is_jobs_bind(session: Session, guard: Guard, connection: sa.Connection) -> bool:
    bind = session.get_bind(mapper=sa.inspect(guard.record), clause=sa.update(guard.statements.table))
    return (bind.engine if isinstance(bind, sa.Connection) else bind) is connection.engine


def _before_commit(session: GuardedSession) -> None:
    if session.guard is not None and not session.guard.ours and not session.in_nested_transaction():
        raise session.guard.refuse("commit()")


def _after_soft_rollback(session: GuardedSession, previous: SessionTransaction) -> None:
    if session.guard is not None and not session.guard.ours and previous.parent is None:
        session.guard.broken = session.guard.broken or "a rollback"


def _after_transaction_end(session: GuardedSession, transaction: SessionTransaction) -> None:
    if session.guard is not None and not session.guard.ours and transaction.parent is None:
        session.guard.broken = session.guard.broken or "the end of its transaction"


def finish(session: GuardedSession) -> bool:
    """Commit a handler's effects together with the job's status.

    :return: False if the session was never used: then there is nothing to commit, and the job is still running.
    :raises TransactionAborted: the transaction had failed and the handler swallowed the error.
    :raises CommitRefused: the handler ended the transaction by some way that could not be refused at once.
    :raises LeaseLost: the job is not this attempt's any more.
    """
    guard = session.guard
    assert guard is not None
    if guard.broken is not None:
        raise TransactionAborted(
            f"the handler returned after {guard.broken} on its session: what it wrote is not there,"
            " so the attempt counts as failed; return to commit, raise to roll back"
        )
    if not guard.used:
        return False
    # Before the flush: the driver would begin another transaction with its first statement.
    for used, root in guard.roots:
        open_here = root is not None and root.is_active and used.get_transaction() is root
        if open_here and used in guard.spoken and is_transaction_over(used.connection.driver_connection):
            raise guard.refuse("COMMIT or ROLLBACK on the driver's connection")
    try:
        session.flush()
        # The UPDATE, for sessions that send reads elsewhere, and tell them by the statement.
        write = sa.update(guard.statements.table)
        connection = session.connection(bind_arguments={"mapper": sa.inspect(guard.record), "clause": write})
        for used, root in guard.roots:
            if root is None or not root.is_active or used.get_transaction() is not root:
                raise guard.refuse("commit() or rollback() of the connection")
        statement = of_this_minute(guard.statements.finish)
        result = connection.execute(statement, {"job_id": guard.job_id, "token": guard.token})
    except sa.exc.PendingRollbackError:
        # from None: its text has that of the flush's error, bound parameters and all.
        raise TransactionAborted(
            "the handler returned after a flush that failed, whose error it swallowed: the transaction is rolled back;"
            " let the error out, or flush inside of a savepoint (session.begin_nested())"
        ) from None
    except sa.exc.DBAPIError as error:
        if sqlstate(error) == IN_FAILED_TRANSACTION:
            raise TransactionAborted(
                "the handler returned though its transaction was aborted by an earlier error, which it swallowed;"
                " let the error out, or put the statement that may fail into a savepoint (session.begin_nested())"
            ) from error
        raise
    if cast("sa.CursorResult[Any]", result).rowcount != 1:
        raise LeaseLost(guard.job_id)
    write_waiting(session)
    guard.ours = guard.committing = True
    session.commit()
    return True
