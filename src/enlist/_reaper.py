"""Takes back jobs whose lease has ended: their worker died, froze or cannot reach the database."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from enlist._log import Log
from enlist._loop import Loop
from enlist.events import EventName, Events
from enlist.models import JobStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import sqlalchemy as sa

    from enlist._database import Database

__all__ = ["Reaper", "reap"]

logger = Log("enlist.worker")

BATCH: Final = 500


def reap(database: Database, limit: int = BATCH, *, worker: str = "") -> Sequence[sa.Row[Any]]:
    """Take back at most ``limit`` jobs; rows as :attr:`Statements.reap` returns them.

    :param worker: who does it, for the log.
    """
    rows = database.execute(database.statements.reap, {"limit": limit})
    for row in rows:
        dead = row.status is JobStatus.DEAD
        logger.log(
            logging.ERROR if dead else logging.WARNING,
            "job %s (%s): worker %s let its lease run out; the job is %s",
            row.id,
            row.kind,
            row.worker,
            "dead after its last attempt" if dead else "queued again",
            extra={
                "job_id": str(row.id),
                "kind": row.kind,
                "queue": row.queue,
                "attempt": row.attempt,
                "max_attempts": row.max_attempts,
                "worker": worker,
                "event": EventName.REAPED,
                "lost": row.lost,
                "lost_worker": row.worker,
            },
        )
    return rows


class Reaper:
    """Does so every ``interval`` seconds, on a thread. Every worker has one; they don't disturb each other."""

    def __init__(
        self,
        database: Database,
        interval: float,
        reaped: Callable[[Sequence[sa.Row[Any]]], None],
        events: Events | None = None,
        *,
        worker: str = "",
    ) -> None:
        self._database = database
        self._events = events or Events()
        self._worker = worker
        self._interval = interval
        self._reaped = reaped
        self.loop = Loop("reaper", self.step, interval)

    def step(self) -> float:
        rows = reap(self._database, worker=self._worker)
        if rows:
            self._reaped(rows)
        for row in rows:
            self._events.reaped(row)
        return 0.0 if len(rows) == BATCH else self._interval
