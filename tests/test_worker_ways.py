"""The same promises in each way to run a handler: lease, row lock, groups, savepoints, at each isolation level."""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from typing import Any, Literal

import pytest
import sqlalchemy as sa
import tenacity
from sqlalchemy import URL, Engine
from sqlalchemy.orm import Session

from enlist import (
    Cancel,
    HandlerError,
    HandlerRegistry,
    InvalidOption,
    Job,
    JobPayload,
    JobRepository,
    Retry,
    Snooze,
    Worker,
)
from enlist._guard import GUARDS
from tests import shop
from tests.shop import Effect
from tests.support import Observer, wait_until
from tests.support.jobs import Jobs, running
from tests.support.ways import LEVELS, WAYS, Way, dispose

EVERY_DAY = {"lease", "lease, asyncpg", "lease, REPEATABLE READ", "hold_lock", "commit_every, asyncpg", "savepoint"}
every_way = pytest.mark.parametrize(
    "way",
    [pytest.param(way, id=name, marks=[pytest.mark.slow] * (name not in EVERY_DAY)) for name, way in WAYS.items()],
)


@pytest.fixture
def jobs(observer: Observer) -> Jobs:
    return Jobs(observer)


def worker(bind: Any, handlers: HandlerRegistry, **options: Any) -> Worker:
    """One slot: so jobs wait for it, and those that may share a transaction do."""
    return Worker(bind, handlers, **{"queues": {"default": 1}, "poll_interval": 0.05, "lease": 10, **options})


FAILURES: dict[str, Any] = {
    "an exception": lambda: ValueError("boom"),
    "the interpreter's exit": lambda: SystemExit(3),
    "the keyboard": KeyboardInterrupt,
    "a generator's exit": GeneratorExit,
    "one of no known kind": lambda: type("Strange", (BaseException,), {})("strange"),
    "a retry": lambda: Retry(0.05),
}


@every_way
def test_effects_are_there_once_with_the_status_of_just_that_attempt(
    way: Way, database_url: URL, jobs: Jobs, observer: Observer
) -> None:
    """Good jobs among bad ones of the same kind, which may have shared a transaction."""
    handlers = HandlerRegistry()

    def body(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id, attempt=job.attempt))
        what = job.payload.get("what")
        if what is None or job.attempt > 1:
            return
        if what == "swallowed":
            session.flush()
            try:
                session.execute(sa.text("SELECT 1 / 0"))
            except sa.exc.DBAPIError:
                return
        if what == "constraint":
            session.add(shop.Order(ref="taken"))
            session.flush()
        make = FAILURES[what]
        raise make()

    way.register(handlers, "mixed", body)
    observer.execute("INSERT INTO shop_order (ref, total) VALUES ('taken', 0)")
    bad = {what: jobs.add("mixed", {"what": what}) for what in [*FAILURES, "swallowed", "constraint"]}
    good = jobs.add_many("mixed", 40)
    cancelled = jobs.add("cancel")
    snoozed = jobs.add("snooze")
    way.register(handlers, "cancel", _leave_and_raise(Cancel("enough")))
    way.register(handlers, "snooze", _leave_and_raise(Snooze(60)))
    bind = way.bind(database_url)
    with running(worker(bind, handlers)):
        for job_id in [*good, *bad.values(), cancelled]:
            jobs.wait(job_id, timeout=20)
        jobs.wait(snoozed, "queued")
    dispose(bind)
    assert {jobs.row(job_id)["attempt"] for job_id in good} == {1}
    assert {what: (jobs.status(job_id), jobs.row(job_id)["attempt"]) for what, job_id in bad.items()} == dict.fromkeys(
        bad, ("done", 2)
    )
    # Each effect is of the attempt that is done, and was written by its transaction.
    assert observer.rows(
        "SELECT status, count(*), bool_and(job.attempt = effect.attempt AND job.xmin = effect.xmin)"
        " FROM enlist_job AS job JOIN shop_effect AS effect ON effect.job_id = job.id GROUP BY status"
    ) == [("done", len(good) + len(bad), True)]
    assert (jobs.status(cancelled), jobs.row(snoozed)["attempt"]) == ("cancelled", 0)


