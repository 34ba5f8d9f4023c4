"""A queue's rate limit: exact over all workers, by the server's clock, and free for jobs that have to wait."""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import URL, Engine, create_engine
from sqlalchemy.orm import DeclarativeBase, Session

from enlist import (
    ConfigurationError,
    HandlerRegistry,
    InvalidOption,
    Job,
    JobRecordMixin,
    RateLimit,
    Retry,
    SchemaError,
    Worker,
)
from enlist._claimer import Claimer
from enlist._database import Database
from enlist.migrations import verify_schema
from tests.support import Observer, wait_until
from tests.support.jobs import Jobs, running

SPAN = 0.6
"""Seconds in which the tests' limits allow N jobs."""


@pytest.fixture
def jobs(observer: Observer) -> Jobs:
    return Jobs(observer)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When the claimers of workers that are started from now on have ended a step."""
    ended: list[float] = []
    step = Claimer.step

    def counting(self: Claimer) -> float:
        wait = step(self)
        ended.append(time.monotonic())
        return wait

    monkeypatch.setattr(Claimer, "step", counting)
    return ended


def handlers_for(*kinds: str) -> HandlerRegistry:
    handlers = HandlerRegistry()
    for kind in kinds or ("work",):

        @handlers.handler(kind)
        def work(session: Session, job: Job[Any]) -> None:
            session.execute(sa.text("SELECT 1"))

    return handlers


def claimed_at(observer: Observer, queue: str = "default") -> list[float]:
    """When jobs were claimed, in seconds by the server's clock."""
    rows = observer.rows(
        "SELECT extract(epoch FROM started_at)::float8 FROM enlist_job"
        " WHERE queue = %s AND started_at IS NOT NULL ORDER BY 1",
        queue,
    )
    return [row[0] for row in rows]


def most_above(times: Sequence[float], limit: RateLimit) -> float:
    """By how many jobs, in any window between two claims, a limit was exceeded; at most 0 if it was kept."""
    burst = limit.burst or limit.n
    return max(
        (later - earlier + 1) - burst - (times[later] - times[earlier]) / limit.interval
        for earlier in range(len(times))
        for later in range(earlier, len(times))
    )


@pytest.mark.parametrize(
    "limit",
    [
        RateLimit(10, per=dt.timedelta(seconds=SPAN)),
        pytest.param(RateLimit(10, per=SPAN, burst=1), marks=pytest.mark.slow),
    ],
)
def test_three_workers_together_keep_a_limit_and_use_it_up(
    engine: Engine, jobs: Jobs, observer: Observer, limit: RateLimit
) -> None:
    jobs.add_many("work", 25)
    workers = [
        Worker(engine, handlers_for(), rate_limits={"default": limit}, concurrency=4, poll_interval=10)
        for _ in range(3)
    ]
    with running(*workers):
        jobs.wait_all(timeout=20)
    times = claimed_at(observer)
    assert len(times) == 25
    assert most_above(times, limit) <= 1e-3
    # And nobody waited for a poll, which comes once in ten seconds: 25 jobs take (25 - burst) intervals.
    assert times[-1] - times[0] < (25 - (limit.burst or limit.n)) * limit.interval + 9
    if limit.burst == 1:
        windows = [sum(start <= time < start + SPAN - 1e-6 for time in times) for start in times]
        assert max(windows) <= limit.n


