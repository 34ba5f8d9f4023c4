"""Jobs start when they are due: with a poll interval of a minute, and without a query more than one for each poll."""

from __future__ import annotations

import datetime as dt
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from enlist import HandlerRegistry, Job, JobRecord, JobRepository, RateLimit, Retry, Snooze, Worker
from enlist import _marks as marks_module
from enlist._due import APART_SECONDS, MARGIN_SECONDS, DueTimes
from enlist._statements import Statements, statements_for
from tests.shop import Effect
from tests.support import Observer, StatementRecorder
from tests.support.claims import claim_parameters
from tests.support.jobs import Jobs, running
from tests.support.plans import plan_of

TABLE = "enlist_job"
STATEMENTS: Statements = statements_for(JobRecord.metadata.tables[TABLE])
MINUTE: dict[str, Any] = {"poll_interval": 60}
SOON = 3
"""Seconds; so much less than the poll interval that it was no poll that brought the job."""

KEYED: dict[str, Any] = {"concurrency_key": "k", "concurrency_limit": 1}


@pytest.fixture
def jobs(observer: Observer) -> Jobs:
    return Jobs(observer)


@pytest.fixture
def handlers() -> HandlerRegistry:
    handlers = HandlerRegistry()

    @handlers.handler("work")
    def work(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id, attempt=job.attempt))

    @handlers.handler("again")
    def again(session: Session, job: Job[Any]) -> None:
        if job.meta.get("snoozed", job.attempt) == 1:
            raise Retry(0.4)
        session.add(Effect(job_id=job.id, attempt=job.attempt))

    return handlers


def statement_count(worker: Worker, what: str) -> StatementRecorder:
    """Records what a running worker asks the database for."""
    assert worker._running is not None, what
    return StatementRecorder(worker._running.database.engine)


def claims(recorder: StatementRecorder) -> int:
    return len([text for text in recorder.texts if "locked_by" in text and "FOR NO KEY UPDATE" in text])


@contextmanager
def idle(worker: Worker, observer: Observer, number: int = 1) -> Iterator[StatementRecorder]:
    """Have a worker work, the only one or the second, that listens and has looked at the empty queues."""
    with running(worker), statement_count(worker, "idle") as recorder:
        observer.wait_for(
            "SELECT count(*) = %s FROM pg_stat_activity"
            " WHERE datname = current_database() AND starts_with(query, 'LISTEN ')",
            number,
        )
        time.sleep(0.2)  # the claim that follows when it listens
        recorder.clear()
        yield recorder


def started_on_time(jobs: Jobs, job_id: Any) -> None:
    row = jobs.wait(job_id, timeout=SOON)
    assert row["status"] == "done"
    assert dt.timedelta(0) <= row["started_at"] - row["run_at"] < dt.timedelta(seconds=1)


# -- what a worker knows -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("columns", [{}, KEYED, {"priority": -5}, {"priority": 32767, **KEYED}], ids=str)
def test_what_is_there_at_the_start_begins_when_it_is_due(
    engine: Engine, jobs: Jobs, handlers: HandlerRegistry, columns: dict[str, Any]
) -> None:
    others = [jobs.add("work", due_in=3600, priority=priority) for priority in (-10, 0, 10)]
    job_id = jobs.add("work", due_in=0.5, **columns)
    with running(Worker(engine, handlers, **MINUTE)):
        started_on_time(jobs, job_id)
    assert {jobs.status(other) for other in others} == {"queued"}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"concurrency_key": "k"}], ids=["plain", "keyed"])
def test_what_is_enqueued_for_later_begins_when_it_is_due(
    engine: Engine, jobs: Jobs, handlers: HandlerRegistry, options: dict[str, Any]
) -> None:
    repo = JobRepository()
    with running(Worker(engine, handlers, **MINUTE)):
        with Session(engine) as session, session.begin():
            late = repo.enqueue(session, "work", {}, delay=0.8, **options)
        with Session(engine) as session, session.begin():  # while it waits for the other
            early = repo.enqueue(session, "work", {}, delay=0.3, **options)
        started_on_time(jobs, early.id)
        started_on_time(jobs, late.id)


