"""Timeouts: an async handler is cancelled, a plain one fenced off, and neither holds up the others."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import gc
import threading
from typing import Any

import pytest
import sqlalchemy as sa
import tenacity
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from enlist import HandlerRegistry, Job, Worker
from enlist._slots import Run
from tests.shop import Effect
from tests.support import Observer, wait_until
from tests.support.jobs import Jobs, running

LATER = tenacity.wait_fixed(600)


@pytest.fixture
def jobs(observer: Observer) -> Jobs:
    return Jobs(observer)


def healthy(handlers: HandlerRegistry) -> None:
    @handlers.handler("healthy")
    def work(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))

    @handlers.handler("idle")
    def idle(session: Session, job: Job[Any]) -> None: ...


def test_an_async_handler_is_cancelled(engine: Engine, jobs: Jobs) -> None:
    handlers = HandlerRegistry()
    cancelled: list[int] = []

    @handlers.handler("slow", timeout=0.4, wait=tenacity.wait_fixed(0.02))
    async def slow(session: AsyncSession, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id, attempt=job.attempt))
        await session.flush()
        if job.attempt < 3:
            try:
                await session.execute(sa.text("SELECT pg_sleep(30)"))
            except asyncio.CancelledError:
                cancelled.append(job.attempt)
                raise

    job_id = jobs.add("slow")
    with running(Worker(engine, handlers, queues={"default": 1}, poll_interval=0.05)):
        row = jobs.wait(job_id)
    assert (row["status"], row["attempt"]) == ("done", 3)
    assert cancelled == [1, 2]
    assert jobs.effects(job_id) == [(3, "")]
    assert all(
        "HandlerTimeout: the handler of kind 'slow' ran longer than its timeout of 0.4 seconds" in entry["error"]
        for entry in row["errors"]
    )


@pytest.mark.parametrize("hold_lock", [False, True], ids=["lease", "hold_lock"])
def test_a_plain_handler_is_fenced_off(
    hold_lock: bool, engine: Engine, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    """Its thread goes on, and its slot is taken; but the job is retried, and what the thread writes is not there.

    Meanwhile the worker's other jobs end as ever.
    """
    handlers = HandlerRegistry()
    healthy(handlers)
    late, back = threading.Event(), threading.Event()
    told: list[bool] = []

    @handlers.handler("slow", timeout=0.4, wait=tenacity.wait_fixed(0.02), hold_lock=hold_lock)
    def slow(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id, attempt=job.attempt, worker="late" if job.attempt == 1 else "second"))
        session.flush()
        if job.attempt == 1:
            late.wait(20)
            told.append(job.cancel_requested)
            back.set()

    job_id = jobs.add("slow")
    try:
        with running(Worker(engine, handlers, queues={"default": 2}, lease=20, poll_interval=0.05)):
            jobs.wait(job_id, "running")
            wait_until(lambda: "HandlerTimeout" in caplog.text, 3)
            others = [*jobs.add_many("healthy", 5), *jobs.add_many("idle", 5)]
            for other in others:
                assert jobs.wait(other, timeout=3)["status"] == "done"
            if not hold_lock:
                assert jobs.wait(job_id)["attempt"] == 2
            late.set()
            assert back.wait(5)
            row = jobs.wait(job_id)
    finally:
        late.set()
    assert row["status"] == "done"
    assert jobs.effects(job_id) == [(2, "second")]
    assert told == [True]


def test_the_threads_that_are_stuck_count_as_taken(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    handlers, other = HandlerRegistry(), HandlerRegistry()
    healthy(handlers)
    healthy(other)
    go = threading.Event()
    runs: list[str] = []

    @handlers.handler("stuck", timeout=0.1, wait=LATER)
    def stuck(session: Session, job: Job[Any]) -> None:
        runs.append("stuck")
        go.wait(20)

    first = Worker(engine, handlers, queues={"default": 2}, lease=1, poll_interval=0.05, shutdown_timeout=0.1)
    try:
        stuck_ids = jobs.add_many("stuck", 2)
        with running(first):
            for job_id in stuck_ids:
                jobs.wait_failed(job_id)
            quick = jobs.add_many("healthy", 5)
            # Two looks of the claimer, and nothing is taken.
            before = observer.scalar("SELECT count(*) FROM enlist_job WHERE kind = 'healthy' AND lease_token > 0")
            assert before == 0
            with running(Worker(engine, other, queues={"default": 2}, poll_interval=0.05)):
                for job_id in quick:
                    assert jobs.wait(job_id, timeout=2)["status"] == "done"
            assert len(runs) == 2
            go.set()
    finally:
        go.set()


def test_a_handler_knows_its_deadline(engine: Engine, jobs: Jobs) -> None:
    handlers = HandlerRegistry()
    seen: list[dt.datetime | None] = []

    @handlers.handler("with", timeout=dt.timedelta(seconds=30))
    def with_timeout(session: Session, job: Job[Any]) -> None:
        seen.append(job.deadline)

    @handlers.handler("async", timeout=30)
    async def with_timeout_async(session: AsyncSession, job: Job[Any]) -> None:
        seen.append(job.deadline)

    before = dt.datetime.now(dt.UTC)
    jobs.add("with")
    jobs.add("async")
    with running(Worker(engine, handlers, poll_interval=0.05)):
        jobs.wait_all()
    assert len(seen) == 2
    for deadline in seen:
        assert deadline is not None
        assert dt.timedelta(seconds=30) <= deadline - before < dt.timedelta(seconds=35)


def test_a_timeout_of_the_handlers_own_is_an_ordinary_failure(engine: Engine, jobs: Jobs) -> None:
    handlers = HandlerRegistry()

    @handlers.handler("own", timeout=30, wait=LATER)
    async def own(session: AsyncSession, job: Job[Any]) -> None:
        async with asyncio.timeout(0.01):
            await asyncio.Event().wait()

    job_id = jobs.add("own")
    with running(Worker(engine, handlers, poll_interval=0.05)):
        row = jobs.wait_failed(job_id)
    assert "TimeoutError" in row["last_error"]
    assert "HandlerTimeout" not in row["last_error"]


def test_the_timeout_of_one_job_does_not_wait_for_that_of_another(engine: Engine, jobs: Jobs) -> None:
    """Timeouts of different lengths, the shorter one begun later."""
    handlers = HandlerRegistry()
    go = threading.Event()

    @handlers.handler("long", timeout=20, wait=LATER)
    def long(session: Session, job: Job[Any]) -> None:
        go.wait(20)

    @handlers.handler("short", timeout=0.1, wait=LATER)
    def short(session: Session, job: Job[Any]) -> None:
        go.wait(20)

    try:
        with running(Worker(engine, handlers, poll_interval=0.05)):
            jobs.wait(jobs.add("long"), "running")
            jobs.wait_failed(jobs.add("short"), timeout=3)
            go.set()
    finally:
        go.set()


@pytest.mark.slow
def test_what_has_ended_is_not_kept_for_its_timeout(engine: Engine, jobs: Jobs) -> None:
    handlers = HandlerRegistry()

    @handlers.handler("quick, of this test", timeout=3600)
    def quick(session: Session, job: Job[Any]) -> None: ...

    def kept() -> list[Run]:
        gc.collect()
        found = [one for one in gc.get_objects() if isinstance(one, Run)]
        return [run for run in found if run.kind == "quick, of this test"]

    jobs.add_many("quick, of this test", 50)
    with running(Worker(engine, handlers, poll_interval=0.05)):
        jobs.wait_all()
        wait_until(lambda: not kept())


@pytest.mark.slow
@pytest.mark.parametrize("world", ["plain", "async"])
def test_a_handler_that_is_run_again_has_all_its_time_again(
    world: str, engine: Engine, jobs: Jobs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("enlist._abandoned.GRACE_SECONDS", 0.1)
    monkeypatch.setattr("enlist._abandoned.LOOK_SECONDS", 0.05)
    handlers = HandlerRegistry()
    left: list[float] = []

    def body(session: Session, job: Job[Any]) -> None:
        assert job.deadline is not None
        left.append((job.deadline - dt.datetime.now(dt.UTC)).total_seconds())
        session.add(Effect(job_id=job.id, attempt=job.attempt))
        session.flush()
        session.execute(sa.text("SELECT pg_sleep(0.9)"))
        if len(left) == 1:
            session.execute(sa.text("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END $$"))

    async def asynchronous(session: AsyncSession, job: Job[Any]) -> None:
        await session.run_sync(body, job)

    handlers.handler("again", timeout=1.5, wait=LATER)(body if world == "plain" else asynchronous)
    job_id = jobs.add("again")
    with running(Worker(engine, handlers, poll_interval=0.05)):
        row = jobs.wait(job_id)
    assert (row["status"], row["attempt"], len(left)) == ("done", 1, 2)
    assert min(left) > 1
    assert "is cut" not in caplog.text


def test_a_handler_that_catches_its_cancellation_and_returns_has_failed(engine: Engine, jobs: Jobs) -> None:
    handlers = HandlerRegistry()

    @handlers.handler("stubborn", timeout=0.1, wait=LATER)
    async def stubborn(session: AsyncSession, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        session.add(Effect(job_id=job.id))

    job_id = jobs.add("stubborn")
    with running(Worker(engine, handlers, poll_interval=0.05)):
        assert "HandlerTimeout" in jobs.wait_failed(job_id)["last_error"]
    assert jobs.effects(job_id) == []
