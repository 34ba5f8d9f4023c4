"""enlist.testing: due jobs run inside of the test's own transaction, as a worker runs them, and are gone with it."""

from __future__ import annotations

import asyncio
import datetime as dt
import re
import shlex
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import tenacity
from sqlalchemy import URL, Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, scoped_session, sessionmaker

from enlist import (
    Cancel,
    CommitRefused,
    ConfigurationError,
    HandlerRegistry,
    HandlerTimeout,
    InvalidOption,
    Job,
    JobPayload,
    JobRecord,
    JobRecordMixin,
    JobRepository,
    JobStatus,
    LeaseLost,
    PayloadError,
    Retry,
    SessionError,
    Snooze,
    TransactionAborted,
)
from enlist.testing import DrainLimitExceeded, assert_enqueued, drain, refute_enqueued
from tests.jobs import Note, SendReceipt
from tests.shop import Effect, Order, Receipt
from tests.support import Observer, StatementRecorder

repo = JobRepository()


@pytest.fixture
def connection(engine: Engine) -> Iterator[sa.Connection]:
    """A connection in a transaction that is rolled back at the end of the test."""
    with engine.connect() as connection:
        transaction = connection.begin()
        yield connection
        if transaction.is_active:
            transaction.rollback()


@pytest.fixture
def session(connection: sa.Connection) -> Iterator[Session]:
    with Session(bind=connection, join_transaction_mode="create_savepoint") as session:
        yield session


@pytest.fixture
async def async_session(any_async_engine: AsyncEngine) -> AsyncIterator[AsyncSession]:
    async with any_async_engine.connect() as connection:
        transaction = await connection.begin()
        async with AsyncSession(bind=connection, join_transaction_mode="create_savepoint") as session:
            yield session
        await transaction.rollback()


def effects(session: Session) -> list[str]:
    """What handlers have left, in the order in which they did."""
    return list(session.scalars(sa.select(Effect.worker).order_by(Effect.id)))


def statuses(session: Session) -> list[str]:
    return list(session.scalars(sa.select(JobRecord.status).order_by(JobRecord.id)))


def leave(session: Session | AsyncSession, job: Job[Any], text: str) -> None:
    session.add(Effect(job_id=job.id, attempt=job.attempt, worker=text))


def noting(wait: Any = None, **options: Any) -> HandlerRegistry:
    """A handler of notes that leaves the text as its effect."""
    handlers = HandlerRegistry()

    @handlers.handler(Note, wait=wait or tenacity.wait_fixed(60), **options)
    def note(session: Session, job: Job[Note]) -> None:
        leave(session, job, job.payload.text)

    return handlers


def handling(body: Callable[[Session, Job[Note]], Any], **options: Any) -> HandlerRegistry:
    """A handler of notes that leaves an effect, flushes, and does ``body``."""
    handlers = HandlerRegistry()

    @handlers.handler(Note, **{"wait": tenacity.wait_fixed(60), **options})
    def note(session: Session, job: Job[Note]) -> None:
        leave(session, job, job.payload.text)
        session.flush()
        body(session, job)

    return handlers


# -- the transaction is the test's --------------------------------------------------------------------------------


def test_what_was_committed_and_drained_is_gone_with_the_outer_transaction(engine: Engine, observer: Observer) -> None:
    handlers = HandlerRegistry()

    @handlers.handler(SendReceipt)
    def send(session: Session, job: Job[SendReceipt]) -> None:
        session.add(Receipt(order_id=job.payload.order_id))

    began = time.monotonic()
    with engine.connect() as connection:
        outer = connection.begin()
        with Session(bind=connection, join_transaction_mode="create_savepoint") as session:
            session.add(order := Order(ref="A-1"))
            repo.enqueue(session, lambda: SendReceipt(order_id=order.id))
            session.commit()
            assert len(drain(session, handlers).done) == 1
            assert session.scalars(sa.select(Receipt.order_id)).all() == [order.id]
            session.commit()
        outer.rollback()
    assert time.monotonic() - began < 5
    assert nothing_is_committed(observer)


async def test_what_was_committed_and_drained_is_gone_with_the_outer_transaction_async(
    any_async_engine: AsyncEngine, observer: Observer
) -> None:
    handlers = HandlerRegistry()

    @handlers.handler(SendReceipt)
    async def send(session: AsyncSession, job: Job[SendReceipt]) -> None:
        session.add(Receipt(order_id=job.payload.order_id))
        await session.flush()
        repo.enqueue(session, Note(text="sent"))

    @handlers.handler(Note)
    def note(session: Session, job: Job[Note]) -> None:
        leave(session, job, job.payload.text)

    async with any_async_engine.connect() as connection:
        outer = await connection.begin()
        began = time.monotonic()
        async with AsyncSession(bind=connection, join_transaction_mode="create_savepoint") as session:
            session.add(order := Order(ref="A-1"))
            repo.enqueue(session, lambda: SendReceipt(order_id=order.id))
            await session.commit()
            drained = await drain(session, handlers)
            assert [run.kind for run in drained.done] == ["send_receipt", "note"]
            assert (await session.scalars(sa.select(Effect.worker))).all() == ["sent"]
            await session.commit()
        await outer.rollback()
        assert time.monotonic() - began < 5
    assert nothing_is_committed(observer)


