"""awa: its engine is written in Rust and has a driver of its own; handlers write through asyncpg."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import asyncpg  # type: ignore[import-untyped]
import awa
import sqlalchemy as sa
from awa.bridge import insert_job
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from tests.peers.domain import CONNECTIONS, Order, insert_with_asyncpg, insert_with_session
from tests.peers.peer import Connection, Load, Settings, Work, connect, dsn, run, url_of

QUEUE: Final = "peers"
CHUNK: Final = 10_000
"""Jobs of one COPY."""

FINISHED: Final = """
    (SELECT coalesce(sum(live_terminal_count), 0) FROM awa.queue_terminal_live_counts)
    + (SELECT coalesce(sum(terminal_delta), 0) FROM awa.queue_terminal_count_deltas)
    + (SELECT coalesce(sum(completed_count), 0) FROM awa.receipt_completion_batches)
    - (SELECT count(*) FROM awa.receipt_completion_tombstones)
    + (SELECT coalesce(sum(pruned_completed_count + pruned_failed_count), 0) FROM awa.queue_terminal_rollups)
"""
"""How many jobs were ever done: they leave the table of the ready ones at the claim."""


@dataclass
class Numbered:
    """The job."""

    number: int


class Awa:
    name = "awa"
    packages: Sequence[str] = ("awa-pg", "asyncpg")
    promise = "another transaction than the completion; at least once"
    most_jobs = 1_000_000

    def settings(self, load: Load) -> Settings:
        workers = load.slots or (50 if load.name == "latency" else 1024)
        return {"max_workers": workers, "claim_batch_size": 512, "max_connections": 20}

    def install(self, url: sa.URL) -> None:
        async def install() -> None:
            client = awa.AsyncClient(_dsn(url))
            await client.migrate()
            await client.close()

        asyncio.run(install())
        with connect(url) as connection:
            # As the first worker of a new installation does; until then a producer writes to the tables of old.
            connection.execute("SELECT awa.storage_auto_finalize_if_fresh('awa')")

    def clear(self, connection: Connection) -> None:
        connection.execute("DROP SCHEMA IF EXISTS awa CASCADE")
        self.install(url_of(connection))

    def unfinished(self, connection: Connection, jobs: int) -> str:
        done = connection.execute(f"SELECT {FINISHED}").fetchone()
        assert done is not None
        return f"{FINISHED} < {done[0] + jobs}"

    def seed(self, connection: Connection, jobs: int) -> bool:
        return False

    def add_finished(self, connection: Connection, jobs: int) -> None:
        connection.execute(
            "INSERT INTO awa.done_entries (ready_slot, ready_generation, job_id, kind, queue, args, state, priority,"
            " attempt, run_lease, max_attempts, lane_seq, enqueue_shard, run_at, attempted_at, finalized_at,"
            " created_at, payload) SELECT 0, 0, 100000000 + number, 'numbered', %s,"
            " jsonb_build_object('number', number), 'completed', 4, 1, 1, 25, number, 0, now(), now(), now(), now(),"
            " '{}' FROM generate_series(1, %s) AS number",
            (QUEUE, jobs),
        )
        connection.execute(
            "INSERT INTO awa.queue_terminal_count_deltas (ready_slot, ready_generation, queue, priority,"
            " enqueue_shard, counter_bucket, terminal_delta, recorded_at) VALUES (0, 0, %s, 4, 0, 0, %s, now())",
            (QUEUE, jobs),
        )

    def add_future(self, connection: Connection, jobs: int) -> None:
        at = (datetime.now(UTC) + timedelta(days=1)).isoformat()
        asyncio.run(_add(url_of(connection), jobs, run_at=at))

    def work(self, work: Work) -> None:
        run(self._work(work))

    async def _work(self, work: Work) -> None:
        insert = None
        if work.load.name == "insert":
            insert = insert_with_session(work.url, "asyncpg")
        elif work.load.name == "insert-grouped":
            pool = await asyncpg.create_pool(dsn(work.url), min_size=CONNECTIONS, max_size=CONNECTIONS)
            insert = insert_with_asyncpg(pool)
        handle = work.handler(insert)
        client = awa.AsyncClient(_dsn(work.url), max_connections=work.settings["max_connections"])

        async def numbered(job: Any) -> None:
            await handle(job.args.number)

        client.task(Numbered, queue=QUEUE)(numbered)
        work.start()
        queue = {"name": QUEUE, **{name: work.settings[name] for name in ("max_workers", "claim_batch_size")}}
        await client.start([queue])
        await asyncio.Event().wait()

    @asynccontextmanager
    async def producer(self, url: sa.URL, settings: Settings) -> AsyncIterator[_Producer]:
        client = awa.AsyncClient(_dsn(url))
        await client.health_check()  # opens a connection
        engine = create_async_engine(url.set(drivername="postgresql+asyncpg"))
        yield _Producer(client, engine)
        await engine.dispose()
        await client.close()


class _Producer:
    def __init__(self, client: Any, engine: AsyncEngine) -> None:
        self._client = client
        self._engine = engine

    async def one(self, number: int) -> None:
        await self._client.insert(Numbered(number), queue=QUEUE)

    async def ten(self) -> None:
        async with AsyncSession(self._engine) as session, session.begin():
            session.add(Order(note="ten jobs"))
            await session.flush()
            for number in range(10):  # the bridge has no call for several
                await insert_job(session, Numbered(number), queue=QUEUE)

    async def bulk(self, jobs: int) -> None:
        await _copy(self._client, jobs)


def _dsn(url: sa.URL) -> str:
    """Its driver wants a host, though it goes to the socket."""
    return dsn(url.set(host="localhost"))


async def _add(url: sa.URL, jobs: int, **options: Any) -> None:
    client = awa.AsyncClient(_dsn(url))
    await _copy(client, jobs, **options)
    await client.close()


async def _copy(client: Any, jobs: int, **options: Any) -> None:
    for first in range(0, jobs, CHUNK):
        numbers = range(first, min(first + CHUNK, jobs))
        await client.enqueue_many_copy([Numbered(number) for number in numbers], queue=QUEUE, **options)


PEERS = (Awa(),)
