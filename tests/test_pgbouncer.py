"""Through PgBouncer in transaction mode: no session of one's own, and two connections for all."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import pytest
import sqlalchemy as sa
import tenacity
from sqlalchemy import URL, Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from enlist import HandlerRegistry, Job, JobRepository, Worker
from tests.shop import Effect
from tests.support import Observer, wait_until
from tests.support.jobs import Jobs, running
from tests.support.pgbouncer import PgBouncer

pytestmark = pytest.mark.pgbouncer

PSYCOPG: dict[str, Any] = {"connect_args": {"prepare_threshold": None}}
ASYNCPG: dict[str, Any] = {
    "connect_args": {
        "statement_cache_size": 0,
        "prepared_statement_cache_size": 0,
        "prepared_statement_name_func": lambda: f"__asyncpg_{uuid.uuid4()}__",
    }
}
"""What the guide asks for."""

PREPARED = ("prepared statement", "DuplicatePrepared", "InvalidSqlStatementName")


@pytest.fixture
def jobs(observer: Observer) -> Jobs:
    return Jobs(observer)


@pytest.fixture
def pooler(database_url: URL) -> Iterator[PgBouncer]:
    with PgBouncer(database_url) as pooler:
        yield pooler


@pytest.fixture
def pooled(pooler: PgBouncer) -> Iterator[Engine]:
    engine = create_engine(pooler.url, pool_size=20, **PSYCOPG)
    yield engine
    engine.dispose()


def handlers_for(runs: Counter[Any] | None = None, **options: Any) -> HandlerRegistry:
    handlers = HandlerRegistry()

    @handlers.handler("sync", wait=tenacity.wait_fixed(0.1), **options)
    def write(session: Session, job: Job[Any]) -> None:
        if runs is not None:
            runs[job.id] += 1
        session.add(Effect(job_id=job.id, attempt=job.attempt))

    @handlers.handler("async", wait=tenacity.wait_fixed(0.1), **options)
    async def write_async(session: AsyncSession, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id, attempt=job.attempt))

    @handlers.handler("away", wait=tenacity.wait_fixed(0.1))
    def away(session: Session, job: Job[Any]) -> None:
        """Written by the worker itself: its session is not used."""

    return handlers


class Meddler:
    """A client that leaves settings in the sessions that it shares with the others."""

    SETTINGS = ("SET search_path = nowhere", "SET statement_timeout = '1ms'", "SET ROLE pg_monitor")

    def __init__(self, url: URL) -> None:
        self._engine = create_engine(url, poolclass=sa.NullPool, **PSYCOPG)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.times = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()

    def meddle(self) -> None:
        for setting in self.SETTINGS:
            with self._engine.begin() as connection:
                connection.exec_driver_sql(setting)
        self.times += 1

    def tidy_up(self) -> None:
        """In both connections, at once: in one after the other it might be the same twice."""
        with self._engine.begin() as one, self._engine.begin() as other:
            for connection in (one, other):
                connection.exec_driver_sql("RESET ROLE")
                connection.exec_driver_sql("RESET ALL")

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            self.meddle()


def test_four_workers_and_four_producers(database_url: URL, jobs: Jobs, caplog: pytest.LogCaptureFixture) -> None:
    """Plain and async, psycopg and asyncpg, beside a client that sets what it likes: each job once."""
    caplog.set_level(logging.INFO)
    repository = JobRepository()
    with PgBouncer(database_url, server_reset_query_always="1") as pooler, Meddler(pooler.url) as meddler:
        engine = create_engine(pooler.url, pool_size=20, **PSYCOPG)
        url = pooler.url.set(drivername="postgresql+asyncpg")
        workers = [
            Worker(engine, handlers_for(), queues={"default": 4}, poll_interval=0.1),
            Worker(engine, handlers_for(), queues={"default": 4}, poll_interval=0.1),
            Worker(create_async_engine(pooler.url, **PSYCOPG), handlers_for(), poll_interval=0.1),
            Worker(create_async_engine(url, **ASYNCPG), handlers_for(), poll_interval=0.1),
        ]

        def produce(number: int) -> list[uuid.UUID]:
            ids = []
            for n in range(200):
                with Session(engine) as session, session.begin():
                    kind = ("sync", "async")[n % 2]
                    ids.append(repository.enqueue(session, kind, {"n": n}, unique_key=f"{number}-{n}").id)
            return ids

        with running(*workers), ThreadPoolExecutor(4) as producers:
            ids = [job_id for made in producers.map(produce, range(4)) for job_id in made]
            jobs.wait_all(timeout=40)
        engine.dispose()
        assert meddler.times > 5
        log = pooler.log
    assert jobs.effects_by_job() == dict.fromkeys(ids, 1)
    assert not [word for word in PREPARED if word in caplog.text or word in log]


def test_what_others_leave_in_the_session_is_survived(
    pooler: PgBouncer, pooled: Engine, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    """Without ``server_reset_query_always`` nothing works while it is there; afterwards all is done, each job once."""
    meddler = Meddler(pooler.url)
    with running(Worker(pooled, handlers_for(), lease=3, poll_interval=0.1)):
        ids = jobs.add_many("sync", 20)
        jobs.wait_all()
        for _ in range(3):
            meddler.meddle()
        ids += jobs.add_many("sync", 20)
        away = jobs.add_many("away", 5)
        wait_until(lambda: "claim failed, trying again" in caplog.text, 10)
        meddler.tidy_up()
        jobs.wait_all(timeout=20)
    assert jobs.effects_by_job() == dict.fromkeys(ids, 1)
    assert all(jobs.status(job_id) == "done" for job_id in away)


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("options", [{"hold_lock": True}, {"commit_every": 20}, {"on_commit": "savepoint"}])
def test_every_way_to_commit(options: dict[str, Any], kind: str, pooled: Engine, jobs: Jobs) -> None:
    ids = jobs.add_many(kind, 100)
    with running(Worker(pooled, handlers_for(**options), poll_interval=0.1)):
        jobs.wait_all()
    assert jobs.effects_by_job() == dict.fromkeys(ids, 1)


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_handlers_at_a_higher_isolation_level(level: Any, pooler: PgBouncer, jobs: Jobs) -> None:
    engine = create_engine(pooler.url, pool_size=10, isolation_level=level, **PSYCOPG)
    ids = jobs.add_many("sync", 50)
    with running(Worker(engine, handlers_for(), queues={"default": 4}, poll_interval=0.1)):
        jobs.wait_all(timeout=20)
    engine.dispose()
    assert jobs.effects_by_job() == dict.fromkeys(ids, 1)


def test_concurrency_keys(pooled: Engine, jobs: Jobs) -> None:
    """Their locks are a transaction's: a session's would be everybody's."""
    most: Counter[str] = Counter()
    now: Counter[str] = Counter()
    lock = threading.Lock()
    handlers = HandlerRegistry()

    @handlers.handler("keyed")
    def keyed(session: Session, job: Job[Any]) -> None:
        key = job.payload["key"]
        with lock:
            now[key] += 1
            most[key] = max(most[key], now[key])
        session.add(Effect(job_id=job.id))
        session.flush()
        with lock:
            now[key] -= 1

    ids = [
        job_id
        for key in "ab"
        for job_id in jobs.add_many("keyed", [{"key": key}] * 20, concurrency_key=key, concurrency_limit=1)
    ]
    workers = [Worker(pooled, handlers, queues={"default": 4}, poll_interval=0.1) for _ in range(3)]
    with running(*workers):
        jobs.wait_all(timeout=20)
    assert jobs.effects_by_job() == dict.fromkeys(ids, 1)
    assert most == {"a": 1, "b": 1}


