"""From what a worker is given to what it needs: handler sessions of both kinds, and connections of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

from enlist._driver import shown_url
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

DRIVER: Final = "postgresql+psycopg"

HOUSEKEEPING_CONNECTIONS: Final = 5
"""Claim, complete, heartbeat, reaper and the start of a careful job, at once."""

HANDLERS_SESSION: Final[dict[str, Any]] = {"autobegin": True, "close_resets_only": False}
"""It begins by itself, at its first use: a handler may not call begin(). After the attempt it cannot be used again."""

PREPARE_THRESHOLD: Final = 5
"""psycopg's default."""

KEEPALIVE: Final = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}
"""Seconds, seconds, probes, milliseconds: a connection whose other end has vanished is noticed within half a minute."""


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
        self._factory = made
        engine = _engine_of(made.kw.get("bind"), "sync_bind")
        assert isinstance(engine, sa.Engine)
        _check_pool_of_handlers(engine)
        self.engine = engine
        self._derived = derived

    @contextmanager
    def __call__(self) -> Iterator[GuardedSession]:
        """A session for one attempt; in the application's scoped_session as well, if the worker was given one."""
        session = self._factory()
        if self._scoped is not None:
            self._scoped.registry.set(session)
        try:
            yield session
        finally:
            if self._scoped is not None:
                self._scoped.registry.clear()
            _discard(session)

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
        self._factory = async_sessionmaker(
            self.engine, class_=factory.class_, sync_session_class=guarded(plain), **keywords
        )
        self._scoped = bind if isinstance(bind, async_scoped_session) else None

    def open(self) -> AsyncSession:
        session: AsyncSession = self._factory()
        if self._scoped is not None:
            self._scoped.registry.set(session)
        return session

    async def discard(self, session: AsyncSession) -> None:
        """Roll back what is not committed and give the connection back."""
        if self._scoped is not None:
            self._scoped.registry.clear()
        # A cancellation at this moment, since the lease is lost say, must not lose the connection.
        await asyncio.shield(asyncio.create_task(session.run_sync(_discard)))

    async def close(self) -> None:
        """Close the engine's connections."""
        await self.engine.dispose()


