"""A web server's process: it owns the signals, and a worker lives as long as it serves.

It says ``ready`` when the lifespan has begun, ``run ID`` when a handler starts, and hears ``go``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from enlist import HandlerRegistry, Job, Worker
from tests.shop import Effect

SETTINGS: dict[str, Any] = json.loads(sys.argv[1])

handlers = HandlerRegistry()
_go = threading.Event()


@handlers.handler("work")
def work(session: Session, job: Job[Any]) -> None:
    session.add(Effect(job_id=job.id, attempt=job.attempt, worker=SETTINGS["label"]))
    if job.payload.get("hold"):
        session.flush()
        print("run", job.id, flush=True)
        _go.wait()


engine = sa.create_engine(SETTINGS["url"], pool_size=5)
worker = Worker(engine, handlers, queues={"default": 2}, lease=1, poll_interval=0.05)


@asynccontextmanager
async def lifespan(_app: object) -> AsyncIterator[None]:
    """What the documentation shows."""
    try:
        await asyncio.to_thread(worker.start)
        yield
    finally:
        await asyncio.to_thread(worker.stop)


async def serve() -> None:
    """As servers do: take the signals, have the lifespan begun, serve until a signal comes, have it ended."""
    loop, asked = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.set)
    async with lifespan(None):
        print("ready", flush=True)
        await asked.wait()


def listen() -> None:
    for line in sys.stdin:
        if line.strip() == "go":
            _go.set()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    threading.Thread(target=listen, daemon=True).start()
    asyncio.run(serve())
    engine.dispose()
    print("left", [thread.name for thread in threading.enumerate() if thread.name.startswith("enlist")], flush=True)
