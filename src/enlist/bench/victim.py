"""A worker that takes one job and never finishes it: the lab starts it as a process and kills it."""

from __future__ import annotations

import os
import sys
from typing import Any, Final

from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from enlist.handlers import HandlerRegistry
from enlist.job import Job
from enlist.worker import Worker

__all__ = ["KIND", "LEASE_SECONDS", "QUEUE"]

KIND: Final = "lab_doomed"
QUEUE: Final = "doomed"
LEASE_SECONDS: Final = 1.0

handlers = HandlerRegistry()


@handlers.handler(KIND)
def hold(session: Session, job: Job[dict[str, Any]]) -> None:
    """Say that the job is here, and keep it until the lab is gone."""
    sys.stdout.write(f"{job.attempt}\n")
    sys.stdout.flush()
    while os.read(0, 1024):
        pass
    os._exit(1)


if __name__ == "__main__":
    engine = create_engine(os.environ["ENLIST_DATABASE_URL"])
    Worker(engine, handlers, queues={QUEUE: 1}, lease=LEASE_SECONDS).run()
