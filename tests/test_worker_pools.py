"""Pools of all kinds, too small ones too, and what becomes of them in a forked child."""

from __future__ import annotations

import asyncio
import multiprocessing
import multiprocessing.process
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa
import tenacity
from sqlalchemy import URL, Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from enlist import HandlerRegistry, Job, JobRepository, Worker
from enlist.payload import JobPayload
from tests.shop import Effect
from tests.support import Observer, wait_until
from tests.support.jobs import Jobs, running


class Work(JobPayload, kind="work"):
    pass


@pytest.fixture
def jobs(observer: Observer) -> Jobs:
    return Jobs(observer)


def effects() -> HandlerRegistry:
    handlers = HandlerRegistry()

    @handlers.handler("work", wait=tenacity.wait_fixed(0.05))
    def work(session: Session, job: Job[Any]) -> None:
        backend = session.scalar(sa.text("SELECT pg_backend_pid()"))
        session.add(Effect(job_id=job.id, attempt=job.attempt, worker=f"{os.getpid()} {backend}"))

    @handlers.handler("async", wait=tenacity.wait_fixed(0.05))
    async def work_async(session: AsyncSession, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id, attempt=job.attempt))

    return handlers


# -- too small ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_an_async_pool_that_is_too_small_fails_handlers_and_nothing_else(
    driver: str, database_url: URL, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    """One connection, ten slots, and somebody has it: the others say so and are tried again."""
    engine = create_async_engine(
        database_url.set(drivername=f"postgresql+{driver}"), pool_size=1, max_overflow=0, pool_timeout=0.3
    )
    release = threading.Event()
    handlers = HandlerRegistry()

    @handlers.handler("holding", wait=tenacity.wait_fixed(0.05))
    async def holding(session: AsyncSession, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id, attempt=job.attempt))
        await session.flush()
        assert await asyncio.to_thread(release.wait, 20)

    ids = jobs.add_many("holding", 10)
    with running(Worker(engine, handlers, lease=2, poll_interval=0.05)):
        wait_until(lambda: caplog.text.count("QueuePool limit of size 1 overflow 0 reached") >= 9)
        failed = [error for job_id in ids if (error := jobs.row(job_id)["last_error"])]
        release.set()
        jobs.wait_all(timeout=20)
    assert all("QueuePool limit of size 1 overflow 0 reached" in error for error in failed)
    assert jobs.effects_by_job() == dict.fromkeys(ids, 1)
    assert "trying again" not in caplog.text


# -- of all kinds --------------------------------------------------------------------------------------------------

POOLS: dict[str, dict[str, Any]] = {
    "NullPool": {"poolclass": NullPool},
    "pre-ping": {"pool_pre_ping": True, "pool_size": 10},
    "recycle": {"pool_recycle": 0, "pool_size": 10},  # older than that: at each use a new connection
}


@pytest.mark.slow
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("driver", ["plain", "psycopg", "asyncpg"])
def test_jobs_are_done_once_whatever_the_pool_does(
    driver: str, pool: str, database_url: URL, jobs: Jobs, observer: Observer
) -> None:
    """Also when all its connections are killed in between."""
    engine: Any = create_engine(database_url, **POOLS[pool])
    if driver != "plain":
        engine = create_async_engine(database_url.set(drivername=f"postgresql+{driver}"), **POOLS[pool])
    kind = "work" if driver == "plain" else "async"
    ids = jobs.add_many(kind, 20)
    with running(Worker(engine, effects(), poll_interval=0.05)):
        jobs.wait_all()
        observer.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        ids += jobs.add_many(kind, 20)
        jobs.wait_all()
    if driver == "plain":
        engine.dispose()
    assert jobs.effects_by_job() == dict.fromkeys(ids, 1)
    assert observer.scalar("SELECT max(attempt) FROM enlist_job") == 1


# -- in a forked child ---------------------------------------------------------------------------------------------


@contextmanager
def forked(target: Any, *arguments: Any) -> Iterator[multiprocessing.process.BaseProcess]:
    process = multiprocessing.get_context("fork").Process(target=target, args=arguments)
    process.start()
    try:
        yield process
    finally:
        process.join(20)
        if process.is_alive():
            process.kill()
            process.join()


def in_child(engine: Engine) -> None:
    """Work with the engine that the parent has used, and enqueue."""
    worker = Worker(engine, effects(), queues={"default": 4}, poll_interval=30)
    worker.start()
    with Session(engine) as session, session.begin():
        JobRepository().enqueue_many(session, [Work() for _ in range(20)])
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        # In time only because it has notified: the worker looks by itself after half a minute.
        left = sa.text("SELECT count(*) FROM enlist_job WHERE status <> 'done'")
        wait_until(lambda: connection.scalar(left) == 0, 15)
    stopped = worker.stop()
    engine.dispose()
    os._exit(0 if stopped else 1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("before", ["stopped", "running"])
def test_a_forked_child_has_its_own_worker_and_the_parent_goes_on(
    before: str, engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    """The parent has used engine, notifier and worker; no connection of its own is used or closed by the child."""
    parent = Worker(engine, effects(), queues={"default": 4}, poll_interval=30)
    with running(parent):
        with Session(engine) as session, session.begin():
            JobRepository().enqueue_many(session, [Work() for _ in range(20)])
        jobs.wait_all()
        if before == "stopped":
            parent.stop()
        with forked(in_child, engine) as child:
            child.join(20)
        assert child.exitcode == 0
        if before == "stopped":
            parent.start()
        # Used by two processes, its connections would be out of step by now.
        with Session(engine) as session, session.begin():
            JobRepository().enqueue_many(session, [Work() for _ in range(20)])
        jobs.wait_all()
    assert jobs.counts() == {"done": 60}
    assert set(jobs.effects_by_job().values()) == {1}
    connections: dict[str, set[str]] = {}
    for (worker,) in observer.rows("SELECT worker FROM shop_effect"):
        process, backend = worker.split()
        connections.setdefault(process, set()).add(backend)
    ours, theirs = connections[str(os.getpid())], connections[str(child.pid)]
    assert not ours & theirs
