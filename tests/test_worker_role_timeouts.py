"""Timeouts that an administrator has set for the role or the database, and an error in each loop."""

from __future__ import annotations

import asyncio
import logging
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

from enlist import HandlerRegistry, Job, JobRepository, Worker
from tests.shop import Effect
from tests.support import Observer, wait_until
from tests.support.jobs import Jobs, running

SETTINGS = {"idle_in_transaction_session_timeout": "500ms", "statement_timeout": "300ms", "lock_timeout": "200ms"}
TOO_LONG = 0.9


@pytest.fixture
def jobs(observer: Observer) -> Jobs:
    return Jobs(observer)


def limit(observer: Observer, **settings: str) -> None:
    """Set them for all connections to the test's database from now on."""
    database = observer.scalar("SELECT current_database()")
    if observer.connection.info.server_version >= 170000:
        settings.setdefault("transaction_timeout", "3s")
    for name, value in settings.items():
        statement = sql.SQL("ALTER DATABASE {} SET {} = {}")
        observer.connection.execute(
            statement.format(sql.Identifier(database), sql.Identifier(name), sql.Literal(value))
        )


@pytest.mark.slow
def test_handlers_that_wait_before_and_after_their_first_query(
    any_async_engine: AsyncEngine, jobs: Jobs, observer: Observer
) -> None:
    """No transaction is open before: that one is done. The other is cut, which is written by another connection."""
    limit(observer, **SETTINGS)
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


