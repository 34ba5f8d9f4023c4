"""Daemon threads for plain handlers."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DaemonExecutor", "Threads"]

SHUTDOWN_SECONDS: Final = 1.0


class Threads:
    """Runs functions on at most ``limit`` threads, made when first needed.

    Not concurrent.futures: its threads are joined at the interpreter's exit, so that one handler that never returns
    would keep the process from ending.
    """

    def __init__(self, limit: int, name: str = "enlist-handler") -> None:
        self._limit = limit
        self._name = name
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._here = threading.local()

    def submit(self, function: Callable[[], None]) -> None:
        """Run a function, which must not raise, on a free thread or a new one."""
        with self._lock:
            if self._idle:
                self._idle -= 1
            elif len(self._threads) < self._limit:
                thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads) + 1}", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the process may have no more: then those that there are do it
                    if not self._threads:
                        raise
                else:
                    self._threads.append(thread)
        self._work.put(function)

    @property
    def here(self) -> bool:
        """Whether this is one of them."""
        return getattr(self._here, "is_one", False)

    def stop(self) -> None:
        """End the threads when what they run has returned; doesn't wait for it."""
        for _ in self._threads:
            self._work.put(None)

    def join(self, timeout: float) -> bool:
        """Wait for the threads to end; return whether all have."""
        end = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        self._here.is_one = True  # said by itself: it may run a job before whoever has started it notes it
        while (function := self._work.get()) is not None:
            function()
            del function  # with the job that it ran, payload and all, while this waits for the next
            with self._lock:
                self._idle += 1


class DaemonExecutor(ThreadPoolExecutor):
    """An executor for asyncio on such threads; a subclass, since an event loop takes no other.

    So ``asyncio.to_thread`` of a function that never returns does not keep the process from ending either.
    """

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self._daemons = Threads(limit, "enlist-executor")

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._daemons.submit(run)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads; one whose function does not return is not waited for."""
        self._daemons.stop()
        if wait:
            self._daemons.join(SHUTDOWN_SECONDS)
