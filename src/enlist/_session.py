"""The session that a handler gets: guarded, so that its effects and the job's status are one commit or nothing.

The guard works by transaction events, since refusing methods alone leaves holes: ``with session.begin()``,
``session.get_transaction().commit()`` and ``session.connection().commit()`` end the transaction as well.
"""

from __future__ import annotations

import datetime as dt
import re
import weakref
from typing import TYPE_CHECKING, Any, Final, Self, cast

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Session, SessionTransaction

from enlist._driver import is_autocommit, is_transaction_over
from enlist._staging import RUNNING
from enlist._statements import of_this_minute
from enlist._transactions import ENDING_STATEMENT
from enlist.exceptions import CommitRefused, LeaseLost, SessionError

if TYPE_CHECKING:
    import uuid
    from collections.abc import Callable

    from enlist._slots import Run
    from enlist._statements import Statements
    from enlist.models import JobRecordMixin

__all__ = ["Guard", "GuardedSession", "guarded"]

SETTINGS: Final = ("autoflush", "expire_on_commit")

LASTING: Final = re.compile(
    r"\bset_config\b|(?:^|;)\s*(?:/\*.*?\*/\s*|--[^\n]*\n\s*)*"
    r"(?:set\b|savepoint\s+(?!sa_savepoint_)|create\s+(?:(?:local|global)\s+)?temp)",
    re.IGNORECASE | re.DOTALL,
)
"""What lasts as long as the transaction and is for the job alone that sends it: ``SET LOCAL``, a savepoint by its name,
a temporary table."""

SNAPSHOT_LEVELS: Final = frozenset({"REPEATABLE READ", "SERIALIZABLE"})


