"""pgqueuer, on asyncpg, which its documentation recommends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, Final

import asyncpg  # type: ignore[import-untyped]
import sqlalchemy as sa
from pgqueuer.db import AsyncpgDriver, AsyncpgPoolDriver
from pgqueuer.qm import QueueManager
from pgqueuer.queries import Queries
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from tests.peers.domain import CONNECTIONS, Order, insert_with_asyncpg, insert_with_session
from tests.peers.peer import Connection, Load, Settings, Work, dsn, run

ENTRYPOINT: Final = "peers"
CHUNK: Final = 5000
"""Jobs of one call, and of one transaction."""


class Pgqueuer:
    name = "pgqueuer"
    packages: Sequence[str] = ("pgqueuer", "asyncpg")
    promise = "another transaction than the completion; completions in batches; not fenced"
    most_jobs = 1_000_000

    def settings(self, load: Load) -> Settings:
        if load.slots is not None:  # a batch may be half of it at most
            return {"batch_size": load.slots // 2, "max_concurrent_tasks": load.slots, "pool": 5}
        if load.name == "latency":
            return {"batch_size": 10, "max_concurrent_tasks": None, "pool": 5}
        # Medians of five rounds in turn, jobs/s: 13,000 with 1000, 16,900 with 2000.
        return {"batch_size": 2000, "max_concurrent_tasks": None, "pool": 10}

    def install(self, url: sa.URL) -> None:
        async def install() -> None:
            connection = await asyncpg.connect(dsn(url))
            await Queries(AsyncpgDriver(connection)).install()
            await connection.close()

        asyncio.run(install())

    def clear(self, connection: Connection) -> None:
        connection.execute("TRUNCATE pgqueuer, pgqueuer_log, pgqueuer_statistics RESTART IDENTITY")

    def unfinished(self, connection: Connection, jobs: int) -> str:
        last = connection.execute("SELECT coalesce(max(id), 0) FROM pgqueuer").fetchone()
        assert last is not None
        return f"EXISTS (SELECT FROM pgqueuer WHERE id > {last[0]})"  # what is done is in the log

    def seed(self, connection: Connection, jobs: int) -> bool:
        return False

    def add_finished(self, connection: Connection, jobs: int) -> None:
        for status in ("queued", "successful"):
            connection.execute(
                "INSERT INTO pgqueuer_log (job_id, status, entrypoint, priority, aggregated)"
                " SELECT number, %s, %s, 0, true FROM generate_series(1, %s) AS number",
                (status, ENTRYPOINT, jobs),
            )

    def add_future(self, connection: Connection, jobs: int) -> None:
        connection.execute(
            "INSERT INTO pgqueuer (priority, entrypoint, payload, execute_after, status)"
            " SELECT 0, %s, convert_to(number::text, 'UTF8'), now() + interval '1 day', 'queued'"
            " FROM generate_series(1, %s) AS number",
            (ENTRYPOINT, jobs),
        )

    def work(self, work: Work) -> None:
        run(self._work(work))

    async def _work(self, work: Work) -> None:
        size = work.settings["pool"]
        insert = None
        if work.load.name == "insert":
            insert = insert_with_session(work.url, "asyncpg")
        elif work.load.name == "insert-grouped":
            insert = insert_with_asyncpg(
                await asyncpg.create_pool(dsn(work.url), min_size=CONNECTIONS, max_size=CONNECTIONS)
            )
        handle = work.handler(insert)
        pool = await asyncpg.create_pool(dsn(work.url), min_size=size, max_size=size)
        manager = QueueManager(Queries(AsyncpgPoolDriver(pool)))

        async def job(job: Any) -> None:
            await handle(int(job.payload))

        manager.entrypoint(ENTRYPOINT)(job)
        work.start()
        await manager.run(
            batch_size=work.settings["batch_size"],
            max_concurrent_tasks=work.settings["max_concurrent_tasks"],
            dequeue_timeout=timedelta(seconds=30),
        )

    @asynccontextmanager
    async def producer(self, url: sa.URL, settings: Settings) -> AsyncIterator[_Producer]:
        connection = await asyncpg.connect(dsn(url))
        engine = create_async_engine(url.set(drivername="postgresql+asyncpg"))
        try:
            yield _Producer(Queries(AsyncpgDriver(connection)), engine)
        finally:
            await engine.dispose()
            await connection.close()


class _Producer:
    def __init__(self, queries: Any, engine: Any) -> None:
        self._queries = queries
        self._engine = engine

    async def one(self, number: int) -> None:
        await self._queries.enqueue(ENTRYPOINT, b"%d" % number)

    async def ten(self) -> None:
        async with AsyncSession(self._engine) as session, session.begin():
            session.add(Order(note="ten jobs"))
            await session.flush()
            pooled = await (await session.connection()).get_raw_connection()
            await Queries(AsyncpgDriver(pooled.driver_connection)).enqueue(*_many(range(10)))

    async def bulk(self, jobs: int) -> None:
        for first in range(0, jobs, CHUNK):
            await self._queries.enqueue(*_many(range(first, min(first + CHUNK, jobs))))


def _many(numbers: range) -> tuple[list[str], list[bytes], list[int]]:
    return [ENTRYPOINT] * len(numbers), [b"%d" % number for number in numbers], [0] * len(numbers)


PEERS = (Pgqueuer(),)