def nothing_is_committed(observer: Observer) -> bool:
    tables = ("enlist_job", "shop_order", "shop_receipt", "shop_effect")
    return all(observer.scalar(f"SELECT count(*) FROM {table}") == 0 for table in tables)


@pytest.mark.parametrize("mode", ["conditional_savepoint", "rollback_only", "control_fully", "create_savepoint"])
def test_the_session_may_have_joined_its_transaction_in_any_way(
    mode: Any, connection: sa.Connection, observer: Observer
) -> None:
    with Session(bind=connection, join_transaction_mode=mode) as session:
        repo.enqueue(session, Note(text="one"))
        assert len(drain(session, noting()).done) == 1
        repo.enqueue(session, Note(text="two"))
        session.flush()
        assert len(drain(session, noting()).done) == 1
        assert effects(session) == ["one", "two"]
    assert nothing_is_committed(observer)


def test_a_session_with_a_transaction_of_its_own_is_not_committed(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session:
        repo.enqueue(session, Note(text="one"))
        assert len(drain(session, noting()).done) == 1
        assert effects(session) == ["one"]
        assert nothing_is_committed(observer)
        session.commit()
    assert observer.rows("SELECT status, (SELECT worker FROM shop_effect) FROM enlist_job") == [("done", "one")]


def test_within_a_block_that_commits_the_session(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session, session.begin():
        repo.enqueue(session, Note(text="one"))
        assert len(drain(session, noting()).done) == 1
        assert nothing_is_committed(observer)
    assert observer.scalar("SELECT status FROM enlist_job") == "done"


def test_a_savepoint_of_the_test_takes_the_drain_back(session: Session) -> None:
    repo.enqueue(session, Note(text="one"))
    savepoint = session.begin_nested()
    assert len(drain(session, noting())) == 1
    savepoint.rollback()
    assert (effects(session), statuses(session)) == ([], ["queued"])
    assert len(drain(session, noting())) == 1


def test_two_sessions_of_a_test_share_what_was_drained(connection: sa.Connection, session: Session) -> None:
    repo.enqueue(session, Note(text="one"))
    session.commit()
    with Session(bind=connection, join_transaction_mode="create_savepoint") as other:
        assert len(drain(other, noting())) == 1
        other.commit()
    assert len(drain(session, noting())) == 0
    assert effects(session) == ["one"]


def test_drain_needs_a_transaction_to_work_in(engine: Engine) -> None:
    bind = engine.execution_options(isolation_level="AUTOCOMMIT")
    with Session(bind) as session, pytest.raises(SessionError, match="AUTOCOMMIT"):
        drain(session, noting())


def test_nothing_is_left_on_the_connection(session: Session, connection: sa.Connection) -> None:
    for number in range(3):
        repo.enqueue(session, Note(text=str(number)))
    session.flush()
    before = list(connection.dispatch.before_cursor_execute)
    drain(session, noting(hold_lock=True))
    assert list(connection.dispatch.before_cursor_execute) == before


# -- which jobs, and in what order --------------------------------------------------------------------------------


def test_staged_jobs_are_seen_without_autoflush_and_with_objects_pending(connection: sa.Connection) -> None:
    with Session(bind=connection, autoflush=False, join_transaction_mode="create_savepoint") as session:
        session.add(order := Order(ref="A-1"))
        repo.enqueue(session, lambda: Note(text="to be seen"))
        assert_enqueued(session, Note, text="to be seen")
        repo.enqueue(session, lambda: Note(text=f"order {order.id}"))
        drain(session, noting())
        assert effects(session) == ["to be seen", f"order {order.id}"]


def test_jobs_run_in_the_order_of_the_claim_whatever_their_queue(session: Session) -> None:
    now = dt.datetime.now(dt.UTC)
    for text, queue, priority, seconds in [
        ("d", "a", 0, 10),
        ("c", "b", 0, 20),
        ("b", "a", 5, 10),
        ("a", "b", 9, 10),
    ]:
        past = now - dt.timedelta(seconds=seconds)
        repo.enqueue(session, Note(text=text), queue=queue, priority=priority, run_at=past)
    drain(session, noting())
    assert effects(session) == ["a", "b", "c", "d"]


def test_what_handlers_enqueue_runs_too_at_its_place(session: Session) -> None:
    handlers = HandlerRegistry()

    @handlers.handler(Note)
    def note(session: Session, job: Job[Note]) -> None:
        leave(session, job, job.payload.text)
        if job.payload.text == "first":
            repo.enqueue(session, Note(text="urgent"), priority=5)

    repo.enqueue(session, Note(text="first"))
    repo.enqueue(session, Note(text="second"))
    assert len(drain(session, handlers)) == 3
    assert effects(session) == ["first", "urgent", "second"]


@pytest.mark.slow
def test_a_handler_may_enqueue_its_own_unique_key_again(session: Session) -> None:
    handlers = HandlerRegistry()

    @handlers.handler(Note)
    def note(session: Session, job: Job[Note]) -> None:
        leave(session, job, job.payload.text)
        if len(job.payload.text) < 3:
            text = job.payload.text + "+"
            repo.enqueue(session, Note(text=text), unique_key="own", unique_until="finished")

    repo.enqueue(session, Note(text="+"), unique_key="own", unique_until="finished")
    assert len(drain(session, handlers).done) == 3
    assert effects(session) == ["+", "++", "+++"]


def test_only_the_queues_that_are_asked_for(session: Session) -> None:
    repo.enqueue(session, Note(text="mail"), queue="mail")
    repo.enqueue(session, Note(text="late mail"), queue="mail", delay=60)
    repo.enqueue(session, Note(text="other"), delay=60)
    assert len(drain(session, noting(), queues=["mail"])) == 1
    assert len(drain(session, noting(), queues=["mail"], with_scheduled=True)) == 1
    assert effects(session) == ["mail", "late mail"]


def test_kinds_without_a_handler_stay_queued(session: Session) -> None:
    repo.enqueue(session, "unknown", {})
    assert len(drain(session, noting(), with_scheduled=True)) == 0
    assert statuses(session) == ["queued"]


def test_delayed_jobs_wait_and_run_in_the_order_of_time_when_asked(session: Session) -> None:
    handlers = noting()

    @handlers.handler("chain")
    def chain(session: Session, job: Job[dict[str, Any]]) -> None:
        repo.enqueue(session, Note(text="at once"))
        repo.enqueue(session, Note(text="in 5"), delay=5)

    repo.enqueue(session, Note(text="in 3600"), delay=3600, priority=9)
    repo.enqueue(session, Note(text="in 60"), delay=60)
    repo.enqueue(session, "chain", {}, delay=30)
    assert len(drain(session, handlers)) == 0
    assert len(drain(session, handlers, with_scheduled=True)) == 5
    assert effects(session) == ["at once", "in 5", "in 60", "in 3600"]


def test_concurrency_keys_are_run_one_after_the_other(session: Session) -> None:
    running: list[int] = []

    def count(session: Session, job: Job[Note]) -> None:
        jobs = sa.select(sa.func.count()).select_from(JobRecord).where(JobRecord.status == JobStatus.RUNNING)
        running.append(session.scalars(jobs).one())

    for number in range(3):
        repo.enqueue(session, Note(text=f"keyed {number}"), concurrency_key="smtp")
        repo.enqueue(session, Note(text=f"plain {number}"))
    assert len(drain(session, handling(count)).done) == 6
    assert running == [1] * 6
    assert effects(session) == [f"{what} {number}" for number in range(3) for what in ("keyed", "plain")]


@pytest.mark.slow
def test_a_key_in_use_by_another_open_transaction_is_named(
    engine: Engine, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("enlist._inline.KEY_TRIES", 2)
    repo.enqueue(session, Note(), concurrency_key="smtp")
    drain(session, noting())
    with Session(engine) as other:
        repo.enqueue(other, Note(), concurrency_key="smtp")
        with pytest.raises(SessionError, match="'smtp' are in use by another transaction"):
            drain(other, noting())


def test_an_endless_chain_is_stopped(session: Session) -> None:
    def again(session: Session, job: Job[Note]) -> None:
        repo.enqueue(session, Note())

    repo.enqueue(session, Note())
    with pytest.raises(DrainLimitExceeded, match=r"has run 7 jobs and one of kind 'note' is due"):
        drain(session, handling(again), limit=7)
    assert statuses(session) == ["done"] * 7 + ["queued"]
    assert session.scalars(sa.select(JobRecord.attempt).order_by(JobRecord.id)).all() == [1] * 7 + [0]


def test_as_many_jobs_as_the_limit_are_not_too_many(session: Session) -> None:
    repo.enqueue_many(session, [Note(), Note()])
    assert len(drain(session, noting(), limit=2)) == 2


# -- the handler's session ----------------------------------------------------------------------------------------


class ShopSession(Session):
    """An application's own session."""


def test_the_handlers_session_is_a_fresh_one_of_the_tests_class(connection: sa.Connection) -> None:
    seen: list[Session] = []

    def look(session: Session, job: Job[Note]) -> None:
        assert isinstance(session, ShopSession)
        assert not session.autoflush
        assert session.connection() is connection
        assert session.bind is connection
        seen.append(session)

    with ShopSession(bind=connection, autoflush=False, join_transaction_mode="create_savepoint") as session:
        repo.enqueue_many(session, [Note(), Note()])
        drain(session, handling(look), raise_errors=True)
        assert len({id(one) for one in [session, *seen]}) == 3


class RoutingSession(Session):
    """Its tables are on the connections that a test has put there."""

    connections: dict[str, sa.Connection]

    def get_bind(self, mapper: Any = None, *, clause: Any = None, **_: Any) -> sa.Connection:
        name = "jobs" if mapper is not None and mapper.class_ is JobRecord else "shop"
        return self.connections[name]


def test_a_session_that_routes_does_so_for_handlers(engine: Engine, empty_database_url: URL) -> None:
    other = sa.create_engine(empty_database_url)
    with other.connect() as shop, engine.connect() as jobs, shop.begin(), jobs.begin():
        Effect.__table__.create(shop)  # type: ignore[attr-defined]
        with RoutingSession(join_transaction_mode="create_savepoint") as session:
            session.connections = {"jobs": jobs, "shop": shop}
            repo.enqueue(session, Note(text="one"))
            assert len(drain(session, noting(), raise_errors=True).done) == 1
            assert shop.scalars(sa.select(Effect.worker)).all() == ["one"]
        jobs.get_transaction().rollback()  # type: ignore[union-attr]
        shop.get_transaction().rollback()  # type: ignore[union-attr]
    other.dispose()


@pytest.mark.parametrize("verb", ["commit", "rollback", "close", "begin"])
def test_a_handler_must_not_end_its_transaction(verb: str, session: Session) -> None:
    repo.enqueue(session, Note(text="one"))
    drained = drain(session, handling(lambda session, job: getattr(session, verb)()))
    assert isinstance(drained.failed[0].error, CommitRefused)
    assert (effects(session), statuses(session)) == ([], ["queued"])


def test_a_failure_after_a_flush_leaves_nothing_and_the_rest_runs(session: Session) -> None:
    def fail(session: Session, job: Job[Note]) -> None:
        repo.enqueue(session, Note(text="of the failed"))
        session.flush()
        if job.payload.text == "bad":
            raise ValueError("boom")

    handlers = handling(fail)
    repo.enqueue(session, Note(text="bad"))
    drained = drain(session, handlers)
    assert [str(run.error) for run in drained.failed] == ["boom"]
    assert (effects(session), statuses(session)) == ([], ["queued"])
    repo.enqueue(session, "good", {})
    handlers.handler("good")(lambda session, job: leave(session, job, "good"))
    drain(session, handlers)
    assert effects(session) == ["good"]


def test_a_swallowed_sql_error_is_found(session: Session) -> None:
    def swallow(session: Session, job: Job[Note]) -> None:
        with pytest.raises(sa.exc.DBAPIError):
            session.execute(sa.text("SELECT 1/0"))

    repo.enqueue(session, Note(text="one"))
    assert isinstance(drain(session, handling(swallow)).failed[0].error, TransactionAborted)
    assert (effects(session), statuses(session)) == ([], ["queued"])


def test_a_handlers_own_savepoint_is_its_own(session: Session) -> None:
    def nested(session: Session, job: Job[Note]) -> None:
        savepoint = session.begin_nested()
        leave(session, job, "rolled back")
        repo.enqueue(session, Note(text="rolled back"))
        session.flush()
        savepoint.rollback()
        with session.begin_nested():
            leave(session, job, "kept")

    repo.enqueue(session, Note(text="one"))
    assert len(drain(session, handling(nested)).done) == 1
    assert effects(session) == ["one", "kept"]


def test_a_handler_that_never_uses_its_session_is_done(session: Session) -> None:
    handlers = HandlerRegistry()
    handlers.handler(Note)(lambda session, job: None)
    repo.enqueue(session, Note())
    assert len(drain(session, handlers).done) == 1
    assert statuses(session) == ["done"]


def test_hold_lock_locks_the_row_before_the_handlers_first_statement(session: Session, engine: Engine) -> None:
    with StatementRecorder(engine) as recorder:
        repo.enqueue(session, Note(text="one"))
        assert len(drain(session, noting(hold_lock=True)).done) == 1
    (locked,) = [text for text in recorder.matching("set_config(") if "FOR NO KEY UPDATE" in text]
    (effect,) = recorder.matching("INSERT INTO shop_effect")
    assert recorder.texts.index(locked) < recorder.texts.index(effect)


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_handler_that_ends_the_whole_transaction_is_reported(end: str, session: Session) -> None:
    repo.enqueue(session, Note())
    handlers = handling(lambda session, job: getattr(session.connection(), end)())
    with pytest.raises(SessionError, match="was ended while the handler of kind 'note' ran"):
        drain(session, handlers)


def test_a_handler_may_drain_in_turn(session: Session) -> None:
    inner = noting()
    outer = HandlerRegistry()

    @outer.handler("outer")
    def outside(session: Session, job: Job[dict[str, Any]]) -> None:
        repo.enqueue(session, Note(text="inner"))
        assert len(drain(session, inner).done) == 1
        leave(session, job, "outer")

    repo.enqueue(session, "outer", {})
    assert len(drain(session, outer, raise_errors=True).done) == 1
    assert effects(session) == ["inner", "outer"]
    assert statuses(session) == ["done", "done"]


def test_the_sessions_objects_show_what_handlers_did(connection: sa.Connection) -> None:
    with Session(bind=connection, expire_on_commit=False, join_transaction_mode="create_savepoint") as session:
        session.add(order := Order(ref="A-1", total=1))
        repo.enqueue(session, Note())
        session.commit()
        drain(session, handling(lambda session, job: session.execute(sa.update(Order).values(total=2))))
        assert order.total == 2


def test_a_scoped_session_gives_handlers_theirs(connection: sa.Connection) -> None:
    factory = sessionmaker(bind=connection, join_transaction_mode="create_savepoint")
    scoped = scoped_session(factory)
    handlers = HandlerRegistry()

    @handlers.handler(Note)
    def note(session: Session, job: Job[Note]) -> None:
        assert scoped() is session
        leave(scoped(), job, job.payload.text)

    own = scoped()
    repo.enqueue(scoped, Note(text="one"))
    assert len(drain(scoped, handlers, raise_errors=True).done) == 1
    assert scoped() is own
    assert effects(own) == ["one"]
    scoped.remove()


# -- how an attempt ends ------------------------------------------------------------------------------------------


def raising(error: BaseException) -> Callable[[Session, Job[Note]], None]:
    def body(session: Session, job: Job[Note]) -> None:
        raise error

    return body


def test_snooze_cancel_and_retry_end_an_attempt_as_for_a_worker(session: Session) -> None:
    def end(session: Session, job: Job[Note]) -> None:
        raise {"snooze": Snooze(60), "cancel": Cancel("gone"), "retry": Retry(60)}[job.payload.text]

    for text in ("snooze", "cancel", "retry"):
        repo.enqueue(session, Note(text=text))
    drained = drain(session, handling(end), raise_errors=True)
    assert (len(drained.snoozed), len(drained.cancelled), len(drained.failed), len(drained)) == (1, 1, 1, 3)
    rows = session.execute(sa.select(JobRecord.status, JobRecord.attempt, JobRecord.last_error).order_by(JobRecord.id))
    snoozed, cancelled, retried = rows
    assert snoozed == (JobStatus.QUEUED, 0, None)
    assert cancelled == (JobStatus.CANCELLED, 1, "gone")
    assert (retried.status, retried.attempt) == (JobStatus.QUEUED, 1)
    assert effects(session) == []


def test_a_failure_is_recorded_and_waits_for_its_retry(session: Session) -> None:
    handle = repo.enqueue(session, Note())
    drained = drain(session, handling(raising(ValueError("boom"))))
    assert [(run.id, run.kind, run.number, run.status) for run in drained.failed] == [(handle.id, "note", 1, "queued")]
    job = repo.get(session, handle.id)
    assert job is not None
    assert "ValueError: boom" in (job.last_error or "")
    assert job.run_at > dt.datetime.now(dt.UTC) + dt.timedelta(seconds=50)
    assert len(drain(session, handling(raising(ValueError("boom"))))) == 0


def test_a_job_that_always_fails_is_dead_after_its_attempts(session: Session) -> None:
    repo.enqueue(session, Note(), max_attempts=3)
    drained = drain(session, handling(raising(ValueError("boom"))), with_scheduled=True)
    assert [(run.number, run.status) for run in drained.failed] == [(1, "queued"), (2, "queued"), (3, "dead")]
    assert statuses(session) == ["dead"]


def test_a_stored_payload_that_does_not_fit_fails_its_job(session: Session) -> None:
    repo.enqueue(session, "note", {"text": 7})
    drained = drain(session, noting())
    assert isinstance(drained.failed[0].error, PayloadError)


def test_the_first_error_is_raised_when_asked_with_its_traceback(session: Session) -> None:
    repo.enqueue_many(session, [Note(), Note()])
    with pytest.raises(ValueError, match="boom") as caught:
        drain(session, handling(raising(ValueError("boom"))), raise_errors=True)
    assert any(entry.name == "body" for entry in caught.traceback)
    assert (statuses(session), effects(session)) == (["queued", "queued"], [])
    assert session.scalars(sa.select(JobRecord.attempt).order_by(JobRecord.id)).all() == [1, 0]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), pytest.fail.Exception("failed")], ids=["interrupt", "fail"])
