"""When a worker has to claim again because jobs become due: so that none of them waits for the next poll."""

from __future__ import annotations

import heapq
import math
import threading
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["DueTimes"]

APART_SECONDS: Final = 0.01
"""Least time between two claims that are made because a time has come: for those that nobody here takes."""

MARGIN_SECONDS: Final = 0.005
"""A claim tells by the server's clock, which stood between when it was sent and when its answer came. The latter is
taken, so that the next is not a moment too early; but no more than this is added if it took long."""


class DueTimes:
    """The times that one worker knows of: what its claims have told, and what it has put back itself.

    Of those that claims tell of only the first is kept: the claim that is made then tells of the next. Each time is
    good for one claim, whether or not it brings the job.
    """

    def __init__(self, horizon: float) -> None:
        """Make them.

        :param horizon: the poll interval: what is due later is told again by the next poll.
        """
        self._horizon = horizon
        self._lock = threading.Lock()
        self._own: list[tuple[float, str]] = []
        self._told = math.inf
        self._served = -math.inf

    def add(self, seconds: float, queue: str) -> bool:
        """Note that this worker has put a job back into a queue; return whether that is of use before the next poll.

        From any thread.
        """
        if seconds >= self._horizon:
            return False
        with self._lock:
            heapq.heappush(self._own, (time.monotonic() + seconds, queue))
        return True

    def tell(self, seconds: Iterable[float], asked: float) -> None:
        """Note what a claim, sent at ``asked``, has told just now: in how many seconds the next jobs are due."""
        told = min(time.monotonic(), asked + MARGIN_SECONDS)
        for left in seconds:
            if left < self._horizon:
                self._told = min(self._told, told + left)

    def take(self) -> set[str]:
        """Take the times that have come, for the claim that is made now; the queues of this worker's own jobs."""
        now = time.monotonic()
        came = set()
        with self._lock:
            while self._own and self._own[0][0] <= now:
                came.add(heapq.heappop(self._own)[1])
        if came or self._told <= now:
            self._served = now
        if self._told <= now:
            self._told = math.inf
        return came

    def take_all(self) -> set[str]:
        """Take the times of this worker's own jobs, whether or not they have come; their queues."""
        with self._lock:
            queues = {queue for _, queue in self._own}
            self._own.clear()
        return queues

    def seconds(self) -> float:
        """In how many seconds to claim for the next time; infinity if none is known."""
        with self._lock:
            following = min(self._told, self._own[0][0] if self._own else math.inf)
        return max(following, self._served + APART_SECONDS) - time.monotonic()