def _leave_and_raise(error: Exception) -> Any:
    def body(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))
        session.flush()
        raise error

    return body


@every_way
def test_a_job_that_is_another_workers_by_now_commits_nothing(
    way: Way, database_url: URL, jobs: Jobs, observer: Observer
) -> None:
    """One of several; where its row is locked nobody else can have it."""
    handlers = HandlerRegistry()
    lost: list[uuid.UUID] = []

    def body(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id, attempt=job.attempt))
        session.flush()
        if job.payload and job.attempt == 1 and job.id not in lost:
            lost.append(job.id)
            with sa.create_engine(database_url, poolclass=sa.NullPool).begin() as other:
                taken = other.execute(
                    sa.text(
                        "UPDATE enlist_job SET lease_token = lease_token + 1, status = 'queued', locked_until = NULL,"
                        " started_at = NULL WHERE id = (SELECT id FROM enlist_job WHERE id = :id"
                        " FOR NO KEY UPDATE SKIP LOCKED) RETURNING id"
                    ),
                    {"id": job.id},
                )
                if taken.first() is None:
                    lost.append(uuid.UUID(int=0))

    way.register(handlers, "lossy", body)
    ids = jobs.add_many("lossy", [{}] * 10 + [{"lose": True}] + [{}] * 10)
    bind = way.bind(database_url)
    with running(worker(bind, handlers)):
        for job_id in ids:
            assert jobs.wait(job_id, timeout=20)["status"] == "done"
    dispose(bind)
    was_locked = uuid.UUID(int=0) in lost
    assert was_locked == ("hold_lock" in way.options or way.isolation != "READ COMMITTED")
    assert jobs.row(ids[10])["attempt"] == (1 if was_locked else 2)
    assert observer.rows("SELECT job_id, attempt FROM shop_effect ORDER BY job_id") == [
        (job_id, jobs.row(job_id)["attempt"]) for job_id in ids
    ]


OUTLIVES: dict[str, Way] = {
    **{f"lease, {level}": Way(isolation=level) for level in LEVELS},
    **{f"hold_lock, {level}": Way({"hold_lock": True}, isolation=level) for level in LEVELS},
    **{f"commit_every, {level}": Way({"commit_every": 50}, isolation=level) for level in LEVELS},
    **{f"savepoint, {level}": Way({"on_commit": "savepoint"}, isolation=level) for level in LEVELS},
    **{f"commit_every, asyncpg, {level}": Way({"commit_every": 9}, "asyncpg", level) for level in LEVELS},
    **{f"savepoint, psycopg async, {level}": Way({"on_commit": "savepoint"}, "psycopg", level) for level in LEVELS},
}


@pytest.mark.slow
@pytest.mark.parametrize("way", OUTLIVES.values(), ids=OUTLIVES.keys())
def test_a_handler_outlives_three_heartbeats(way: Way, database_url: URL, jobs: Jobs, observer: Observer) -> None:
    """It has used its session before the heartbeats come; quick ones of its kind go before and after it."""
    handlers = HandlerRegistry()
    ids = jobs.add_many("long", [{"seconds": 0}] * 5 + [{"seconds": 2.2}] + [{"seconds": 0}] * 5)

    def body(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id, attempt=job.attempt))
        session.flush()
        if way.options.get("on_commit"):
            session.commit()
        session.execute(sa.text("SELECT pg_sleep(:seconds)"), job.payload)

    way.register(handlers, "long", body, wait=tenacity.wait_fixed(600))
    bind = way.bind(database_url)
    other = way.bind(database_url)
    with running(worker(bind, handlers, lease=1.5), worker(other, handlers, lease=1.5)):
        for job_id in ids:
            assert jobs.wait(job_id, timeout=20)["status"] == "done"
    dispose(bind)
    dispose(other)
    assert [(row["attempt"], row["lost"], row["last_error"]) for row in map(jobs.row, ids)] == [(1, 0, None)] * 11
    assert set(jobs.effects_by_job().values()) == {1}
    assert len(jobs.effects_by_job()) == 11


