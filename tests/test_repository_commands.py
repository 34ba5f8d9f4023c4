"""What operators ask of a repository: cancel, retry, reschedule, count, prune; in the caller's transaction."""

from __future__ import annotations

import contextlib
import datetime as dt
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, LiteralString

import pytest
import sqlalchemy as sa
from sqlalchemy import URL, Engine
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session, aliased, scoped_session, sessionmaker

from enlist import (
    Changes,
    EnqueueOptions,
    HandlerRegistry,
    InvalidOption,
    Job,
    JobRecord,
    JobRepository,
    JobStatus,
    SessionError,
    Snooze,
    UniqueKeyContended,
    Worker,
)
from enlist._driver import sqlstate
from enlist._statements import channel_of
from tests.jobs import Note
from tests.shop import Effect, Order
from tests.support import Observer, StatementRecorder
from tests.support.jobs import Jobs, running
from tests.support.waiting import wait_until

repo = JobRepository()

NOW = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
FAR = dt.datetime(2100, 1, 1, tzinfo=dt.UTC)
COMMANDS: dict[str, Callable[..., Changes]] = {
    "cancel": repo.cancel,
    "retry": repo.retry,
    "reschedule": lambda session, *which, **options: repo.reschedule(session, *which, delay=3600, **options),
}
STATES: dict[str, dict[str, Any]] = {
    "queued": {"attempt": 3, "lost": 1},
    "later": {"attempt": 3, "lost": 1, "due_in": 60},
    "running": {"attempt": 3, "lost": 1, "lease_token": 7, "locked_by": "w", "locked_until": FAR},
    "done": {"attempt": 3, "lost": 1, "lease_token": 7, "locked_by": "w", "finished_at": NOW, "started_at": NOW},
    "dead": {"attempt": 3, "lost": 1, "lease_token": 7, "finished_at": NOW, "started_at": NOW},
    "cancelled": {"attempt": 3, "lost": 1, "lease_token": 7, "finished_at": NOW},
}
FITS = {
    "cancel": {"queued", "later", "running"},
    "retry": {"later", "done", "dead", "cancelled"},
    "reschedule": {"queued", "later"},
}
LOCKED = "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted"


@pytest.fixture
def jobs(observer: Observer) -> Jobs:
    return Jobs(observer)


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    with Session(engine) as session:
        yield session


def add(jobs: Jobs, state: str, **columns: Any) -> uuid.UUID:
    status = "queued" if state == "later" else state
    kind = columns.pop("kind", state)
    return jobs.add(kind, **{"status": status, **STATES[state], **columns})


def add_all(jobs: Jobs) -> dict[str, uuid.UUID]:
    return {state: add(jobs, state) for state in STATES}


def in_thread(function: Callable[[], Any]) -> Future[Any]:
    executor = ThreadPoolExecutor(1)
    future = executor.submit(function)
    executor.shutdown(wait=False)
    return future


def statuses(ids: dict[str, uuid.UUID], *states: str) -> dict[uuid.UUID, JobStatus]:
    found = {ids[state]: JobStatus("queued" if state == "later" else state) for state in states}
    return dict(sorted(found.items()))


# -- what becomes of each state ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["id", "ids", "conditions"])
@pytest.mark.parametrize("name", list(COMMANDS))
def test_each_command_changes_what_it_fits_and_tells_of_the_rest(
    session: Session, jobs: Jobs, name: str, form: str
) -> None:
    ids = add_all(jobs)
    before = {state: jobs.row(job_id) for state, job_id in ids.items()}
    missing = [uuid.uuid4(), uuid.uuid4()]
    if form == "id":
        results = [COMMANDS[name](session, job_id) for job_id in ids.values()]
        changes = Changes(
            sorted(job_id for result in results for job_id in result.changed),
            unchanged=dict(sorted(item for result in results for item in result.unchanged.items())),
        )
    elif form == "ids":
        changes = COMMANDS[name](session, iter([*ids.values(), *missing, ids["done"]]))
        assert changes.missing == sorted(missing)
    else:
        changes = COMMANDS[name](session, JobRecord.kind.in_(list(STATES)), JobRecord.attempt == 3)
    assert changes.changed == sorted(ids[state] for state in FITS[name])
    # Of conditions the rest is not told: it may be the whole table.
    assert changes.unchanged == ({} if form == "conditions" else statuses(ids, *(STATES.keys() - FITS[name])))
    assert list(changes.unchanged) == sorted(changes.unchanged)
    assert changes.superseded == []
    assert (bool(changes), len(changes)) == (True, len(FITS[name]))
    assert {state: jobs.row(job_id) for state, job_id in ids.items()} == before
    session.commit()
    after = {state: jobs.row(job_id) for state, job_id in ids.items()}
    assert {state for state in STATES if after[state] != before[state]} == FITS[name]


@pytest.mark.parametrize("state", sorted(FITS["cancel"]))
def test_cancel_ends_a_job_and_fences_its_worker_off(session: Session, jobs: Jobs, state: str) -> None:
    keys: dict[str, Any] = {"unique_key": "k", "unique_held": True, "concurrency_key": "c", "concurrency_limit": 1}
    if state == "running":
        keys["concurrency_slot"] = 1
    job_id = add(jobs, state, **keys)
    token = jobs.row(job_id)["lease_token"]
    assert repo.cancel(session, job_id)
    session.commit()
    row = jobs.row(job_id)
    assert (row["status"], row["attempt"], row["lease_token"]) == ("cancelled", 3, token + 1)
    assert [row[name] for name in ("locked_until", "locked_by", "concurrency_slot", "unique_held")] == [
        None,
        None,
        None,
        False,
    ]
    assert row["finished_at"] is not None


