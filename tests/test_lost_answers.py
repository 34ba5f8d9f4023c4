"""The server did what it was asked, and the answer never came: what the worker believes is what is true."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sqlalchemy as sa
from sqlalchemy import URL, Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from enlist import HandlerRegistry, Job, JobPayload, JobRepository, Worker
from tests.shop import Effect
from tests.support import Observer
from tests.support.proxy import LossyProxy

repo = JobRepository(notify=None)


class Plain(JobPayload, kind="plain"):
    pass


class Coroutine(JobPayload, kind="coroutine"):
    pass


@pytest.fixture
def proxy(database_url: URL) -> Iterator[LossyProxy]:
    with LossyProxy(database_url) as proxy:
        yield proxy


@pytest.fixture
def lossy_engine(proxy: LossyProxy) -> Iterator[Engine]:
    engine = create_engine(proxy.url)
    yield engine
    engine.dispose()


def handlers(runs: list[int]) -> HandlerRegistry:
    registry = HandlerRegistry()

    @registry.handler(Plain)
    def plain(session: Session, job: Job[Plain]) -> None:
        runs.append(job.attempt)
        session.add(Effect(job_id=job.id, attempt=job.attempt))

    @registry.handler(Coroutine)
    async def coroutine(session: AsyncSession, job: Job[Coroutine]) -> None:
        runs.append(job.attempt)
        session.add(Effect(job_id=job.id, attempt=job.attempt))

    return registry


@pytest.mark.slow
def test_a_claim_whose_answer_is_lost_is_given_back_and_costs_no_attempt(
    engine: Engine, lossy_engine: Engine, proxy: LossyProxy, observer: Observer
) -> None:
    with Session(engine) as session, session.begin():
        repo.enqueue_many(session, [Plain() for _ in range(5)])
    runs: list[int] = []
    proxy.lose_answer_to(b"WITH first_look AS MATERIALIZED")
    worker = Worker(lossy_engine, handlers(runs), lease=60, poll_interval=0.2)
    worker.start()
    try:
        observer.wait_for("SELECT count(*) = 5 FROM enlist_job WHERE status = 'done'", timeout=10)
    finally:
        worker.stop()
    assert proxy.lost.is_set()
    assert runs == [1] * 5
    assert observer.row("SELECT sum(attempt), sum(lost) FROM enlist_job") == (5, 0)


@pytest.mark.parametrize("payload", [Plain(), Coroutine()], ids=["plain", "async"])
def test_a_commit_whose_answer_is_lost_is_found_to_have_landed(
    payload: JobPayload, engine: Engine, lossy_engine: Engine, proxy: LossyProxy, observer: Observer
) -> None:
    with Session(engine) as session, session.begin():
        repo.enqueue(session, payload)
    runs: list[int] = []
    # The only COMMITs through this proxy are those of handlers; the worker's own statements are autocommitted.
    proxy.lose_answer_to(b"COMMIT")
    Worker(lossy_engine, handlers(runs), lease=30).drain(timeout=20)
    assert proxy.lost.is_set()
    assert runs == [1]
    assert observer.row("SELECT status, attempt, last_error FROM enlist_job") == ("done", 1, None)
    assert observer.scalar("SELECT count(*) FROM shop_effect") == 1


def test_a_completion_whose_answer_is_lost_is_sent_again_and_changes_nothing(
    engine: Engine,
    lossy_engine: Engine,
    proxy: LossyProxy,
    observer: Observer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = HandlerRegistry()
    runs: list[int] = []

    @registry.handler(Plain)
    def plain(session: Session, job: Job[Plain]) -> None:
        runs.append(job.attempt)

    with Session(engine) as session, session.begin():
        repo.enqueue(session, Plain())
    proxy.lose_answer_to(b"finished_at=statement_timestamp()")
    Worker(lossy_engine, registry, lease=30).drain(timeout=20)
    assert proxy.lost.is_set()
    assert runs == [1]
    assert observer.row("SELECT status, attempt FROM enlist_job") == ("done", 1)
    assert "lease was lost" not in caplog.text


def test_connections_that_have_died_in_the_pools_cost_no_attempt(
    engine: Engine, lossy_engine: Engine, observer: Observer
) -> None:
    runs: list[int] = []
    worker = Worker(lossy_engine, handlers(runs), lease=30, poll_interval=0.2)
    worker.start()
    try:
        observer.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        with Session(engine) as session, session.begin():
            session.execute(sa.text("SELECT 1"))
            repo.enqueue(session, Plain())
        observer.wait_for("SELECT count(*) = 1 FROM enlist_job WHERE status = 'done'", timeout=10)
    finally:
        worker.stop()
    assert set(runs) == {1}  # the handler may run again within its attempt
    assert observer.row("SELECT attempt, last_error FROM enlist_job") == (1, None)
    assert observer.scalar("SELECT count(*) FROM shop_effect") == 1


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_a_connection_that_is_cut_while_a_worker_starts_is_made_again(
    driver: str, engine: Engine, proxy: LossyProxy, observer: Observer
) -> None:
    with Session(engine) as session, session.begin():
        repo.enqueue(session, Coroutine())
    runs: list[int] = []
    proxy.lose_answer_to(b"show transaction isolation level")
    worker = Worker(create_async_engine(proxy.url.set(drivername=f"postgresql+{driver}")), handlers(runs))
    worker.start()
    try:
        observer.wait_for("SELECT count(*) = 1 FROM enlist_job WHERE status = 'done'", timeout=10)
    finally:
        worker.stop()
    assert proxy.lost.is_set()
    assert runs == [1]
