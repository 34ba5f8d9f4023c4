"""From what a worker is given to what it needs: handler sessions of both kinds, and connections of its own."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeAlias, cast

import psycopg
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from enlist._connecting import Connecting, drop_read_only, set_up
from enlist._deriving import creator_of, derivable, handler_options, has_creator
from enlist._driver import is_read_only, is_transaction_over, shown_url
from enlist._guard import Guard
from enlist._session import GuardedSession, guarded
from enlist.exceptions import ConfigurationError

__all__ = [
    "AsyncSessions",
    "Bind",
    "SyncSessions",
    "async_sessions",
    "check_binds",
    "housekeeping_engine",
    "sync_sessions",
]

Bind: TypeAlias = (
    sa.Engine
    | AsyncEngine
    | sessionmaker[Any]
    | async_sessionmaker[Any]
    | scoped_session[Any]
    | async_scoped_session[Any]
)

HOUSEKEEPING_CONNECTIONS: Final = 5
"""Claim, complete, heartbeat, reaper and the start of a careful job, at once."""

HANDLERS_SESSION: Final[dict[str, Any]] = {"autobegin": True, "close_resets_only": False}
"""It begins by itself, at its first use: a handler may not call begin(). After the attempt it cannot be used again."""

CHECKOUT_SECONDS: Final = 5.0
"""How long a loop waits for one of them. There is one for each, so somebody holds on to more than his own."""

PREPARE_THRESHOLD: Final = 5
"""psycopg's default."""


class SyncSessions:
    """Makes guarded sessions for plain handlers."""

    def __init__(self, bind: sa.Engine | sessionmaker[Any] | scoped_session[Any], *, derived: bool = False) -> None:
        self._scoped = bind if isinstance(bind, scoped_session) else None
        factory = bind.session_factory if isinstance(bind, scoped_session) else bind
        if isinstance(factory, sa.Engine):
            made = sessionmaker(factory, class_=guarded(Session), **HANDLERS_SESSION)
        elif isinstance(factory, sessionmaker):
            made = sessionmaker(class_=guarded(factory.class_), **{**factory.kw, **HANDLERS_SESSION})
        else:
            raise ConfigurationError(
                f"a worker's scoped_session must be made from a sessionmaker, not from {factory!r}"
            )
        # The sessionmaker itself takes 0.8 us more for each session.
        self._make: Callable[[], GuardedSession] = partial(cast("Any", made.class_), **made.kw)
        engine = _engine_of(made.kw.get("bind"), "sync_bind")
        assert isinstance(engine, sa.Engine)
        _check_pool_of_handlers(engine)
        self.engine = engine
        self._derived = derived
        self.used: set[GuardedSession] = set()
        """What handlers have now."""

    def open(self) -> GuardedSession:
        """A session for one attempt; in the application's scoped_session as well, if the worker was given one."""
        session = self._make()
        self.used.add(session)
        if self._scoped is not None:
            self._scoped.registry.set(session)
        return session

    def discard(self, session: GuardedSession) -> None:
        """Roll back what is not committed and give the connection back. To be called in a ``finally`` block."""
        if self._scoped is not None:
            self._scoped.registry.clear()
        try:
            if not session.end_unused():
                _discard(session, sys.exception())
        finally:
            self.used.discard(session)

    def close(self) -> None:
        """Close the connections of an engine that was made here."""
        if self._derived:
            self.engine.dispose()


class AsyncSessions:
    """Makes guarded sessions for async handlers, on an engine of the worker's own.

    A pooled connection belongs to the event loop that it was made on, and the worker has its own loop: so the
    application's engine cannot be shared. The copy makes its connections as the application's does, and has its
    listeners.
    """

    def __init__(self, bind: AsyncEngine | async_sessionmaker[Any] | async_scoped_session[Any]) -> None:
        factory = bind.session_factory if isinstance(bind, async_scoped_session) else bind
        if isinstance(factory, AsyncEngine):
            factory = async_sessionmaker(factory)
        keywords = {**factory.kw, **HANDLERS_SESSION}
        source = _engine_of(keywords.pop("bind", None), "async_bind")
        assert isinstance(source, AsyncEngine)
        _check_pool_of_handlers(source.sync_engine)
        self.engine = _copy(source)
        plain = keywords.pop("sync_session_class", None) or factory.class_.sync_session_class
        made = async_sessionmaker(self.engine, class_=factory.class_, sync_session_class=guarded(plain), **keywords)
        self._make: Callable[[], AsyncSession] = partial(cast("Any", made.class_), **made.kw)
        self._scoped = bind if isinstance(bind, async_scoped_session) else None
        self.used: set[GuardedSession] = set()
        """What handlers have now."""

    def open(self) -> AsyncSession:
        session = self._make()
        self.used.add(cast("GuardedSession", session.sync_session))
        if self._scoped is not None:
            self._scoped.registry.set(session)
        return session

    async def discard(self, session: AsyncSession) -> None:
        """Roll back what is not committed and give the connection back. To be called in a ``finally`` block."""
        error = sys.exception()
        if self._scoped is not None:
            self._scoped.registry.clear()
        sync_session = cast("GuardedSession", session.sync_session)
        if sync_session.end_unused():
            self.used.discard(sync_session)
            return
        # A cancellation at this moment, since the lease is lost say, must not lose the connection.
        discarding = asyncio.create_task(session.run_sync(_discard, error))
        discarding.add_done_callback(lambda task: self._discarded(session, task))
        await asyncio.shield(discarding)

    def _discarded(self, session: AsyncSession, task: asyncio.Task[None]) -> None:
        self.used.discard(cast("GuardedSession", session.sync_session))
        if not task.cancelled():
            task.exception()  # nobody waits for it any more if the handler's task was cancelled: asyncio would log it

    async def close(self) -> None:
        """Close the engine's connections."""
        await self.engine.dispose()