@pytest.mark.parametrize("state", ["done", "dead", "cancelled"])
def test_retry_queues_a_finished_job_with_all_its_attempts(
    session: Session, jobs: Jobs, observer: Observer, state: str
) -> None:
    job_id = add(jobs, state, errors='[{"attempt": 3}]', last_error="boom")
    assert repo.retry(session, job_id)
    session.commit()
    row = jobs.row(job_id)
    assert (row["status"], row["attempt"], row["lost"], row["lease_token"]) == ("queued", 0, 1, 8)
    assert (row["started_at"], row["finished_at"], row["locked_by"]) == (None, None, None)
    assert (row["errors"], row["last_error"]) == ([{"attempt": 3}], "boom")
    assert observer.scalar("SELECT run_at BETWEEN clock_timestamp() - interval '10 s' AND now() FROM enlist_job")


def test_retry_makes_a_delayed_job_due_and_keeps_its_attempts(session: Session, jobs: Jobs, observer: Observer) -> None:
    job_id = add(jobs, "later")
    assert repo.retry(session, job_id)
    session.commit()
    assert jobs.row(job_id)["attempt"] == 3
    assert observer.scalar("SELECT run_at <= now() FROM enlist_job")


def test_reschedule_to_a_time_or_by_the_servers_clock(session: Session, jobs: Jobs, observer: Observer) -> None:
    at, later, now = add(jobs, "queued"), add(jobs, "queued"), add(jobs, "later")
    when = dt.datetime(2100, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=2)))
    assert repo.reschedule(session, at, run_at=when)
    assert repo.reschedule(session, later, delay=dt.timedelta(hours=1))
    assert repo.reschedule(session, now, delay=0)
    session.commit()
    assert jobs.row(at)["run_at"] == when
    due_in = dict(observer.rows("SELECT id, extract(epoch FROM run_at - now())::float FROM enlist_job"))
    assert 3590 < due_in[later] <= 3600
    assert -10 < due_in[now] <= 0


# -- unique keys ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("until", ["started", "finished", "pruned"])
@pytest.mark.parametrize("state", ["done", "dead", "cancelled"])
def test_retry_takes_a_released_key_again(session: Session, jobs: Jobs, state: str, until: str) -> None:
    job_id = add(jobs, state, unique_key="k", unique_until=until)
    assert repo.retry(session, job_id).changed == [job_id]
    session.commit()
    assert jobs.row(job_id)["unique_held"] is True


def test_a_done_job_that_holds_its_key_keeps_it(session: Session, jobs: Jobs) -> None:
    done = add(jobs, "done", unique_key="k", unique_held=True)
    dead = add(jobs, "dead", kind="done", unique_key="k")
    changes = repo.retry(session, [done, dead])
    session.commit()
    assert (changes.changed, changes.superseded) == ([done], [dead])
    assert jobs.row(done)["unique_held"] is True


def test_a_job_whose_key_is_held_is_superseded_and_the_rest_proceed(session: Session, jobs: Jobs) -> None:
    holder = add(jobs, "later", kind="a", unique_key="held", unique_held=True)
    superseded = add(jobs, "dead", kind="a", unique_key="held")
    twins = sorted(add(jobs, "dead", kind="a", unique_key="free") for _ in range(3))
    other_kind = add(jobs, "dead", kind="b", unique_key="held")
    plain = [add(jobs, "dead", kind="a") for _ in range(3)]
    before = jobs.row(superseded)
    changes = repo.retry(session, JobRecord.status == JobStatus.DEAD)
    session.commit()
    assert changes.changed == sorted([twins[0], other_kind, *plain])
    assert changes.superseded == sorted([superseded, *twins[1:]])
    assert (changes.unchanged, changes.missing) == ({}, [])
    assert jobs.row(superseded) == before
    assert jobs.row(holder)["unique_held"] is True
    assert not repo.retry(session, superseded)


def test_a_key_that_is_held_for_unique_for_alone_is_taken_when_that_is_over(session: Session, jobs: Jobs) -> None:
    lapsed = add(jobs, "done", kind="a", unique_key="k", unique_held=True, unique_until="finished")
    jobs._observer.execute("UPDATE enlist_job SET unique_hold_until = now() - interval '1 s'")
    dead = add(jobs, "dead", kind="a", unique_key="k")
    twin = add(jobs, "dead", kind="a", unique_key="k")
    changes = repo.retry(session, [dead, twin])
    session.commit()
    assert (changes.changed, changes.superseded) == ([min(dead, twin)], [max(dead, twin)])
    assert jobs.row(lapsed)["unique_held"] is False


@pytest.mark.parametrize("outcome", ["commit", "rollback"])
def test_a_key_that_is_being_taken_is_waited_for(
    engine: Engine, session: Session, jobs: Jobs, observer: Observer, outcome: str
) -> None:
    job_id, plain = add(jobs, "dead", kind="note", unique_key="k"), add(jobs, "dead")
    session.add(Order(ref="kept"))
    session.flush()
    with Session(engine) as other:
        repo.enqueue(other, Note(), unique_key="k")
        other.flush()
        waiting = in_thread(lambda: repo.retry(session, [job_id, plain]))
        observer.wait_for(LOCKED)
        getattr(other, outcome)()
    changes = waiting.result(timeout=10)
    session.commit()
    assert changes.superseded == ([job_id] if outcome == "commit" else [])
    assert changes.changed == ([plain] if outcome == "commit" else sorted([job_id, plain]))
    assert observer.scalar("SELECT count(*) FROM shop_order") == 1


def test_a_key_that_is_taken_at_each_try_ends_in_an_error_and_the_transaction_goes_on(
    engine: Engine, session: Session, jobs: Jobs, observer: Observer
) -> None:
    """REPEATABLE READ: the index sees the holder, and the look-up never will."""
    job_id = add(jobs, "dead", kind="a", unique_key="k")
    session.connection(execution_options={"isolation_level": "REPEATABLE READ"})
    session.add(Order(ref="kept"))
    session.flush()
    add(jobs, "queued", kind="a", unique_key="k", unique_held=True)
    with pytest.raises(UniqueKeyContended, match=f"3 tries.*{job_id}"):
        repo.retry(session, job_id)
    session.commit()
    assert (jobs.status(job_id), observer.scalar("SELECT count(*) FROM shop_order")) == ("dead", 1)


