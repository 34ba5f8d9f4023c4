"""UUIDs of version 7: ordered by the time they were made, and within one process strictly ascending."""

from __future__ import annotations

import os
import sys
import threading
import time
import uuid
from typing import Final

__all__ = ["uuid7"]

_COUNTER_LIMIT: Final = 1 << 42


class _Generator:
    """RFC 9562, method 1: 48 bits of milliseconds, a counter of 42 bits that starts at random, 32 random bits."""

    def __init__(self) -> None:
        self.reset()
        os.register_at_fork(after_in_child=self.reset)

    def reset(self) -> None:
        """Start afresh; in a forked child too, where the counter must not go on as its parent's does."""
        self._lock = threading.Lock()
        self._milliseconds = 0
        self._counter = 0

    def __call__(self) -> uuid.UUID:
        """Return the next UUID."""
        with self._lock:
            now = time.time_ns() // 1_000_000
            self._counter += 1
            if now > self._milliseconds or self._counter >= _COUNTER_LIMIT:
                # The highest bit stays free, so that there is room to count up within the millisecond.
                self._milliseconds = max(now, self._milliseconds + 1)
                self._counter = int.from_bytes(os.urandom(6)) >> 7
            value = self._milliseconds << 80 | self._counter >> 30 << 64 | (self._counter & 0x3FFFFFFF) << 32
        value |= int.from_bytes(os.urandom(4))
        return uuid.UUID(int=value & ~(0xF000 << 64) & ~(0xC000 << 48) | 0x7000 << 64 | 0x8000 << 48)


if sys.version_info >= (3, 14):
    from uuid import uuid7
else:
    uuid7 = _Generator()
