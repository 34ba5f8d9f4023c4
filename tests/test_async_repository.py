"""AsyncJobRepository: the methods of JobRepository, awaited; enqueuing is a plain call."""

from __future__ import annotations

import asyncio
import datetime as dt
import inspect
import uuid
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session

from enlist import (
    AsyncJobRepository,
    ConfigurationError,
    HandlerRegistry,
    InvalidOption,
    Job,
    JobRecord,
    JobRepository,
    JobStatus,
    SessionError,
    UniqueKeyContended,
    Worker,
)
from enlist._statements import channel_of
from tests.jobs import Note
from tests.shop import Effect, Order
from tests.support import Observer, StatementRecorder
from tests.support.jobs import Jobs, running

repo = AsyncJobRepository()

AWAITED = ["get", "cancel", "retry", "reschedule", "counts", "oldest_queued_age", "prune"]
FINISHED: dict[str, Any] = {"finished_at": dt.datetime(2020, 1, 1, tzinfo=dt.UTC), "attempt": 3}


@pytest.fixture
def jobs(observer: Observer) -> Jobs:
    return Jobs(observer)


@pytest.mark.parametrize("name", AWAITED)
def test_each_method_takes_what_the_sync_one_takes(name: str) -> None:
    plain, awaited = (inspect.signature(getattr(kind, name)) for kind in (JobRepository, AsyncJobRepository))
    assert inspect.iscoroutinefunction(getattr(AsyncJobRepository, name))
    assert [str(found.replace(annotation="")) for found in plain.parameters.values()] == [
        str(found.replace(annotation="")) for found in awaited.parameters.values()
    ]
    assert plain.return_annotation == awaited.return_annotation


def test_they_have_the_same_methods_and_no_others() -> None:
    assert {name for name in vars(JobRepository) if not name.startswith("_")} == set(AWAITED)
    assert {name for name in vars(AsyncJobRepository) if not name.startswith("_")} == set(AWAITED)


async def test_the_life_of_a_job(any_async_engine: AsyncEngine, jobs: Jobs) -> None:
    async with AsyncSession(any_async_engine) as session:
        handle, other = repo.enqueue(session, Note(text="a"), delay=60), repo.enqueue(session, Note(), delay=60)
        record = await repo.get(session, handle.id)
        assert record is not None
        assert (record.payload, record.status) == ({"text": "a"}, JobStatus.QUEUED)
        assert await repo.oldest_queued_age(session) is None
        assert (await repo.reschedule(session, handle.id, delay=0)).changed == [handle.id]
        assert record.run_at < dt.datetime.now(dt.UTC) + dt.timedelta(seconds=30)
        assert (await repo.oldest_queued_age(session)) is not None
        assert await repo.cancel(session, JobRecord.kind == "note", limit=2)
        assert record.status is JobStatus.CANCELLED  # without an await: it is read already
        assert (await repo.counts(session))[JobStatus.CANCELLED] == 2
        assert (await repo.retry(session, [handle.id, uuid.UUID(int=0)])).missing == [uuid.UUID(int=0)]
        assert await repo.prune(session, older_than=0) == 1
        await session.commit()
    assert jobs.counts() == {"queued": 1}
    assert jobs.status(handle.id) == "queued"
    assert other.inserted


async def test_an_async_scoped_session(async_engine: AsyncEngine, jobs: Jobs) -> None:
    scoped = async_scoped_session(async_sessionmaker(async_engine), asyncio.current_task)
    (handle,) = repo.enqueue_many(scoped, [Note()])
    assert await repo.cancel(scoped, handle.id)
    await scoped.commit()
    await scoped.remove()
    assert jobs.status(handle.id) == "cancelled"