def test_other_integrity_errors_come_out(session: Session, jobs: Jobs, observer: Observer) -> None:
    observer.execute("CREATE UNIQUE INDEX one_attempt ON enlist_job (attempt) WHERE status = 'queued'")
    ids = [add(jobs, "dead"), add(jobs, "dead")]
    with pytest.raises(IntegrityError, match="one_attempt"):
        repo.retry(session, ids)
    assert repo.counts(session)[JobStatus.DEAD] == 2  # the savepoint is rolled back, not the transaction


# -- others at the same jobs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(COMMANDS))
@pytest.mark.parametrize("form", ["id", "conditions"])
def test_a_row_that_is_locked_is_waited_for_and_judged_as_it_is_then(
    session: Session, jobs: Jobs, observer: Observer, name: str, form: str
) -> None:
    state = "queued" if name == "reschedule" else "later"
    job_id = add(jobs, state)
    which = job_id if form == "id" else JobRecord.kind == state
    with session.get_bind().engine.connect() as other:
        other.execute(
            sa.text("UPDATE enlist_job SET status = 'running', locked_until = now(), attempt = 4, lease_token = 9")
        )
        waiting = in_thread(lambda: COMMANDS[name](session, which))
        observer.wait_for(LOCKED)
        other.commit()
    changes = waiting.result(timeout=10)
    session.commit()
    row = jobs.row(job_id)
    if name == "cancel":
        assert changes.changed == [job_id]
        assert (row["status"], row["attempt"], row["lease_token"]) == ("cancelled", 4, 10)
    else:
        assert changes.unchanged == ({} if form == "conditions" else {job_id: JobStatus.RUNNING})
        assert (row["status"], row["lease_token"]) == ("running", 9)


def test_a_condition_is_looked_at_again_after_a_wait(
    engine: Engine, session: Session, jobs: Jobs, observer: Observer
) -> None:
    """Somebody retried the dead jobs and they were done: nobody has asked to run done jobs again."""
    first, second, third = sorted(add(jobs, "dead", kind="a") for _ in range(3))
    with engine.connect() as other:
        other.execute(sa.text("UPDATE enlist_job SET status = 'done' WHERE id = :id"), {"id": first})
        waiting = in_thread(lambda: repo.retry(session, JobRecord.status == "dead", limit=1))
        observer.wait_for(LOCKED)
        other.commit()
    assert waiting.result(timeout=10).changed == [second]
    session.commit()
    assert [jobs.status(job_id) for job_id in (first, second, third)] == ["done", "queued", "dead"]


def test_lock_timeout_bounds_the_wait(engine: Engine, session: Session, jobs: Jobs) -> None:
    job_id = add(jobs, "queued")
    with engine.connect() as other:
        other.execute(sa.text("SELECT FROM enlist_job FOR NO KEY UPDATE"))
        session.execute(sa.text("SET LOCAL lock_timeout = '20ms'"))
        with pytest.raises(OperationalError) as caught:
            repo.cancel(session, job_id)
    assert sqlstate(caught.value) == "55P03"