@every_way
def test_what_a_handler_enqueues_is_there_with_its_commit_or_not_at_all(
    way: Way, database_url: URL, jobs: Jobs, observer: Observer
) -> None:
    """Also the successor that has the running job's own unique key."""
    repo = JobRepository()
    handlers = HandlerRegistry()
    failed: set[uuid.UUID] = set()

    def body(session: Session, job: Job[Any]) -> None:
        repo.enqueue(session, "child", {"of": str(job.id)})
        repo.enqueue(session, "parent", {}, unique_key=f"own:{job.payload['n']}", unique_until="finished", delay=600)
        session.flush()
        if job.payload["n"] % 5 == 2 and job.id not in failed:
            failed.add(job.id)
            raise ValueError("once")

    way.register(handlers, "parent", body)
    ids = [
        jobs.add("parent", {"n": n}, unique_key=f"own:{n}", unique_held=True, unique_until="finished")
        for n in range(12)
    ]
    bind = way.bind(database_url)
    with running(worker(bind, handlers)):
        for job_id in ids:
            assert jobs.wait(job_id, timeout=20)["status"] == "done", jobs.row(job_id)["last_error"]
    dispose(bind)
    parents = observer.rows("SELECT payload ->> 'of' FROM enlist_job WHERE kind = 'child' ORDER BY 1")
    assert [uuid.UUID(of) for (of,) in parents] == sorted(ids)
    assert observer.rows(
        "SELECT unique_key, count(*) FILTER (WHERE status = 'done'), count(*) FILTER (WHERE status = 'queued')"
        " FROM enlist_job WHERE kind = 'parent' GROUP BY unique_key ORDER BY unique_key"
    ) == sorted((f"own:{n}", 1, 1) for n in range(12))


# -- groups ---------------------------------------------------------------------------------------------------

GROUPS = {name: way for name, way in WAYS.items() if way.groups}
every_group = pytest.mark.parametrize("way", GROUPS.values(), ids=GROUPS.keys())


@pytest.mark.slow
@every_group
def test_jobs_share_transactions(way: Way, database_url: URL, jobs: Jobs, observer: Observer) -> None:
    handlers = HandlerRegistry()
    sessions: list[Session] = []

    def body(session: Session, job: Job[Any]) -> None:
        assert not session.identity_map.values()  # of the jobs before
        sessions.append(session)
        session.add(Effect(job_id=job.id))

    way.register(handlers, "small", body)
    jobs.add_many("small", 300)
    bind = way.bind(database_url)
    with running(worker(bind, handlers)):
        jobs.wait_all()
    dispose(bind)
    sizes = [size for (size,) in observer.rows("SELECT count(*) FROM shop_effect GROUP BY xmin")]
    assert max(sizes) > 5
    assert max(sizes) <= 50
    assert observer.scalar(
        "SELECT bool_and(job.xmin = effect.xmin) FROM enlist_job AS job JOIN shop_effect AS effect ON job_id = job.id"
    )
    assert Counter(jobs.effects_by_job().values()) == {1: 300}


IN_A_GROUP = sa.text("SELECT count(*) > 2 FROM shop_effect WHERE xmin = pg_current_xact_id()::xid")
"""Whether the transaction has effects of several jobs."""


