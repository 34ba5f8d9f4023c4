"""Rows, handlers and a process that do what nobody should: it stays one job's trouble."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

import pydantic
import pytest
import sqlalchemy as sa
import tenacity
from psycopg import sql
from sqlalchemy import URL, Engine
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from enlist import Cancel, HandlerRegistry, Job, JobPayload, Retry, Snooze, Worker
from enlist._claimer import Claimer
from enlist.events import EventName, JobEvent
from tests.shop import Effect
from tests.support import Observer, wait_until
from tests.support.jobs import Jobs, running
from tests.support.process import WorkerProcess

SOON = tenacity.wait_fixed(0.02)
LATER = tenacity.wait_fixed(600)


@pytest.fixture
def jobs(observer: Observer) -> Jobs:
    return Jobs(observer)


def registry(**functions: Callable[..., Any]) -> HandlerRegistry:
    """Handlers by kind; ``plain`` and ``asynchronous`` leave an effect."""
    handlers = HandlerRegistry()

    @handlers.handler("plain", wait=SOON)
    def plain(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))

    for kind, function in functions.items():
        handlers.handler(kind, wait=LATER)(function)
    return handlers


async def asynchronous(session: AsyncSession, job: Job[Any]) -> None:
    session.add(Effect(job_id=job.id))


# -- rows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("payload", '{"n": ' + "1" * 5000 + "}"),
        ("payload", '{"n": ' + "[" * 6000 + "]" * 6000 + "}"),
        ("meta", '{"n": ' + "1" * 5000 + "}"),
    ],
    ids=["a number too long", "nested too deep", "meta"],
)
def test_json_that_python_cannot_read_fails_its_own_job_only(
    column: str, value: str, engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    wrong = jobs.add("plain", priority=1, max_attempts=1)
    with engine.begin() as connection:
        connection.execute(sa.text(f"UPDATE enlist_job SET {column} = CAST(:value AS jsonb)"), {"value": value})
    right = jobs.add_many("plain", 3)
    with running(Worker(engine, registry(), poll_interval=0.05)):
        for job_id in right:
            assert jobs.wait(job_id)["status"] == "done"
        observer.wait_for("SELECT finished_at IS NOT NULL FROM enlist_job WHERE id = %s", wrong)
    status, error = observer.row("SELECT status, last_error FROM enlist_job WHERE id = %s", wrong)
    if status == "done":  # how deep is too deep depends on the Python
        assert "[[" in value
    else:
        assert f"the stored {column} cannot be read" in error


@pytest.mark.parametrize("run_at", ["-infinity", "0044-03-15 BC"])
def test_a_due_time_before_pythons_first_is_due(run_at: str, engine: Engine, jobs: Jobs) -> None:
    jobs.add_many("plain", 3)
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE enlist_job SET run_at = CAST(:run_at AS timestamptz)"), {"run_at": run_at})
    with running(Worker(engine, registry(), poll_interval=0.05)):
        jobs.wait_all()


# -- endings -------------------------------------------------------------------------------------------------


class BareSnooze(Snooze):
    def __init__(self) -> None:
        Exception.__init__(self)


class TextRetry(Retry):
    def __init__(self) -> None:
        self.delay: Any = "tomorrow"


class BareCancel(Cancel):
    def __init__(self) -> None:
        Exception.__init__(self)


@pytest.mark.parametrize("ending", [BareSnooze, TextRetry, BareCancel])
def test_an_ending_that_is_not_whole_is_a_failure(ending: type[Exception], engine: Engine, jobs: Jobs) -> None:
    def bad(session: Session, job: Job[Any]) -> None:
        raise ending

    def failing(session: Session, job: Job[Any]) -> None:
        raise ValueError("ordinary")

    bad_id = jobs.add("bad", priority=1)
    other_id = jobs.add("failing")
    with running(Worker(engine, registry(bad=bad, failing=failing), poll_interval=0.05)):
        row = jobs.wait_failed(bad_id)
        assert "ordinary" in jobs.wait_failed(other_id)["last_error"]
    assert (row["status"], row["attempt"], row["lost"]) == ("queued", 1, 0)
    assert ending.__name__ in row["last_error"] or "delay" in row["last_error"]


@pytest.mark.parametrize("reason", [None, 5, ValueError("x")])
def test_a_reason_that_is_no_text_cancels_too(reason: Any, engine: Engine, jobs: Jobs) -> None:
    def bad(session: Session, job: Job[Any]) -> None:
        raise Cancel(reason)

    job_id = jobs.add("bad")
    with running(Worker(engine, registry(bad=bad), poll_interval=0.05)):
        row = jobs.wait(job_id)
    assert (row["status"], row["last_error"]) == ("cancelled", str(reason))


class Exiting(JobPayload, kind="exiting"):
    number: int = 0

    @pydantic.field_validator("number")
    @classmethod
    def check(cls, value: int) -> int:
        raise SystemExit(3)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_validator_that_exits_is_a_failure(is_async: bool, engine: Engine, jobs: Jobs) -> None:
    handlers = registry()
    decorate: Any = handlers.handler(Exiting, wait=LATER)
    decorate(asynchronous if is_async else lambda session, job: None)
    job_id = jobs.add("exiting", {"number": 1})
    with running(Worker(engine, handlers, poll_interval=0.05)):
        row = jobs.wait_failed(job_id)
    assert (row["status"], row["lost"]) == ("queued", 0)
    assert "SystemExit: 3" in row["last_error"]


@pytest.mark.parametrize("kind", ["idle", "failing"])
def test_an_ending_that_the_database_refuses_does_not_hold_up_the_others(
    kind: str, engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    observer.connection.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " IF OLD.status = 'running' AND OLD.meta ? 'refused' THEN RAISE 'refused'; END IF; RETURN NEW; END $$;"
        "CREATE TRIGGER refuse BEFORE UPDATE ON enlist_job FOR EACH ROW EXECUTE FUNCTION refuse()"
    )

    def idle(session: Session, job: Job[Any]) -> None: ...

    def failing(session: Session, job: Job[Any]) -> None:
        raise ValueError

    refused = jobs.add(kind, priority=1, max_attempts=1, meta='{"refused": 1}')
    others = jobs.add_many(kind, 20, max_attempts=2)
    events: list[JobEvent] = []
    settings: dict[str, Any] = {"poll_interval": 0.05, "lease": 30, "events": events.append}
    with running(Worker(engine, registry(idle=idle, failing=failing), **settings)):
        for job_id in others:
            jobs.wait(job_id, "done", "queued")
            if kind == "failing":
                jobs.wait_failed(job_id)
    assert jobs.status(refused) == "running"
    (lost,) = [event for event in events if event.name is EventName.LEASE_LOST]
    assert lost.job_id == refused
    assert lost.error is not None
    assert "the server refuses how it ended" in lost.error


# -- the process ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("possible", [2, 0])
def test_a_process_without_threads_to_spare(
    possible: int, engine: Engine, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start
    refusing = True

    def limited(thread: threading.Thread) -> None:
        if refusing and thread.name.startswith("enlist-handler-") and int(thread.name.rpartition("-")[2]) > possible:
            raise RuntimeError("can't start new thread")
        start(thread)

    def waiting(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))
        time.sleep(0.02)

    monkeypatch.setattr(threading.Thread, "start", limited)
    job_ids = jobs.add_many("waiting", 8)
    with running(Worker(engine, registry(waiting=waiting), poll_interval=0.05)):
        if not possible:
            wait_until(lambda: jobs.counts() == {"queued": 8} and jobs.row(job_ids[0])["lease_token"] > 1)
            refusing = False
        jobs.wait_all()
    assert jobs.effects_by_job() == dict.fromkeys(job_ids, 1)
    assert {jobs.row(job_id)["attempt"] for job_id in job_ids} == {1}


def test_handlers_that_are_registered_after_the_worker_was_made(engine: Engine, jobs: Jobs) -> None:
    handlers = registry()
    worker = Worker(engine, handlers, poll_interval=0.05)
    handlers.handler("asynchronous")(asynchronous)
    jobs.add_many("asynchronous", 3)
    jobs.add_many("plain", 3)
    with running(worker):
        jobs.wait_all()


def test_each_start_has_a_name_of_its_own(engine: Engine) -> None:
    """The worker may have been made before a fork, and a name says whose jobs are given back."""
    worker = Worker(engine, registry())
    names = {worker.name}
    for _ in range(2):
        with running(worker):
            names.add(worker.name)
    assert len(names) == 3


@pytest.mark.slow
def test_a_forked_child_that_returns_from_the_handler_ends_there(
    database_url: URL, jobs: Jobs, observer: Observer
) -> None:
    job_ids = jobs.add_many("forking", 3)
    with WorkerProcess(database_url) as process:
        jobs.wait_all()
        process.terminate()
        assert process.wait() == 0
    assert jobs.effects_by_job() == dict.fromkeys(job_ids, 1)


# -- the event loop ------------------------------------------------------------------------------------------


def test_a_handler_that_cancels_all_tasks_leaks_no_slot(engine: Engine, jobs: Jobs) -> None:
    async def cancelling(session: AsyncSession, job: Job[Any]) -> None:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    async def working(session: AsyncSession, job: Job[Any]) -> None:
        await asyncio.sleep(0)

    handlers = registry()
    handlers.handler("cancelling", wait=SOON)(cancelling)  # one may be cancelled by another
    handlers.handler("working", wait=SOON)(working)
    for _ in range(10):
        jobs.add_many("cancelling", 2, max_attempts=100)
        jobs.add_many("working", 10, max_attempts=100)
    with running(Worker(engine, handlers, queues={"default": 5}, poll_interval=0.05, lease=60)):
        jobs.wait_all()


@pytest.mark.parametrize("name", ["taken", "shut down"])
def test_the_loops_executor_is_the_handlers_and_the_worker_needs_it_not(name: str, engine: Engine, jobs: Jobs) -> None:
    release = threading.Event()

    async def first(session: AsyncSession, job: Job[Any]) -> None:
        if name == "taken":
            await asyncio.gather(*[asyncio.to_thread(release.wait, 10) for _ in range(40)])
        else:
            await asyncio.get_running_loop().shutdown_default_executor()

    async def failing(session: AsyncSession, job: Job[Any]) -> None:
        raise ValueError("recorded")

    handlers = registry(first=first, failing=failing, asynchronous=asynchronous)
    jobs.add("first")
    with running(Worker(engine, handlers, poll_interval=0.05)):
        wait_until(lambda: jobs.counts() == ({"running": 1} if name == "taken" else {"done": 1}))
        failed, careful = jobs.add("failing"), jobs.add("asynchronous", max_attempts=1)
        assert "recorded" in jobs.wait_failed(failed)["last_error"]
        assert jobs.wait(careful)["status"] == "done"
        release.set()


# -- many at once --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_retries_that_are_due_together_cost_one_claim(
    engine: Engine, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims = []
    claim = Claimer.claim

    def counting(self: Claimer, demands: Any) -> Any:
        claims.append(time.monotonic())
        return claim(self, demands)

    monkeypatch.setattr(Claimer, "claim", counting)
    seen = set()

    def snoozing(session: Session, job: Job[Any]) -> None:
        if job.id not in seen:
            seen.add(job.id)
            raise Snooze(0.2)

    jobs.add_many("snoozing", 400)
    with running(Worker(engine, registry(snoozing=snoozing), queues={"default": 50}, poll_interval=30)):
        jobs.wait_all()
        before = len(claims)
        time.sleep(0.3)
        assert len(claims) - before <= 3


# -- afterwards ----------------------------------------------------------------------------------------------


def test_a_session_cannot_be_used_after_its_attempt(engine: Engine, jobs: Jobs) -> None:
    kept: list[Any] = []

    def keeping(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))
        kept.append(session)

    async def async_keeping(session: AsyncSession, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))
        kept.append(session.sync_session)

    jobs.add("keeping")
    jobs.add("async_keeping")
    with running(Worker(engine, registry(keeping=keeping, async_keeping=async_keeping), poll_interval=0.05)):
        jobs.wait_all()
    for session in kept:
        with pytest.raises(sa.exc.InvalidRequestError, match="closed"):
            session.execute(sa.text("SELECT 1"))


@pytest.mark.slow
def test_a_right_that_is_revoked_for_a_moment_loses_no_ending(
    database_url: URL, jobs: Jobs, observer: Observer, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not about the row: what was to be written is kept until it can be."""
    role = f"app_{secrets.token_hex(4)}"
    name = sql.Identifier(role)
    observer.connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(name))
    observer.connection.execute(sql.SQL("GRANT ALL ON ALL TABLES IN SCHEMA public TO {}").format(name))
    own = sa.create_engine(database_url.set(username=role))
    handlers = HandlerRegistry()
    runs: list[int] = []
    inside, go = threading.Event(), threading.Event()

    @handlers.handler("work")
    def work(_session: Session, job: Job[Any]) -> None:
        runs.append(job.attempt)
        inside.set()
        go.wait(10)

    job_id = jobs.add("work")
    try:
        with running(Worker(own, handlers, poll_interval=0.05)):
            assert inside.wait(5)
            observer.connection.execute(sql.SQL("REVOKE UPDATE ON enlist_job FROM {}").format(name))
            go.set()
            wait_until(lambda: "the server refuses how it ended for now" in caplog.text)
            observer.connection.execute(sql.SQL("GRANT UPDATE ON enlist_job TO {}").format(name))
            assert jobs.wait(job_id)["status"] == "done"
    finally:
        go.set()
        own.dispose()
        observer.connection.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(name))
    assert runs == [1]