def test_commands_in_opposite_orders_wait_and_never_deadlock(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    ids = [add(jobs, "queued", kind="a") for _ in range(3)]

    def reschedule(*which: Any) -> int:
        with Session(engine) as session, session.begin():
            return len(repo.reschedule(session, *which, delay=0))

    with engine.connect() as other:
        # Each gets as far as the middle; from opposite sides they would then wait for each other.
        other.execute(sa.text("SELECT FROM enlist_job WHERE id = :id FOR UPDATE"), {"id": sorted(ids)[1]})
        futures = [in_thread(lambda: reschedule(JobRecord.kind == "a")), in_thread(lambda: reschedule(ids[::-1]))]
        observer.wait_for("SELECT count(*) = 2 FROM pg_locks WHERE NOT granted")
    assert [future.result(timeout=10) for future in futures] == [3, 3]


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("name", list(COMMANDS))
def test_a_serialization_failure_comes_out_as_it_is(
    engine: Engine, jobs: Jobs, observer: Observer, level: Any, name: str
) -> None:
    job_id = add(jobs, "later")
    with Session(engine.execution_options(isolation_level=level)) as session:
        assert repo.counts(session)[JobStatus.QUEUED] == 1
        observer.execute("UPDATE enlist_job SET priority = 1")
        with pytest.raises(DBAPIError) as caught:
            COMMANDS[name](session, job_id)
        assert sqlstate(caught.value) == "40001"
        session.rollback()
        assert COMMANDS[name](session, job_id)
        session.commit()


# -- bulk -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(COMMANDS))
def test_a_limit_takes_the_lowest_ids_that_the_command_fits(session: Session, jobs: Jobs, name: str) -> None:
    state = min(FITS[name])
    other = min(STATES.keys() - FITS[name])
    rest = [add(jobs, other, kind="a") for _ in range(5)]
    ids = sorted(add(jobs, state, kind="a") for _ in range(5))
    changes = COMMANDS[name](session, JobRecord.kind == "a", limit=3)
    assert (changes.changed, changes.unchanged) == (ids[:3], {})
    session.commit()
    assert set(COMMANDS[name](session, rest).unchanged) == set(rest)


@pytest.mark.parametrize("name", list(COMMANDS))
def test_a_thousand_jobs_take_as_many_statements_as_one(
    session: Session, jobs: Jobs, statements: StatementRecorder, name: str
) -> None:
    state = min(FITS[name])
    ids = [add(jobs, state), *jobs.add_many(state, 1000, **_columns(state))]
    if name == "retry":
        jobs._observer.execute("UPDATE enlist_job SET unique_key = id::text")

    def texts(*which: Any) -> list[str]:
        statements.clear()
        COMMANDS[name](session, *which)
        return [text for text in statements.texts if "SAVEPOINT" not in text]

    assert len(texts(ids[0])) == len(texts(ids[1:])) == 1
    session.rollback()
    # Of cancel one more, for the running jobs whose rows are locked.
    assert len(texts(JobRecord.id == ids[0])) == len(texts(JobRecord.kind == state)) == (3 if name == "cancel" else 2)
    session.commit()


def _columns(state: str) -> dict[str, Any]:
    return {"status": "queued" if state == "later" else state, **STATES[state]}


def test_no_ids_are_no_sql(session: Session, statements: StatementRecorder) -> None:
    for command in COMMANDS.values():
        assert command(session, []) == Changes()
    assert statements.events == []


def test_conditions_may_be_anything_on_the_record(session: Session, jobs: Jobs) -> None:
    ids = [add(jobs, "dead", kind="a", unique_key="k"), add(jobs, "dead", kind="b")]
    orders = sa.select(Order.id).where(Order.ref == "x")
    for conditions in [
        (JobRecord.kind == "a", JobRecord.payload == {}),
        (sa.or_(JobRecord.kind == "a", JobRecord.attempt.in_(orders)),),
        (~JobRecord.unique_held, JobRecord.kind.not_in(["b"])),
        (JobRecord.__table__.c.kind == "a",),
        (sa.func.starts_with(JobRecord.unique_key, "k"),),
        (~sa.exists().where(Order.ref == JobRecord.kind), JobRecord.kind == "a"),
    ]:
        assert repo.retry(session, *conditions).changed == ids[:1]
        session.rollback()
    assert repo.retry(session, sa.true()).changed == sorted(ids)
    assert repo.retry(session, JobRecord.unique_held).changed == []


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ([], "which jobs.*not nothing"),
        ([None], "which jobs.*None"),
        ([str(uuid.uuid4())], "which jobs.*uuid.UUID"),
        ([uuid.uuid4().bytes], "which jobs"),
        ([JobRecord], "which jobs"),
        ([uuid.uuid4(), uuid.uuid4()], "which jobs.*iterable"),
        ([False], "which jobs.*False"),
        ([["a"]], r"ids\[0\] must be a uuid.UUID"),
        ([[uuid.uuid4(), None]], r"ids\[1\] must be a uuid.UUID, not None"),
        ([[JobRecord.kind == "a"]], r"\*conditions"),
        ([JobRecord.kind == "a", uuid.uuid4()], "a condition is an SQL expression.*UUID"),
        ([JobRecord.kind == "a", True], "a condition is an SQL expression.*True"),
        ([JobRecord.kind], "a condition is an SQL expression"),
        ([sa.text("kind = 'a'")], "a condition is an SQL expression"),
        ([JobRecord.id == Order.id], "JobRecord alone, not on 'shop_order'"),
        ([aliased(JobRecord).kind == "a"], "JobRecord alone"),
    ],
)
@pytest.mark.parametrize("name", list(COMMANDS))
def test_what_is_not_a_choice_of_jobs_is_refused_before_any_sql(
    session: Session, statements: StatementRecorder, name: str, which: list[Any], message: str
) -> None:
    with pytest.raises(InvalidOption, match=message):
        COMMANDS[name](session, *which)
    assert statements.events == []


def test_an_empty_condition_is_refused(session: Session, jobs: Jobs) -> None:
    add(jobs, "dead")
    with pytest.warns(sa.exc.SADeprecationWarning):
        empty = sa.and_(*[])
    for command in (repo.retry, repo.counts):
        with pytest.raises(InvalidOption, match="an empty condition"):
            command(session, empty)


def test_a_handle_is_named_by_its_id(session: Session) -> None:
    handle = repo.enqueue(session, Note())
    with pytest.raises(InvalidOption, match=r"handle\.id.*JobHandle"):
        repo.cancel(session, handle)  # type: ignore[arg-type]
    assert repo.cancel(session, handle.id).changed == [handle.id]


def test_options_are_checked_before_any_sql(session: Session, statements: StatementRecorder) -> None:
    dead, job_id = JobRecord.status == JobStatus.DEAD, uuid.uuid4()
    naive = dt.datetime(2100, 1, 1)
    for call, message in [
        (lambda: repo.cancel(session, job_id, limit=1), "limit=1 is for jobs that are picked by conditions"),
        (lambda: repo.retry(session, dead, limit=0), "limit must be an integer from 1"),
        (lambda: repo.reschedule(session, job_id), "either run_at.*or delay"),
        (lambda: repo.reschedule(session, job_id, run_at=NOW, delay=1), "either run_at.*or delay"),
        (lambda: repo.reschedule(session, job_id, run_at=naive), "time zone"),
        (lambda: repo.reschedule(session, job_id, delay=-1), "delay must be between 0"),
        (lambda: repo.prune(session, older_than=-1), "older_than must be between 0"),
        (lambda: repo.prune(session, older_than="7 days"), "older_than must be seconds"),  # type: ignore[arg-type]
        (lambda: repo.prune(session, older_than=1, limit=0), "limit must be an integer from 1"),
        (lambda: repo.prune(session, True, older_than=1), "a condition is an SQL"),  # type: ignore[arg-type]
        (lambda: repo.counts(session, "dead"), "a condition is an SQL expression"),  # type: ignore[arg-type]
        (lambda: repo.oldest_queued_age(session, job_id), "a condition is an SQL"),  # type: ignore[arg-type]
        (lambda: repo.get(session, str(job_id)), "job_id must be a uuid.UUID"),  # type: ignore[arg-type]
    ]:
        with pytest.raises(InvalidOption, match=message):
            call()  # type: ignore[no-untyped-call]
    assert statements.events == []


def test_an_async_session_is_sent_to_the_other_repository(async_engine: AsyncEngine) -> None:
    session: Any = AsyncSession(async_engine)
    job_id = uuid.uuid4()
    for call in [
        lambda: repo.get(session, job_id),
        lambda: repo.cancel(session, job_id),
        lambda: repo.retry(session, job_id),
        lambda: repo.reschedule(session, job_id, delay=0),
        lambda: repo.counts(session),
        lambda: repo.oldest_queued_age(session),
        lambda: repo.prune(session, older_than=0),
    ]:
        with pytest.raises(SessionError, match="AsyncJobRepository"):
            call()  # type: ignore[no-untyped-call]