@pytest.mark.slow
def test_what_is_put_to_an_earlier_time_begins_then(
    engine: Engine, jobs: Jobs, observer: Observer, handlers: HandlerRegistry
) -> None:
    job_id = jobs.add("work", due_in=3600)
    with idle(Worker(engine, handlers, **MINUTE), observer):
        with Session(engine) as session, session.begin():
            assert JobRepository().reschedule(session, job_id, delay=0.3)
        started_on_time(jobs, job_id)


@pytest.mark.slow
def test_another_workers_retry_begins_when_it_is_due(
    engine: Engine, jobs: Jobs, observer: Observer, handlers: HandlerRegistry
) -> None:
    """That worker is gone by then."""
    first, second = (Worker(engine, handlers, **MINUTE) for _ in range(2))
    job_id = jobs.add("again")
    with running(first):
        observer.wait_for("SELECT last_error IS NOT NULL AND status = 'queued' FROM enlist_job")
        with idle(second, observer, 2):
            first.stop()
            started_on_time(jobs, job_id)


@pytest.mark.slow
def test_a_snoozed_job_begins_when_it_is_due(engine: Engine, jobs: Jobs) -> None:
    handlers = HandlerRegistry()
    seen: list[int] = []

    @handlers.handler("snoozing")
    def snoozing(session: Session, job: Job[Any]) -> None:
        seen.append(job.attempt)
        if len(seen) < 3:
            raise Snooze(0.3)

    job_id = jobs.add("snoozing")
    with running(Worker(engine, handlers, **MINUTE)):
        started_on_time(jobs, job_id)
    assert len(seen) == 3


def test_what_becomes_due_while_all_slots_are_busy_begins_when_one_is_free(
    engine: Engine, jobs: Jobs, observer: Observer, handlers: HandlerRegistry
) -> None:
    inside, go = threading.Event(), threading.Event()

    @handlers.handler("hold")
    def hold(session: Session, job: Job[Any]) -> None:
        inside.set()
        go.wait(20)

    jobs.add("hold")
    job_id = jobs.add("work", due_in=0.3)
    try:
        with running(Worker(engine, handlers, queues={"default": 1}, **MINUTE)):
            assert inside.wait(SOON)
            observer.wait_for("SELECT run_at < statement_timestamp() FROM enlist_job WHERE id = %s", job_id)
            go.set()
            assert jobs.wait(job_id, timeout=SOON)["status"] == "done"
    finally:
        go.set()


@pytest.mark.slow
def test_a_queue_with_a_rate_limit_keeps_to_the_times(engine: Engine, jobs: Jobs, handlers: HandlerRegistry) -> None:
    ids = [jobs.add("work", due_in=seconds) for seconds in (0.3, 0.6)]
    with running(Worker(engine, handlers, rate_limits={"default": RateLimit(1000, per=1)}, **MINUTE)):
        for job_id in ids:
            started_on_time(jobs, job_id)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [{}, KEYED], ids=["plain", "keyed"])
def test_a_worker_that_claims_from_its_marks_on_keeps_to_the_times(
    engine: Engine, jobs: Jobs, handlers: HandlerRegistry, columns: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marks_module, "CHEAP_SECONDS", -1.0)
    monkeypatch.setattr(marks_module, "LOOKS", 1)
    for _ in range(3):
        jobs.add("work", **columns)
    ids = [jobs.add("work", due_in=seconds, **columns) for seconds in (0.4, 0.7)]
    with running(Worker(engine, handlers, **MINUTE)):
        for job_id in ids:
            started_on_time(jobs, job_id)


@pytest.mark.slow
def test_each_of_several_queues_keeps_to_its_times(engine: Engine, jobs: Jobs, handlers: HandlerRegistry) -> None:
    ids = [jobs.add("work", due_in=seconds, queue=queue) for queue, seconds in (("b", 0.6), ("a", 0.3), ("c", 0.9))]
    with running(Worker(engine, handlers, queues=["a", "b", "c"], **MINUTE)):
        for job_id in ids:
            started_on_time(jobs, job_id)


