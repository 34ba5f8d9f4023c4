"""A group that falls apart: its members run one after the other, and nothing that happens to one happens to another."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
import uuid
from collections import Counter
from typing import Any, Literal

import pytest
import sqlalchemy as sa
import tenacity
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from enlist import HandlerRegistry, Job, JobRepository, Worker
from enlist.events import EventName, JobEvent
from tests.shop import Effect, Order
from tests.support import Observer, wait_until
from tests.support.jobs import Jobs, running

LATER = tenacity.wait_fixed(600)

both = pytest.mark.parametrize("world", ["plain", "async"])
World = Literal["plain", "async"]


@pytest.fixture
def jobs(observer: Observer) -> Jobs:
    return Jobs(observer)


@pytest.fixture(autouse=True)
def they_wait_for_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have jobs wait from the first claim on: so they are in a group however slow the machine is."""
    monkeypatch.setattr("enlist._slots._Queue.allowance", lambda _self: 16)
    monkeypatch.setattr("enlist._groups.GROUP_SECONDS", 5.0)


def worker(engine: Engine, handlers: HandlerRegistry, **options: Any) -> Worker:
    return Worker(engine, handlers, **{"queues": {"default": 1}, "poll_interval": 0.05, "lease": 10, **options})


class Body:
    """A handler whose group falls apart at its last member, and that does something else by itself."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.runs: Counter[int] = Counter()
        self.alone: dict[int, threading.Event] = {n: threading.Event() for n in range(size)}

    def begin(self, job: Job[Any]) -> int:
        """In the group nothing but the last does anything; return the member's number when it runs by itself."""
        n: int = job.payload["n"]
        self.runs[n] += 1
        if self.runs[n] == 1:
            if n == self.size - 1:
                raise ValueError("the group falls apart")
            return -1
        self.alone[n].set()
        return n


def add(jobs: Jobs, number: int, **columns: Any) -> list[uuid.UUID]:
    return jobs.add_many("member", [{"n": n} for n in range(number)], **columns)


def test_one_that_is_cancelled_while_it_waits_for_its_turn_takes_nobody_along(engine: Engine, jobs: Jobs) -> None:
    handlers = HandlerRegistry()
    body, go = Body(4), threading.Event()

    @handlers.handler("member", commit_every=10, wait=LATER)
    async def member(session: AsyncSession, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id, attempt=job.attempt))
        await session.flush()
        if body.begin(job) == 0:
            await asyncio.to_thread(go.wait, 10)

    ids = add(jobs, 4)
    with running(worker(engine, handlers)):
        assert body.alone[0].wait(10)
        with Session(engine) as session, session.begin():
            assert JobRepository(notify="transaction").cancel(session, ids[1])
        jobs.wait(ids[1], "cancelled")
        go.set()
        assert [jobs.wait(job_id)["status"] for job_id in ids] == ["done", "cancelled", "done", "done"]
    assert [jobs.row(job_id)["attempt"] for job_id in ids] == [1] * 4
    assert jobs.effects_by_job() == dict.fromkeys([ids[0], ids[2], ids[3]], 1)


@pytest.mark.slow
def test_what_runs_after_one_that_was_cancelled_is_not_cut_off(
    engine: Engine, jobs: Jobs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("enlist._abandoned.GRACE_SECONDS", 0.1)
    monkeypatch.setattr("enlist._abandoned.LOOK_SECONDS", 0.1)
    handlers = HandlerRegistry()
    body = Body(3)

    @handlers.handler("member", commit_every=10, wait=LATER)
    async def member(session: AsyncSession, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id, attempt=job.attempt))
        await session.flush()
        n = body.begin(job)
        if n == 0:
            await asyncio.Event().wait()
        if n == 1:
            await session.execute(sa.text("SELECT pg_sleep(1)"))

    ids = add(jobs, 3)
    with running(worker(engine, handlers)):
        assert body.alone[0].wait(10)
        with Session(engine) as session, session.begin():
            assert JobRepository(notify="transaction").cancel(session, ids[0])
        assert [jobs.wait(job_id)["status"] for job_id in ids] == ["cancelled", "done", "done"]
    assert body.runs == {0: 2, 1: 2, 2: 2}
    assert "is cut" not in caplog.text


@pytest.mark.slow
def test_the_time_of_one_does_not_begin_before_it_runs(engine: Engine, jobs: Jobs) -> None:
    handlers = HandlerRegistry()
    body = Body(4)

    @handlers.handler("member", commit_every=10, timeout=0.6, wait=LATER)
    def member(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id, attempt=job.attempt))
        if body.begin(job) >= 0:
            time.sleep(0.35)

    ids = add(jobs, 4)
    with running(worker(engine, handlers)):
        for job_id in ids:
            row = jobs.wait(job_id)
            assert (row["status"], row["attempt"], row["last_error"]) == ("done", 1, None)


