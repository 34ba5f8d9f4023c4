"""What makes small jobs quick changes nothing else: no job meets what another has left, and nothing runs ahead."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import time
import uuid
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from sqlalchemy import Engine, event, text
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import QueuePool

from enlist import HandlerRegistry, Job, JobRecord, JobRepository, Worker, _completer, _executor, _slots
from enlist._leases import Leases
from enlist._running import Running
from enlist._slots import Demand, Run, Slots
from enlist._stalls import StallWatch
from enlist._statements import CLAIM_LIMIT
from enlist._threads import Threads
from enlist.handlers import Flush, Handler
from tests.shop import Effect
from tests.support import Observer, wait_until
from tests.support.jobs import Jobs, running

LOOPS = ["asyncio", "uvloop"]
ONE_SLOT = {"default": 1}


@pytest.fixture
def jobs(observer: Observer) -> Jobs:
    return Jobs(observer)


def make_run(flush: Flush = "job") -> Run:
    handler = Handler("work", print, None, is_async=False, flush=flush)
    return Run(uuid.uuid4(), 1, "work", "default", 1, 20, "{}", "{}", handler, careful=False, lease_ends=0.0)


@pytest.fixture(params=LOOPS)
def loop_class(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The event loop of the async handlers: with uvloop installed, and without."""
    name: str = request.param
    monkeypatch.setattr(_executor, "uvloop", uvloop if name == "uvloop" else None)
    return name


# -- async jobs share a loop -----------------------------------------------------------------------------------


def test_a_context_variable_is_not_the_next_jobs(engine: Engine, jobs: Jobs) -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)
    seen: list[int] = []
    handlers = HandlerRegistry()

    @handlers.handler("work")
    async def work(session: AsyncSession, job: Job[Any]) -> None:
        seen.append(variable.get())
        if job.payload["sets"]:
            variable.set(1)

    jobs.add_many("work", [{"sets": number % 3 == 0} for number in range(300)])
    Worker(engine, handlers, queues=ONE_SLOT).drain(20)
    assert seen == [0] * 300


def test_a_handler_that_cancels_its_own_task_does_not_cancel_the_next(engine: Engine, jobs: Jobs) -> None:
    handlers = HandlerRegistry()

    @handlers.handler("work")
    async def work(session: AsyncSession, job: Job[Any]) -> None:
        if job.payload["cancels"]:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        else:
            await asyncio.sleep(0)

    ids = jobs.add_many("work", [{"cancels": number % 3 == 0} for number in range(60)])
    Worker(engine, handlers, queues=ONE_SLOT).drain(20)
    assert [jobs.row(job_id)["attempt"] for job_id in ids] == [1] * 60
    assert jobs.counts() == {"done": 60}


def test_handlers_that_wait_for_nothing_do_not_hold_up_the_loop(
    engine: Engine, jobs: Jobs, observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_slots, "PREFETCH_SECONDS", 60)  # as many as there may be, however slow the machine is
    order: list[str] = []
    blocked, go_on = threading.Event(), threading.Event()
    handlers = HandlerRegistry()

    @handlers.handler("quick")
    async def quick(session: AsyncSession, job: Job[Any]) -> None:
        order.append("quick")

    @handlers.handler("blocking")
    async def blocking(session: AsyncSession, job: Job[Any]) -> None:
        blocked.set()
        go_on.wait(10)

    @handlers.handler("patient")
    async def patient(session: AsyncSession, job: Job[Any]) -> None:
        for _ in range(5):
            await asyncio.sleep(0)
        order.append("patient")

    queues = {"default": 1, "blocking": 1, "patient": 1}
    with running(Worker(engine, handlers, queues=queues, poll_interval=0.05)):
        jobs.add_many("quick", 300)
        jobs.wait_all()
        jobs.add("blocking", queue="blocking")
        assert blocked.wait(5)
        jobs.add_many("quick", 1500)
        jobs.add("patient", queue="patient")
        # Meanwhile they are claimed: one has the slot, and the others wait for it.
        observer.wait_for("SELECT count(*) > 1000 FROM enlist_job WHERE status = 'running'")
        order.clear()
        go_on.set()
        jobs.wait_all()
    assert order.index("patient") < 1000