class _Copy(sa.Engine):
    """An engine whose listeners are another's: those of the class Engine are among them, and not to be called twice."""

    _sa_propagate_class_events = False


def _copy(source: AsyncEngine) -> AsyncEngine:
    """The same engine with a pool of its own."""
    sync = source.sync_engine
    engine = _Copy(
        sync.pool.recreate(),
        sync.dialect,
        sync.url,
        echo=sync.echo,
        hide_parameters=sync.hide_parameters,
        execution_options=dict(sync.get_execution_options()),
    )
    target = cast("Any", engine)
    target.dispatch = target.dispatch._join(cast("Any", sync).dispatch)
    return AsyncEngine(engine)


def _discard(session: Session, error: BaseException | None) -> None:
    """End a session after its attempt, which this error has ended.

    Whatever the handler has made of its connections: none goes back to the pool in a transaction.
    """
    guard = cast("GuardedSession", session).guard
    if guard is not None:
        guard.ours = True
    try:
        if guard is not None and error is not None:
            _drop_read_only(session, guard, error)
            _roll_back(guard)
        session.close()
    except BaseException:
        with suppress(Exception):
            session.invalidate()
        if guard is not None:
            _let_go(guard)
        if error is None:
            raise
    finally:
        if guard is not None:
            guard.forget()


def _let_go(guard: Guard) -> None:
    """Give up what a session holds on to that could not be closed."""
    for connection, _ in guard.roots:
        with suppress(Exception):
            if not connection.closed and not connection.invalidated:
                connection.invalidate()
        with suppress(Exception):
            connection.close()


def _roll_back(guard: Guard) -> None:
    """Roll back what SQLAlchemy takes to be over, and gives back as it is: a listener has refused its commit."""
    for connection, _ in guard.roots:
        if connection.closed or connection.invalidated:
            continue
        root = connection.get_transaction()
        is_open = not is_transaction_over(connection.connection.driver_connection)
        if root is not None and not root.is_active and is_open:
            connection.dialect.do_rollback(connection.connection)


def _drop_read_only(session: Session, guard: Guard, error: BaseException) -> None:
    """Have a pool forget its connections to a server that cannot be written to."""
    if is_read_only(error):
        # The pool would give it to the next handler, and so on for as long as the process lives; and its others too,
        # so it drops them, as SQLAlchemy has it do when a connection turns out to be lost.
        for connection, _ in guard.roots:
            if not connection.closed and not connection.invalidated:
                cast("Any", connection.engine.pool)._invalidate(connection.connection, error)
        session.invalidate()
        if isinstance(error, sa.exc.DBAPIError):
            error.connection_invalidated = True


def check_binds(bind: Bind, sync_bind: Bind | None, async_bind: Bind | None) -> None:
    """Refuse what a worker cannot be bound to.

    :raises ConfigurationError: one of them is of the wrong type, has no engine, or is for another database.
    """
    if not (sync_bind is None or isinstance(sync_bind, (sa.Engine, sessionmaker, scoped_session))):
        raise ConfigurationError(f"sync_bind= takes an Engine, sessionmaker or scoped_session, not {sync_bind!r}")
    if not (async_bind is None or isinstance(async_bind, (AsyncEngine, async_sessionmaker, async_scoped_session))):
        raise ConfigurationError(
            f"async_bind= takes an AsyncEngine, async_sessionmaker or async_scoped_session, not {async_bind!r}"
        )
    for given in (bind, sync_bind, async_bind):
        if given is not None and (engine := engine_of(given)).dialect.name != "postgresql":
            raise ConfigurationError(
                f"enlist works on PostgreSQL only; the engine of {shown_url(engine.url)} is for another"
            )


