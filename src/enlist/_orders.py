"""How a worker that runs in the main thread is told to stop: by signals, and by a supervisor."""

from __future__ import annotations

import enum
import signal
import threading
import time
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Order", "Orders"]

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


ONE_SIGNAL_SECONDS: Final = 0.1
"""Signals that come together are one: who sends it to a process group may send it to the process as well."""


class Order(enum.Enum):
    """What a worker is told."""

    SIGNAL = "signal"
    """A signal has come: the first means stop, a later one stop now."""

    STOP = "stop"
    """Stop. Said by a supervisor, and no signal: a service manager may have sent one to each process as well."""

    STOP_NOW = "stop now"
    """Stop, and wait for nothing."""


class Orders:
    """A queue of orders. They may be given before the worker runs, from any thread and from a signal's handler."""

    def __init__(self) -> None:
        # A signal's handler runs between any two steps of the main thread, which may hold an Event's lock just then:
        # it sets no Event, it puts an order where another thread takes it.
        self._queue: SimpleQueue[tuple[Order, float] | None] = SimpleQueue()

    def give(self, order: Order) -> None:
        # With the time: who takes it may be kept from it, by a handler that holds the interpreter's lock.
        self._queue.put((order, time.monotonic()))

    @contextmanager
    def heeded(self, stop: threading.Event, stop_now: threading.Event) -> Iterator[None]:
        """Set the events as orders and signals come. To be entered in the main thread, which alone takes signals."""
        thread = threading.Thread(target=self._heed, args=(stop, stop_now), name="enlist-signals", daemon=True)
        thread.start()
        # A terminal that is closed; not where the process was started with nohup, or the application has a use for it.
        hangup = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL else []
        numbers = [*SIGNALS, *hangup]
        previous = {number: signal.signal(number, lambda *_: self.give(Order.SIGNAL)) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            self._queue.put(None)
            thread.join()

    def _heed(self, stop: threading.Event, stop_now: threading.Event) -> None:
        first: float | None = None
        while (given := self._queue.get()) is not None:
            order, when = given
            again = first is not None and when > first + ONE_SIGNAL_SECONDS
            if order is Order.STOP_NOW or (order is Order.SIGNAL and again):
                stop_now.set()
            if order is Order.SIGNAL and first is None:
                first = when
            stop.set()