def test_what_must_stop_a_test_stops_it(error: BaseException, session: Session) -> None:
    repo.enqueue(session, Note())
    with pytest.raises(type(error)):
        drain(session, handling(raising(error)))
    assert effects(session) == []


def test_a_plain_handler_that_ran_too_long_has_failed(session: Session) -> None:
    deadlines = []

    def slow(session: Session, job: Job[Note]) -> None:
        deadlines.append(job.deadline)
        assert job.deadline is not None
        while dt.datetime.now(dt.UTC) <= job.deadline:
            time.sleep(0.001)

    repo.enqueue(session, Note())
    assert isinstance(drain(session, handling(slow, timeout=0.01)).failed[0].error, HandlerTimeout)
    assert effects(session) == []
    assert deadlines[0] is not None


def test_a_handler_that_takes_its_own_job_away_has_failed(session: Session) -> None:
    repo.enqueue(session, Note(text="one"))
    drained = drain(session, handling(lambda session, job: session.execute(sa.delete(JobRecord))))
    assert isinstance(drained.failed[0].error, LeaseLost)
    assert (effects(session), statuses(session)) == ([], ["queued"])


def test_a_conflict_runs_the_handler_again_in_the_same_attempt(session: Session) -> None:
    runs = []

    def conflict(session: Session, job: Job[Note]) -> None:
        runs.append(job.attempt)
        if len(runs) == 1:
            session.execute(sa.text("DO $$ BEGIN RAISE EXCEPTION 'deadlock' USING ERRCODE = '40P01'; END $$"))

    repo.enqueue(session, Note(text="one"))
    assert len(drain(session, handling(conflict)).done) == 1
    assert (runs, effects(session)) == ([1, 1], ["one"])


