"""Claims jobs for free slots: asks, sorts, hands over. Polling is the truth; a wake makes it quick."""

from __future__ import annotations

import heapq
import logging
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy.exc import SQLAlchemyError

from enlist._driver import brief
from enlist._loop import Loop
from enlist._slots import Demand, Run, Slots

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable, Sequence

    import sqlalchemy as sa

    from enlist._database import Database
    from enlist._leases import Leases
    from enlist.handlers import HandlerRegistry

__all__ = ["Claimer"]

CONTENDED_SECONDS: Final = 0.005

logger = logging.getLogger("enlist.worker")

LONGEST_WAIT_FOR_SLOT: Final = 0.5
"""Seconds after which a prefetched job that still waits is given back."""


class Claimer:
    """Keeps a worker's slots filled from the database."""

    def __init__(
        self,
        database: Database,
        handlers: HandlerRegistry,
        leases: Leases,
        *,
        worker: str,
        lease: dt.timedelta,
        poll_interval: float,
        give_back: Callable[[Run], None],
    ) -> None:
        self._database = database
        self._handlers = handlers
        self._kinds = list(handlers.kinds)
        self._leases = leases
        self._worker = worker
        self._lease = lease
        self._poll_interval = poll_interval
        self._give_back = give_back
        self.slots: Slots
        self.loop = Loop("claim", self.step, poll_interval)
        self._due_lock = threading.Lock()
        self._due: list[float] = []
        self._contended = False
        self._unanswered = False
        self.drained = threading.Event()
        """Set when a claim found nothing while nothing was running."""
        self.all_recorded: Callable[[], bool] = lambda: True

    def wake(self) -> None:
        """Claim now."""
        self.loop.wake()

    def due_in(self, seconds: float) -> None:
        """Claim again then: this worker has just written a retry that is due sooner than the next poll."""
        if seconds < self._poll_interval:
            with self._due_lock:
                heapq.heappush(self._due, time.monotonic() + seconds)
            self.loop.wake()

    def step(self) -> float:
        """Claim what the free slots can take; return the seconds until the next claim."""
        wait = self._step()
        # However seldom the queues are looked at: what waits for a slot is given back in time.
        return min(wait, LONGEST_WAIT_FOR_SLOT) if self.slots.waiting else wait

    def _step(self) -> float:
        for run in self.slots.take_back(LONGEST_WAIT_FOR_SLOT):
            self._give_back(run)
        demands = self.slots.demands()
        if not demands:
            return self._poll_interval
        nothing_ran = self.slots.idle and self.all_recorded()
        self._give_back_unheld()
        runs = self.claim(demands)
        if refused := self.slots.place(runs, demands):
            for run in refused:
                self._give_back(run)
            return self._poll_interval  # not at once: it would be the same
        if runs:
            # Short of what was asked: the rest of the line may be held up by a careful job or a key just taken.
            full = len(runs) >= sum(demand.number for demand in demands)
            return 0.0 if full or any(run.careful or run.keyed for run in runs) else self._next_wait()
        if nothing_ran and not self._contended:
            self.drained.set()
        return self._next_wait()

    def _give_back_unheld(self) -> None:
        """After a claim that failed: it may have been carried out, its answer lost."""
        if not self._unanswered:
            return
        held = [run.id for run in self._leases.all()]
        rows = self._database.execute(self._database.statements.disown, {"worker": self._worker, "ids": held})
        if rows:
            logger.warning("%d jobs of a claim whose answer was lost are given back", len(rows))

    def _next_wait(self) -> float:
        if self._contended:  # another worker was at the same key in that moment
            self._contended = False
            return CONTENDED_SECONDS
        now = time.monotonic()
        with self._due_lock:
            is_due = False
            while self._due and self._due[0] <= now:  # one claim serves them all
                is_due = heapq.heappop(self._due) > now - self._poll_interval or is_due
            if is_due:
                return 0.0
            return min(self._poll_interval, self._due[0] - now) if self._due else self._poll_interval

    def claim(self, demands: list[Demand]) -> list[Run]:
        """Claim jobs, in the order in which they are to start."""
        self._unanswered, answered = True, True
        asked = time.monotonic()  # before the claim is sent: the lease may begin as early as that
        parameters = {
            "queues": [demand.queue for demand in demands],
            "limits": [demand.number for demand in demands],
            "kinds": self._kinds,
            "careful": self.slots.careful_free and any(demand.free for demand in demands),
            "worker": self._worker,
            "lease": self._lease,
        }
        rows = self._database.execute(self._database.statements.claim, parameters)
        taken = [row for row in rows if row.taken]
        keys = sorted({row.concurrency_key for row in rows if not row.taken})
        runs = [self._run(row, asked) for row in taken]
        for run in runs:
            self._leases.add(run)
        if keys:
            try:
                keyed = self._claim_keyed(keys, demands, runs, parameters)
            except SQLAlchemyError as error:
                # What has been claimed already must not be lost with it.
                logger.warning("jobs with a concurrency key could not be claimed: %s", brief(error))
                keyed, answered = [], False
            more = [self._run(row, asked) for row in keyed]
            for run in more:
                self._leases.add(run)
            taken += keyed
            runs += more
        self._unanswered = not answered
        order = sorted(range(len(runs)), key=lambda n: (-taken[n].priority, taken[n].due, taken[n].id))
        return [runs[n] for n in order]

    def _claim_keyed(
        self, keys: list[str], demands: list[Demand], runs: list[Run], parameters: dict[str, Any]
    ) -> list[sa.Row[Any]]:
        """Claim jobs with a concurrency key, for free slots only: one that waits here would hold its key idly."""
        taken = dict.fromkeys((demand.queue for demand in demands), 0)
        for run in runs:
            taken[run.queue] += 1
        limits = {demand.queue: demand.free - taken[demand.queue] for demand in demands}
        limits = {queue: limit for queue, limit in limits.items() if limit > 0}
        if not limits:
            return []
        parameters = {
            **parameters,
            "queues": list(limits),
            "limits": list(limits.values()),
            "careful": parameters["careful"] and not any(run.careful for run in runs),
        }
        statements = self._database.statements
        with self._database.transaction() as connection:
            locked = connection.execute(statements.lock_keys, {"keys": keys}).scalars().all()
            self._contended = len(locked) < len(keys)
            if not locked:
                return []
            rows: Sequence[sa.Row[Any]] = connection.execute(
                statements.claim_keyed, {**parameters, "keys": locked}
            ).all()
        return list(rows)

    def _run(self, row: sa.Row[Any], asked: float) -> Run:
        return Run.of(row, self._handlers[row.kind], asked + self._lease.total_seconds())