def test_of_several_jobs_that_had_a_task_the_one_that_blocks_is_named() -> None:
    leases = Leases()
    runs = [make_run() for _ in range(3)]
    leases.add(*runs)

    async def block() -> None:
        watch = StallWatch(asyncio.get_running_loop(), threading.get_ident(), leases)
        for run in runs:
            run.task = asyncio.current_task()
        runs[1].in_handler = True
        assert watch._blocking()[0] is runs[1]

    asyncio.run(block())


def test_each_job_has_a_task_of_its_own(engine: Engine, jobs: Jobs) -> None:
    """What is kept by the task, a scoped session of the application's say, must not be the next job's."""
    tasks: list[object] = []
    handlers = HandlerRegistry()

    @handlers.handler("work")
    async def work(session: AsyncSession, job: Job[Any]) -> None:
        tasks.append(asyncio.current_task())

    jobs.add_many("work", 100)
    Worker(engine, handlers, queues=ONE_SLOT).drain(20)
    assert len(set(tasks)) == 100


def test_a_handlers_thread_is_known_as_one_at_once() -> None:
    """Or a handler that stops its worker would wait for itself."""
    known: list[bool] = []

    def note(threads: Threads) -> None:
        known.append(threads.here)

    for _ in range(100):
        threads = Threads(2)
        for _ in range(2):
            threads.submit(partial(note, threads))
        threads.stop()
        assert threads.join(5)
    assert known == [True] * 200
    assert not threads.here


# -- sessions that nobody has used -----------------------------------------------------------------------------


def test_a_session_that_was_not_used_cannot_be_used_after_its_attempt(engine: Engine, jobs: Jobs) -> None:
    kept: list[Session] = []
    handlers = HandlerRegistry()

    @handlers.handler("work")
    def work(session: Session, job: Job[Any]) -> None:
        kept.append(session)

    jobs.add("work")
    Worker(engine, handlers).drain(20)
    (session,) = kept
    for _ in range(2):
        with pytest.raises(InvalidRequestError):
            session.add(Effect(job_id=uuid.uuid4()))
        with pytest.raises(InvalidRequestError):
            session.execute(text("SELECT 1"))
    session.close()


async def test_the_same_for_an_async_session(engine: Engine, jobs: Jobs) -> None:
    kept: list[AsyncSession] = []
    handlers = HandlerRegistry()

    @handlers.handler("work")
    async def work(session: AsyncSession, job: Job[Any]) -> None:
        kept.append(session)

    jobs.add("work")
    await asyncio.to_thread(Worker(engine, handlers).drain, 20)
    (session,) = kept
    for _ in range(2):
        with pytest.raises(InvalidRequestError):
            await session.execute(text("SELECT 1"))


class Beginning(Session):
    """Begins its transaction when it is made, as for a setting that row security goes by."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.execute(text("SELECT set_config('shop.tenant', '7', true)"))


class OnlyBeginning(Session):
    """Begins it too, but sends nothing: it has no connection yet."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.begin()


@pytest.mark.parametrize("session_class", [Beginning, OnlyBeginning])
@pytest.mark.parametrize("uses", [True, False])
def test_a_session_that_begins_when_it_is_made_commits_too(
    uses: bool, session_class: type[Session], engine: Engine, jobs: Jobs
) -> None:
    handlers = HandlerRegistry()

    @handlers.handler("work")
    def work(session: Session, job: Job[Any]) -> None:
        if uses:
            session.add(Effect(job_id=job.id))

    @handlers.handler("committing")
    def committing(session: Session, job: Job[Any]) -> None:
        session.execute(text("COMMIT"))

    ids = jobs.add_many("work", 5)
    refused = jobs.add("committing", max_attempts=1)
    Worker(sessionmaker(engine, class_=session_class), handlers).drain(20)
    assert [jobs.status(job_id) for job_id in ids] == ["done"] * 5
    assert jobs.effects_by_job() == (dict.fromkeys(ids, 1) if uses else {})
    assert "COMMIT" in jobs.row(refused)["last_error"]
    pool = engine.pool
    assert isinstance(pool, QueuePool)
    assert pool.checkedout() == 0


