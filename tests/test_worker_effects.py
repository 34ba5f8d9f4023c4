"""A handler's effects and its job's status are one commit, whatever the worker is bound to."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
import tenacity
from sqlalchemy import URL, Engine, create_engine, event
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from enlist import HandlerRegistry, Job, JobPayload, JobRepository, JobStatus, Worker
from tests.shop import Counter, Effect, Order, Receipt
from tests.support import Observer, StatementRecorder
from tests.support.jobs import Jobs, running


@pytest.fixture
def jobs(observer: Observer) -> Jobs:
    return Jobs(observer)


class SendReceipt(JobPayload, kind="send_receipt", max_attempts=3):
    order_id: int


class AppSession(Session):
    """An application's own session class."""


class AppAsyncSession(AsyncSession):
    """The same for asyncio."""


def both(seen: list[Any] | None = None) -> HandlerRegistry:
    """A plain and an async handler that leave an effect."""
    handlers = HandlerRegistry()

    @handlers.handler("plain", wait=tenacity.wait_fixed(0.05))
    def plain(session: Session, job: Job[dict[str, Any]]) -> None:
        if seen is not None:
            seen.append(session)
        session.add(Effect(job_id=job.id, attempt=job.attempt, worker="plain"))

    @handlers.handler("async", wait=tenacity.wait_fixed(0.05))
    async def asynchronous(session: AsyncSession, job: Job[dict[str, Any]]) -> None:
        if seen is not None:
            seen.append(session)
        session.add(Effect(job_id=job.id, attempt=job.attempt, worker="async"))

    return handlers


def only(kind: str, handlers: HandlerRegistry) -> HandlerRegistry:
    chosen = HandlerRegistry()
    chosen.handler(kind, wait=tenacity.wait_fixed(0.05))(handlers[kind].function)
    return chosen


def committed_together(observer: Observer, job_id: uuid.UUID) -> bool:
    """Whether the job's row and its one effect were written by the same transaction."""
    return bool(
        observer.scalar(
            "SELECT count(*) = 1 AND bool_and(job.xmin = effect.xmin) FROM enlist_job AS job"
            " JOIN shop_effect AS effect ON effect.job_id = job.id WHERE job.id = %s AND job.status = 'done'",
            job_id,
        )
    )


# -- the whole line ------------------------------------------------------------------------------------------