def test_an_autocommit_session_may_read_and_prune_and_no_more(engine: Engine, jobs: Jobs) -> None:
    job_id = add(jobs, "later")
    add(jobs, "done")
    with Session(engine.execution_options(isolation_level="AUTOCOMMIT")) as session:
        for command in COMMANDS.values():
            with pytest.raises(SessionError, match="AUTOCOMMIT"):
                command(session, job_id)
        assert repo.get(session, job_id) is not None
        assert repo.counts(session)[JobStatus.DONE] == 1
        assert repo.oldest_queued_age(session) is None
        assert repo.prune(session, older_than=0) == 1
    assert jobs.counts() == {"queued": 1}


def test_a_session_without_a_bind_for_the_jobs_is_refused(engine: Engine) -> None:
    with Session(binds={Order: engine}) as session, pytest.raises(SessionError, match="binds"):
        repo.counts(session)


# -- the session ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("autoflush", [True, False])
@pytest.mark.parametrize("name", ["get", "counts", "oldest_queued_age", *COMMANDS, "prune"])
def test_a_job_that_was_just_enqueued_is_there(engine: Engine, name: str, autoflush: bool) -> None:
    with Session(engine, autoflush=autoflush) as session, session.no_autoflush:
        handle = repo.enqueue(session, Note(), delay=60 if name == "retry" else None)
        if name in COMMANDS:
            assert COMMANDS[name](session, handle.id)
        elif name == "get":
            assert repo.get(session, handle.id) is not None
        elif name == "counts":
            assert repo.counts(session)[JobStatus.QUEUED] == 1
        elif name == "prune":
            assert repo.prune(session, older_than=0) == 0
        else:
            assert repo.oldest_queued_age(session) is not None
        assert handle.inserted
        session.commit()


@pytest.mark.parametrize("autoflush", [True, False])
def test_without_staged_jobs_the_sessions_autoflush_is_followed(engine: Engine, autoflush: bool) -> None:
    with Session(engine, autoflush=autoflush) as session:
        order = Order(ref="a")
        session.add(order)
        repo.counts(session)
        assert (order in session.new) is not autoflush


@pytest.mark.parametrize("autoflush", [True, False])
def test_loaded_objects_are_what_was_written(
    engine: Engine, jobs: Jobs, statements: StatementRecorder, autoflush: bool
) -> None:
    job_id, other = add(jobs, "dead"), add(jobs, "dead")
    with Session(engine, autoflush=autoflush) as session:
        record, untouched = repo.get(session, job_id), repo.get(session, other)
        assert record is not None
        assert untouched is not None
        record.priority = 5
        repo.retry(session, job_id)
        statements.clear()
        assert (record.status, record.attempt, record.finished_at) == (JobStatus.QUEUED, 0, None)
        assert statements.texts == []
        session.commit()
    assert jobs.row(job_id)["priority"] == 5


def test_a_savepoint_that_is_rolled_back_takes_its_commands_along(session: Session, jobs: Jobs) -> None:
    job_id = add(jobs, "later")
    record = repo.get(session, job_id)
    assert record is not None
    for command in COMMANDS.values():
        savepoint = session.begin_nested()
        before = record.status, record.run_at
        assert command(session, job_id)
        assert (record.status, record.run_at) != before
        savepoint.rollback()
        assert (record.status, record.run_at) == before
    session.commit()
    assert jobs.status(job_id) == "queued"


def test_a_scoped_session_will_do(engine: Engine, jobs: Jobs) -> None:
    job_id = add(jobs, "dead")
    scoped = scoped_session(sessionmaker(engine))
    assert repo.retry(scoped, job_id)
    scoped.commit()
    scoped.remove()
    assert jobs.status(job_id) == "queued"


def test_a_session_that_reads_elsewhere_changes_jobs_where_it_writes(engine: Engine, jobs: Jobs) -> None:
    reader = sa.create_engine("postgresql+psycopg://nobody@localhost:1/nowhere")

    class RoutingSession(Session):
        def get_bind(self, mapper: Any = None, *, clause: Any = None, **rest: Any) -> Engine:
            writes = self._flushing or isinstance(clause, sa.sql.dml.UpdateBase)
            return engine if writes else reader

    job_id = add(jobs, "dead")
    with RoutingSession() as session:
        assert repo.retry(session, job_id)
        assert repo.counts(session)[JobStatus.QUEUED] == 1
        assert repo.oldest_queued_age(session) is not None
        session.commit()
    assert jobs.status(job_id) == "queued"


@pytest.mark.parametrize("source", ["engine", "session"])
def test_a_schema_translate_map_is_followed(engine: Engine, jobs: Jobs, observer: Observer, source: str) -> None:
    observer.execute("CREATE SCHEMA tenant")
    observer.execute("CREATE TABLE tenant.enlist_job (LIKE enlist_job INCLUDING ALL)")
    options = {"schema_translate_map": {None: "tenant"}}
    job_id = add(jobs, "dead")
    with Session(engine.execution_options(**options) if source == "engine" else engine) as session:
        session.connection(execution_options={} if source == "engine" else options)
        handle = repo.enqueue(session, Note())
        assert repo.cancel(session, handle.id, limit=None)
        assert repo.retry(session, JobRecord.kind == "note").changed == [handle.id]
        assert repo.retry(session, job_id).missing == [job_id]
        assert repo.counts(session)[JobStatus.QUEUED] == 1
        assert repo.oldest_queued_age(session) is not None
        repo.cancel(session, handle.id)
        assert repo.prune(session, older_than=0) == 1
        session.commit()
    assert jobs.status(job_id) == "dead"


# -- wake-ups ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def listener(observer: Observer) -> Observer:
    table = sa.inspect(JobRecord).local_table
    assert isinstance(table, sa.Table)
    observer.listen(channel_of(table))
    return observer


