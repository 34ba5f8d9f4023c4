"""What a handler sees: its job, and what it may raise to say how the attempt ends."""

from __future__ import annotations

import datetime as dt
import uuid
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from enlist._options import Duration, as_timedelta

__all__ = ["Cancel", "Job", "Retry", "Snooze"]

PayloadT_co = TypeVar("PayloadT_co", covariant=True)


class Signals:
    """What the worker tells a running attempt; written by the worker's threads, read by the handler's."""

    __slots__ = ("cancel_requested", "deadline")

    def __init__(self) -> None:
        self.cancel_requested = False
        self.deadline: dt.datetime | None = None


@dataclass(frozen=True, slots=True)
class Job(Generic[PayloadT_co]):
    """One attempt at a job, as its handler gets it."""

    payload: PayloadT_co
    """The payload: an instance of the class the handler is registered for, or a dict for a kind given by name."""
    id: uuid.UUID
    kind: str
    queue: str
    attempt: int
    """The number of this attempt, from 1."""
    max_attempts: int
    meta: dict[str, Any]
    """What the producer gave as ``meta=``."""
    resources: Any = None
    """What the worker's ``lifespan=`` context manager yields; None without one."""
    _signals: Signals = field(default_factory=Signals, repr=False, compare=False)

    @property
    def idempotency_key(self) -> str:
        """The same string in each attempt at this job: give it to a service that must not act twice."""
        return str(self.id)

    @property
    def deadline(self) -> dt.datetime | None:
        """When the handler's ``timeout`` ends, aware UTC by this machine's clock; None without one."""
        return self._signals.deadline

    @property
    def cancel_requested(self) -> bool:
        """Whether the handler should give up: its lease is lost, its time is over or the worker must stop.

        Nothing that it does from then on through its session is committed.
        """
        return self._signals.cancel_requested


class _Ending(Exception):
    """Base of what a handler raises to end its attempt in a particular way. Its effects are rolled back."""


class Snooze(_Ending):
    """Run the job again after ``delay``; the attempt does not count.

    :param delay: seconds, or a timedelta; less than 1 second is taken for 1, so that a job cannot snooze in a hot loop.
    """

    def __init__(self, delay: Duration) -> None:
        self.delay = as_timedelta("delay", delay)
        super().__init__(f"snoozed for {self.delay}")


class Retry(_Ending):
    """Fail this attempt and run the job again after ``delay`` instead of the handler's ``wait``.

    On the last attempt the job is dead.

    :param delay: seconds, or a timedelta.
    """

    def __init__(self, delay: Duration) -> None:
        self.delay = as_timedelta("delay", delay)
        super().__init__(f"retry asked for in {self.delay}")


class Cancel(_Ending):
    """End the job: its status becomes ``cancelled``, it is not run again.

    :param reason: stored as the job's last error.
    """

    def __init__(self, reason: str = "cancelled by its handler") -> None:
        self.reason = reason
        super().__init__(reason)
