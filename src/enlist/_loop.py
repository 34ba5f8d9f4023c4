"""A background loop: its own thread, survives any error, says so once, backs off, stops at once."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

import tenacity

from enlist._driver import brief, trace
from enlist._log import Log

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BACKOFF", "LONGEST_PAUSE", "Backoff", "Loop"]

logger = Log("enlist.worker")

LONGEST_PAUSE: Final = 3.0
"""Most seconds between two tries: so long it may take until a worker notices that the server is back."""

BACKOFF: Final = tenacity.wait_exponential(multiplier=0.1, max=LONGEST_PAUSE) + tenacity.wait_random(0, 0.5)
"""How long a loop waits after an error: 0.1 s, 0.2 s ... up to 3 s."""

REMINDER_SECONDS: Final = 60.0
"""How often it is said that something still fails, and with which error by now: it may be another than the first."""

LONGEST_WAIT: Final = 86_400.0
"""Most seconds between two steps: the system's clocks refuse to wait for a thousand years, a handler's timeout may."""


class Backoff:
    """Counts a loop's errors in a row, logs the first of them and one a minute, and says how long to wait."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._said = 0.0
        self._state = tenacity.RetryCallState(retry_object=tenacity.Retrying(), fn=None, args=(), kwargs={})
        self._state.attempt_number = 0

    def failed(self, error: BaseException) -> float:
        """Note an error; return the seconds to wait. To be called in its ``except`` block."""
        self._state.attempt_number += 1
        now = time.monotonic()
        if self._state.attempt_number == 1:
            self._said = now
            logger.warning("%s failed, trying again: %s", self._what, brief(error), exc_info=trace(error))
        elif now > self._said + REMINDER_SECONDS:
            self._said = now
            text = "%s still fails, %d errors by now: %s"
            logger.warning(text, self._what, self._state.attempt_number, brief(error), exc_info=trace(error))
        return BACKOFF(self._state)

    def succeeded(self) -> None:
        """Note that it works (again)."""
        if self._state.attempt_number:
            logger.info("%s works again after %d errors", self._what, self._state.attempt_number)
            self._state.attempt_number = 0


class Loop:
    """Calls ``step`` every ``interval`` seconds on a daemon thread, sooner after :meth:`wake`.

    :param step: the work. If it returns a number, that many seconds are waited instead of the interval.
    """

    def __init__(self, name: str, step: Callable[[], float | None], interval: float) -> None:
        self._name = name
        self._step = step
        self._interval = interval
        self._woken = threading.Event()
        self._stop = threading.Event()
        self._backoff = Backoff(f"the worker's {name}")
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=f"enlist-{self._name}", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Have the next step done now; after an error, when its back-off is over."""
        if not self._woken.is_set():  # to look takes 0.03 us, to set it 0.5
            self._woken.set()

    def pause(self, seconds: float) -> bool:
        """Wait within a step; return whether it is to be gone on with, since the loop was not stopped meanwhile."""
        return not self._stop.wait(seconds)

    def stop(self, timeout: float | None = None) -> bool:
        """End the loop after the step under way; return whether its thread has ended."""
        self._stop.set()
        self._woken.set()
        if self._thread is None or self._thread is threading.current_thread():
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def woken(self) -> bool:
        """Whether the next step is to be done at once."""
        return self._woken.is_set()

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    @property
    def thread_id(self) -> int | None:
        """Of the thread that makes the steps, once it is started."""
        return None if self._thread is None else self._thread.ident

    def _run(self) -> None:
        while not self.stopping:
            # Cleared before the work: a wake that comes during the step is not lost.
            self._woken.clear()
            try:
                wait = self._step()
            except (Exception, SystemExit) as error:
                self._stop.wait(self._backoff.failed(error))
                continue
            self._backoff.succeeded()
            if not self.stopping:
                self._woken.wait(min(self._interval if wait is None else wait, LONGEST_WAIT))
