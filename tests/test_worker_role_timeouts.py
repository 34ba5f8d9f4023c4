"""Timeouts that an administrator has set for the role or the database, and an error in each loop."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
import tenacity
from psycopg import sql
from sqlalchemy import URL, Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from enlist import HandlerRegistry, Job, Worker
from tests.shop import Effect
from tests.support import Observer, wait_until
from tests.support.jobs import Jobs, running

SETTINGS = {"idle_in_transaction_session_timeout": "500ms", "statement_timeout": "300ms", "lock_timeout": "200ms"}
TOO_LONG = 0.9


@pytest.fixture
def jobs(observer: Observer) -> Jobs:
    return Jobs(observer)


def limit(observer: Observer, database: str, **settings: str) -> None:
    """Set them for all connections from now on."""
    if observer.connection.info.server_version >= 170000:
        settings.setdefault("transaction_timeout", "1s")
    for name, value in settings.items():
        statement = sql.SQL("ALTER DATABASE {} SET {} = {}")
        observer.connection.execute(
            statement.format(sql.Identifier(database), sql.Identifier(name), sql.Literal(value))
        )


def test_handlers_that_wait_before_and_after_their_first_query(
    any_async_engine: AsyncEngine, database: str, jobs: Jobs, observer: Observer
) -> None:
    """No transaction is open before: that one is done. The other is cut, which is written by another connection."""
    limit(observer, database, **SETTINGS)
    handlers = HandlerRegistry()

    @handlers.handler("before")
    async def before(session: AsyncSession, job: Job[Any]) -> None:
        await asyncio.sleep(TOO_LONG)
        session.add(Effect(job_id=job.id, attempt=job.attempt))

    @handlers.handler("after", wait=tenacity.wait_fixed(0.05))
    async def after(session: AsyncSession, job: Job[Any]) -> None:
        await session.execute(sa.text("SELECT 1"))
        await asyncio.sleep(TOO_LONG if job.attempt == 1 else 0)
        session.add(Effect(job_id=job.id, attempt=job.attempt))

    early, late = jobs.add("before"), jobs.add("after")
    with running(Worker(any_async_engine, handlers, poll_interval=0.05)):
        failed = jobs.wait_failed(late)
        assert re.search("idle-in-transaction timeout|connection is closed", failed["last_error"])
        jobs.wait_all()
    assert jobs.effects(early) == [(1, "")]
    assert jobs.effects(late) == [(2, "")]


def test_a_claim_behind_a_table_lock(
    engine: Engine, database: str, jobs: Jobs, observer: Observer, caplog: Any
) -> None:
    """It gives up with the lock's timeout, and is made again."""
    limit(observer, database, **SETTINGS)
    handlers = HandlerRegistry()

    @handlers.handler("work")
    def work(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))

    with running(Worker(engine, handlers, poll_interval=0.05)):
        with observer.connection.transaction():
            observer.execute("LOCK TABLE enlist_job")
            wait_until(lambda: "claim failed, trying again" in caplog.text)
        job_id = jobs.add("work")
        jobs.wait(job_id)
    assert "canceling statement due to lock timeout" in caplog.text
    assert caplog.text.count("claim failed, trying again") == 1
    assert len(jobs.effects(job_id)) == 1


@pytest.mark.slow
def test_all_day_long_under_such_limits(engine: Engine, database: str, jobs: Jobs, observer: Observer) -> None:
    """Hundreds of jobs, while the table is locked again and again for longer than is waited for."""
    limit(observer, database, **SETTINGS)
    handlers = HandlerRegistry()

    @handlers.handler("work", wait=tenacity.wait_fixed(0.05))
    def work(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))

    ids = jobs.add_many("work", 600)
    with running(Worker(engine, handlers, queues={"default": 4}, lease=2, poll_interval=0.05)):
        for _ in range(5):
            with observer.connection.transaction():
                observer.execute("LOCK TABLE enlist_job")
                observer.execute("SELECT pg_sleep(0.25)")
        jobs.wait_all(timeout=20)
    assert jobs.effects_by_job() == dict.fromkeys(ids, 1)


# -- one error in each loop ------------------------------------------------------------------------------------------

LOOPS = {
    "claim": ("first_look AS", "claim"),
    "heartbeat": ("SET locked_until=.statement_timestamp", "heartbeat"),
    "reaper": ("WITH expired AS", "reaper"),
    "completion": ("WITH mine .*concurrency_slot=", "completion"),
}
"""What is in the loop's statement, and what the log calls it."""


@contextmanager
def one_error(marker: str) -> Iterator[list[float]]:
    """Have the driver raise once, at a statement that matches; yields when such statements are sent."""
    times: list[float] = []

    def execute(_cursor: Any, statement: str, _parameters: Any, _context: Any) -> None:
        if re.search(marker, statement, re.DOTALL):
            times.append(time.monotonic())
            if len(times) == 1:
                raise psycopg.OperationalError("injected")

    sa.event.listen(Engine, "do_execute", execute)
    try:
        yield times
    finally:
        sa.event.remove(Engine, "do_execute", execute)


@pytest.mark.parametrize("loop", LOOPS)
def test_each_loop_runs_again_within_two_intervals_after_an_error(
    loop: str, database_url: URL, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    marker, name = LOOPS[loop]
    interval = 0.5
    release = threading.Event()
    runs: Counter[Any] = Counter()
    handlers = HandlerRegistry()

    @handlers.handler("away")
    def away(session: Session, job: Job[Any]) -> None:
        runs[job.id] += 1
        assert release.wait(20)

    with one_error(marker) as times:
        engine = create_engine(database_url)  # after the listener: an engine looks for those of its class when made
        worker = Worker(engine, handlers, lease=3 * interval, poll_interval=interval, reaper_interval=interval)
        with running(worker):
            job_id = jobs.add("away")
            if loop == "completion":
                release.set()
            wait_until(lambda: len(times) >= 2, 10)
            release.set()
            assert jobs.wait(job_id)["status"] == "done"
        engine.dispose()
    assert times[1] - times[0] < 2 * interval + 1  # (the machine's own slowness)
    assert f"the worker's {name} failed, trying again" in caplog.text
    assert runs[job_id] == 1