@pytest.mark.slow
@every_group
def test_after_a_failure_they_run_by_themselves_for_a_while(
    way: Way, database_url: URL, jobs: Jobs, observer: Observer
) -> None:
    handlers = HandlerRegistry()
    runs: Counter[uuid.UUID] = Counter()
    bad: list[uuid.UUID] = []

    def body(session: Session, job: Job[Any]) -> None:
        runs[job.id] += 1
        session.add(Effect(job_id=job.id, attempt=job.attempt))
        session.flush()
        if job.id in bad or (not bad and session.scalar(IN_A_GROUP)):
            bad.append(job.id)
            raise ValueError("bad")

    way.register(handlers, "small", body, wait=tenacity.wait_fixed(600))
    ids = jobs.add_many("small", 300)
    bind = way.bind(database_url)
    with running(worker(bind, handlers)):
        observer.wait_for("SELECT count(*) = 299 FROM enlist_job WHERE status = 'done'", timeout=30)
    dispose(bind)
    assert len(set(bad)) == 1
    row = jobs.row(bad[0])
    assert (row["status"], row["attempt"], len(row["errors"])) == ("queued", 1, 1)
    assert jobs.effects_by_job() == dict.fromkeys([job_id for job_id in ids if job_id != bad[0]], 1)
    assert max(runs.values()) == 2  # in its group, and by itself
    following = ids[ids.index(bad[0]) + 1 :][:50]
    assert observer.rows(
        "SELECT DISTINCT count(*) FROM shop_effect GROUP BY xmin HAVING min(job_id::text) = ANY(%s)",
        [str(job_id) for job_id in following],
    ) == [(1,)]


@pytest.mark.slow
def test_a_job_that_is_lost_and_claimed_again_into_the_same_group_has_one_effect(
    engine: Engine, jobs: Jobs, observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("enlist._groups.GROUP_SECONDS", 5.0)
    handlers = HandlerRegistry()
    lost: list[uuid.UUID] = []

    @handlers.handler("small", commit_every=1000)
    def small(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id, attempt=job.attempt))
        session.flush()
        if not lost and session.scalar(IN_A_GROUP):
            lost.append(job.id)
            observer.execute(
                "UPDATE enlist_job SET lease_token = lease_token + 1, status = 'queued', locked_until = NULL,"
                " priority = 9 WHERE id = %s",
                job.id,
            )
            observer.wait_for("SELECT status = 'running' FROM enlist_job WHERE id = %s", job.id)

    ids = jobs.add_many("small", 3000)
    with running(worker(engine, handlers)):
        jobs.wait_all(timeout=30)
    assert jobs.effects_by_job() == dict.fromkeys(ids, 1)
    assert jobs.effects(lost[0]) == [(2, "")]


@pytest.mark.slow
def test_a_plain_handler_whose_time_is_over_takes_nobody_along(
    database_url: URL, jobs: Jobs, observer: Observer
) -> None:
    """Those that have run before it in its transaction run elsewhere at once, and its thread may be stuck for ever."""
    handlers = HandlerRegistry()
    inside, go = threading.Event(), threading.Event()

    @handlers.handler("small", commit_every=50, timeout=0.8, wait=tenacity.wait_fixed(600))
    def small(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id, attempt=job.attempt))
        if job.payload.get("stuck"):
            session.flush()
            inside.set()
            go.wait(20)

    payloads: list[dict[str, Any]] = [{}] * 60
    payloads[30] = {"stuck": True}
    ids = jobs.add_many("small", payloads)
    engine = sa.create_engine(database_url)
    first, second = worker(engine, handlers), worker(engine, handlers)
    try:
        with running(first):
            assert inside.wait(10)
            with running(second):
                for job_id in ids[:30] + ids[31:]:
                    assert jobs.wait(job_id, timeout=10)["attempt"] == 1
                assert jobs.wait_failed(ids[30])["attempt"] == 1
                go.set()
    finally:
        go.set()
        engine.dispose()
    assert jobs.effects_by_job() == dict.fromkeys(ids[:30] + ids[31:], 1)


@pytest.mark.slow
def test_at_a_stop_those_that_wait_for_a_stuck_one_are_given_back(database_url: URL, jobs: Jobs) -> None:
    """They have returned, and their transaction is in the hands of a thread that nobody can stop."""
    handlers = HandlerRegistry()
    inside, go = threading.Event(), threading.Event()
    stuck: list[uuid.UUID] = []

    @handlers.handler("small", commit_every=50)
    def small(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id, attempt=job.attempt))
        session.flush()
        if not stuck and session.scalar(IN_A_GROUP):
            stuck.append(job.id)
            inside.set()
            go.wait(20)

    jobs.add_many("small", 300)
    engine = sa.create_engine(database_url)
    stopped = worker(engine, handlers, shutdown_timeout=0.1)
    try:
        stopped.start()
        assert inside.wait(10)
        assert not stopped.stop()
        assert jobs.counts()["running"] == 1
        assert jobs.row(stuck[0])["status"] == "running"
    finally:
        go.set()
        wait_until(lambda: not _checked_out(engine))
        engine.dispose()


