"""What a peer has to bring: the one protocol behind which all of them stand."""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import psycopg
import sqlalchemy as sa

from tests.peers.board import Board
from tests.peers.domain import Insert

__all__ = [
    "NAMES",
    "Cannot",
    "Load",
    "Peer",
    "Producer",
    "Settings",
    "Work",
    "connect",
    "dsn",
    "load_peer",
    "run",
    "url_of",
]

NAMES: Final = (
    "enlist",
    "enlist-async",
    "pgqueuer",
    "procrastinate",
    "oban",
    "chancy",
    "dramatiq-pg",
    "awa",
)

PLAIN: Final = "plain"
"""No queue at all, for what the same costs by hand. It takes no part in the contest."""

Settings = Mapping[str, Any]
"""The settings that were chosen, as they are printed."""

Connection = psycopg.Connection[Any]


class Cannot(Exception):
    """The peer has no way to do what is measured; the message says why."""


@dataclass(frozen=True)
class Load:
    """What the handler of a job does."""

    name: Literal["nothing", "insert", "insert-grouped", "latency", "sleep"] = "nothing"
    sleep_seconds: float = 0
    slots: int | None = None
    """How many jobs may run at once; None is for the peer to choose."""


@dataclass(frozen=True)
class Work:
    """What a worker's process is told."""

    url: sa.URL
    load: Load
    board: Board
    process: int
    settings: Settings

    def start(self) -> None:
        """Wait until the clock runs: to be called when connections are open, before the queue's own `run`."""
        self.board.wait_for_start(self.process)

    def handler(self, insert: Insert | None = None) -> Callable[[int], Awaitable[None]]:
        """The body of an async handler, the same for all: it is given the job's number."""
        ran, seconds = self.board.ran, self.load.sleep_seconds

        async def do_nothing(number: int) -> None:
            ran(number)

        async def sleep(number: int) -> None:
            await asyncio.sleep(seconds)
            ran(number)

        async def begin(number: int) -> None:
            self.board.ran_at_once(number)

        async def write(number: int) -> None:
            assert insert is not None
            await insert(number)
            ran(number)

        bodies = {"nothing": do_nothing, "sleep": sleep, "latency": begin}
        return bodies.get(self.load.name, write)

    def plain_handler(self, insert: Callable[[int], None] | None = None) -> Callable[[int], None]:
        """The same body for queues that call plain functions on threads."""
        ran, seconds = self.board.ran, self.load.sleep_seconds

        def sleep(number: int) -> None:
            time.sleep(seconds)
            ran(number)

        def write(number: int) -> None:
            assert insert is not None
            insert(number)
            ran(number)

        bodies = {"nothing": ran, "sleep": sleep, "latency": self.board.ran_at_once}
        return bodies.get(self.load.name, write)


class Producer(Protocol):
    """Enqueues jobs, each with its number."""

    async def one(self, number: int) -> None:
        """One job, in a transaction of its own."""

    async def ten(self) -> None:
        """A domain row through SQLAlchemy and ten jobs, in one transaction.

        :raises Cannot: the queue cannot join that transaction.
        """

    async def bulk(self, jobs: int) -> None:
        """All the jobs from 0, in the quickest way there is.

        :raises Cannot: there is no such way.
        """


class Peer(Protocol):
    """A queue."""

    name: str
    packages: Sequence[str]
    """The distributions whose versions are told, its own first."""
    promise: str
    """What becomes of a handler's effect when the worker dies."""
    most_jobs: int
    """Most jobs of a drain, for queues with which more would take minutes."""

    def settings(self, load: Load) -> Settings:
        """The best settings for a load. Workers and producers get them back."""

    def install(self, url: sa.URL) -> None:
        """Make the queue's tables in an empty database."""

    def clear(self, connection: Connection) -> None:
        """Empty them."""

    def unfinished(self, connection: Connection, jobs: int) -> str:
        """An SQL condition: whether any of the ``jobs`` jobs that are about to be enqueued is not recorded as done."""

    def seed(self, connection: Connection, jobs: int) -> bool:
        """Enqueue with SQL what :meth:`Producer.bulk` would, where that is slow or missing; else return False."""

    def add_finished(self, connection: Connection, jobs: int) -> None:
        """Put in jobs that are done since long."""

    def add_future(self, connection: Connection, jobs: int) -> None:
        """Put in jobs that are due tomorrow."""

    def work(self, work: Work) -> None:
        """Be a worker, until the process is killed."""

    def producer(self, url: sa.URL, settings: Settings) -> AbstractAsyncContextManager[Producer]:
        """Be a producer."""


def load_peer(name: str) -> Peer:
    """Import a peer's module.

    :raises ImportError: the queue is not installed.
    """
    module = importlib.import_module(f"tests.peers.queues.{name.partition('-async')[0].replace('-', '_')}")
    peers: Mapping[str, Peer] = {peer.name: peer for peer in module.PEERS}
    return peers[name]


def dsn(url: sa.URL) -> str:
    """The URL as libpq and other drivers read it."""
    return url.set(drivername="postgresql").render_as_string(hide_password=False)


def connect(url: sa.URL) -> Connection:
    """An autocommit connection of the harness's."""
    return psycopg.connect(dsn(url), autocommit=True)


def url_of(connection: Connection) -> sa.URL:
    """Where a connection goes."""
    info = connection.info
    place = {"host": info.host, "port": str(info.port)}
    return sa.URL.create("postgresql+psycopg", info.user, info.password or None, database=info.dbname, query=place)


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run on uvloop's event loop. Where it is not installed, as for the tests of this package, on asyncio's."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(coroutine)
    else:
        uvloop.run(coroutine)
