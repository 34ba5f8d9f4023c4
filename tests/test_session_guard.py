"""A handler's session is enlist's to commit: every other end of its transaction fails the attempt, and says so."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import sqlalchemy as sa
import tenacity
from sqlalchemy import URL, Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import NullPool

from enlist import CommitRefused, HandlerRegistry, Job, Worker
from tests.shop import Effect, Order
from tests.support import Observer
from tests.support.jobs import Jobs, running

LATER = tenacity.wait_fixed(600)


@pytest.fixture
def jobs(observer: Observer) -> Jobs:
    return Jobs(observer)


def run_plain(bind: Any, jobs: Jobs, body: Callable[[Session], object], **options: Any) -> dict[str, Any]:
    """Run one job whose handler writes an effect, flushes, and does ``body``; the job's columns after the attempt.

    A healthy job follows on the same worker, and must succeed.
    """
    handlers = HandlerRegistry()

    @handlers.handler("body", wait=LATER, **options)
    def handler(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))
        session.flush()
        body(session)

    @handlers.handler("healthy", wait=LATER)
    def healthy(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))

    return _run(bind, handlers, jobs)


def run_async(
    bind: Any, jobs: Jobs, body: Callable[[AsyncSession], Coroutine[Any, Any, object]], **options: Any
) -> dict[str, Any]:
    handlers = HandlerRegistry()

    @handlers.handler("body", wait=LATER, **options)
    async def handler(session: AsyncSession, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))
        await session.flush()
        await body(session)

    @handlers.handler("healthy", wait=LATER)
    async def healthy(session: AsyncSession, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))

    return _run(bind, handlers, jobs)


def _run(bind: Any, handlers: HandlerRegistry, jobs: Jobs) -> dict[str, Any]:
    job_id = jobs.add("body", priority=1)
    healthy = jobs.add("healthy")
    with running(Worker(bind, handlers, queues={"default": 1}, poll_interval=0.05)):
        assert jobs.wait(healthy)["status"] == "done"
        row = jobs.wait(job_id, "queued", "done", "dead")
    assert jobs.effects(healthy) == [(1, "")]
    return row


def assert_failed(jobs: Jobs, row: dict[str, Any], message: str) -> None:
    """The attempt failed with the message, and nothing of it is there."""
    assert (row["status"], row["attempt"], row["lost"]) == ("queued", 1, 0)
    assert message in row["last_error"]
    assert jobs.effects(row["id"]) == []


def assert_done(jobs: Jobs, row: dict[str, Any]) -> None:
    assert row["status"] == "done", row["last_error"]
    assert jobs.effects(row["id"]) == [(1, "")]


# -- what is refused -----------------------------------------------------------------------------------------


def _with_begin(session: Session) -> None:
    with session.begin():
        session.add(Order(ref="late"))


def _with_session(session: Session) -> None:
    with session:
        session.add(Order(ref="late"))


def _transaction(session: Session) -> Any:
    transaction = session.get_transaction()
    assert transaction is not None
    return transaction


def _commit_from_a_savepoint(session: Session) -> None:
    session.begin_nested()
    _transaction(session).commit()


def _connection_transaction(session: Session) -> Any:
    transaction = session.connection().get_transaction()
    assert transaction is not None
    return transaction


ENDS: dict[str, tuple[Callable[[Session], object], str]] = {
    "commit()": (lambda session: session.commit(), "the handler called commit() on its session"),
    "rollback()": (lambda session: session.rollback(), "the handler called rollback() on its session"),
    "close()": (lambda session: session.close(), "the handler called close() on its session"),
    "reset()": (lambda session: session.reset(), "the handler called reset() on its session"),
    "invalidate()": (lambda session: session.invalidate(), "the handler called invalidate() on its session"),
    "prepare()": (lambda session: session.prepare(), "the handler called prepare() on its session"),
    "begin()": (lambda session: session.begin(), "the handler called begin() on its session"),
    "with begin()": (_with_begin, "the handler called begin() on its session"),
    "with session": (_with_session, "the handler called close() on its session"),
    "transaction.commit()": (lambda session: _transaction(session).commit(), "commit()"),
    "transaction.commit() in a savepoint": (_commit_from_a_savepoint, "commit()"),
    "transaction.rollback()": (lambda session: _transaction(session).rollback(), ""),
    "transaction.close()": (lambda session: _transaction(session).close(), ""),
    "connection.commit()": (lambda session: session.connection().commit(), "commit() or rollback() of the connection"),
    "connection.rollback()": (lambda session: session.connection().rollback(), ""),
    "connection transaction.commit()": (lambda session: _connection_transaction(session).commit(), ""),
    "connection transaction.rollback()": (lambda session: _connection_transaction(session).rollback(), ""),
    "connection.close()": (lambda session: session.connection().close(), ""),
    "connection.invalidate()": (lambda session: session.connection().invalidate(), ""),
    "text COMMIT": (lambda session: session.execute(sa.text("COMMIT")), "the handler called COMMIT on its session"),
    "text ROLLBACK": (lambda session: session.execute(sa.text(" rollback ")), "rollback"),
    "text END": (lambda session: session.execute(sa.text("END")), "END"),
    "text ABORT": (lambda session: session.execute(sa.text("ABORT")), "ABORT"),
    "text with a comment": (lambda session: session.execute(sa.text("/* so */ -- there\n COMMIT AND CHAIN")), "COMMIT"),
    "driver COMMIT": (lambda session: session.connection().exec_driver_sql("COMMIT"), "COMMIT"),
}


@pytest.mark.parametrize("name", ENDS)
def test_ending_the_transaction_fails_the_attempt(name: str, engine: Engine, jobs: Jobs) -> None:
    body, message = ENDS[name]
    row = run_plain(engine, jobs, body)
    assert (row["status"], row["attempt"], row["lost"]) == ("queued", 1, 0)
    assert message in row["last_error"]
    assert jobs.effects(row["id"]) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDS)
def test_writing_on_after_the_end_does_not_help(name: str, engine: Engine, jobs: Jobs, observer: Observer) -> None:
    """The worst case: a new transaction begins by itself, and its COMMIT would be answered with yes."""
    body, _ = ENDS[name]

    def swallow_and_write(session: Session) -> None:
        with contextlib.suppress(Exception):
            body(session)
        with contextlib.suppress(Exception):
            session.add(Order(ref="after"))
            session.flush()

    row = run_plain(engine, jobs, swallow_and_write)
    assert row["status"] == "queued"
    assert "enlist.exceptions." in row["last_error"] or "sqlalchemy.exc." in row["last_error"]
    assert observer.scalar("SELECT count(*) FROM shop_order") == 0
    assert jobs.effects(row["id"]) == []


def test_the_refusal_says_what_to_do_instead(engine: Engine, jobs: Jobs) -> None:
    refused: list[CommitRefused] = []

    def body(session: Session) -> None:
        with pytest.raises(CommitRefused) as caught:
            session.commit()
        refused.append(caught.value)

    run_plain(engine, jobs, body)
    assert "return to commit, raise to roll back, use begin_nested() for a savepoint" in str(refused[0])


async def _async_with_begin(session: AsyncSession) -> None:
    async with session.begin():
        session.add(Order(ref="late"))


async def _async_with_session(session: AsyncSession) -> None:
    async with session:
        session.add(Order(ref="late"))


async def _async_transaction_commit(session: AsyncSession) -> None:
    transaction = session.get_transaction()
    assert transaction is not None
    await transaction.commit()


async def _async_transaction_rollback(session: AsyncSession) -> None:
    transaction = session.get_transaction()
    assert transaction is not None
    await transaction.rollback()


async def _async_connection_commit(session: AsyncSession) -> None:
    await (await session.connection()).commit()


async def _async_connection_rollback(session: AsyncSession) -> None:
    await (await session.connection()).rollback()


ASYNC_ENDS: dict[str, Callable[[AsyncSession], Coroutine[Any, Any, object]]] = {
    "commit()": lambda session: session.commit(),
    "rollback()": lambda session: session.rollback(),
    "close()": lambda session: session.close(),
    "aclose()": lambda session: session.aclose(),
    "reset()": lambda session: session.reset(),
    "invalidate()": lambda session: session.invalidate(),
    "with begin()": _async_with_begin,
    "with session": _async_with_session,
    "transaction.commit()": _async_transaction_commit,
    "transaction.rollback()": _async_transaction_rollback,
    "connection.commit()": _async_connection_commit,
    "connection.rollback()": _async_connection_rollback,
    "run_sync(commit)": lambda session: session.run_sync(lambda plain: plain.commit()),
    "text COMMIT": lambda session: session.execute(sa.text("COMMIT")),
    "text ROLLBACK": lambda session: session.execute(sa.text("ROLLBACK")),
}


@pytest.mark.parametrize("swallowed", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["raised", "swallowed"])
@pytest.mark.parametrize("name", ASYNC_ENDS)
def test_ending_an_async_sessions_transaction_fails_the_attempt(
    name: str, swallowed: bool, any_async_engine: AsyncEngine, jobs: Jobs
) -> None:
    async def body(session: AsyncSession) -> None:
        try:
            await ASYNC_ENDS[name](session)
        except Exception:
            if not swallowed:
                raise

    row = run_async(any_async_engine, jobs, body)
    assert (row["status"], row["attempt"]) == ("queued", 1)
    assert jobs.effects(row["id"]) == []


# -- what is fine --------------------------------------------------------------------------------------------


def _savepoint(session: Session) -> None:
    with session.begin_nested():
        session.add(Order(ref="inner"))


def _rolled_back_savepoint(session: Session) -> None:
    savepoint = session.begin_nested()
    session.add(Order(ref="inner"))
    session.flush()
    savepoint.rollback()


def _failed_savepoint(session: Session) -> None:
    with contextlib.suppress(sa.exc.DBAPIError), session.begin_nested():
        session.execute(sa.text("SELECT 1/0"))


def _failed_flush_in_savepoint(session: Session) -> None:
    session.add(Order(ref="same"))
    session.flush()
    with contextlib.suppress(sa.exc.IntegrityError), session.begin_nested():
        session.add(Order(ref="same"))


def _open_savepoint(session: Session) -> None:
    session.begin_nested()
    session.add(Order(ref="inner"))


def _text_savepoint(session: Session) -> None:
    session.execute(sa.text("SAVEPOINT mine"))
    try:
        session.execute(sa.text("SELECT 1/0"))
    except sa.exc.DBAPIError:
        session.execute(sa.text("ROLLBACK TO SAVEPOINT mine"))


def _text_that_looks_like_it(session: Session) -> None:
    session.execute(sa.text("SELECT 'COMMIT'"))
    session.execute(sa.text("WITH rollback AS (SELECT 1) SELECT * FROM rollback"))
    session.execute(sa.text("/* COMMIT */ SELECT 1"))


FINE: dict[str, Callable[[Session], object]] = {
    "nothing": lambda session: None,
    "savepoint": _savepoint,
    "rolled back savepoint": _rolled_back_savepoint,
    "failed savepoint": _failed_savepoint,
    "failed flush in savepoint": _failed_flush_in_savepoint,
    "savepoint left open": _open_savepoint,
    "savepoint in text": _text_savepoint,
    "text that looks like it": _text_that_looks_like_it,
    "expunge_all()": lambda session: session.expunge_all(),
    "expire_all()": lambda session: session.expire_all(),
    "flush()": lambda session: session.flush(),
    "connection()": lambda session: session.connection(),
    "isolation level": lambda session: session.connection().get_isolation_level(),
}


@pytest.mark.parametrize("name", FINE)
def test_this_does_no_harm(name: str, engine: Engine, jobs: Jobs) -> None:
    assert_done(jobs, run_plain(engine, jobs, FINE[name]))


@pytest.mark.parametrize(
    "name", ["savepoint", "failed savepoint", "failed flush in savepoint", "rolled back savepoint"]
)
def test_savepoints_of_an_async_session_do_no_harm(name: str, any_async_engine: AsyncEngine, jobs: Jobs) -> None:
    assert_done(jobs, run_async(any_async_engine, jobs, lambda session: session.run_sync(FINE[name])))


def test_what_is_added_without_a_flush_commits(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    row = run_plain(engine, jobs, lambda session: session.add(Order(ref="unflushed")))
    assert_done(jobs, row)
    assert observer.scalar("SELECT count(*) FROM shop_order WHERE ref = 'unflushed'") == 1


def test_a_session_of_its_own_commits_by_itself(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    def body(session: Session) -> None:
        with Session(engine) as own, own.begin():
            own.add(Order(ref="own"))
        raise ValueError("after the own commit")

    row = run_plain(engine, jobs, body)
    assert_failed(jobs, row, "after the own commit")
    assert observer.scalar("SELECT count(*) FROM shop_order WHERE ref = 'own'") == 1


def test_the_applications_sessions_are_not_guarded(engine: Engine, jobs: Jobs) -> None:
    """A worker in the same process changes nothing for sessions that aren't a handler's."""
    run_plain(engine, jobs, lambda session: None)
    with Session(engine) as session:
        session.add(Order(ref="free"))
        session.commit()
        session.execute(sa.text("ROLLBACK"))
        session.rollback()


# -- a swallowed error must not become a silent ROLLBACK -----------------------------------------------------


def _swallowed_statement(session: Session) -> None:
    with contextlib.suppress(sa.exc.DBAPIError):
        session.execute(sa.text("SELECT 1/0"))


def _swallowed_flush(session: Session) -> None:
    session.add(Order(ref="same"))
    session.flush()
    session.add(Order(ref="same"))
    with contextlib.suppress(sa.exc.IntegrityError):
        session.flush()


def _swallowed_on_raw_cursor(session: Session) -> None:
    raw = session.connection().connection.cursor()
    with contextlib.suppress(Exception):
        raw.execute("SELECT 1/0")
    raw.close()


def _swallowed_in_outer_of_savepoint(session: Session) -> None:
    with session.begin_nested():
        session.add(Order(ref="inner"))
    _swallowed_statement(session)


SWALLOWED: dict[str, Callable[[Session], object]] = {
    "statement": _swallowed_statement,
    "flush": _swallowed_flush,
    "raw cursor": _swallowed_on_raw_cursor,
    "after a savepoint": _swallowed_in_outer_of_savepoint,
}


@pytest.mark.parametrize("name", SWALLOWED)
def test_a_swallowed_error_fails_the_attempt(name: str, engine: Engine, jobs: Jobs) -> None:
    row = run_plain(engine, jobs, SWALLOWED[name])
    assert_failed(jobs, row, "TransactionAborted")
    assert "swallowed" in row["last_error"]


@pytest.mark.parametrize("name", [name for name in SWALLOWED if name != "raw cursor"])
def test_a_swallowed_error_of_an_async_session_fails_the_attempt(
    name: str, any_async_engine: AsyncEngine, jobs: Jobs
) -> None:
    row = run_async(any_async_engine, jobs, lambda session: session.run_sync(SWALLOWED[name]))
    assert_failed(jobs, row, "TransactionAborted")


@pytest.mark.parametrize("name", [*SWALLOWED, "nothing"])
def test_in_a_two_phase_session_it_is_the_same(name: str, engine: Engine, jobs: Jobs, observer: Observer) -> None:
    row = run_plain(sessionmaker(engine, twophase=True), jobs, SWALLOWED.get(name, FINE.get(name, print)))
    if name == "nothing":
        assert_done(jobs, row)
    else:
        assert_failed(jobs, row, "TransactionAborted")
    assert observer.scalar("SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()") == 0


@pytest.mark.parametrize("verb", ["commit", "prepare"])
def test_a_two_phase_connection_is_not_committed_past_it(
    verb: str, engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    def body(session: Session) -> None:
        getattr(session.connection().get_transaction(), verb)()

    row = run_plain(sessionmaker(engine, twophase=True), jobs, body)
    assert_failed(jobs, row, "CommitRefused")
    assert observer.scalar("SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()") == 0


@pytest.mark.slow
def test_the_report_and_the_database_agree_in_100_of_100_runs(engine: Engine, jobs: Jobs) -> None:
    """Half of the handlers swallow an error. Done has its effect; what has no effect is not done."""
    handlers = HandlerRegistry()

    @handlers.handler("body", wait=LATER)
    def handler(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))
        session.flush()
        for name in job.payload["names"]:
            SWALLOWED[name](session) if name in SWALLOWED else FINE[name](session)

    bodies = [[name] for name in SWALLOWED] + [["savepoint"], ["failed savepoint"], [], ["rolled back savepoint"]]
    names = [bodies[number % len(bodies)] for number in range(100)]
    # Unique references collide between jobs: each its own transaction, one after the other.
    ids = jobs.add_many("body", [{"names": body} for body in names])
    expected = {job_id: not any(name in SWALLOWED for name in body) for job_id, body in zip(ids, names, strict=True)}
    with running(Worker(engine, handlers, queues={"default": 4}, poll_interval=0.05)):
        rows = {
            job_id: jobs.wait(job_id, "done", "queued") if good else jobs.wait_failed(job_id)
            for job_id, good in expected.items()
        }
        for job_id in ids:
            rows[job_id] = jobs.wait(job_id, "done", "queued")
    effects = jobs.effects_by_job()
    for job_id, row in rows.items():
        assert (row["status"] == "done") == (effects.get(job_id, 0) == 1)


# -- connections that cannot do it ---------------------------------------------------------------------------


def test_a_connection_switched_to_autocommit_is_refused_at_its_first_use(database_url: URL, jobs: Jobs) -> None:
    """The isolation level may be an option of the handler's own making."""
    handlers = HandlerRegistry()
    used = threading.Event()

    @handlers.handler("body", wait=LATER)
    def handler(session: Session, job: Job[Any]) -> None:
        used.set()
        session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
        session.add(Effect(job_id=job.id))

    job_id = jobs.add("body")
    engine = create_engine(database_url, poolclass=NullPool)
    with running(Worker(engine, handlers, poll_interval=0.05)):
        row = jobs.wait_failed(job_id)
    assert used.is_set()
    assert_failed(jobs, row, "AUTOCOMMIT")


