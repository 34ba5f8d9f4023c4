"""The leases that a worker holds, and the thread that renews them."""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING, Final

from enlist._log import Log
from enlist._loop import Loop
from enlist.models import JobStatus

if TYPE_CHECKING:
    import datetime as dt
    import uuid
    from collections.abc import Callable

    from enlist._database import Database
    from enlist._slots import Run

__all__ = ["Heartbeat", "Leases"]

logger = Log("enlist.worker")

BATCH: Final = 500
RENEWALS_PER_LEASE: Final = 3

MARGINS_PER_LEASE: Final = 6
"""An attempt is given up so much of its lease before the end. Half of the time between two renewals: two in a row must
fail before it comes to that."""


HANGING_SECONDS: Final = 1.0
"""A renewal that was sent less than this ago may still be answered."""

STILL_SECONDS: Final = 1.0

GIVEN_UP_KEPT: Final = 10_000
"""The latest: the leases of those before have ended long since."""

SOON_SECONDS: Final = 0.02


class Leases:
    """The runs whose jobs this worker holds; safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[uuid.UUID, Run] = {}
        self._given_up: dict[uuid.UUID, None] = {}

    def add(self, *runs: Run) -> None:
        with self._lock:
            for run in runs:
                self._runs[run.id] = run
                self._given_up.pop(run.id, None)

    def drop(self, *runs: Run) -> None:
        """Hold them no more: their end is written, or they are another's."""
        with self._lock:
            for run in runs:
                # Only this run: the same job may have been claimed again, by this very worker.
                if self._runs.get(run.id) is run:
                    del self._runs[run.id]

    def give_up(self, run: Run) -> None:
        """Hold it no more, though its row may say so until its lease has ended."""
        self.drop(run)
        with self._lock:
            self._given_up[run.id] = None
            if len(self._given_up) > GIVEN_UP_KEPT:
                del self._given_up[next(iter(self._given_up))]

    def begun(self) -> list[uuid.UUID]:
        """The jobs that this worker has begun, as far as their rows may say that it has them still."""
        with self._lock:
            return [*self._runs, *self._given_up]

    def get(self, job_id: uuid.UUID) -> Run | None:
        """The run of a job; None if it is not held here."""
        with self._lock:
            return self._runs.get(job_id)

    def all(self) -> list[Run]:
        with self._lock:
            return list(self._runs.values())

    def __len__(self) -> int:
        return len(self._runs)


class Heartbeat:
    """Renews all leases three times a lease, on a thread and a connection of its own; gives up what it cannot renew.

    A handler that blocks the event loop, or has all the application's connections, does not stop it. Whether a lease
    lasts is judged on another thread: a renewal may hang for as long as the network does.
    """

    def __init__(
        self,
        database: Database,
        leases: Leases,
        lease: dt.timedelta,
        lost: Callable[[Run, str], None],
        cancelled: Callable[[Run], None],
    ) -> None:
        """Make it.

        :param lost: called for a run whose job is another's now, or whose lease is about to end unrenewed, and why.
        :param cancelled: called for a run whose job was cancelled.
        """
        self._database = database
        self._leases = leases
        self._lease = lease
        self._lost = lost
        self._cancelled = cancelled
        seconds = lease.total_seconds()
        self._margin = seconds / MARGINS_PER_LEASE
        self._looked = math.inf
        self._asked: float | None = None
        """When the renewal was sent that is under way."""
        self._failed = False
        """Whether the last renewal could not be made."""
        self.loop = Loop("heartbeat", self.beat, seconds / RENEWALS_PER_LEASE)
        self.watch = Loop("lease watch", self.look, self._margin)

    def beat(self) -> None:
        """Renew what is held; tell of what is lost."""
        runs = self._leases.all()
        try:
            # Also if nothing is held any more: that it works again is said when it does.
            for start in range(0, max(len(runs), int(self._failed)), BATCH):
                self._renew(runs[start : start + BATCH])
        except Exception:
            self._failed = True
            raise
        finally:
            self._asked = None
        self._failed = False

    def look(self) -> float:
        """Give up the attempts whose leases are about to end; return the seconds until the next look.

        Some time before the end, so that a handler can stop what it does outside of the database before the job runs
        elsewhere. By this clock, counted from before the claim or the renewal was sent.
        """
        now = time.monotonic()
        still, self._looked = now - self._looked, now
        if still > 2 * self._margin + STILL_SECONDS:
            logger.warning(
                "this process stood still for %.1f seconds, of leases of %g: it renews now what nobody has taken",
                still,
                self._lease.total_seconds(),
            )
            self.loop.wake()
            return self._margin
        asked = self._asked
        can_renew = not self._failed if asked is None else now - asked < HANGING_SECONDS
        next_look = self._margin
        for run in self._leases.all():
            left = run.lease_ends - self._margin - now
            if left > 0:
                next_look = min(next_look, left)
            elif can_renew:  # it is only late, as all of this process is
                self.loop.wake()
                next_look = min(next_look, SOON_SECONDS)
            else:
                self._lost(run, f"its lease could not be renewed and ends in {max(0.0, run.lease_ends - now):.1f} s")
        return next_look

    def _renew(self, runs: list[Run]) -> None:
        self._asked = asked = time.monotonic()
        rows = self._database.execute(
            self._database.statements.renew,
            {"ids": [run.id for run in runs], "tokens": [run.token for run in runs], "lease": self._lease},
        )
        found = {row.id: (row.lease_token, row.status) for row in rows}
        for run in runs:
            token, status = found.get(run.id, (None, None))
            if token == run.token:
                run.lease_ends = asked + self._lease.total_seconds()
            elif token == run.token + 1 and status is JobStatus.CANCELLED:
                self._cancelled(run)
            else:
                self._lost(run, "its lease was lost")
