"""No queue: rows of a table that was made by hand, through a Session. The floor under the enqueueing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import sqlalchemy as sa
from sqlalchemy.orm import Session

from tests.peers.domain import Order, PlainJob
from tests.peers.peer import PLAIN, Cannot, Connection, Load, Settings, Work

NO_WORKER = "there is no worker of plain rows"


class Plain:
    name = PLAIN
    packages: Sequence[str] = ("sqlalchemy", "psycopg")
    promise = ""
    most_jobs = 1_000_000

    def settings(self, load: Load) -> Settings:
        return {}

    def install(self, url: sa.URL) -> None:
        pass  # the application's tables are there

    def clear(self, connection: Connection) -> None:
        pass

    def unfinished(self, connection: Connection, jobs: int) -> str:
        raise Cannot(NO_WORKER)

    def seed(self, connection: Connection, jobs: int) -> bool:
        raise Cannot(NO_WORKER)

    def add_finished(self, connection: Connection, jobs: int) -> None:
        raise Cannot(NO_WORKER)

    def add_future(self, connection: Connection, jobs: int) -> None:
        raise Cannot(NO_WORKER)

    def work(self, work: Work) -> None:
        raise Cannot(NO_WORKER)

    @asynccontextmanager
    async def producer(self, url: sa.URL, settings: Settings) -> AsyncIterator[_Producer]:
        engine = sa.create_engine(url)
        yield _Producer(engine)
        engine.dispose()


class _Producer:
    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine

    async def one(self, number: int) -> None:
        with Session(self._engine) as session:
            session.add(_row(number))
            session.commit()

    async def ten(self) -> None:
        with Session(self._engine) as session:
            session.add(Order(note="ten jobs"))
            session.add_all([_row(number) for number in range(10)])
            session.commit()

    async def bulk(self, jobs: int) -> None:
        raise Cannot("a Session is not the way to write many")


def _row(number: int) -> PlainJob:
    return PlainJob(kind="peers", payload={"number": number})


PEERS = (Plain(),)
