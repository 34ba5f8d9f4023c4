"""Daemon threads for plain handlers."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Threads"]


class Threads:
    """Runs functions on at most ``limit`` threads, made when first needed.

    Not concurrent.futures: its threads are joined at the interpreter's exit, so that one handler that never returns
    would keep the process from ending.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._idle = 0

    def submit(self, function: Callable[[], None]) -> None:
        """Run a function, which must not raise, on a free thread or a new one."""
        with self._lock:
            if self._idle:
                self._idle -= 1
            elif len(self._threads) < self._limit:
                thread = threading.Thread(
                    target=self._run, name=f"enlist-handler-{len(self._threads) + 1}", daemon=True
                )
                self._threads.append(thread)
                thread.start()
        self._work.put(function)

    def stop(self) -> None:
        """End the threads when what they run has returned; doesn't wait for it."""
        for _ in self._threads:
            self._work.put(None)

    def join(self, timeout: float) -> bool:
        """Wait for the threads to end; return whether all have."""
        for thread in self._threads:
            thread.join(timeout)
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (function := self._work.get()) is not None:
            function()
            with self._lock:
                self._idle += 1
