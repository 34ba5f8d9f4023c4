"""A lease that is lost fences its worker off; a lease that is held is kept, however long the handler runs."""

from __future__ import annotations

import datetime as dt
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
import tenacity
from sqlalchemy import URL, Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import NullPool

from enlist import HandlerRegistry, Job, JobRecord, JobRepository, Worker
from enlist._database import Database
from enlist._reaper import Reaper, expired, reap
from enlist._statements import statements_for
from tests import shop
from tests.shop import Effect
from tests.support import Observer, wait_until
from tests.support.jobs import Jobs, running
from tests.support.process import WorkerProcess


@pytest.fixture
def jobs(observer: Observer) -> Jobs:
    return Jobs(observer)


# -- a frozen worker -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ"])
def test_a_frozen_worker_commits_nothing_after_its_lease_was_taken_over(
    isolation: str, database_url: URL, jobs: Jobs, observer: Observer
) -> None:
    key: dict[str, Any] = {"concurrency_key": "k", "concurrency_limit": 1}
    settings: dict[str, Any] = {"lease": 1, "engine": {"isolation_level": isolation}}
    with WorkerProcess(database_url, label="first", **settings) as first:
        first.expect("ready")
        job_id = jobs.add("holding", **key)
        first.expect(f"run holding {job_id} 1")
        first.freeze()
        with WorkerProcess(database_url, label="second", **settings) as second:
            second.expect("ready")
            second.expect(f"run holding {job_id} 2")
            next_of_key = jobs.add("healthy", **key)
            assert jobs.status(next_of_key) == "queued"
            token = jobs.row(job_id)["lease_token"]

            first.thaw()
            first.say("go")
            wait_until(lambda: "lease was lost" in first.log(), 10)
            row = jobs.row(job_id)
            assert (row["status"], row["attempt"], row["lease_token"]) == ("running", 2, token)
            assert jobs.effects(job_id) == []
            assert jobs.status(next_of_key) == "queued"

            second.say("go")
            row = jobs.wait(job_id)
            assert (row["status"], row["attempt"], row["lost"]) == ("done", 2, 1)
            assert jobs.effects(job_id) == [(2, "second")]
            assert jobs.wait(next_of_key)["started_at"] >= row["finished_at"]
            assert first.log().count("lease was lost") == 1

            second.terminate()
            assert second.wait() == 0
            # The one that was frozen takes new work.
            later = jobs.add("healthy")
            jobs.wait(later)
            assert jobs.effects(later) == [(1, "first")]


# -- statements ----------------------------------------------------------------------------------------------


@pytest.fixture
def statements() -> Any:
    table = sa.inspect(JobRecord).local_table
    assert isinstance(table, sa.Table)
    return statements_for(table)


def _running(jobs: Jobs, observer: Observer, count: int, seconds: float) -> list[Any]:
    """Jobs that run under token 1, with a lease that ends in some seconds."""
    ids = jobs.add_many("work", count)
    observer.execute(
        "UPDATE enlist_job SET status = 'running', attempt = 1, lease_token = 1, locked_by = 'other',"
        " started_at = statement_timestamp(), locked_until = statement_timestamp() + %s WHERE id = ANY(%s)",
        dt.timedelta(seconds=seconds),
        ids,
    )
    return ids


