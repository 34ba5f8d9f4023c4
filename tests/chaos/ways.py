"""The ways to run a handler: each has a kind of job for itself, and workers that it runs in."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import sqlalchemy as sa
import tenacity
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from enlist import Cancel, HandlerRegistry, Job, JobPayload, JobRepository, Snooze
from tests.chaos.tables import COUNTERS, Count, Effect, Tally

SOON = tenacity.wait_fixed(0.1)
KEYS = 12
"""Concurrency keys of each way that has some."""

repo = JobRepository(notify=None)
worker_name = ""
"""Which process this is; in the rows that it writes."""


class OnPurpose(Exception):
    """What handlers raise that are to fail."""


# -- handlers --------------------------------------------------------------------------------------------------


def some_seconds(longest: float = 0.2) -> float:
    """Mostly none, seldom a few ms, very seldom more: kills must come before, between and after the statements."""
    chance = random.random()
    if chance < 0.6:
        return 0
    return random.uniform(0, 0.02 if chance < 0.95 else longest)


def effect_of(job: Job[Any]) -> Effect:
    return Effect(job_id=job.id, kind=job.kind, worker=worker_name, attempt=job.attempt)


def counting(job: Job[Any], counters: int = COUNTERS) -> sa.Update:
    mine = (Count.kind == job.kind, Count.number == job.payload["number"] % counters + 1)
    # Not with "evaluate", which would look for objects to change.
    return sa.update(Count).where(*mine).values(value=Count.value + 1).execution_options(synchronize_session=False)


def plain(session: Session, job: Job[Any]) -> None:
    time.sleep(some_seconds())
    session.add(effect_of(job))
    session.flush()
    time.sleep(some_seconds(0.6))
    session.execute(counting(job))
    time.sleep(some_seconds())


async def coroutine(session: AsyncSession, job: Job[Any]) -> None:
    await asyncio.sleep(some_seconds())
    session.add(effect_of(job))
    await session.flush()
    await asyncio.sleep(some_seconds(0.6))
    await session.execute(counting(job))
    await asyncio.sleep(some_seconds())


def contended(session: Session, job: Job[Any]) -> None:
    """Few rows for many: at the higher isolation levels, serialization failures."""
    session.add(effect_of(job))
    session.flush()
    time.sleep(some_seconds(0.05))
    session.execute(counting(job, 20))


async def async_contended(session: AsyncSession, job: Job[Any]) -> None:
    session.add(effect_of(job))
    await session.flush()
    await asyncio.sleep(some_seconds(0.05))
    await session.execute(counting(job, 20))


def quick(session: Session, job: Job[Any]) -> None:
    session.add(effect_of(job))
    session.execute(counting(job))


async def async_quick(session: AsyncSession, job: Job[Any]) -> None:
    session.add(effect_of(job))
    await session.execute(counting(job))


def committing(session: Session, job: Job[Any]) -> None:
    """Commits by itself, midway."""
    session.add(effect_of(job))
    session.commit()
    time.sleep(some_seconds())
    session.execute(counting(job))
    session.commit()


async def async_committing(session: AsyncSession, job: Job[Any]) -> None:
    session.add(effect_of(job))
    await session.commit()
    await asyncio.sleep(some_seconds())
    await session.execute(counting(job))
    await session.commit()


def nothing(session: Session, job: Job[Any]) -> None:
    """Never uses its session: its end is written by the worker, with others'."""
    time.sleep(some_seconds(0.02))


async def async_nothing(session: AsyncSession, job: Job[Any]) -> None:
    await asyncio.sleep(some_seconds(0.02))


def long(session: Session, job: Job[Any]) -> None:
    """Longer than a lease."""
    session.add(effect_of(job))
    session.flush()
    time.sleep(random.uniform(1, 2))
    session.execute(counting(job))


def tallying(session: Session, job: Job[Any]) -> None:
    """Reads and then writes what those of its key have in common."""
    key = job.payload["key"]
    value = session.scalars(sa.select(Tally.value).where(Tally.key == key)).one()
    time.sleep(some_seconds(0.1))
    session.add(effect_of(job))
    session.flush()
    session.execute(counting(job))
    session.execute(sa.update(Tally).where(Tally.key == key).values(value=value + 1))


class Step(JobPayload, kind="ordered", ordered=True):
    number: int
    key: str
    failures: int

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


def step(session: Session, job: Job[Step]) -> None:
    """The same, one after the other; some fail before they go well."""
    tallying(session, job)
    if job.attempt <= job.payload.failures:
        raise OnPurpose


def flaky(session: Session, job: Job[Any]) -> None:
    """Fails so many times, with all its effects in hand."""
    plain(session, job)
    if job.attempt <= job.payload["failures"]:
        raise OnPurpose


async def async_flaky(session: AsyncSession, job: Job[Any]) -> None:
    await coroutine(session, job)
    if job.attempt <= job.payload["failures"]:
        raise OnPurpose


def late(session: Session, job: Job[Any]) -> None:
    """Takes longer than its timeout at first."""
    quick(session, job)
    session.flush()
    if job.attempt <= job.payload["failures"]:
        time.sleep(0.4)


async def async_late(session: AsyncSession, job: Job[Any]) -> None:
    await async_quick(session, job)
    if job.attempt <= job.payload["failures"]:
        await session.execute(sa.select(sa.func.pg_sleep(0.4)))


def doomed(session: Session, job: Job[Any]) -> None:
    plain(session, job)
    raise OnPurpose


def quitting(session: Session, job: Job[Any]) -> None:
    plain(session, job)
    raise Cancel("it quits")


def snoozing(session: Session, job: Job[Any]) -> None:
    plain(session, job)
    if time.time() < job.payload["until"]:
        raise Snooze(0.2)


