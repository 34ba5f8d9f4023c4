"""A worker that ``enlist bench drain`` starts as a process: it does what it is told on its standard input.

A line of JSON says what to ``do``: ``start`` the worker, for the :class:`Way` and the slots that are given; ``look``
how far it is; ``stop`` it. The answer is a line of JSON as well.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from enlist.handlers import Flush, HandlerRegistry
from enlist.job import Job
from enlist.payload import JobPayload
from enlist.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["KIND", "QUEUE", "Base", "DrainJob", "Drainer", "Effect", "Way"]

KIND: Final = "bench_drain"
QUEUE: Final = "work"

TURNS: Final = 70_000
"""Of the loop that takes about a millisecond of Python."""


class Base(DeclarativeBase):
    """The application's tables."""


class Effect(Base):
    """What a handler writes. Nothing in the schema forbids a second one for a job: it would show."""

    __tablename__ = "bench_effect"

    id: Mapped[int] = mapped_column(primary_key=True)
    job: Mapped[int]


class DrainJob(JobPayload, kind=KIND, queue=QUEUE):
    """A job with a number of its own."""

    number: int


@dataclass(frozen=True)
class Way:
    """What the handler does, and how it is run."""

    does: Literal["nothing", "insert", "add", "burn"] = "nothing"
    """Nothing; one INSERT through its Session; one object added to it; about a millisecond of Python, with the GIL."""
    asynchronous: bool = False
    commit_every: int = 1


def registry(way: Way, ran: Callable[[int], None]) -> HandlerRegistry:
    """The handler, which tells the number of each job that it runs."""
    handlers = HandlerRegistry()
    write = sa.insert(Effect)

    def nothing(session: Session, job: Job[DrainJob]) -> None:
        ran(job.payload.number)

    def insert(session: Session, job: Job[DrainJob]) -> None:
        session.execute(write, {"job": job.payload.number})
        ran(job.payload.number)

    def add(session: Session, job: Job[DrainJob]) -> None:
        session.add(Effect(job=job.payload.number))
        ran(job.payload.number)

    def burn(session: Session, job: Job[DrainJob]) -> None:
        for _ in range(TURNS):
            pass
        ran(job.payload.number)

    async def nothing_async(session: AsyncSession, job: Job[DrainJob]) -> None:
        ran(job.payload.number)

    async def insert_async(session: AsyncSession, job: Job[DrainJob]) -> None:
        await session.execute(write, {"job": job.payload.number})
        ran(job.payload.number)

    async def add_async(session: AsyncSession, job: Job[DrainJob]) -> None:
        session.add(Effect(job=job.payload.number))
        ran(job.payload.number)

    plain = {"nothing": nothing, "insert": insert, "add": add, "burn": burn}
    asynchronous = {"nothing": nothing_async, "insert": insert_async, "add": add_async}
    flush: Flush = "group" if way.does == "add" and way.commit_every > 1 else "job"
    register = handlers.handler(DrainJob, commit_every=way.commit_every, flush=flush)
    if way.asynchronous:
        register(asynchronous[way.does])
    else:
        register(plain[way.does])
    return handlers


class Drainer:
    """A worker that can be started again and again, each time for another way."""

    def __init__(self, engine_for: Callable[[int], sa.Engine]) -> None:
        """:param engine_for: makes an engine with so many connections."""
        self._engine_for = engine_for
        self._engine: sa.Engine | None = None
        self._worker: Worker | None = None
        self._runs: list[int] = []

    def start(self, way: Way, slots: int) -> None:
        """Start a worker; return when it is connected."""
        self._runs = []
        self._engine = self._engine_for(slots)
        self._worker = Worker(self._engine, registry(way, self._runs.append), queues={QUEUE: slots})
        self._worker.start()

    def look(self) -> dict[str, float]:
        """How many times a handler was run, how many jobs are in hand, and the seconds of CPU so far."""
        assert self._worker is not None
        in_hand = self._worker.health().jobs  # asked first: a job that ends in between is counted
        return {"in_hand": in_hand, "runs": len(self._runs), "cpu_seconds": time.process_time()}

    def stop(self) -> list[int]:
        """Stop it; return the number of the job of each run."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None
        if self._engine is not None:
            self._engine.dispose()
            self._engine = None
        return self._runs


def main() -> None:
    """Do task after task until the input ends."""
    url = os.environ["ENLIST_DATABASE_URL"]
    drainer = Drainer(lambda slots: sa.create_engine(url, pool_size=slots))
    for line in sys.stdin:
        task = json.loads(line)
        answer: object = None
        if task["do"] == "start":
            drainer.start(Way(**task["way"]), task["slots"])
        else:
            answer = {"look": drainer.look, "stop": drainer.stop}[task["do"]]()
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    drainer.stop()


if __name__ == "__main__":
    main()