def _database(url: URL) -> Database:
    return Database(create_engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT"), JobRecord)


def test_a_reaper_takes_back_only_what_has_expired_at_that_moment(
    engine: Engine, database_url: URL, jobs: Jobs, observer: Observer, statements: Any
) -> None:
    """Finishing, renewed, claimed again: each is locked or changed when the reaper comes, and it lets them be."""
    finishing, renewed, again, stuck = _running(jobs, observer, 4, -1)
    database = _database(database_url)
    with engine.connect() as handler, engine.connect() as beating:
        handler.execute(statements.finish(0), {"job_id": finishing, "token": 1})
        beating.execute(statements.renew, {"ids": [renewed], "tokens": [1], "lease": dt.timedelta(seconds=60)})
        observer.execute(
            "UPDATE enlist_job SET lease_token = 3, attempt = 2, locked_until = statement_timestamp() + interval '60 s'"
            " WHERE id = %s",
            again,
        )
        start = threading.Barrier(2)
        reaped: list[Any] = []

        def run() -> None:
            start.wait(5)
            reaped.extend(row.id for row in reap(database, expired(database)))

        reapers = [threading.Thread(target=run) for _ in range(2)]
        for thread in reapers:
            thread.start()
        for thread in reapers:
            thread.join()
        handler.commit()
        beating.commit()
    assert reaped == [stuck]
    assert reap(database, expired(database)) == []
    row = jobs.row(stuck)
    assert (row["status"], row["attempt"], row["lost"], row["lease_token"]) == ("queued", 1, 1, 2)
    assert [entry["error"].startswith("worker lost: other") for entry in row["errors"]] == [True]
    assert jobs.row(finishing)["status"] == "done"
    assert (jobs.row(finishing)["errors"], jobs.row(finishing)["lease_token"]) == ([], 1)
    assert (jobs.row(renewed)["status"], jobs.row(renewed)["lease_token"]) == ("running", 1)
    assert (jobs.row(again)["status"], jobs.row(again)["lease_token"]) == ("running", 3)


def test_a_job_whose_row_was_locked_longer_than_its_lease_is_left_to_its_worker_for_a_moment(
    engine: Engine, database_url: URL, jobs: Jobs, observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could not be renewed meanwhile; its transaction is rolled back, to be run again in the same attempt."""
    renewed, dropped = _running(jobs, observer, 2, -1)
    database = _database(database_url)
    taken: list[Any] = []
    reaper = Reaper(database, 60, lambda rows: taken.extend(row.id for row in rows))

    with engine.connect() as handler:
        handler.execute(sa.text("SELECT FROM enlist_job FOR NO KEY UPDATE"))

        def between_the_looks(_seconds: float) -> bool:
            """Have the one renewed when both have been rolled back; nobody does so for the other."""
            handler.rollback()
            if rolled_back:
                lease = dt.timedelta(seconds=60)
                database.execute(database.statements.renew, {"ids": [renewed], "tokens": [1], "lease": lease})
            return True

        monkeypatch.setattr(reaper.loop, "pause", between_the_looks)
        rolled_back = False
        reaper.step()  # a look that took locked rows for expired would find them free at the second
        assert taken == []
        handler.rollback()
        rolled_back = True
        reaper.step()
    assert taken == [dropped]
    assert jobs.status(renewed) == "running"


def test_a_drain_takes_back_what_a_dead_worker_had(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    (job_id,) = _running(jobs, observer, 1, -1)
    handlers = HandlerRegistry()

    @handlers.handler("work")
    def work(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id, attempt=job.attempt))

    Worker(engine, handlers).drain(timeout=10)
    assert (jobs.status(job_id), jobs.effects_by_job()) == ("done", {job_id: 1})


def test_an_old_token_changes_nothing(database_url: URL, jobs: Jobs, observer: Observer, statements: Any) -> None:
    (job_id,) = _running(jobs, observer, 1, 60)
    observer.execute("UPDATE enlist_job SET lease_token = 2")
    before = jobs.row(job_id)
    database = _database(database_url)
    held: dict[str, Any] = {"ids": [job_id], "tokens": [1]}
    one: dict[str, Any] = {"job_id": job_id, "token": 1}
    settle = {"statuses": ["dead"], "delays": [None], "returned": [0], "errors": ["x"], "entries": ["{}"]}
    (row,) = database.execute(statements.renew, {**held, "lease": dt.timedelta(seconds=600)})
    assert row.lease_token == 2  # it tells whose the job is now
    assert database.execute(statements.complete, held) == []
    assert database.execute(statements.settle, {**held, **settle}) == []
    assert database.execute(statements.start, one) == []
    assert database.execute(statements.lock_row(1), {**one, "idle_limit": "1s"}) == []
    with database.transaction() as connection:
        assert connection.execute(statements.finish(0), one).rowcount == 0
    assert jobs.row(job_id) == before


def test_a_job_claimed_but_not_started_gets_its_attempt_back(database_url: URL, jobs: Jobs, observer: Observer) -> None:
    (job_id,) = _running(jobs, observer, 1, -1)
    observer.execute("UPDATE enlist_job SET started_at = NULL")
    reap(_database(database_url), [job_id])
    row = jobs.row(job_id)
    assert (row["status"], row["attempt"], row["lost"], row["last_error"], row["errors"]) == ("queued", 0, 0, None, [])


def test_the_last_attempt_of_a_lost_worker_is_the_end(database_url: URL, jobs: Jobs, observer: Observer) -> None:
    (job_id,) = _running(jobs, observer, 1, -1)
    observer.execute("UPDATE enlist_job SET max_attempts = 1, unique_key = 'k', unique_held = true")
    reap(_database(database_url), [job_id])
    row = jobs.row(job_id)
    assert (row["status"], row["attempt"], row["lost"], row["unique_held"]) == ("dead", 1, 1, False)
    assert row["last_error"].startswith("worker lost: other let the lease run out at")


# -- leases that are kept ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_blocked_event_loop_loses_no_lease(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    handlers = HandlerRegistry()
    runs: Counter[int] = Counter()
    go = threading.Event()

    @handlers.handler("blocking")
    async def blocking(session: AsyncSession, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))
        runs[job.attempt] += 1
        go.wait(20)

    job_id = jobs.add("blocking")
    others = [Worker(engine, handlers, lease=0.9, poll_interval=0.05) for _ in range(2)]
    with running(*others):
        try:
            observer.wait_for("SELECT count(*) = 1 FROM enlist_job WHERE status = 'running'")
            until = jobs.row(job_id)["locked_until"]
            # Renewed until another lease would have ended.
            observer.wait_for("SELECT locked_until > %s FROM enlist_job", until + dt.timedelta(seconds=1))
        finally:
            go.set()
        row = jobs.wait(job_id)
    assert (row["status"], row["attempt"], row["lost"]) == ("done", 1, 0)
    assert runs == {1: 1}


@pytest.mark.parametrize("kind", ["plain", pytest.param("async", marks=pytest.mark.slow)])
@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_a_handler_longer_than_its_lease_completes_at_any_isolation_level(
    isolation: str, kind: str, database_url: URL, jobs: Jobs
) -> None:
    """It has used its session before the heartbeats come: above READ COMMITTED these must leave the row alone."""
    engine = create_engine(database_url, isolation_level=isolation)
    handlers = HandlerRegistry()

    @handlers.handler("plain", wait=tenacity.wait_fixed(600))
    def plain(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id, worker=str(session.scalar(sa.text("SHOW transaction_isolation")))))
        session.flush()
        session.execute(sa.text("SELECT pg_sleep(1.5)"))

    @handlers.handler("async", wait=tenacity.wait_fixed(600))
    async def asynchronous(session: AsyncSession, job: Job[Any]) -> None:
        level = await session.scalar(sa.text("SHOW transaction_isolation"))
        session.add(Effect(job_id=job.id, worker=str(level)))
        await session.flush()
        await session.execute(sa.text("SELECT pg_sleep(1.5)"))

    job_id = jobs.add(kind)
    workers = [Worker(engine, handlers, lease=0.9, poll_interval=0.05) for _ in range(2)]
    with running(*workers):
        row = jobs.wait(job_id)
    engine.dispose()
    assert (row["status"], row["attempt"], row["lost"], row["last_error"]) == ("done", 1, 0, None)
    assert jobs.effects(job_id) == [(1, isolation.lower())]


def test_hold_lock_keeps_the_row_locked_from_the_first_use(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    handlers = HandlerRegistry()
    inside, go = threading.Event(), threading.Event()

    @handlers.handler("plain", hold_lock=True)
    def plain(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))
        session.flush()
        inside.set()
        go.wait(10)

    job_id = jobs.add("plain")
    with running(Worker(engine, handlers, lease=5, poll_interval=0.05)):
        try:
            assert inside.wait(5)
            assert observer.rows("SELECT id FROM enlist_job FOR NO KEY UPDATE SKIP LOCKED") == []
        finally:
            go.set()
        assert jobs.wait(job_id)["status"] == "done"


# -- conflicts are run again in the same attempt -------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_what_is_given_up_between_two_runs_is_not_run_again(
    kind: str, engine: Engine, jobs: Jobs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    handlers = HandlerRegistry()
    runs: list[Job[Any]] = []

    def body(session: Session, job: Job[Any]) -> None:
        runs.append(job)
        session.execute(sa.text("DO $$ BEGIN RAISE serialization_failure; END $$"))

    @handlers.handler("plain")
    def plain(session: Session, job: Job[Any]) -> None:
        body(session, job)

    @handlers.handler("async")
    async def asynchronous(session: AsyncSession, job: Job[Any]) -> None:
        await session.run_sync(body, job)

    job_id = jobs.add(kind)

    def cancelled_meanwhile(*_: float) -> float:
        """The wait before the second run: as long as the worker takes to hear that the job is cancelled."""
        with Session(engine) as session, session.begin():
            assert JobRepository().cancel(session, job_id)
        wait_until(lambda: runs[0].cancel_requested)
        return 0.0

    monkeypatch.setattr("enlist._endings.random", SimpleNamespace(uniform=cancelled_meanwhile))
    with caplog.at_level("INFO", logger="enlist.worker"), running(Worker(engine, handlers, poll_interval=0.05)):
        wait_until(lambda: bool(runs) and runs[0].cancel_requested)
        # The worker has stopped, and with it whatever it still would have done.
    assert "is run again in the same attempt" in caplog.text
    assert len(runs) == 1
    assert jobs.status(job_id) == "cancelled"
    assert "unexpected" not in caplog.text


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_serialization_failure_runs_the_handler_again(
    kind: str, database_url: URL, jobs: Jobs, observer: Observer
) -> None:
    engine = create_engine(database_url, isolation_level="SERIALIZABLE")
    observer.execute("INSERT INTO shop_counter (name, value) VALUES ('c', 0)")
    handlers = HandlerRegistry()
    together = threading.Barrier(2)
    runs: list[int] = []

    def body(session: Session, job: Job[Any]) -> None:
        counter = session.get_one(shop.Counter, "c")
        runs.append(job.attempt)
        if len(runs) <= 2:
            together.wait(10)  # both have read before either writes
        counter.value += 1
        session.flush()

    @handlers.handler("plain", wait=tenacity.wait_fixed(600))
    def plain(session: Session, job: Job[Any]) -> None:
        body(session, job)

    @handlers.handler("async", wait=tenacity.wait_fixed(600))
    async def asynchronous(session: AsyncSession, job: Job[Any]) -> None:
        await session.run_sync(body, job)

    # Two workers: async handlers would block each other's loop at the barrier.
    ids = jobs.add_many(kind, 2)
    workers = [Worker(engine, handlers, queues={"default": 1}, poll_interval=0.05) for _ in range(2)]
    with running(*workers):
        rows = [jobs.wait(job_id) for job_id in ids]
    engine.dispose()
    assert [(row["status"], row["attempt"], row["last_error"]) for row in rows] == [("done", 1, None)] * 2
    assert observer.scalar("SELECT value FROM shop_counter") == 2
    assert len(runs) == 3
    assert set(runs) == {1}


def test_a_deadlock_runs_the_handler_again(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    observer.execute("INSERT INTO shop_counter (name, value) VALUES ('a', 0), ('b', 0)")
    handlers = HandlerRegistry()
    together = threading.Barrier(2)
    runs: list[int] = []

    @handlers.handler("plain", wait=tenacity.wait_fixed(600))
    def plain(session: Session, job: Job[Any]) -> None:
        session.execute(sa.text("SET LOCAL deadlock_timeout = '20ms'"))
        for number, name in enumerate(job.payload["names"]):
            bump = sa.update(shop.Counter).where(shop.Counter.name == name)
            session.execute(bump.values(value=shop.Counter.value + 1))
            if number == 0:
                runs.append(job.attempt)
                if len(runs) <= 2:
                    together.wait(10)

    ids = jobs.add_many("plain", [{"names": ["a", "b"]}, {"names": ["b", "a"]}])
    with running(Worker(engine, handlers, poll_interval=0.05)):
        rows = [jobs.wait(job_id) for job_id in ids]
    assert [(row["status"], row["attempt"]) for row in rows] == [("done", 1)] * 2
    assert observer.rows("SELECT value FROM shop_counter") == [(2,), (2,)]
    assert runs == [1, 1, 1]


@pytest.mark.slow
def test_a_conflict_that_stays_becomes_an_ordinary_failure(engine: Engine, jobs: Jobs) -> None:
    handlers = HandlerRegistry()
    runs: list[int] = []

    @handlers.handler("plain", wait=tenacity.wait_fixed(600))
    def plain(session: Session, job: Job[Any]) -> None:
        runs.append(job.attempt)
        session.execute(sa.text("DO $$ BEGIN RAISE SQLSTATE '40001'; END $$"))

    job_id = jobs.add("plain")
    with running(Worker(engine, handlers, poll_interval=0.05)):
        row = jobs.wait_failed(job_id)
    assert (row["status"], row["attempt"]) == ("queued", 1)
    assert runs == [1] * 4


def test_a_handler_is_not_run_again_when_its_job_is_not_ours_any_more(
    engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    handlers = HandlerRegistry()
    runs: list[int] = []

    @handlers.handler("work", wait=tenacity.wait_fixed(600))
    def work(session: Session, job: Job[Any]) -> None:
        runs.append(job.attempt)
        pid = session.scalar(sa.text("SELECT pg_backend_pid()"))
        observer.connection.execute("UPDATE enlist_job SET lease_token = lease_token + 1")
        observer.connection.execute("SELECT pg_terminate_backend(%s)", (pid,))
        session.execute(sa.text("SELECT 1"))

    job_id = jobs.add("work")
    with running(Worker(engine, handlers, poll_interval=0.05, lease=60)):
        wait_until(lambda: runs)
    assert runs == [1]
    assert jobs.row(job_id)["last_error"] is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["REPEATABLE READ", "REPEATABLE_READ"])
def test_a_level_that_the_handler_chooses_counts_as_well(name: str, engine: Engine, jobs: Jobs) -> None:
    handlers = HandlerRegistry()

    @handlers.handler("chooses", wait=tenacity.wait_fixed(600))
    def chooses(session: Session, job: Job[Any]) -> None:
        session.connection(execution_options={"isolation_level": name})
        session.add(Effect(job_id=job.id))
        session.flush()
        session.execute(sa.text("SELECT pg_sleep(0.9)"))  # three heartbeats

    job_id = jobs.add("chooses")
    with running(Worker(engine, handlers, lease=0.6, poll_interval=0.05)):
        assert jobs.wait(job_id)["attempt"] == 1
    assert len(jobs.effects(job_id)) == 1


@pytest.mark.slow
def test_a_commit_whose_fate_cannot_be_read_holds_its_slot_no_longer_than_the_lease(
    engine: Engine, jobs: Jobs, database_url: URL
) -> None:
    """Its row stays locked, as by a COMMIT that hangs; the heartbeat, which passes it by, must not prolong that."""

    class Failing(Session):
        """Raises after its commit: whether that took effect must be looked up."""

    with Observer(database_url) as locker:

        def lock_and_raise(session: Session) -> None:
            if not session.in_nested_transaction() and session.info.get("fail"):
                locker.connection.execute("BEGIN")
                locker.connection.execute("SELECT FROM enlist_job WHERE kind = 'hangs' FOR NO KEY UPDATE")
                raise RuntimeError("after the commit")

        sa.event.listen(Failing, "after_commit", lock_and_raise)
        handlers = HandlerRegistry()

        @handlers.handler("hangs", wait=tenacity.wait_fixed(600))
        def hangs(session: Session, job: Job[Any]) -> None:
            session.info["fail"] = True
            session.add(Effect(job_id=job.id))

        @handlers.handler("healthy")
        def healthy(session: Session, job: Job[Any]) -> None:
            session.add(Effect(job_id=job.id))

        hanging = jobs.add("hangs", priority=1)
        other = jobs.add("healthy")
        with running(
            Worker(sessionmaker(engine, class_=Failing), handlers, queues={"default": 1}, lease=1, poll_interval=0.05)
        ):
            assert jobs.wait(other, timeout=5)["status"] == "done"
            locker.connection.execute("ROLLBACK")
    assert jobs.row(hanging)["status"] == "done"
    assert len(jobs.effects(hanging)) == 1