WAYS: dict[str, dict[str, Any]] = {
    "alone": {},
    "hold_lock": {"hold_lock": True},
    "savepoint": {"on_commit": "savepoint"},
    "shared commit": {"commit_every": 5},
}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.slow] if n else []) for n, way in enumerate(WAYS)]
)
def test_a_plain_handler_that_idles_in_its_transaction_fails_and_is_tried_again(
    way: str, engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    """By whatever way it commits; a limit of the administrator's is not widened. The jobs beside it are done."""
    limit(observer, **SETTINGS)
    handlers = HandlerRegistry()

    @handlers.handler("idle", wait=tenacity.wait_fixed(0.05), **WAYS[way])
    def idle(session: Session, job: Job[Any]) -> None:
        session.execute(sa.text("SELECT 1"))
        if job.payload.get("idles") and job.attempt == 1:
            time.sleep(TOO_LONG)
        session.add(Effect(job_id=job.id, attempt=job.attempt))

    ids = jobs.add_many("idle", [{}, {}, {"idles": True}, {}, {}])
    with running(Worker(engine, handlers, queues={"default": 1}, poll_interval=0.05)):
        failed = jobs.wait_failed(ids[2])
        assert "idle-in-transaction timeout" in failed["last_error"]
        jobs.wait_all()
    assert jobs.effects(ids[2]) == [(2, "")]
    assert [jobs.effects(job_id) for job_id in [*ids[:2], *ids[3:]]] == [[(1, "")]] * 4


@pytest.mark.parametrize(
    ("set_to", "holds"), [("0", "5s"), ("500ms", "500ms"), ("4s", "4s"), ("1min", "5s"), ("1h", "5s"), ("2d", "5s")]
)
def test_the_limit_of_a_handler_that_holds_its_lock_is_the_shorter_one(
    set_to: str, holds: str, engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    """The lease's or the one that is set; 0 is none."""
    limit(observer, idle_in_transaction_session_timeout=set_to)
    found: list[str | None] = []
    handlers = HandlerRegistry()

    @handlers.handler("work", hold_lock=True)
    def work(session: Session, job: Job[Any]) -> None:
        found.append(session.scalar(sa.text("SHOW idle_in_transaction_session_timeout")))

    job_id = jobs.add("work")
    Worker(engine, handlers, lease=5).drain()
    assert jobs.status(job_id) == "done"
    assert found == [holds]


@pytest.mark.slow
def test_old_jobs_are_deleted_in_statements_that_are_short_enough(engine: Engine, observer: Observer) -> None:
    """200,000, where no statement may take for ever: each deletes a thousand, whatever there is."""
    observer.execute(
        "INSERT INTO enlist_job (id, kind, payload, status, attempt, finished_at)"
        " SELECT gen_random_uuid(), 'old', '{}', 'done', 1, statement_timestamp() - interval '1 day'"
        " FROM generate_series(1, 200000)"
    )
    limit(observer, statement_timeout="2s", transaction_timeout="10s")
    repo = JobRepository()
    deleted: list[int] = []
    with Session(engine) as session:
        while not deleted or deleted[-1] > 0:
            deleted.append(repo.prune(session, older_than=3600))
            session.commit()
    assert deleted == [1000] * 200 + [0]


@pytest.mark.slow
def test_a_claim_behind_a_table_lock(engine: Engine, jobs: Jobs, observer: Observer, caplog: Any) -> None:
    """It gives up with the lock's timeout, and is made again."""
    limit(observer, **SETTINGS)
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
def test_all_day_long_under_such_limits(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    """Hundreds of jobs, while the table is locked again and again for longer than is waited for."""
    limit(observer, **SETTINGS)
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
    "look of the reaper": ("FOR SHARE SKIP LOCKED", "reaper"),
    "reaper": ("WITH expired AS", "reaper"),
    "completion": ("WITH mine .*concurrency_slot=", "completion"),
    "waking": (r"SELECT pg_notify\(%\(pg_notify_\d\)s::VARCHAR, %\(queue\)s", "waking of others"),
    "test": ("pg_notify.*unnest", "test of LISTEN"),
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


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
def test_each_loop_runs_again_within_two_intervals_after_an_error(
    loop: str, database_url: URL, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "enlist")
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
            expired: dict[str, Any] = {"status": "running", "attempt": 1, "locked_until": "2000-01-01 00:00+00"}
            job_id = jobs.add(
                "away", **(expired if loop in {"reaper", "waking"} else {})
            )  # the reaper wakes others for it
            if loop == "completion":
                release.set()
            wait_until(lambda: len(times) >= 2, 10)
            release.set()
            assert jobs.wait(job_id)["status"] == "done"
            wait_until(lambda: f"the worker's {name} works again after 1 errors" in caplog.text)
        engine.dispose()
    assert times[1] - times[0] < 2 * interval + 1  # (the machine's own slowness)
    assert caplog.text.count(f"the worker's {name} failed, trying again") == 1
    assert caplog.text.count("works again") == 1
    assert runs[job_id] == 1


@pytest.mark.slow
def test_what_fails_for_long_is_said_again_with_the_error_of_now(
    engine: Engine, jobs: Jobs, observer: Observer, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First a lock that is held too long, then a table that is not there: nobody should look for the lock for ever."""
    caplog.set_level(logging.INFO, "enlist")
    monkeypatch.setattr("enlist._loop.REMINDER_SECONDS", 0.5)
    limit(observer, **SETTINGS)
    handlers = HandlerRegistry()

    @handlers.handler("work")
    def work(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))

    with running(Worker(engine, handlers, poll_interval=0.05)):
        with observer.connection.transaction():
            observer.execute("LOCK TABLE enlist_job")
            wait_until(lambda: "claim failed, trying again" in caplog.text)
            observer.execute("ALTER TABLE enlist_job RENAME TO enlist_job_moved")
        wait_until(lambda: re.search("claim still fails, .*UndefinedTable", caplog.text), 10)
        observer.execute("ALTER TABLE enlist_job_moved RENAME TO enlist_job")
        jobs.wait(jobs.add("work"), timeout=10)
    assert re.search("claim failed, trying again: .*lock timeout", caplog.text)
    assert re.search(r"claim still fails, \d+ errors by now: ", caplog.text)
    assert caplog.text.count("claim failed, trying again") == caplog.text.count("claim works again") == 1