@pytest.mark.parametrize("how", ["commit", "rollback"])
def test_a_transaction_ended_on_the_drivers_connection_is_noticed(
    how: str, engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    """It cannot be refused, and what was committed stays; but the job is not called done."""

    def body(session: Session) -> None:
        getattr(session.connection().connection.driver_connection, how)()

    row = run_plain(engine, jobs, body)
    assert row["status"] == "queued"
    assert "driver's connection" in row["last_error"]


@pytest.mark.parametrize("text", ["SELECT 1; COMMIT", "SELECT 1; ROLLBACK", "DO $$ BEGIN END $$; END"])
def test_an_end_that_hides_among_statements_is_noticed_by_the_next(
    text: str, engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    """The driver would begin another transaction with it, and nobody would know of the first."""

    def body(session: Session) -> None:
        session.connection().exec_driver_sql(text)
        session.add(Order(ref="after"))
        session.flush()

    row = run_plain(engine, jobs, body)
    assert row["status"] == "queued"
    assert "driver's connection" in row["last_error"]
    assert observer.scalar("SELECT count(*) FROM shop_order") == 0


def _savepoint_of_ones_own(session: Session) -> None:
    session.execute(sa.text("SAVEPOINT a"))
    session.begin_nested()
    session.add(Order(ref="a"))
    session.flush()
    session.execute(sa.text("ROLLBACK TO SAVEPOINT a"))
    raise ValueError("while a savepoint is open that is not there any more")


def _release_sqlalchemys(session: Session) -> None:
    session.begin_nested()
    session.add(Order(ref="a"))
    session.flush()
    session.execute(sa.text("RELEASE SAVEPOINT sa_savepoint_1"))
    raise ValueError("while a savepoint is open that is not there any more")


@pytest.mark.parametrize("body", [_savepoint_of_ones_own, _release_sqlalchemys])
def test_a_session_that_cannot_be_closed_leaks_no_connection(body: Any, engine: Engine, jobs: Jobs) -> None:
    row = run_plain(engine, jobs, body)
    assert (row["status"], row["attempt"]) == ("queued", 1)
    assert isinstance(engine.pool, sa.QueuePool)
    assert engine.pool.checkedout() == 0


def test_a_commit_that_a_listener_refuses_leaves_no_transaction_in_the_pool(
    engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    """SQLAlchemy takes it to be over: the next who gets the connection would read, and commit, what is in it."""
    refused = threading.Event()

    @sa.event.listens_for(engine, "commit")
    def refuse(_connection: sa.Connection) -> None:
        if not refused.is_set():
            refused.set()
            raise ValueError("not now")

    row = run_plain(engine, jobs, lambda session: session.add(Order(ref="a")))
    assert (row["status"], row["attempt"]) == ("queued", 1)
    assert "not now" in row["last_error"]
    assert observer.scalar("SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'") == 0
    assert observer.scalar("SELECT count(*) FROM shop_order") == 0


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_an_error_on_another_database_that_is_swallowed_fails_the_attempt(
    driver: str, database_url: URL, jobs: Jobs, observer: Observer
) -> None:
    """Its COMMIT would be answered with a silent rollback."""
    url = database_url.set(drivername=f"postgresql+{driver}")
    main, other = create_async_engine(url), create_async_engine(url, poolclass=NullPool)
    handlers = HandlerRegistry()

    def body(session: Session, _job: Job[Any]) -> None:
        session.add(Order(ref="lost"))
        session.flush()
        with contextlib.suppress(sa.exc.DBAPIError):
            session.execute(sa.text("SELECT 1 / 0"), bind_arguments={"mapper": Order})

    @handlers.handler("both", wait=LATER)
    async def handler(session: AsyncSession, job: Job[Any]) -> None:
        await session.run_sync(body, job)

    job_id = jobs.add("both")
    sessions = async_sessionmaker(main, binds={Order: other})
    with running(Worker(sessions, handlers, poll_interval=0.05)):
        row = jobs.wait_failed(job_id)
    assert "aborted by an earlier error" in row["last_error"]
    assert observer.scalar("SELECT count(*) FROM shop_order") == 0


# -- sessions that route ----------------------------------------------------------------------------------------------


def test_a_session_that_sends_reads_elsewhere_writes_the_status_where_it_writes_rows(
    engine: Engine, database_url: URL, jobs: Jobs
) -> None:
    reader = sa.create_engine(database_url, connect_args={"options": "-c default_transaction_read_only=on"})

    class RoutingSession(Session):
        def get_bind(self, mapper: Any = None, *, clause: Any = None, **rest: Any) -> Engine:
            writes = self._flushing or isinstance(clause, (sa.Update, sa.Delete, sa.Insert))
            return engine if writes else reader

    handlers = HandlerRegistry()

    @handlers.handler("routed", hold_lock=True)
    def routed(session: Session, job: Job[Any]) -> None:
        session.scalar(sa.select(sa.func.count()).select_from(Order))
        session.add(Effect(job_id=job.id))

    job_id = jobs.add("routed")
    Worker(sessionmaker(engine, class_=RoutingSession), handlers).drain(timeout=20)
    reader.dispose()
    assert jobs.row(job_id)["last_error"] is None
    assert jobs.status(job_id) == "done"
    assert len(jobs.effects(job_id)) == 1