class Guard:
    """What is known of a handler's session during one attempt, or one after the other of a group."""

    __slots__ = (
        "_hold_lock",
        "alone",
        "always",
        "base",
        "begun_with",
        "broken",
        "committing",
        "grouped",
        "idle_limit",
        "isolation",
        "job_id",
        "locked",
        "ours",
        "record",
        "roots",
        "savepoints",
        "spoken",
        "statements",
        "token",
        "used",
    )

    def __init__(
        self,
        statements: Statements,
        record: type[JobRecordMixin],
        run: Run,
        *,
        lease: dt.timedelta,
        isolation: str | None = None,
    ) -> None:
        """:param isolation: the level that the session's transactions have if nothing else says so."""
        self.statements = statements
        self.record = record
        self.job_id = run.id
        self.token = run.token
        self.isolation = isolation
        self.idle_limit = f"{max(1, int(lease.total_seconds() * 1000))}ms"
        self._hold_lock = run.handler.hold_lock
        self.locked = False
        """The row's lock is held until the transaction ends."""
        self.savepoints = run.handler.on_commit == "savepoint"
        """A commit of the handler's is a savepoint."""
        self.base: SessionTransaction | None = None
        """With savepoints: the one that the handler takes for its transaction."""
        self.grouped = run.handler.commit_every > 1
        """Other jobs may follow in the transaction."""
        self.alone = False
        """None may follow: what the last has done to the transaction is not for the next."""
        self.always = run.handler.complete == "commit"
        """To be committed even if the handler has not used it."""
        self.ours = False
        """enlist itself is ending the transaction now."""
        self.committing = False
        """The COMMIT with the job's status was begun: whatever is raised then, it may have landed."""
        self.used = False
        """A transaction was begun at some time: the attempt's effects may be in it."""
        self.begun_with: dict[str, Any] = {}
        """What a handler may set in the session, as it was."""
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
        """Refuse SQL text that would end the transaction behind SQLAlchemy's back; a connection's listener.

        What could not be seen beforehand (several statements in one text, the driver's own commit) is noticed now:
        the driver would begin another transaction with this statement.
        """
        if self.ours:
            return
        if connection in self.spoken and is_transaction_over(connection.connection.driver_connection):
            raise self.refuse("COMMIT or ROLLBACK on the driver's connection")
        self.spoken.add(connection)
        if (ending := ENDING_STATEMENT.match(statement)) is not None:
            raise self.refuse(ending[1])
        if self.grouped and LASTING.search(statement) is not None:
            self.alone = True

    def follow(self, session: Session, job_id: uuid.UUID, token: int) -> None:
        """Go on to another job of a group, in the same transaction."""
        self.job_id, self.token = job_id, token
        session.info[RUNNING] = job_id

    def check_roots(self) -> None:
        """Notice a transaction that was ended by SQL, or on the driver's connection.

        Before anything else is sent: the driver would begin another with it.

        :raises CommitRefused: it was.
        """
        for used, root in self.roots:
            open_here = root is not None and root.is_active and used.get_transaction() is root
            if open_here and used in self.spoken and is_transaction_over(used.connection.driver_connection):
                raise self.refuse("COMMIT or ROLLBACK on the driver's connection")

    def check_connections(self) -> None:
        """Notice a transaction that was ended by a method of the connection.

        :raises CommitRefused: it was.
        """
        for used, root in self.roots:
            if root is None or not root.is_active or used.get_transaction() is not root:
                raise self.refuse("commit() or rollback() of the connection")

    def forget(self) -> None:
        """Let go of the connections, when the attempt is over."""
        for connection, _ in self.roots:
            _guards.pop(connection, None)

    def detach(self) -> None:
        """The same, and stop listening to those that are not closed after the attempt."""
        self.forget()
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
        guard.begun_with = {name: getattr(self, name) for name in SETTINGS} | {"info": dict(self.info)}
        self.info[RUNNING] = guard.job_id
        if guard.savepoints:
            guard.base = super().begin(nested=True)  # no IO: the server is told of it at the first use

    def as_it_was(self) -> None:
        """Undo what the handler of a group's job has set in the session: the next is to find it new."""
        guard = self.guard
        assert guard is not None
        for name in SETTINGS:
            setattr(self, name, guard.begun_with[name])
        ours = {key: value for key, value in self.info.items() if str(key).startswith("enlist.")}
        self.info.clear()
        self.info.update(guard.begun_with["info"] | ours)

    def _check(self, verb: str) -> None:
        if self.guard is not None and not self.guard.ours:
            raise self.guard.refuse(verb)

    def _end_base(self, end: Callable[[SessionTransaction], None]) -> bool:
        """End what the handler takes for its transaction, and the savepoints in it; False if it is the real one."""
        guard = self.guard
        if guard is None or guard.ours or (base := guard.base) is None:
            return False
        while guard.base is base and guard.broken is None:  # its end brings another
            innermost = self.get_nested_transaction()
            assert innermost is not None
            end(innermost)
        return True

    def begin(self, nested: bool = False) -> SessionTransaction:
        if not nested:
            if self.guard is not None and self.guard.base is not None:
                return cast("SessionTransaction", _Begun(self))
            self._check("begin()")
        return super().begin(nested=nested)

    def commit(self) -> None:
        if not self._end_base(SessionTransaction.commit):
            self._check("commit()")
            super().commit()

    def prepare(self) -> None:
        self._check("prepare()")
        super().prepare()

    def rollback(self) -> None:
        if not self._end_base(SessionTransaction.rollback):
            self._check("rollback()")
            super().rollback()

    def close(self) -> None:
        if self._end_base(SessionTransaction.rollback):
            self.expunge_all()
        else:
            self._check("close()")
            super().close()

    def reset(self) -> None:
        if self._end_base(SessionTransaction.rollback):
            self.expunge_all()
        else:
            self._check("reset()")
            super().reset()

    def invalidate(self) -> None:
        self._check("invalidate()")
        super().invalidate()


class _Begun:
    """What ``begin()`` returns where a commit is a savepoint: a transaction of the handler's, as far as it sees."""

    nested = False

    def __init__(self, session: GuardedSession) -> None:
        self.session = session

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.rollback()
            return
        try:
            self.commit()
        except BaseException:
            self.rollback()
            raise

    @property
    def is_active(self) -> bool:
        return self.session.is_active

    def commit(self) -> None:
        self.session.commit()

    def rollback(self) -> None:
        self.session.rollback()

    close = rollback


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


_guards: Final[weakref.WeakKeyDictionary[sa.Connection, Guard]] = weakref.WeakKeyDictionary()
"""Of the connections that handlers' sessions have; until :meth:`Guard.forget`, since a guard knows its connections."""