@pytest.mark.slow
def test_those_behind_one_that_never_returns_are_run_elsewhere(
    engine: Engine, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = HandlerRegistry()
    body, go = Body(4), threading.Event()

    @handlers.handler("member", commit_every=10, timeout=0.5, wait=LATER)
    def member(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id, attempt=job.attempt))
        if body.begin(job) == 1:
            go.wait(20)

    ids = add(jobs, 4)
    first, second = worker(engine, handlers), worker(engine, handlers)
    try:
        with running(first):
            assert body.alone[1].wait(10)
            monkeypatch.setattr("enlist._slots._Queue.allowance", lambda _self: 0)  # as it is behind slow jobs
            with running(second):
                assert jobs.wait_failed(ids[1])["attempt"] == 1
                for job_id in (ids[0], ids[2], ids[3]):
                    assert jobs.wait(job_id)["attempt"] == 1
                go.set()
    finally:
        go.set()
    assert jobs.effects_by_job() == dict.fromkeys([ids[0], ids[2], ids[3]], 1)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise SystemExit("no text")

    __repr__ = __str__


@both
def test_an_exception_without_a_text_leaves_nobody_running(world: World, engine: Engine, jobs: Jobs) -> None:
    handlers = HandlerRegistry()
    first: set[uuid.UUID] = set()

    def body(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id, attempt=job.attempt))
        session.flush()
        if job.payload["n"] == 3 and job.attempt == 1:
            first.add(job.id)
            raise Unprintable

    async def asynchronous(session: AsyncSession, job: Job[Any]) -> None:
        await session.run_sync(body, job)

    handlers.handler("member", commit_every=10, wait=tenacity.wait_fixed(0.05))(
        body if world == "plain" else asynchronous
    )
    ids = add(jobs, 6)
    with running(worker(engine, handlers)):
        rows = [jobs.wait(job_id) for job_id in ids]
    assert [(row["status"], row["attempt"]) for row in rows] == [("done", 1 + (n == 3)) for n in range(6)]


@pytest.mark.parametrize("what", ["error", "wait"])
@both
def test_a_failure_that_is_hard_to_write_costs_no_slot(
    what: str, world: World, engine: Engine, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    handlers = HandlerRegistry()

    class Quits(tenacity.wait.wait_base):
        def __call__(self, retry_state: tenacity.RetryCallState) -> float:
            raise SystemExit("no more")

    def body(session: Session, job: Job[Any]) -> None:
        if job.payload["n"] == 0:
            raise sa.exc.PendingRollbackError if what == "error" else ValueError("boom")

    async def asynchronous(session: AsyncSession, job: Job[Any]) -> None:
        await session.run_sync(body, job)

    wait = Quits() if what == "wait" else LATER
    handlers.handler("member", wait=wait)(body if world == "plain" else asynchronous)
    ids = add(jobs, 3)
    with running(worker(engine, handlers)):
        assert jobs.wait_failed(ids[0])["attempt"] == 1
        assert [jobs.wait(job_id)["status"] for job_id in ids[1:]] == ["done", "done"]
    assert "unexpected" not in caplog.text


def test_what_one_leaves_in_the_session_is_not_the_next_ones(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    """A savepoint left open above all: the next could undo with it what the first has done."""
    handlers = HandlerRegistry()
    seen: list[tuple[bool, bool, bool]] = []

    @handlers.handler("member", commit_every=10, wait=LATER)
    def member(session: Session, job: Job[Any]) -> None:
        seen.append((session.in_nested_transaction(), "mine" in session.info, session.autoflush))
        if (nested := session.get_nested_transaction()) is not None:
            nested.rollback()
        session.info["mine"] = True
        session.autoflush = False
        session.begin_nested()
        session.add(Order(ref=str(job.payload["n"])))
        session.flush()

    ids = add(jobs, 5)
    with running(worker(engine, handlers)):
        assert [jobs.wait(job_id)["status"] for job_id in ids] == ["done"] * 5
    assert seen == [(False, False, True)] * 5
    assert observer.rows("SELECT ref FROM shop_order ORDER BY ref") == [(str(n),) for n in range(5)]
    assert observer.scalar("SELECT count(DISTINCT xmin::text) < 5 FROM enlist_job")


def test_those_that_are_cancelled_together_each_tell_their_end(engine: Engine, jobs: Jobs) -> None:
    handlers = HandlerRegistry()
    inside = threading.Event()
    told: list[JobEvent] = []

    @handlers.handler("member", commit_every=10, wait=LATER)
    async def member(session: AsyncSession, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))
        await session.flush()
        if job.payload["n"] == 2:
            inside.set()
            await asyncio.Event().wait()

    # The one whose handler runs has a lower id than those that wait for it: it is told first.
    ids = [jobs.add("member", {"n": n}, priority=n) for n in range(6)]
    with running(worker(engine, handlers, events=told.append)):
        assert inside.wait(10)
        with Session(engine) as session, session.begin():
            assert len(JobRepository(notify="transaction").cancel(session, ids)) == 6
        wait_until(lambda: len([event for event in told if event.name is not EventName.STARTED]) >= 4)
    endings = Counter(event.job_id for event in told if event.name is not EventName.STARTED)
    started = {event.job_id for event in told if event.name is EventName.STARTED}
    assert started <= endings.keys()
    assert set(endings.values()) == {1}


@both
def test_the_error_of_one_tells_nothing_of_anothers(world: World, engine: Engine, jobs: Jobs) -> None:
    """An error may hold anybody's data."""
    handlers = HandlerRegistry()

    def body(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))
        session.flush()
        if job.payload["n"] == 1:
            raise ValueError("a secret of the second")
        if runs[job.id]:
            raise KeyError("the first's own")
        runs[job.id] += 1

    async def asynchronous(session: AsyncSession, job: Job[Any]) -> None:
        await session.run_sync(body, job)

    runs: Counter[uuid.UUID] = Counter()
    handlers.handler("member", commit_every=10, wait=LATER)(body if world == "plain" else asynchronous)
    first, second = add(jobs, 2)
    with running(worker(engine, handlers)):
        error = jobs.wait_failed(first)["last_error"]
        assert "a secret of the second" in jobs.wait_failed(second)["last_error"]
    assert "the first's own" in error
    assert "secret" not in error
    assert "During handling" not in error


