"""A server that is away, read-only, full or locked, and pools that are too small: the worker comes back by itself."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
import tenacity
from psycopg import sql
from sqlalchemy import URL, create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from enlist import HandlerRegistry, Job, Worker
from enlist.demo.server import EmbeddedServer
from enlist.migrations import migrate
from tests.shop import Base, Effect
from tests.support import Observer, wait_until
from tests.support.databases import Databases, new_server
from tests.support.jobs import Jobs, running
from tests.support.standby import standby_of
from tests.support.tcp_proxy import TcpProxy


@pytest.fixture
def jobs(observer: Observer) -> Jobs:
    return Jobs(observer)


@pytest.fixture
def other_server() -> Iterator[EmbeddedServer]:
    with new_server() as server:
        yield server


def prepare(url: URL) -> None:
    engine = create_engine(url, poolclass=NullPool)
    with engine.begin() as connection:
        migrate(connection)
        Base.metadata.create_all(connection)


def effects() -> HandlerRegistry:
    handlers = HandlerRegistry()

    @handlers.handler("sync", wait=tenacity.wait_fixed(0.1))
    def write(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id, attempt=job.attempt))

    @handlers.handler("async", wait=tenacity.wait_fixed(0.1))
    async def write_async(session: AsyncSession, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id, attempt=job.attempt))

    return handlers


def plain() -> HandlerRegistry:
    handlers = HandlerRegistry()
    handlers.handler("sync", wait=tenacity.wait_fixed(0.1))(effects()["sync"].function)
    return handlers


# -- read-only ---------------------------------------------------------------------------------------------------


class Name:
    """Where an engine's connections go: to the old primary, which is read-only by now, or to the new one."""

    READ_ONLY: dict[str, dict[str, Any]] = {
        "psycopg": {"options": "-c default_transaction_read_only=on"},
        "asyncpg": {"server_settings": {"default_transaction_read_only": "on"}},
    }

    def __init__(self, engine: sa.Engine) -> None:
        self.is_old = True
        self._arguments = self.READ_ONLY[engine.dialect.driver.removesuffix("_async")]
        sa.event.listen(engine, "do_connect", self._connect)

    def _connect(self, _dialect: object, _record: object, _positional: object, arguments: dict[str, Any]) -> None:
        if self.is_old:
            arguments.update(self._arguments)
        else:
            for name in self._arguments:  # SQLAlchemy 2.0 hands out the same dictionary each time
                arguments.pop(name, None)


