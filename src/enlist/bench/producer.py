"""A producer that ``enlist bench latency`` starts as a process: it does what it is told on its standard input.

A line of JSON is a task, :class:`Task`; the answer is a line of JSON as well.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from dataclasses import dataclass
from typing import Final, Literal

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from enlist import notifier
from enlist.repository import JobRepository

__all__ = ["OTHER_QUEUE", "PAUSE_SECONDS", "Base", "Note", "Task", "commits", "enqueued"]

PAUSE_SECONDS: Final = 0.06
"""Least time between two jobs that are enqueued one by one: two NOTIFYs of a queue that came sooner would be put
together. Up to twice as long, so as not to keep step."""

OTHER_QUEUE: Final = "bench_other"
"""Nobody serves it."""


class Base(DeclarativeBase):
    """The application's tables."""


class Note(Base):
    """The domain row."""

    __tablename__ = "bench_note"

    id: Mapped[int] = mapped_column(primary_key=True)
    text: Mapped[str]


@dataclass(frozen=True)
class Task:
    """What a producer is to do."""

    kind: str = ""
    """Enqueue ``jobs`` of it, one by one; empty: commit as often as possible for ``seconds``, in another queue."""
    jobs: int = 0
    delays: tuple[float, float] | None = None
    """How much later they are due, at least and at most."""
    seconds: float = 0.0
    notify: Literal["after_commit", "transaction"] | None = "after_commit"


def enqueued(engine: sa.Engine, task: Task) -> dict[str, float]:
    """Enqueue jobs one by one; by their ids, when the COMMIT of each had returned, by the monotonic clock."""
    repo = JobRepository(notify=task.notify)
    found = {}
    for _ in range(task.jobs):
        delay = None if task.delays is None else random.uniform(*task.delays)  # noqa: S311
        with Session(engine) as session:
            handle = repo.enqueue(session, task.kind, {}, delay=delay)
            session.commit()
            found[str(handle.id)] = time.monotonic()
        if task.delays is None:
            time.sleep(random.uniform(1, 2) * PAUSE_SECONDS)  # noqa: S311
    return found


def commits(engine: sa.Engine, task: Task) -> int:
    """Commit a row and a job, again and again; how often."""
    repo = JobRepository(notify=task.notify)
    end, number = time.monotonic() + task.seconds, 0
    while time.monotonic() < end:
        with Session(engine) as session:
            session.add(Note(text="a"))
            repo.enqueue(session, "bench_other", {}, queue=OTHER_QUEUE)
            session.commit()
        number += 1
    return number


def main() -> None:
    """Do task after task until the input ends."""
    engine = sa.create_engine(os.environ["ENLIST_DATABASE_URL"])
    for line in sys.stdin:
        task = Task(**json.loads(line))
        answer = enqueued(engine, task) if task.kind else commits(engine, task)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    notifier.close_all()
    engine.dispose()


if __name__ == "__main__":
    main()
