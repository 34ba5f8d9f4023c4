"""The fixtures: a real PostgreSQL, a database for each test, and a search for what the test leaves behind."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Iterator

import pytest
from sqlalchemy import URL, Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import QueuePool

from enlist import _executor, notifier
from enlist.demo.server import EmbeddedServer
from tests.support import Observer, StatementRecorder
from tests.support.databases import Databases, databases, new_server
from tests.support.leaks import Snapshot, open_connections

pytest_plugins = ["pytester"]


def pytest_xdist_auto_num_workers() -> int:
    """A process more than there are cores: most tests wait for something. (On two cores 141 s instead of 160.)"""
    return (os.cpu_count() or 1) + 1


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail the test that leaves a thread or a process behind. Connections are the affair of ``database``."""
    before = Snapshot()
    yield
    notifier.close_all()  # it keeps its thread for some seconds, in case there is more
    if leaks := before.leaks():
        pytest.fail("the test left something behind:\n  " + "\n  ".join(leaks), pytrace=False)


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """Undo what the command line sets for its process."""
    logger = logging.getLogger("enlist")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run async handlers on asyncio's own event loop, though uvloop is installed; the tests' worker processes use that.

    With ENLIST_TEST_LOOP=uvloop all do.
    """
    if os.environ.get("ENLIST_TEST_LOOP") != "uvloop":
        monkeypatch.setattr(_executor, "uvloop", None)


@pytest.fixture(scope="session")
def server() -> Iterator[Databases]:
    """The server of the run: an embedded PostgreSQL 18, or the one of ENLIST_TEST_DATABASE_URL."""
    with databases() as found:
        yield found


@pytest.fixture
def database(server: Databases) -> Iterator[str]:
    """The name of a database of the test's own, with enlist's and the shop's tables.

    Fails the test that leaves a connection to it open.
    """
    name = server.clone()
    yield name
    notifier.close_all()
    leaks = open_connections(server.admin, name)
    server.drop(name)
    if leaks:
        pytest.fail("the test left something behind:\n  " + "\n  ".join(leaks), pytrace=False)


@pytest.fixture
def empty_database_url(server: Databases) -> Iterator[URL]:
    """The URL of a database without any tables."""
    name = server.create()
    yield server.url(name)
    notifier.close_all()
    leaks = open_connections(server.admin, name)
    server.drop(name)
    if leaks:
        pytest.fail("the test left something behind:\n  " + "\n  ".join(leaks), pytrace=False)


@pytest.fixture
def database_url(server: Databases, database: str) -> URL:
    """The URL of the test's database, for psycopg."""
    return server.url(database)


@pytest.fixture
def engine(database_url: URL) -> Iterator[Engine]:
    """An Engine on the test's database: psycopg, 20 connections. All must be back in the pool at the end."""
    engine = create_engine(database_url, pool_size=20)
    yield engine
    held = _checked_out(engine)
    engine.dispose()
    _fail_if_held(held)


@pytest.fixture
async def async_engine(database_url: URL) -> AsyncIterator[AsyncEngine]:
    """An AsyncEngine on the test's database: psycopg, 20 connections."""
    async for engine in _async_engine(database_url):
        yield engine


@pytest.fixture
async def asyncpg_engine(database_url: URL) -> AsyncIterator[AsyncEngine]:
    """An AsyncEngine on the test's database: asyncpg, 20 connections."""
    async for engine in _async_engine(database_url.set(drivername="postgresql+asyncpg")):
        yield engine


@pytest.fixture(params=["psycopg", "asyncpg"])
async def any_async_engine(request: pytest.FixtureRequest, database_url: URL) -> AsyncIterator[AsyncEngine]:
    """The test runs twice: with an AsyncEngine of psycopg, and of asyncpg."""
    async for engine in _async_engine(database_url.set(drivername=f"postgresql+{request.param}")):
        yield engine


@pytest.fixture
def sessions(engine: Engine) -> sessionmaker[Session]:
    """A factory of Sessions on ``engine``."""
    return sessionmaker(engine)


@pytest.fixture
def async_sessions(async_engine: AsyncEngine) -> async_sessionmaker[AsyncSession]:
    """A factory of AsyncSessions on ``async_engine`` whose objects stay readable after the commit."""
    return async_sessionmaker(async_engine, expire_on_commit=False)


@pytest.fixture
def statements(engine: Engine) -> Iterator[StatementRecorder]:
    """Records what ``engine`` is asked to run; for other engines use :class:`StatementRecorder` itself."""
    with StatementRecorder(engine) as recorder:
        yield recorder


@pytest.fixture
def observer(database_url: URL) -> Iterator[Observer]:
    """An independent autocommit connection to the test's database."""
    with Observer(database_url) as observer:
        yield observer


@pytest.fixture
def private_server() -> Iterator[EmbeddedServer]:
    """A server for this test alone (0.7 s), to stop, crash and restart. Its databases are empty."""
    with new_server() as server:
        yield server


async def _async_engine(url: URL) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(url, pool_size=20)
    yield engine
    held = _checked_out(engine.sync_engine)
    await engine.dispose()
    _fail_if_held(held)


def _checked_out(engine: Engine) -> int:
    assert isinstance(engine.pool, QueuePool)
    return engine.pool.checkedout()


def _fail_if_held(held: int) -> None:
    if held:
        pytest.fail(f"the test left {held} connections checked out of its engine's pool", pytrace=False)
