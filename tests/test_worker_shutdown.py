"""A stop at the worst moment: in the middle of a claim, after it, while it waits. Nothing is left running."""

from __future__ import annotations

import asyncio
import random
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import URL, Engine, event
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from enlist import HandlerRegistry, Job, Worker
from enlist._statements import statements_for
from enlist.models import JobRecord
from tests.shop import Effect
from tests.support import Observer, wait_until
from tests.support.jobs import Jobs, running
from tests.support.process import WorkerProcess
from tests.support.proxy import LossyProxy

LOCK = 815
"""The advisory lock at which claims are held up."""


@pytest.fixture
def jobs(observer: Observer) -> Jobs:
    return Jobs(observer)


def effects() -> HandlerRegistry:
    handlers = HandlerRegistry()

    @handlers.handler("work")
    def work(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id, attempt=job.attempt))

    return handlers


def hold_up_claims(observer: Observer, when: str) -> None:
    """Have each claim wait for :data:`LOCK`: when it begins to write, or when all is written, before it commits."""
    observer.execute(
        "CREATE FUNCTION hold_up() RETURNS trigger LANGUAGE plpgsql AS"
        f" $$ BEGIN PERFORM pg_advisory_xact_lock_shared({LOCK}); RETURN new; END $$"
    )
    condition = "WHEN (old.status = 'queued' AND new.status = 'running') EXECUTE FUNCTION hold_up()"
    if when == "before it is written":
        observer.execute(f"CREATE TRIGGER hold BEFORE UPDATE ON enlist_job FOR EACH ROW {condition}")
    else:
        observer.execute(
            "CREATE CONSTRAINT TRIGGER hold AFTER UPDATE ON enlist_job DEFERRABLE INITIALLY DEFERRED"
            f" FOR EACH ROW {condition}"
        )
    observer.execute(f"SELECT pg_advisory_lock({LOCK})")


def let_claims_go(observer: Observer) -> None:
    observer.execute(f"SELECT pg_advisory_unlock({LOCK})")


def wait_held_up(observer: Observer) -> None:
    observer.wait_for("SELECT count(*) > 0 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted", timeout=15)


def assert_no_claim_is_left(observer: Observer) -> None:
    left = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        " AND pid <> pg_backend_pid() AND state <> 'idle'"
    )
    observer.wait_for(f"SELECT ({left}) = 0", timeout=2)


@contextmanager
def pause_after_claims() -> Iterator[tuple[threading.Event, threading.Event]]:
    """Have claims pause when the server has answered; events: one has come there, and it may go on.

    A job without a concurrency key is claimed in a transaction of one statement: it is committed then. One with a key
    is not.
    """
    reached, go = threading.Event(), threading.Event()
    statements = statements_for(JobRecord.__table__)
    claims = {statements.claim, statements.claim_keyed}

    def pause(_connection: Any, cursor: Any, _statement: str, _parameters: Any, context: Any, _many: bool) -> None:
        if context.invoked_statement in claims and cursor.rowcount > 0:
            reached.set()
            go.wait(20)

    event.listen(Engine, "after_cursor_execute", pause)
    try:
        yield reached, go
    finally:
        go.set()
        event.remove(Engine, "after_cursor_execute", pause)


def assert_as_if_never_claimed(jobs: Jobs, ids: list[uuid.UUID]) -> None:
    for job_id in ids:
        row = jobs.row(job_id)
        assert (row["status"], row["attempt"], row["lost"], row["locked_until"]) == ("queued", 0, 0, None)
        assert jobs.effects(job_id) == []


KEYS: list[dict[str, Any]] = [{}, {"concurrency_key": "k", "concurrency_limit": 3}]
keyed_or_not = pytest.mark.parametrize("columns", KEYS, ids=["plain", "keyed"])
moments = pytest.mark.parametrize("when", ["before it is written", "before it is committed"])


# -- while the claim is under way --------------------------------------------------------------------------------


@pytest.mark.slow
@moments
@keyed_or_not
def test_a_signal_while_a_claim_is_under_way(
    when: str, columns: dict[str, Any], database_url: URL, jobs: Jobs, observer: Observer
) -> None:
    ids = jobs.add_many("healthy", 3, **columns)
    hold_up_claims(observer, when)
    with WorkerProcess(database_url) as process:
        wait_held_up(observer)
        process.terminate()
        wait_until(lambda: "no more claims" in process.log(), 10)
        let_claims_go(observer)
        assert process.wait() == 0
        assert process.lines("run") == []
    assert_as_if_never_claimed(jobs, ids)


@pytest.mark.slow
@moments
@keyed_or_not
def test_a_signal_while_a_claim_waits_for_ever(
    when: str, columns: dict[str, Any], database_url: URL, jobs: Jobs, observer: Observer
) -> None:
    ids = jobs.add_many("healthy", 3, **columns)
    hold_up_claims(observer, when)
    with WorkerProcess(database_url, lease=60) as process:
        wait_held_up(observer)
        process.terminate()
        asked = time.monotonic()
        assert process.wait() == 0
        assert time.monotonic() - asked < 8
    # The server does not go on with it, and carry it out when nobody is there any more.
    assert_no_claim_is_left(observer)
    let_claims_go(observer)
    assert_as_if_never_claimed(jobs, ids)


