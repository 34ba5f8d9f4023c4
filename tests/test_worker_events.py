"""What a worker tells its listeners: each step of each attempt, once, when it is a fact; and it needs none of them."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import functools
import threading
import uuid
from collections import Counter, defaultdict
from typing import Any

import pytest
import sqlalchemy as sa
import tenacity
from sqlalchemy import URL, Engine
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from enlist import (
    Cancel,
    ConfigurationError,
    EventName,
    HandlerRegistry,
    HandlerTimeout,
    Job,
    JobEvent,
    JobPayload,
    JobStatus,
    Retry,
    Snooze,
    Worker,
)
from enlist._slots import Run
from enlist.events import Events
from enlist.handlers import Handler
from tests.shop import Effect
from tests.support import Observer, wait_until
from tests.support.jobs import Jobs, running

LATER = tenacity.wait_fixed(600)


@pytest.fixture
def jobs(observer: Observer) -> Jobs:
    return Jobs(observer)


class Recorder:
    """A listener that keeps what it is told, with what the database says at that moment."""

    def __init__(self, url: URL | None = None) -> None:
        self.events: list[JobEvent] = []
        self.statuses: list[str | None] = []
        self._url = url

    def __call__(self, event: JobEvent) -> None:
        status = None
        if self._url is not None:
            with Observer(self._url) as observer:
                status = observer.scalar("SELECT status FROM enlist_job WHERE id = %s", event.job_id)
        self.events.append(event)
        self.statuses.append(status)

    @property
    def names(self) -> list[str]:
        return [event.name for event in self.events]

    def wait(self, name: EventName, timeout: float = 5) -> JobEvent:
        """Wait until an event has come, and return it."""
        wait_until(lambda: name in self.names, timeout, message=f"an event {name}; now {self.names}")
        return next(event for event in self.events if event.name == name)


class Limited(JobPayload, kind="limited"):
    number: int


def handlers_for_all() -> HandlerRegistry:
    """A kind for each ending, plain and async."""
    handlers = HandlerRegistry()

    def plain(session: Session, job: Job[Any]) -> None:
        _act(job)
        if job.payload.get("writes"):
            session.add(Effect(job_id=job.id))

    async def asynchronous(session: AsyncSession, job: Job[Any]) -> None:
        _act(job)
        if job.payload.get("writes"):
            session.add(Effect(job_id=job.id))

    handlers.handler("plain", wait=LATER)(plain)
    handlers.handler("async", wait=LATER)(asynchronous)

    @handlers.handler(Limited)
    def limited(session: Session, job: Job[Limited]) -> None: ...

    return handlers


def _act(job: Job[Any]) -> None:
    what = job.payload.get("do")
    if what == "raise":
        raise ValueError("out of\npaper")
    if what == "retry":
        raise Retry(300)
    if what == "snooze":
        raise Snooze(200)
    if what == "cancel":
        raise Cancel("not wanted")


# -- endings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "async"])
@pytest.mark.parametrize(
    ("payload", "max_attempts", "name", "delay", "error"),
    [
        ({"writes": True}, 2, EventName.DONE, None, None),
        ({}, 2, EventName.DONE, None, None),
        ({"do": "raise"}, 2, EventName.RETRIED, 600, "ValueError: out of paper"),
        ({"do": "retry"}, 2, EventName.RETRIED, 300, "Retry: retry asked for in 0:05:00"),
        ({"do": "raise"}, 1, EventName.DEAD, None, "ValueError: out of paper"),
        ({"do": "snooze"}, 2, EventName.SNOOZED, 200, "Snooze: snoozed for 0:03:20"),
        ({"do": "cancel"}, 2, EventName.CANCELLED, None, "Cancel: not wanted"),
    ],
    ids=["done", "done without its session", "retried", "Retry", "dead", "snoozed", "cancelled"],
)
def test_an_attempt_tells_its_start_and_its_end(
    *,
    kind: str,
    payload: dict[str, Any],
    max_attempts: int,
    name: EventName,
    delay: float | None,
    error: str | None,
    engine: Engine,
    database_url: URL,
    jobs: Jobs,
) -> None:
    """The end when it is a fact: whoever reads the job at that moment sees it."""
    recorder = Recorder(database_url)
    before = dt.datetime.now(dt.UTC)
    job_id = jobs.add(kind, payload, max_attempts=max_attempts, queue="mail", due_in=-3)
    worker = Worker(engine, handlers_for_all(), queues=["mail"], poll_interval=0.05, events=recorder)
    with running(worker):
        recorder.wait(name)
    started, ended = recorder.events
    assert (started.name, started.status, recorder.statuses[0]) == (EventName.STARTED, JobStatus.RUNNING, "running")
    assert started.waited_seconds is not None
    assert 3 <= started.waited_seconds < 60
    assert (started.seconds, started.delay, started.error, started.exception) == (None, None, None, None)
    assert ended.name is name
    assert ended.status is not None
    assert ended.status.value == recorder.statuses[1]
    assert ended.delay == (None if delay is None else dt.timedelta(seconds=delay))
    assert ended.error == error
    assert (ended.exception is None) == (error is None)
    assert ended.seconds is not None
    assert 0 <= ended.seconds < 60
    for event in recorder.events:
        assert (event.job_id, event.kind, event.queue) == (job_id, kind, "mail")
        assert (event.attempt, event.max_attempts, event.worker) == (1, max_attempts, worker.name)
        assert before <= event.at <= dt.datetime.now(dt.UTC)
        assert event.at.utcoffset() == dt.timedelta(0)


def test_a_payload_that_does_not_fit_ends_without_a_start(engine: Engine, jobs: Jobs) -> None:
    recorder = Recorder()
    jobs.add("limited", {"number": "many"}, max_attempts=1)
    with running(Worker(engine, handlers_for_all(), poll_interval=0.05, events=recorder)):
        event = recorder.wait(EventName.DEAD)
    assert recorder.names == ["dead"]
    assert event.seconds is None
    assert event.error is not None
    assert "number" in event.error


def test_a_handler_whose_time_is_over_ends_once(engine: Engine, jobs: Jobs) -> None:
    """It comes back later, and nothing is told of that."""
    handlers = HandlerRegistry()
    recorder = Recorder()
    late, back = threading.Event(), threading.Event()

    @handlers.handler("slow", timeout=0.1, wait=LATER)
    def slow(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))
        late.wait(20)
        back.set()

    jobs.add("slow")
    try:
        with running(Worker(engine, handlers, poll_interval=0.05, events=recorder)):
            event = recorder.wait(EventName.RETRIED)
            late.set()
            assert back.wait(5)
    finally:
        late.set()
    assert recorder.names == ["started", "retried"]
    assert isinstance(event.exception, HandlerTimeout)
    assert event.seconds is not None
    assert event.seconds >= 0.1


def test_a_job_that_is_given_back_is_released(engine: Engine, jobs: Jobs) -> None:
    handlers = HandlerRegistry()
    recorder = Recorder()

    @handlers.handler("asleep")
    async def asleep(session: AsyncSession, job: Job[Any]) -> None:
        await asyncio.Event().wait()

    job_id = jobs.add("asleep")
    with running(Worker(engine, handlers, poll_interval=0.05, shutdown_timeout=0.05, events=recorder)):
        recorder.wait(EventName.STARTED)
    assert recorder.names == ["started", "released"]
    released = recorder.events[1]
    assert (released.status, released.attempt, released.delay) == (JobStatus.QUEUED, 1, None)
    assert (jobs.row(job_id)["status"], jobs.row(job_id)["attempt"]) == ("queued", 0)


def test_a_lease_that_is_lost_is_told_once(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    """By the heartbeat; that the handler comes back and cannot commit is no second ending."""
    handlers = HandlerRegistry()
    recorder = Recorder()
    go = threading.Event()

    @handlers.handler("holding")
    def holding(session: Session, job: Job[Any]) -> None:
        go.wait(20)
        session.add(Effect(job_id=job.id))

    job_id = jobs.add("holding")
    try:
        with running(Worker(engine, handlers, lease=1, poll_interval=0.05, events=recorder)):
            recorder.wait(EventName.STARTED)
            observer.execute(
                "UPDATE enlist_job SET status = 'queued', lease_token = lease_token + 1, locked_until = NULL,"
                " run_at = statement_timestamp() + interval '1 h'"
            )
            event = recorder.wait(EventName.LEASE_LOST)
            go.set()
    finally:
        go.set()
    assert recorder.names == ["started", "lease_lost"]
    assert (event.status, event.seconds is not None) == (None, True)
    assert jobs.effects(job_id) == []


def test_jobs_of_another_worker_are_told_when_they_are_taken_back(
    engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    recorder = Recorder()
    again, last = jobs.add("other", max_attempts=2), jobs.add("other", max_attempts=1)
    observer.execute(
        "UPDATE enlist_job SET status = 'running', attempt = 1, lease_token = 1, locked_by = 'gone',"
        " started_at = statement_timestamp(), locked_until = statement_timestamp() - interval '1 s'"
    )
    worker = Worker(engine, handlers_for_all(), reaper_interval=0.1, poll_interval=0.05, events=recorder)
    with running(worker):
        wait_until(lambda: len(recorder.events) == 2)
    found = {event.job_id: event for event in recorder.events}
    assert {event.name for event in recorder.events} == {EventName.REAPED}
    assert (found[again].status, found[last].status) == (JobStatus.QUEUED, JobStatus.DEAD)
    assert (found[last].attempt, found[last].max_attempts, found[last].worker) == (1, 1, worker.name)
    assert found[again].error == "worker lost: gone let the lease run out"


@pytest.mark.parametrize("kind", ["plain", "hold_lock", "async"])
def test_what_was_given_up_commits_nothing_though_the_row_is_still_its_own(
    kind: str, engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    """A handler that takes no notice, and a fence that would let it pass. Told is what came first, and only that."""
    handlers = HandlerRegistry()
    recorder = Recorder()
    go = threading.Event()

    def plain(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))
        session.flush()
        go.wait(20)

    @handlers.handler("async", wait=LATER)
    async def asynchronous(session: AsyncSession, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))
        await session.flush()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(20)

    handlers.handler("plain", wait=LATER)(plain)
    handlers.handler("hold_lock", wait=LATER, hold_lock=True)(plain)
    job_id = jobs.add(kind)
    worker = Worker(engine, handlers, poll_interval=0.05, events=recorder)
    try:
        with running(worker):
            recorder.wait(EventName.STARTED)
            assert worker._running is not None
            (run,) = worker._running.leases.all()
            observer.wait_for("SELECT count(*) > 0 FROM pg_stat_activity WHERE query LIKE 'INSERT INTO shop_effect%%'")
            worker._running._lost(run, "its lease could not be renewed")
            go.set()
            wait_until(lambda: worker.health().free == worker.health().slots)
    finally:
        go.set()
    assert jobs.effects(job_id) == []
    assert jobs.row(job_id)["status"] == "running"  # until its lease ends
    assert recorder.names == ["started", "lease_lost"]


def test_of_two_endings_the_first_is_told() -> None:
    """As when a COMMIT goes through at the moment in which the attempt is given up."""
    recorder = Recorder()
    handler = Handler("k", print, None, is_async=False)
    run = Run(uuid.uuid4(), 1, "k", "q", 1, 2, "{}", "{}", handler, careful=False, lease_ends=0.0)
    events = Events((recorder,), "w")
    for name in (EventName.STARTED, EventName.LEASE_LOST, EventName.DONE):
        events.emit(name, run)
    assert recorder.names == ["started", "lease_lost"]
    assert recorder.events[0].waited_seconds is None


@pytest.mark.slow
def test_each_attempt_has_a_start_and_one_end(engine: Engine, jobs: Jobs) -> None:
    """Over many jobs of all sorts, two workers, and both worlds."""
    handlers = HandlerRegistry()
    recorder = Recorder()
    soon = tenacity.wait_fixed(0.01)

    def plain(session: Session, job: Job[Any]) -> None:
        if job.payload["fails"] >= job.attempt:
            raise ValueError("not yet")
        if job.payload["writes"]:
            session.add(Effect(job_id=job.id))

    async def asynchronous(session: AsyncSession, job: Job[Any]) -> None:
        await session.run_sync(plain, job)

    handlers.handler("plain", wait=soon)(plain)
    handlers.handler("async", wait=soon)(asynchronous)
    ids = []
    for kind in ("plain", "async"):
        payloads = [{"fails": number % 3, "writes": bool(number % 2)} for number in range(60)]
        ids += jobs.add_many(kind, payloads, max_attempts=2)
    workers = [Worker(engine, handlers, poll_interval=0.05, events=[recorder]) for _ in range(2)]
    with running(*workers):
        wait_until(lambda: jobs.counts().keys() <= {"done", "dead"}, 15)
    told: dict[Any, list[JobEvent]] = defaultdict(list)
    for event in recorder.events:
        told[event.job_id].append(event)
    assert told.keys() == set(ids)
    for events in told.values():
        by_attempt: dict[int, list[str]] = defaultdict(list)
        for event in events:
            by_attempt[event.attempt].append(event.name)
        for names in by_attempt.values():
            while names[0] == "released":  # had waited too long for a slot, and comes again with the same number
                del names[0]
            assert names[0] == "started"
            assert len(names) == 2
        status = jobs.status(events[0].job_id)
        assert by_attempt[max(by_attempt)][1] == status
    counts = Counter(recorder.names)
    assert counts["done"] == jobs.counts()["done"]
    assert counts["dead"] == jobs.counts()["dead"]
    assert counts["started"] == counts["done"] + counts["dead"] + counts["retried"]


# -- bad listeners -------------------------------------------------------------------------------------------


def test_a_listener_that_raises_disturbs_nobody(engine: Engine, jobs: Jobs, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever it raises; it is logged once for each class, and the next listener is told all the same."""
    after = Recorder()
    errors: list[type[BaseException]] = [ValueError, SystemExit, KeyboardInterrupt, asyncio.CancelledError]
    calls = 0

    def bad(event: JobEvent) -> None:
        nonlocal calls
        calls += 1
        raise errors[calls % len(errors)]("from the listener")

    ids = [*jobs.add_many("plain", [{"writes": True}] * 10), *jobs.add_many("async", 10)]
    ids += jobs.add_many("plain", [{"do": "raise"}] * 4, max_attempts=1)
    with running(Worker(engine, handlers_for_all(), poll_interval=0.05, events=[bad, after])):
        wait_until(lambda: jobs.counts() == {"done": 20, "dead": 4})
        wait_until(lambda: len(after.events) == 2 * len(ids))
    assert calls == 2 * len(ids)
    said = [record.getMessage() for record in caplog.records if "event listener" in record.getMessage()]
    assert len(said) == len(errors)
    assert all("bad failed" in text and "from the listener" in text for text in said)