@pytest.mark.slow
def test_the_burst_starts_at_once_and_the_next_job_an_interval_later(
    engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    limit = RateLimit(4, per=2, burst=3)
    jobs.add_many("work", 4)
    with running(Worker(engine, handlers_for(), rate_limits={"default": limit}, poll_interval=10)):
        jobs.wait_all()
    first, second, third, fourth = claimed_at(observer)
    assert first == second == third
    assert 0.5 <= fourth - first < 5  # no poll was waited for


@pytest.mark.slow
def test_a_job_that_has_to_wait_uses_no_attempt_and_makes_no_hot_loop(
    engine: Engine, jobs: Jobs, observer: Observer, steps: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = Database.execute
    claims: list[Any] = []

    def counting(self: Database, statement: Any, parameters: Any) -> Any:
        if statement is self.statements.claim_limited:
            claims.append(parameters)
        return execute(self, statement, parameters)

    monkeypatch.setattr(Database, "execute", counting)
    ids = jobs.add_many("work", 50)
    with running(Worker(engine, handlers_for(), rate_limits={"default": RateLimit(1, per=3600)}, poll_interval=0.05)):
        jobs.wait(ids[0])
        several, begun = len(claims), len(steps)
        # Each of these polls would have been a claim.
        wait_until(lambda: len(steps) >= begun + 20)
        assert len(claims) - several <= 1
    waiting = observer.rows("SELECT DISTINCT status, attempt, lease_token FROM enlist_job WHERE id <> %s", ids[0])
    assert waiting == [("queued", 0, 0)]


@pytest.mark.slow
def test_retries_count(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    times: list[float] = []
    handlers = HandlerRegistry()

    @handlers.handler("work")
    def work(session: Session, job: Job[Any]) -> None:
        times.append(session.scalar(sa.select(sa.extract("epoch", sa.func.clock_timestamp()))))  # type: ignore[arg-type]
        if job.attempt < 4:
            raise Retry(0)

    jobs.add("work")
    with running(Worker(engine, handlers, rate_limits={"default": RateLimit(1, per=0.2)})):
        jobs.wait_all()
    assert len(times) == 4
    assert float(times[-1]) - float(times[0]) >= 0.5


@pytest.mark.slow
@pytest.mark.parametrize("ordered", [False, True], ids=["keyed", "ordered"])
def test_jobs_with_a_concurrency_key_count_too(engine: Engine, jobs: Jobs, observer: Observer, ordered: bool) -> None:
    for number in range(10):
        jobs.add("work", concurrency_key=f"k{number}", concurrency_limit=1, ordered=ordered)
    jobs.add_many("work", 5)
    limit = RateLimit(5, per=SPAN)
    workers = [Worker(engine, handlers_for(), rate_limits={"default": limit}) for _ in range(2)]
    with running(*workers):
        jobs.wait_all()
    times = claimed_at(observer)
    assert len(times) == 15
    assert most_above(times, limit) <= 1e-3


def test_other_queues_go_on(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    limited = jobs.add_many("work", 10, queue="mail", priority=5)
    free = jobs.add_many("work", 40)
    limit = {"mail": RateLimit(1, per=3600)}
    with running(Worker(engine, handlers_for(), queues=["mail", "default"], rate_limits=limit, poll_interval=0.1)):
        for job_id in free:
            jobs.wait(job_id)
        wait_until(lambda: jobs.status(limited[0]) == "done")
    assert [jobs.status(job_id) for job_id in limited[1:]] == ["queued"] * 9


@pytest.mark.slow
def test_a_limit_is_taken_up_where_it_was_left(
    engine: Engine, jobs: Jobs, observer: Observer, steps: list[float]
) -> None:
    first, second = jobs.add_many("work", 2)
    limit = {"default": RateLimit(1, per=3600)}
    with running(Worker(engine, handlers_for(), rate_limits=limit)):
        jobs.wait(first)
    begun = len(steps)
    with running(Worker(engine, handlers_for(), rate_limits=limit, poll_interval=0.05)):
        wait_until(lambda: len(steps) >= begun + 5)
        assert jobs.status(second) == "queued"
    with running(
        Worker(engine, handlers_for(), rate_limits={"default": RateLimit(2, per=1)})
    ):  # another says otherwise
        wait_until(lambda: observer.rows("SELECT free_at > statement_timestamp() FROM enlist_job_rate") == [(True,)])
    observer.execute("DELETE FROM enlist_job_rate")  # an operator: anew
    with running(Worker(engine, handlers_for(), rate_limits=limit, poll_interval=0.05)):
        jobs.wait(second)


def test_rows_that_were_deleted_are_made_again(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    limit = {"default": RateLimit(1000, per=1)}
    with running(Worker(engine, handlers_for(), rate_limits=limit, poll_interval=0.05)):
        jobs.wait(jobs.add("work"))
        observer.execute("TRUNCATE enlist_job_rate")
        jobs.wait(jobs.add("work"))
    assert observer.rows("SELECT queue FROM enlist_job_rate") == [("default",)]


@pytest.mark.slow
def test_jobs_of_a_limited_queue_are_not_claimed_before_there_is_a_slot(
    engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    jobs.add_many("work", 200)
    most: list[int] = []
    handlers = HandlerRegistry()

    @handlers.handler("work")
    def work(session: Session, job: Job[Any]) -> None:
        most.append(session.scalar(sa.text("SELECT count(*) FROM enlist_job WHERE status = 'running'")) or 0)

    with running(Worker(engine, handlers, concurrency=3, rate_limits={"default": RateLimit(100_000, per=1)})):
        jobs.wait_all(timeout=20)
    assert max(most) <= 3


@pytest.mark.slow
def test_drain_waits_for_the_rate(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    jobs.add_many("work", 4)
    Worker(engine, handlers_for(), rate_limits={"default": RateLimit(2, per=0.6)}).drain(timeout=10)
    assert observer.scalar("SELECT count(*) FROM enlist_job WHERE status = 'done'") == 4


class Base(DeclarativeBase):
    pass


class OwnJob(JobRecordMixin, Base):
    __tablename__ = "own_job"


@pytest.mark.slow
def test_a_job_table_of_the_applications_own_has_rates_beside_it(empty_database_url: URL) -> None:
    engine = create_engine(empty_database_url)
    try:
        Base.metadata.create_all(engine)
        with engine.begin() as connection:
            connection.exec_driver_sql(
                "INSERT INTO own_job (id, kind) SELECT gen_random_uuid(), 'work' FROM generate_series(1, 3)"
            )
        limits = {"default": RateLimit(2, per=0.4)}
        Worker(engine, handlers_for(), record=OwnJob, rate_limits=limits).drain(timeout=10)
        with engine.connect() as connection:
            assert connection.scalar(sa.text("SELECT count(*) FROM own_job WHERE status = 'done'")) == 3
            assert connection.scalar(sa.text("SELECT queue FROM own_job_rate")) == "default"
            verify_schema(connection, record=OwnJob, rate_limits=True)
        with engine.begin() as connection:
            connection.exec_driver_sql("DROP TABLE own_job_rate")
            verify_schema(connection, record=OwnJob)
        with pytest.raises(SchemaError, match="no table own_job_rate for rate limits: the table of OwnJob is yours"):
            Worker(engine, handlers_for(), record=OwnJob, rate_limits=limits).start()
    finally:
        engine.dispose()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 0, "per": 1}, "n of a RateLimit must be an integer from 1"),
        ({"n": True, "per": 1}, "n of a RateLimit must be an integer from 1"),
        ({"n": 1.5, "per": 1}, "n of a RateLimit must be an integer from 1"),
        ({"n": 1, "per": 0}, "more than a job a microsecond: leave the limit out"),
        ({"n": 2_000_001, "per": 2}, "more than a job a microsecond: leave the limit out"),
        ({"n": 1, "per": -1}, "per of a RateLimit must be between 0 and"),
        ({"n": 1, "per": float("nan")}, "per of a RateLimit must be between 0 and"),
        ({"n": 1, "per": "1s"}, "per of a RateLimit must be seconds"),
        ({"n": 5, "per": 1, "burst": 6}, "burst of a RateLimit must be an integer from 1 to 5, not 6"),
        ({"n": 5, "per": 1, "burst": 0}, "burst of a RateLimit must be an integer from 1 to 5, not 0"),
    ],
)
def test_a_limit_that_cannot_be_kept_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        RateLimit(**arguments)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"mial": RateLimit(1, per=1)}, "queue 'mial', which the worker does not serve: its queues are default"),
        ({"default": (1, 1)}, r"the rate limit of queue 'default' must be a RateLimit, not \(1, 1\)"),
        ([RateLimit(1, per=1)], "rate_limits must be a mapping of queues to RateLimit"),
    ],
)
def test_a_workers_limits_are_checked(engine: Engine, limits: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Worker(engine, handlers_for(), rate_limits=limits)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [RateLimit(500, per=1, burst=1), RateLimit(2000, per=1, burst=5)])
def test_intervals_shorter_than_a_claim_are_no_reason_to_wait_for_a_poll(
    engine: Engine, jobs: Jobs, observer: Observer, limit: RateLimit
) -> None:
    jobs.add_many("work", 60)
    with running(Worker(engine, handlers_for(), rate_limits={"default": limit}, poll_interval=60)):
        jobs.wait_all(timeout=30)
    assert most_above(claimed_at(observer), limit) <= 1e-3


