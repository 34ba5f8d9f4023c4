"""Which claimed job runs when: a worker's queues, each with its slots."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from enlist._log import Log
from enlist._statements import CLAIM_LIMIT
from enlist.job import Signals

if TYPE_CHECKING:
    import asyncio
    import uuid
    from collections.abc import Callable, Collection, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from enlist._groups import Group
    from enlist.handlers import Handler

__all__ = ["Demand", "Run", "Slots"]

logger = Log("enlist.worker")

PREFETCH_SECONDS: Final = 0.05
"""How much work, by its measured time, a worker may have waiting beside what runs."""

PREFETCH_LIMIT_SECONDS: Final = 0.02
"""Jobs slower than this are not prefetched: the claim's round trip is nothing beside them."""

PREFETCH_MOST: Final = 2 * CLAIM_LIMIT
"""Jobs of a queue that may wait, however quick they are: a claim's worth while the next is under way."""

SMOOTHING: Final = 0.1
"""Weight of the latest run in a queue's measured service time."""


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class Run:
    """A claimed job in this worker's hands: one attempt."""

    id: uuid.UUID
    token: int
    kind: str
    queue: str
    attempt: int
    max_attempts: int
    payload: str
    """As JSON, not yet looked at."""
    meta: str
    handler: Handler
    careful: bool
    lease_ends: float
    """By the monotonic clock."""
    priority: int = 0
    concurrency_key: str | None = None
    payload_version: int = 1
    age: float = 0.0
    """Seconds since the job was made, at its claim."""
    placed: float = 0.0
    started: float = 0.0
    began: float = 0.0
    """When its handler was called, by the monotonic clock; 0 before."""
    finished: float = 0.0
    """When its handler had ended; 0 before, and where the attempt ended in its commit."""
    worker: str = ""
    due: float = math.nan
    """When the job was due: the server's clock, seconds since 1970."""
    told: bool = False
    """Its ending was told to the listeners."""
    abandoned: str | None = None
    """Why what the attempt still does no longer counts."""
    ended: bool = False
    """Its end is known, and written or about to be."""
    task: asyncio.Task[None] | None = None
    """The task of an async handler."""
    in_handler: bool = False
    """Its handler runs now."""
    group: Group | None = None
    """The jobs that it shares a transaction with."""
    signals: Signals = field(default_factory=Signals)

    @classmethod
    def of(cls, row: Sequence[Any], handler: Handler, lease_ends: float, worker: str = "") -> Run:
        """Make it of what a claim has returned."""
        # By position, a tenth of what names cost: as the statements' `_returned` has the columns.
        id_, kind, queue, priority, attempt, most, lost, key, token, version, due, age, payload, meta = row
        return cls(
            id_,
            token,
            kind,
            queue,
            attempt,
            most,
            payload,
            meta,
            handler,
            careful=lost > 0 or attempt >= most,
            lease_ends=lease_ends,
            priority=priority,
            concurrency_key=key,
            payload_version=version,
            age=age,
            worker=worker,
            due=due,
        )

    @property
    def keyed(self) -> bool:
        """Whether it has a concurrency key."""
        return self.concurrency_key is not None

    def abandon(self, reason: str) -> bool:
        """Say that the attempt no longer counts; return False if that was said before."""
        if self.abandoned is not None:
            return False
        self.abandoned = reason
        self.signals.cancel_requested = True
        return True

    def cancel_task(self) -> None:
        """Cancel an async handler; to be called on its event loop. Its task may be about another of its group."""
        if self.task is not None and self.in_handler:
            self.task.cancel()

    @property
    def seconds(self) -> float | None:
        """How long its handler ran, or has run; None if it was not called."""
        return (self.finished or time.monotonic()) - self.began if self.began else None

    def extra(self, **more: Any) -> dict[str, Any]:
        """The fields of a log line about this attempt: what it is, and no data of anybody's.

        :param more: further fields, such as ``event=EventName.DONE``.
        """
        fields = {
            "job_id": str(self.id),
            "kind": self.kind,
            "queue": self.queue,
            "attempt": self.attempt,
            "max_attempts": self.max_attempts,
            "worker": self.worker,
            **more,
        }
        if (seconds := self.seconds) is not None:
            fields.setdefault("duration_seconds", round(seconds, 6))
        return fields

    def __repr__(self) -> str:
        return f"<{self}>"  # without the payload: what collects logs may keep the arguments of a line, by repr()

    def __str__(self) -> str:
        return f"job {self.id} ({self.kind}, attempt {self.attempt} of {self.max_attempts})"


