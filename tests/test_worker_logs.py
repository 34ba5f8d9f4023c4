"""The log: every line about a job has its fields, and none has anybody's data."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import Any

import pytest
import sqlalchemy as sa
import tenacity
from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from enlist import Cancel, HandlerRegistry, Job, Retry, Snooze, Worker
from enlist.demo.server import EmbeddedServer
from tests.shop import Effect, Order
from tests.support import Observer, wait_until
from tests.support.jobs import Jobs, running
from tests.test_worker_connections import prepare

LATER = tenacity.wait_fixed(600)
SECRET = "correct-horse-battery-staple"
LOOPS = ("heartbeat", "claim")
FIELDS = {"job_id", "kind", "queue", "attempt", "max_attempts", "worker"}


@pytest.fixture
def jobs(observer: Observer) -> Jobs:
    return Jobs(observer)


@pytest.fixture(autouse=True)
def everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "enlist")


def naming(caplog: pytest.LogCaptureFixture, words: object) -> list[Any]:
    """The records whose line has these words."""
    return [record for record in caplog.records if str(words) in record.getMessage()]


def of_event(caplog: pytest.LogCaptureFixture, *names: str) -> list[Any]:
    """The records of events."""
    return [record for record in caplog.records if getattr(record, "event", None) in names]


def handlers_for_all() -> HandlerRegistry:
    handlers = HandlerRegistry()

    def body(session: Session, job: Job[Any]) -> None:
        secret = job.payload.get("password", "")
        match job.payload["do"]:
            case "done":
                session.add(Effect(job_id=job.id, worker="x"))
            case "raise":
                raise ValueError("out of paper")
            case "retry":
                raise Retry(300)
            case "snooze":
                raise Snooze(200)
            case "cancel":
                raise Cancel("not wanted")
            case "statement" | "value" as what:
                text = "SELECT 1 / 0 WHERE :password <> ''" if what == "statement" else "SELECT CAST(:password AS date)"
                session.execute(sa.text(text), {"password": secret + '"\n"'})
            case "unique":
                session.add_all([Order(ref=secret), Order(ref=secret)])
                session.flush()
            case "wrong type":
                session.add(Order(ref=secret, total=job.payload))
                session.flush()
            case "swallowed":
                try:
                    session.add_all([Order(ref=secret), Order(ref=secret)])
                    session.flush()
                except sa.exc.IntegrityError:
                    pass
            case "chained":
                try:
                    session.execute(sa.text("SELECT CAST(:password AS integer)"), {"password": secret})
                except sa.exc.DBAPIError as error:
                    raise RuntimeError("it did not work") from error

    async def asynchronous(session: AsyncSession, job: Job[Any]) -> None:
        await session.run_sync(body, job)

    handlers.handler("plain", wait=LATER)(body)
    handlers.handler("async", wait=LATER)(asynchronous)
    return handlers


# -- fields --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "async"])
@pytest.mark.parametrize(
    ("what", "max_attempts", "level", "event"),
    [
        ("done", 2, logging.DEBUG, "done"),
        ("nothing", 2, logging.DEBUG, "done"),
        ("raise", 2, logging.WARNING, "retried"),
        ("retry", 2, logging.WARNING, "retried"),
        ("raise", 1, logging.ERROR, "dead"),
        ("snooze", 2, logging.DEBUG, "snoozed"),
        ("cancel", 2, logging.INFO, "cancelled"),
    ],
)
def test_each_ending_is_a_line_with_its_fields(
    *,
    kind: str,
    what: str,
    max_attempts: int,
    level: int,
    event: str,
    engine: Engine,
    jobs: Jobs,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What is ordinary is below INFO; what somebody may have to look at is a warning, what will not mend an error."""
    job_id = jobs.add(kind, {"do": what}, max_attempts=max_attempts, queue="mail")
    worker = Worker(engine, handlers_for_all(), queues=["mail"], poll_interval=0.05)
    with running(worker):
        wait_until(lambda: jobs.row(job_id)["lease_token"] > 1 or jobs.status(job_id) == "done")
    (record,) = naming(caplog, job_id)
    assert (record.levelno, record.event) == (level, event)
    assert (record.job_id, record.kind, record.queue) == (str(job_id), kind, "mail")
    assert (record.attempt, record.max_attempts, record.worker) == (1, max_attempts, worker.name)
    assert 0 <= record.duration_seconds < 60