def sync_sessions(bind: Bind, sync_bind: Bind | None, slots: int) -> SyncSessions:
    """Sessions for plain handlers from ``sync_bind``, else from ``bind``, else on an engine derived from its URL."""
    for given in (sync_bind, bind):
        if isinstance(given, (sa.Engine, sessionmaker, scoped_session)):
            return SyncSessions(given)
    source = engine_of(bind)
    url, arguments = derivable(source, "sync_bind")
    options = handler_options(source)
    return SyncSessions(sa.create_engine(url, connect_args=arguments, pool_size=slots, **options), derived=True)


def async_sessions(bind: Bind, async_bind: Bind | None, slots: int) -> AsyncSessions:
    """Sessions for async handlers from ``async_bind``, else from ``bind``, else on an engine derived from its URL."""
    for given in (async_bind, bind):
        if isinstance(given, (AsyncEngine, async_sessionmaker, async_scoped_session)):
            return AsyncSessions(given)
    source = engine_of(bind)
    url, arguments = derivable(source, "async_bind")
    options = handler_options(source)
    return AsyncSessions(create_async_engine(url, connect_args=arguments, pool_size=slots, **options))


def housekeeping_engine(bind: Bind, sync_bind: Bind | None, keyword: str = "sync_bind") -> sa.Engine:
    """An engine for the worker's own statements, with connections apart from those that handlers use.

    From a psycopg engine it takes over how connections are made (arguments, ``creator``, listeners); else it is
    derived from the URL. Statements are sent unprepared: no session state, so PgBouncer may share the connections,
    and no plan is kept that was made while the table was empty.
    """
    source = engine_of(bind if sync_bind is None else sync_bind)
    if isinstance(source, sa.Engine) and source.dialect.driver == "psycopg" and not source.dialect.is_async:
        url, old = source.url, cast("Any", source.pool)
        make = old._invoke_creator if has_creator(old) else creator_of(source)
        listeners: dict[str, Any] = {"_dispatch": old.dispatch}
    else:
        url, arguments = derivable(source, keyword)
        old = cast("Any", sa.create_engine(url, connect_args=arguments, poolclass=sa.NullPool).pool)
        make, listeners = old._creator, {}
    pool = sa.QueuePool(
        Connecting(make),
        pool_size=HOUSEKEEPING_CONNECTIONS,
        max_overflow=HOUSEKEEPING_CONNECTIONS,
        timeout=CHECKOUT_SECONDS,
        **listeners,
    )
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT", pool=pool)
    if listeners and has_creator(old):
        event.listen(engine, "close", _restore_connection)
        event.listen(engine, "close_detached", _restore_connection)
    event.listen(engine, "connect", set_up)
    drop_read_only(engine)
    tables = source.get_execution_options().get("schema_translate_map")
    return engine if tables is None else engine.execution_options(schema_translate_map=tables)


def engine_of(bind: Bind) -> sa.Engine | AsyncEngine:
    """The engine behind whatever a worker was given.

    :raises ConfigurationError: there is none.
    """
    if isinstance(bind, (sa.Engine, AsyncEngine)):
        return bind
    if isinstance(bind, (scoped_session, async_scoped_session)):
        factory: Any = bind.session_factory
        if not isinstance(factory, (sessionmaker, async_sessionmaker)):
            raise ConfigurationError(
                f"a worker's scoped_session must be made from a sessionmaker, not from {factory!r}"
            )
    elif isinstance(bind, (sessionmaker, async_sessionmaker)):
        factory = bind
    else:
        raise ConfigurationError(
            "a worker is bound to an Engine, AsyncEngine, sessionmaker, async_sessionmaker or scoped_session,"
            f" not to {bind!r}"
        )
    return _engine_of(getattr(factory, "kw", {}).get("bind"), "bind")


def _engine_of(bind: Any, keyword: str) -> sa.Engine | AsyncEngine:
    if not isinstance(bind, (sa.Engine, AsyncEngine)):
        raise ConfigurationError(
            f"the sessionmaker given as {keyword}= is bound to {bind!r}; a worker needs one that is bound to an"
            " engine: sessionmaker(engine)"
        )
    return bind


def _check_pool_of_handlers(engine: sa.Engine) -> None:
    """Refuse a pool that gives a connection to several threads: one handler's commit would be another's as well."""
    if isinstance(engine.pool, (sa.StaticPool, sa.SingletonThreadPool)):
        raise ConfigurationError(
            f"the engine of {shown_url(engine.url)} has a {type(engine.pool).__name__}, which does not give each"
            " handler a connection of its own: use the default pool, or a NullPool"
        )


def _restore_connection(connection: Any, _record: object = None) -> None:
    """Undo what was set up: a ``creator`` may hand out connections of a pool, to which closing gives them back."""
    with contextlib.suppress(psycopg.Error):  # broken: then nobody gets it
        connection.execute("UNLISTEN *")
        connection.autocommit = False
        connection.prepare_threshold = PREPARE_THRESHOLD