def test_from_enqueue_to_the_receipt(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    repo = JobRepository()
    handlers = HandlerRegistry()
    seen: list[Job[SendReceipt]] = []

    @handlers.handler(SendReceipt)
    def send_receipt(session: Session, job: Job[SendReceipt]) -> None:
        seen.append(job)
        session.add(Receipt(order_id=job.payload.order_id))

    with running(Worker(engine, handlers)):
        with Session(engine) as session, session.begin():
            order = Order(ref="a")
            session.add(order)
            handle = repo.enqueue(session, lambda o: SendReceipt(order_id=o.id), of=order, meta={"by": "test"})
        assert jobs.wait(handle.id)["status"] == "done"
    (job,) = seen
    assert observer.rows("SELECT order_id FROM shop_receipt") == [(job.payload.order_id,)]
    assert isinstance(job.payload, SendReceipt)
    assert (job.id, job.kind, job.queue, job.attempt, job.max_attempts) == (handle.id, "send_receipt", "default", 1, 3)
    assert job.meta == {"by": "test"}
    assert (job.idempotency_key, job.deadline, job.resources, job.cancel_requested) == (str(job.id), None, None, False)


def test_a_handler_may_enqueue_in_its_own_transaction(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    """The follow-up is there with the commit, or not at all, and runs next."""
    repo = JobRepository()
    handlers = HandlerRegistry()

    @handlers.handler("first", wait=tenacity.wait_fixed(0.05))
    def first(session: Session, job: Job[dict[str, Any]]) -> None:
        repo.enqueue(session, "second", {"attempt": job.attempt})
        if job.attempt == 1:
            session.flush()
            raise ValueError("the first time")

    @handlers.handler("second")
    def second(session: Session, job: Job[dict[str, Any]]) -> None:
        session.add(Effect(job_id=job.id, attempt=job.payload["attempt"]))

    jobs.add("first")
    with running(Worker(engine, handlers, poll_interval=5)):
        observer.wait_for("SELECT count(*) = 1 FROM enlist_job WHERE kind = 'second' AND status = 'done'")
    assert observer.rows("SELECT attempt FROM shop_effect") == [(2,)]
    assert jobs.counts() == {"done": 2}


# -- binds ---------------------------------------------------------------------------------------------------


def _engine(url: URL) -> Any:
    return create_engine(url, pool_size=5)


def _async_psycopg(url: URL) -> Any:
    return create_async_engine(url)


def _async_asyncpg(url: URL) -> Any:
    return create_async_engine(url.set(drivername="postgresql+asyncpg"))


BINDS: dict[str, Callable[[URL], Any]] = {
    "Engine": _engine,
    "sessionmaker": lambda url: sessionmaker(_engine(url), class_=AppSession, expire_on_commit=False),
    "scoped_session": lambda url: scoped_session(sessionmaker(_engine(url))),
    "AsyncEngine of psycopg": _async_psycopg,
    "AsyncEngine of asyncpg": _async_asyncpg,
    "async_sessionmaker": lambda url: async_sessionmaker(_async_asyncpg(url), class_=AppAsyncSession),
    "async_scoped_session": lambda url: async_scoped_session(
        async_sessionmaker(_async_psycopg(url)), scopefunc=asyncio.current_task
    ),
    "autobegin=False": lambda url: sessionmaker(_engine(url), autobegin=False),
    "autoflush=False": lambda url: sessionmaker(_engine(url), autoflush=False),
    "twophase=True": lambda url: sessionmaker(_engine(url), twophase=True),
}


def _dispose(bind: Any) -> None:
    if isinstance(bind, (scoped_session, async_scoped_session)):
        bind = bind.session_factory
    engine = getattr(bind, "kw", {}).get("bind", bind)
    (engine.sync_engine if isinstance(engine, AsyncEngine) else engine).dispose()


@pytest.mark.parametrize("name", BINDS)
def test_plain_and_async_handlers_side_by_side_on_any_bind(
    name: str, database_url: URL, jobs: Jobs, observer: Observer
) -> None:
    bind = BINDS[name](database_url)
    ids = [jobs.add(kind) for _ in range(5) for kind in ("plain", "async")]
    with running(Worker(bind, both(), poll_interval=0.05)):
        for job_id in ids:
            assert jobs.wait(job_id)["status"] == "done", jobs.row(job_id)["last_error"]
    _dispose(bind)
    assert all(committed_together(observer, job_id) for job_id in ids)
    assert dict(observer.rows("SELECT worker, count(*) FROM shop_effect GROUP BY worker")) == {"plain": 5, "async": 5}


def test_each_world_may_have_a_bind_of_its_own(
    engine: Engine, database_url: URL, jobs: Jobs, observer: Observer
) -> None:
    own = create_async_engine(database_url.set(drivername="postgresql+asyncpg"))
    ids = [jobs.add("plain"), jobs.add("async")]
    with (
        StatementRecorder(engine) as plain,
        running(Worker(engine, both(), async_bind=async_sessionmaker(own), poll_interval=0.05)),
    ):
        for job_id in ids:
            jobs.wait(job_id)
    assert all(committed_together(observer, job_id) for job_id in ids)
    assert len(plain.matching("INSERT INTO shop_effect")) == 1
    own.sync_engine.dispose()


def test_the_handlers_session_is_of_the_applications_class(database_url: URL, jobs: Jobs) -> None:
    engine = create_engine(database_url)
    own = create_async_engine(database_url)
    seen: list[Any] = []
    ids = [jobs.add("plain"), jobs.add("async")]
    worker = Worker(
        sessionmaker(engine, class_=AppSession, info={"app": 1}),
        both(seen),
        async_bind=async_sessionmaker(own, class_=AppAsyncSession),
        poll_interval=0.05,
    )
    with running(worker):
        for job_id in ids:
            jobs.wait(job_id)
    engine.dispose()
    own.sync_engine.dispose()
    assert any(isinstance(session, AppSession) and session.info["app"] == 1 for session in seen)
    assert any(isinstance(session, AppAsyncSession) for session in seen)


def test_the_scoped_session_is_the_handlers_during_the_attempt(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    """Application code that reaches for its global session takes part in the job's transaction."""
    scoped = scoped_session(sessionmaker(engine))
    handlers = HandlerRegistry()
    same: list[bool] = []

    @handlers.handler("plain")
    def plain(session: Session, job: Job[dict[str, Any]]) -> None:
        same.append(scoped() is session)
        scoped.add(Effect(job_id=job.id))

    ids = jobs.add_many("plain", 10)
    with running(Worker(scoped, handlers, queues={"default": 3}, poll_interval=0.05)):
        jobs.wait_all()
    assert same == [True] * 10
    assert all(committed_together(observer, job_id) for job_id in ids)
    assert not scoped.registry.has()


def test_the_engines_listeners_and_options_serve_handlers_too(database_url: URL, jobs: Jobs) -> None:
    """For an AsyncEngine the worker has a pool of its own, made as the application's is."""
    engine, plain = create_async_engine(database_url), create_engine(database_url)
    names: list[str] = []

    @event.listens_for(engine.sync_engine, "connect")
    def connected(connection: Any, record: object) -> None:
        cursor = connection.cursor()
        cursor.execute("SET application_name = 'listened'")
        cursor.close()
        connection.commit()

    handlers = HandlerRegistry()

    @handlers.handler("async")
    async def asynchronous(session: AsyncSession, job: Job[dict[str, Any]]) -> None:
        names.append(str(await session.scalar(sa.text("SHOW application_name"))))

    job_id = jobs.add("async")
    with running(Worker(engine, handlers, sync_bind=plain, poll_interval=0.05)):
        jobs.wait(job_id)
    engine.sync_engine.dispose()
    plain.dispose()
    assert names == ["listened"]


# -- exactly once --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "async"])
def test_effects_are_committed_with_the_status_or_not_at_all(
    kind: str, engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    """The first attempts write, then fail: what is counted in the end is counted once."""
    handlers = HandlerRegistry()
    observer.execute("INSERT INTO shop_counter (name, value) VALUES ('runs', 0)")
    bump = sa.update(Counter).where(Counter.name == "runs").values(value=Counter.value + 1)

    if kind == "plain":

        @handlers.handler("work", wait=tenacity.wait_fixed(0))
        def plain(session: Session, job: Job[dict[str, Any]]) -> None:
            session.execute(bump)
            session.add(Effect(job_id=job.id, attempt=job.attempt))
            session.flush()
            if job.attempt < 3:
                raise ValueError("after the work")

    else:

        @handlers.handler("work", wait=tenacity.wait_fixed(0))
        async def asynchronous(session: AsyncSession, job: Job[dict[str, Any]]) -> None:
            await session.execute(bump)
            session.add(Effect(job_id=job.id, attempt=job.attempt))
            await session.flush()
            if job.attempt < 3:
                raise ValueError("after the work")

    ids = jobs.add_many("work", 20)
    with running(Worker(engine, handlers, poll_interval=0.05)):
        jobs.wait_all()
    assert observer.scalar("SELECT value FROM shop_counter") == 20
    assert all(committed_together(observer, job_id) for job_id in ids)
    assert {jobs.row(job_id)["attempt"] for job_id in ids} == {3}


def test_a_handler_that_does_not_use_its_session_is_done_too(engine: Engine, jobs: Jobs) -> None:
    handlers = HandlerRegistry()
    runs: list[uuid.UUID] = []

    @handlers.handler("plain")
    def plain(session: Session, job: Job[dict[str, Any]]) -> None:
        runs.append(job.id)

    @handlers.handler("async")
    async def asynchronous(session: AsyncSession, job: Job[dict[str, Any]]) -> None:
        runs.append(job.id)

    ids = [*jobs.add_many("plain", 50), *jobs.add_many("async", 50)]
    with StatementRecorder(engine) as statements, running(Worker(engine, handlers, poll_interval=0.05)):
        jobs.wait_all()
    assert sorted(runs) == sorted(ids)
    assert statements.matching("enlist_job") == []  # nothing went over the application's connections


def test_reading_only_commits_as_well(engine: Engine, jobs: Jobs) -> None:
    handlers = HandlerRegistry()

    @handlers.handler("plain")
    def plain(session: Session, job: Job[dict[str, Any]]) -> None:
        assert session.scalar(sa.text("SELECT 1")) == 1

    job_id = jobs.add("plain")
    with StatementRecorder(engine) as statements, running(Worker(engine, handlers, poll_interval=0.05)):
        assert jobs.wait(job_id)["status"] == "done"
    (finish,) = statements.matching("enlist_job")
    assert "UPDATE" in finish
    assert statements.events[-1] == "COMMIT"


def test_a_database_constraint_checked_at_commit_fails_the_attempt(
    engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    """The COMMIT itself may fail: then neither effect nor status is there, and the failure is recorded."""
    observer.execute(
        "ALTER TABLE shop_receipt DROP CONSTRAINT shop_receipt_order_id_fkey, ADD CONSTRAINT late"
        " FOREIGN KEY (order_id) REFERENCES shop_order DEFERRABLE INITIALLY DEFERRED"
    )
    handlers = HandlerRegistry()

    @handlers.handler("plain", wait=tenacity.wait_fixed(600))
    def plain(session: Session, job: Job[dict[str, Any]]) -> None:
        session.add_all([Effect(job_id=job.id), Receipt(order_id=4711)])

    job_id = jobs.add("plain")
    with running(Worker(engine, handlers, poll_interval=0.05)):
        row = jobs.wait_failed(job_id)
    assert (row["status"], row["attempt"]) == ("queued", 1)
    assert "ForeignKeyViolation" in row["last_error"]
    assert jobs.effects(job_id) == []


def test_a_listener_that_raises_after_the_commit_does_not_run_the_job_again(
    engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    class Listened(Session):
        pass

    @event.listens_for(Listened, "after_commit")
    def after_commit(session: Session) -> None:
        raise ValueError("the application's own listener")

    job_id = jobs.add("plain")
    with running(Worker(sessionmaker(engine, class_=Listened), only("plain", both()), poll_interval=0.05)):
        row = jobs.wait(job_id)
    assert (row["status"], row["attempt"], row["last_error"]) == ("done", 1, None)
    assert committed_together(observer, job_id)


# -- no transaction before its time --------------------------------------------------------------------------


def test_no_transaction_is_open_until_a_plain_handler_uses_its_session(
    engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    handlers = HandlerRegistry()
    inside, go, used, end = (threading.Event() for _ in range(4))

    @handlers.handler("plain")
    def plain(session: Session, job: Job[dict[str, Any]]) -> None:
        inside.set()
        go.wait(10)
        session.add(Effect(job_id=job.id))
        session.flush()
        used.set()
        end.wait(10)

    job_id = jobs.add("plain")
    with running(Worker(engine, handlers, lease=0.6, poll_interval=0.05)):
        try:
            assert inside.wait(5)
            before = observer.scalar("SELECT locked_until FROM enlist_job")
            # Long enough for the lease to be renewed: the claim's and the heartbeat's transactions are over as well.
            observer.wait_for("SELECT locked_until > %s FROM enlist_job", before)
            assert _transactions(observer) == 0
            assert _checked_out(engine) == 0
            go.set()
            assert used.wait(5)
            assert _transactions(observer) == 1
            assert _checked_out(engine) == 1
        finally:
            go.set()
            end.set()
        jobs.wait(job_id)
    assert committed_together(observer, job_id)


def test_no_transaction_is_open_until_an_async_handler_uses_its_session(
    engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    handlers = HandlerRegistry()
    inside, go, used, end = (threading.Event() for _ in range(4))

    @handlers.handler("async")
    async def asynchronous(session: AsyncSession, job: Job[dict[str, Any]]) -> None:
        inside.set()
        await asyncio.to_thread(go.wait, 10)
        session.add(Effect(job_id=job.id))
        await session.flush()
        used.set()
        await asyncio.to_thread(end.wait, 10)

    job_id = jobs.add("async")
    with running(Worker(engine, handlers, lease=0.6, poll_interval=0.05)):
        try:
            assert inside.wait(5)
            before = observer.scalar("SELECT locked_until FROM enlist_job")
            observer.wait_for("SELECT locked_until > %s FROM enlist_job", before)
            assert _transactions(observer) == 0
            go.set()
            assert used.wait(5)
            assert _transactions(observer) == 1
        finally:
            go.set()
            end.set()
        jobs.wait(job_id)
    assert committed_together(observer, job_id)


def _transactions(observer: Observer) -> int:
    """How many transactions are open and wait for their client."""
    return int(
        observer.scalar(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            " AND backend_type = 'client backend' AND starts_with(state, 'idle in transaction')"
        )
    )


def _checked_out(engine: Engine) -> int:
    assert isinstance(engine.pool, sa.QueuePool)
    return engine.pool.checkedout()


# -- the rest of what a handler gets -------------------------------------------------------------------------


def test_the_lifespan_is_entered_once_and_left_after_the_last_job(engine: Engine, jobs: Jobs) -> None:
    events: list[Any] = []
    handlers = HandlerRegistry()

    @contextmanager
    def lifespan() -> Any:
        events.append("entered")
        yield {"client": 1}
        events.append("left")

    @handlers.handler("plain")
    def plain(session: Session, job: Job[dict[str, Any]]) -> None:
        events.append(job.resources)

    jobs.add_many("plain", 2)
    with running(Worker(engine, handlers, lifespan=lifespan, poll_interval=0.05)):
        jobs.wait_all()
    assert events == ["entered", {"client": 1}, {"client": 1}, "left"]


def test_a_payload_that_does_not_fit_is_a_failure_of_the_job(engine: Engine, jobs: Jobs) -> None:
    handlers = HandlerRegistry()
    ran: list[int] = []

    @handlers.handler(SendReceipt, wait=tenacity.wait_fixed(600))
    def send_receipt(session: Session, job: Job[SendReceipt]) -> None:
        ran.append(job.payload.order_id)

    wrong = jobs.add("send_receipt", {"order_id": "secret"})
    right = jobs.add("send_receipt", {"order_id": 1})
    with running(Worker(engine, handlers, poll_interval=0.05)):
        row = jobs.wait_failed(wrong)
        assert jobs.wait(right)["status"] == "done"
    assert ran == [1]
    assert row["status"] == JobStatus.QUEUED
    assert f"the payload of job {wrong} does not fit SendReceipt version 1: stored as version 1;" in row["last_error"]
    assert "payload.order_id: Input should be a valid integer" in row["last_error"]
    assert "secret" not in row["last_error"]


@pytest.mark.parametrize("returned", ["coroutine", "generator", "future"])
def test_a_plain_handler_that_returns_what_nobody_runs_fails(returned: str, engine: Engine, jobs: Jobs) -> None:
    handlers = HandlerRegistry()

    async def nothing() -> None: ...

    values: dict[str, Callable[[], Any]] = {
        "coroutine": nothing,
        "generator": lambda: (number for number in range(3)),
        "future": lambda: asyncio.Future(loop=loop),
    }
    loop = asyncio.new_event_loop()

    @handlers.handler("plain", wait=tenacity.wait_fixed(600))
    def plain(session: Session, job: Job[dict[str, Any]]) -> Any:
        session.add(Effect(job_id=job.id))
        return values[returned]()

    job_id = jobs.add("plain")
    with running(Worker(engine, handlers, poll_interval=0.05)):
        row = jobs.wait_failed(job_id)
    loop.close()
    assert row["status"] == "queued"
    assert "make it `async def`" in row["last_error"]
    assert jobs.effects(job_id) == []


def test_a_schema_translate_map_is_the_workers_too(
    database_url: URL, engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    observer.connection.execute("CREATE SCHEMA tenant")
    observer.connection.execute("ALTER TABLE enlist_job SET SCHEMA tenant")
    observer.connection.execute("ALTER TABLE shop_effect SET SCHEMA tenant")
    mapped = engine.execution_options(schema_translate_map={None: "tenant"})
    with Session(mapped) as session, session.begin():
        handles = [JobRepository().enqueue(session, kind, {}) for kind in ("plain", "async")]
    with running(Worker(mapped, both(), poll_interval=0.05)):
        observer.wait_for("SELECT count(*) = 2 FROM tenant.enlist_job WHERE status = 'done'")
    done = observer.rows("SELECT job_id FROM tenant.shop_effect ORDER BY 1")
    assert done == sorted((handle.id,) for handle in handles)


def test_connections_of_another_pool_go_back_as_they_came(database_url: URL, jobs: Jobs) -> None:
    """As with psycopg's own pool, where closing a connection only gives it back."""
    given: list[psycopg.Connection[Any]] = []
    url = database_url.set(drivername="postgresql").render_as_string(hide_password=False)

    class Kept(psycopg.Connection[Any]):
        def close(self) -> None: ...

    def creator() -> psycopg.Connection[Any]:
        given.append(Kept.connect(url))
        return given[-1]

    engine = create_engine("postgresql+psycopg://", creator=creator, poolclass=sa.NullPool)
    jobs.add_many("plain", 3)
    with running(Worker(engine, only("plain", both()), poll_interval=0.05)):
        jobs.wait_all()
    assert {connection.autocommit for connection in given} == {False}
    assert {connection.prepare_threshold for connection in given} == {5}
    for connection in given:
        assert connection.execute("SELECT count(*) FROM pg_listening_channels()").fetchone() == (0,)
        psycopg.Connection.close(connection)
