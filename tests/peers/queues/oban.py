"""oban, the open-source one, on psycopg, its only driver."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import sqlalchemy as sa
from oban import Oban as ObanQueue
from oban import worker
from oban.schema import install
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from tests.peers.domain import Order, insert_with_psycopg, insert_with_session
from tests.peers.peer import Connection, Load, Settings, Work, dsn, run

CHUNK: Final = 5000
"""Jobs of one call, and of one transaction."""

_handlers: list[Callable[[int], Awaitable[None]]] = []


@worker(queue="default")
class Numbered:
    """Found by its path, which is stored in the job."""

    async def process(self, job: Any) -> None:
        await _handlers[0](job.args["number"])


WORKER: Final = f"{Numbered.__module__}.{Numbered.__qualname__}"


class Oban:
    name = "oban"
    packages: Sequence[str] = ("oban", "psycopg")
    promise = "another transaction than the completion; completions in batches, fenced"
    most_jobs = 1_000_000

    def settings(self, load: Load) -> Settings:
        if load.name == "latency":
            return {"limit": 50, "pool": 10}
        # Jobs/s with 50, 200, 1000: 3,221, 3,400, 3,639.
        return {"limit": load.slots or 1000, "pool": 10}

    def install(self, url: sa.URL) -> None:
        async def prepare() -> None:
            pool = await ObanQueue.create_pool(dsn(url))
            await install(pool)
            await pool.close()

        asyncio.run(prepare())

    def clear(self, connection: Connection) -> None:
        connection.execute("TRUNCATE oban_jobs, oban_leaders, oban_producers RESTART IDENTITY")

    def unfinished(self, connection: Connection, jobs: int) -> str:
        last = connection.execute("SELECT coalesce(max(id), 0) FROM oban_jobs").fetchone()
        assert last is not None
        return f"EXISTS (SELECT FROM oban_jobs WHERE id > {last[0]} AND state <> 'completed')"

    def seed(self, connection: Connection, jobs: int) -> bool:
        connection.execute(
            "INSERT INTO oban_jobs (state, worker, args) SELECT 'available', %s, jsonb_build_object('number', number)"
            " FROM generate_series(0, %s) AS number",
            (WORKER, jobs - 1),
        )
        return True

    def add_finished(self, connection: Connection, jobs: int) -> None:
        connection.execute(
            "INSERT INTO oban_jobs (state, worker, args, attempt, attempted_by, attempted_at, completed_at)"
            " SELECT 'completed', %s, jsonb_build_object('number', number), 1, ARRAY['node', 'id'],"
            " timezone('UTC', now()), timezone('UTC', now()) FROM generate_series(1, %s) AS number",
            (WORKER, jobs),
        )

    def add_future(self, connection: Connection, jobs: int) -> None:
        connection.execute(
            "INSERT INTO oban_jobs (state, worker, args, scheduled_at)"
            " SELECT 'scheduled', %s, jsonb_build_object('number', number),"
            " timezone('UTC', now() + interval '1 day') FROM generate_series(1, %s) AS number",
            (WORKER, jobs),
        )

    def work(self, work: Work) -> None:
        run(self._work(work))

    async def _work(self, work: Work) -> None:
        size = work.settings["pool"]
        pool = await ObanQueue.create_pool(dsn(work.url), min_size=size, max_size=size)
        insert = None
        if work.load.name == "insert":
            insert = insert_with_session(work.url, "psycopg")
        elif work.load.name == "insert-grouped":
            insert = insert_with_psycopg(pool)
        _handlers.append(work.handler(insert))
        queue = ObanQueue(pool=pool, queues={"default": work.settings["limit"]})
        work.start()
        await queue.start()
        await asyncio.Event().wait()

    @asynccontextmanager
    async def producer(self, url: sa.URL, settings: Settings) -> AsyncIterator[_Producer]:
        pool = await ObanQueue.create_pool(dsn(url))
        engine = create_async_engine(url)
        yield _Producer(ObanQueue(pool=pool), engine)
        await engine.dispose()
        await pool.close()


class _Producer:
    def __init__(self, queue: Any, engine: AsyncEngine) -> None:
        self._queue = queue
        self._engine = engine

    async def one(self, number: int) -> None:
        await self._queue.enqueue(_new(number))

    async def ten(self) -> None:
        async with AsyncSession(self._engine) as session, session.begin():
            session.add(Order(note="ten jobs"))
            await session.flush()
            await self._queue.enqueue_many([_new(number) for number in range(10)], conn=session)

    async def bulk(self, jobs: int) -> None:
        for first in range(0, jobs, CHUNK):
            await self._queue.enqueue_many([_new(number) for number in range(first, min(first + CHUNK, jobs))])


def _new(number: int) -> Any:
    return Numbered.new({"number": number})  # type: ignore[attr-defined]


PEERS = (Oban(),)
