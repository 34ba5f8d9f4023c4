"""The claim: in order, never more than asked under any plan, each job once, and concurrency keys exactly."""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import sqlalchemy as sa
import tenacity
from sqlalchemy import URL, Engine, create_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from enlist import HandlerRegistry, Job, JobRecord, Worker
from enlist._claimer import Claimer
from enlist._statements import Statements, statements_for
from enlist.demo.server import EmbeddedServer
from enlist.migrations import migrate
from tests.shop import Base, Effect
from tests.support import Observer
from tests.support.claimers import SWITCHES
from tests.support.claims import claim
from tests.support.jobs import Jobs, running


@pytest.fixture
def jobs(observer: Observer) -> Jobs:
    return Jobs(observer)


@pytest.fixture
def statements() -> Statements:
    table = sa.inspect(JobRecord).local_table
    assert isinstance(table, sa.Table)
    return statements_for(table)


def recording(ran: list[uuid.UUID], *kinds: str) -> HandlerRegistry:
    """Handlers that note the order in which jobs run."""
    handlers = HandlerRegistry()
    for kind in kinds or ("work",):

        @handlers.handler(kind)
        def work(session: Session, job: Job[Any]) -> None:
            ran.append(job.id)
            session.add(Effect(job_id=job.id))

    return handlers


# -- the order -----------------------------------------------------------------------------------------------


def test_jobs_start_by_priority_then_due_time_then_id(engine: Engine, jobs: Jobs) -> None:
    inserted: list[tuple[int, float, uuid.UUID]] = []
    for priority in (0, 5, -3, 32767, -32768):
        for due_in in (-30, -10, -20):
            # Two of one transaction have the same due time: their ids decide.
            inserted += [
                (-priority, due_in, job_id) for job_id in jobs.add_many("work", 2, priority=priority, due_in=due_in)
            ]
    ran: list[uuid.UUID] = []
    with running(Worker(engine, recording(ran), queues={"default": 1}, poll_interval=0.05)):
        jobs.wait_all()
    assert ran == [job_id for *_, job_id in sorted(inserted)]


