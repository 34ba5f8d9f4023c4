"""Takes back jobs whose lease has ended: their worker died, froze or cannot reach the database."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from enlist._loop import Loop
from enlist.models import JobStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import sqlalchemy as sa

    from enlist._database import Database

__all__ = ["Reaper", "reap"]

logger = logging.getLogger("enlist.worker")

BATCH: Final = 500


def reap(database: Database, limit: int = BATCH) -> Sequence[sa.Row[Any]]:
    """Take back at most ``limit`` jobs; rows (id, kind, queue, status, attempt, lost, worker)."""
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
            extra={"job_id": str(row.id), "kind": row.kind, "attempt": row.attempt, "lost": row.lost},
        )
    return rows


class Reaper:
    """Does so every ``interval`` seconds, on a thread. Every worker has one; they don't disturb each other."""

    def __init__(self, database: Database, interval: float, reaped: Callable[[], None]) -> None:
        self._database = database
        self._interval = interval
        self._reaped = reaped
        self.loop = Loop("reaper", self.step, interval)

    def step(self) -> float:
        rows = reap(self._database)
        if rows:
            self._reaped()
        return 0.0 if len(rows) == BATCH else self._interval