@pytest.mark.slow
def test_a_lost_lease_and_a_job_taken_back_are_lines_with_their_fields(
    engine: Engine, jobs: Jobs, observer: Observer, caplog: pytest.LogCaptureFixture
) -> None:
    handlers = HandlerRegistry()
    go = threading.Event()

    @handlers.handler("holding", wait=LATER)
    def holding(session: Session, job: Job[Any]) -> None:
        go.wait(20)

    job_id, dead = jobs.add("holding"), jobs.add("nobody's", max_attempts=1)
    taken = (
        "UPDATE enlist_job SET status = 'running', attempt = 1, lease_token = lease_token + 1, locked_by = 'gone',"
        " started_at = statement_timestamp(), locked_until = statement_timestamp() - interval '1 s' WHERE id = %s"
    )
    try:
        with running(Worker(engine, handlers, lease=1, reaper_interval=600, poll_interval=0.05)):
            jobs.wait(job_id, "running")
            observer.execute(taken, job_id)
            wait_until(lambda: "lease was lost" in caplog.text)
            observer.execute(taken, dead)
            go.set()
    finally:
        go.set()
    second = Worker(engine, handlers, reaper_interval=0.1, poll_interval=0.05)
    with running(second):
        wait_until(lambda: jobs.counts().get("running", 0) == 0)
    lost = next(record for record in naming(caplog, job_id) if record.event == "lease_lost")
    assert lost.levelno == logging.WARNING
    assert lost.duration_seconds >= 0
    reaped = of_event(caplog, "reaped")
    assert {(record.job_id, record.levelno) for record in reaped} == {
        (str(job_id), logging.WARNING),
        (str(dead), logging.ERROR),
    }
    for record in [lost, *reaped]:
        assert record.__dict__.keys() >= FIELDS
    assert {record.worker for record in reaped} == {second.name}
    assert {record.lost_worker for record in reaped} == {"gone"}


