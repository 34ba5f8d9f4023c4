"""The leases that a worker holds, and the thread that renews them."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from enlist._loop import Loop

if TYPE_CHECKING:
    import datetime as dt
    import uuid
    from collections.abc import Callable

    from enlist._database import Database
    from enlist._slots import Run

__all__ = ["Heartbeat", "Leases"]

logger = logging.getLogger("enlist.worker")

BATCH: Final = 500
RENEWALS_PER_LEASE: Final = 3


class Leases:
    """The runs whose jobs this worker holds; safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[uuid.UUID, Run] = {}

    def add(self, run: Run) -> None:
        with self._lock:
            self._runs[run.id] = run

    def drop(self, run: Run) -> None:
        with self._lock:
            # Only this run: the same job may have been claimed again, by this very worker.
            if self._runs.get(run.id) is run:
                del self._runs[run.id]

    def all(self) -> list[Run]:
        with self._lock:
            return list(self._runs.values())

    def __len__(self) -> int:
        return len(self._runs)


@dataclass
class Heartbeat:
    """Renews all leases three times a lease, on a thread and a connection of its own.

    A handler that blocks the event loop, or has all the application's connections, does not stop it.
    """

    database: Database
    leases: Leases
    lease: dt.timedelta
    lost: Callable[[Run], None]
    """Called for a run whose job is another's now, or whose lease has ended unrenewed."""
    loop: Loop = field(init=False)

    def __post_init__(self) -> None:
        interval = self.lease.total_seconds() / RENEWALS_PER_LEASE
        self.loop = Loop("heartbeat", self.beat, interval)

    def beat(self) -> None:
        """Renew what is held; tell of what is lost."""
        runs = self.leases.all()
        try:
            for start in range(0, len(runs), BATCH):
                self._renew(runs[start : start + BATCH])
        finally:
            # Also when the database cannot be reached: the end of a lease is judged here, by this clock, counted
            # from before the claim or renewal was sent.
            now = time.monotonic()
            for run in runs:
                if run.lease_ends < now:
                    self.lost(run)

    def _renew(self, runs: list[Run]) -> None:
        asked = time.monotonic()
        rows = self.database.execute(
            self.database.statements.renew,
            {"ids": [run.id for run in runs], "tokens": [run.token for run in runs], "lease": self.lease},
        )
        tokens = {row.id: row.lease_token for row in rows}
        for run in runs:
            if tokens.get(run.id) == run.token:
                run.lease_ends = asked + self.lease.total_seconds()
            else:
                self.lost(run)
