"""The session that a handler gets: guarded, so that its effects and the job's status are one commit or nothing.

The guard works by transaction events, since refusing methods alone leaves holes: ``with session.begin()``,
``session.get_transaction().commit()`` and ``session.connection().commit()`` end the transaction as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Self, cast

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Session, SessionTransaction

from enlist._driver import is_autocommit
from enlist._guard import GUARDS
from enlist._staging import RUNNING
from enlist._statements import of_this_minute
from enlist.exceptions import LeaseLost, SessionError, TransactionAborted

if TYPE_CHECKING:
    from collections.abc import Callable

    from enlist._guard import Guard

__all__ = ["GuardedSession", "guarded"]

SETTINGS: Final = ("autoflush", "expire_on_commit")


class GuardedSession(Session):
    """Base of the session classes made by :func:`guarded`; refuses by name what a handler must not do."""

    guard: Guard | None = None
    closes_itself = False
    """Whether the application's class has a ``close()`` of its own, which may have more to do."""

    def guard_by(self, guard: Guard) -> None:
        """Begin to guard the session for one attempt."""
        self.guard = guard
        if guard.grouped:
            guard.begun_with = {name: getattr(self, name) for name in SETTINGS} | {"info": dict(self.info)}
        self.info[RUNNING] = guard.job_id
        if (begun := self.get_transaction()) is not None:  # by an __init__ of the application's
            guard.used = True
            for connection in {entry[0] for entry in begun._connections.values()}:
                _after_begin(self, begun, connection)
        if guard.savepoints:
            guard.base = super().begin(nested=True)  # no IO: the server is told of it at the first use

    def as_it_was(self) -> None:
        """Undo what the handler of a group's job has set in the session: the next is to find it new."""
        guard = self.guard
        assert guard is not None
        begun_with = guard.begun_with
        for name in SETTINGS:
            if getattr(self, name) is not begun_with[name]:
                setattr(self, name, begun_with[name])
        if begun_with["info"] or len(self.info) > 1:  # than the job's id
            ours = {key: value for key, value in self.info.items() if str(key).startswith("enlist.")}
            self.info.clear()
            self.info.update(begun_with["info"] | ours)

    def end_unused(self) -> bool:
        """End the attempt of a session that has begun no transaction, without the 5 us that ``close()`` takes.

        There is nothing to roll back or to give back. From then on it refuses to begin one.

        :return: False if it has, or if nobody guards it: then it is to be closed.
        """
        guard = self.guard
        if guard is None or guard.used or guard.savepoints or self.closes_itself:
            return False
        guard.ours = guard.over = True
        return True

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

    # What earlier jobs of the group have added is there for whoever looks. (The application's class may have further
    # parameters, and return something.)

    def flush(self, *arguments: Any, **options: Any) -> Any:
        guard = self.guard
        if guard is None or guard.deferred is None:
            return super().flush(*arguments, **options)
        if arguments or options:
            guard.insert_deferred()
            return super().flush(*arguments, **options)
        deferred, guard.deferred = guard.deferred, None
        theirs_alone = not self.new and not len(self.identity_map)
        try:
            deferred.come_back()
            returned: Any = super().flush()
            deferred.leave()
        except sa.exc.SQLAlchemyError as error:
            if theirs_alone:  # this job's handler is not to take it for its own
                raise TransactionAborted("what an earlier job of the group has added could not be inserted") from error
            raise
        except TransactionAborted as error:
            guard.broken = guard.broken or str(error)
            raise
        return returned

    def connection(self, *arguments: Any, **options: Any) -> sa.Connection:
        self._insert_deferred()
        return super().connection(*arguments, **options)

    # A bulk operation counts as a flush: no other may begin within.

    def bulk_save_objects(self, *arguments: Any, **options: Any) -> Any:
        self._insert_deferred()
        return super().bulk_save_objects(*arguments, **options)

    def bulk_insert_mappings(self, *arguments: Any, **options: Any) -> Any:
        self._insert_deferred()
        return super().bulk_insert_mappings(*arguments, **options)

    def bulk_update_mappings(self, *arguments: Any, **options: Any) -> Any:
        self._insert_deferred()
        return super().bulk_update_mappings(*arguments, **options)

    def _insert_deferred(self) -> None:
        if self.guard is not None:
            self.guard.insert_deferred()

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
    made.closes_itself = session_class.close is not Session.close
    event.listen(made, "after_transaction_create", _after_transaction_create)
    event.listen(made, "after_begin", _after_begin)
    event.listen(made, "before_commit", _before_commit)
    event.listen(made, "after_soft_rollback", _after_soft_rollback)
    event.listen(made, "after_transaction_end", _after_transaction_end)
    return made


def _after_transaction_create(session: GuardedSession, _transaction: SessionTransaction) -> None:
    guard = session.guard
    if guard is None or guard.savepoints:  # then there is a transaction from the start; a connection tells
        return
    if guard.over:
        session.close()  # for good
        raise sa.exc.InvalidRequestError("the attempt that this session was for is over: it cannot be used any more")
    guard.used = True


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
        guard.roots += ((connection, connection.get_transaction()),)
        GUARDS[connection] = guard
    # Only on the job's own database: a session may write to others as well.
    if guard.holds_lock(connection) and _is_jobs_bind(session, guard, connection) and not transaction.nested:
        # What waits for another database is not inserted while SQLAlchemy is about to begin on this one.
        deferred, guard.deferred = guard.deferred, None
        parameters = {"job_id": guard.job_id, "token": guard.token, "idle_limit": guard.idle_limit}
        if connection.execute(of_this_minute(guard.statements.lock_row), parameters).first() is None:
            raise LeaseLost(guard.job_id, guard.token)
        guard.locked, guard.deferred = True, deferred


def _is_jobs_bind(session: Session, guard: Guard, connection: sa.Connection) -> bool:
    bind = session.get_bind(mapper=sa.inspect(guard.record), clause=guard.statements.written)
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
