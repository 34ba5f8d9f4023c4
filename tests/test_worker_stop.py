"""Stopping: what runs may end, what cannot is given back, and the process goes."""

from __future__ import annotations

import asyncio
import datetime as dt
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa
import tenacity
from sqlalchemy import URL, Engine
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from enlist import ConfigurationError, HandlerRegistry, Job, Worker
from enlist._orders import ONE_SIGNAL_SECONDS
from tests.shop import Effect
from tests.support import Observer, wait_until
from tests.support.jobs import Jobs, running
from tests.support.process import WorkerProcess


@pytest.fixture
def jobs(observer: Observer) -> Jobs:
    return Jobs(observer)


def effects() -> HandlerRegistry:
    handlers = HandlerRegistry()

    @handlers.handler("work", wait=tenacity.wait_fixed(0.05))
    def work(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id, attempt=job.attempt))

    return handlers


# -- signals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_lets_what_runs_end_and_claims_nothing_more(
    number: signal.Signals, database_url: URL, jobs: Jobs, observer: Observer
) -> None:
    with WorkerProcess(database_url, lease=1.2, queues={"default": 1}) as process:
        job_id = jobs.add("holding")
        process.expect("run holding")
        waiting = jobs.add_many("healthy", 5)
        process.send(number)
        wait_until(lambda: "no more claims" in process.log())
        # Its lease is renewed during the drain: past two that would have ended.
        until = jobs.row(job_id)["locked_until"] + dt.timedelta(seconds=1.3)
        observer.wait_for("SELECT locked_until > %s FROM enlist_job WHERE id = %s", until, job_id)
        process.say("go")
        assert process.wait() == 0
    row = jobs.row(job_id)
    assert (row["status"], row["attempt"], row["lost"]) == ("done", 1, 0)
    assert len(jobs.effects(job_id)) == 1
    for other in waiting:
        row = jobs.row(other)
        assert (row["status"], row["attempt"], row["lease_token"]) == ("queued", 0, 0)
    assert "Traceback" not in process.log()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_now(number: signal.Signals, database_url: URL, jobs: Jobs) -> None:
    with WorkerProcess(database_url, shutdown_timeout=60) as process:
        job_id = jobs.add("async holding")
        process.expect("run async holding")
        process.send(number)
        wait_until(lambda: "no more claims" in process.log())
        told = time.monotonic()
        wait_until(lambda: time.monotonic() > told + 2 * ONE_SIGNAL_SECONDS)
        process.send(number)
        asked = time.monotonic()
        assert process.wait() == 1
        assert time.monotonic() - asked < 3
    row = jobs.row(job_id)
    assert (row["status"], row["attempt"], row["lost"], row["locked_until"]) == ("queued", 0, 0, None)
    assert jobs.effects(job_id) == []


@pytest.mark.slow
def test_a_signal_that_comes_twice_at_once_is_one(database_url: URL, jobs: Jobs) -> None:
    """As ``timeout`` sends it: to the process, and to its group."""
    with WorkerProcess(database_url, shutdown_timeout=60) as process:
        job_id = jobs.add("holding")
        process.expect("run holding")
        process.terminate()
        process.terminate()
        wait_until(lambda: "no more claims" in process.log())
        process.say("go")
        assert process.wait() == 0
    assert jobs.row(job_id)["status"] == "done"


@pytest.mark.slow
def test_a_plain_handler_that_never_returns_does_not_keep_the_process(database_url: URL, jobs: Jobs) -> None:
    with WorkerProcess(database_url, shutdown_timeout=0.3, lease=1) as process:
        job_id = jobs.add("asleep")
        process.expect("run asleep")
        process.terminate()
        asked = time.monotonic()
        assert process.wait() == 1
        assert time.monotonic() - asked < 4
        assert "cannot be stopped: it is left to the end of its lease" in process.log()
    # Nobody holds it any more: another worker takes it when the lease is over.
    handlers = HandlerRegistry()

    @handlers.handler("asleep")
    def awake(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id, attempt=job.attempt))

    _taken_over(handlers, database_url, jobs, job_id)


@pytest.mark.slow
def test_a_thread_of_an_async_handler_that_never_returns_does_not_keep_it_either(database_url: URL, jobs: Jobs) -> None:
    with WorkerProcess(database_url, shutdown_timeout=0.3, lease=60) as process:
        job_id = jobs.add("async asleep")
        process.expect("run async asleep")
        process.terminate()
        asked = time.monotonic()
        assert process.wait() == 0
        assert time.monotonic() - asked < 6
    row = jobs.row(job_id)
    assert (row["status"], row["attempt"]) == ("queued", 0)


