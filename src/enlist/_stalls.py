"""Notices an async handler that blocks the event loop, and with it every other async handler of the worker."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from enlist._log import Log
from enlist._loop import Loop

if TYPE_CHECKING:
    from enlist._leases import Leases
    from enlist._slots import Run

__all__ = ["StallWatch", "here"]

logger = Log("enlist.worker")

LOOK_SECONDS: Final = 0.25
STALL_SECONDS: Final = 1.0
"""Shorter ones are not told."""

LONG_STALL_SECONDS: Final = 10.0
"""After so long it is told while it lasts: it may never end."""

FRAMES: Final = 6
"""How much is shown of where the handler is."""


@dataclass
class _Stall:
    """A time in which the loop does not answer."""

    asked: float
    answered: float = 0.0
    run: Run | None = None
    where: str = ""
    told: bool = False


async def here() -> tuple[asyncio.AbstractEventLoop, int]:
    """The running loop, and its thread's number."""
    return asyncio.get_running_loop(), threading.get_ident()


class StallWatch:
    """Asks the loop for an answer again and again, from a thread, and warns once for each time that it takes long.

    Leases are renewed meanwhile, by other threads.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, thread: int, leases: Leases) -> None:
        self._event_loop = loop
        self._thread = thread
        self._leases = leases
        self._stall: _Stall | None = None
        self._looked = time.monotonic()
        self.loop = Loop("event loop watch", self.look, LOOK_SECONDS)

    def look(self) -> None:
        now = time.monotonic()
        stood_still, self._looked = now - self._looked > STALL_SECONDS, now
        stall = self._stall
        if stall is not None and stall.answered:
            if stall.where:
                self._tell(stall, stall.answered - stall.asked, over=True)
            stall = None
        if stall is None or (stood_still and not stall.where):  # it was all of the process, or the machine
            self._ask()
            return
        seconds = now - stall.asked
        if seconds >= STALL_SECONDS and not stall.where:
            stall.run, stall.where = self._blocking()
        if seconds >= LONG_STALL_SECONDS:
            self._tell(stall, seconds, over=False)

    def _ask(self) -> None:
        stall = self._stall = _Stall(time.monotonic())

        def answer() -> None:
            stall.answered = time.monotonic()

        self._event_loop.call_soon_threadsafe(answer)

    def _blocking(self) -> tuple[Run | None, str]:
        """Whose handler the loop is in, and where."""
        task: asyncio.Task[Any] | None = asyncio.current_task(self._event_loop)
        frame = sys._current_frames().get(self._thread)
        where = "".join(traceback.format_stack(frame, FRAMES)) if frame is not None else ""
        # Several may have had the task, one after the other.
        run = next((run for run in self._leases.all() if run.in_handler and run.task is task), None)
        return run, where or "unknown"

    def _tell(self, stall: _Stall, seconds: float, *, over: bool) -> None:
        run = stall.run
        who = "something in the event loop of the async handlers" if run is None else str(run)
        extra = {"stall_seconds": round(seconds, 3), **({} if run is None else run.extra())}
        if stall.told:
            if over:
                logger.info("%s: the event loop goes on, after %.1f seconds", who, seconds, extra=extra)
            return
        stall.told = True
        logger.warning(
            "%s %s the event loop for %.1f seconds, in which no other async handler went on; what blocks belongs"
            " into asyncio.to_thread(). It was at\n%s",
            who,
            "blocked" if over else "has blocked, and still blocks,",
            seconds,
            stall.where.rstrip(),
            extra=extra,
        )
