"""procrastinate, on psycopg, its default."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

import procrastinate
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from tests.peers.domain import Order, insert_with_psycopg, insert_with_session
from tests.peers.peer import Connection, Load, Settings, Work, dsn, run

CHUNK: Final = 5000
"""Jobs of one call, and of one transaction."""


class Procrastinate:
    name = "procrastinate"
    packages: Sequence[str] = ("procrastinate", "psycopg")
    promise = "another transaction than the completion; not fenced"
    most_jobs = 4000

    def settings(self, load: Load) -> Settings:
        # Jobs/s with 5, 20 and 50 at once: 737, 654, 561.
        return {"concurrency": 8, "pool": 12 if load.slots else 10}

    def install(self, url: sa.URL) -> None:
        app = _app(url)

        async def install() -> None:
            async with app.open_async():
                await app.schema_manager.apply_schema_async()

        asyncio.run(install())

    def clear(self, connection: Connection) -> None:
        connection.execute(
            "TRUNCATE procrastinate_jobs, procrastinate_events, procrastinate_periodic_defers, procrastinate_workers"
            " RESTART IDENTITY CASCADE"
        )

    def unfinished(self, connection: Connection, jobs: int) -> str:
        last = connection.execute("SELECT coalesce(max(id), 0) FROM procrastinate_jobs").fetchone()
        assert last is not None
        return f"EXISTS (SELECT FROM procrastinate_jobs WHERE id > {last[0]} AND status IN ('todo', 'doing'))"

    def seed(self, connection: Connection, jobs: int) -> bool:
        return False

    def add_finished(self, connection: Connection, jobs: int) -> None:
        with _without_triggers(connection):
            connection.execute(
                "INSERT INTO procrastinate_jobs (queue_name, task_name, args, status, attempts)"
                " SELECT 'default', 'job', jsonb_build_object('number', number), 'succeeded', 1"
                " FROM generate_series(1, %s) AS number",
                (jobs,),
            )
            for event in ("deferred", "started", "succeeded"):
                connection.execute(
                    "INSERT INTO procrastinate_events (job_id, type)"
                    " SELECT id, %s::procrastinate_job_event_type FROM procrastinate_jobs",
                    (event,),
                )

    def add_future(self, connection: Connection, jobs: int) -> None:
        with _without_triggers(connection):
            connection.execute(
                "INSERT INTO procrastinate_jobs (queue_name, task_name, args, scheduled_at)"
                " SELECT 'default', 'job', jsonb_build_object('number', number), now() + interval '1 day'"
                " FROM generate_series(1, %s) AS number",
                (jobs,),
            )

    def work(self, work: Work) -> None:
        run(self._work(work))

    async def _work(self, work: Work) -> None:
        size = work.settings["pool"]
        app = _app(work.url, min_size=size, max_size=size)
        async with app.open_async():
            insert = None
            if work.load.name == "insert":
                insert = insert_with_session(work.url, "psycopg")
            elif work.load.name == "insert-grouped":
                insert = insert_with_psycopg(app.connector.pool)
            _task(app, work.handler(insert))
            work.start()
            await app.run_worker_async(concurrency=work.settings["concurrency"], install_signal_handlers=False)

    @asynccontextmanager
    async def producer(self, url: sa.URL, settings: Settings) -> AsyncIterator[_Producer]:
        app = _app(url, min_size=1, max_size=4)
        engine = create_async_engine(url)
        async with app.open_async():
            await app.check_connection_async()
            yield _Producer(_task(app, None), engine)
        await engine.dispose()


class _Producer:
    def __init__(self, task: Any, engine: AsyncEngine) -> None:
        self._task = task
        self._engine = engine

    async def one(self, number: int) -> None:
        await self._task.defer_async(number=number)

    async def ten(self) -> None:
        async with AsyncSession(self._engine) as session, session.begin():
            session.add(Order(note="ten jobs"))
            await session.flush()
            pooled = await (await session.connection()).get_raw_connection()
            task = self._task.configure(connection=pooled.driver_connection)
            await task.batch_defer_async(*_many(range(10)))

    async def bulk(self, jobs: int) -> None:
        for first in range(0, jobs, CHUNK):
            await self._task.batch_defer_async(*_many(range(first, min(first + CHUNK, jobs))))


def _app(url: sa.URL, **pool: int) -> Any:
    return procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=dsn(url), **pool))


def _task(app: Any, handle: Any) -> Any:
    async def job(number: int) -> None:
        await handle(number)

    return app.task(name="job", queue="default")(job)


def _many(numbers: range) -> list[dict[str, int]]:
    return [{"number": number} for number in numbers]


@contextmanager
def _without_triggers(connection: Connection) -> Iterator[None]:
    """Its triggers would write the events, a row at a time."""
    connection.execute("SET session_replication_role = replica")
    yield
    connection.execute("RESET session_replication_role")


PEERS = (Procrastinate(),)
