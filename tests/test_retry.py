"""When a failed job runs again, what is kept of its error, and that recording a failure never fails."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import json
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
import tenacity
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from enlist import Cancel, HandlerRegistry, Job, Retry, Snooze, Worker
from enlist.retry import LONGEST_WAIT, MAX_ERROR_CHARACTERS, describe, wait_after
from tests.shop import Effect, Order
from tests.support import Observer
from tests.support.jobs import Jobs, running

SECRET = "secret-4711"


@pytest.fixture
def jobs(observer: Observer) -> Jobs:
    return Jobs(observer)


class Raising(tenacity.wait.wait_base):
    """A strategy that fails, or gives whatever it is told to."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, retry_state: tenacity.RetryCallState) -> float:
        if isinstance(self.value, type):
            raise self.value("no")
        result: float = self.value
        return result


# -- the wait ------------------------------------------------------------------------------------------------


def test_the_wait_is_the_strategys_for_the_attempt() -> None:
    error = ValueError("no")
    doubling = tenacity.wait_exponential(multiplier=1, min=0, max=100)
    assert [wait_after(attempt, error, doubling).total_seconds() for attempt in (1, 2, 3, 4, 20)] == [1, 2, 4, 8, 100]
    assert wait_after(7, error, tenacity.wait_fixed(dt.timedelta(minutes=2))) == dt.timedelta(minutes=2)


def test_a_strategy_sees_the_error() -> None:
    class ByError(tenacity.wait.wait_base):
        def __call__(self, retry_state: tenacity.RetryCallState) -> float:
            assert retry_state.outcome is not None
            return 3.0 if isinstance(retry_state.outcome.exception(), ConnectionError) else 7.0

    assert wait_after(1, ConnectionError(), ByError()).total_seconds() == 3
    assert wait_after(1, ValueError(), ByError()).total_seconds() == 7


def test_the_default_grows_from_5_seconds_to_an_hour_with_jitter() -> None:
    waits = [{wait_after(attempt, ValueError()).total_seconds() for _ in range(50)} for attempt in (1, 2, 3, 30, 10**6)]
    for seconds, low in zip(waits, (5, 10, 20, 3600, 3600), strict=True):
        assert low <= min(seconds)
        assert max(seconds) <= low + 5
    assert len(waits[0]) > 1


@pytest.mark.parametrize("value", [ZeroDivisionError, OverflowError, float("nan"), "soon", None])
def test_a_strategy_that_fails_is_replaced_by_the_default(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert 5 <= wait_after(1, ValueError(), Raising(value)).total_seconds() <= 10
    assert "the default is used instead" in caplog.text


@pytest.mark.parametrize(
    ("value", "wait"),
    [
        (-5, dt.timedelta(0)),
        (float("-inf"), dt.timedelta(0)),
        (1e300, LONGEST_WAIT),
        (float("inf"), LONGEST_WAIT),
        (10**400, None),
    ],
)
def test_a_wait_never_leaves_its_bounds(value: Any, wait: dt.timedelta | None) -> None:
    found = wait_after(1, ValueError(), Raising(value))
    assert found == wait if wait is not None else dt.timedelta(0) <= found <= LONGEST_WAIT


def test_an_exponential_that_overflows_is_cut() -> None:
    assert wait_after(10**6, ValueError(), tenacity.wait_exponential(multiplier=1e300)) == LONGEST_WAIT


# -- attempts ------------------------------------------------------------------------------------------------


def _failing(error: Callable[[], BaseException], **options: Any) -> HandlerRegistry:
    handlers = HandlerRegistry()
    options.setdefault("wait", tenacity.wait_fixed(0.05))

    @handlers.handler("fail", **options)
    def fail(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id, attempt=job.attempt))
        session.flush()
        raise error()

    @handlers.handler("work")
    def work(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id, attempt=job.attempt))

    return handlers


