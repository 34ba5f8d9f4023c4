"""A pre-fork server: engine and worker are made in the parent, the engine is used there, the children start the worker.

It says ``done PID STATUS`` of each child. If it is to start the worker too, it stops it when it hears something.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from enlist import HandlerRegistry, Job, Worker
from tests.shop import Effect

SETTINGS: dict[str, Any] = json.loads(sys.argv[1])

handlers = HandlerRegistry()
engine = sa.create_engine(SETTINGS["url"], pool_size=5)


@handlers.handler("work")
def work(session: Session, job: Job[Any]) -> None:
    session.add(Effect(job_id=job.id, attempt=job.attempt, worker=str(os.getpid())))


@handlers.handler("async work")
async def async_work(session: AsyncSession, job: Job[Any]) -> None:
    session.add(Effect(job_id=job.id, attempt=job.attempt, worker=str(os.getpid())))


worker = Worker(engine, handlers, queues={"default": 4}, poll_interval=0.05)


def in_child() -> None:
    if SETTINGS.get("started"):  # in the parent: there is nothing to stop here
        os._exit(0 if worker.stop() else 1)
    worker.start()
    with engine.connect() as connection:
        while connection.scalar(sa.text("SELECT count(*) FROM enlist_job WHERE status <> 'done'")):
            connection.rollback()
            time.sleep(0.01)
    clean = worker.stop()
    engine.dispose()
    os._exit(0 if clean else 1)


def main() -> None:
    # All its connections are in the pool when the children are forked.
    connections = [engine.connect() for _ in range(5)]
    for connection in connections:
        connection.close()
    if SETTINGS.get("started"):
        worker.start()
    children = []
    for _ in range(2):
        if (pid := os.fork()) == 0:
            try:
                in_child()
            finally:
                os._exit(3)
        children.append(pid)
    for pid in children:
        print("done", pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    if SETTINGS.get("started"):
        sys.stdin.readline()
        print("stopped", worker.stop(), flush=True)
    # The parent's connections are as they were.
    with engine.connect() as connection:
        print("parent", connection.scalar(sa.text("SELECT 1")), flush=True)
    engine.dispose()


if __name__ == "__main__":
    main()
