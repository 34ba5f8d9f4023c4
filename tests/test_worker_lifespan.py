"""A worker's `lifespan=`, and a worker in the lifespan of something else: a web application, a server that forks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Self

import pytest
import sqlalchemy as sa
from sqlalchemy import URL, Engine
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from enlist import ConfigurationError, HandlerRegistry, Job, Worker, _running
from tests.shop import Effect
from tests.support import Observer, wait_until
from tests.support.jobs import Jobs, running
from tests.support.process import WorkerProcess


@pytest.fixture
def jobs(observer: Observer) -> Jobs:
    return Jobs(observer)


def effects() -> HandlerRegistry:
    handlers = HandlerRegistry()

    @handlers.handler("work")
    def work(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id, worker=str(job.resources)))

    return handlers


def worker_of(engine: Engine, lifespan: Callable[[], Any], handlers: HandlerRegistry | None = None) -> Worker:
    return Worker(engine, handlers or effects(), lifespan=lifespan, poll_interval=0.05)


# -- an async one ------------------------------------------------------------------------------------------------


def test_an_async_lifespan_is_on_the_loop_of_the_async_handlers(engine: Engine, jobs: Jobs) -> None:
    handlers = HandlerRegistry()
    seen: list[Any] = []

    @handlers.handler("work")
    async def work(session: AsyncSession, job: Job[Any]) -> None:
        seen.append((job.resources, asyncio.get_running_loop()))

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[str]:
        before = (asyncio.get_running_loop(), asyncio.current_task())
        yield "the client"
        seen.append((before, (asyncio.get_running_loop(), asyncio.current_task())))

    with running(worker_of(engine, lifespan, handlers)):
        jobs.wait(jobs.add("work"))
    (resources, loop), (entered, left) = seen
    assert resources == "the client"
    assert entered == left, "task groups and cancel scopes want to be left where they were entered"
    assert entered[0] is loop


def test_an_async_lifespan_serves_plain_handlers_too(engine: Engine, jobs: Jobs) -> None:
    handlers = HandlerRegistry()

    async def ask() -> str:
        await asyncio.sleep(0)
        return "answer"

    @handlers.handler("work")
    def work(session: Session, job: Job[Any]) -> None:
        answer = asyncio.run_coroutine_threadsafe(ask(), job.resources).result(5)
        session.add(Effect(job_id=job.id, worker=answer))

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[asyncio.AbstractEventLoop]:
        yield asyncio.get_running_loop()

    with running(worker_of(engine, lifespan, handlers)):
        job_id = jobs.add("work")
        assert jobs.wait(job_id)["status"] == "done"
    assert jobs.effects(job_id) == [(1, "answer")]


class Both:
    """As an aiohttp.ClientSession is: the plain methods are there to say that it is async."""

    def __init__(self) -> None:
        self.state = "new"

    def __enter__(self) -> None:
        raise TypeError("use async with instead")

    def __exit__(self, *_: object) -> None: ...

    async def __aenter__(self) -> Self:
        self.state = "open"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.state = "closed"


def test_one_that_is_both_is_entered_the_async_way(engine: Engine) -> None:
    both = Both()
    with running(worker_of(engine, lambda: both)):
        assert both.state == "open"
    assert both.state == "closed"


# -- plain or async ----------------------------------------------------------------------------------------------


def plain(enter: Callable[[], Any], leave: Callable[[], Any]) -> Callable[[], Any]:
    @contextmanager
    def lifespan() -> Iterator[Any]:
        value = enter()
        yield value
        leave()

    return lifespan


def asynchronous(enter: Callable[[], Any], leave: Callable[[], Any]) -> Callable[[], Any]:
    @asynccontextmanager
    async def lifespan() -> AsyncIterator[Any]:
        value = enter()
        yield value
        leave()

    return lifespan


def boom() -> None:
    raise OSError("boom")


either = pytest.mark.parametrize("make", [plain, asynchronous])


@either
def test_each_start_enters_anew(make: Any, engine: Engine, jobs: Jobs) -> None:
    entered: list[int] = []
    left: list[int] = []

    def enter() -> int:
        entered.append(len(entered))
        return entered[-1]

    worker = worker_of(engine, make(enter, lambda: left.append(len(left))))
    for number in range(3):
        with running(worker):
            job_id = jobs.add("work")
            jobs.wait(job_id)
            assert jobs.effects(job_id) == [(1, str(number))]
            assert left == list(range(number))
    assert entered == left == [0, 1, 2]


@either
def test_what_entering_raises_start_raises_and_all_is_closed(make: Any, engine: Engine, jobs: Jobs) -> None:
    fails = [True]

    def enter() -> None:
        if fails.pop():
            boom()

    worker = worker_of(engine, make(enter, lambda: None))
    threads = set(threading.enumerate())
    with pytest.raises(OSError, match="boom"):
        worker.start()
    assert set(threading.enumerate()) <= threads
    fails.append(False)
    with running(worker):
        assert jobs.wait(jobs.add("work"))["status"] == "done"


@either
def test_what_leaving_raises_is_logged_and_all_ends(
    make: Any, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    worker = worker_of(engine, make(lambda: None, boom))
    threads = set(threading.enumerate())
    worker.start()
    assert worker.stop()
    assert set(threading.enumerate()) <= threads
    (record,) = [record for record in caplog.records if "lifespan could not be left" in record.message]
    assert "OSError: boom" in caplog.text
    assert record.levelname == "ERROR"


@pytest.mark.parametrize(
    ("lifespan", "decorator"),
    [("generator", "contextmanager"), ("async generator", "asynccontextmanager"), ("coroutine", "asynccontextmanager")],
)
def test_what_is_no_context_manager_is_refused_with_what_makes_it_one(
    lifespan: str, decorator: str, engine: Engine
) -> None:
    def generator() -> Iterator[None]:
        yield

    async def async_generator() -> AsyncIterator[None]:
        yield

    async def coroutine() -> None: ...

    make: Any = {"generator": generator, "async generator": async_generator, "coroutine": coroutine}[lifespan]
    worker = worker_of(engine, make)
    with pytest.raises(ConfigurationError, match=rf"lifespan must return a context manager.*@contextlib\.{decorator}"):
        worker.start()


def test_a_stop_while_an_async_lifespan_is_entered(engine: Engine) -> None:
    """Say it waits for a broker that is not there."""
    entering, cancelled = threading.Event(), threading.Event()

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        entering.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        yield

    worker = worker_of(engine, lifespan)
    starting = threading.Thread(target=worker.start)
    starting.start()
    assert entering.wait(5)
    worker.stop()
    starting.join(5)
    assert not starting.is_alive()
    assert cancelled.is_set()


def test_one_that_is_never_left_is_given_up(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_running, "STOPPING_SECONDS", 0.2)

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        yield
        await asyncio.Event().wait()

    worker = worker_of(engine, lifespan)
    worker.start()
    assert worker.stop()
    assert "the worker's lifespan is given up: it was not left in 0.2 seconds" in caplog.text


def test_one_that_ends_while_the_worker_works_is_told_of(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """Say a task of its task group has failed: what it has opened is closed by then."""

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            yield

    async def fail() -> None:
        await asyncio.sleep(0.05)
        boom()

    with running(worker_of(engine, lifespan)):
        wait_until(lambda: "has ended while the worker works: what it opened is gone" in caplog.text)
    assert "OSError: boom" in caplog.text


# -- in the lifespan of a web application ------------------------------------------------------------------------


async def test_a_worker_in_the_lifespan_of_a_web_application(engine: Engine, jobs: Jobs) -> None:
    """Several times in one process, as tests of applications do; start() and stop() are not in the main thread."""
    worker = Worker(engine, effects(), poll_interval=0.05)

    @asynccontextmanager
    async def lifespan(_app: object) -> AsyncIterator[None]:
        try:
            await asyncio.to_thread(worker.start)
            yield
        finally:
            await asyncio.to_thread(worker.stop)

    for _ in range(3):
        threads = {thread.name for thread in threading.enumerate() if thread.name.startswith("enlist")}
        async with lifespan(None):
            job_id = jobs.add("work")
            row = await asyncio.to_thread(jobs.wait, job_id)
            assert row["status"] == "done"
        left = {thread.name for thread in threading.enumerate() if thread.name.startswith("enlist")}
        assert left == threads
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]


async def test_an_application_that_is_given_up_while_its_worker_waits_for_the_database(
    database_url: URL, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gone = sa.create_engine(database_url.update_query_dict({"host": str(tmp_path)}))
    worker = Worker(gone, effects())

    async def live() -> None:
        try:
            await asyncio.to_thread(worker.start)
        finally:
            await asyncio.to_thread(worker.stop)

    life = asyncio.create_task(live())
    await asyncio.to_thread(wait_until, lambda: "trying again" in caplog.text)
    life.cancel()
    with pytest.raises(asyncio.CancelledError):
        await life
    await asyncio.wait_for(asyncio.get_running_loop().shutdown_default_executor(), 5)  # no thread waits on
    gone.dispose()


@pytest.mark.slow
def test_a_reloaded_application_works_while_the_old_process_drains(
    database_url: URL, jobs: Jobs, observer: Observer
) -> None:
    with WorkerProcess(database_url, "web", label="old") as old:
        old.expect("ready")
        held = jobs.add("work", {"hold": True})
        old.expect("run")
        old.terminate()  # which the server gets, and not the worker
        wait_until(lambda: "no more claims" in old.log())
        with WorkerProcess(database_url, "web", label="new") as new:
            new.expect("ready")
            ids = jobs.add_many("work", 20)
            for job_id in ids:
                jobs.wait(job_id)
            assert jobs.status(held) == "running"
            old.say("go")
            assert old.wait() == 0
            new.terminate()
            assert new.wait() == 0
    assert jobs.effects(held) == [(1, "old")]
    assert {effect for job_id in ids for effect in jobs.effects(job_id)} == {(1, "new")}
    assert old.lines("left") == new.lines("left") == ["left []"]
    assert observer.scalar("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()") == 1


# -- before a fork -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_worker_made_before_a_fork_works_in_each_child(database_url: URL, jobs: Jobs) -> None:
    """The connections that the parent's engine has opened are not used by two processes."""
    ids = jobs.add_many("work", 100) + jobs.add_many("async work", 100)
    with WorkerProcess(database_url, "prefork") as process:
        done = [process.expect("done", 30).split() for _ in range(2)]
        assert process.expect("parent") == "parent 1"
        assert process.wait() == 0
    assert [status for _, _, status in done] == ["0", "0"], process.log()
    assert jobs.effects_by_job() == dict.fromkeys(ids, 1)
    assert jobs.counts() == {"done": 200}
    assert "Traceback" not in process.log()


@pytest.mark.slow
def test_a_worker_started_before_a_fork_is_stopped_by_its_parent_alone(database_url: URL, jobs: Jobs) -> None:
    """Say the server runs the same clean-up in all its processes."""
    with WorkerProcess(database_url, "prefork", started=True) as process:
        done = [process.expect("done", 30).split() for _ in range(2)]
        job_id = jobs.add("work")
        assert jobs.wait(job_id)["status"] == "done"
        process.say("go")
        assert process.expect("stopped") == "stopped True"
        assert process.wait() == 0
    assert [status for _, _, status in done] == ["0", "0"], process.log()
    assert "Traceback" not in process.log()
