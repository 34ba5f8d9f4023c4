"""``on_commit="savepoint"``: code that commits by itself works in a handler, and still nothing of it is half done."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import pytest
import sqlalchemy as sa
import tenacity
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from enlist import HandlerRegistry, Job, JobRepository, JobState, Worker, testing
from tests.shop import Effect, Order
from tests.support import Observer, wait_until
from tests.support.jobs import Jobs, running

LATER = tenacity.wait_fixed(600)


@pytest.fixture
def jobs(observer: Observer) -> Jobs:
    return Jobs(observer)


def refs(observer: Observer) -> list[str]:
    return [ref for (ref,) in observer.rows("SELECT ref FROM shop_order ORDER BY ref")]


def run(engine: Any, jobs: Jobs, body: Any, **options: Any) -> dict[str, Any]:
    """Run one job; its row when it is over."""
    handlers = HandlerRegistry()
    handlers.handler("own", on_commit="savepoint", wait=LATER, **options)(body)
    job_id = jobs.add("own")
    with running(Worker(engine, handlers, poll_interval=0.05)):
        wait_until(lambda: jobs.status(job_id) == "done" or jobs.row(job_id)["last_error"])
        return jobs.row(job_id)


# -- what works as in a session of one's own ---------------------------------------------------------------------


def commits(session: Session) -> None:
    session.add(Order(ref="a"))
    session.commit()
    session.add(Order(ref="b"))
    session.commit()


def rolls_back_what_is_not_committed(session: Session) -> None:
    session.add(Order(ref="a"))
    session.commit()
    session.add(Order(ref="lost"))
    session.flush()
    session.rollback()
    session.add(Order(ref="b"))
    session.commit()


def begins(session: Session) -> None:
    with session.begin():
        session.add(Order(ref="a"))
    with suppress(ValueError), session.begin():
        session.add(Order(ref="lost"))
        session.flush()
        raise ValueError("inside")
    with session.begin():
        session.add(Order(ref="b"))


def nests(session: Session) -> None:
    with session.begin_nested():
        session.add(Order(ref="a"))
    inner = session.begin_nested()
    session.add(Order(ref="lost"))
    session.flush()
    inner.rollback()
    session.begin_nested()
    session.add(Order(ref="b"))
    session.commit()  # the inner one with it
    assert not session.new


def survives_an_error(session: Session) -> None:
    session.add(Order(ref="a"))
    session.commit()
    with pytest.raises(sa.exc.DBAPIError):
        session.execute(sa.text("SELECT 1 / 0"))
    session.rollback()
    session.add(Order(ref="a"))
    with pytest.raises(sa.exc.IntegrityError):
        session.commit()
    session.rollback()
    session.add(Order(ref="b"))


def closes(session: Session) -> None:
    session.add(Order(ref="a"))
    session.commit()
    session.add(Order(ref="lost"))
    session.flush()
    session.close()
    assert not list(session)
    session.add(Order(ref="b"))


def leaves_the_last_to_enlist(session: Session) -> None:
    session.add(Order(ref="a"))
    session.commit()
    session.add(Order(ref="b"))


def reads_again_what_it_has_committed(session: Session) -> None:
    session.add(order := Order(ref="a"))
    session.commit()
    assert sa.inspect(order).expired
    order.ref = order.ref + ""
    session.add(Order(ref="b"))
    session.rollback()
    assert order.ref == "a"
    session.add(Order(ref="b"))
    session.get_nested_transaction().commit()  # type: ignore[union-attr]
    session.rollback()


BODIES = [
    commits,
    rolls_back_what_is_not_committed,
    begins,
    nests,
    survives_an_error,
    closes,
    leaves_the_last_to_enlist,
    reads_again_what_it_has_committed,
]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("driver", [None, pytest.param("asyncpg", marks=pytest.mark.slow)], ids=["plain", "asyncpg"])
def test_it_is_as_in_a_session_of_ones_own(
    driver: str | None, body: Any, engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    if driver is None:
        row = run(engine, jobs, lambda session, _job: body(session))
    else:

        async def handler(session: AsyncSession, _job: Job[Any]) -> None:
            await session.run_sync(body)

        row = run(create_async_engine(engine.url.set(drivername=f"postgresql+{driver}")), jobs, handler)
    assert (row["status"], row["last_error"]) == ("done", None)
    assert refs(observer) == ["a", "b"]


def test_nothing_is_there_before_the_end_and_all_of_it_with_it(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    committed, go = threading.Event(), threading.Event()

    def body(session: Session, _job: Job[Any]) -> None:
        session.add(Order(ref="a"))
        session.commit()
        committed.set()
        go.wait(10)

    handlers = HandlerRegistry()
    handlers.handler("own", on_commit="savepoint")(body)
    job_id = jobs.add("own")
    with running(Worker(engine, handlers, poll_interval=0.05)):
        try:
            assert committed.wait(5)
            assert refs(observer) == []
        finally:
            go.set()
        assert jobs.wait(job_id)["status"] == "done"
    assert refs(observer) == ["a"]


def test_what_fails_later_takes_back_what_was_committed(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    def body(session: Session, _job: Job[Any]) -> None:
        session.add(Order(ref="a"))
        session.commit()
        raise ValueError("boom")

    row = run(engine, jobs, body)
    assert (row["status"], row["attempt"]) == ("queued", 1)
    assert "boom" in row["last_error"]
    assert refs(observer) == []


def _through_the_connection(session: Session) -> None:
    session.add(Order(ref="a"))
    session.flush()
    session.connection().commit()


def _by_sql(session: Session) -> None:
    session.add(Order(ref="a"))
    session.flush()
    session.execute(sa.text("COMMIT"))


def _through_the_real_transaction(session: Session) -> None:
    session.add(Order(ref="a"))
    session.flush()
    transaction = session.get_transaction()
    assert transaction is not None
    transaction.commit()


@pytest.mark.parametrize("end", [_through_the_connection, _by_sql, _through_the_real_transaction])
def test_the_real_transaction_is_enlists(end: Any, engine: Engine, jobs: Jobs) -> None:
    row = run(engine, jobs, lambda session, _job: end(session))
    assert (row["status"], row["attempt"]) == ("queued", 1)
    assert "CommitRefused" in row["last_error"] or "TransactionAborted" in row["last_error"]


def test_a_swallowed_error_without_a_rollback_fails_the_attempt(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    def body(session: Session, _job: Job[Any]) -> None:
        session.add(Order(ref="a"))
        session.commit()
        with pytest.raises(sa.exc.DBAPIError):
            session.execute(sa.text("SELECT 1 / 0"))

    row = run(engine, jobs, body)
    assert "aborted by an earlier error" in row["last_error"]
    assert refs(observer) == []


def test_a_session_that_is_never_used_begins_no_transaction(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    def body(session: Session, _job: Job[Any]) -> None:
        session.commit()
        session.rollback()
        assert observer.scalar("SELECT count(*) FROM pg_stat_activity WHERE state = 'idle in transaction'") == 0

    row = run(engine, jobs, body)
    assert (row["status"], row["last_error"]) == ("done", None)


def test_what_it_enqueues_is_committed_and_wakes_with_the_job(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    """Its handle follows a rollback of the handler's, and is "committed" only when it is."""
    repo = JobRepository()
    handles = []

    def body(session: Session, _job: Job[Any]) -> None:
        handles.append(repo.enqueue(session, "other", {}))
        session.commit()
        handles.append(repo.enqueue(session, "other", {}))
        session.rollback()
        assert [handle.state for handle in handles] == [JobState.INSERTED, JobState.DISCARDED]

    row = run(engine, jobs, body)
    assert (row["status"], row["last_error"]) == ("done", None)
    assert [handle.state for handle in handles] == [JobState.COMMITTED, JobState.DISCARDED]
    assert observer.rows("SELECT id FROM enlist_job WHERE kind = 'other'") == [(handles[0].id,)]


@pytest.mark.parametrize("body", BODIES)
def test_in_a_tests_transaction_it_is_the_same(body: Any, engine: Engine, observer: Observer) -> None:
    repo = JobRepository()
    handlers = HandlerRegistry()
    handlers.handler("own", on_commit="savepoint")(lambda session, _job: body(session))
    with Session(engine) as session:
        repo.enqueue(session, "own", {})
        testing.drain(session, handlers)
        assert session.scalars(sa.select(Order.ref).order_by(Order.ref)).all() == ["a", "b"]
        session.rollback()
    assert refs(observer) == []


def test_in_a_tests_transaction_a_failure_takes_it_back_too(engine: Engine) -> None:
    repo = JobRepository()
    handlers = HandlerRegistry()

    @handlers.handler("own", on_commit="savepoint")
    def own(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))
        session.commit()
        raise ValueError("boom")

    with Session(engine) as session:
        repo.enqueue(session, "own", {}, max_attempts=1)
        testing.drain(session, handlers)
        assert session.scalars(sa.select(Effect)).all() == []
        session.rollback()
