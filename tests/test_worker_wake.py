"""Wake-ups: with a poll interval of half a minute, jobs start at once."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import sqlalchemy as sa
import tenacity
from sqlalchemy import URL, Engine
from sqlalchemy.orm import Session

from enlist import Cancel, HandlerRegistry, Job, JobRecord, JobRepository, Retry, Worker
from enlist._database import Database
from enlist._others import INTERVAL_SECONDS, Others
from enlist._statements import channel_of
from tests.shop import Effect
from tests.support import Observer, wait_until
from tests.support.jobs import Jobs, running
from tests.support.process import WorkerProcess

SOON = 3
"""Seconds; a tenth of the poll interval."""

SLOW_POLL: dict[str, Any] = {"poll_interval": 30}


@pytest.fixture
def jobs(observer: Observer) -> Jobs:
    return Jobs(observer)


@pytest.fixture
def channel() -> str:
    table = sa.inspect(JobRecord).local_table
    assert isinstance(table, sa.Table)
    return channel_of(table)


def effects() -> HandlerRegistry:
    handlers = HandlerRegistry()

    @handlers.handler("work", wait=tenacity.wait_fixed(0.2))
    def work(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id, attempt=job.attempt))
        if job.attempt < job.payload.get("until", 1):
            raise ValueError("not yet")

    return handlers


def listening(observer: Observer) -> int:
    """Wait until a worker listens and has looked once; the server's process that serves it."""
    return int(
        observer.wait_for(
            "SELECT coalesce(max(pid), 0) FROM pg_stat_activity"
            " WHERE datname = current_database() AND starts_with(query, 'LISTEN ')"
        )
    )