@dataclass(frozen=True, slots=True)
class Demand:
    """What a queue can take now."""

    queue: str
    free: int
    """Slots with nothing to do."""
    number: int
    """Jobs to ask for: the free slots, and what may wait beside them."""


class _Queue:
    def __init__(self, name: str, limit: int, *, prefetches: bool) -> None:
        self.name = name
        self.limit = limit
        self.prefetches = prefetches
        self.active = 0
        self.waiting: deque[Run] = deque()
        self.service_seconds: float | None = None
        self.more = False
        """The last claim brought all it asked for: there is probably more."""
        self.missed = False
        """It was to be looked at while no slot was free: to be made up for when one is."""

    def allowance(self) -> int:
        """How many jobs may wait beside those that run."""
        if (
            not self.prefetches
            or not self.more
            or self.service_seconds is None
            or self.service_seconds > PREFETCH_LIMIT_SECONDS
        ):
            return 0
        return min(int(PREFETCH_SECONDS / max(self.service_seconds, 1e-6) * self.limit), PREFETCH_MOST)

    def is_wanting(self, free: int, allowance: int) -> bool:
        """Whether a claim is of use: of what may wait a part is used up, so that it brings many and not one by one."""
        return free > 0 or len(self.waiting) < allowance - min(2 * allowance // 3, CLAIM_LIMIT // 2)

    def demand(self) -> Demand | None:
        free, allowance = self.limit - self.active - len(self.waiting), self.allowance()
        if not self.is_wanting(free, allowance):
            return None
        return Demand(self.name, max(free, 0), min(free + allowance, CLAIM_LIMIT))

    def wants_more(self) -> bool:
        """Whether to claim again, after a claim that has brought all it was asked for."""
        return self.more and self.is_wanting(self.limit - self.active - len(self.waiting), self.allowance())


class Slots:
    """The queues of a worker. Safe to use from any thread; holds its lock only for moments."""

    def __init__(
        self,
        queues: Mapping[str, int],
        start: Callable[[Run], None],
        wanted: Callable[[], None],
        *,
        one_by_one: AbstractSet[str] = frozenset(),
    ) -> None:
        """Make them.

        :param start: runs a job, on whatever thread.
        :param wanted: called when another claim would be of use.
        :param one_by_one: queues of which no job is claimed before there is a slot for it.
        """
        self._lock = threading.Lock()
        self._queues = {name: _Queue(name, limit, prefetches=name not in one_by_one) for name, limit in queues.items()}
        self._start = start
        self._wanted = wanted
        self._careful_free = True
        self._closed = False

    @property
    def careful_free(self) -> bool:
        """Whether a careful job may be claimed: only one at a time is in a process."""
        return self._careful_free

    def demands(self) -> list[Demand]:
        """What to claim now."""
        with self._lock:
            if self._closed:
                return []
            demands = []
            for queue in self._queues.values():
                demand = queue.demand()
                queue.missed = demand is None and not queue.more
                if demand is not None:
                    demands.append(demand)
            return demands

    def place(self, runs: list[Run], asked: list[Demand]) -> list[Run]:
        """Take claimed jobs, in their order: start those that a slot is free for, keep the others.

        :return: the jobs that are not taken, because the slots were closed meanwhile or no thread could be started.
        """
        now = time.monotonic()
        starting = []
        with self._lock:
            if self._closed:
                return runs
            counts = dict.fromkeys((demand.queue for demand in asked), 0)
            for run in runs:
                run.placed = now
                queue = self._queues[run.queue]
                counts[run.queue] += 1
                self._careful_free = self._careful_free and not run.careful
                if queue.active < queue.limit:
                    queue.active += 1
                    starting.append(run)
                else:
                    queue.waiting.append(run)
            for demand in asked:
                self._queues[demand.queue].more = counts[demand.queue] >= demand.number
        failed = []
        for run in starting:
            try:
                self._start(run)
            except Exception:
                logger.exception("%s could not be started", run)
                failed.append(run)
        with self._lock:
            for run in failed:
                self._queues[run.queue].active -= 1
                self._careful_free = self._careful_free or run.careful
        return failed

    def leave(self, queues: Collection[str]) -> None:
        """Note that jobs are left in queues that only free slots are for: to be claimed when one is."""
        with self._lock:
            left = [self._queues[name] for name in queues]
            for queue in left:
                queue.missed = True
            is_free = any(queue.active < queue.limit for queue in left)
        if is_free:
            self._wanted()

    def join(self, run: Run) -> Run | None:
        """Take the next waiting job of a run's queue into its slot, if it may share its transaction."""
        with self._lock:
            queue = self._queues[run.queue]
            following = queue.waiting[0] if queue.waiting else None
            if following is None or following.handler is not run.handler or following.careful or following.keyed:
                return None
            queue.waiting.popleft()
            wanted = queue.wants_more()
        if wanted:
            self._wanted()
        return following

    def finished(self, run: Run, jobs: int = 1, since: float | None = None) -> Run | None:
        """Free a run's slot; return the waiting job that has it now, for the caller to run.

        :param jobs: how many jobs have shared it, from ``since`` on.
        """
        with self._lock:
            queue = self._queues[run.queue]
            seconds = (time.monotonic() - (run.started if since is None else since)) / max(jobs, 1)
            known = queue.service_seconds
            # Of jobs that are flushed together one alone takes nearly as long as many: there each job counts.
            weight = 1 - (1 - SMOOTHING) ** (jobs if run.handler.flush == "group" else 1)
            queue.service_seconds = seconds if known is None else known + weight * (seconds - known)
            if run.careful:
                self._careful_free = True
            following = None
            if queue.waiting and not self._closed:
                following = queue.waiting.popleft()
            else:
                queue.active -= 1
            # Others of its key, or other careful jobs, may be claimed now.
            wanted = run.keyed or run.careful or queue.missed or queue.wants_more()
        if wanted:
            self._wanted()
        return following

    @property
    def waiting(self) -> bool:
        """Whether any job waits for a slot."""
        return any(queue.waiting for queue in self._queues.values())

    def take_back(self, waited_longer_than: float) -> list[Run]:
        """Remove the jobs that wait for a slot for longer than some seconds."""
        limit = time.monotonic() - waited_longer_than
        taken = []
        with self._lock:
            for queue in self._queues.values():
                while queue.waiting and queue.waiting[0].placed < limit:
                    taken.append(queue.waiting.popleft())
                    queue.service_seconds = None  # what was measured no longer holds
        for run in taken:
            if run.careful:
                self._careful_free = True
        return taken

    def close(self) -> list[Run]:
        """Start nothing any more; return the jobs that wait for a slot."""
        with self._lock:
            self._closed = True
            waiting = [run for queue in self._queues.values() for run in queue.waiting]
            for queue in self._queues.values():
                queue.waiting.clear()
            return waiting

    @property
    def free(self) -> int:
        """How many slots have nothing to do."""
        with self._lock:
            return sum(max(0, queue.limit - queue.active) for queue in self._queues.values())

    @property
    def idle(self) -> bool:
        """Whether no job runs or waits."""
        with self._lock:
            return not any(queue.active or queue.waiting for queue in self._queues.values())