def _taken_over(handlers: HandlerRegistry, url: URL, jobs: Jobs, job_id: Any) -> None:
    engine = sa.create_engine(url)
    with running(Worker(engine, handlers, lease=1, poll_interval=0.05)):
        assert jobs.wait(job_id)["status"] == "done"
    engine.dispose()
    assert jobs.effects(job_id) == [(2, "")]


@pytest.mark.slow
def test_a_signal_before_the_database_can_be_reached(database_url: URL, tmp_path: Any) -> None:
    with WorkerProcess(database_url.update_query_dict({"host": str(tmp_path)})) as process:
        process.expect("starting")
        wait_until(lambda: "trying again" in process.log())
        process.terminate()
        asked = time.monotonic()
        assert process.wait() == 0
        assert time.monotonic() - asked < 2
        assert process.lines("ready") == []


@pytest.mark.slow
def test_signals_in_quick_succession_never_hang_it(database_url: URL, jobs: Jobs) -> None:
    """A signal handler runs between any two steps of the main thread, also while that one holds a lock."""
    with WorkerProcess(database_url, shutdown_timeout=60) as process:
        jobs.add("async holding")
        process.expect("run async holding")

        def terminated() -> bool:
            process.terminate()
            return process.ended

        wait_until(terminated, 10)
        # The last one may have come when run() was over, and the interpreter on its way out.
        assert process.wait() in {1, -signal.SIGTERM}


# -- start() and stop() --------------------------------------------------------------------------------------


def test_a_worker_may_be_started_again(engine: Engine, jobs: Jobs) -> None:
    worker = Worker(engine, effects(), poll_interval=0.05)
    for _ in range(3):
        with running(worker):
            job_id = jobs.add("work")
            assert jobs.wait(job_id)["status"] == "done"
    assert worker.stop()


def test_two_workers_in_one_process(engine: Engine, jobs: Jobs) -> None:
    ids = jobs.add_many("work", 100)
    with running(*[Worker(engine, effects(), poll_interval=0.05) for _ in range(2)]):
        jobs.wait_all()
    assert jobs.effects_by_job() == dict.fromkeys(ids, 1)


def test_it_is_not_started_twice_at_once(engine: Engine) -> None:
    worker = Worker(engine, effects())
    with running(worker), pytest.raises(ConfigurationError, match="running already: stop it first"):
        worker.start()


def test_a_stop_while_it_still_waits_for_the_database(database_url: URL, tmp_path: Any, jobs: Jobs) -> None:
    gone = sa.create_engine(database_url.update_query_dict({"host": str(tmp_path)}))
    worker = Worker(gone, effects())
    starting = threading.Thread(target=worker.start)
    starting.start()
    wait_until(lambda: worker._running is not None or starting.is_alive())
    worker.stop()
    starting.join(5)
    assert not starting.is_alive()
    # And it can be started again, with what it was given.
    again = threading.Thread(target=worker.start)
    again.start()
    worker.stop()
    wait_until(lambda: worker.stop() and not again.is_alive())