WAKING: dict[str, Callable[[JobRepository, Session, uuid.UUID], Changes]] = {
    "retry": lambda repo, session, job_id: repo.retry(session, job_id),
    "reschedule": lambda repo, session, job_id: repo.reschedule(session, job_id, delay=0),
}


@pytest.mark.parametrize("twophase", [False, True])
@pytest.mark.parametrize("waking", [JobRepository(notify="after_commit"), JobRepository(notify="transaction")])
@pytest.mark.parametrize("name", list(WAKING))
def test_workers_are_woken_by_the_commit(
    engine: Engine, listener: Observer, name: str, waking: JobRepository, twophase: bool
) -> None:
    jobs = Jobs(listener)
    ids = [add(jobs, "later", queue="mail"), add(jobs, "later", queue="mail")]
    with Session(engine, twophase=twophase) as session:
        savepoint = session.begin_nested()
        assert WAKING[name](waking, session, add(jobs, "later", queue="undone"))
        savepoint.rollback()
        savepoint = session.begin_nested()
        for job_id in ids:
            assert WAKING[name](waking, session, job_id)
        savepoint.commit()
        assert listener.notified(0.2) == []
        session.commit()
        assert session.info == {}
    assert listener.notified() == ["mail"]


def test_a_job_that_is_due_earlier_than_before_wakes_workers(engine: Engine, jobs: Jobs, listener: Observer) -> None:
    """They learn when it is due now."""
    with Session(engine) as session, session.begin():
        repo.reschedule(session, add(jobs, "later", queue="mail"), delay=60)
    assert listener.notified() == ["mail"]


def test_nobody_is_woken_where_nothing_became_due(engine: Engine, jobs: Jobs, listener: Observer) -> None:
    quiet = JobRepository(notify=None)
    with Session(engine) as session:
        repo.cancel(session, add(jobs, "queued", queue="cancelled"))
        repo.retry(session, add(jobs, "running", queue="running"))
        quiet.retry(session, add(jobs, "dead", queue="quiet"))
        session.commit()
        repo.retry(session, add(jobs, "dead", queue="rolled back"))
        session.rollback()
        repo.retry(session, add(jobs, "dead", queue="closed"))
        session.close()
        repo.retry(session, add(jobs, "dead", queue="mail"))
        session.commit()
    assert listener.notified() == ["mail"]
    assert listener.notified(0.2) == []


def test_a_commit_whose_transaction_has_failed_is_refused(session: Session, jobs: Jobs) -> None:
    job_id = add(jobs, "dead")
    repo.retry(session, job_id)
    with pytest.raises(DBAPIError):
        session.connection().execute(sa.text("SELECT 1 / 0"))
    with pytest.raises(SessionError, match="swallowed"):
        session.commit()
    session.rollback()
    assert jobs.status(job_id) == "dead"


# -- what there is ----------------------------------------------------------------------------------------------------


def test_counts_has_every_status(session: Session, jobs: Jobs) -> None:
    assert repo.counts(session) == dict.fromkeys(JobStatus, 0)
    add_all(jobs)
    add(jobs, "dead", kind="a")
    assert repo.counts(session) == {
        JobStatus.QUEUED: 2,
        JobStatus.RUNNING: 1,
        JobStatus.DONE: 1,
        JobStatus.DEAD: 2,
        JobStatus.CANCELLED: 1,
    }
    assert repo.counts(session, JobRecord.kind == "a") == {**dict.fromkeys(JobStatus, 0), JobStatus.DEAD: 1}


def test_the_age_of_the_oldest_due_job(session: Session, jobs: Jobs, observer: Observer) -> None:
    assert repo.oldest_queued_age(session) is None
    for state in STATES:
        add(jobs, state, kind="a")
    observer.execute("DELETE FROM enlist_job WHERE status = 'queued' AND run_at <= now()")
    assert repo.oldest_queued_age(session) is None
    jobs.add("a", due_in=-100)
    jobs.add("b", due_in=-7200)
    found = repo.oldest_queued_age(session)
    assert found is not None
    assert dt.timedelta(hours=2) <= found < dt.timedelta(hours=2, minutes=1)
    found = repo.oldest_queued_age(session, JobRecord.kind == "a")
    assert found is not None
    assert dt.timedelta(seconds=100) <= found < dt.timedelta(minutes=3)


def test_the_age_is_by_the_servers_clock_at_the_call(session: Session, jobs: Jobs, observer: Observer) -> None:
    repo.counts(session)  # the transaction begins
    jobs.add("a")
    first = repo.oldest_queued_age(session)
    second = repo.oldest_queued_age(session)
    assert first is not None
    assert second is not None
    assert second > first


def test_a_job_that_is_due_since_ever_has_an_age(session: Session, jobs: Jobs, observer: Observer) -> None:
    jobs.add("a")
    observer.execute("UPDATE enlist_job SET run_at = '-infinity'")
    found = repo.oldest_queued_age(session)
    assert found is not None
    assert found > dt.timedelta(days=365 * 2000)


# -- pruning ----------------------------------------------------------------------------------------------------------


def aged(observer: Observer, job_id: uuid.UUID, age: LiteralString) -> uuid.UUID:
    observer.execute("UPDATE enlist_job SET finished_at = now() - %s::interval WHERE id = %s", age, job_id)
    return job_id


def test_prune_deletes_what_finished_long_ago(session: Session, jobs: Jobs, observer: Observer) -> None:
    for state in STATES:
        aged(observer, add(jobs, state), "8 days")
        aged(observer, add(jobs, state), "6 days")
    assert repo.prune(session, JobRecord.kind == "dead", older_than=dt.timedelta(days=7)) == 1
    assert repo.prune(session, older_than=dt.timedelta(days=7)) == 2
    assert repo.prune(session, older_than=dt.timedelta(days=7)) == 0
    session.commit()
    assert jobs.counts() == {"queued": 4, "running": 2, "done": 1, "dead": 1, "cancelled": 1}
    assert repo.prune(session, older_than=0) == 3
    session.commit()
    assert jobs.counts() == {"queued": 4, "running": 2}