def test_a_job_in_the_future_waits_until_it_is_due(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    future = jobs.add("work", due_in=0.4, priority=100)
    far = jobs.add("work", due_in=3600, priority=100)
    now = jobs.add("work")
    ran: list[uuid.UUID] = []
    with running(Worker(engine, recording(ran), poll_interval=0.05)):
        jobs.wait(future)
    assert ran == [now, future]
    assert jobs.status(far) == "queued"
    assert observer.scalar("SELECT started_at >= run_at FROM enlist_job WHERE id = %s", future)


def test_only_known_kinds_are_claimed(engine: Engine, jobs: Jobs) -> None:
    unknown = jobs.add_many("unknown", 20, priority=100)
    known = jobs.add_many("work", 5)
    ran: list[uuid.UUID] = []
    with running(Worker(engine, recording(ran), queues={"default": 2}, poll_interval=0.05)):
        for job_id in known:
            jobs.wait(job_id)
    assert sorted(ran) == sorted(known)
    for job_id in unknown:
        row = jobs.row(job_id)
        assert (row["status"], row["attempt"], row["lease_token"]) == ("queued", 0, 0)


def test_each_queue_has_its_own_slots(engine: Engine, jobs: Jobs) -> None:
    """A queue full of slow jobs takes nothing from another; a queue that is not the worker's is left alone."""
    handlers = HandlerRegistry()
    go = threading.Event()
    running_now: Counter[str] = Counter()
    most: Counter[str] = Counter()
    lock = threading.Lock()

    @handlers.handler("slow")
    def slow(session: Session, job: Job[Any]) -> None:
        with lock:
            running_now[job.queue] += 1
            most[job.queue] = max(most[job.queue], running_now[job.queue])
        go.wait(20)
        with lock:
            running_now[job.queue] -= 1

    @handlers.handler("quick")
    def quick(session: Session, job: Job[Any]) -> None: ...

    jobs.add_many("slow", 10, queue="slow", priority=50)
    jobs.add_many("slow", 10, queue="slower", priority=50)
    quick_ids = jobs.add_many("quick", 30, queue="quick")
    other = jobs.add("quick", queue="another")
    try:
        with running(Worker(engine, handlers, queues={"slow": 2, "slower": 3, "quick": 1}, poll_interval=0.05)):
            for job_id in quick_ids:
                jobs.wait(job_id)
            jobs._observer.wait_for("SELECT count(*) = 5 FROM enlist_job WHERE kind = 'slow' AND status = 'running'")
            assert running_now == {"slow": 2, "slower": 3}
            go.set()
            jobs._observer.wait_for("SELECT count(*) = 0 FROM enlist_job WHERE queue <> 'another' AND status <> 'done'")
    finally:
        go.set()
    assert most == {"slow": 2, "slower": 3}
    assert jobs.status(other) == "queued"


# -- never more than asked -----------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 3])
@pytest.mark.parametrize("analyzed", ["never", "empty", "full"])
@pytest.mark.parametrize("prepared", [False, True], ids=["custom plan", "generic plan"])
def test_a_claim_takes_what_it_was_asked_under_any_plan(
    *,
    limit: int,
    analyzed: str,
    prepared: bool,
    database_url: URL,
    jobs: Jobs,
    statements: Statements,
    observer: Observer,
) -> None:
    if analyzed == "empty":
        observer.execute("ANALYZE enlist_job")
    ids = jobs.add_many("work", 40)
    if analyzed == "full":
        observer.execute("ANALYZE enlist_job")
    engine = create_engine(database_url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql(f"SET plan_cache_mode = force_{'generic' if prepared else 'custom'}_plan")
        connection.connection.driver_connection.prepare_threshold = 0 if prepared else None  # type: ignore[union-attr]
        taken: list[uuid.UUID] = []
        # Each switch by itself, all at once, and those of the field report.
        for off in [
            [],
            SWITCHES,
            ["hashjoin", "mergejoin", "hashagg", "sort", "material"],
            *([name] for name in SWITCHES),
        ]:
            for name in SWITCHES:
                connection.exec_driver_sql(f"SET enable_{name} = {'off' if name in off else 'on'}")
            before = observer.scalar("SELECT count(*) FROM enlist_job WHERE status = 'running'")
            rows = claim(connection, statements, {"default": limit})
            after = observer.scalar("SELECT count(*) FROM enlist_job WHERE status = 'running'")
            wanted = min(limit, len(ids) - len(taken))
            assert len(rows) == wanted, off
            assert after - before == wanted, off
            taken += sorted(row.id for row in rows)
        assert taken == ids[: len(taken)]


def test_eight_claimers_take_each_of_2000_jobs_once(
    database_url: URL, jobs: Jobs, statements: Statements, observer: Observer
) -> None:
    ids = jobs.add_many("work", 1500) + jobs.add_many("work", 500, queue="other", priority=3)
    start = threading.Barrier(9)
    taken: list[uuid.UUID] = []
    too_many: list[int] = []
    errors: list[BaseException] = []
    stop = threading.Event()

    def run(number: int) -> None:
        engine = create_engine(database_url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
        try:
            with engine.connect() as connection:
                start.wait(10)
                mine: list[uuid.UUID] = []
                asked = {"default": number % 3 + 1, "other": 2}
                while rows := claim(connection, statements, asked):
                    by_queue = Counter(row.queue for row in rows)
                    too_many.extend(count for queue, count in by_queue.items() if count > asked[queue])
                    mine += [row.id for row in rows]
                taken.extend(mine)
        except BaseException as error:
            errors.append(error)

    def analyze() -> None:
        with Observer(database_url) as own:
            start.wait(10)
            while not stop.is_set():
                own.execute("ANALYZE enlist_job")

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    analyzer = threading.Thread(target=analyze)
    for thread in [*threads, analyzer]:
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    analyzer.join()
    assert errors == []
    assert too_many == []
    # A claimer stops at the first empty answer, which SKIP LOCKED gives while others hold the rest: a few may be left.
    with create_engine(database_url, poolclass=NullPool, isolation_level="AUTOCOMMIT").connect() as connection:
        while rows := claim(connection, statements, {"default": 100, "other": 100}):
            taken += [row.id for row in rows]
    assert len(taken) == 2000
    assert set(taken) == set(ids)
    assert observer.row("SELECT count(*), min(attempt), max(attempt) FROM enlist_job WHERE status = 'running'") == (
        2000,
        1,
        1,
    )


def test_a_job_that_an_open_insert_refers_to_can_be_claimed(
    engine: Engine, jobs: Jobs, statements: Statements, observer: Observer
) -> None:
    """A foreign key's check holds KEY SHARE on the job, which would hide it from FOR UPDATE SKIP LOCKED."""
    observer.execute("CREATE TABLE refers (job_id uuid REFERENCES enlist_job)")
    job_id = jobs.add("work")
    with engine.connect() as referring, engine.connect() as claiming:
        referring.execute(sa.text("INSERT INTO refers VALUES (:id)"), {"id": job_id})
        assert [row.id for row in claim(claiming, statements, {"default": 1})] == [job_id]
        claiming.commit()
        referring.commit()


def test_the_lease_is_counted_from_the_statement_not_from_its_transaction(
    engine: Engine, jobs: Jobs, statements: Statements, observer: Observer
) -> None:
    with engine.connect() as connection:
        connection.execute(sa.text("SELECT pg_sleep(0.3)"))
        jobs.add("work")
        claim(connection, statements, {"default": 1}, lease=0.25)
        connection.commit()
    assert observer.scalar("SELECT locked_until > started_at + interval '0.2 s' FROM enlist_job")


def test_at_most_one_careful_job_is_claimed(engine: Engine, jobs: Jobs, statements: Statements) -> None:
    """A job that was running when a worker died, or is on its last attempt, runs by itself."""
    jobs.add_many("work", 3, lost=1, attempt=1, priority=2)
    jobs.add_many("work", 3, max_attempts=1, priority=1)
    plain = jobs.add_many("work", 4)
    with engine.begin() as connection:
        rows = claim(connection, statements, {"default": 10})
        assert len([row for row in rows if row.lost > 0 or row.attempt >= row.max_attempts]) == 1
        assert {row.id for row in rows} >= set(plain)
        assert claim(connection, statements, {"default": 10}, careful=False) == []


# -- concurrency keys ----------------------------------------------------------------------------------------


class Inside:
    """How many jobs of each key are inside of their handlers, and the most that ever were."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.runs: Counter[uuid.UUID] = Counter()

    def handlers(self, seconds: float = 0.003) -> HandlerRegistry:
        handlers = HandlerRegistry()

        @handlers.handler("keyed", wait=tenacity.wait_fixed(0))
        def keyed(session: Session, job: Job[Any]) -> None:
            key = job.payload.get("key", "")
            with self._lock:
                self.now[key] += 1
                self.most[key] = max(self.most[key], self.now[key])
                self.runs[job.id] += 1
            session.add(Effect(job_id=job.id))
            session.execute(sa.text("SELECT pg_sleep(:seconds)"), {"seconds": seconds})
            with self._lock:
                self.now[key] -= 1

        return handlers


@pytest.fixture
def log(private_server: EmbeddedServer) -> tuple[URL, EmbeddedServer]:
    """A database whose server's log is this test's alone."""
    url = private_server.url()
    engine = create_engine(url, poolclass=NullPool)
    with engine.begin() as connection:
        migrate(connection)
        Base.metadata.create_all(connection)
    return url, private_server


@pytest.mark.slow
def test_keys_limits_are_exact_with_several_workers(
    log: tuple[URL, EmbeddedServer], caplog: pytest.LogCaptureFixture
) -> None:
    """Four workers with connections of their own; the server counts too, and logs no unique violation."""
    url, server = log
    inside = Inside()
    handlers = inside.handlers()
    engines = [create_engine(url, pool_size=10) for _ in range(4)]
    workers = [Worker(engine, handlers, queues={"default": 4}, poll_interval=0.5) for engine in engines]
    limits = {"one": 1, "three": 3}
    samples: Counter[str] = Counter()
    with Observer(url) as observer:
        jobs = Jobs(observer)
        ids = [
            job_id
            for key, limit in limits.items()
            for job_id in jobs.add_many("keyed", [{"key": key}] * 60, concurrency_key=key, concurrency_limit=limit)
        ]
        with running(*workers):
            while jobs.counts() != {"done": 120}:
                for key, count in observer.rows(
                    "SELECT concurrency_key, count(*) FROM enlist_job WHERE status = 'running' GROUP BY 1"
                ):
                    samples[key] = max(samples[key], count)
    for engine in engines:
        engine.dispose()
    assert inside.most["one"] == 1
    assert inside.most["three"] <= 3
    assert samples["one"] == 1
    assert samples["three"] <= 3
    assert inside.runs == Counter(ids)
    assert "23505" not in caplog.text
    assert "duplicate key" not in caplog.text
    assert "duplicate key" not in server.log_path.read_text()
    assert "deadlock" not in server.log_path.read_text()


@pytest.mark.slow
def test_a_keys_next_job_does_not_wait_for_a_poll(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    inside = Inside()
    jobs.add_many("keyed", 20, concurrency_key="k", concurrency_limit=1)
    with running(Worker(engine, inside.handlers(), queues={"default": 3}, poll_interval=30)):
        jobs.wait_all(timeout=4)
    gap = observer.scalar(
        "SELECT max(gap) FROM (SELECT extract(epoch FROM started_at - lag(finished_at) OVER (ORDER BY started_at))"
        " AS gap FROM enlist_job) AS gaps"
    )
    assert gap < 1


def test_a_limit_above_one_is_used_up(engine: Engine, jobs: Jobs) -> None:
    handlers = HandlerRegistry()
    together = threading.Barrier(3)

    @handlers.handler("keyed", wait=tenacity.wait_fixed(0))
    def keyed(session: Session, job: Job[Any]) -> None:
        together.wait(10)  # only passes if three are inside

    jobs.add_many("keyed", 9, concurrency_key="k", concurrency_limit=3)
    with running(Worker(engine, handlers, queues={"default": 5}, poll_interval=0.05)):
        jobs.wait_all()


def test_jobs_without_a_key_know_no_limit(engine: Engine, jobs: Jobs) -> None:
    handlers = HandlerRegistry()
    together = threading.Barrier(10)

    @handlers.handler("work")
    def work(session: Session, job: Job[Any]) -> None:
        together.wait(10)

    jobs.add_many("work", 30)
    with running(Worker(engine, handlers, queues={"default": 10}, poll_interval=0.05)):
        jobs.wait_all()


def test_what_is_to_come_does_not_hold_a_key(engine: Engine, jobs: Jobs) -> None:
    """Jobs of next week or waiting for their retry, whatever their priority, leave the key to those that are due."""
    inside = Inside()
    key: dict[str, Any] = {"concurrency_key": "k", "concurrency_limit": 1}
    waiting = [
        jobs.add("keyed", priority=1000, due_in=86400, **key),
        jobs.add("keyed", priority=1000, due_in=3600, attempt=1, last_error="no", **key),
    ]
    ready = jobs.add_many("keyed", 3, **key)
    with running(Worker(engine, inside.handlers(), poll_interval=0.05)):
        for job_id in ready:
            assert jobs.wait(job_id)["status"] == "done"
    assert [jobs.status(job_id) for job_id in waiting] == ["queued", "queued"]


def test_a_blocked_key_does_not_hold_up_the_others(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    handlers = HandlerRegistry()
    go = threading.Event()

    @handlers.handler("keyed")
    def keyed(session: Session, job: Job[Any]) -> None:
        go.wait(20)

    @handlers.handler("work")
    def work(session: Session, job: Job[Any]) -> None: ...

    jobs.add_many("keyed", 300, priority=10, concurrency_key="k", concurrency_limit=1)
    others = jobs.add_many("work", 30)
    try:
        with running(Worker(engine, handlers, queues={"default": 3}, poll_interval=0.05, shutdown_timeout=5)):
            for job_id in others:
                jobs.wait(job_id)
            assert observer.scalar("SELECT count(*) FROM enlist_job WHERE status = 'running'") == 1
            go.set()
    finally:
        go.set()


def test_the_key_is_freed_whatever_the_end(engine: Engine, jobs: Jobs) -> None:
    """By success, failure, snooze, cancel and death alike."""
    from enlist import Cancel, Snooze

    handlers = HandlerRegistry()

    @handlers.handler("keyed", wait=tenacity.wait_fixed(600))
    def keyed(session: Session, job: Job[Any]) -> None:
        error = job.payload.get("error")
        if error == "fail":
            raise ValueError("no")
        if error == "snooze":
            raise Snooze(600)
        if error == "cancel":
            raise Cancel
        if error == "commit":
            session.commit()

    payloads = [{"error": error} for error in ("fail", "snooze", "cancel", "commit", "")]
    key: dict[str, Any] = {"concurrency_key": "k", "concurrency_limit": 1}
    ids = jobs.add_many("keyed", payloads, **key)
    dead = jobs.add("keyed", {"error": "fail"}, max_attempts=1, **key)
    last = jobs.add("keyed", **key)
    with running(Worker(engine, handlers, poll_interval=0.05)):
        assert jobs.wait(last)["status"] == "done"
    assert [jobs.status(job_id) for job_id in ids] == ["queued", "queued", "cancelled", "queued", "done"]
    assert jobs.status(dead) == "dead"
    for job_id in [*ids, dead, last]:
        assert jobs.row(job_id)["concurrency_slot"] is None


@pytest.mark.slow
def test_a_claim_of_a_key_whose_answer_is_lost_is_given_back(
    engine: Engine, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = Claimer._hold
    lost: list[Any] = []

    def losing(self: Claimer, rows: Sequence[Any], asked: float) -> list[Any]:
        if rows and not lost:
            lost.extend(rows)
            raise sa.exc.OperationalError("the answer", {}, Exception("was lost"))
        return hold(self, rows, asked)

    monkeypatch.setattr(Claimer, "_hold", losing)
    job_id = jobs.add("work", concurrency_key="k", concurrency_limit=1)
    ran: list[uuid.UUID] = []
    with running(Worker(engine, recording(ran), poll_interval=0.05, lease=60)):
        jobs.wait(job_id)
    row = jobs.row(job_id)
    assert (row["status"], row["attempt"], row["lost"]) == ("done", 1, 0)
    assert len(lost) == 1
