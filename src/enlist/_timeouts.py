"""Watches the time of plain handlers, which nobody can cancel."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

from enlist._loop import Loop

if TYPE_CHECKING:
    from collections.abc import Callable

    from enlist._slots import Run

__all__ = ["Timeouts"]

IDLE_SECONDS: Final = 3600.0


class Timeouts:
    """Calls ``over(run)`` when a handler has run longer than its timeout. It knows those that run, and no others."""

    def __init__(self, over: Callable[[Run], None]) -> None:
        self._over = over
        self._ends: dict[Run, float] = {}
        self._lock = threading.Lock()
        self.loop = Loop("timeout watch", self._step, IDLE_SECONDS)

    def watch(self, run: Run) -> None:
        """Watch a handler that is called now, if it has a timeout."""
        seconds = run.handler.timeout_seconds
        if seconds is None:
            return
        end = time.monotonic() + seconds
        with self._lock:
            first = all(end < other for other in self._ends.values())
            self._ends[run] = end
        if first:
            self.loop.wake()

    def forget(self, run: Run) -> None:
        """Watch it no more: it has returned."""
        if run.handler.timeout_seconds is None:
            return
        with self._lock:
            self._ends.pop(run, None)

    def _step(self) -> float | None:
        now = time.monotonic()
        with self._lock:
            late = [run for run, end in self._ends.items() if end <= now]
            for run in late:
                del self._ends[run]
            following = min(self._ends.values(), default=None)
        for run in late:
            self._over(run)
        return None if following is None else following - now