def test_prune_leaves_a_key_that_is_held_longer(session: Session, jobs: Jobs, observer: Observer) -> None:
    held = add(jobs, "done", unique_key="1", unique_held=True)
    add(jobs, "done", unique_key="2")
    add(jobs, "done", unique_key="3", unique_held=True)
    add(jobs, "done", unique_key="4", unique_held=True)
    observer.execute("UPDATE enlist_job SET unique_hold_until = now() + interval '1 h' WHERE unique_key < '3'")
    observer.execute("UPDATE enlist_job SET unique_hold_until = now() - interval '1 h' WHERE unique_key = '3'")
    assert repo.prune(session, older_than=0) == 3
    session.commit()
    assert observer.rows("SELECT id FROM enlist_job") == [(held,)]


def test_a_prune_is_one_statement_of_bounded_size(
    session: Session, jobs: Jobs, statements: StatementRecorder, observer: Observer
) -> None:
    ids = jobs.add_many("a", 1500, status="done", finished_at=NOW)
    statements.clear()
    assert repo.prune(session, older_than=60) == 1000
    assert len(statements.texts) == 1
    session.commit()
    assert observer.rows("SELECT id FROM enlist_job ORDER BY id LIMIT 1") == [(ids[1000],)]
    assert repo.prune(session, older_than=60, limit=10) == 10


def test_pruners_pass_each_other_by(engine: Engine, session: Session, jobs: Jobs, observer: Observer) -> None:
    jobs.add_many("a", 10, status="done", finished_at=NOW)
    with Session(engine) as other:
        other.execute(sa.text("SET LOCAL lock_timeout = '20ms'"))
        assert repo.prune(session, older_than=0, limit=4) == 4
        assert repo.prune(other, older_than=0, limit=4) == 4
        other.commit()
        session.commit()
    assert jobs.counts() == {"done": 2}


def test_prune_passes_by_a_job_that_is_being_referenced(
    engine: Engine, session: Session, jobs: Jobs, observer: Observer
) -> None:
    observer.execute("CREATE TABLE reference (job_id uuid REFERENCES enlist_job)")
    referenced = add(jobs, "done")
    add(jobs, "done")
    with engine.connect() as connection:
        connection.execute(sa.text("INSERT INTO reference VALUES (:id)"), {"id": referenced})
        session.execute(sa.text("SET LOCAL lock_timeout = '20ms'"))
        assert repo.prune(session, older_than=0) == 1
        session.commit()
        connection.commit()
    assert observer.rows("SELECT id FROM enlist_job") == [(referenced,)]
    with pytest.raises(IntegrityError):
        repo.prune(session, older_than=0)


def test_objects_of_pruned_jobs_leave_the_session(session: Session, jobs: Jobs) -> None:
    job_id = add(jobs, "done")
    record = repo.get(session, job_id)
    assert record is not None
    assert repo.prune(session, older_than=0) == 1
    assert record not in session
    assert repo.get(session, job_id) is None


# -- with a worker ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_job_that_is_cancelled_while_it_runs_commits_nothing(engine: Engine, jobs: Jobs) -> None:
    handlers = HandlerRegistry()
    started, go_on = threading.Event(), threading.Event()

    @handlers.handler("work")
    def work(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))
        session.flush()
        started.set()
        assert go_on.wait(10)

    @handlers.handler("next")
    def following(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))

    job_id = jobs.add("work", unique_key="k", unique_held=True)
    with running(Worker(engine, handlers)):
        assert started.wait(10)
        with Session(engine) as session, session.begin():
            assert repo.cancel(session, job_id).changed == [job_id]
        go_on.set()
        jobs.wait(jobs.add("next"), "done")
    assert (jobs.status(job_id), jobs.effects(job_id)) == ("cancelled", [])


def test_a_dead_job_is_retried_and_a_worker_runs_it_at_once(engine: Engine, jobs: Jobs) -> None:
    handlers = HandlerRegistry()
    fixed = threading.Event()

    @handlers.handler("work")
    def work(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id, attempt=job.attempt))
        if not fixed.is_set():
            raise ValueError("boom")

    job_id = jobs.add("work", max_attempts=1, unique_key="k", unique_held=True)
    with running(Worker(engine, handlers, poll_interval=30)):
        jobs.wait(job_id, "dead")
        fixed.set()
        with Session(engine) as session, session.begin():
            assert repo.retry(session, JobRecord.status == JobStatus.DEAD).changed == [job_id]
        row = jobs.wait(job_id, "done", timeout=3)
    assert (row["attempt"], row["unique_held"], len(row["errors"])) == (1, True, 1)
    assert [attempt for attempt, _ in jobs.effects(job_id)] == [1]


def test_a_handler_may_command_other_jobs(engine: Engine, jobs: Jobs) -> None:
    """Its session is guarded: the savepoint of a retry, and its rollback, are none of the handler's own endings."""
    handlers = HandlerRegistry()
    dead, contended = add(jobs, "dead", kind="a", unique_key="k"), add(jobs, "dead", kind="b", unique_key="k")

    @handlers.handler("work")
    def work(session: Session, job: Job[Any]) -> None:
        session.connection(execution_options={"isolation_level": "REPEATABLE READ"})
        repo.counts(session)  # takes the snapshot
        jobs.add("b", due_in=60, unique_key="k", unique_held=True)
        with pytest.raises(UniqueKeyContended):
            repo.retry(session, contended)
        assert repo.retry(session, dead)

    job_id = jobs.add("work")
    with running(Worker(engine, handlers)):
        row = jobs.wait(job_id, "done", "dead", timeout=10)
    assert (row["status"], row["last_error"]) == ("done", None)
    assert (jobs.status(dead), jobs.status(contended)) == ("queued", "dead")


