"""Every kind of session, set up from the settings of a cell: see tests/test_session_matrix.py."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, LiteralString, cast

import sqlalchemy as sa
from psycopg import sql
from sqlalchemy import event
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncEngine,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import DeclarativeBase, Session, scoped_session, sessionmaker
from sqlalchemy.util import await_only, greenlet_spawn

from enlist import JobHandle, JobRecord, JobRecordMixin, JobRepository, notifier
from enlist._statements import statements_for
from tests.shop import Base, Order
from tests.support.databases import Databases
from tests.support.leaks import open_connections
from tests.support.matrix import Cell
from tests.support.observer import Observer

LEVELS = ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")


class TenantBase(DeclarativeBase):
    pass


class TenantJob(JobRecordMixin, TenantBase):
    """Jobs in a schema that only a ``schema_translate_map`` makes a real one."""

    __tablename__ = "enlist_job"
    __table_args__ = {"schema": "jobs"}


class RoutingSession(Session):
    """Reads go to a replica: the recipe of SQLAlchemy's documentation."""

    def __init__(self, *, writer: sa.Engine | sa.Connection, reader: sa.Engine, **options: Any) -> None:
        super().__init__(**options)
        self._writer = writer
        self._reader = reader

    def get_bind(self, mapper: Any = None, *, clause: Any = None, **rest: Any) -> sa.Engine | sa.Connection:
        return self._writer if self._flushing or isinstance(clause, sa.UpdateBase) else self._reader


def channel_of(record: type[JobRecordMixin]) -> str:
    return statements_for(cast("sa.Table", sa.inspect(record).local_table)).channel


class World:
    """What the cells share: a database for each default isolation level, engines, an event loop, and those who watch.

    Making these anew takes longer than a cell.
    """

    def __init__(self, server: Databases) -> None:
        self._server = server
        self._names = {level: server.clone() for level in LEVELS}
        self._engines: dict[tuple[str, ...], sa.Engine] = {}
        self._held: dict[sa.Pool, int] = {}
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._observers = {level: Observer(server.url(name)) for level, name in self._names.items()}
        self._listeners = {level: Observer(server.url(name)) for level, name in self._names.items()}
        for level, name in self._names.items():
            statement = "ALTER DATABASE {} SET default_transaction_isolation = {}"
            server.admin.execute(sql.SQL(statement).format(sql.Identifier(name), sql.Literal(level.lower())))
            _create_tenant(server.url(name))
            for record in (JobRecord, TenantJob):
                self._listeners[level].listen(channel_of(record))

    def close(self) -> list[str]:
        """Close everything; return the connections that are left."""
        notifier.close_all()
        for engine in self._engines.values():
            self.run(engine, engine.dispose)
        self._runner.close()
        for observer in [*self._observers.values(), *self._listeners.values()]:
            observer.connection.close()
        leaks = [leak for name in self._names.values() for leak in open_connections(self._server.admin, name)]
        for name in self._names.values():
            self._server.drop(name)
        return leaks

    def run(self, engine: sa.Engine, function: Callable[[], object]) -> None:
        """Call a function where the engine's driver can wait: that of an AsyncEngine in the event loop."""
        if engine.dialect.is_async:
            self._runner.run(greenlet_spawn(function))
        else:
            function()

    def url(self, driver: str, level: str) -> sa.URL:
        return self._server.url(self._names[level], driver=driver.removesuffix("_async"))

    def engine(self, driver: str, level: str, pool: str = "QueuePool", use: str = "", **options: Any) -> sa.Engine:
        """The engine for a use of the database that has this default level; the one of an AsyncEngine is its sync."""
        key = (driver, level, pool, use, repr(options))
        if key not in self._engines:
            if pool != "QueuePool":  # the default, which for an AsyncEngine is a class of its own
                options["poolclass"] = getattr(sa.pool, pool)
            url = self.url(driver, level)
            if driver == "psycopg":
                engine = sa.create_engine(url, **options)
            else:
                engine = create_async_engine(url, **options).sync_engine
            self._engines[key] = engine
            self._held[engine.pool] = 0
            event.listen(engine, "checkout", lambda *_: self._count(engine, 1))
            event.listen(engine, "checkin", lambda *_: self._count(engine, -1))
        return self._engines[key]

    def _count(self, engine: sa.Engine, change: int) -> None:
        self._held[engine.pool] += change

    def held(self, engine: sa.Engine) -> int:
        """How many connections of an engine are checked out, whatever its pool."""
        return self._held[engine.pool]

    def reader(self, driver: str, level: str) -> sa.Engine:
        """An engine whose transactions cannot write."""
        arguments = (
            {"server_settings": {"default_transaction_read_only": "on"}}
            if driver == "asyncpg"
            else {"options": "-c default_transaction_read_only=on"}
        )
        return self.engine(driver, level, use="reader", connect_args=arguments)

    def heard(self, level: str) -> list[str]:
        """The queues that workers were woken for since the last call."""
        notifier.close_all()  # it has sent everything when this returns
        last = str(uuid.uuid4())
        self._observers[level].execute("SELECT pg_notify(%s, %s)", channel_of(JobRecord), last)
        found: set[str] = set()
        for notification in self._listeners[level].connection.notifies(timeout=5):
            if notification.payload == last:
                return sorted(found)
            found.add(notification.payload)  # a queue may be named more than once: it had more than one flush
        raise AssertionError("not even the test's own notification came")

    def committed(self, level: str, schema: str, statement: LiteralString, parameter: object) -> list[Any]:
        """The first column of what another connection sees, with the name of the schema put in."""
        query = sql.SQL(statement).format(schema=sql.Identifier(schema))
        return [value for (value,) in self._observers[level].connection.execute(query, (parameter,))]