def _checked_out(engine: sa.Engine) -> int:
    assert isinstance(engine.pool, sa.QueuePool)
    return engine.pool.checkedout()


def test_an_ordered_class_a_lock_and_savepoints_are_refused_with_groups() -> None:
    class Ordered(JobPayload, kind="ordered", ordered=True):
        pass

    register: Any = HandlerRegistry().handler
    for options in ({"hold_lock": True}, {"on_commit": "savepoint"}):
        with pytest.raises(HandlerError, match="exclude each other"):
            register("kind", commit_every=10, **options)
    with pytest.raises(HandlerError, match="'ordered' is ordered"):
        register(Ordered, commit_every=10)
    for value in (0, 1001, 2.5, None, True):
        with pytest.raises(InvalidOption, match="commit_every"):
            register("kind", commit_every=value)
    with pytest.raises(InvalidOption, match="on_commit must be 'refuse' or 'savepoint', not 'commit'"):
        register("kind", on_commit="commit")
    with pytest.raises(InvalidOption, match="flush must be 'job' or 'group', not 'never'"):
        register("kind", commit_every=10, flush="never")
    with pytest.raises(HandlerError, match="give commit_every=2 or more"):
        register("kind", flush="group")


# -- completion -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("complete", ["batch", "commit"])
def test_who_asks_for_it_is_done_before_the_slot_is_free(
    complete: Literal["batch", "commit"], database_url: URL, jobs: Jobs, observer: Observer
) -> None:
    """Of handlers that never use their session."""
    handlers = HandlerRegistry()
    seen: list[int] = []

    @handlers.handler("outside", complete=complete)
    def outside(_session: Session, _job: Job[Any]) -> None:
        seen.append(observer.scalar("SELECT count(*) FROM enlist_job WHERE status = 'done'"))

    jobs.add_many("outside", 30)
    engine = sa.create_engine(database_url)
    with running(worker(engine, handlers)):
        jobs.wait_all()
    engine.dispose()
    if complete == "commit":
        assert seen == list(range(30))
    assert len(seen) == 30


@every_way
def test_nothing_is_kept_of_what_has_ended(way: Way, database_url: URL, jobs: Jobs) -> None:
    handlers = HandlerRegistry()

    def body(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))
        session.flush()
        if job.payload and job.attempt == 1:
            raise ValueError

    way.register(handlers, "used", body)
    jobs.add_many("used", [{}, {"fails": True}] * 10)
    bind = way.bind(database_url)
    with running(worker(bind, handlers)):
        jobs.wait_all()
        wait_until(lambda: not GUARDS)
    dispose(bind)


@every_way
def test_what_is_run_again_sees_what_is_stored(way: Way, database_url: URL, jobs: Jobs) -> None:
    """Whatever the handler has made of its job in the run before."""
    handlers = HandlerRegistry()
    seen: list[tuple[Any, Any]] = []

    def body(session: Session, job: Job[Any]) -> None:
        seen.append((job.payload.pop("amount", 0), job.meta.pop("note", None)))
        session.add(Effect(job_id=job.id))
        session.flush()
        if len(seen) == 1:
            session.execute(sa.text("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END $$"))

    way.register(handlers, "again", body)
    job_id = jobs.add("again", {"amount": 100}, meta='{"note": "n"}')
    bind = way.bind(database_url)
    with running(worker(bind, handlers)):
        assert jobs.wait(job_id)["attempt"] == 1
    dispose(bind)
    assert seen == [(100, "n")] * 2
