"""Wakes other workers for what this one has made ready and does not take itself."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

from enlist._log import Log
from enlist._loop import Loop

if TYPE_CHECKING:
    from collections.abc import Iterable

    from enlist._database import Database

__all__ = ["Others"]

logger = Log("enlist.worker")

INTERVAL_SECONDS: Final = 0.05
"""Least time between two NOTIFYs for one queue."""

IDLE_SECONDS: Final = 3600.0


class Others:
    """Sends the NOTIFYs of a worker, on a thread: whoever has something to say never waits for the server.

    Producers notify of what they enqueue. A worker has to where it gives a job back, retries or reaps it, or ends one
    of a concurrency key, and is about to stop, has no slot free, or does not serve the queue or the kind.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._queues: dict[str, None] = {}
        self._keys: dict[str, None] = {}
        self._sent: dict[str, float] = {}
        self._sending = False
        self.loop = Loop("waking of others", self.step, IDLE_SECONDS)

    def wake(self, queues: Iterable[str] = (), *, keys: Iterable[str] = ()) -> None:
        """Have the workers of queues woken; and, if concurrency ``keys`` have a slot free, of those with jobs of them.

        From any thread; returns at once.
        """
        with self._lock:
            self._queues.update(dict.fromkeys(queues))
            self._keys.update(dict.fromkeys(keys))
        self.loop.wake()

    def step(self) -> float:
        """Send what there is; return the seconds until there may be more."""
        with self._lock:
            now = time.monotonic()
            self._sent = {queue: sent for queue, sent in self._sent.items() if sent > now - INTERVAL_SECONDS}
            queues = [queue for queue in self._queues if queue not in self._sent]
            keys = list(self._keys)
            for queue in queues:
                del self._queues[queue]
            self._keys.clear()
            self._sending = True
        try:
            self._send(queues, keys)
        except Exception:
            self.wake(queues, keys=keys)
            raise
        finally:
            self._sending = False
        with self._lock:
            waits = [self._sent.get(queue, 0.0) + INTERVAL_SECONDS - time.monotonic() for queue in self._queues]
        return max(0.0, min(waits, default=IDLE_SECONDS))

    def _send(self, queues: list[str], keys: list[str]) -> None:
        statements = self._database.statements
        if keys:
            self._database.execute(statements.notify_of_keys, {"keys": keys})
        for queue in queues:
            self._database.execute(statements.notify, {"queue": queue})
            self._sent[queue] = time.monotonic()

    def flush(self, timeout: float) -> bool:
        """Wait until all is sent; return whether it is, after at most ``timeout`` seconds."""
        end = time.monotonic() + timeout
        while self._queues or self._keys or self._sending:
            if time.monotonic() > end:
                return False
            time.sleep(0.002)
        return True