@pytest.mark.parametrize("days", [60, 120, 180, 240, 300])
def test_a_delay_is_as_long_as_it_says_when_the_clocks_change(database_url: URL, observer: Observer, days: int) -> None:
    """A day of the calendar is then of 23 or 25 hours. So for each way to say a delay."""
    engine = sa.create_engine(database_url, connect_args={"options": "-c timezone=America/New_York"})
    delay = dt.timedelta(days=days)
    handlers = HandlerRegistry()

    @handlers.handler("snooze")
    def snooze(session: Session, job: Job[dict[str, Any]]) -> None:
        raise Snooze(delay)

    with Session(engine) as session:
        repo.enqueue(session, "enqueued", {}, delay=delay)
        rescheduled = repo.enqueue(session, "rescheduled", {})
        repo.reschedule(session, rescheduled.id, delay=delay)
        repo.enqueue(session, "snooze", {})
        session.commit()
    Worker(engine, handlers).drain(timeout=20)
    engine.dispose()
    late = observer.rows("SELECT kind, extract(epoch FROM run_at - statement_timestamp())::float8 FROM enlist_job")
    assert len(late) == 3
    for kind, seconds in late:
        assert abs(seconds - delay.total_seconds()) < 60, kind


@pytest.mark.slow
def test_retries_and_enqueues_of_the_same_keys_do_not_deadlock(engine: Engine, observer: Observer) -> None:
    """Both take many keys: one after the other in the order of the keys, whatever the order of ids and calls."""
    rounds, count = 8, 300
    with Session(engine) as session, session.begin():
        keys = [f"{number * 7919 % count:03}" for number in range(count)]
        for round_ in range(rounds):
            options = [EnqueueOptions(unique_key=f"{round_}-{key}") for key in keys]
            repo.enqueue_many(session, [(Note(), each) for each in options])
    observer.execute("UPDATE enlist_job SET status = 'dead', unique_held = false")

    def retry(round_: int) -> None:
        with Session(engine) as session, session.begin():
            repo.retry(session, JobRecord.unique_key.startswith(f"{round_}-"), JobRecord.status == JobStatus.DEAD)

    def enqueue(round_: int) -> None:
        with Session(engine) as session, session.begin():
            for key in keys:
                repo.enqueue(session, Note(), unique_key=f"{round_}-{key}")

    with ThreadPoolExecutor(2) as pool:
        for round_ in range(rounds):
            for future in [pool.submit(retry, round_), pool.submit(enqueue, round_)]:
                future.result(30)
    assert observer.scalar("SELECT count(*) FROM enlist_job WHERE unique_held") == rounds * count


@pytest.mark.parametrize("end", ["dead", "done"])
def test_a_job_that_its_worker_ends_while_it_is_retried_is_left_alone(
    engine: Engine, jobs: Jobs, observer: Observer, end: str
) -> None:
    """The retry waits for the worker's lock; what it was called for was a running job, which must not run twice."""
    job_id = jobs.add("note")
    observer.execute("UPDATE enlist_job SET status = 'running', attempt = 1, locked_until = now(), started_at = now()")
    changes: list[Changes] = []

    def retry() -> None:
        with Session(engine) as session, session.begin():
            changes.append(repo.retry(session, job_id))

    with engine.connect() as worker:
        worker.execute(sa.text(f"UPDATE enlist_job SET status = '{end}', locked_until = NULL, finished_at = now()"))
        thread = threading.Thread(target=retry)
        thread.start()
        wait_until(lambda: observer.scalar("SELECT count(*) FROM pg_locks WHERE NOT granted"))
        worker.commit()
        thread.join(10)
    assert changes[0].unchanged == {job_id: JobStatus(end)}
    assert jobs.status(job_id) == end


def test_a_limit_counts_jobs_that_can_be_retried(session: Session, jobs: Jobs, observer: Observer) -> None:
    """Those whose key another job holds are passed by: a loop over a limit must not stop at them."""
    jobs.add_many("held", 30, status="dead")
    observer.execute("UPDATE enlist_job SET unique_key = id::text WHERE kind = 'held'")
    observer.execute(
        "INSERT INTO enlist_job (id, kind, unique_key, unique_held)"
        " SELECT gen_random_uuid(), kind, unique_key, true FROM enlist_job"
    )
    free = [add(jobs, "dead") for _ in range(3)]
    changed: list[uuid.UUID] = []
    for _ in range(3):
        changes = repo.retry(session, JobRecord.status == JobStatus.DEAD, limit=1)
        changed += changes.changed
        assert changes.superseded == []
    assert sorted(changed) == sorted(free)
    assert len(repo.retry(session, JobRecord.status == JobStatus.DEAD).superseded) == 30


def test_what_is_set_and_not_flushed_stays(engine: Engine, jobs: Jobs) -> None:
    job_id = add(jobs, "queued")
    with Session(engine, autoflush=False) as session:
        job = repo.get(session, job_id)
        assert job is not None
        job.run_at = FAR
        assert repo.get(session, job_id) is job
        assert job.run_at == FAR
        assert repo.cancel(session, job_id)
        assert (job.status, job.run_at) == (JobStatus.CANCELLED, FAR)
        session.commit()
    assert (jobs.status(job_id), jobs.row(job_id)["run_at"]) == ("cancelled", FAR)


def test_pruned_objects_come_back_with_a_rollback(session: Session, jobs: Jobs) -> None:
    job_id = add(jobs, "done")
    job = repo.get(session, job_id)
    assert job is not None
    savepoint = session.begin_nested()
    assert repo.prune(session, older_than=0) == 1
    assert job not in session
    savepoint.rollback()
    assert job in session
    assert job.status is JobStatus.DONE


@pytest.mark.parametrize("notify", ["after_commit", None])
def test_a_change_that_a_swallowed_error_undoes_is_not_committed_in_silence(
    engine: Engine, jobs: Jobs, notify: Literal["after_commit"] | None
) -> None:
    job_id = add(jobs, "queued")
    with Session(engine) as session:
        assert JobRepository(notify=notify).cancel(session, job_id)
        with contextlib.suppress(sa.exc.DBAPIError):
            session.execute(sa.text("SELECT 1/0"))
        with pytest.raises(SessionError, match="swallowed"):
            session.commit()
    assert jobs.status(job_id) == "queued"