def test_what_a_listener_raises_is_logged_without_parameters(
    engine: Engine, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    handlers = HandlerRegistry()

    @handlers.handler("wrong", wait=LATER)
    def wrong(session: Session, job: Job[Any]) -> None:
        session.execute(sa.text("SELECT 1 / 0 WHERE :secret <> ''"), job.payload)

    recorder = Recorder()

    def passes_on(event: JobEvent) -> None:
        if event.exception is not None:
            raise event.exception

    jobs.add("wrong", {"secret": "hunter2"})
    with running(Worker(engine, handlers, poll_interval=0.05, events=[passes_on, recorder])):
        event = recorder.wait(EventName.RETRIED)
    assert event.error is not None
    assert "division by zero" in event.error
    assert "hunter2" not in event.error
    assert "passes_on failed" in caplog.text
    assert "hunter2" not in caplog.text


def test_a_coroutine_that_comes_back_is_complained_of(
    engine: Engine, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    """What is async cannot be seen beforehand of everything."""

    async def tell() -> None: ...

    job_id = jobs.add("plain")
    with running(Worker(engine, handlers_for_all(), poll_interval=0.05, events=lambda _event: tell())):
        assert jobs.wait(job_id)["status"] == "done"
    assert caplog.text.count("the event listener") == 1
    assert "TypeError: it returned a coroutine, which nobody awaits" in caplog.text


async def _async_listener(event: JobEvent) -> None: ...


class _AsyncCallable:
    async def __call__(self, event: JobEvent) -> None: ...


def _generator(event: JobEvent) -> Any:
    yield event


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (_async_listener, "_async_listener is async"),
        ([print, _async_listener], "_async_listener is async"),
        (functools.partial(_async_listener), "is async"),
        (_AsyncCallable(), "is async"),
        (_generator, "is a generator"),
        (lambda: None, "must take one positional argument"),
        (lambda one, two: None, "must take one positional argument"),
        ("print", "events must be a function that takes a JobEvent, or several, not 'print'"),
        (5, "events must be a function that takes a JobEvent, or several, not 5"),
        ([5], "a listener is a function that takes a JobEvent, not 5"),
    ],
)
def test_what_cannot_be_a_listener_is_refused_at_once(events: Any, message: str, engine: Engine) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Worker(engine, handlers_for_all(), events=events)


