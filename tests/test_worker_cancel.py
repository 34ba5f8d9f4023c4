"""Cancelling a job that runs: its worker hears of it at once and gives it up, whoever holds the row's lock."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import sqlalchemy as sa
from sqlalchemy import URL, Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from enlist import (
    AsyncJobRepository,
    Changes,
    HandlerRegistry,
    InvalidOption,
    Job,
    JobRecord,
    JobRepository,
    JobStatus,
    Worker,
    notifier,
)
from enlist._cancelling import attempts_of, messages_of
from enlist._database import Database
from enlist._statements import statements_for
from enlist.events import EventName, JobEvent
from tests.shop import Effect, Order
from tests.support import Observer, wait_until
from tests.support.jobs import Jobs, running
from tests.support.process import WorkerProcess

STATEMENTS = statements_for(sa.inspect(JobRecord).local_table)
CHANNEL = STATEMENTS.cancel_channel

AT_ITS_START = [STATEMENTS.look, STATEMENTS.claim, STATEMENTS.claim_among, STATEMENTS.renew, STATEMENTS.expired]
"""What a worker asks when it has begun to listen, on threads of its own."""

SOON = 3
"""Seconds; less than a sixth of the time until the next heartbeat, and a tenth of that until the next poll."""

repo = JobRepository()


@pytest.fixture
def jobs(observer: Observer) -> Jobs:
    return Jobs(observer)


class Handlers(HandlerRegistry):
    """One handler of each sort that works until it is told to stop, or, if it does not listen, until ``go`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.go, self.left = threading.Event(), threading.Event(), threading.Event()
        self.told: list[bool] = []
        for hold_lock in (False, True):
            name = "held " if hold_lock else ""
            self.handler(f"{name}plain", hold_lock=hold_lock)(self.plain)
            self.handler(f"{name}deaf", hold_lock=hold_lock)(self.deaf)
            self.handler(f"{name}async", hold_lock=hold_lock)(self.asynchronous)
        self.handler("next")(self.following)

    def plain(self, session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))
        session.flush()
        self.inside.set()
        wait_until(lambda: job.cancel_requested or self.go.is_set(), 20)
        self.told.append(job.cancel_requested)

    def deaf(self, session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))
        session.flush()
        self.inside.set()
        assert self.go.wait(20)
        self.told.append(job.cancel_requested)

    async def asynchronous(self, session: AsyncSession, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))
        await session.flush()
        self.inside.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.told.append(job.cancel_requested)

    def following(self, session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))


@pytest.fixture
def handlers() -> Iterator[Handlers]:
    handlers = Handlers()
    yield handlers
    handlers.go.set()


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker hears nothing but what comes from the database, as one in another process."""
    monkeypatch.setattr(notifier.local, "publish", lambda channel, payloads: None)


def worker(engine: Engine, handlers: HandlerRegistry, **options: Any) -> Worker:
    return Worker(engine, handlers, **{"poll_interval": 30, "concurrency": 2, **options})


def cancel(engine: Engine, *which: Any, repo: JobRepository = repo) -> Changes:
    with Session(engine) as session, session.begin():
        return repo.cancel(session, *which)


def listening(worker: Worker) -> None:
    wait_until(lambda: worker.health().listening)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# -- it is told ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("notify", ["after_commit", "transaction"])
@pytest.mark.parametrize("kind", ["plain", "async"])
@pytest.mark.usefixtures("remote")
def test_a_running_job_is_given_up_within_a_second(
    engine: Engine,
    jobs: Jobs,
    handlers: Handlers,
    caplog: pytest.LogCaptureFixture,
    *,
    kind: str,
    notify: Literal["after_commit", "transaction"],
) -> None:
    caplog.set_level(logging.INFO)
    job_id = jobs.add(kind)
    with running(one := worker(engine, handlers)):
        listening(one)
        assert handlers.inside.wait(SOON)
        assert cancel(engine, job_id, repo=JobRepository(notify=notify)).changed == [job_id]
        wait_until(lambda: handlers.told, SOON)
        wait_until(lambda: one.health().free == 2, SOON)
        wait_until(lambda: one.health().jobs == 0, SOON)
    assert handlers.told == [True]
    assert (jobs.status(job_id), jobs.effects(job_id)) == ("cancelled", [])
    assert caplog.text.count("was cancelled: nothing of this attempt is committed") == 1
    assert warnings(caplog) == []


@pytest.mark.parametrize("notify", ["after_commit", "transaction"])
def test_workers_of_the_same_process_are_told_directly(
    engine: Engine, jobs: Jobs, handlers: Handlers, notify: Literal["after_commit", "transaction"]
) -> None:
    job_id = jobs.add("plain")
    with running(one := worker(engine, handlers)):
        assert handlers.inside.wait(SOON)
        one._running.listener.stop(5)  # type: ignore[union-attr]
        cancel(engine, job_id, repo=JobRepository(notify=notify))
        wait_until(lambda: handlers.told, SOON)
    assert handlers.told == [True]


@pytest.mark.parametrize("kind", ["deaf", "held deaf"])
def test_what_a_handler_does_that_does_not_listen_is_rolled_back(
    engine: Engine, jobs: Jobs, handlers: Handlers, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    job_id = jobs.add(kind)
    with running(one := worker(engine, handlers)):
        assert handlers.inside.wait(SOON)
        changes = cancel(engine, job_id)
        assert changes.changed == ([] if kind == "held deaf" else [job_id])
        assert changes.asked == ([job_id] if kind == "held deaf" else [])
        wait_until(lambda: one.health().stuck == 1, SOON)
        handlers.go.set()
        assert jobs.wait(job_id)["last_error"] == "cancelled while it ran"
        wait_until(lambda: one.health().free == 2)
        assert one.health().stuck == 0
    assert (jobs.status(job_id), jobs.effects(job_id), handlers.told) == ("cancelled", [], [True])
    assert warnings(caplog) == []


@pytest.mark.parametrize("kind", ["held plain", "held async"])
@pytest.mark.parametrize("form", ["id", "conditions"])
@pytest.mark.usefixtures("remote")
def test_a_handler_that_holds_its_rows_lock_is_asked(
    engine: Engine, jobs: Jobs, handlers: Handlers, caplog: pytest.LogCaptureFixture, *, kind: str, form: str
) -> None:
    caplog.set_level(logging.INFO)
    job_id = jobs.add(kind, unique_key="k", unique_held=True)
    with running(one := worker(engine, handlers)):
        listening(one)
        assert handlers.inside.wait(SOON)
        with Session(engine) as session:
            which = job_id if form == "id" else JobRecord.kind == kind
            changes = repo.cancel(session, which)
            assert (changes.asked, changes.changed, changes.unchanged, changes.missing) == ([job_id], [], {}, [])
            assert not changes
            session.add(Order(ref="usable"))
            session.flush()
            # Nothing is said before the commit.
            assert (jobs.status(job_id), handlers.told) == ("running", [])
            session.commit()
        row = jobs.wait(job_id, timeout=SOON)
        wait_until(lambda: one.health().free == 2)
    assert (row["status"], row["last_error"], row["unique_held"]) == ("cancelled", "cancelled while it ran", False)
    assert (row["locked_until"], row["locked_by"], row["attempt"]) == (None, None, 1)
    assert (handlers.told, jobs.effects(job_id)) == ([True], [])
    assert caplog.text.count("was cancelled: nothing of this attempt is committed") == 1
    assert warnings(caplog) == []


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_so_is_one_whose_session_has_a_snapshot(database_url: URL, jobs: Jobs, handlers: Handlers, level: Any) -> None:
    engine = sa.create_engine(database_url, isolation_level=level)
    job_id = jobs.add("plain")
    with running(worker(engine, handlers)):
        assert handlers.inside.wait(SOON)
        assert cancel(engine, job_id).asked == [job_id]
        assert jobs.wait(job_id, timeout=SOON)["status"] == "cancelled"
    engine.dispose()
    assert (jobs.effects(job_id), handlers.told) == ([], [True])


async def test_an_async_session_asks_as_well(
    any_async_engine: AsyncEngine, engine: Engine, jobs: Jobs, handlers: Handlers
) -> None:
    repo = AsyncJobRepository()
    ids = sorted([jobs.add("held plain"), jobs.add("held async")])
    queued, gone = jobs.add("other"), uuid.uuid4()
    with running(worker(engine, handlers)):
        for job_id in ids:
            wait_until(lambda of=job_id: jobs.status(of) == "running")  # type: ignore[misc]
        await asyncio.to_thread(handlers.inside.wait, SOON)
        wait_until(lambda: jobs._observer.scalar("SELECT count(*) FROM pg_locks WHERE mode = 'RowShareLock'") >= 2)
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                beats += 1
                await asyncio.sleep(0.01)

        beating = asyncio.create_task(beat())
        async with AsyncSession(any_async_engine) as session, session.begin():
            changes = await repo.cancel(session, [*ids, queued, gone])
        beating.cancel()
        assert (changes.asked, changes.changed, changes.missing) == (ids, [queued], [gone])
        assert beats > 3, "the event loop stood still while the rows were tried"
        for job_id in ids:
            await asyncio.to_thread(jobs.wait, job_id, "cancelled", timeout=SOON)
    assert jobs.effects_by_job() == {}


@pytest.mark.parametrize("end", ["rollback", "savepoint"])
@pytest.mark.parametrize("kind", ["plain", "held plain"])
def test_a_cancellation_that_is_rolled_back_is_none(
    engine: Engine, jobs: Jobs, handlers: Handlers, kind: str, end: str
) -> None:
    job_id = jobs.add(kind)
    with running(one := worker(engine, handlers)):
        listening(one)
        assert handlers.inside.wait(SOON)
        with Session(engine) as session:
            if end == "rollback":
                repo.cancel(session, job_id)
                session.rollback()
            else:
                with session.begin_nested() as savepoint:
                    repo.cancel(session, job_id)
                    savepoint.rollback()
                session.commit()
        # What is said later is heard later.
        other = jobs.add("next")
        jobs._observer.execute("SELECT pg_notify(%s, 'default')", STATEMENTS.channel)
        jobs.wait(other, "done", timeout=SOON)
        handlers.go.set()
        assert jobs.wait(job_id, timeout=SOON)["status"] == "done"
    assert handlers.told == [False]


def test_a_job_that_waits_for_its_slot_never_starts(engine: Engine, jobs: Jobs, handlers: Handlers) -> None:
    """It is claimed ahead, behind quick jobs and then a slow one."""
    jobs.add_many("next", 60, priority=3)
    slow = jobs.add("deaf", priority=2)
    behind = jobs.add_many("next", 60, priority=1)
    with running(worker(engine, handlers, concurrency=1)):
        assert handlers.inside.wait(SOON)
        claimed = [job_id for job_id in behind if jobs.status(job_id) == "running"]
        assert claimed, "nothing was prefetched: this test tests nothing"
        cancel(engine, claimed)
        handlers.go.set()
        jobs.wait(slow)
        wait_until(lambda: jobs.counts().keys() == {"done", "cancelled"})
    assert {jobs.status(job_id) for job_id in claimed} == {"cancelled"}
    assert not jobs.effects_by_job().keys() & set(claimed)


# -- messages --------------------------------------------------------------------------------------------------------


def test_the_channel_is_a_name_that_postgresql_takes() -> None:
    assert len(CHANNEL.encode()) <= 63
    assert STATEMENTS.channel != CHANNEL


def test_messages_can_be_read_and_rubbish_is_nobodys() -> None:
    attempts = {uuid.uuid4(): token for token in (0, 7, 2**63 - 1)}
    (message,) = messages_of(attempts)
    assert dict(attempts_of(message)) == attempts
    assert messages_of({}) == []
    job_id = uuid.uuid4()
    for rubbish in (
        "",
        "x",
        ":",
        f"{job_id}",
        f"{job_id}:",
        f"{job_id}:x",
        "-" * 36 + ":1",
        "\x00 \ud800",
        ":1 " * 99,
    ):
        assert attempts_of(rubbish) == []
    assert attempts_of(f"rubbish {job_id}:5 :1") == [(job_id, 5)]


@pytest.mark.slow
def test_ten_thousand_jobs_are_a_hundred_notifications(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    ids = jobs.add_many("other", 10_000, status="running", locked_until="infinity", lease_token=3)
    jobs.add_many("other", 1000)  # nobody runs these
    observer.listen(CHANNEL)
    assert len(cancel(engine, JobRecord.kind == "other")) == 11_000
    heard = observer.notified(at_least=100)
    notifier.close_all()
    heard += observer.notified(timeout=0.2)
    assert len(heard) == 100
    assert max(len(message) for message in heard) < 8000
    assert sorted(attempt for message in heard for attempt in attempts_of(message)) == [(id_, 3) for id_ in sorted(ids)]


def test_who_holds_none_of_the_jobs_asks_nothing(
    engine: Engine, jobs: Jobs, handlers: Handlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = jobs.add("plain")
    with running(one := worker(engine, handlers)):
        listening(one)
        assert handlers.inside.wait(SOON)
        executed = _recorded(monkeypatch)
        for message in messages_of({uuid.uuid4(): 1 for _ in range(1000)}):
            jobs._observer.execute("SELECT pg_notify(%s, %s)", CHANNEL, message)
        # A message about another attempt at the job, then rubbish, then one about this.
        token = jobs.row(job_id)["lease_token"]
        for text in (f"{job_id}:{token + 1}", f"{job_id}:{token - 1}", "rubbish", ""):
            jobs._observer.execute("SELECT pg_notify(%s, %s)", CHANNEL, text)
        jobs._observer.execute("SELECT pg_notify(%s, %s)", STATEMENTS.channel, "no queue of ours")
        assert [statement for statement in executed if statement not in AT_ITS_START] == []
        assert not handlers.told
        jobs._observer.execute("SELECT pg_notify(%s, %s)", CHANNEL, f"{job_id}:{token}")
        assert jobs.wait(job_id, timeout=SOON)["status"] == "cancelled"
    assert handlers.told == [True]


def _recorded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the worker asks the database from now on."""
    executed: list[Any] = []
    execute = Database.execute

    def recording(self: Database, statement: Any, parameters: Any) -> Any:
        executed.append(statement)
        return execute(self, statement, parameters)

    monkeypatch.setattr(Database, "execute", recording)
    return executed


@pytest.mark.usefixtures("remote")
def test_a_job_that_is_retried_at_once_is_not_given_up_by_what_was_said_before(
    engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    handlers = HandlerRegistry()

    @handlers.handler("work")
    async def work(session: AsyncSession, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id, worker=str(job.cancel_requested)))
        await session.flush()
        await asyncio.sleep(0.3)

    job_id = jobs.add("work")
    with running(one := worker(engine, handlers)):
        listening(one)
        jobs.wait(job_id, "running")
        first = f"{job_id}:{jobs.row(job_id)['lease_token']}"
        cancel(engine, job_id)
        with Session(engine) as session, session.begin():
            assert repo.retry(session, job_id)
        jobs.wait(job_id, "running", timeout=SOON)
        observer.execute("SELECT pg_notify(%s, %s)", CHANNEL, first)
        assert jobs.wait(job_id, timeout=SOON)["status"] == "done"
    assert jobs.effects(job_id) == [(1, "False")]


# -- nobody is told ----------------------------------------------------------------------------------------------------


def test_a_heartbeat_finds_what_nobody_has_told(
    engine: Engine, jobs: Jobs, handlers: Handlers, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    job_id = jobs.add("plain")
    with running(worker(engine, handlers, lease=1)):
        assert handlers.inside.wait(SOON)
        cancel(engine, job_id, repo=JobRepository(notify=None))
        wait_until(lambda: handlers.told, SOON)
    assert caplog.text.count("was cancelled: nothing") == 1
    assert warnings(caplog) == []
    assert (jobs.status(job_id), jobs.effects(job_id)) == ("cancelled", [])


@pytest.mark.parametrize("uses_session", [True, False])
def test_a_handler_that_ends_before_anybody_knows_was_cancelled_too(
    engine: Engine, jobs: Jobs, caplog: pytest.LogCaptureFixture, uses_session: bool
) -> None:
    caplog.set_level(logging.INFO)
    handlers = HandlerRegistry()
    inside, go = threading.Event(), threading.Event()

    @handlers.handler("work")
    def work(session: Session, job: Job[Any]) -> None:
        inside.set()
        assert go.wait(10)
        if uses_session:
            session.add(Effect(job_id=job.id))

    job_id = jobs.add("work")
    with running(one := worker(engine, handlers)):
        assert inside.wait(SOON)
        cancel(engine, job_id, repo=JobRepository(notify=None))
        go.set()
        wait_until(lambda: "was cancelled" in caplog.text, SOON)
        wait_until(lambda: one.health().jobs == 0)
    assert warnings(caplog) == []
    assert (jobs.status(job_id), jobs.effects(job_id)) == ("cancelled", [])


def test_without_notifications_a_locked_row_is_waited_for(engine: Engine, jobs: Jobs, handlers: Handlers) -> None:
    """Nobody could be asked."""
    job_id = jobs.add("held deaf")
    changes: list[Changes] = []
    with running(worker(engine, handlers)):
        assert handlers.inside.wait(SOON)
        thread = threading.Thread(
            target=lambda: changes.append(cancel(engine, job_id, repo=JobRepository(notify=None)))
        )
        thread.start()
        jobs._observer.wait_for("SELECT count(*) FROM pg_locks WHERE NOT granted")
        handlers.go.set()
        thread.join(10)
    assert changes == [Changes(unchanged={job_id: JobStatus.DONE})]


# -- who locks the row -------------------------------------------------------------------------------------------------


def test_a_limit_counts_those_that_are_locked_last(engine: Engine, jobs: Jobs) -> None:
    ids = jobs.add_many("other", 6, status="running", locked_until="infinity", lease_token=1)
    with engine.connect() as other, Session(engine) as session:
        other.execute(sa.text("SELECT FROM enlist_job WHERE id = ANY(:ids) FOR NO KEY UPDATE"), {"ids": ids[:3]})
        some = repo.cancel(session, JobRecord.kind == "other", limit=2)
        rest = repo.cancel(session, JobRecord.kind == "other", limit=2)
        none = repo.cancel(session, JobRecord.kind == "other", limit=2)
        session.rollback()
    assert (some.changed, some.asked) == (ids[3:5], [])
    assert (rest.changed, rest.asked) == (ids[5:], ids[:1])
    assert (none.changed, none.asked) == ([], ids[:2])


def test_a_lock_of_a_moment_is_outlasted(engine: Engine, jobs: Jobs) -> None:
    """By a renewal, say, or the COMMIT of another job."""
    job_id = jobs.add("other", status="running", locked_until="infinity", lease_token=1)
    with engine.connect() as other, Session(engine) as session:
        other.execute(sa.text("SELECT FROM enlist_job FOR NO KEY UPDATE"))
        releasing = threading.Timer(0.04, other.rollback)
        releasing.start()
        changes = repo.cancel(session, job_id)
        releasing.join()
        session.commit()
    assert (changes.changed, changes.asked) == ([job_id], [])


@pytest.mark.parametrize("form", ["id", "conditions"])
def test_a_job_that_ends_meanwhile_is_judged_as_it_is_then(engine: Engine, jobs: Jobs, form: str) -> None:
    job_id = jobs.add("other", status="running", locked_until="infinity", lease_token=1)
    with engine.connect() as other, Session(engine) as session:
        other.execute(sa.text("UPDATE enlist_job SET status = 'done', finished_at = now(), locked_until = NULL"))
        releasing = threading.Timer(0.04, other.commit)
        releasing.start()
        changes = repo.cancel(session, job_id if form == "id" else JobRecord.kind == "other")
        releasing.join()
        session.commit()
    assert changes == Changes(unchanged={job_id: JobStatus.DONE} if form == "id" else {})


def test_two_who_cancel_the_same_jobs_never_deadlock(engine: Engine, jobs: Jobs) -> None:
    """Queued and running ones among each other, each transaction at its own pace."""
    for _ in range(5):
        ids = jobs.add_many("queued", 20) + jobs.add_many("running", 20, status="running", locked_until="infinity")
        found: list[Changes | Exception] = []

        def run(ids: list[uuid.UUID] = ids, found: list[Changes | Exception] = found) -> None:
            try:
                with Session(engine) as session, session.begin():
                    found.append(repo.cancel(session, ids))
            except Exception as error:
                found.append(error)

        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert all(isinstance(one, Changes) for one in found), found
        assert {jobs.status(job_id) for job_id in ids} == {"cancelled"}


def test_the_settings_of_the_transaction_stay_what_they_are(engine: Engine, jobs: Jobs) -> None:
    job_id = jobs.add("other", status="running", locked_until="infinity", lease_token=1)
    with engine.connect() as other, Session(engine) as session:
        other.execute(sa.text("SELECT FROM enlist_job FOR NO KEY UPDATE"))
        session.execute(sa.text("SET LOCAL lock_timeout = '1234ms'"))
        begun = time.monotonic()
        assert repo.cancel(session, job_id).asked == [job_id]
        assert time.monotonic() - begun < 5
        assert session.scalar(sa.text("SHOW lock_timeout")) == "1234ms"


@pytest.mark.slow
def test_an_ending_that_cannot_be_written_is_tried_more_and_more_seldom(
    engine: Engine, jobs: Jobs, handlers: Handlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler may keep its row's lock for minutes."""
    job_id = jobs.add("held deaf")
    with running(worker(engine, handlers)):
        assert handlers.inside.wait(SOON)
        executed = _recorded(monkeypatch)
        assert cancel(engine, job_id).asked == [job_id]
        wait_until(lambda: executed.count(STATEMENTS.settle) >= 4)
        threading.Event().wait(0.7)
        assert executed.count(STATEMENTS.settle) <= 8  # every 20 ms it would be 35 more
        handlers.go.set()
        assert jobs.wait(job_id, timeout=SOON)["status"] == "cancelled"


# -- the worker stops --------------------------------------------------------------------------------------------------


def test_a_cancellation_is_told_when_it_is_written(
    engine: Engine, jobs: Jobs, handlers: Handlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is asked of a handler that goes on may still come to another end."""
    events: list[JobEvent] = []
    job_id = jobs.add("held deaf")
    with running(worker(engine, handlers, events=events.append)):
        assert handlers.inside.wait(SOON)
        executed = _recorded(monkeypatch)
        assert cancel(engine, job_id).asked == [job_id]
        wait_until(lambda: executed.count(STATEMENTS.settle) >= 3)
        assert [event.name for event in events] == [EventName.STARTED]
        handlers.go.set()
        jobs.wait(job_id, "cancelled", timeout=SOON)
        wait_until(lambda: len(events) == 2)
    assert events[1].name is EventName.CANCELLED


@pytest.mark.slow
def test_a_job_is_cancelled_after_sigterm(engine: Engine, database_url: URL, jobs: Jobs) -> None:
    with WorkerProcess(database_url, shutdown_timeout=60, lease=60) as process:
        job_id = jobs.add("async holding")
        process.expect("run async holding")
        process.terminate()
        wait_until(lambda: "no more claims" in process.log())
        assert cancel(engine, job_id).changed == [job_id]
        assert process.wait(10) == 0
        assert "was cancelled: nothing of this attempt is committed" in process.log()
    assert (jobs.status(job_id), jobs.effects(job_id)) == ("cancelled", [])


@pytest.mark.parametrize("kind", ["plain", "held plain"])
@pytest.mark.usefixtures("remote")
def test_a_job_is_cancelled_while_its_worker_stops(engine: Engine, jobs: Jobs, handlers: Handlers, kind: str) -> None:
    job_id = jobs.add(kind)
    with running(one := worker(engine, handlers)):
        listening(one)
        assert handlers.inside.wait(SOON)
        stopped: list[bool] = []
        stopping = threading.Thread(target=lambda: stopped.append(one.stop()))
        stopping.start()
        wait_until(lambda: one._running.slots._closed)  # type: ignore[union-attr]
        cancel(engine, job_id)
        stopping.join(10)
    assert stopped == [True]
    assert (jobs.status(job_id), jobs.effects(job_id), handlers.told) == ("cancelled", [], [True])


# -- a handler and its own job -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["id", "conditions"])
@pytest.mark.parametrize("notify", ["after_commit", None])
def test_a_handler_cannot_cancel_its_own_job_in_its_own_session(
    engine: Engine, jobs: Jobs, form: str, notify: Literal["after_commit"] | None
) -> None:
    handlers = HandlerRegistry()
    repo = JobRepository(notify=notify)
    other = jobs.add("other")

    @handlers.handler("work")
    def work(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))
        which = [job.id, other] if form == "id" else JobRecord.status.in_(["running", "queued"])
        with contextlib.ExitStack() as stack:
            if job.payload["swallows"]:
                stack.enter_context(pytest.raises(InvalidOption, match=f"job {job.id} is the one whose handler this"))
            repo.cancel(session, which)

    swallowing, failing = jobs.add("work", {"swallows": True}), jobs.add("work", {"swallows": False}, max_attempts=1)
    with running(worker(engine, handlers, concurrency=1)):
        assert jobs.wait(swallowing)["status"] == "done"
        row = jobs.wait(failing)
    assert row["status"] == "dead"
    assert "raise enlist.Cancel(reason) to end it" in row["last_error"]
    assert jobs.status(other) == "queued"
    assert jobs.effects_by_job() == {swallowing: 1}


@pytest.mark.parametrize("hold_lock", [False, True])
def test_a_handler_may_cancel_its_own_job_in_another_session(engine: Engine, jobs: Jobs, hold_lock: bool) -> None:
    handlers = HandlerRegistry()

    @handlers.handler("work", hold_lock=hold_lock)
    async def work(session: AsyncSession, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))
        await session.flush()
        changes = await asyncio.to_thread(cancel, engine, job.id)
        assert (changes.asked if hold_lock else changes.changed) == [job.id]
        await asyncio.sleep(20)

    job_id = jobs.add("work")
    with running(worker(engine, handlers)):
        assert jobs.wait(job_id, timeout=SOON)["status"] == "cancelled"
    assert jobs.effects(job_id) == []