def test_a_commit_in_the_same_process_wakes_the_worker(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    repo = JobRepository()
    with running(Worker(engine, effects(), **SLOW_POLL)):
        listening(observer)
        for _ in range(3):
            with Session(engine) as session, session.begin():
                handle = repo.enqueue(session, "work", {})
            assert jobs.wait(handle.id, timeout=SOON)["status"] == "done"


@pytest.mark.slow
def test_a_commit_wakes_a_worker_in_another_process(
    engine: Engine, database_url: URL, jobs: Jobs, observer: Observer
) -> None:
    repo = JobRepository()
    with WorkerProcess(database_url, **SLOW_POLL) as process:
        process.expect("ready")
        listening(observer)
        for _ in range(3):
            with Session(engine) as session, session.begin():
                handle = repo.enqueue(session, "healthy", {})
            process.expect(f"run healthy {handle.id}", timeout=SOON)
        process.terminate()
        assert process.wait() == 0


def test_a_notify_from_any_client_wakes_it(engine: Engine, jobs: Jobs, observer: Observer, channel: str) -> None:
    with running(Worker(engine, effects(), **SLOW_POLL)):
        listening(observer)
        job_id = jobs.add("work")
        observer.execute("SELECT pg_notify(%s, 'default')", channel)
        assert jobs.wait(job_id, timeout=SOON)["status"] == "done"


@pytest.mark.slow
def test_a_retry_starts_when_it_is_due(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    with running(Worker(engine, effects(), **SLOW_POLL)):
        job_id = jobs.add("work", {"until": 4})
        _wake(observer)
        row = jobs.wait(job_id, timeout=SOON)
    assert (row["status"], row["attempt"]) == ("done", 4)
    assert observer.scalar("SELECT started_at >= run_at FROM enlist_job")


def test_what_is_reaped_starts_at_once(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    job_id = jobs.add("work")
    observer.execute(
        "UPDATE enlist_job SET status = 'running', attempt = 1, lease_token = 1, locked_by = 'gone',"
        " started_at = statement_timestamp(), locked_until = statement_timestamp() + interval '0.4 s'"
    )
    with running(Worker(engine, effects(), reaper_interval=0.1, **SLOW_POLL)):
        row = jobs.wait(job_id, timeout=SOON)
    assert (row["status"], row["attempt"], row["lost"]) == ("done", 2, 1)


def _wake(observer: Observer) -> None:
    table = sa.inspect(JobRecord).local_table
    assert isinstance(table, sa.Table)
    listening(observer)
    observer.execute("SELECT pg_notify(%s, 'default')", channel_of(table))


@pytest.mark.parametrize("what", ["wake", "retry"])
def test_what_comes_while_all_slots_are_busy_starts_when_one_is_free(
    what: str, engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    """The wake finds no free slot. It is not forgotten: it counts once there is one."""
    handlers = effects()
    inside, go = threading.Event(), threading.Event()

    @handlers.handler("hold")
    def hold(session: Session, job: Job[Any]) -> None:
        inside.set()
        go.wait(20)

    # Quick ones first, so that the claim asks for more than there is, and expects nothing after.
    jobs.add_many("work", 40, priority=2)
    if what == "retry":
        jobs.add("work", {"until": 2}, priority=1)
    jobs.add("hold")
    try:
        with running(Worker(engine, handlers, queues={"default": 1}, **SLOW_POLL)):
            assert inside.wait(SOON)
            if what == "wake":
                job_id = jobs.add("work")
                _wake(observer)
            else:
                job_id = observer.scalar("SELECT id FROM enlist_job WHERE payload ? 'until'")
                observer.wait_for("SELECT run_at < statement_timestamp() FROM enlist_job WHERE id = %s", job_id)
            # The claimer has looked, and found no slot.
            threading.Event().wait(0.1)
            go.set()
            assert jobs.wait(job_id, timeout=SOON)["status"] == "done"
    finally:
        go.set()


@pytest.mark.slow
def test_what_waits_behind_a_slow_job_is_given_to_others(
    engine: Engine, jobs: Jobs, observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefetched behind quick jobs, stuck behind a slow one: given back within a second, though nobody polls."""
    monkeypatch.setattr("enlist._slots.PREFETCH_SECONDS", 2.0)  # whatever quick is on this machine
    monkeypatch.setattr("enlist._slots.PREFETCH_LIMIT_SECONDS", 1.0)
    handlers = effects()
    inside, go = threading.Event(), threading.Event()

    @handlers.handler("hold")
    def hold(session: Session, job: Job[Any]) -> None:
        inside.set()
        go.wait(20)

    jobs.add_many("work", 60, priority=3)
    jobs.add("hold", priority=2)
    behind = jobs.add_many("work", 60, priority=1)
    try:
        with running(Worker(engine, handlers, queues={"default": 1}, **SLOW_POLL)):
            assert inside.wait(SOON)
            prefetched = observer.scalar("SELECT count(*) FROM enlist_job WHERE status = 'running'")
            assert prefetched > 1, "nothing was prefetched: this test tests nothing"
            observer.wait_for("SELECT count(*) = 1 FROM enlist_job WHERE status = 'running'", timeout=SOON)
            assert {jobs.row(job_id)["attempt"] for job_id in behind} == {0}
            with running(Worker(engine, effects(), queues={"default": 1}, **SLOW_POLL)):
                for job_id in behind:
                    assert jobs.wait(job_id, timeout=SOON)["status"] == "done"
            go.set()
    finally:
        go.set()


def test_a_listener_that_is_cut_off_listens_again(
    engine: Engine, jobs: Jobs, observer: Observer, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    with running(Worker(engine, effects(), **SLOW_POLL)):
        pid = listening(observer)
        observer.execute("SELECT pg_terminate_backend(%s, 5000)", pid)
        # In the gap nobody hears a wake: it looks once by itself when it listens again.
        in_the_gap = jobs.add("work")
        assert jobs.wait(in_the_gap, timeout=SOON)["status"] == "done"
        assert listening(observer) != pid
        job_id = jobs.add("work")
        observer.execute("SELECT pg_notify(%s, 'default')", channel)
        assert jobs.wait(job_id, timeout=SOON)["status"] == "done"
    assert caplog.text.count("listener failed, trying again") == 1


# -- floods and gaps ---------------------------------------------------------------------------------------------


def test_a_flood_of_stale_wakes_keeps_no_job_waiting(
    engine: Engine, database_url: URL, jobs: Jobs, observer: Observer, channel: str
) -> None:
    over = threading.Event()

    def flood() -> None:
        with Observer(database_url) as other:
            while not over.wait(0.005):
                other.execute("SELECT pg_notify(%s, 'default')", channel)

    flooding = threading.Thread(target=flood)
    with running(Worker(engine, effects(), **SLOW_POLL)):
        listening(observer)
        flooding.start()
        try:
            for _ in range(3):
                job_id = jobs.add("work")
                assert jobs.wait(job_id, timeout=SOON)["status"] == "done"
        finally:
            over.set()
            flooding.join()


def test_what_is_enqueued_between_a_claim_and_the_wait_for_the_next_is_not_left(
    engine: Engine, jobs: Jobs, observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim has found nothing, and its worker is not yet waiting when the wake comes."""
    worker = Worker(engine, effects(), **SLOW_POLL)
    execute = Database.execute
    ids: list[uuid.UUID] = []
    gap = threading.Event()

    def enqueueing(self: Database, statement: Any, parameters: Any) -> Any:
        rows = execute(self, statement, parameters)
        if statement is self.statements.claim and gap.is_set():
            gap.clear()
            with Session(engine) as session, session.begin():
                handle = JobRepository().enqueue(session, "work", {})
            ids.append(handle.id)
        return rows

    monkeypatch.setattr(Database, "execute", enqueueing)
    with running(worker):
        listening(observer)
        gap.set()
        _wake(observer)
        wait_until(lambda: ids)
        assert jobs.wait(ids[0], timeout=SOON)["status"] == "done"


@pytest.mark.slow
def test_twenty_idle_workers_make_a_claim_each_for_one_job(
    engine: Engine, jobs: Jobs, observer: Observer, channel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims: list[str] = []
    execute = Database.execute

    def counting(self: Database, statement: Any, parameters: Any) -> Any:
        if statement in (self.statements.claim, self.statements.claim_among):
            claims.append(parameters["worker"])
        return execute(self, statement, parameters)

    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(running(Worker(engine, effects(), **SLOW_POLL)))
        observer.wait_for(
            "SELECT count(*) = 20 FROM pg_stat_activity"
            " WHERE datname = current_database() AND starts_with(query, 'LISTEN ')"
        )
        threading.Event().wait(0.3)  # the claims that they make when they begin to listen
        monkeypatch.setattr(Database, "execute", counting)
        job_id = jobs.add("work")
        observer.execute("SELECT pg_notify(%s, 'default')", channel)
        assert jobs.wait(job_id, timeout=SOON)["status"] == "done"
        threading.Event().wait(0.3)
        assert len(claims) <= 20


# -- what one worker leaves to another ---------------------------------------------------------------------------


class Held:
    """Handlers that wait until they are told how to end."""

    def __init__(self) -> None:
        self.inside = threading.Event()
        self.go = threading.Event()
        self.raises: Exception | None = None
        self.handlers = effects()
        self.handlers.handler("hold")(self._hold)

    def _hold(self, session: Session, job: Job[Any]) -> None:
        if self.go.is_set():
            return
        self.inside.set()
        self.go.wait(20)
        if self.raises is not None:
            raise self.raises


@pytest.fixture
def held(request: pytest.FixtureRequest) -> Iterator[Held]:
    held = Held()
    held.raises = getattr(request, "param", None)
    yield held
    held.go.set()


@contextmanager
def stopping(worker: Worker) -> Iterator[None]:
    """Have a worker stop meanwhile; return when it has."""
    thread = threading.Thread(target=worker.stop)
    thread.start()
    wait_until(lambda: worker._running is None or worker._running.claimer.loop.stopping)
    try:
        yield
    finally:
        thread.join()


@contextmanager
def idle(worker: Worker, observer: Observer, number: int = 2) -> Iterator[None]:
    """Have another worker work that has looked and found nothing."""
    with running(worker):
        observer.wait_for(
            "SELECT count(*) = %s FROM pg_stat_activity"
            " WHERE datname = current_database() AND starts_with(query, 'LISTEN ')",
            number,
        )
        threading.Event().wait(0.1)
        yield


def test_a_retry_that_is_due_at_once_as_its_worker_stops_starts_at_another(
    engine: Engine, jobs: Jobs, observer: Observer, held: Held
) -> None:
    """Not when the worker has stopped: another of its handlers takes longer."""
    first = Worker(engine, held.handlers, **SLOW_POLL)
    slow = Held()
    held.handlers.handler("slow")(slow._hold)
    job_id = jobs.add("hold")
    jobs.add("slow")
    held.raises = Retry(0)
    try:
        with running(first):
            assert held.inside.wait(SOON)
            assert slow.inside.wait(SOON)
            with idle(Worker(engine, held.handlers, **SLOW_POLL), observer), stopping(first):
                held.go.set()
                assert jobs.wait(job_id, timeout=SOON)["status"] == "done"
                slow.go.set()
    finally:
        slow.go.set()


def test_what_is_given_back_as_its_worker_stops_starts_at_another(
    engine: Engine, jobs: Jobs, observer: Observer, held: Held
) -> None:
    jobs.add_many("work", 60, priority=3)
    jobs.add("hold", priority=2)
    behind = jobs.add_many("work", 5, priority=1)
    first = Worker(engine, held.handlers, queues={"default": 1}, **SLOW_POLL)
    with running(first):
        assert held.inside.wait(SOON)
        with idle(Worker(engine, effects(), **SLOW_POLL), observer), stopping(first):
            for job_id in behind:
                assert jobs.wait(job_id, timeout=SOON)["status"] == "done"
            held.go.set()


@pytest.mark.slow
def test_a_retry_that_is_due_while_its_worker_is_busy_starts_at_another(
    engine: Engine, jobs: Jobs, observer: Observer, held: Held
) -> None:
    """That knows nothing of it: it has looked before."""
    slow = Held()
    held.handlers.handler("slow")(slow._hold)
    others = HandlerRegistry()
    others.handler("hold")(held._hold)
    held.raises = Retry(0.3)
    job_id = jobs.add("hold")
    try:
        with running(Worker(engine, held.handlers, queues={"default": 1}, **SLOW_POLL)):
            assert held.inside.wait(SOON)
            with idle(Worker(engine, others, **SLOW_POLL), observer):
                jobs.add("slow")
                held.go.set()
                assert slow.inside.wait(SOON)
                assert jobs.wait(job_id, timeout=SOON)["status"] == "done"
                slow.go.set()
    finally:
        slow.go.set()


@pytest.mark.parametrize("reaper_serves", ["another queue", "another kind"])
def test_what_is_reaped_starts_at_a_worker_that_can_take_it(
    engine: Engine, jobs: Jobs, observer: Observer, held: Held, reaper_serves: str
) -> None:
    handlers = HandlerRegistry()
    handlers.handler("other" if reaper_serves == "another kind" else "work")(held._hold)
    queue = "other" if reaper_serves == "another queue" else "default"
    with idle(Worker(engine, effects(), **SLOW_POLL), observer, 1):
        job_id = jobs.add(
            "work", status="running", attempt=1, lease_token=1, locked_by="gone", locked_until="2020-01-01"
        )
        with running(Worker(engine, handlers, queues=[queue], reaper_interval=0.1, **SLOW_POLL)):
            assert jobs.wait(job_id, timeout=SOON)["status"] == "done"


@pytest.mark.parametrize("ordered", [False, True], ids=["a key", "an ordered key"])
@pytest.mark.parametrize("held", [None, Cancel("no")], ids=["done", "cancelled"], indirect=True)
def test_a_key_that_a_worker_frees_is_taken_by_one_of_another_queue(
    engine: Engine, jobs: Jobs, observer: Observer, held: Held, ordered: bool
) -> None:
    key: dict[str, Any] = {"concurrency_key": "k", "concurrency_limit": 1, "ordered": ordered}
    jobs.add("hold", **key)
    with running(Worker(engine, held.handlers, **SLOW_POLL)):
        assert held.inside.wait(SOON)
        job_id = jobs.add("work", queue="mail", **key)
        with idle(Worker(engine, effects(), queues=["mail"], **SLOW_POLL), observer):
            assert jobs.status(job_id) == "queued"
            held.go.set()
            assert jobs.wait(job_id, timeout=SOON)["status"] == "done"


def test_a_key_that_a_stopping_worker_frees_is_taken_by_another(
    engine: Engine, jobs: Jobs, observer: Observer, held: Held
) -> None:
    key: dict[str, Any] = {"concurrency_key": "k", "concurrency_limit": 1}
    jobs.add("hold", **key)
    first = Worker(engine, held.handlers, **SLOW_POLL)
    with running(first):
        assert held.inside.wait(SOON)
        job_id = jobs.add("work", **key)
        with idle(Worker(engine, effects(), **SLOW_POLL), observer), stopping(first):
            held.go.set()
            assert jobs.wait(job_id, timeout=SOON)["status"] == "done"


@pytest.mark.slow
def test_a_key_that_somebody_has_locked_is_tried_again_soon(
    engine: Engine, jobs: Jobs, observer: Observer, held: Held
) -> None:
    """By whoever: the end of a transaction is told to nobody."""
    job_id = jobs.add("work", concurrency_key="k", concurrency_limit=1)
    statements = Database(engine, JobRecord).statements
    with engine.connect() as connection:
        connection.execute(statements.lock_keys, {"keys": ["k"]})
        with running(Worker(engine, held.handlers, **SLOW_POLL)):
            listening(observer)
            threading.Event().wait(0.5)
            assert jobs.status(job_id) == "queued"
            connection.rollback()
            assert jobs.wait(job_id, timeout=SOON)["status"] == "done"


def test_a_freed_key_is_told_where_somebody_waits_for_it_and_a_slot_is_free(
    engine: Engine, jobs: Jobs, observer: Observer, channel: str
) -> None:
    def add(key: str, queue: str, limit: int = 1, **columns: Any) -> None:
        jobs.add("work", queue=queue, concurrency_key=key, concurrency_limit=limit, **columns)

    busy: dict[str, Any] = {"status": "running", "attempt": 1, "locked_by": "w", "locked_until": "infinity"}
    add("free", "mail")
    add("free", "mail")
    add("free", "other")
    add("taken", "taken")
    add("taken", "elsewhere", concurrency_slot=1, **busy)
    add("half", "half", 2)
    add("half", "elsewhere", 2, concurrency_slot=1, **busy)
    add("another", "another")
    observer.listen(channel)
    database = Database(engine, JobRecord)
    others = Others(database)
    others.wake(keys=["free", "taken", "half", "nobody's"])
    others.step()
    assert sorted(observer.notified(at_least=3)) == ["half", "mail", "other"]
    assert observer.notified(0.1) == []


def test_wakes_of_one_queue_are_put_together(engine: Engine, observer: Observer, channel: str) -> None:
    observer.listen(channel)
    others = Others(Database(engine, JobRecord))
    for _ in range(5):
        others.wake(["mail", "default"])
        wait = others.step()
    assert 0 < wait <= INTERVAL_SECONDS
    assert sorted(observer.notified(at_least=2)) == ["default", "mail"]
    assert observer.notified(0.1) == []
    wait_until(lambda: others.step() > INTERVAL_SECONDS)
    assert sorted(observer.notified(at_least=2)) == ["default", "mail"]


def test_a_wake_that_could_not_be_sent_is_sent_later(
    engine: Engine, observer: Observer, channel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    observer.listen(channel)
    others = Others(Database(engine, JobRecord))
    others.wake(["mail"], keys=["k"])
    with monkeypatch.context() as broken:
        broken.setattr(Database, "execute", _failing)
        with pytest.raises(sa.exc.OperationalError):
            others.step()
        assert not others.flush(0.01)
    others.step()
    assert observer.notified() == ["mail"]
    assert others.flush(0)


def _failing(*_: Any) -> Any:
    raise sa.exc.OperationalError("", {}, OSError("gone"))