def test_a_job_done_is_done_though_a_listener_raises_after_its_commit(session: Session) -> None:
    def listen(session: Session, job: Job[Note]) -> None:
        sa.event.listen(session, "after_commit", raising_listener)

    def raising_listener(session: Session) -> None:
        raise ValueError("of the listener")

    repo.enqueue(session, Note(text="one"))
    assert len(drain(session, handling(listen)).done) == 1
    assert (effects(session), statuses(session)) == (["one"], ["done"])


def test_the_last_attempt_has_begun_when_its_handler_runs(session: Session) -> None:
    started = []

    def look(session: Session, job: Job[Note]) -> None:
        started.append(session.scalars(sa.select(JobRecord.started_at)).one())

    repo.enqueue(session, Note(), max_attempts=1)
    drain(session, handling(look), raise_errors=True)
    assert started[0] is not None


def test_handlers_see_the_resources(session: Session) -> None:
    seen = []
    repo.enqueue(session, Note())
    drain(session, handling(lambda session, job: seen.append(job.resources)), resources="client")
    assert seen == ["client"]


def test_what_was_drained_is_readable(session: Session) -> None:
    repo.enqueue(session, Note(text="good"))
    assert repr(drain(session, noting())) == "<Drained 1 done>"
    assert repr(drain(session, noting())) == "<Drained nothing was due>"
    handle = repo.enqueue(session, Note(), max_attempts=1)
    drained = drain(session, handling(raising(ValueError("boom"))))
    assert repr(drained) == f"<Drained 1 failed <note {handle.id}, attempt 1 failed, dead: ValueError: boom>>"
    assert repr(drained.failed) == f"[<note {handle.id}, attempt 1 failed, dead: ValueError: boom>]"