@pytest.mark.slow
def test_workers_that_drain_one_limited_queue_leave_nothing(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    jobs.add_many("work", 60)
    limit = {"default": RateLimit(300, per=1, burst=1)}
    threads = [
        threading.Thread(target=Worker(engine, handlers_for(), rate_limits=limit).drain, kwargs={"timeout": 30})
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert observer.rows("SELECT status, count(*) FROM enlist_job GROUP BY 1") == [("done", 60)]


def test_a_limited_queue_without_jobs_is_no_trouble(
    engine: Engine, jobs: Jobs, observer: Observer, caplog: pytest.LogCaptureFixture
) -> None:
    limit = {"default": RateLimit(10, per=1)}
    with running(Worker(engine, handlers_for(), queues=["default", "other"], rate_limits=limit, poll_interval=0.05)):
        wait_until(lambda: observer.scalar("SELECT count(*) FROM enlist_job_rate"))
        jobs.wait(jobs.add("work", queue="other"))
        jobs.wait(jobs.add("work"))
    assert [record for record in caplog.records if record.levelname != "INFO"] == []


@pytest.mark.parametrize("free_at", ["infinity", "statement_timestamp() + interval '30 days'", "-infinity"])
def test_what_was_spent_under_another_limit_counts_for_no_more_than_a_burst(
    engine: Engine, jobs: Jobs, observer: Observer, free_at: str
) -> None:
    value = free_at if "(" in free_at else f"'{free_at}'"
    observer.execute(f"INSERT INTO enlist_job_rate (queue, free_at) VALUES ('default', {value})")
    jobs.add_many("work", 5)
    limit = RateLimit(10, per=0.5)
    with running(Worker(engine, handlers_for(), rate_limits={"default": limit}, poll_interval=60)):
        jobs.wait_all(timeout=10)
    assert most_above(claimed_at(observer), limit) <= 1e-3


@pytest.mark.slow
def test_a_rate_that_somebody_holds_stops_its_queue_alone(
    engine: Engine, jobs: Jobs, observer: Observer, steps: list[float]
) -> None:
    limit = RateLimit(3, per=0.6)
    queues = ["default", "other"]
    jobs.add_many("work", 12)
    observer.execute("INSERT INTO enlist_job_rate (queue) VALUES ('default')")
    with engine.begin() as held:
        held.exec_driver_sql("SELECT FROM enlist_job_rate FOR UPDATE")
        worker = Worker(engine, handlers_for(), queues=queues, rate_limits={"default": limit}, poll_interval=60)
        with running(worker):
            for job_id in jobs.add_many("work", 3, queue="other"):
                jobs.wait(job_id)
            assert claimed_at(observer) == []
            begun = len(steps)
            wait_until(lambda: len(steps) >= begun + 12)
            # Not every 5 ms: it is looked at more and more seldom.
            assert steps[begun + 11] - steps[begun] > 0.5
            held.rollback()
            jobs.wait_all(timeout=10)
    assert most_above(claimed_at(observer), limit) <= 1e-3


@pytest.mark.slow
def test_a_limit_holds_at_any_default_isolation_level(
    server: Any, database: str, engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    observer.execute(f"ALTER DATABASE {database} SET default_transaction_isolation = 'repeatable read'")
    jobs.add_many("work", 12)
    limit = RateLimit(6, per=0.5)
    fresh = create_engine(engine.url)
    try:
        workers = [Worker(fresh, handlers_for(), rate_limits={"default": limit}) for _ in range(3)]
        with running(*workers):
            jobs.wait_all()
    finally:
        fresh.dispose()
    assert most_above(claimed_at(observer), limit) <= 1e-3