def test_a_running_job_is_cancelled(pooled: Engine, jobs: Jobs) -> None:
    handlers = HandlerRegistry()
    cancelled = threading.Event()

    @handlers.handler("long")
    def long(session: Session, job: Job[Any]) -> None:
        wait_until(lambda: job.cancel_requested, 20)
        cancelled.set()

    job_id = jobs.add("long")
    with running(Worker(pooled, handlers, lease=3, poll_interval=0.1)):
        jobs.wait(job_id, "running")
        with Session(pooled) as session, session.begin():
            JobRepository().cancel(session, job_id)
        assert cancelled.wait(10)
        assert jobs.wait(job_id)["status"] == "cancelled"


def test_listen_through_the_pooler_is_said_to_be_of_no_use(
    pooled: Engine, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    with running(Worker(pooled, handlers_for(), poll_interval=0.2)):
        wait_until(lambda: "LISTEN is not effective" in caplog.text, 15)
        jobs.wait(jobs.add("sync"))


def test_a_direct_connection_for_listen_wakes_at_once(pooled: Engine, engine: Engine, jobs: Jobs) -> None:
    worker = Worker(pooled, handlers_for(), poll_interval=30, listen_bind=engine)
    with running(worker):
        wait_until(lambda: worker.health().listening, 10)
        began = time.monotonic()
        with Session(pooled) as session, session.begin():
            handle = JobRepository(notify="transaction").enqueue(session, "sync", {})
        jobs.wait(handle.id)
        assert time.monotonic() - began < 5  # a poll would be half a minute away