def test_a_job_is_tried_max_attempts_times_and_then_dead(engine: Engine, jobs: Jobs) -> None:
    job_id = jobs.add("fail", max_attempts=4)
    with running(Worker(engine, _failing(lambda: ValueError("not today")), poll_interval=0.05)):
        row = jobs.wait(job_id)
    assert row["status"] == "dead"
    assert (row["attempt"], row["lost"]) == (4, 0)
    assert "ValueError: not today" in row["last_error"]
    assert "in fail" in row["last_error"]  # the traceback
    assert [(entry["attempt"], entry["error"]) for entry in row["errors"]] == [
        (attempt, "ValueError: not today") for attempt in (1, 2, 3, 4)
    ]
    for entry in row["errors"]:
        assert dt.datetime.fromisoformat(entry["at"]).utcoffset() is not None
    assert row["finished_at"] is not None
    assert row["locked_by"] is None or row["locked_until"] is None
    assert jobs.effects(job_id) == []


def test_only_the_latest_ten_errors_are_kept(engine: Engine, jobs: Jobs) -> None:
    job_id = jobs.add("fail", max_attempts=13)
    with running(Worker(engine, _failing(ValueError, wait=tenacity.wait_fixed(0)), poll_interval=0.05)):
        row = jobs.wait(job_id)
    assert [entry["attempt"] for entry in row["errors"]] == list(range(4, 14))