async def test_a_key_that_is_taken_meanwhile(any_async_engine: AsyncEngine, jobs: Jobs, observer: Observer) -> None:
    """The index refuses, in a savepoint, and the transaction goes on: with asyncpg as with psycopg."""
    held, plain = jobs.add("note", status="dead", unique_key="k", **FINISHED), jobs.add("a", status="dead", **FINISHED)
    async with AsyncSession(any_async_engine) as first, AsyncSession(any_async_engine) as second:
        second.add(Order(ref="kept"))
        repo.enqueue(first, Note(), unique_key="k")
        await first.flush()
        waiting = asyncio.create_task(repo.retry(second, [held, plain]))
        await asyncio.to_thread(observer.wait_for, "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted")
        await first.commit()
        changes = await waiting
        await second.commit()
    assert (changes.changed, changes.superseded) == ([plain], [held])
    assert observer.scalar("SELECT count(*) FROM shop_order") == 1


async def test_a_key_that_is_never_seen(any_async_engine: AsyncEngine, jobs: Jobs) -> None:
    job_id = jobs.add("a", status="dead", unique_key="k", **FINISHED)
    async with AsyncSession(any_async_engine) as session:
        _ = await session.connection(execution_options={"isolation_level": "REPEATABLE READ"})
        await repo.counts(session)
        jobs.add("a", due_in=60, unique_key="k", unique_held=True)
        with pytest.raises(UniqueKeyContended):
            await repo.retry(session, job_id)
        assert (await repo.counts(session))[JobStatus.DEAD] == 1


async def test_other_integrity_errors_come_out(any_async_engine: AsyncEngine, jobs: Jobs, observer: Observer) -> None:
    observer.execute("CREATE UNIQUE INDEX one_attempt ON enlist_job (attempt) WHERE status = 'queued'")
    ids = jobs.add_many("a", 2, status="dead", **FINISHED)
    async with AsyncSession(any_async_engine) as session:
        with pytest.raises(IntegrityError, match="one_attempt"):
            await repo.retry(session, ids)


@pytest.mark.parametrize("notify", ["after_commit", "transaction"])
async def test_the_commit_wakes_workers(any_async_engine: AsyncEngine, observer: Observer, notify: Any) -> None:
    jobs = Jobs(observer)
    table = sa.inspect(JobRecord).local_table
    assert isinstance(table, sa.Table)
    observer.listen(channel_of(table))
    job_id = jobs.add("a", status="dead", queue="mail", **FINISHED)
    async with AsyncSession(any_async_engine) as session:
        assert await AsyncJobRepository(notify=notify).retry(session, job_id)
        await session.commit()
    assert observer.notified() == ["mail"]


async def test_nothing_is_sent_for_what_is_refused(any_async_engine: AsyncEngine) -> None:
    with StatementRecorder(any_async_engine) as statements:
        async with AsyncSession(any_async_engine) as session:
            with pytest.raises(InvalidOption, match="which jobs"):
                await repo.cancel(session)
            with pytest.raises(InvalidOption, match="delay"):
                await repo.reschedule(session, uuid.uuid4(), delay=-1)
        assert statements.events == []


@pytest.mark.parametrize("name", AWAITED)
async def test_a_plain_session_is_sent_to_the_other_repository(engine: Engine, name: str) -> None:
    options: dict[str, Any] = {"older_than": 0} if name == "prune" else {}
    with Session(engine) as session, pytest.raises(SessionError, match=rf"AsyncSession.*JobRepository\.{name}"):
        await getattr(repo, name)(session, *([uuid.uuid4()] if name == "get" else []), **options)


def test_it_is_configured_as_the_sync_one_is() -> None:
    with pytest.raises(ConfigurationError, match="record"):
        AsyncJobRepository(record=Order)  # type: ignore[type-var]
    with pytest.raises(InvalidOption, match="notify"):
        AsyncJobRepository(notify="now")  # type: ignore[call-overload]


@pytest.mark.slow
async def test_an_async_handler_may_command_other_jobs(async_engine: AsyncEngine, jobs: Jobs) -> None:
    handlers = HandlerRegistry()
    dead = jobs.add("a", status="dead", unique_key="k", **FINISHED)

    @handlers.handler("work")
    async def work(session: AsyncSession, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))
        assert await repo.retry(session, dead)

    job_id = jobs.add("work")
    with running(Worker(async_engine, handlers)):
        row = await asyncio.to_thread(jobs.wait, job_id)
    assert (row["status"], row["last_error"]) == ("done", None)
    assert jobs.status(dead) == "queued"