# -- what it costs -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_worker_with_nothing_due_asks_once_for_each_poll(
    engine: Engine, jobs: Jobs, observer: Observer, handlers: HandlerRegistry
) -> None:
    jobs.add("work", due_in=3600)
    with idle(Worker(engine, handlers, poll_interval=0.2), observer) as recorder:
        time.sleep(1.1)
        assert 3 <= len(recorder.texts) <= 6


@pytest.mark.slow
@pytest.mark.parametrize("why", ["no handler", "its key is taken", "locked"])
def test_a_job_that_cannot_be_taken_when_its_time_comes_makes_no_hot_loop(
    engine: Engine, jobs: Jobs, observer: Observer, handlers: HandlerRegistry, why: str
) -> None:
    job_id = jobs.add(
        "nobody's" if why == "no handler" else "work", due_in=0.8, **(KEYED if why == "its key is taken" else {})
    )
    if why == "its key is taken":
        jobs.add(
            "work", status="running", attempt=1, locked_by="w", locked_until="infinity", concurrency_slot=1, **KEYED
        )
    with idle(Worker(engine, handlers, **MINUTE), observer) as recorder, Session(engine) as session:
        if why == "locked":
            session.execute(sa.text("SELECT 1 FROM enlist_job FOR UPDATE"))
        observer.wait_for("SELECT run_at < statement_timestamp() FROM enlist_job WHERE id = %s", job_id)
        time.sleep(0.5)
        assert claims(recorder) <= 3
        assert jobs.status(job_id) == "queued"


@pytest.mark.slow
def test_many_times_that_nobody_keeps_are_ten_milliseconds_apart(
    engine: Engine, observer: Observer, handlers: HandlerRegistry
) -> None:
    observer.execute(
        "INSERT INTO enlist_job (id, kind, run_at) SELECT gen_random_uuid(), 'nobody''s',"
        " statement_timestamp() + interval '0.8 s' + n * interval '1 ms' FROM generate_series(1, 500) AS n"
    )
    with idle(Worker(engine, handlers, **MINUTE), observer) as recorder:
        observer.wait_for("SELECT max(run_at) < statement_timestamp() FROM enlist_job")
        assert 2 <= claims(recorder) <= 70


# -- what the statements tell ------------------------------------------------------------------------------------


def told(engine: Engine, statement: Any, queues: dict[str, int]) -> float | None:
    """In how many seconds the next job is due, as a claim or a look says."""
    with engine.connect() as connection:
        rows = connection.execute(statement, claim_parameters(queues)).all()
        connection.rollback()
    found = [row.due for row in rows if "later" in (getattr(row, "part", None), getattr(row, "kind", None))]
    assert len(found) <= 1
    return found[0] if found else None


LINES = [
    pytest.param(STATEMENTS.claim, {}, id="claim"),
    pytest.param(STATEMENTS.claim_among, {}, id="claim_among"),
    pytest.param(STATEMENTS.look, KEYED, id="look"),
]


@pytest.mark.parametrize(("statement", "columns"), LINES)
def test_a_claim_that_finds_too_little_tells_when_there_is_more(
    engine: Engine, jobs: Jobs, statement: Any, columns: dict[str, Any]
) -> None:
    assert told(engine, statement, {"default": 2}) is None
    jobs.add("work", due_in=500, priority=3, **columns)
    jobs.add("work", due_in=100, priority=-3, **columns)
    jobs.add("work", due_in=50, queue="other", **columns)
    jobs.add("of no kind", due_in=90, priority=7, **columns)
    jobs.add("of no kind", due_in=-90, priority=7, **columns)
    assert told(engine, statement, {"default": 2}) == pytest.approx(90, abs=5)
    assert told(engine, statement, {"default": 2, "other": 1}) == pytest.approx(50, abs=5)
    assert told(engine, statement, {"elsewhere": 1}) is None
    jobs.add("work", **columns)
    assert told(engine, statement, {"default": 1}) is None, "it had all that it was asked for"
    assert told(engine, statement, {"default": 2}) == pytest.approx(90, abs=5)