def test_arguments_are_checked_before_anything_runs(session: Session, engine: Engine) -> None:
    repo.enqueue(session, Note(text="one"))
    wrong: Any
    for wrong, error, message in [
        ({"handlers": {}}, ConfigurationError, "handlers must be a HandlerRegistry"),
        ({"queues": "mail"}, InvalidOption, "queues must be a list of names"),
        ({"queues": [""]}, InvalidOption, "queue must not be empty"),
        ({"limit": 0}, InvalidOption, "limit must be an integer from 1"),
        ({"record": Order}, ConfigurationError, "record must be a mapped class"),
        ({"session": sessionmaker(engine)}, SessionError, "of a sessionmaker make a session first"),
    ]:
        with pytest.raises(error, match=message):
            drain(**{"session": session, "handlers": noting(), **wrong})
    assert len(drain(session, noting())) == 1


# -- async --------------------------------------------------------------------------------------------------------


def test_an_async_handler_needs_an_async_session(session: Session) -> None:
    handlers = HandlerRegistry()
    ran = []

    @handlers.handler(Note)
    async def note(session: AsyncSession, job: Job[Note]) -> None:
        ran.append(job)

    handle = repo.enqueue(session, Note())
    with pytest.raises(ConfigurationError, match=r"kind 'note' is async.*give it an AsyncSession"):
        drain(session, handlers)
    job = repo.get(session, handle.id)
    assert job is not None
    assert (job.status, job.attempt, ran) == (JobStatus.QUEUED, 0, [])