def _create_tenant(url: sa.URL) -> None:
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.execute(sa.schema.CreateSchema("tenant"))
        connection.execution_options(schema_translate_map={None: "tenant"})
        JobRecord.metadata.create_all(connection)
        Base.metadata.create_all(connection)


class Setup:
    """The engine, the tables and the Session of a cell."""

    def __init__(self, world: World, cell: Cell) -> None:
        self.world = world
        self.cell = cell
        self.bound_to, _, mode = cell["join"].partition(" with ")
        self.mode = mode or "conditional_savepoint"
        self.level, _, self.level_by = cell["isolation"].partition(" by ")
        source, _, translated_by = cell["schema"].partition(" to tenant by ")
        self.record: type[JobRecordMixin] = TenantJob if source == "jobs" else JobRecord
        self._schemas = {
            "untranslated": ("public", "public"),
            "None": ("tenant", "tenant"),
            "jobs": ("public", "tenant"),
        }[source]
        self._database = self.level if self.level_by == "database" else "READ COMMITTED"
        self.repo = JobRepository(self.record, notify=cast("Any", cell["notify"]))
        self.ref = str(uuid.uuid4())

        level: dict[str, Any] = {"isolation_level": self.level}
        translated: dict[str, Any] = {"schema_translate_map": {None if source == "None" else source: "tenant"}}
        created = level if self.level_by == "create_engine" else {}
        if cell["binds"] == "future":
            created = {**created, "future": True}
        # An engine for each map: SQLAlchemy's cached statements remember the keys of the engine's first.
        self.base = world.engine(cell["driver"], self._database, cell["pool"], use=source, **created)
        self.reader = world.reader(cell["driver"], self._database)
        self.engine = self.base.execution_options(
            **(level if self.level_by == "engine option" else {}), **(translated if translated_by == "engine" else {})
        )
        self._connection_options = {
            **(level if self.level_by == "connection option" else {}),
            **(translated if translated_by == "connection" else {}),
        }

    @contextmanager
    def bound(self) -> Iterator[tuple[sa.Engine | sa.Connection, sa.Transaction | None, sa.Transaction | None]]:
        """What the session is bound to, and the transaction and savepoint that it finds there, with an order each."""
        if self.bound_to == "an engine":
            yield self.engine, None, None
            return
        with self.engine.connect().execution_options(**self._connection_options) as connection:
            outer: sa.Transaction | None = None
            savepoint: sa.Transaction | None = None
            if self.bound_to != "a connection":
                outer = connection.begin()
                connection.execute(sa.insert(Order).values(ref=f"{self.ref} outer", total=0))
            if self.bound_to == "a savepoint":
                savepoint = connection.begin_nested()
                connection.execute(sa.insert(Order).values(ref=f"{self.ref} savepoint", total=0))
            yield connection, outer, savepoint

    @contextmanager
    def session(self, bind: sa.Engine | sa.Connection, **more: Any) -> Iterator[tuple[Session, Any]]:
        """The Session, and what its application has in hand."""
        cell, is_async = self.cell, self.base.dialect.is_async
        options: dict[str, Any] = {
            "join_transaction_mode": self.mode,
            "twophase": cell["phases"] == "two-phase",
            "autoflush": cell["autoflush"] != "autoflush=False",
            "expire_on_commit": cell["expiry"] == "expire_on_commit",
            "autobegin": cell["begin"] == "autobegin",
            **more,
        }
        if cell["binds"] == "future":
            options["future"] = True
        if cell["session"] == "routing":
            options["sync_session_class" if is_async else "class_"] = RoutingSession
            options |= {"writer": bind, "reader": self.reader}
        elif cell["binds"] == "binds":
            base = next(base for base in self.record.__mro__ if DeclarativeBase in base.__bases__)
            options["binds"] = {Base: _shown(bind), base: _shown(bind)}
        else:
            options["bind"] = _shown(bind)
        made: Any = async_sessionmaker(**options) if is_async else sessionmaker(**options)
        scoped = cell["session"] == "scoped"
        given: Any
        if not scoped:
            given = made()
        elif is_async:
            given = async_scoped_session(made, scopefunc=asyncio.current_task)
        else:
            given = scoped_session(made)
        session = given() if scoped else given
        try:
            yield session.sync_session if is_async else session, given
        finally:
            closing = given.remove() if scoped else given.close()
            if is_async:
                await_only(closing)

    def begin(self, session: Session, bind: sa.Engine | sa.Connection) -> None:
        """Begin as the session's settings ask for, and set its connection's options."""
        if self.cell["begin"] == "autobegin=False":
            session.begin()
        if self._connection_options and isinstance(bind, sa.Engine):
            session.connection(bind_arguments={"bind": bind}, execution_options=self._connection_options)

    def orders(self) -> set[str]:
        """The orders of this cell that are committed: "outer", "savepoint", and "" for the session's own."""
        statement: LiteralString = "SELECT ref FROM {schema}.shop_order WHERE starts_with(ref, %s)"
        refs = self.world.committed(self._database, self._schemas[0], statement, self.ref)
        return {ref.removeprefix(self.ref).strip() for ref in refs}

    def jobs(self, handles: Sequence[JobHandle]) -> list[JobHandle]:
        """Those of the jobs that are committed."""
        statement: LiteralString = "SELECT id FROM {schema}.enlist_job WHERE id = ANY(%s)"
        ids = [handle.id for handle in handles]
        found = self.world.committed(self._database, self._schemas[1], statement, ids)
        return [handle for handle in handles if handle.id in found]

    def transactions(self, handles: Sequence[JobHandle]) -> list[str]:
        """By which transaction the session's order and its jobs were written."""
        order: LiteralString = "SELECT xmin::text FROM {schema}.shop_order WHERE ref = %s"
        jobs: LiteralString = "SELECT xmin::text FROM {schema}.enlist_job WHERE id = ANY(%s)"
        order_schema, job_schema = self._schemas
        return [
            *self.world.committed(self._database, order_schema, order, self.ref),
            *self.world.committed(self._database, job_schema, jobs, [handle.id for handle in handles]),
        ]

    def heard(self) -> list[str]:
        """The queues that workers were woken for since the last call."""
        return self.world.heard(self._database)


def _shown(bind: sa.Engine | sa.Connection) -> Any:
    """The bind as its application knows it."""
    if not bind.dialect.is_async:
        return bind
    engine = AsyncEngine(bind.engine)
    return engine if isinstance(bind, sa.Engine) else AsyncConnection(engine, bind)
