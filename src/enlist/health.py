"""How a worker is: :class:`Health`, for a health check and for gauges."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Health"]


@dataclass(frozen=True, slots=True)
class Health:
    """What :meth:`enlist.Worker.health` tells: how the worker is at this moment."""

    running: bool
    """Between its start and the end of its stop; also while it drains."""
    listening: bool
    """Jobs start when they are enqueued. False: LISTEN has no connection, or is not effective; jobs are found by
    polling, every ``poll_interval``."""
    jobs: int
    """Jobs in hand: claimed, and their end not written yet."""
    stuck: int
    """Plain handlers that were given up (timed out, cancelled, lease lost) and have not come back: each keeps its slot
    and a thread, and nothing can end it but the end of the process."""
    slots: int
    """How many jobs may run at once, over all queues."""
    free: int
    """How many of them have nothing to do; 0 unless it is running."""
