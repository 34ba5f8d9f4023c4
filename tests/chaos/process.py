"""A worker of a crew, in a process of its own."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import threading
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from enlist import HandlerRegistry, Job, Worker, _slots, notifier
from tests.chaos import ways
from tests.chaos.ways import CHILD, CREWS, WAYS

APPLICATION = "chaos"
"""By which the server knows the workers' sessions."""
SLOTS = 4
QUICK_SLOTS = 3
SHUTDOWN_SECONDS = 15


def work(settings: dict[str, Any]) -> int:
    """Run a worker until it is told to stop; the exit status.

    Settings: its ``name``, ``crew`` and ``ways``, the ``url`` of the database, ``log``, and how often it kills itself
    at a commit (``fatal``, a chance).
    """
    random.seed(settings["name"])  # the random numbers of a fork are those of its siblings
    logging.basicConfig(
        filename=settings["log"], level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    logging.captureWarnings(capture=True)
    ways.worker_name = settings["name"]
    if settings["crew"] == "groups":  # else a slow machine has none: jobs that take long are not prefetched
        vars(_slots).update(PREFETCH_SECONDS=1.0, PREFETCH_LIMIT_SECONDS=1.0)
    crew = CREWS[settings["crew"]]
    served = [WAYS[name] for name in settings["ways"] if WAYS[name].crew == crew.name]
    queues = {way.queue: QUICK_SLOTS if way.quick else SLOTS for way in served} | {crew.name: SLOTS}
    handlers = ways.registry([*served, CHILD])
    answer_roll_call(handlers, settings["name"])

    url = sa.make_url(settings["url"])
    size = sum(queues.values())
    options = {"pool_size": size, "isolation_level": crew.isolation}
    name = {"application_name": APPLICATION}
    engine = sa.create_engine(url, connect_args=name, **options)
    async_engine = create_async_engine(
        url.set(drivername=f"postgresql+{crew.async_driver}"),
        connect_args={"server_settings": name} if crew.async_driver == "asyncpg" else name,
        **options,
    )
    for one in (engine, async_engine.sync_engine):
        event.listen(one, "commit", lambda _: die(settings["fatal"]))
    event.listen(Session, "after_commit", lambda _: die(settings["fatal"]))

    worker = Worker(
        engine,
        handlers,
        async_bind=async_engine,
        queues=queues,
        lease=settings["lease"],
        reaper_interval=0.3,
        poll_interval=0.1,
        shutdown_timeout=SHUTDOWN_SECONDS,
    )
    worker.run()
    engine.dispose()
    notifier.close_all()
    return 0


def die(chance: float) -> None:
    """Before COMMIT is sent, or when it was answered: the moments where it counts most."""
    if random.random() < chance:
        os.kill(os.getpid(), signal.SIGKILL)


def answer_roll_call(handlers: HandlerRegistry, name: str) -> None:
    """Two kinds of job that this worker alone runs: as many as it has slots, all of which must be inside at once."""
    everybody = threading.Barrier(SLOTS, timeout=10)
    inside = 0
    all_inside = asyncio.Event()

    @handlers.handler(f"present {name}")
    def present(session: Session, job: Job[Any]) -> None:
        everybody.wait()

    @handlers.handler(f"async present {name}")
    async def async_present(session: AsyncSession, job: Job[Any]) -> None:
        nonlocal inside
        inside += 1
        if inside >= SLOTS:
            all_inside.set()
        async with asyncio.timeout(10):
            await all_inside.wait()
