"""chancy, on psycopg, its only driver."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, LiteralString

import chancy
import sqlalchemy as sa
from chancy import Queue, Worker
from psycopg.rows import dict_row
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from tests.peers.domain import Order, insert_with_psycopg, insert_with_session
from tests.peers.peer import Connection, Load, Settings, Work, dsn, run

QUIET: Final = logging.getLogger("tests.peers.chancy")
QUIET.setLevel(logging.ERROR)

_handlers: list[Callable[[int], Awaitable[None]]] = []


async def _numbered(*, number: int) -> None:
    await _handlers[0](number)


numbered: Any = chancy.job(queue="peers")(_numbered)
"""Found by its path, which is stored in the job."""

FUNCTION: Final = f"{__name__}.numbered"


class Chancy:
    name = "chancy"
    packages: Sequence[str] = ("chancy", "psycopg")
    promise = "another transaction than the completion; completions in batches, fenced"
    most_jobs = 1_000_000

    def settings(self, load: Load) -> Settings:
        # Jobs/s with 100, 500, 2000: 2,624, 3,460, 3,572; twice that without the plugins, of which the metrics are
        # part. An interval of 1 s, the default, would be all there is to see of the short drains.
        usual: dict[str, Any] = {"no_default_plugins": True, "send_outgoing_interval": 0.1}
        return {"concurrency": load.slots or (100 if load.name == "latency" else 500), **usual}

    def install(self, url: sa.URL) -> None:
        async def install() -> None:
            async with _chancy(url) as app:
                await app.migrate()

        asyncio.run(install())

    def clear(self, connection: Connection) -> None:
        connection.execute("TRUNCATE chancy_jobs, chancy_queues, chancy_workers")

    def unfinished(self, connection: Connection, jobs: int) -> str:
        return (
            "EXISTS (SELECT FROM chancy_jobs WHERE state NOT IN ('succeeded', 'failed')"
            " AND scheduled_at <= statement_timestamp())"
        )

    def seed(self, connection: Connection, jobs: int) -> bool:
        _add(connection, jobs, "pending", "scheduled_at", "now()", first=0)
        return True

    def add_finished(self, connection: Connection, jobs: int) -> None:
        columns: LiteralString = "attempts, started_at, completed_at, scheduled_at"
        _add(connection, jobs, "succeeded", columns, "1, now(), now(), now()")

    def add_future(self, connection: Connection, jobs: int) -> None:
        _add(connection, jobs, "pending", "scheduled_at", "now() + interval '1 day'")

    def work(self, work: Work) -> None:
        run(self._work(work))

    async def _work(self, work: Work) -> None:
        async with _chancy(work.url, no_default_plugins=work.settings["no_default_plugins"]) as app:
            insert = None
            if work.load.name == "insert":
                insert = insert_with_session(work.url, "psycopg")
            elif work.load.name == "insert-grouped":
                insert = insert_with_psycopg(app.pool)
            _handlers.append(work.handler(insert))
            executor = chancy.Chancy.Executor.Async
            concurrency = work.settings["concurrency"]
            ours = Queue("peers", executor=executor, concurrency=concurrency, eager_polling=True, polling_interval=1)
            await app.declare(ours, upsert=True)
            # A worker declares a queue of this name, with processes.
            await app.declare(Queue("default", executor=executor, concurrency=1), upsert=True)
            worker = Worker(app, register_signal_handlers=False)
            worker.send_outgoing_interval = work.settings["send_outgoing_interval"]
            work.start()
            await worker.start()
            await worker.wait_for_shutdown()

    @asynccontextmanager
    async def producer(self, url: sa.URL, settings: Settings) -> AsyncIterator[_Producer]:
        engine = create_async_engine(url)
        async with _chancy(url) as app:
            await app.get_all_queues()  # opens a connection
            yield _Producer(app, engine)
        await engine.dispose()


class _Producer:
    def __init__(self, app: Any, engine: AsyncEngine) -> None:
        self._app = app
        self._engine = engine

    async def one(self, number: int) -> None:
        await self._app.push(_new(number))

    async def ten(self) -> None:
        async with AsyncSession(self._engine) as session, session.begin():
            session.add(Order(note="ten jobs"))
            await session.flush()
            pooled = await (await session.connection()).get_raw_connection()
            connection: Any = pooled.driver_connection
            async with connection.cursor(row_factory=dict_row) as cursor:
                await self._app.push_many_ex(cursor, [_new(number) for number in range(10)])

    async def bulk(self, jobs: int) -> None:
        async for _ in self._app.push_many([_new(number) for number in range(jobs)]):
            pass


def _chancy(url: sa.URL, **options: Any) -> Any:
    return chancy.Chancy(dsn(url), log=QUIET, **options)


def _new(number: int) -> Any:
    return numbered.job.with_kwargs(number=number)


def _add(
    connection: Connection, jobs: int, state: str, columns: LiteralString, values: LiteralString, *, first: int = 1
) -> None:
    connection.execute(
        f"INSERT INTO chancy_jobs (id, queue, func, kwargs, state, {columns})"
        f" SELECT uuidv7(), 'peers', %s, json_build_object('number', number), %s, {values}"
        " FROM generate_series(%s::int, %s::int) AS number",
        (FUNCTION, state, first, first + jobs - 1),
    )


PEERS = (Chancy(),)