class ShopAsyncSession(AsyncSession):
    """An application's own."""


async def test_async_handlers_get_an_async_session_on_the_same_connection(any_async_engine: AsyncEngine) -> None:
    handlers = HandlerRegistry()

    async with any_async_engine.connect() as connection:
        outer = await connection.begin()

        @handlers.handler(Note)
        async def note(session: AsyncSession, job: Job[Note]) -> None:
            assert isinstance(session, ShopAsyncSession)
            assert isinstance(session.sync_session, ShopSession)
            assert (await session.connection()).sync_connection is connection.sync_connection
            leave(session, job, job.payload.text)

        async with ShopAsyncSession(
            bind=connection, sync_session_class=ShopSession, join_transaction_mode="create_savepoint"
        ) as session:
            repo.enqueue(session, Note(text="one"))
            await drain(session, handlers, raise_errors=True)
            assert (await session.scalars(sa.select(Effect.worker))).all() == ["one"]
        await outer.rollback()


async def test_async_handlers_end_as_plain_ones_do(async_session: AsyncSession) -> None:
    handlers = HandlerRegistry()

    @handlers.handler(Note, timeout=1, wait=tenacity.wait_fixed(60))  # a statement within it takes less
    async def note(session: AsyncSession, job: Job[Note]) -> None:
        leave(session, job, job.payload.text)
        await session.flush()
        match job.payload.text:
            case "slow":
                await asyncio.Event().wait()
            case "snooze":
                raise Snooze(60)
            case "cancel":
                raise Cancel
            case "commit":
                await session.commit()
            case "swallow":
                with pytest.raises(sa.exc.DBAPIError):
                    await session.execute(sa.text("SELECT 1/0"))
            case "cancelled":
                raise asyncio.CancelledError

    for text in ("slow", "snooze", "cancel", "commit", "swallow", "cancelled", "good"):
        repo.enqueue(async_session, Note(text=text), concurrency_key="key")
    drained = await drain(async_session, handlers)
    assert [type(run.error) for run in drained.runs] == [
        HandlerTimeout,
        Snooze,
        Cancel,
        CommitRefused,
        TransactionAborted,
        asyncio.CancelledError,
        type(None),
    ]
    assert (await async_session.scalars(sa.select(Effect.worker))).all() == ["good"]
    assert await async_session.run_sync(statuses) == ["queued"] * 2 + ["cancelled"] + ["queued"] * 3 + ["done"]


async def test_a_timeout_within_a_statement_may_end_the_drain_and_says_so(async_session: AsyncSession) -> None:
    handlers = HandlerRegistry()

    @handlers.handler(Note, timeout=0.05)
    async def note(session: AsyncSession, job: Job[Note]) -> None:
        await session.execute(sa.text("SELECT pg_sleep(20)"))

    repo.enqueue(async_session, Note())
    with pytest.raises(SessionError, match="by a timeout within a statement") as caught:
        await drain(async_session, handlers)
    assert isinstance(caught.value.__cause__, HandlerTimeout)