@pytest.mark.parametrize(
    "driver", ["sync", pytest.param("psycopg", marks=pytest.mark.slow), pytest.param("asyncpg", marks=pytest.mark.slow)]
)
def test_connections_to_an_old_primary_are_dropped(
    driver: str, database_url: URL, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    """The pools are full of them; they work, but for writing. New ones are made, and the jobs done in one attempt."""
    plain_engine = create_engine(database_url, pool_size=4)
    engine: Any = plain_engine
    if driver != "sync":
        engine = create_async_engine(database_url.set(drivername=f"postgresql+{driver}"), pool_size=4)
    names = [Name(plain_engine)] + ([Name(engine.sync_engine)] if driver != "sync" else [])
    opened = [plain_engine.connect() for _ in range(4)]
    for connection in opened:
        connection.close()
    kind = "sync" if driver == "sync" else "async"
    first = jobs.add(kind)
    handlers = plain() if driver == "sync" else effects()
    with running(Worker(engine, handlers, sync_bind=plain_engine, lease=10, poll_interval=0.05)):
        wait_until(lambda: "claim failed, trying again" in caplog.text)
        for name in names:
            name.is_old = False
        jobs.wait(first, timeout=10)
        more = [*jobs.add_many("sync", 8), *jobs.add_many(kind, 8)]
        jobs.wait_all()
    plain_engine.dispose()
    assert jobs.effects_by_job() == dict.fromkeys([first, *more], 1)
    assert jobs.row(first)["attempt"] == 1
    assert caplog.text.count("claim failed, trying again: InternalError / ReadOnlySqlTransaction") == 1


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_handler_that_meets_an_old_primary_runs_again(kind: str, database_url: URL, jobs: Jobs) -> None:
    """In the same attempt, and on a new connection: the pool does not give out the old one for ever."""
    engine = create_engine(database_url, pool_size=1, max_overflow=0)
    handlers_engine: Any = create_engine(database_url, pool_size=1, max_overflow=0)
    if kind == "async":
        handlers_engine = create_async_engine(database_url, pool_size=1, max_overflow=0)
    name = Name(handlers_engine.sync_engine if kind == "async" else handlers_engine)
    binds = {f"{kind}_bind": handlers_engine}
    with running(Worker(engine, effects(), queues={"default": 1}, poll_interval=0.05, **binds)):
        name.is_old = False
        ids = jobs.add_many(kind, 3)
        jobs.wait_all()
    assert {jobs.row(job_id)["attempt"] for job_id in ids} == {1}
    assert jobs.effects_by_job() == dict.fromkeys(ids, 1)
    engine.dispose()
    if kind == "sync":
        handlers_engine.dispose()


@pytest.mark.slow
def test_several_hosts_in_the_url(private_server: EmbeddedServer, other_server: EmbeddedServer) -> None:
    """The worker's own connections too go to the one that can be written to, whichever that is."""
    for server in (private_server, other_server):
        prepare(server.url())
    set_read_only(private_server, "on")
    hosts = f"{private_server.socket_directory},{other_server.socket_directory}"
    url = private_server.url().update_query_dict(
        {"host": hosts, "port": "5432,5432", "target_session_attrs": "read-write"}
    )
    engine = create_engine(url, pool_size=4)
    done: list[uuid.UUID] = []
    with running(Worker(engine, effects(), lease=3, poll_interval=0.05)):
        for server in (other_server, private_server):
            with Observer(server.url()) as observer:
                ids = Jobs(observer).add_many("sync", 5) + Jobs(observer).add_many("async", 5)
                Jobs(observer).wait_all(timeout=15)
                assert Jobs(observer).effects_by_job() == dict.fromkeys(ids, 1)
                done += ids
            set_read_only(other_server, "on")  # and the other becomes the primary
            set_read_only(private_server, "off")
    engine.dispose()
    assert len(done) == 20


def set_read_only(server: EmbeddedServer, value: str) -> None:
    with Observer(server.url()) as observer:
        statement = sql.SQL("ALTER SYSTEM SET default_transaction_read_only = {}")
        observer.connection.execute(statement.format(sql.Literal(value)))
        observer.execute("SELECT pg_reload_conf()")


@pytest.mark.slow
def test_a_switchover_to_a_standby(private_server: EmbeddedServer, caplog: pytest.LogCaptureFixture) -> None:
    """The name leads to the wrong one at first, then to the primary, then to the standby that takes its place.

    No connection is cut when the name changes. Every job is done once, with all that the old primary has committed.
    """
    primary = private_server
    prepare(primary.url())
    with standby_of(primary) as standby, TcpProxy(primary.url()) as network:
        network.lead_to(standby.url())
        with Observer(primary.url()) as observer:
            ids = Jobs(observer).add_many("sync", 300) + Jobs(observer).add_many("async", 300)
        with Observer(standby.url()) as observer:
            observer.wait_for("SELECT count(*) = 600 FROM enlist_job")
        engine = create_engine(network.url, pool_size=10)
        with running(Worker(engine, effects(), queues={"default": 4}, lease=3, poll_interval=0.05)):
            wait_until(lambda: "in a read-only transaction" in caplog.text)
            network.lead_to(primary.url())
            with Observer(primary.url()) as observer:
                observer.wait_for("SELECT count(*) > 50 FROM enlist_job WHERE status = 'done'", timeout=10)
            with Observer(standby.url()) as observer:  # nothing goes there any more
                observer.wait_for(
                    "SELECT count(*) = 0 FROM pg_stat_activity WHERE datname = current_database()"
                    " AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
                )
            primary.stop("fast")  # having sent all to the standby
            network.lead_to(standby.url())
            with Observer(standby.url()) as observer:
                observer.execute("SELECT pg_promote()")
                more = Jobs(observer).add_many("sync", 10)
                Jobs(observer).wait_all(timeout=20)
                assert Jobs(observer).effects_by_job() == dict.fromkeys([*ids, *more], 1)
        engine.dispose()


# -- away --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("driver", ["sync", "psycopg", "asyncpg"])
def test_a_host_name_that_is_gone_is_asked_for_again(
    driver: str, database_url: URL, jobs: Jobs, observer: Observer, caplog: pytest.LogCaptureFixture
) -> None:
    """While the worker runs: handlers and the worker's own connections wait until the name is back."""
    caplog.set_level(logging.INFO, "enlist")
    own = create_engine(database_url, pool_size=4)
    engine: Any = own if driver == "sync" else create_async_engine(database_url.set(drivername=f"postgresql+{driver}"))
    kind = "sync" if driver == "sync" else "async"
    gone = threading.Event()

    # What the drivers raise, without asking a resolver: psycopg wraps its error, asyncpg does not.
    no_name = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    wrapped = psycopg.OperationalError(str(no_name))

    def fail(error: Exception) -> Callable[..., None]:
        def connect(*_arguments: object) -> None:
            if gone.is_set():
                raise error

        return connect

    sa.event.listen(own, "do_connect", fail(wrapped))
    if driver != "sync":
        sa.event.listen(engine.sync_engine, "do_connect", fail(no_name if driver == "asyncpg" else wrapped))
    with running(Worker(engine, effects() if kind == "async" else plain(), sync_bind=own, poll_interval=0.05)):
        jobs.wait(jobs.add(kind))
        gone.set()
        terminate(observer)
        wait_until(lambda: "claim failed, trying again" in caplog.text)
        job_id = jobs.add(kind)
        gone.clear()
        assert jobs.wait(job_id, timeout=15)["attempt"] == 1
    own.dispose()
    assert len(jobs.effects(job_id)) == 1


def test_a_database_that_is_dropped_is_waited_for_until_its_tables_are_back(
    server: Databases, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Restored from a backup, say."""
    url = server.url(database)
    engine = create_engine(url, pool_size=4)
    with running(Worker(engine, plain(), lease=3, poll_interval=0.05)):
        with Observer(url) as observer:
            jobs = Jobs(observer)
            jobs.wait(jobs.add("sync"))
        server.drop(database)
        wait_until(lambda: "claim failed, trying again" in caplog.text)
        server.admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(database)))
        prepare(url)
        with Observer(url) as observer:
            jobs = Jobs(observer)
            assert jobs.wait(jobs.add("sync"), timeout=15)["status"] == "done"
    engine.dispose()


def terminate(observer: Observer) -> None:
    observer.execute(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )


@pytest.mark.slow
def test_a_server_that_is_down_is_asked_seldom(private_server: EmbeddedServer) -> None:
    """With jobs in the middle of their commits: at most 30 tries in 10 seconds, hardly any CPU, and back in 5."""
    url = private_server.url()
    prepare(url)
    engine = create_engine(url, pool_size=10)
    tries: list[float] = []
    sa.event.listen(engine, "do_connect", lambda *_: tries.append(time.monotonic()))
    with Observer(url) as observer:
        ids = Jobs(observer).add_many("sync", 1500)
    with running(Worker(engine, plain(), queues={"default": 6}, lease=60, poll_interval=0.1)):
        with Observer(url) as observer:
            observer.wait_for("SELECT count(*) > 50 FROM enlist_job WHERE status = 'done'")
        private_server.stop("immediate")
        began, used = time.monotonic(), time.process_time()
        wait_until(lambda: time.monotonic() - began > 10, 15)
        assert len([at for at in tries if at > began]) <= 30
        assert time.process_time() - used < 1.5  # the waiting for it above included
        private_server.start()
        with Observer(url) as observer:
            jobs = Jobs(observer)
            done = observer.scalar("SELECT count(*) FROM enlist_job WHERE status = 'done'")
            observer.wait_for("SELECT count(*) > %s FROM enlist_job WHERE status = 'done'", done, timeout=5)
            jobs.wait_all(timeout=20)
            assert jobs.effects_by_job() == dict.fromkeys(ids, 1)
            # Those that waited for a slot have lost no attempt by it.
            assert observer.scalar("SELECT count(*) FROM enlist_job WHERE attempt > 1") <= 6
    engine.dispose()


# -- full, locked ------------------------------------------------------------------------------------------------


def test_a_server_with_too_many_connections(
    database_url: URL, jobs: Jobs, observer: Observer, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once, and the worker starts when there is room."""
    caplog.set_level(logging.INFO, "enlist")
    role = f"enlist_{uuid.uuid4().hex[:8]}"
    observer.connection.execute(sql.SQL("CREATE ROLE {} LOGIN CONNECTION LIMIT 6").format(sql.Identifier(role)))
    for name in ("TABLES", "SEQUENCES"):
        grant = sql.SQL("GRANT ALL ON ALL {} IN SCHEMA public TO {}").format(sql.SQL(name), sql.Identifier(role))
        observer.connection.execute(grant)
    url = database_url.set(username=role)
    full = create_engine(url, pool_size=6)
    taken = [full.connect() for _ in range(6)]
    engine = create_engine(url, pool_size=1, max_overflow=0)
    worker = Worker(engine, plain(), queues={"default": 1}, poll_interval=0.05)
    starting = threading.Thread(target=worker.start)
    starting.start()
    wait_until(lambda: "too many connections for role" in caplog.text)
    for connection in taken:
        connection.close()
    full.dispose()
    starting.join(10)
    job_id = jobs.add("sync")
    jobs.wait(job_id)
    worker.stop()
    engine.dispose()
    assert caplog.text.count("too many connections for role") == 1
    observer.wait_for("SELECT count(*) = 0 FROM pg_stat_activity WHERE usename = %s", role)
    observer.connection.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(sql.Identifier(role)))


@pytest.mark.slow
def test_a_password_that_is_wrong(private_server: EmbeddedServer, caplog: pytest.LogCaptureFixture) -> None:
    """At the start, and after it has been changed while the worker ran: said in one line, and tried again."""
    caplog.set_level(logging.INFO, "enlist")
    prepare(private_server.url())
    rules = private_server.data_directory / "pg_hba.conf"
    rules.write_text(f"local all shop scram-sha-256\n{rules.read_text()}")
    url = private_server.url().set(username="shop", password="right")
    engine = create_engine(url, pool_size=2)
    with Observer(private_server.url()) as observer:
        observer.execute("SELECT pg_reload_conf()")
        observer.execute("CREATE ROLE shop LOGIN SUPERUSER PASSWORD 'wrong'")
        worker = Worker(engine, plain(), queues={"default": 2}, poll_interval=0.05)
        starting = threading.Thread(target=worker.start)
        starting.start()
        wait_until(lambda: "password authentication failed" in caplog.text)
        observer.execute("ALTER ROLE shop PASSWORD 'right'")
        starting.join(10)
        jobs = Jobs(observer)
        jobs.wait(jobs.add("sync"))
        assert caplog.text.count("password authentication failed") == 1
        caplog.clear()

        observer.execute("ALTER ROLE shop PASSWORD 'wrong'")
        observer.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'shop'")
        wait_until(lambda: "claim failed" in caplog.text)
        observer.execute("ALTER ROLE shop PASSWORD 'right'")
        jobs.wait(jobs.add("sync"), timeout=10)
        worker.stop()
    engine.dispose()
    assert "right" not in caplog.text


# -- pools -------------------------------------------------------------------------------------------------------


def test_a_pool_that_is_too_small_fails_handlers_and_nothing_else(
    database_url: URL, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    """A handler that gets no connection says so, and is tried again; claims, leases and endings have their own."""
    engine = create_engine(database_url, pool_size=1, max_overflow=0, pool_timeout=0.1)
    first = threading.Event()
    release = threading.Event()
    handlers = HandlerRegistry()

    @handlers.handler("holding", wait=tenacity.wait_fixed(0.1))
    def holding(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id, attempt=job.attempt))
        session.flush()
        first.set()
        assert release.wait(20)

    ids = jobs.add_many("holding", 10)
    with running(Worker(engine, handlers, lease=2, poll_interval=0.05)):
        assert first.wait(5)
        wait_until(lambda: caplog.text.count("QueuePool limit of size 1 overflow 0 reached") >= 9)
        release.set()
        jobs.wait_all(timeout=20)
    engine.dispose()
    assert jobs.effects_by_job() == dict.fromkeys(ids, 1)
    assert "lease was lost" not in caplog.text
    assert "trying again" not in caplog.text


def test_an_application_without_a_pool(database_url: URL, jobs: Jobs) -> None:
    engine = create_engine(database_url, poolclass=NullPool)
    ids = jobs.add_many("sync", 30)
    with running(Worker(engine, plain(), poll_interval=0.05)):
        jobs.wait_all()
    assert jobs.effects_by_job() == dict.fromkeys(ids, 1)


@pytest.mark.slow
def test_what_an_outage_has_given_up_is_not_given_back_as_never_begun(server: Databases, database: str) -> None:
    """It was given up with its lease, while a claim went unanswered: what ran counts as lost, and is careful then."""
    url = server.url(database)
    engine = create_engine(url, pool_size=4)
    handlers = HandlerRegistry()
    attempts: list[int] = []
    ended = threading.Event()

    @handlers.handler("async")
    async def asynchronous(_session: AsyncSession, job: Job[Any]) -> None:
        attempts.append(job.attempt)
        if job.attempt == 1:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(1)  # it tidies up
                ended.set()

    with Observer(url) as observer:
        job_id = Jobs(observer).add("async")
    name = sql.Identifier(database)
    with running(Worker(engine, handlers, lease=2, poll_interval=0.05, reaper_interval=0.5)):
        wait_until(lambda: attempts)
        server.admin.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(name))
        try:
            server.admin.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = %s", (database,)
            )
            assert ended.wait(10)
        finally:
            server.admin.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS true").format(name))
        engine.dispose()
        row = wait_until(lambda: (row := _row(url, job_id))["status"] == "done" and row, timeout=15)
    engine.dispose()
    assert (row["attempt"], row["lost"]) == (2, 1)
    assert attempts == [1, 2]


def _row(url: URL, job_id: uuid.UUID) -> dict[str, Any]:
    with Observer(url) as observer:
        return Jobs(observer).row(job_id)