@pytest.mark.parametrize("length", [1, 5000])
def test_what_a_statement_is_does_not_depend_on_its_length(length: int, engine: Engine, jobs: Jobs) -> None:
    """Of short ones it is remembered, long ones are read each time."""
    comment = f"/* {'x' * length} */ "
    handlers = HandlerRegistry()

    @handlers.handler("committing")
    def committing(session: Session, job: Job[Any]) -> None:
        session.execute(text(comment + "COMMIT"))

    times: list[str] = []

    @handlers.handler("setting", commit_every=10)
    def setting(session: Session, job: Job[Any]) -> None:
        times.append(str(session.scalar(text(comment + "SELECT current_setting('lock_timeout')"))))
        session.execute(text(comment + "SET LOCAL lock_timeout = '7s'"))

    ids = [jobs.add("committing", max_attempts=1) for _ in range(2)]
    jobs.add_many("setting", 10)
    Worker(engine, handlers, queues=ONE_SLOT).drain(20)
    assert ["COMMIT" in jobs.row(job_id)["last_error"] for job_id in ids] == [True, True]
    assert times == ["0"] * 10


def test_an_applications_close_is_called_whether_or_not_the_session_was_used(engine: Engine, jobs: Jobs) -> None:
    closed: list[Session] = []

    class Closing(Session):
        def close(self) -> None:
            closed.append(self)
            super().close()

    handlers = HandlerRegistry()

    @handlers.handler("work")
    def work(session: Session, job: Job[Any]) -> None:
        if job.payload["uses"]:
            session.execute(text("SELECT 1"))

    jobs.add_many("work", [{"uses": number % 2 == 0} for number in range(10)])
    Worker(sessionmaker(engine, class_=Closing), handlers).drain(20)
    assert len(closed) == 10