async def test_a_cancelled_test_is_not_a_failed_job(async_session: AsyncSession) -> None:
    handlers = HandlerRegistry()
    running = asyncio.Event()

    @handlers.handler(Note)
    async def note(session: AsyncSession, job: Job[Note]) -> None:
        running.set()
        await asyncio.Event().wait()

    repo.enqueue(async_session, Note())
    task = asyncio.ensure_future(drain(async_session, handlers))
    await running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_async_sessions_objects_can_be_read_after_a_drain(async_session: AsyncSession) -> None:
    handlers = HandlerRegistry()

    @handlers.handler(Note)
    async def note(session: AsyncSession, job: Job[Note]) -> None:
        await session.execute(sa.update(Order).values(total=2))
        await session.execute(sa.delete(Order).where(Order.ref == "gone"))

    async_session.add_all([order := Order(ref="A-1", total=1), Order(ref="gone")])
    repo.enqueue(async_session, Note())
    await async_session.flush()
    await drain(async_session, handlers, raise_errors=True)
    assert (order.total, order.ref) == (2, "A-1")


async def test_an_async_scoped_session_gives_async_handlers_theirs(any_async_engine: AsyncEngine) -> None:
    async with any_async_engine.connect() as connection:
        outer = await connection.begin()
        factory = async_sessionmaker(connection, join_transaction_mode="create_savepoint")
        scoped = async_scoped_session(factory, scopefunc=asyncio.current_task)
        handlers = HandlerRegistry()

        @handlers.handler(Note)
        async def note(session: AsyncSession, job: Job[Note]) -> None:
            assert scoped() is session

        own = scoped()
        repo.enqueue(scoped, Note())
        assert len((await drain(scoped, handlers, raise_errors=True)).done) == 1
        assert scoped() is own
        await assert_enqueued(scoped, Note, {"status": "done"})
        await scoped.remove()
        await outer.rollback()


# -- assert_enqueued ----------------------------------------------------------------------------------------------


class Awkward(JobPayload, kind="awkward"):
    """Fields with the names of parameters."""

    session: int
    kind: str
    queue: str
    where: str = ""
    record: str = ""
    payload: str = ""
    at: dt.datetime | None = None


def test_jobs_are_found_by_the_fields_of_their_payload(session: Session) -> None:
    at = dt.datetime(2030, 1, 1, tzinfo=dt.UTC)
    first = repo.enqueue(session, SendReceipt(order_id=1))
    repo.enqueue(session, SendReceipt(order_id=2))
    third = repo.enqueue(session, SendReceipt(order_id=1), delay=60)
    repo.enqueue(session, Awkward(session=1, kind="k", queue="q", where="w", record="r", payload="p", at=at))
    repo.enqueue(session, "by_name", {"session": 7, "list": [1, 2]})
    assert [job.id for job in assert_enqueued(session, SendReceipt, order_id=1)] == [first.id, third.id]
    [job] = assert_enqueued(session, SendReceipt, order_id=2)
    assert (job.queue, job.max_attempts) == ("mail", 8)
    fields = {"session": 1, "kind": "k", "queue": "q", "where": "w", "record": "r", "payload": "p"}
    assert_enqueued(session, Awkward, **fields, at=at)
    assert_enqueued(session, "by_name", session=7, list=[1, 2])
    refute_enqueued(session, Awkward, queue="another")
    refute_enqueued(session, "by_name", missing=None)
    refute_enqueued(session, "another")


def test_jobs_are_found_by_their_columns(session: Session) -> None:
    repo.enqueue(session, Note(text="a"), queue="mail", priority=5, unique_key="k", meta={"by": "me"})
    assert_enqueued(session, Note, {"queue": "mail", "priority": 5, "unique_key": "k", "meta": {"by": "me"}}, text="a")
    refute_enqueued(session, Note, {"queue": "default"})
    refute_enqueued(session, Note, {"priority": "five"})
    drain(session, noting())
    refute_enqueued(session, Note)
    assert_enqueued(session, Note, {"status": "done"})


def test_a_failed_assertion_shows_what_is_there(session: Session) -> None:
    with pytest.raises(AssertionError) as nothing:
        assert_enqueued(session, Note)
    assert str(nothing.value) == "there is no queued job of kind 'note'; the session sees no jobs at all"
    for number in range(12):
        repo.enqueue(session, SendReceipt(order_id=number))
    repo.enqueue(session, Note(text="x" * 300))
    repo.enqueue(session, "unfit", {})
    with pytest.raises(AssertionError) as caught:
        assert_enqueued(session, Note, {"queue": "mail"}, text="a")
    lines = str(caught.value).splitlines()
    assert lines[0] == ("there is no queued job of kind 'note' with queue='mail', payload.text='a'; the session sees:")
    assert lines[1].startswith('  note {"text": "xxx')
    assert lines[1].endswith("x... queued in queue 'default'")
    assert lines[2:4] == [
        "  unfit {} queued in queue 'default'",
        "  send_receipt {\"order_id\": 11} queued in queue 'mail'",
    ]
    assert len(lines) == 12
    assert lines[-1] == "  and 4 more"
    with pytest.raises(AssertionError, match=r"^there should be no queued job of kind 'note'; the session sees 1:"):
        refute_enqueued(session, Note)


