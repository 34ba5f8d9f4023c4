"""UUIDs of version 7: ordered by the time they were made, and within one process strictly ascending."""

from __future__ import annotations

import os
import threading
import time
from typing import Final

__all__ = ["uuid7s"]

_COUNTER_LIMIT: Final = 1 << 42
_VERSION_AND_VARIANT: Final = 0x7000 << 64 | 0x8000 << 48


class _Generator:
    """RFC 9562, method 1: 48 bits of milliseconds, a counter of 42 bits that starts at random, 32 random bits.

    The standard library has one since Python 3.14, which makes them one at a time: that takes longer than all else
    that a job needs.
    """

    def __init__(self) -> None:
        self.reset()
        os.register_at_fork(after_in_child=self.reset)

    def reset(self) -> None:
        """Start afresh; in a forked child too, where the counter must not go on as its parent's does."""
        self._lock = threading.Lock()
        self._milliseconds = 0
        self._counter = 0

    def __call__(self, count: int) -> list[int]:
        """Return the next UUIDs, as integers: an object for each costs three times as much."""
        random = os.urandom(8 + 4 * count)
        with self._lock:
            now = time.time_ns() // 1_000_000
            if now > self._milliseconds or self._counter + count >= _COUNTER_LIMIT:
                # The highest bit stays free, so that there is room to count up within the millisecond.
                self._milliseconds = max(now, self._milliseconds + 1)
                self._counter = int.from_bytes(random[:6]) >> 7
            base = self._milliseconds << 80 | _VERSION_AND_VARIANT
            first = self._counter + 1
            self._counter += count
        tails = memoryview(random)[8:].cast("I")
        return [
            base | number >> 30 << 64 | (number & 0x3FFFFFFF) << 32 | tail
            for number, tail in enumerate(tails, start=first)
        ]


uuid7s: Final = _Generator()