@pytest.mark.slow
def test_every_line_that_names_a_job_has_the_fields(
    engine: Engine, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    """Also what is told when a handler comes back late, is given up at a stop, or is run again."""
    handlers = handlers_for_all()
    go = threading.Event()

    @handlers.handler("slow", timeout=0.05, wait=LATER)
    def slow(session: Session, job: Job[Any]) -> None:
        go.wait(20)

    @handlers.handler("asleep")
    async def asleep(session: AsyncSession, job: Job[Any]) -> None:
        await asyncio.Event().wait()

    @handlers.handler("conflicting", wait=LATER)
    def conflicting(session: Session, job: Job[Any]) -> None:
        session.execute(sa.text("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END $$"))

    ids = [jobs.add("slow"), jobs.add("asleep"), jobs.add("conflicting"), jobs.add("plain", {"do": "raise"})]
    try:
        with running(Worker(engine, handlers, poll_interval=0.05, shutdown_timeout=0.05)):
            jobs.wait_failed(ids[0])
            jobs.wait_failed(ids[2])
            jobs.wait_failed(ids[3])
            go.set()
            wait_until(lambda: "has come back after it was given up" in caplog.text)
    finally:
        go.set()
    named = [record for job_id in ids for record in naming(caplog, job_id)]
    assert len(named) >= 7
    for record in named:
        assert record.__dict__.keys() >= FIELDS, record.getMessage()


# -- privacy -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("max_attempts", [1, 2], ids=["dead", "retried"])
@pytest.mark.parametrize("kind", ["plain", "async"])
def test_no_payload_and_no_parameter_comes_into_the_log(
    kind: str, max_attempts: int, engine: Engine, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor into the job's errors: of a database error there is the server's message, without the values."""
    for what in (
        "done",
        "nothing",
        "raise",
        "retry",
        "statement",
        "unique",
        "wrong type",
        "swallowed",
        "value",
        "chained",
    ):
        payload = {"do": what, "password": SECRET, "headers": {"Authorization": f"Bearer {SECRET}"}}
        jobs.add(kind, payload, max_attempts=max_attempts, concurrency_key=SECRET + what, concurrency_limit=1)
    worker = Worker(engine, handlers_for_all(), poll_interval=0.05)
    with running(worker):
        wait_until(lambda: jobs.counts().get("running", 0) == 0 and _all_tried(jobs), 10)
    assert jobs.counts()["done"] == 2
    assert len(of_event(caplog, "retried", "dead")) == 8
    assert SECRET not in caplog.text
    for record in caplog.records:  # what a collector of logs finds beside the text
        assert SECRET not in repr(record.__dict__), record.getMessage()
    for row in _rows(jobs):
        assert SECRET not in f"{row['last_error']} {row['errors']}"


def _rows(jobs: Jobs) -> list[dict[str, Any]]:
    return [jobs.row(job_id) for (job_id,) in jobs._observer.rows("SELECT id FROM enlist_job")]


def _all_tried(jobs: Jobs) -> bool:
    return all(row["lease_token"] > 0 and row["status"] != "running" for row in _rows(jobs))


# -- trouble of a while --------------------------------------------------------------------------------------


def _waiting_to_be_told(told: dict[str, float], free: threading.Event) -> HandlerRegistry:
    """Handlers that run until they are told to give up, note when that was, and go on to write all the same."""
    handlers = HandlerRegistry()

    @handlers.handler("plain", wait=LATER)
    def plain(session: Session, job: Job[Any]) -> None:
        number = "first" if "plain" not in told else "second"
        if number == "first":
            wait_until(lambda: job.cancel_requested, 30)
            told["plain"] = time.monotonic()
            free.wait(20)
        session.add(Effect(job_id=job.id, worker=number))

    @handlers.handler("async", wait=LATER)
    async def asynchronous(session: AsyncSession, job: Job[Any]) -> None:
        number = "first" if "async" not in told else "second"
        if number == "first":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:  # it is not even well-behaved
                told["async"] = time.monotonic()
        session.add(Effect(job_id=job.id, worker=number))

    return handlers


@pytest.mark.slow
def test_a_handler_is_told_before_its_lease_runs_out(
    private_server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The server is gone: nobody can renew. Both handlers hear of it in time, and nothing of them is committed."""
    url = private_server.url()
    prepare(url)
    engine = create_engine(url)
    lease = 4.0
    told: dict[str, float] = {}
    free = threading.Event()
    handlers = _waiting_to_be_told(told, free)
    with Observer(url) as observer:
        ids = [Jobs(observer).add(kind) for kind in ("plain", "async")]
    worker = Worker(engine, handlers, lease=lease, poll_interval=0.1, shutdown_timeout=1)
    try:
        with running(worker):
            with Observer(url) as observer:
                observer.wait_for("SELECT count(*) = 2 FROM enlist_job WHERE status = 'running'")
            private_server.stop("immediate")
            lease_ends = time.monotonic() + lease  # at the latest: it cannot be renewed any more
            wait_until(lambda: len(told) == 2, 2 * lease)
            private_server.start()
            wait_until(lambda: all(f"the worker's {loop} works again" in caplog.text for loop in LOOPS), 10)
            free.set()
            wait_until(lambda: caplog.text.count("has come back after it was given up") == 2, 10)
            with Observer(url) as observer:
                jobs = Jobs(observer)
                jobs.wait_all(timeout=15)
                assert observer.rows("SELECT job_id, worker FROM shop_effect ORDER BY job_id") == [
                    (job_id, "second") for job_id in sorted(ids)
                ]
    finally:
        free.set()
        engine.dispose()
    assert all(at < lease_ends for at in told.values())
    said = naming(caplog, "could not be renewed and ends in")
    assert sorted(record.job_id for record in said) == sorted(map(str, ids))
    assert {record.event for record in said} == {"lease_lost"}
    for loop in LOOPS:
        assert caplog.text.count(f"the worker's {loop} failed, trying again") == 1
        assert caplog.text.count(f"the worker's {loop} works again after") == 1


@pytest.mark.slow
def test_a_handler_that_blocks_the_event_loop_is_named(
    engine: Engine, jobs: Jobs, observer: Observer, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, with how long and where. The lease is renewed meanwhile."""
    handlers = HandlerRegistry()

    @handlers.handler("blocking")
    async def blocking(session: AsyncSession, job: Job[Any]) -> None:
        await asyncio.sleep(0)
        time.sleep(2.5)  # noqa: ASYNC251 (that is what is wrong with it)

    @handlers.handler("quick")
    async def quick(session: AsyncSession, job: Job[Any]) -> None:
        await asyncio.sleep(0)

    job_id = jobs.add("blocking")
    with running(Worker(engine, handlers, lease=1, poll_interval=0.05)):
        jobs.wait(job_id, "running")
        until = jobs.row(job_id)["locked_until"]
        observer.wait_for("SELECT locked_until > %s FROM enlist_job", until)
        jobs.add_many("quick", 5)
        row = jobs.wait(job_id)
        jobs.wait_all()
        wait_until(lambda: "blocked the event loop" in caplog.text)
    assert (row["attempt"], row["lost"]) == (1, 0)
    (record,) = naming(caplog, "the event loop")
    assert (record.levelno, record.job_id, record.kind) == (logging.WARNING, str(job_id), "blocking")
    assert 1.5 < record.stall_seconds < 30
    assert f"{record.stall_seconds:.1f} seconds" in record.getMessage()
    assert "in blocking" in record.getMessage()