@pytest.mark.parametrize(
    "sqlstate", ["42501", *(pytest.param(s, marks=pytest.mark.slow) for s in ("0A000", "55000", "57014", "40001"))]
)
def test_an_ending_that_is_refused_for_a_while_holds_up_no_others(
    sqlstate: str, engine: Engine, jobs: Jobs, observer: Observer, caplog: pytest.LogCaptureFixture
) -> None:
    """By row-level security, or a trigger that meets what it did not expect: it is written when that is over."""
    observer.connection.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " IF OLD.status = 'running' AND OLD.meta ? 'refused' THEN"
        f" RAISE 'not now' USING ERRCODE = '{sqlstate}'; END IF; RETURN NEW; END $$;"
        "CREATE TRIGGER refuse BEFORE UPDATE ON enlist_job FOR EACH ROW EXECUTE FUNCTION refuse()"
    )

    def idle(session: Session, job: Job[Any]) -> None: ...

    def failing(session: Session, job: Job[Any]) -> None:
        raise ValueError

    refused = [jobs.add(kind, priority=1, meta='{"refused": 1}') for kind in ("idle", "failing", "idle")]
    others = [jobs.add(kind) for kind in ("idle", "failing") * 10]
    with running(Worker(engine, registry(idle=idle, failing=failing), poll_interval=0.05, lease=30)):
        for number, job_id in enumerate(others):
            jobs.wait_failed(job_id, timeout=20) if number % 2 else jobs.wait(job_id, timeout=20)
        assert [jobs.status(job_id) for job_id in refused] == ["running"] * 3
        wait_until(lambda: caplog.text.count("the server refuses how it ended for now, that is tried again") == 3, 20)
        observer.execute("DROP TRIGGER refuse ON enlist_job")
        assert [jobs.wait(job_id, "done", "queued", timeout=20)["attempt"] for job_id in refused] == [1] * 3