@both
def test_what_one_sets_for_the_transaction_is_not_there_for_the_next(
    world: World, engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    handlers = HandlerRegistry()
    found: list[tuple[int, str]] = []
    texts = [
        "SET LOCAL app.tenant = 'one'",
        "/* as */ -- ever\n set local app.tenant = 'one'",
        "SELECT set_config('app.tenant', 'one', true)",
        "SELECT 1",
    ]

    def body(session: Session, job: Job[Any]) -> None:
        found.append((job.payload["n"], session.scalar(sa.text("SELECT current_setting('app.tenant', true)")) or ""))
        session.add(Effect(job_id=job.id))
        session.flush()
        session.execute(sa.text(texts[job.payload["n"] % 4]))

    async def asynchronous(session: AsyncSession, job: Job[Any]) -> None:
        await session.run_sync(body, job)

    handlers.handler("member", commit_every=50, wait=LATER)(body if world == "plain" else asynchronous)
    ids = add(jobs, 12)
    with running(worker(engine, handlers)):
        jobs.wait_all()
    assert found == [(n, "") for n in range(12)]
    assert jobs.effects_by_job() == dict.fromkeys(ids, 1)
    # Those that have set nothing share a transaction with the next still.
    assert observer.scalar("SELECT count(DISTINCT xmin::text) FROM enlist_job") < 12


def test_a_savepoint_by_name_reaches_no_other(engine: Engine, jobs: Jobs) -> None:
    """One leaves it open, another rolls back to one of that name, and has swallowed an error before."""
    handlers = HandlerRegistry()

    @handlers.handler("member", commit_every=10, wait=LATER)
    def member(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))
        session.flush()
        if job.payload["n"] == 0:
            session.execute(sa.text("SAVEPOINT mine"))
        elif job.payload["n"] == 3:
            session.execute(sa.text("ROLLBACK TO SAVEPOINT mine"))

    ids = add(jobs, 6)
    with running(worker(engine, handlers)):
        assert "mine" in jobs.wait_failed(ids[3])["last_error"]
        assert [jobs.wait(job_id)["status"] for job_id in [*ids[:3], *ids[4:]]] == ["done"] * 5
    assert jobs.effects_by_job() == dict.fromkeys([*ids[:3], *ids[4:]], 1)


def test_a_cancellation_that_is_rolled_back_with_the_group_loses_no_lease(engine: Engine, jobs: Jobs) -> None:
    handlers = HandlerRegistry()

    @handlers.handler("member", commit_every=10, wait=LATER)
    def member(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))
        if job.payload["n"] == 2 and not cancelled:
            cancelled.append(True)
            JobRepository().cancel(session, ids[0])

    cancelled: list[bool] = []
    ids = add(jobs, 4)
    with running(worker(engine, handlers, lease=60)):
        rows = [jobs.wait(job_id) for job_id in ids]
    assert [(row["status"], row["attempt"], row["lost"]) for row in rows] == [("done", 1, 0)] * 4


@both
def test_a_context_variable_is_not_there_for_the_next(world: World, engine: Engine, jobs: Jobs) -> None:
    handlers = HandlerRegistry()
    tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="")
    found: list[str] = []

    def plain(session: Session, job: Job[Any]) -> None:
        found.append(tenant.get())
        tenant.set(f"tenant {job.payload['n']}")

    async def asynchronous(session: AsyncSession, job: Job[Any]) -> None:
        plain(session.sync_session, job)

    handlers.handler("member")(plain if world == "plain" else asynchronous)
    add(jobs, 8)
    with running(worker(engine, handlers)):
        jobs.wait_all()
    assert found == [""] * 8