def parent(session: Session, job: Job[Any]) -> None:
    repo.enqueue(
        session,
        "child",
        {"number": job.payload["number"], "parent": str(job.id)},
        queue=job.queue,
        max_attempts=MOST_ATTEMPTS,
    )
    plain(session, job)


async def async_parent(session: AsyncSession, job: Job[Any]) -> None:
    repo.enqueue(
        session,
        "child",
        {"number": job.payload["number"], "parent": str(job.id)},
        queue=job.queue,
        max_attempts=MOST_ATTEMPTS,
    )
    await coroutine(session, job)


# -- ways ------------------------------------------------------------------------------------------------------

MOST_ATTEMPTS = 1000
"""Of jobs that are to be done in the end, however often their worker dies."""


@dataclass(frozen=True)
class Crew:
    """Workers that are set up alike, and have queues of their own."""

    name: str
    isolation: str = "READ COMMITTED"
    async_driver: str = "psycopg"


CREWS = {
    crew.name: crew
    for crew in (
        Crew("usual"),
        Crew("groups"),
        Crew("repeatable", isolation="REPEATABLE READ"),
        Crew("serializable", isolation="SERIALIZABLE"),
        Crew("asyncpg", async_driver="asyncpg"),
    )
}


def _bare(random: random.Random, number: int) -> dict[str, Any]:
    return {}


def _failing(random: random.Random, number: int) -> dict[str, Any]:
    return {"failures": random.choice([0, 1, 1, 2, 3])}


def _once_late(random: random.Random, number: int) -> dict[str, Any]:
    return {"failures": random.choice([0, 0, 1])}


def _snoozed(random: random.Random, number: int) -> dict[str, Any]:
    return {"until": time.time() + random.uniform(0, 1)}


@dataclass(frozen=True)
class Way:
    """A way to run a handler."""

    name: str
    """The kind of its jobs, too."""
    function: Callable[[Any, Job[Any]], Any]
    options: dict[str, Any] = field(default_factory=dict)
    """Of the handler."""
    crew: str = "usual"
    quick: bool = False
    """In a queue with others that are quick, where jobs are prefetched."""
    depth: int = 40
    """Jobs that are kept ready."""
    max_attempts: int = MOST_ATTEMPTS
    limit: int | None = None
    """How many of a concurrency key may run."""
    make: Callable[[random.Random, int], dict[str, Any]] = _bare
    """More of the payload."""
    ends: Literal["done", "dead", "cancelled"] = "done"
    leaves: bool = True
    """Whether a job that is done has left its effects."""
    tallies: bool = False
    spawns: bool = False
    """A job that is done has left a child."""

    @property
    def queue(self) -> str:
        return f"{self.crew} quick" if self.quick else self.crew

    def enqueue(self, session: Session, random: random.Random, number: int) -> uuid.UUID:
        payload: dict[str, Any] = {"number": number, **self.make(random, number)}
        options: dict[str, Any] = {"queue": self.queue, "max_attempts": self.max_attempts}
        if self.limit is not None:
            options["concurrency_key"] = payload["key"] = f"{self.name} {number % KEYS}"
            options["concurrency_limit"] = self.limit
        if self.function is step:
            return repo.enqueue(session, Step(**payload), **options).id
        return repo.enqueue(session, self.name, payload, **options).id


WAYS = {
    way.name: way
    for way in (
        Way("lease", plain),
        Way("async_lease", coroutine),
        Way("hold_lock", plain, {"hold_lock": True}),
        Way("async_hold_lock", coroutine, {"hold_lock": True}),
        Way("repeatable", contended, crew="repeatable"),
        Way("async_repeatable", async_contended, crew="repeatable"),
        Way("serializable", contended, crew="serializable"),
        Way("async_serializable", async_contended, crew="serializable"),
        Way("asyncpg", coroutine, crew="asyncpg"),
        Way("asyncpg_hold_lock", coroutine, {"hold_lock": True}, crew="asyncpg"),
        Way("batched", nothing, quick=True, depth=30, leaves=False),
        Way("async_batched", async_nothing, quick=True, depth=30, leaves=False),
        Way("grouped", quick, {"commit_every": 50}, crew="groups", depth=400),
        Way("async_grouped", async_quick, {"commit_every": 50}, crew="groups", depth=400),
        Way("savepoint", committing, {"on_commit": "savepoint"}),
        Way("async_savepoint", async_committing, {"on_commit": "savepoint"}),
        Way("long", long, depth=4),
        Way("key_of_one", tallying, limit=1, tallies=True),
        Way("key_of_three", plain, limit=3, depth=60),
        Way("ordered", step, {}, limit=1, tallies=True, make=_failing),
        Way("flaky", flaky, make=_failing),
        Way("async_flaky", async_flaky, make=_failing),
        Way("late", late, {"timeout": 0.2}, make=_once_late, depth=10),
        Way("async_late", async_late, {"timeout": 0.2}, make=_once_late, depth=10),
        Way("doomed", doomed, max_attempts=3, ends="dead", depth=10),
        Way("quitting", quitting, ends="cancelled", depth=10),
        Way("snoozing", snoozing, make=_snoozed, depth=20),
        Way("parent", parent, spawns=True),
        Way("async_parent", async_parent, spawns=True),
    )
}
CHILD = Way("child", plain, depth=0)


def registry(ways: Iterable[Way]) -> HandlerRegistry:
    """The handlers of some ways."""
    handlers = HandlerRegistry()
    for way in ways:
        payload: Any = Step if way.function is step else way.name
        handlers.handler(payload, wait=SOON, **way.options)(way.function)
    return handlers