def test_a_stop_that_could_not_write_all_says_so(
    engine: Engine, jobs: Jobs, observer: Observer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("enlist._running.STOPPING_SECONDS", 0.3)
    observer.connection.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " RAISE 'not now' USING ERRCODE = '42501'; END $$;"
        "CREATE TRIGGER refuse BEFORE UPDATE OF finished_at ON enlist_job FOR EACH ROW EXECUTE FUNCTION refuse()"
    )
    job_id = jobs.add("idle")
    worker = Worker(engine, registry(idle=lambda session, job: None), poll_interval=0.05, lease=30)
    worker.start()
    wait_until(lambda: "refuses how it ended for now" in caplog.text)
    assert worker.stop() is False
    assert (
        f"job {job_id} (idle, attempt 1 of 20): how it ended could not be written: it is left to the end" in caplog.text
    )
    assert jobs.status(job_id) == "running"


@pytest.mark.slow
def test_a_start_that_cannot_be_written_is_tried_in_a_while(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    observer.connection.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " IF NEW.started_at IS NOT NULL AND OLD.status = 'running' AND NEW.status = 'running' THEN RAISE 'no'; END IF;"
        " RETURN NEW; END $$;"
        "CREATE TRIGGER refuse BEFORE UPDATE ON enlist_job FOR EACH ROW EXECUTE FUNCTION refuse()"
    )
    job_id = jobs.add("idle", max_attempts=1)
    with running(Worker(engine, registry(idle=lambda session, job: None), poll_interval=0.05)):
        wait_until(lambda: jobs.row(job_id)["lease_token"] >= 4, 10)  # claimed and given back twice
        began, token = time.monotonic(), jobs.row(job_id)["lease_token"]
        wait_until(lambda: jobs.row(job_id)["lease_token"] >= token + 4, 10)
        assert time.monotonic() - began > 0.9
        observer.execute("DROP TRIGGER refuse ON enlist_job")
        assert jobs.wait(job_id)["attempt"] == 1


def test_a_row_at_the_end_of_the_integers_stops_no_claim(engine: Engine, jobs: Jobs) -> None:
    odd = jobs.add("idle", attempt=2147483647, max_attempts=2147483647, priority=9)
    others = jobs.add_many("idle", 5)
    with running(Worker(engine, registry(idle=lambda session, job: None), poll_interval=0.05)):
        assert [jobs.wait(job_id)["status"] for job_id in [*others, odd]] == ["done"] * 6
