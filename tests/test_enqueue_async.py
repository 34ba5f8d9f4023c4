"""The same plain ``enqueue`` on an AsyncSession, with psycopg and with asyncpg."""

from __future__ import annotations

import asyncio

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import PendingRollbackError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session

from enlist import JobRecord, JobRepository, JobState, PayloadError, SessionError
from enlist._statements import statements_for
from tests.jobs import Note, SendReceipt, state_of, texts
from tests.shop import Order
from tests.support import Observer, StatementRecorder

repo = JobRepository()


class ShopSession(Session):
    pass


async def test_a_unit_of_work(any_async_engine: AsyncEngine, observer: Observer) -> None:
    sessions = async_sessionmaker(any_async_engine, sync_session_class=ShopSession, expire_on_commit=False)
    with StatementRecorder(any_async_engine) as statements:
        async with sessions() as session:
            order = Order(ref="a")
            session.add(order)
            first = repo.enqueue(session, lambda o: SendReceipt(order_id=o.id), of=order, unique_key="k")
            assert statements.events == []
            savepoint = await session.begin_nested()
            undone = repo.enqueue(session, Note(text="undone"), delay=1.5)
            await session.flush()
            await savepoint.rollback()
            second = repo.enqueue(session, SendReceipt(order_id=0), unique_key="k")
            third = repo.enqueue(session, Note(text="kept"), delay=3, meta={"a": 1})
            await session.commit()
            assert session.info == {}
            found = await session.run_sync(repo.get, third.id)
            assert found is not None
            assert found.payload == {"text": "kept"}
            with pytest.raises(SessionError, match="run_sync"):
                repo.get(session, third.id)  # type: ignore[arg-type]
    assert [first.state, undone.state, third.state] == [
        JobState.COMMITTED,
        JobState.DISCARDED,
        JobState.COMMITTED,
    ]
    assert second.existing_id == first.id
    assert observer.rows("SELECT payload FROM enlist_job ORDER BY id") == [
        ({"order_id": order.id},),
        ({"text": "kept"},),
    ]


async def test_a_failed_flush(any_async_engine: AsyncEngine, observer: Observer) -> None:
    async with AsyncSession(any_async_engine) as session:
        handle = repo.enqueue(session, lambda: SendReceipt(order_id=int("x")))
        with pytest.raises(PayloadError, match=__file__):
            await session.flush()
        with pytest.raises(PendingRollbackError):
            await session.commit()
        assert handle.state is JobState.DISCARDED
        await session.rollback()
        kept = repo.enqueue(session, Note(text="kept"))
        session.expunge_all()
        await session.commit()
        assert kept.state is JobState.COMMITTED
        closed = repo.enqueue(session, Note(text="closed"))
    assert closed.state is JobState.DISCARDED
    assert texts(observer) == ["kept"]


async def test_async_scoped_session(any_async_engine: AsyncEngine, observer: Observer) -> None:
    scoped = async_scoped_session(async_sessionmaker(any_async_engine), scopefunc=asyncio.current_task)
    repo.enqueue(scoped, Note(text="a"))
    await scoped.commit()
    await scoped.remove()
    assert texts(observer) == ["a"]


async def test_a_thousand_jobs_in_one_statement(any_async_engine: AsyncEngine, observer: Observer) -> None:
    with StatementRecorder(any_async_engine) as statements:
        async with AsyncSession(any_async_engine) as session, session.begin():
            repo.enqueue_many(session, [Note(text=str(number)) for number in range(1000)])
        assert len(statements.matching("INSERT")) == 1
    assert observer.scalar("SELECT count(*) FROM enlist_job") == 1000


async def test_enqueues_of_tasks_that_share_a_session(any_async_engine: AsyncEngine, observer: Observer) -> None:
    async with AsyncSession(any_async_engine) as session:

        async def enqueue(number: int) -> None:
            await asyncio.sleep(0)
            repo.enqueue(session, Note(text=str(number)))

        await asyncio.gather(*[enqueue(number) for number in range(5)])
        await session.commit()
    assert sorted(texts(observer)) == ["0", "1", "2", "3", "4"]


async def test_autocommit_is_refused(any_async_engine: AsyncEngine, observer: Observer) -> None:
    autocommit = any_async_engine.execution_options(isolation_level="AUTOCOMMIT")
    async with AsyncSession(autocommit) as session:
        with pytest.raises(SessionError, match="AUTOCOMMIT"):
            repo.enqueue(session, Note())
    async with AsyncSession(any_async_engine) as session:
        _ = await session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
        with pytest.raises(SessionError, match="AUTOCOMMIT"):
            repo.enqueue(session, Note())
    assert texts(observer) == []


async def test_workers_are_notified_after_the_commit(any_async_engine: AsyncEngine, observer: Observer) -> None:
    table = sa.inspect(JobRecord).local_table
    assert isinstance(table, sa.Table)
    observer.listen(statements_for(table).channel)
    async with AsyncSession(any_async_engine) as session:
        repo.enqueue(session, Note(), queue="a")
        repo.enqueue(session, Note(), queue="b")
        await session.flush()
        assert await asyncio.to_thread(observer.notified, 0.2) == []
        await session.commit()
    assert sorted(await asyncio.to_thread(observer.notified, 5, at_least=2)) == ["a", "b"]


async def test_a_cancelled_commit_is_unknown_or_committed_but_never_discarded(
    any_async_engine: AsyncEngine, observer: Observer
) -> None:
    async with AsyncSession(any_async_engine) as session:
        handle = repo.enqueue(session, Note(text="a"))
        await session.flush()
        task = asyncio.create_task(session.commit())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await session.close()
    assert handle.state in {JobState.UNKNOWN, JobState.COMMITTED}


async def test_a_commit_after_a_swallowed_error_is_refused(any_async_engine: AsyncEngine, observer: Observer) -> None:
    async with AsyncSession(any_async_engine) as session:
        lost = repo.enqueue(session, Note(text="lost"))
        await session.flush()
        with pytest.raises(sa.exc.DBAPIError):
            await session.execute(sa.text("SELECT 1/0"))
        with pytest.raises(SessionError, match="swallowed"):
            await session.commit()
        await session.rollback()
        assert state_of(lost) is JobState.DISCARDED
        kept = repo.enqueue(session, Note(text="kept"))
        await session.flush()
        with pytest.raises(sa.exc.DBAPIError):
            async with session.begin_nested():
                await session.execute(sa.text("SELECT 1/0"))
        await session.commit()
        assert state_of(kept) is JobState.COMMITTED
    assert texts(observer) == ["kept"]