def test_what_is_asked_for_must_exist(session: Session) -> None:
    repo.enqueue(session, Note())
    wrong: Any = Order
    for where, fields, error in [
        ({}, {"txt": "a"}, "Note has no field 'txt': its fields are text"),
        ({"que": "mail"}, {}, "JobRecord has no column 'que': its columns are .*queue"),
        ({"status": "ready"}, {}, "unknown job status 'ready'"),
    ]:
        for function in (assert_enqueued, refute_enqueued):
            with pytest.raises(InvalidOption, match=error):
                function(session, Note, where, **fields)
    with pytest.raises(InvalidOption, match="give a JobPayload class or a kind's name"):
        assert_enqueued(session, wrong)
    assert_enqueued(session, Note)


async def test_assertions_are_awaited_with_an_async_session(async_session: AsyncSession) -> None:
    repo.enqueue(async_session, Note(text="a"))
    [job] = await assert_enqueued(async_session, Note, text="a")
    await refute_enqueued(async_session, Note, text="b")
    with pytest.raises(AssertionError):
        await assert_enqueued(async_session, Note, text="b")
    await drain(async_session, noting())
    assert job.status is JobStatus.DONE


class OwnBase(DeclarativeBase):
    pass


class AppJob(JobRecordMixin, OwnBase):
    __tablename__ = "app_job"

    tenant: Mapped[int | None]


def test_an_applications_own_job_class_is_drained_and_found(connection: sa.Connection, session: Session) -> None:
    OwnBase.metadata.create_all(connection)
    own = JobRepository(AppJob)
    own.enqueue(session, Note(text="own"), values={"tenant": 7})
    repo.enqueue(session, Note(text="other"))
    [job] = assert_enqueued(session, Note, {"tenant": 7}, AppJob)
    assert job.tenant == 7
    refute_enqueued(session, Note, {"tenant": 8}, AppJob)
    assert len(drain(session, noting(), record=AppJob).done) == 1
    assert effects(session) == ["own"]
    assert job.status is JobStatus.DONE


# -- the examples of the documentation, run by pytest itself ---------------------------------------------------------

PAGE = Path(__file__).parents[1] / "docs" / "testing.md"


@pytest.mark.slow
def test_the_fixtures_and_tests_of_the_documentation_pass(
    pytester: pytest.Pytester, database_url: URL, observer: Observer
) -> None:
    page = PAGE.read_text().replace(
        "postgresql+psycopg://localhost/shop", database_url.render_as_string(hide_password=False)
    )
    files: dict[str, str] = {}
    for name, source in re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        files[name] = files.get(name, "") + source
    hidden = re.search(r"^<!-- run:\n(.*?)^jobs = ", page, re.MULTILINE | re.DOTALL)
    assert hidden is not None
    package = pytester.mkpydir("shop")
    (package / "models.py").write_text("from tests.shop import Order, Receipt\n")
    (package / "jobs.py").write_text(hidden[1])
    for name, source in files.items():
        (pytester.path / name).write_text(source)
    root = Path(__file__).parents[1]
    pytester.makeini(
        f"[pytest]\npythonpath = . {shlex.quote(str(root))} {shlex.quote(str(root / 'src'))}\nfilterwarnings = error\n"
        "asyncio_default_fixture_loop_scope = function\n"
    )
    result = pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    result.assert_outcomes(passed=len(files) - 1)
    assert nothing_is_committed(observer)


# -- sessions of the application's own make ---------------------------------------------------------------------------


def test_a_session_class_with_arguments_of_its_own(connection: sa.Connection) -> None:
    """As an extension of a web framework has it: nobody here knows what its __init__ takes."""

    class OwnSession(Session):
        def __init__(self, application: str, **options: Any) -> None:
            super().__init__(**options)
            self.application = application

    seen: list[Any] = []
    handlers = HandlerRegistry()

    @handlers.handler(Note)
    def handle(session: OwnSession, job: Job[Note]) -> None:
        seen.append((session.application, session.info["tenant"]))
        session.add(Order(ref=job.payload.text))

    options: dict[str, Any] = {"join_transaction_mode": "create_savepoint", "info": {"tenant": "a"}}
    with OwnSession("shop", bind=connection, **options) as session:
        repo.enqueue(session, Note(text="A-1"))
        assert len(drain(session, handlers).done) == 1
        assert session.scalars(sa.select(Order.ref)).all() == ["A-1"]
    assert seen == [("shop", "a")]


async def test_an_async_session_class_with_arguments_of_its_own(any_async_engine: AsyncEngine) -> None:
    class OwnSession(AsyncSession):
        def __init__(self, application: str, **options: Any) -> None:
            super().__init__(**options)
            self.application = application

    seen: list[str] = []
    handlers = HandlerRegistry()

    @handlers.handler(Note)
    async def handle(session: OwnSession, job: Job[Note]) -> None:
        seen.append(session.application)
        session.add(Order(ref=job.payload.text))

    async with any_async_engine.connect() as connection:
        options: dict[str, Any] = {"join_transaction_mode": "create_savepoint"}
        async with OwnSession("shop", bind=connection, **options) as session:
            repo.enqueue(session, Note(text="A-1"))
            assert len((await drain(session, handlers)).done) == 1
            assert (await session.scalars(sa.select(Order.ref))).all() == ["A-1"]
    assert seen == ["shop"]