def test_the_retry_is_due_when_the_strategy_says(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    job_id = jobs.add("fail")
    with running(Worker(engine, _failing(ValueError, wait=tenacity.wait_fixed(300)), poll_interval=0.05)):
        row = jobs.wait_failed(job_id)
    assert (row["status"], row["attempt"]) == ("queued", 1)
    assert row["started_at"] is None or row["locked_until"] is None
    seconds = observer.scalar("SELECT extract(epoch FROM run_at - statement_timestamp()) FROM enlist_job")
    assert 290 < seconds <= 300


def test_a_failure_under_a_failing_strategy_is_retried_by_the_default(
    engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    job_id = jobs.add("fail")
    with running(Worker(engine, _failing(ValueError, wait=Raising(ZeroDivisionError)), poll_interval=0.05)):
        jobs.wait_failed(job_id)
    assert 3 < observer.scalar("SELECT extract(epoch FROM run_at - statement_timestamp()) FROM enlist_job") <= 10


def test_snooze_runs_again_later_and_does_not_count(engine: Engine, jobs: Jobs) -> None:
    handlers = HandlerRegistry()
    attempts: list[int] = []

    @handlers.handler("work")
    def work(session: Session, job: Job[Any]) -> None:
        attempts.append(job.attempt)
        session.add(Effect(job_id=job.id, attempt=job.attempt))
        session.flush()
        if len(attempts) <= 2:
            raise Snooze(0.02)  # a second, at least

    job_id = jobs.add("work", max_attempts=2)
    with running(Worker(engine, handlers, poll_interval=0.05)):
        row = jobs.wait(job_id)
    assert attempts == [1] * 3
    assert (row["status"], row["attempt"], row["last_error"], row["errors"]) == ("done", 1, None, [])
    assert jobs.effects(job_id) == [(1, "")]


def test_retry_replaces_the_wait_but_not_the_limit(engine: Engine, jobs: Jobs) -> None:
    job_id = jobs.add("fail", max_attempts=3)
    handlers = _failing(lambda: Retry(0.02), wait=tenacity.wait_fixed(3600))
    with running(Worker(engine, handlers, poll_interval=0.05)):
        row = jobs.wait(job_id)
    assert (row["status"], row["attempt"], len(row["errors"])) == ("dead", 3, 3)


def test_cancel_ends_the_job(engine: Engine, jobs: Jobs) -> None:
    job_id = jobs.add("fail")
    with running(Worker(engine, _failing(lambda: Cancel("the order\x00 is gone")), poll_interval=0.05)):
        row = jobs.wait(job_id)
    assert (row["status"], row["attempt"]) == ("cancelled", 1)
    assert row["last_error"] == "the order\N{REPLACEMENT CHARACTER} is gone"
    assert jobs.effects(job_id) == []


@pytest.mark.parametrize("delay", [-1, float("nan"), "soon", None])
@pytest.mark.parametrize("ending", [Snooze, Retry])
def test_a_wrong_delay_is_an_ordinary_failure(ending: Any, delay: Any, engine: Engine, jobs: Jobs) -> None:
    job_id = jobs.add("fail", max_attempts=1)
    with running(Worker(engine, _failing(lambda: ending(delay)), poll_interval=0.05)):
        row = jobs.wait(job_id)
    assert row["status"] == "dead"
    assert "InvalidOption: delay must be" in row["last_error"]


# -- hostile errors ------------------------------------------------------------------------------------------


class HostileText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class HostileRepr(Exception):
    def __str__(self) -> str:
        raise SystemExit("no text")

    __repr__ = __str__


def _circular() -> BaseException:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    return first


def _deep() -> BaseException:
    error: BaseException = ValueError("deepest")
    for number in range(5000):
        outer = ValueError(str(number))
        outer.__cause__ = error
        error = outer
    return error


def _nested_groups() -> BaseException:
    error: BaseException = ValueError("deepest")
    for number in range(2000):
        error = BaseExceptionGroup(str(number), [error])
    return error


HOSTILE: dict[str, Callable[[], BaseException]] = {
    "NUL": lambda: ValueError("a\x00b"),
    "surrogate": lambda: ValueError("a\ud800b"),
    "5 MB": lambda: ValueError("x" * 5_000_000),
    "5 MB of NUL": lambda: ValueError("\x00" * 5_000_000),
    "__str__ raises": HostileText,
    "__str__ exits": HostileRepr,
    "group": lambda: ExceptionGroup("several", [ValueError("one\x00"), ExceptionGroup("more", [KeyError("two")])]),
    "circular cause": _circular,
    "deep cause": _deep,
    "nested groups": _nested_groups,
    "SystemExit": lambda: SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt,
    "CancelledError": asyncio.CancelledError,
    "GeneratorExit": GeneratorExit,
    "StopIteration": StopIteration,
    "RecursionError": RecursionError,
    "MemoryError": MemoryError,
    "bare BaseException": lambda: BaseException("bare"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_any_exception_becomes_text_that_can_be_stored(name: str) -> None:
    text = describe(HOSTILE[name]())
    assert text
    assert len(text) <= MAX_ERROR_CHARACTERS + 100
    assert "\x00" not in text
    text.encode()
    json.dumps(text)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["plain", "async"])
def test_whatever_a_handler_raises_is_recorded_and_healthy_jobs_follow(
    asynchronous: bool, engine: Engine, jobs: Jobs
) -> None:
    handlers = HandlerRegistry()
    if asynchronous:

        @handlers.handler("fail", wait=tenacity.wait_fixed(600))
        async def fail_async(session: AsyncSession, job: Job[Any]) -> None:
            session.add(Effect(job_id=job.id))
            await session.flush()
            error = HOSTILE[job.payload["name"]]()
            raise error

        @handlers.handler("work")
        async def work_async(session: AsyncSession, job: Job[Any]) -> None:
            session.add(Effect(job_id=job.id))

    else:

        @handlers.handler("fail", wait=tenacity.wait_fixed(600))
        def fail(session: Session, job: Job[Any]) -> None:
            session.add(Effect(job_id=job.id))
            session.flush()
            error = HOSTILE[job.payload["name"]]()
            raise error

        @handlers.handler("work")
        def work(session: Session, job: Job[Any]) -> None:
            session.add(Effect(job_id=job.id))

    failing = {name: jobs.add("fail", {"name": name}, priority=1) for name in HOSTILE}
    healthy = jobs.add_many("work", 20)
    with running(Worker(engine, handlers, queues={"default": 3}, poll_interval=0.05)):
        rows = {name: jobs.wait_failed(job_id) for name, job_id in failing.items()}
        for job_id in healthy:
            assert jobs.wait(job_id)["status"] == "done"
    for name, row in rows.items():
        assert (name, row["status"], row["attempt"], row["lost"]) == (name, "queued", 1, 0)
        assert len(row["last_error"]) <= MAX_ERROR_CHARACTERS + 100
        assert len(row["errors"]) == 1
    for name, part in {
        "NUL": "ValueError: a\N{REPLACEMENT CHARACTER}b",
        "surrogate": "ValueError: a?b",
        "5 MB": "characters cut",
        "__str__ raises": "HostileText",
        "__str__ exits": "HostileRepr",
        "group": "KeyError: 'two'",
        "circular cause": "ValueError: first",
        "SystemExit": "SystemExit: 3",
        "KeyboardInterrupt": "KeyboardInterrupt",
        "CancelledError": "CancelledError",
        "GeneratorExit": "GeneratorExit",
    }.items():
        assert part in rows[name]["last_error"], name
    assert jobs.counts() == {"queued": len(HOSTILE), "done": 20}
    assert set(jobs.effects_by_job()) == set(healthy)


def test_a_database_error_is_stored_without_its_parameters(
    engine: Engine, jobs: Jobs, observer: Observer, caplog: pytest.LogCaptureFixture
) -> None:
    handlers = HandlerRegistry()

    @handlers.handler("twice", wait=tenacity.wait_fixed(600))
    def twice(session: Session, job: Job[Any]) -> None:
        session.add_all([Order(ref=SECRET, total=1), Order(ref=SECRET, total=2)])
        session.flush()

    @handlers.handler("wrapped", wait=tenacity.wait_fixed(600))
    def wrapped(session: Session, job: Job[Any]) -> None:
        try:
            session.execute(sa.text("SELECT CAST(:value AS integer) + no_such_column"), {"value": SECRET})
        except sa.exc.DBAPIError as error:
            raise RuntimeError("wrapped") from error

    @handlers.handler("grouped", wait=tenacity.wait_fixed(600))
    def grouped(session: Session, job: Job[Any]) -> None:
        try:
            session.execute(sa.text("SELECT no_such_function(:value)"), {"value": SECRET})
        except sa.exc.DBAPIError as error:
            raise ExceptionGroup("grouped", [error]) from None

    @handlers.handler("swallowed", wait=tenacity.wait_fixed(600))
    def swallowed(session: Session, job: Job[Any]) -> None:
        session.add(Order(ref=SECRET, total=10**12))  # more than an integer holds
        with contextlib.suppress(sa.exc.DBAPIError):
            session.flush()

    @handlers.handler("used again", wait=tenacity.wait_fixed(600))
    def used_again(session: Session, job: Job[Any]) -> None:
        swallowed(session, job)
        session.add(Effect(job_id=job.id))
        session.flush()

    ids = {kind: jobs.add(kind) for kind in ("twice", "wrapped", "grouped", "swallowed", "used again")}
    with running(Worker(engine, handlers, poll_interval=0.05)):
        rows = {kind: jobs.wait_failed(job_id) for kind, job_id in ids.items()}
    assert "IntegrityError" in rows["twice"]["last_error"]
    assert "shop_order_ref_key" in rows["twice"]["last_error"]
    assert "TransactionAborted" in rows["swallowed"]["last_error"]
    assert "PendingRollbackError" in rows["used again"]["last_error"]
    assert "UndefinedColumn" in rows["wrapped"]["last_error"]
    for kind, row in rows.items():
        stored = row["last_error"] + json.dumps(row["errors"])
        # Neither what the client bound, nor what the server's DETAIL quotes.
        assert "parameters" not in stored or "hidden" in stored, kind
        assert "[parameters: (" not in stored
        assert "[parameters: {" not in stored
        assert SECRET not in stored, kind
    assert "[parameters: [" not in caplog.text
    assert "[parameters: {" not in caplog.text
    assert SECRET not in caplog.text
    assert observer.scalar("SELECT count(*) FROM shop_order") == 0