def test_stop_gives_back_what_was_prefetched(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    """Quick jobs are claimed ahead. Those that wait when the stop comes have used no attempt."""
    handlers = HandlerRegistry()
    inside, go = threading.Event(), threading.Event()

    @handlers.handler("work")
    def work(session: Session, job: Job[Any]) -> None:
        if job.payload.get("hold"):
            inside.set()
            go.wait(20)

    jobs.add_many("work", 60, priority=3)
    jobs.add("work", {"hold": True}, priority=2)
    rest = jobs.add_many("work", 60, priority=1)
    worker = Worker(engine, handlers, queues={"default": 1}, poll_interval=5, shutdown_timeout=10)
    stopping = threading.Thread(target=worker.stop)
    with running(worker):
        assert inside.wait(5)
        claimed = observer.scalar("SELECT count(*) FROM enlist_job WHERE status = 'running'")
        stopping.start()
        wait_until(lambda: observer.scalar("SELECT count(*) FROM enlist_job WHERE status = 'running'") == 1)
        go.set()
        stopping.join()
    assert claimed > 1, "nothing was prefetched: this test tests nothing"
    for job_id in rest:
        row = jobs.row(job_id)
        assert (row["status"], row["attempt"], row["locked_by"], row["lost"]) == ("queued", 0, None, 0)
    assert jobs.counts() == {"done": 61, "queued": 60}


@pytest.mark.slow
def test_stop_gives_back_async_jobs_that_a_blocked_loop_never_started(
    engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    handlers = HandlerRegistry()
    inside, go = threading.Event(), threading.Event()

    @handlers.handler("blocking")
    async def blocking(session: AsyncSession, job: Job[Any]) -> None:
        inside.set()
        go.wait(20)

    @handlers.handler("work")
    async def work(session: AsyncSession, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))

    jobs.add("blocking")
    worker = Worker(engine, handlers, queues={"default": 3}, poll_interval=0.05, shutdown_timeout=0.1)
    try:
        with running(worker):
            assert inside.wait(5)
            behind = jobs.add("work")
            jobs.wait(behind, "running")
            assert not worker.stop()
            row = jobs.row(behind)
            assert (row["status"], row["attempt"], row["lost"]) == ("queued", 0, 0)
    finally:
        go.set()
    assert jobs.effects(behind) == []


def test_plain_handlers_that_heed_a_stop_are_given_back(engine: Engine, jobs: Jobs) -> None:
    handlers = HandlerRegistry()
    inside = threading.Event()

    @handlers.handler("work")
    def work(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))
        session.flush()
        inside.set()
        wait_until(lambda: job.cancel_requested, 10)

    job_id = jobs.add("work")
    worker = Worker(engine, handlers, poll_interval=0.05, shutdown_timeout=0.05)
    with running(worker):
        assert inside.wait(5)
        assert worker.stop()
    # It came back, and has perhaps not done all of its work.
    row = jobs.row(job_id)
    assert (row["status"], row["attempt"], row["locked_until"]) == ("queued", 0, None)
    assert jobs.effects(job_id) == []


def test_shutdown_timeout_ends_async_handlers_and_gives_their_jobs_back(engine: Engine, jobs: Jobs) -> None:
    handlers = HandlerRegistry()
    inside = threading.Event()
    cancelled: list[bool] = []

    @handlers.handler("work")
    async def work(session: AsyncSession, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))
        await session.flush()
        inside.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(job.cancel_requested)
            raise

    job_id = jobs.add("work")
    worker = Worker(engine, handlers, poll_interval=0.05, shutdown_timeout=0.05)
    with running(worker):
        assert inside.wait(5)
        assert worker.stop()
    row = jobs.row(job_id)
    assert (row["status"], row["attempt"], row["last_error"], row["locked_until"]) == ("queued", 0, None, None)
    assert cancelled == [True]
    assert jobs.effects(job_id) == []


@pytest.mark.slow
def test_stops_at_random_moments_lose_nothing(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    """In the middle of claims, starts and completions: afterwards nothing runs, and each job has run once."""
    ids = jobs.add_many("work", 300)
    worker = Worker(engine, effects(), queues={"default": 10}, poll_interval=0.01)
    rounds = 0
    while jobs.counts().keys() != {"done"}:
        rounds += 1
        before = jobs.counts().get("done", 0)
        with running(worker):
            wait_until(partial(_more_done, jobs, before))
        assert "running" not in jobs.counts()
    assert rounds > 3, "all was done at once: this test tests nothing"
    assert jobs.effects_by_job() == dict.fromkeys(ids, 1)
    assert observer.scalar("SELECT max(attempt) FROM enlist_job") == 1


def _more_done(jobs: Jobs, before: int) -> bool:
    return jobs.counts().get("done", 0) > before


# -- drain() -------------------------------------------------------------------------------------------------


def test_drain_runs_what_is_due_and_stops(engine: Engine, jobs: Jobs) -> None:
    ids = jobs.add_many("work", 50)
    key: dict[str, Any] = {"concurrency_key": "k", "concurrency_limit": 1}
    ids += jobs.add_many("work", 5, **key) + jobs.add_many("work", 5, max_attempts=1)
    later = jobs.add("work", due_in=3600)
    unknown = jobs.add("unknown")
    Worker(engine, effects()).drain(timeout=10)
    assert jobs.effects_by_job() == dict.fromkeys(ids, 1)
    assert {jobs.status(job_id) for job_id in ids} == {"done"}
    assert (jobs.status(later), jobs.status(unknown)) == ("queued", "queued")


def test_drain_runs_what_the_jobs_enqueue(engine: Engine, jobs: Jobs) -> None:
    from enlist import JobRepository

    repo, handlers = JobRepository(), effects()

    @handlers.handler("chain")
    def chain(session: Session, job: Job[Any]) -> None:
        if job.payload["left"]:
            repo.enqueue(session, "chain", {"left": job.payload["left"] - 1})

    jobs.add("chain", {"left": 5})
    Worker(engine, handlers).drain(timeout=10)
    assert jobs.counts() == {"done": 6}


def test_drain_of_nothing_returns(engine: Engine) -> None:
    Worker(engine, effects()).drain(timeout=5)


def test_drain_gives_up_in_time(engine: Engine, jobs: Jobs) -> None:
    handlers = HandlerRegistry()
    go = threading.Event()

    @handlers.handler("work")
    def work(session: Session, job: Job[Any]) -> None:
        wait_until(lambda: job.cancel_requested or go.is_set(), 10)

    jobs.add("work")
    with pytest.raises(TimeoutError, match=r"jobs were still due after 0\.3 seconds"):
        Worker(engine, handlers, shutdown_timeout=0.05).drain(timeout=0.3)


# -- from elsewhere ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
def test_a_handler_may_stop_its_worker(is_async: bool, engine: Engine, jobs: Jobs) -> None:
    handlers = HandlerRegistry()
    stopped = []

    def stopping(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))
        stopped.append(worker.stop())

    async def async_stopping(session: AsyncSession, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))
        stopped.append(worker.stop())

    decorate: Any = handlers.handler("stopping")
    decorate(async_stopping if is_async else stopping)
    worker = Worker(engine, handlers, poll_interval=0.05)
    job_id = jobs.add("stopping")
    worker.start()
    wait_until(lambda: stopped)
    assert worker.stop()  # waits for the end
    assert stopped == [False]
    assert jobs.status(job_id) == "done"