def _refusing(connection: sa.Connection) -> Guard | None:
    """The guard that refuses what ends the transaction of a connection now."""
    guard = _guards.get(connection)
    return None if guard is None or guard.ours else guard


# Each of these is on the class, once: a listener for each connection takes 18 us. What refuses a commit rolls back
# first: SQLAlchemy takes the transaction to be over then, and would give the connection back in it.


@event.listens_for(sa.Engine, "commit")
def _refuse_commit(connection: sa.Connection) -> None:
    """Refuse ``session.connection().commit()``."""
    if (guard := _refusing(connection)) is not None:
        connection.dialect.do_rollback(connection.connection)
        raise guard.refuse("commit() of the connection")


@event.listens_for(sa.Engine, "commit_twophase")
def _refuse_commit_in_two_phases(connection: sa.Connection, xid: object, is_prepared: bool) -> None:
    """Refuse the same of a session in two phases."""
    if (guard := _refusing(connection)) is not None:
        connection.dialect.do_rollback_twophase(connection, xid, is_prepared)
        raise guard.refuse("commit() of the connection")


@event.listens_for(sa.Engine, "prepare_twophase")
def _refuse_prepare(connection: sa.Connection, _xid: object) -> None:
    """Refuse the first of the two phases."""
    if (guard := _refusing(connection)) is not None:
        raise guard.refuse("prepare() of the connection")


def _after_transaction_create(session: GuardedSession, _transaction: SessionTransaction) -> None:
    # With savepoints there is a transaction from the start; a connection tells.
    if session.guard is not None and not session.guard.savepoints:
        session.guard.used = True


def _after_begin(session: GuardedSession, transaction: SessionTransaction, connection: sa.Connection) -> None:
    guard = session.guard
    if guard is None:
        return
    guard.used = True
    if is_autocommit(connection):
        guard.broken = "an AUTOCOMMIT connection"
        connection.invalidate()  # a handler before has left it so, maybe: nobody gets it any more
        raise SessionError(
            "the handler's session is on a connection in AUTOCOMMIT mode: its effects could not commit together with"
            " the job's status; give the worker an engine without isolation_level='AUTOCOMMIT'"
        )
    if not transaction.nested:
        guard.roots.append((connection, connection.get_transaction()))
        event.listen(connection, "before_cursor_execute", guard.refuse_ending_statement)
        _guards[connection] = guard
    # Only on the job's own database: a session may write to others as well.
    if guard.holds_lock(connection) and _is_jobs_bind(session, guard, connection) and not transaction.nested:
        parameters = {"job_id": guard.job_id, "token": guard.token, "idle_limit": guard.idle_limit}
        if connection.execute(of_this_minute(guard.statements.lock_row), parameters).first() is None:
            raise LeaseLost(guard.job_id, guard.token)
        guard.locked = True


def _is_jobs_bind(session: Session, guard: Guard, connection: sa.Connection) -> bool:
    bind = session.get_bind(mapper=sa.inspect(guard.record), clause=sa.update(guard.statements.table))
    return (bind.engine if isinstance(bind, sa.Connection) else bind) is connection.engine


def _before_commit(session: GuardedSession) -> None:
    if session.guard is not None and not session.guard.ours and not _is_savepoints(session):
        raise session.guard.refuse("commit()")


def _is_savepoints(session: GuardedSession) -> bool:
    """Whether it is a savepoint that is being committed.

    ``get_transaction().commit()`` is told while the savepoints in it are there still; that it is the transaction's own
    step is not documented.
    """
    root = session.get_transaction()
    return session.in_nested_transaction() and getattr(root, "_current_fn", None) is None


def _after_soft_rollback(session: GuardedSession, previous: SessionTransaction) -> None:
    if session.guard is not None and not session.guard.ours and previous.parent is None:
        session.guard.broken = session.guard.broken or "a rollback"


def _after_transaction_end(session: GuardedSession, transaction: SessionTransaction) -> None:
    guard = session.guard
    if guard is None or guard.ours:
        return
    if transaction.parent is None:
        guard.broken = guard.broken or "the end of its transaction"
    elif transaction is guard.base:
        if session.expire_on_commit:
            session.expire_all()
        try:
            guard.base = session.begin(nested=True)
        except sa.exc.InvalidRequestError:
            guard.broken = "an end of its transaction within a block of begin_nested()"
            raise