def test_a_listener_on_all_engines_hears_each_statement_once(engine: Engine, jobs: Jobs) -> None:
    heard: list[str] = []

    def hear(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        heard.append(statement)

    handlers = HandlerRegistry()

    @handlers.handler("plain")
    def plain(session: Session, job: Job[Any]) -> None:
        session.execute(text("SELECT 'plain'"))

    @handlers.handler("asynchronous")
    async def asynchronous(session: AsyncSession, job: Job[Any]) -> None:
        await session.execute(text("SELECT 'asynchronous'"))

    jobs.add("plain")
    jobs.add("asynchronous")
    event.listen(Engine, "before_cursor_execute", hear)
    try:
        Worker(engine, handlers).drain(20)
    finally:
        event.remove(Engine, "before_cursor_execute", hear)
    assert heard.count("SELECT 'plain'") == 1
    assert heard.count("SELECT 'asynchronous'") == 1
    assert jobs.counts() == {"done": 2}


# -- the claim -------------------------------------------------------------------------------------------------


def test_a_claim_that_brings_all_it_may_is_followed_by_another(engine: Engine, jobs: Jobs) -> None:
    """However much a queue of quick jobs could take: what a claim brings at most is what it is asked for."""
    wanted: list[None] = []
    slots = Slots({"default": 10}, lambda run: None, lambda: wanted.append(None))
    run = make_run()
    slots.place([run], slots.demands())
    slots.finished(run, since=time.monotonic())  # in no time at all
    slots._queues["default"].more = True
    (demand,) = slots.demands()
    assert demand.number == CLAIM_LIMIT
    runs = [make_run() for _ in range(CLAIM_LIMIT)]
    slots.place(runs, [demand])
    for run in runs:
        slots.finished(run, since=time.monotonic())
    assert wanted


@pytest.mark.parametrize(("flush", "least", "most"), [("job", 0, 30), ("group", 60, 200)])
def test_a_group_of_one_says_less_than_one_of_many_where_jobs_are_flushed_together(
    flush: Flush, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("enlist._slots.time", SimpleNamespace(monotonic=lambda: now))
    slots = Slots({"default": 1}, lambda run: None, lambda: None)
    run = make_run(flush=flush)
    for jobs in (100, 1) * 10:  # each group 5 ms, whatever it has
        slots.place([run], [Demand("default", free=1, number=1)])
        since, now = now, now + 0.005
        slots.finished(run, jobs, since)
    (demand,) = slots.demands()
    assert least < demand.number < most  # 50 ms of jobs of 0.5 ms, or of 2.6


def counting(monkeypatch: pytest.MonkeyPatch) -> tuple[HandlerRegistry, list[None], threading.Event]:
    """A handler that counts its jobs, and says when more have run than small bounds allow on five slots."""
    monkeypatch.setattr(_completer, "MOST_UNWRITTEN", 50)
    monkeypatch.setattr(_slots, "PREFETCH_MOST", 20)
    handlers = HandlerRegistry()
    ran: list[None] = []
    too_many = threading.Event()

    @handlers.handler("work")
    def work(session: Session, job: Job[Any]) -> None:
        ran.append(None)
        if len(ran) > 50 + 2 * (20 + 5):
            too_many.set()

    return handlers, ran, too_many


def test_jobs_are_not_claimed_faster_than_their_endings_are_written(
    engine: Engine, jobs: Jobs, observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers, ran, too_many = counting(monkeypatch)
    observer.execute("""
        CREATE FUNCTION wait_for_test() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN PERFORM pg_advisory_xact_lock_shared(1); RETURN NEW; END $$;
        CREATE TRIGGER wait_for_test BEFORE UPDATE ON enlist_job FOR EACH ROW
        WHEN (NEW.status = 'done') EXECUTE FUNCTION wait_for_test()
    """)
    ids = jobs.add_many("work", 400)
    observer.execute("SELECT pg_advisory_lock(1)")
    with running(Worker(engine, handlers, queues={"default": 5}, lease=60)):
        observer.wait_for("SELECT count(*) = 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
        wait_until(lambda: len(ran) > 50)
        assert not too_many.wait(0.5)
        observer.execute("SELECT pg_advisory_unlock(1)")
        jobs.wait_all()
    assert len(ran) == len(ids)


def test_nor_faster_than_rows_let_themselves_be_written(
    engine: Engine, jobs: Jobs, observer: Observer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also endings that are put off, since a trigger passes by their rows, are to be written."""
    handlers, ran, too_many = counting(monkeypatch)
    observer.execute("""
        CREATE FUNCTION pass_by() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
        CREATE TRIGGER pass_by BEFORE UPDATE ON enlist_job FOR EACH ROW
        WHEN (NEW.status = 'done') EXECUTE FUNCTION pass_by()
    """)
    jobs.add_many("work", 400)
    with running(Worker(engine, handlers, queues={"default": 5}, lease=60)):
        wait_until(lambda: len(ran) > 50)
        assert not too_many.wait(0.5)
        observer.execute("DROP TRIGGER pass_by ON enlist_job")
        jobs.wait_all()
    assert caplog.text.count("nothing more is claimed") >= 1


def test_a_waiting_job_that_is_cancelled_is_told_once(
    engine: Engine, jobs: Jobs, observer: Observer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "enlist")
    handlers = HandlerRegistry()
    holding, go_on = threading.Event(), threading.Event()

    @handlers.handler("work")
    def work(session: Session, job: Job[Any]) -> None:
        if job.payload.get("holds"):
            holding.set()
            go_on.wait(20)

    jobs.add_many("work", 300, priority=3)
    jobs.add("work", {"holds": True}, priority=2)
    rest = jobs.add_many("work", 30, priority=1)
    with running(Worker(engine, handlers, queues=ONE_SLOT, poll_interval=0.05)):
        assert holding.wait(10)
        observer.wait_for("SELECT count(*) = 31 FROM enlist_job WHERE status = 'running'")
        with Session(engine) as session, session.begin():
            JobRepository().cancel(session, JobRecord.id.in_(rest))
        observer.wait_for("SELECT count(*) = 30 FROM enlist_job WHERE status = 'cancelled'")
        go_on.set()
        wait_until(lambda: not jobs.counts().get("running"))
    assert caplog.text.count("was cancelled: nothing of this attempt") == 30


# -- its start, and its end ------------------------------------------------------------------------------------


def test_a_worker_that_is_stopped_while_it_starts_takes_nothing(
    engine: Engine, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = HandlerRegistry()
    handlers.handler("work")(lambda session, job: None)
    work = Running.work

    def late(self: Running) -> None:
        assert worker.stop()
        work(self)

    monkeypatch.setattr(Running, "work", late)
    job_id = jobs.add("work")
    worker = Worker(engine, handlers)
    worker.start()
    assert not worker.health().running
    assert jobs.status(job_id) == "queued"


def test_a_handler_that_stops_its_worker_has_made_the_last_claim(
    engine: Engine, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_may_go_on, another = threading.Event(), threading.Event()
    handlers = HandlerRegistry()

    @handlers.handler("stopping")
    def stopping(session: Session, job: Job[Any]) -> None:
        assert not worker.stop()
        wait_until(lambda: not any(thread.name == "enlist-claim" for thread in threading.enumerate()))
        jobs.add("work")
        another.wait(0.5)
        stop_may_go_on.set()

    @handlers.handler("work")
    def work(session: Session, job: Job[Any]) -> None:
        another.set()

    stop = Running.stop

    def late(self: Running, *arguments: Any) -> bool:
        stop_may_go_on.wait(10)
        return stop(self, *arguments)

    monkeypatch.setattr(Running, "stop", late)
    jobs.add("stopping")
    worker = Worker(engine, handlers, queues={"default": 2}, poll_interval=0.02)
    with running(worker):
        assert stop_may_go_on.wait(10)
    assert not another.is_set()
    assert jobs.counts() == {"done": 1, "queued": 1}


# -- the process -----------------------------------------------------------------------------------------------


def test_a_process_of_the_workers_own_collects_only_what_came_since(engine: Engine, jobs: Jobs) -> None:
    handlers = HandlerRegistry()
    frozen: list[int] = []

    @handlers.handler("work")
    def work(session: Session, job: Job[Any]) -> None:
        frozen.append(gc.get_freeze_count())
        worker.stop()

    jobs.add("work")
    worker = Worker(engine, handlers)
    assert gc.get_freeze_count() == 0
    worker.run()
    assert frozen[0] > 0
    assert gc.get_freeze_count() == 0


def test_on_either_event_loop_handlers_commit_time_out_and_use_threads(
    loop_class: str, engine: Engine, jobs: Jobs
) -> None:
    loops: set[str] = set()
    handlers = HandlerRegistry()

    @handlers.handler("work")
    async def work(session: AsyncSession, job: Job[Any]) -> None:
        loops.add(type(asyncio.get_running_loop()).__module__.partition(".")[0])
        assert await asyncio.to_thread(lambda: 1) == 1
        session.add(Effect(job_id=job.id))

    @handlers.handler("endless", timeout=0.05)
    async def endless(session: AsyncSession, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))
        await session.flush()
        await asyncio.sleep(60)

    ids = jobs.add_many("work", 20)
    late = jobs.add("endless", max_attempts=1)
    Worker(engine, handlers).drain(20)
    assert "ran longer than its timeout" in jobs.row(late)["last_error"]
    assert jobs.effects_by_job() == dict.fromkeys(ids, 1)
    assert loops == {loop_class}
