"""From what a worker is given to what it needs: handler sessions of both kinds, and connections of its own."""

from __future__ import annotations

import asyncio
import contextlib
import sys
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

from enlist._connecting import CONNECTING, Connecting, drop_read_only, set_up
from enlist._driver import is_read_only, shown_url
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

CHECKOUT_SECONDS: Final = 5.0
"""How long a loop waits for one of them. There is one for each, so somebody holds on to more than his own."""

PREPARE_THRESHOLD: Final = 5
"""psycopg's default."""

ASYNCPGS_CACHES: Final = ("prepared_statement_cache_size", "statement_cache_size")

ASYNCPG_ONLY: Final = frozenset(
    {
        *ASYNCPGS_CACHES,
        "command_timeout",
        "max_cacheable_statement_size",
        "max_cached_statement_lifetime",
        "prepared_statement_name_func",
        "timeout",
    }
)
"""What asyncpg and its dialect are told of how they work: a psycopg connection to the same database needs none."""


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
        self.used: set[GuardedSession] = set()
        """What handlers have now."""

    @contextmanager
    def __call__(self) -> Iterator[GuardedSession]:
        """A session for one attempt; in the application's scoped_session as well, if the worker was given one."""
        session = self._factory()
        self.used.add(session)
        if self._scoped is not None:
            self._scoped.registry.set(session)
        try:
            yield session
        finally:
            if self._scoped is not None:
                self._scoped.registry.clear()
            try:
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
        self._factory = async_sessionmaker(
            self.engine, class_=factory.class_, sync_session_class=guarded(plain), **keywords
        )
        self._scoped = bind if isinstance(bind, async_scoped_session) else None
        self.used: set[GuardedSession] = set()
        """What handlers have now."""

    def open(self) -> AsyncSession:
        session: AsyncSession = self._factory()
        self.used.add(cast("GuardedSession", session.sync_session))
        if self._scoped is not None:
            self._scoped.registry.set(session)
        return session

    async def discard(self, session: AsyncSession) -> None:
        """Roll back what is not committed and give the connection back. To be called in a ``finally`` block."""
        error = sys.exception()
        if self._scoped is not None:
            self._scoped.registry.clear()
        # A cancellation at this moment, since the lease is lost say, must not lose the connection.
        discarding = asyncio.create_task(session.run_sync(_discard, error))
        discarding.add_done_callback(lambda _: self.used.discard(cast("GuardedSession", session.sync_session)))
        await asyncio.shield(discarding)

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


def _discard(session: Session, error: BaseException | None) -> None:
    """End a session after its attempt, which this error has ended."""
    guard = cast("GuardedSession", session).guard
    if guard is not None:
        guard.ours = True
    if error is not None and is_read_only(error):
        # The pool would give it to the next handler, and so on for as long as the process lives.
        session.invalidate()
        if isinstance(error, sa.exc.DBAPIError):
            error.connection_invalidated = True
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


def housekeeping_engine(bind: Bind, sync_bind: Bind | None, keyword: str = "sync_bind") -> sa.Engine:
    """An engine for the worker's own statements, with connections apart from those that handlers use.

    From a psycopg engine it takes over how connections are made (arguments, ``creator``, listeners); else it is
    derived from the URL. Statements are sent unprepared: no session state, so PgBouncer may share the connections,
    and no plan is kept that was made while the table was empty.
    """
    source = engine_of(bind if sync_bind is None else sync_bind)
    if isinstance(source, sa.Engine) and source.dialect.driver == "psycopg" and not source.dialect.is_async:
        url, old = source.url, cast("Any", source.pool)
        make = old._invoke_creator if _has_creator(old) else _sqlalchemys_creator(source)
        listeners: dict[str, Any] = {"_dispatch": old.dispatch}
    else:
        url, arguments = _derivable(source, keyword)
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
    if listeners and _has_creator(old):
        event.listen(engine, "close", _restore_connection)
        event.listen(engine, "close_detached", _restore_connection)
    event.listen(engine, "connect", set_up)
    drop_read_only(engine)
    tables = source.get_execution_options().get("schema_translate_map")
    return engine if tables is None else engine.execution_options(schema_translate_map=tables)


def _sqlalchemys_creator(source: sa.Engine) -> Callable[[Any], Any]:
    """Make connections as the engine does, its listeners too, but give up a server that does not answer."""
    given = _closure(cast("Any", source.pool)._creator)["cparams"]
    dialect = cast("Any", source.dialect)

    def make(record: Any) -> Any:
        positional, _ = dialect.create_connect_args(source.url)
        # A copy each time: a listener may put the password of the hour into it.
        arguments = {**_unless_given(source.url), **given}
        for listener in dialect.dispatch.do_connect:
            if (made := listener(dialect, record, positional, arguments)) is not None:
                return made
        return dialect.connect(*positional, **arguments)

    return make


def _unless_given(url: sa.URL) -> dict[str, Any]:
    """How long connecting and a silent server are put up with, where the URL does not say."""
    return {name: value for name, value in CONNECTING.items() if name not in url.query}


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
    url = sync.url
    lost = []
    if _has_creator(pool):
        lost.append("its creator")
    else:
        # What create_engine() was given as connect_args is kept nowhere else.
        given = _closure(pool._creator).get("cparams", {})
        _, from_url = sync.dialect.create_connect_args(url)
        arguments = {name: value for name, value in given.items() if name not in from_url}
    derived = _unless_given(url)
    if sync.dialect.driver == "asyncpg":
        sizes = [{**url.query, **arguments}.get(name) for name in ASYNCPGS_CACHES]
        if "0" in map(str, sizes):  # as behind a pooler, where a prepared statement may be on another connection
            derived["prepare_threshold"] = None
        arguments = {name: value for name, value in arguments.items() if name not in ASYNCPG_ONLY}
        url = url.difference_update_query(ASYNCPG_ONLY)
    if not psycopg:
        lost += [f"connect_args[{name!r}]" for name in arguments]
        lost += [f"the URL's {name}" for name in url.query if name not in {"host", "port", "user", "database"}]
    listeners = [*cast("Any", sync.dialect).dispatch.do_connect, *pool.dispatch.connect]
    lost += [f"its listener {function!r}" for function in listeners if not _is_sqlalchemys(function)]
    if lost:
        raise ConfigurationError(
            f"the engine of {shown_url(sync.url)} is more than its URL ({', '.join(lost)}), so no psycopg engine can be"
            f" derived from it: give the worker one as {keyword}="
        )
    return url.set(drivername=DRIVER), derived | arguments


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


def _restore_connection(connection: Any, _record: object = None) -> None:
    """Undo what was set up: a ``creator`` may hand out connections of a pool, to which closing gives them back."""
    with contextlib.suppress(psycopg.Error):  # broken: then nobody gets it
        connection.execute("UNLISTEN *")
        connection.autocommit = False
        connection.prepare_threshold = PREPARE_THRESHOLD
