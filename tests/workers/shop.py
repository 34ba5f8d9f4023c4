"""A worker process with a handler for each thing that may go wrong.

It says ``ready`` when it has the database, ``run KIND ID ATTEMPT`` when a handler starts, and hears ``go``.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
import tenacity
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from enlist import HandlerRegistry, Job, Worker
from tests.shop import Counter, Effect

SETTINGS: dict[str, Any] = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
LABEL: str = SETTINGS.pop("label", "")

handlers = HandlerRegistry()
SOON = tenacity.wait_fixed(0.05)
SHARED = sa.text("SELECT count(*) FROM shop_effect WHERE xmin = pg_current_xact_id()::xid")
_go = threading.Semaphore(0)
_output = threading.Lock()


def say(*words: object) -> None:
    with _output:
        print(*words, flush=True)


def note(session: Session | AsyncSession, job: Job[Any]) -> None:
    session.add(Effect(job_id=job.id, attempt=job.attempt, worker=LABEL))


@handlers.handler("healthy", wait=SOON)
def healthy(session: Session, job: Job[dict[str, Any]]) -> None:
    say("run", job.kind, job.id, job.attempt)
    note(session, job)


@handlers.handler("holding", wait=SOON)
def holding(session: Session, job: Job[dict[str, Any]]) -> None:
    """Writes its effect, says so, and waits in the open transaction until it is told to go on."""
    note(session, job)
    session.flush()
    say("run", job.kind, job.id, job.attempt)
    _go.acquire()
    say("went", job.kind, job.id, job.attempt)


@handlers.handler("asleep", wait=SOON)
def asleep(session: Session, job: Job[dict[str, Any]]) -> None:
    """Never returns."""
    say("run", job.kind, job.id, job.attempt)
    threading.Event().wait()


@handlers.handler("asleep for too long", wait=tenacity.wait_fixed(60), timeout=0.2)
def asleep_for_too_long(session: Session, job: Job[dict[str, Any]]) -> None:
    """The same, and has a timeout."""
    asleep(session, job)


@handlers.handler("async asleep", wait=SOON)
async def async_asleep(session: AsyncSession, job: Job[dict[str, Any]]) -> None:
    """The same on a thread of the loop's executor."""
    say("run", job.kind, job.id, job.attempt)
    await asyncio.to_thread(threading.Event().wait)


@handlers.handler("forking", wait=SOON)
def forking(session: Session, job: Job[dict[str, Any]]) -> None:
    """Its child returns as well: it must not write to the connection that it shares."""
    note(session, job)
    session.flush()
    if child := os.fork():
        os.waitpid(child, 0)


@handlers.handler("async holding", wait=SOON)
async def async_holding(session: AsyncSession, job: Job[dict[str, Any]]) -> None:
    """Waits in the database, where a cancellation reaches it."""
    note(session, job)
    await session.flush()
    say("run", job.kind, job.id, job.attempt)
    await session.execute(sa.text("SELECT pg_sleep(60)"))


@handlers.handler("counting", wait=SOON)
def counting(session: Session, job: Job[dict[str, Any]]) -> None:
    """Counts those of its key that are inside, in transactions of its own: others see it at once."""
    engine = session.get_bind()
    assert isinstance(engine, sa.Engine)
    inside = sa.update(Counter).where(Counter.name == job.payload["name"])
    with engine.begin() as connection:
        value = connection.scalar(inside.values(value=Counter.value + 1).returning(Counter.value))
        connection.execute(
            sa.update(Counter)
            .where(Counter.name == f"{job.payload['name']} most", Counter.value < value)
            .values(value=value)
        )
    time.sleep(job.payload.get("seconds", 0.002))
    with engine.begin() as connection:
        connection.execute(inside.values(value=Counter.value - 1))
    note(session, job)


@handlers.handler("grouped", wait=SOON, commit_every=50)
def grouped(session: Session, job: Job[dict[str, Any]]) -> None:
    """Shares its transaction with those that wait for its slot; one of them kills the process."""
    note(session, job)
    session.flush()
    if job.payload.get("kills"):
        say("run", job.kind, job.id, job.attempt, session.scalar(SHARED))
        os.kill(os.getpid(), signal.SIGKILL)


@handlers.handler("exit", wait=SOON)
def leave(session: Session, job: Job[dict[str, Any]]) -> None:
    say("run", job.kind, job.id, job.attempt)
    os._exit(1)


@handlers.handler("sigkill", wait=SOON)
def sigkill(session: Session, job: Job[dict[str, Any]]) -> None:
    say("run", job.kind, job.id, job.attempt)
    os.kill(os.getpid(), signal.SIGKILL)


@handlers.handler("segfault", wait=SOON)
def segfault(session: Session, job: Job[dict[str, Any]]) -> None:
    say("run", job.kind, job.id, job.attempt)
    ctypes.string_at(0)


@contextmanager
def ready() -> Iterator[None]:
    say("ready")
    yield


def listen() -> None:
    for line in sys.stdin:
        if line.strip() == "go":
            _go.release()


def main() -> None:
    if SETTINGS.pop("hears_hangup", False):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    threading.Thread(target=listen, daemon=True).start()
    engine = sa.create_engine(SETTINGS.pop("url"), pool_size=20, **SETTINGS.pop("engine", {}))
    options = {"lease": 1, "poll_interval": 0.05, "queues": {"default": 5}, "lifespan": ready, **SETTINGS}
    worker = Worker(engine, handlers, **options)
    say("starting")
    worker.run()
    engine.dispose()


if __name__ == "__main__":
    main()
