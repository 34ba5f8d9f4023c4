"""Watches the time of plain handlers, which nobody can cancel."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
import weakref
from typing import TYPE_CHECKING, Final

from enlist._loop import Loop

if TYPE_CHECKING:
    from collections.abc import Callable

    from enlist._slots import Run

__all__ = ["Timeouts"]

IDLE_SECONDS: Final = 3600.0


class Timeouts:
    """Calls ``over(run)`` when a handler has run longer than its timeout."""

    def __init__(self, over: Callable[[Run], None]) -> None:
        self._over = over
        # Weakly: a run that has ended needs no watching, and must not stay in memory for its timeout.
        self._watched: list[tuple[float, int, weakref.ref[Run]]] = []
        self._lock = threading.Lock()
        self._order = itertools.count()
        self.loop = Loop("timeout watch", self._step, IDLE_SECONDS)

    def watch(self, run: Run) -> None:
        """Watch an attempt that starts now, if its handler has a timeout."""
        seconds = run.handler.timeout_seconds
        if seconds is None:
            return
        with self._lock:
            entry = (run.started + seconds, next(self._order), weakref.ref(run))
            heapq.heappush(self._watched, entry)
            first = self._watched[0] is entry
        if first:
            self.loop.wake()

    def _step(self) -> float | None:
        now = time.monotonic()
        with self._lock:
            late = []
            while self._watched and self._watched[0][0] <= now:
                late.append(heapq.heappop(self._watched)[2])
            following = self._watched[0][0] - now if self._watched else None
        for run in [run for reference in late if (run := reference()) is not None]:
            # Not one that has returned and waits for the others of its group, or was begun again since.
            if not run.ended and run.is_in_handler and now >= run.started + (run.handler.timeout_seconds or 0):
                self._over(run)
        return following