@pytest.mark.parametrize("payload", [{"writes": True}, {}, {"do": "raise"}], ids=["handler's", "done", "failed"])
def test_a_listener_may_stop_the_worker(payload: dict[str, Any], engine: Engine, jobs: Jobs) -> None:
    """On whichever thread it is called: it does not wait for itself."""
    stopped = threading.Event()

    def stop_at_the_end(event: JobEvent) -> None:
        if event.name is not EventName.STARTED:
            worker.stop()
            stopped.set()

    worker = Worker(engine, handlers_for_all(), poll_interval=0.05, events=stop_at_the_end)
    jobs.add("plain", payload, max_attempts=1)
    worker.start()
    assert stopped.wait(5)
    worker.stop()  # waits for the other stop
    assert jobs.counts().keys() <= {"done", "dead"}


def test_events_are_public_and_plain() -> None:
    """Their names are strings, for labels and JSON; an event cannot be changed by one listener for the next."""
    event = JobEvent(
        name=EventName.DONE,
        at=dt.datetime.now(dt.UTC),
        worker="w",
        job_id=uuid.uuid4(),
        kind="k",
        queue="q",
        attempt=1,
        max_attempts=2,
    )
    assert f"{event.name}" == "done"
    with pytest.raises(AttributeError):
        event.kind = "other"  # type: ignore[misc]
    assert [name.value for name in EventName] == [
        "started",
        "done",
        "retried",
        "dead",
        "snoozed",
        "cancelled",
        "released",
        "lease_lost",
        "reaped",
    ]
