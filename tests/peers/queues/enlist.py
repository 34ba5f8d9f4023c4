"""enlist, by its public names only: once with plain handlers on threads, once with async ones on the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final, Literal

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from enlist import HandlerRegistry, Job, JobPayload, JobRepository, Worker, notifier
from enlist.migrations import migrate
from tests.peers.domain import INSERT, Effect, Order
from tests.peers.peer import Connection, Load, Producer, Settings, Work

BULK: Final = 20_000
"""Jobs of one ``enqueue_many``, and of one transaction."""


Notify = Literal["after_commit", "transaction"]


class Numbered(JobPayload, kind="peers"):
    """A job of the benchmark."""

    number: int


class Enlist:
    """:param is_async: whether its handlers are async."""

    packages: Sequence[str] = ("enlist", "sqlalchemy", "psycopg")
    promise = "commits with the completion, fenced: exactly once"
    most_jobs = 1_000_000

    def __init__(self, name: str, *, is_async: bool) -> None:
        self.name = name
        self.is_async = is_async

    def settings(self, load: Load) -> Settings:
        usual: Settings = {"slots": load.slots or 10, "commit_every": 1, "flush": "job", "notify": "after_commit"}
        if load.name == "insert-grouped":  # each slot has a group: more of them are only more threads
            return {**usual, "slots": 2, "commit_every": 200, "flush": "group"}
        if load.name == "insert" and not self.is_async:  # one core's worth of Python: more threads only take turns
            return {**usual, "slots": 5}
        return usual

    def install(self, url: sa.URL) -> None:
        engine = sa.create_engine(url, poolclass=sa.NullPool)
        with engine.begin() as connection:
            migrate(connection)

    def clear(self, connection: Connection) -> None:
        connection.execute("TRUNCATE enlist_job")

    def unfinished(self, connection: Connection, jobs: int) -> str:
        # Two conditions, in the words of the two indexes.
        return (
            "EXISTS (SELECT FROM enlist_job WHERE status = 'running' AND locked_until IS NOT NULL)"
            " OR EXISTS (SELECT FROM enlist_job WHERE status = 'queued' AND concurrency_key IS NULL"
            " AND queue = 'default' AND priority = 0 AND run_at <= statement_timestamp())"
        )

    def seed(self, connection: Connection, jobs: int) -> bool:
        return False

    def add_finished(self, connection: Connection, jobs: int) -> None:
        connection.execute(
            "INSERT INTO enlist_job (id, kind, status, attempt, payload, started_at, finished_at)"
            " SELECT gen_random_uuid(), 'peers', 'done', 1, jsonb_build_object('number', number),"
            " statement_timestamp(), statement_timestamp() FROM generate_series(1, %s) AS number",
            (jobs,),
        )

    def add_future(self, connection: Connection, jobs: int) -> None:
        connection.execute(
            "INSERT INTO enlist_job (id, kind, payload, run_at)"
            " SELECT gen_random_uuid(), 'peers', jsonb_build_object('number', number),"
            " statement_timestamp() + interval '1 day' FROM generate_series(1, %s) AS number",
            (jobs,),
        )

    def work(self, work: Work) -> None:
        slots = work.settings["slots"]
        handlers = HandlerRegistry()
        register = handlers.handler(Numbered, commit_every=work.settings["commit_every"], flush=work.settings["flush"])
        bind: sa.Engine | AsyncEngine
        if self.is_async:
            register(_async_handler(work))
            bind = create_async_engine(work.url, pool_size=slots)
        else:
            register(_plain_handler(work))
            bind = sa.create_engine(work.url, pool_size=slots)
        worker = Worker(bind, handlers, queues={"default": slots})
        work.start()
        worker.run()

    @asynccontextmanager
    async def producer(self, url: sa.URL, settings: Settings) -> AsyncIterator[Producer]:
        if self.is_async:
            async_engine = create_async_engine(url)
            yield _AsyncProducer(async_engine, settings["notify"])
            await async_engine.dispose()
        else:
            engine = sa.create_engine(url)
            yield _Producer(engine, settings["notify"])
            engine.dispose()
        notifier.close_all()


def _plain_handler(work: Work) -> Callable[[Session, Job[Numbered]], None]:
    ran, begin, seconds = work.board.ran, work.board.ran_at_once, work.load.sleep_seconds

    def do_nothing(session: Session, job: Job[Numbered]) -> None:
        ran(job.payload.number)

    def sleep(session: Session, job: Job[Numbered]) -> None:
        time.sleep(seconds)
        ran(job.payload.number)

    def stamp(session: Session, job: Job[Numbered]) -> None:
        begin(job.payload.number)

    def write(session: Session, job: Job[Numbered]) -> None:
        session.execute(INSERT, {"job": job.payload.number})
        ran(job.payload.number)

    def add(session: Session, job: Job[Numbered]) -> None:
        session.add(Effect(job=job.payload.number))
        ran(job.payload.number)

    bodies = {"nothing": do_nothing, "sleep": sleep, "latency": stamp, "insert": write, "insert-grouped": add}
    return bodies[work.load.name]


def _async_handler(work: Work) -> Callable[[AsyncSession, Job[Numbered]], Awaitable[None]]:
    ran, begin, seconds = work.board.ran, work.board.ran_at_once, work.load.sleep_seconds

    async def do_nothing(session: AsyncSession, job: Job[Numbered]) -> None:
        ran(job.payload.number)

    async def sleep(session: AsyncSession, job: Job[Numbered]) -> None:
        await asyncio.sleep(seconds)
        ran(job.payload.number)

    async def stamp(session: AsyncSession, job: Job[Numbered]) -> None:
        begin(job.payload.number)

    async def write(session: AsyncSession, job: Job[Numbered]) -> None:
        await session.execute(INSERT, {"job": job.payload.number})
        ran(job.payload.number)

    async def add(session: AsyncSession, job: Job[Numbered]) -> None:
        session.add(Effect(job=job.payload.number))
        ran(job.payload.number)

    bodies = {"nothing": do_nothing, "sleep": sleep, "latency": stamp, "insert": write, "insert-grouped": add}
    return bodies[work.load.name]


class _Producer:
    """With a Session. Nothing else runs on the event loop that it blocks."""

    def __init__(self, engine: sa.Engine, notify: Notify) -> None:
        self._engine = engine
        self._repo = JobRepository(notify=notify)

    async def one(self, number: int) -> None:
        with Session(self._engine) as session:
            self._repo.enqueue(session, Numbered(number=number))
            session.commit()

    async def ten(self) -> None:
        with Session(self._engine) as session:
            session.add(Order(note="ten jobs"))
            self._repo.enqueue_many(session, _many(range(10)))
            session.commit()

    async def bulk(self, jobs: int) -> None:
        for first in range(0, jobs, BULK):
            with Session(self._engine) as session:
                self._repo.enqueue_many(session, _many(range(first, min(first + BULK, jobs))))
                session.commit()


class _AsyncProducer:
    """With an AsyncSession."""

    def __init__(self, engine: AsyncEngine, notify: Notify) -> None:
        self._engine = engine
        self._repo = JobRepository(notify=notify)

    async def one(self, number: int) -> None:
        async with AsyncSession(self._engine) as session:
            self._repo.enqueue(session, Numbered(number=number))
            await session.commit()

    async def ten(self) -> None:
        async with AsyncSession(self._engine) as session:
            session.add(Order(note="ten jobs"))
            self._repo.enqueue_many(session, _many(range(10)))
            await session.commit()

    async def bulk(self, jobs: int) -> None:
        for first in range(0, jobs, BULK):
            async with AsyncSession(self._engine) as session:
                self._repo.enqueue_many(session, _many(range(first, min(first + BULK, jobs))))
                await session.commit()


def _many(numbers: range) -> list[Numbered]:
    return [Numbered(number=number) for number in numbers]


PEERS = (Enlist("enlist", is_async=False), Enlist("enlist-async", is_async=True))