def _copy(source: AsyncEngine) -> AsyncEngine:
    """The same engine with a pool of its own."""
    sync = source.sync_engine
    engine = sa.Engine(
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


def _discard(session: Session) -> None:
    guard = cast("GuardedSession", session).guard
    if guard is not None:
        guard.ours = True
    session.close()


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
    url, arguments = _derivable(source, "sync_bind")
    options = _handler_options(source)
    return SyncSessions(sa.create_engine(url, connect_args=arguments, pool_size=slots, **options), derived=True)


def async_sessions(bind: Bind, async_bind: Bind | None, slots: int) -> AsyncSessions:
    """Sessions for async handlers from ``async_bind``, else from ``bind``, else on an engine derived from its URL."""
    for given in (async_bind, bind):
        if isinstance(given, (AsyncEngine, async_sessionmaker, async_scoped_session)):
            return AsyncSessions(given)
    source = engine_of(bind)
    url, arguments = _derivable(source, "async_bind")
    options = _handler_options(source)
    return AsyncSessions(create_async_engine(url, connect_args=arguments, pool_size=slots, **options))


def housekeeping_engine(bind: Bind, sync_bind: Bind | None) -> sa.Engine:
    """An engine for the worker's own statements, with connections apart from those that handlers use.

    From a psycopg engine it takes over how connections are made (arguments, ``creator``, listeners); else it is
    derived from the URL. Statements are sent unprepared: no session state, so PgBouncer may share the connections,
    and no plan is kept that was made while the table was empty.
    """
    source = engine_of(bind if sync_bind is None else sync_bind)
    if isinstance(source, sa.Engine) and source.dialect.driver == "psycopg" and not source.dialect.is_async:
        old = cast("Any", source.pool)
        pool = sa.QueuePool(old._creator, pool_size=HOUSEKEEPING_CONNECTIONS, max_overflow=5, _dispatch=old.dispatch)
        engine = sa.create_engine(source.url, isolation_level="AUTOCOMMIT", pool=pool)
        if _has_creator(old):
            event.listen(engine, "close", _restore_connection)
            event.listen(engine, "close_detached", _restore_connection)
    else:
        url, arguments = _derivable(source, "sync_bind")
        engine = sa.create_engine(
            url, connect_args=arguments, isolation_level="AUTOCOMMIT", pool_size=HOUSEKEEPING_CONNECTIONS
        )
    event.listen(engine, "connect", _set_up_connection)
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


def _handler_options(engine: sa.Engine | AsyncEngine) -> dict[str, Any]:
    """What a derived engine for handlers takes over: their transactions are the same in both worlds."""
    sync = engine.sync_engine if isinstance(engine, AsyncEngine) else engine
    options: dict[str, Any] = {"execution_options": dict(sync.get_execution_options())}
    level = cast("Any", sync.dialect)._on_connect_isolation_level
    if level is not None:
        options["isolation_level"] = level
    return options


def _derivable(engine: sa.Engine | AsyncEngine, keyword: str) -> tuple[sa.URL, dict[str, Any]]:
    """The engine's URL and arguments for psycopg; refused where more than these says how its connections are made."""
    sync = engine.sync_engine if isinstance(engine, AsyncEngine) else engine
    pool = cast("Any", sync.pool)
    psycopg = sync.dialect.driver in {"psycopg", "psycopg_async"}
    arguments: dict[str, Any] = {}
    lost = []
    if _has_creator(pool):
        lost.append("its creator")
    else:
        # What create_engine() was given as connect_args is kept nowhere else.
        given = _closure(pool._creator).get("cparams", {})
        _, from_url = sync.dialect.create_connect_args(sync.url)
        arguments = {name: value for name, value in given.items() if name not in from_url}
        if not psycopg:
            lost += [f"connect_args[{name!r}]" for name in arguments]
    if not psycopg:
        lost += [f"the URL's {name}" for name in sync.url.query if name not in {"host", "port", "user", "database"}]
    listeners = [*cast("Any", sync.dialect).dispatch.do_connect, *pool.dispatch.connect]
    lost += [f"its listener {function!r}" for function in listeners if not _is_sqlalchemys(function)]
    if lost:
        raise ConfigurationError(
            f"the engine of {shown_url(sync.url)} is more than its URL ({', '.join(lost)}), so no psycopg engine can be"
            f" derived from it: give the worker one as {keyword}="
        )
    return sync.url.set(drivername=DRIVER), arguments


def _has_creator(pool: Any) -> bool:
    """Whether the application makes the connections, ``create_engine(creator=...)``."""
    return getattr(pool._creator, "__module__", None) != "sqlalchemy.engine.create"


def _is_sqlalchemys(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("sqlalchemy.")


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    names = function.__code__.co_freevars
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def _check_pool_of_handlers(engine: sa.Engine) -> None:
    """Refuse a pool that gives a connection to several threads: one handler's commit would be another's as well."""
    if isinstance(engine.pool, (sa.StaticPool, sa.SingletonThreadPool)):
        raise ConfigurationError(
            f"the engine of {shown_url(engine.url)} has a {type(engine.pool).__name__}, which does not give each"
            " handler a connection of its own: use the default pool, or a NullPool"
        )


def _set_up_connection(connection: Any, _record: object) -> None:
    connection.prepare_threshold = None
    with socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
        if duplicate.family in (socket.AF_INET, socket.AF_INET6):
            duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEPALIVE.items():
                if hasattr(socket, name):
                    duplicate.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _restore_connection(connection: Any, _record: object = None) -> None:
    """Undo what was set up: a ``creator`` may hand out connections of a pool, to which closing gives them back."""
    with contextlib.suppress(psycopg.Error):  # broken: then nobody gets it
        connection.execute("UNLISTEN *")
        connection.autocommit = False
        connection.prepare_threshold = PREPARE_THRESHOLD