@pytest.mark.parametrize(("statement", "columns"), LINES)
def test_a_job_that_is_never_due_does_no_harm(
    engine: Engine, jobs: Jobs, observer: Observer, statement: Any, columns: dict[str, Any]
) -> None:
    jobs.add("work", **columns)
    observer.execute("UPDATE enlist_job SET run_at = 'infinity'")
    assert told(engine, statement, {"default": 1}) == math.inf
    DueTimes(60).tell([math.inf], 0)


@pytest.mark.parametrize(("statement", "columns"), LINES)
@pytest.mark.parametrize("classes", [1, 200])
def test_how_many_jobs_are_due_later_does_not_matter(
    engine: Engine, observer: Observer, statement: Any, columns: dict[str, Any], classes: int
) -> None:
    """A probe of the index for each class, the jobs of a queue with one priority."""

    def pages() -> int:
        plan = plan_of(engine, statement, claim_parameters({"default": 10}), "custom", ", ANALYZE, BUFFERS")
        number: int = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
        return number

    key = "'k', 1" if columns else "NULL, NULL"
    insert = (
        "INSERT INTO enlist_job (id, kind, run_at, priority, concurrency_key, concurrency_limit)"
        f" SELECT gen_random_uuid(), 'work', statement_timestamp() + n * interval '1 hour', mod(n, {classes}), {key}"
        " FROM generate_series(1, {}) AS n"
    )
    observer.execute("ALTER TABLE enlist_job SET (autovacuum_enabled = off)")
    observer.connection.execute(insert.format(classes).encode())
    pages()
    few = pages()
    observer.connection.execute(insert.format(30_000).encode())
    observer.execute("VACUUM enlist_job")
    pages()
    # A level more of the index for each probe; in a look classes are walked through twice.
    assert pages() <= 2 * few + 20


# -- the times that a worker knows -------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("enlist._due.time", clock)
    return clock


def test_the_first_of_the_times_counts(clock: Clock) -> None:
    times = DueTimes(60)
    assert times.seconds() == math.inf
    times.tell([5.0, 3.0], 1000.0)
    times.tell([4.0], 1000.0)
    assert times.seconds() == pytest.approx(3)
    assert times.add(2.0, "mail")
    assert times.seconds() == pytest.approx(2)
    clock.now += 2
    assert times.take() == {"mail"}
    clock.now += 1.001
    assert times.seconds() < 0
    assert times.take() == set()
    assert times.seconds() == math.inf


@pytest.mark.parametrize(("took", "added"), [(0.002, 0.002), (1.0, MARGIN_SECONDS)])
def test_times_count_from_when_the_claim_came_back_if_it_did_soon(clock: Clock, took: float, added: float) -> None:
    """The claim at that time must not be a moment too early; nor late because the one before took long."""
    times = DueTimes(60)
    clock.now += took
    times.tell([3.0], 1000.0)
    assert times.seconds() == pytest.approx(3.0 + added - took)


def test_what_is_due_after_the_next_poll_is_left_to_it(clock: Clock) -> None:
    times = DueTimes(60)
    times.tell([60.0, math.inf], 1000.0)
    assert not times.add(60.0, "mail")
    assert times.seconds() == math.inf


def test_two_claims_for_times_that_have_come_are_kept_apart(clock: Clock) -> None:
    times = DueTimes(60)
    times.tell([0.0], 1000.0)
    times.take()
    times.tell([0.0001], clock.now)
    assert times.seconds() == pytest.approx(APART_SECONDS)


def test_what_a_worker_leaves_is_all_of_its_own(clock: Clock) -> None:
    times = DueTimes(60)
    times.add(5.0, "mail")
    times.add(-5.0, "default")
    assert times.take_all() == {"mail", "default"}
    assert times.seconds() == math.inf
