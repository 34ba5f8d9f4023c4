"""Handlers' sessions on the connections of another session, in savepoints of its transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from enlist._engines import HANDLERS_SESSION
from enlist._guard import Guard
from enlist._session import GuardedSession, guarded

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

__all__ = ["discard", "join", "join_async"]


class JoinedSession(Session):
    """Base of these sessions: each statement goes to the connection that the caller's session has for it.

    So it is right with any binds and any routing of the caller's session.
    """

    caller: Session

    def get_bind(self, mapper: Any = None, **arguments: Any) -> sa.Connection:
        return self.caller.connection(bind_arguments={"mapper": mapper, **arguments})


_CLASSES: Final[dict[type[Session], type[GuardedSession]]] = {}


def _class_for(session_class: type[Session]) -> type[GuardedSession]:
    """The class of handlers' sessions for a caller's session class; kept, as its listeners are for good."""
    if (made := _CLASSES.get(session_class)) is not None:
        return made
    base = session_class
    if not issubclass(base, JoinedSession):  # it is one where a handler drains in turn
        base = type(session_class.__name__, (JoinedSession, session_class), {})
    return _CLASSES.setdefault(session_class, guarded(base))


def join(caller: Session, connection: sa.Connection, guard: Guard) -> GuardedSession:
    """Make a guarded session for one attempt, of the caller's class; in a savepoint from its first use on."""
    return _guard(_like(caller, connection), caller, guard)


def join_async(caller: AsyncSession, connection: AsyncConnection, guard: Guard) -> AsyncSession:
    """The same for an AsyncSession."""
    made = type(caller).__new__(type(caller))
    sync = caller.sync_session
    AsyncSession.__init__(
        made,
        bind=connection,
        sync_session_class=lambda bind, **_: _like(sync, bind),  # type: ignore[arg-type]  # "or other callable"
    )
    made.sync_session_class = caller.sync_session_class
    _take_over(made, caller)
    _guard(made.sync_session, sync, guard)
    return made


def _like(caller: Session, connection: sa.Connection) -> Session:
    """Make a session of the caller's class, on a connection.

    Without the class's own ``__init__``, since nobody here knows its arguments; what that has set is taken over.
    """
    made_class = _class_for(type(caller))
    made = made_class.__new__(made_class)
    Session.__init__(made, bind=connection, query_cls=caller._query_cls, **_options(caller))
    made.info.update({key: value for key, value in caller.info.items() if not str(key).startswith("enlist.")})
    _take_over(made, caller)
    return made


def _take_over(made: Session | AsyncSession, caller: Session | AsyncSession) -> None:
    for name, value in vars(caller).items():
        if name != "dispatch":  # its listeners are of that session
            vars(made).setdefault(name, value)


def _options(caller: Session) -> dict[str, Any]:
    return {
        **HANDLERS_SESSION,
        "join_transaction_mode": "create_savepoint",
        "autoflush": caller.autoflush,
        "expire_on_commit": caller.expire_on_commit,
    }


def _guard(session: Session, caller: Session, guard: Guard) -> GuardedSession:
    assert isinstance(session, JoinedSession)
    session.caller = caller
    assert isinstance(session, GuardedSession)
    session.guard_by(guard)
    return session


def discard(session: Session) -> None:
    """Roll back what is not committed, and leave the connection as it was."""
    assert isinstance(session, GuardedSession)
    guard = session.guard
    assert guard is not None
    guard.ours = True
    session.close()
    guard.forget()