@pytest.mark.slow
@moments
def test_a_stop_while_a_claim_waits_for_ever(when: str, engine: Engine, jobs: Jobs, observer: Observer) -> None:
    ids = jobs.add_many("work", 3)
    hold_up_claims(observer, when)
    worker = Worker(engine, effects(), poll_interval=0.05, shutdown_timeout=20)
    worker.start()
    wait_held_up(observer)
    asked = time.monotonic()
    assert worker.stop()
    assert time.monotonic() - asked < 8
    assert_no_claim_is_left(observer)
    let_claims_go(observer)
    assert_as_if_never_claimed(jobs, ids)
    with running(worker):
        jobs.wait_all()
    assert jobs.effects_by_job() == dict.fromkeys(ids, 1)


# -- after the claim ---------------------------------------------------------------------------------------------


@keyed_or_not
def test_a_stop_between_a_claim_and_the_start_of_its_handlers(
    columns: dict[str, Any], engine: Engine, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "enlist.worker")
    ids = jobs.add_many("work", 3, **columns)
    worker = Worker(engine, effects(), poll_interval=0.05)
    with pause_after_claims() as (reached, go):
        worker.start()
        assert reached.wait(5)
        stopping = threading.Thread(target=worker.stop)
        stopping.start()
        wait_until(lambda: "no more claims" in caplog.text)
        go.set()
        stopping.join()
    assert_as_if_never_claimed(jobs, ids)
    with running(worker):
        jobs.wait_all()
    assert jobs.effects_by_job() == dict.fromkeys(ids, 1)


def test_a_stop_when_the_answer_to_a_claim_was_lost(database_url: URL, jobs: Jobs) -> None:
    """It was carried out, and nobody knows; the next step would have found out, but there is none."""
    ids = jobs.add_many("work", 3)
    with LossyProxy(database_url) as proxy:
        engine = sa.create_engine(proxy.url, pool_size=5)
        proxy.lose_answer_to(b"WITH first_look AS MATERIALIZED")
        with running(Worker(engine, effects(), poll_interval=30)):
            assert proxy.lost.wait(5)
        engine.dispose()
    assert_as_if_never_claimed(jobs, ids)


# -- at any moment -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [8, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(300)])])
def test_stops_at_any_moment_leave_nothing_behind(rounds: int, engine: Engine, jobs: Jobs, observer: Observer) -> None:
    worker = Worker(engine, effects(), queues={"default": 10}, poll_interval=0.01)
    ids: list[uuid.UUID] = []
    chance = random.Random(rounds)
    for number in range(rounds):
        ids += jobs.add_many("work", 10, **KEYS[number % 2])
        worker.start()
        time.sleep(chance.uniform(0, 0.02))  # it is about moments that nobody chooses
        assert worker.stop()
        assert observer.scalar("SELECT count(*) FROM enlist_job WHERE status = 'running'") == 0
        assert_pool_is_whole(engine)
    assert_no_claim_is_left(observer)
    with running(worker):
        jobs.wait_all(timeout=30)
    assert jobs.effects_by_job() == dict.fromkeys(ids, 1)
    assert observer.row("SELECT max(attempt), max(lost) FROM enlist_job") == (1, 0)


def assert_pool_is_whole(engine: Engine) -> None:
    assert isinstance(engine.pool, sa.QueuePool)
    assert (engine.pool.checkedout(), engine.pool.size()) == (0, 20)
    connections = [engine.connect() for _ in range(engine.pool.checkedin())]
    assert [connection.scalar(sa.text("SELECT 1")) for connection in connections] == [1] * len(connections)
    for connection in connections:
        connection.close()


# -- what never ends ---------------------------------------------------------------------------------------------


def _asleep(inside: threading.Event, go: threading.Event) -> Any:
    def handler(session: Session, job: Job[Any]) -> None:
        inside.set()
        go.wait(30)

    return handler


def _blocks_the_loop(inside: threading.Event, go: threading.Event) -> Any:
    async def handler(session: AsyncSession, job: Job[Any]) -> None:
        inside.set()
        go.wait(30)

    return handler


def _deaf(inside: threading.Event, go: threading.Event) -> Any:
    async def handler(session: AsyncSession, job: Job[Any]) -> None:
        inside.set()
        while not go.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    return handler


@pytest.mark.slow
@pytest.mark.parametrize("make", [_asleep, _blocks_the_loop, _deaf])
def test_a_stop_ends_a_second_after_its_time_whatever_handlers_do(make: Any, engine: Engine, jobs: Jobs) -> None:
    handlers, inside, go = HandlerRegistry(), threading.Event(), threading.Event()
    handlers.handler("work")(make(inside, go))
    jobs.add("work")
    worker = Worker(engine, handlers, poll_interval=0.05, shutdown_timeout=0.5, lease=60)
    try:
        worker.start()
        assert inside.wait(5)
        asked = time.monotonic()
        assert not worker.stop()
        assert time.monotonic() - asked < 0.5 + 1 + 4  # on a busy machine
    finally:
        go.set()


@pytest.mark.slow
def test_a_process_with_threads_that_are_stuck_after_their_timeout_is_gone_in_time(
    database_url: URL, jobs: Jobs
) -> None:
    jobs.add_many("asleep for too long", 2)
    with WorkerProcess(database_url, queues={"default": 2}, shutdown_timeout=1) as process:
        for _ in range(2):
            process.expect("run asleep")
        waiting = jobs.add_many("healthy", 3)
        wait_until(lambda: jobs.counts().get("running", 0) == 0, 10)
        # Their threads have the slots still: nothing is claimed for which there is none.
        assert [jobs.status(job_id) for job_id in waiting] == ["queued"] * 3
        process.terminate()
        asked = time.monotonic()
        assert process.wait() == 1
        assert time.monotonic() - asked < 1 + 1 + 5  # on a busy machine
