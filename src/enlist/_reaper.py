"""Takes back jobs whose lease has ended: their worker died, froze or cannot reach the database."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from enlist._log import Log
from enlist._loop import Loop
from enlist.events import EventName, Events
from enlist.models import JobStatus

if TYPE_CHECKING:
    import uuid
    from collections.abc import Callable, Sequence

    import sqlalchemy as sa

    from enlist._database import Database

__all__ = ["Reaper", "expired", "reap"]

logger = Log("enlist.worker")

LOOK: Final = 5_000
BATCH: Final = 500

SECOND_LOOK_SECONDS: Final = 0.5
"""In this time a worker renews a lease that it could not, since the handler's transaction had the row locked."""


def expired(database: Database) -> list[uuid.UUID]:
    """The jobs whose lease has ended, the oldest; not those whose row somebody has locked."""
    return [row.id for row in database.execute(database.statements.expired, {"limit": LOOK})]


def reap(database: Database, ids: Sequence[uuid.UUID], *, worker: str = "") -> Sequence[sa.Row[Any]]:
    """Take back those jobs whose lease has ended; rows as :attr:`Statements.reap` returns them.

    :param worker: who does it, for the log.
    """
    rows = database.execute(database.statements.reap, {"ids": ids})
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
    """Does so every ``interval`` seconds, on a thread. Every worker has one; they don't disturb each other.

    A job is taken back that is found twice, half a second apart, within one step.
    """

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
        self.looked = False
        """Whether it has looked, and is not about to take back what it has found."""
        self.loop = Loop("reaper", self.step, interval)

    def step(self) -> float:
        try:
            return self._step()
        finally:
            self.looked = True

    def _step(self) -> float:
        found = expired(self._database)
        self.looked = not found
        if not found or not self.loop.pause(SECOND_LOOK_SECONDS):
            return self._interval
        taken = 0
        for start in range(0, len(found), BATCH):
            rows = reap(self._database, found[start : start + BATCH], worker=self._worker)
            taken += len(rows)
            if rows:
                self._reaped(rows)
            for row in rows:
                self._events.reaped(row)
        return 0.0 if len(found) == LOOK and taken else self._interval