def test_a_handler_that_stops_its_worker_ends_a_drain(engine: Engine, jobs: Jobs) -> None:
    handlers = HandlerRegistry()

    @handlers.handler("stopping")
    def stopping(session: Session, job: Job[Any]) -> None:
        worker.stop()

    worker = Worker(engine, handlers, queues={"default": 1}, poll_interval=0.05)
    first, second = jobs.add_many("stopping", 2)
    worker.drain(timeout=10)
    assert (jobs.status(first), jobs.status(second)) == ("done", "queued")


def test_a_second_stop_waits_for_the_first(engine: Engine, jobs: Jobs) -> None:
    handlers = HandlerRegistry()
    started, release = threading.Event(), threading.Event()

    @handlers.handler("held")
    def held(session: Session, job: Job[Any]) -> None:
        started.set()
        release.wait(10)

    worker = Worker(engine, handlers, poll_interval=0.05)
    job_id = jobs.add("held")
    worker.start()
    assert started.wait(5)
    first = threading.Thread(target=worker.stop)
    first.start()
    second = threading.Thread(target=worker.stop)
    second.start()
    second.join(0.3)
    assert second.is_alive()
    release.set()
    first.join()
    second.join()
    assert jobs.status(job_id) == "done"


@pytest.mark.slow
def test_a_hangup_is_a_stop_like_another(database_url: URL, jobs: Jobs) -> None:
    """Of a process that was not started with nohup: as this one may have been."""
    with WorkerProcess(database_url, shutdown_timeout=60, hears_hangup=True) as process:
        job_id = jobs.add("holding")
        process.expect("run holding")
        process.send(signal.SIGHUP)
        wait_until(lambda: "no more claims" in process.log())
        process.say("go")
        assert process.wait() == 0
    assert jobs.row(job_id)["status"] == "done"


def test_it_is_started_once_however_many_try(engine: Engine) -> None:
    handlers = HandlerRegistry()
    handlers.handler("work")(lambda session, job: None)
    inside, go = threading.Event(), threading.Event()

    @contextmanager
    def slow() -> Iterator[None]:
        inside.set()
        go.wait(10)
        yield

    worker = Worker(engine, handlers, lifespan=slow)
    starting = threading.Thread(target=worker.start)
    starting.start()
    try:
        assert inside.wait(5)
        worker.stop()
        with pytest.raises(ConfigurationError, match="being started already"):
            worker.start()
    finally:
        go.set()
        starting.join()
    assert not worker.health().running  # it heeded the stop
    worker.start()
    assert worker.health().running
    worker.stop()


def test_a_lifespan_that_stops_its_worker_when_it_is_left_ends_too(engine: Engine) -> None:
    handlers = HandlerRegistry()
    handlers.handler("work")(lambda session, job: None)
    answers: list[bool] = []

    @contextmanager
    def lifespan() -> Iterator[None]:
        yield
        answers.append(worker.stop())

    worker = Worker(engine, handlers, lifespan=lifespan)
    worker.start()
    assert worker.stop()
    assert answers == [False]
