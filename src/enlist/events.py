"""What a worker tells while it works: one event for each step of an attempt, for metrics, traces and alarms."""

from __future__ import annotations

import datetime as dt
import inspect
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from enlist._log import Log
from enlist.exceptions import ConfigurationError
from enlist.models import JobStatus
from enlist.retry import describe, summarize

if TYPE_CHECKING:
    import uuid

    import sqlalchemy as sa

    from enlist._slots import Run

__all__ = ["EventName", "Events", "JobEvent", "Listener", "listeners_of"]

logger = Log("enlist.worker")


class EventName(StrEnum):
    """What has happened.

    An attempt whose handler is called tells ``STARTED`` and then one of the others. Without having started it may be
    released, or retried or dead, because its payload does not fit its class.
    """

    STARTED = "started"
    """The handler is called now."""
    DONE = "done"
    """The job is done: its effects are committed."""
    RETRIED = "retried"
    """The attempt failed; the job is queued for the next one, in ``delay``."""
    DEAD = "dead"
    """The last attempt failed: the job will not run again by itself."""
    SNOOZED = "snoozed"
    """The handler raised ``Snooze``, or the payload's version is newer than this worker knows.

    The job is queued again, in ``delay``; the attempt does not count.
    """
    CANCELLED = "cancelled"
    """The handler raised ``Cancel``, or somebody cancelled the job while it ran."""
    RELEASED = "released"
    """The job was given back, since the worker stops or had no slot for it in time; the attempt does not count."""
    LEASE_LOST = "lease_lost"
    """The job is another's now, or its lease could not be renewed: nothing of the attempt is committed."""
    REAPED = "reaped"
    """This worker took the job from another, which had let its lease run out. It is queued again, or dead."""


STATUSES: Final = {
    EventName.STARTED: JobStatus.RUNNING,
    EventName.DONE: JobStatus.DONE,
    EventName.RETRIED: JobStatus.QUEUED,
    EventName.DEAD: JobStatus.DEAD,
    EventName.SNOOZED: JobStatus.QUEUED,
    EventName.CANCELLED: JobStatus.CANCELLED,
    EventName.RELEASED: JobStatus.QUEUED,
}


@dataclass(frozen=True, slots=True)
class JobEvent:
    """One step of one attempt at a job."""

    name: EventName
    at: dt.datetime
    """When it was told: aware, UTC, by this machine's clock."""
    worker: str
    """The name of the worker that tells it."""
    job_id: uuid.UUID
    kind: str
    queue: str
    attempt: int
    max_attempts: int
    status: JobStatus | None = None
    """What the job is by this event; None where that is for others to say (``LEASE_LOST``)."""
    seconds: float | None = None
    """How long the handler ran, its commit included; None where none ran."""
    waited_seconds: float | None = None
    """With ``STARTED``: since the job was due, by this machine's clock against the server's."""
    delay: dt.timedelta | None = None
    """With ``RETRIED`` and ``SNOOZED``: until the job is due again."""
    error: str | None = None
    """Why, in one line: the class and message of the exception, without bound parameters."""
    exception: BaseException | None = None
    """The exception itself, as the handler raised it. Unlike ``error`` it may hold anybody's data."""


Listener: TypeAlias = Callable[[JobEvent], object]


def listeners_of(events: Listener | Iterable[Listener] | None) -> tuple[Listener, ...]:
    """Return what was given as ``events=``, checked.

    :raises ConfigurationError: one cannot be called with an event, or is async.
    """
    if events is None:
        return ()
    if not callable(events) and (isinstance(events, (str, bytes)) or not isinstance(events, Iterable)):
        raise ConfigurationError(f"events must be a function that takes a JobEvent, or several, not {events!r}")
    listeners = (events,) if callable(events) else tuple(events)
    for listener in listeners:
        _check(listener)
    return listeners


def _check(listener: object) -> None:
    if not callable(listener):
        raise ConfigurationError(f"events: a listener is a function that takes a JobEvent, not {listener!r}")
    for function in (listener, getattr(listener, "__call__", None)):  # noqa: B004 (of an instance)
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigurationError(
                f"events: {_name(listener)} is async, and listeners are called on the worker's threads, where nobody"
                " would await it: give a plain function; loop.call_soon_threadsafe() hands an event over to a loop"
            )
        if inspect.isgeneratorfunction(function):
            raise ConfigurationError(f"events: {_name(listener)} is a generator: calling it would do nothing")
    try:
        signature = inspect.signature(listener)
    except (TypeError, ValueError):  # some callables written in C have none
        return
    try:
        signature.bind(object())
    except TypeError as error:
        raise ConfigurationError(
            f"events: {_name(listener)}{signature} must take one positional argument, the event: {error}"
        ) from None


def _name(listener: object) -> str:
    return getattr(listener, "__qualname__", None) or repr(listener)


class Events:
    """Tells a worker's listeners what happens; costs next to nothing where there are none."""

    def __init__(self, listeners: tuple[Listener, ...] = (), worker: str = "") -> None:
        self._listeners = listeners
        self._worker = worker
        self._complained: set[tuple[int, str]] = set()
        self._here = threading.local()

    @property
    def in_listener(self) -> bool:
        """Whether this thread is in a listener just now."""
        return getattr(self._here, "called", False)

    def emit(
        self,
        name: EventName,
        run: Run,
        *,
        seconds: float | None = None,
        delay: dt.timedelta | None = None,
        error: str | None = None,
        exception: BaseException | None = None,
    ) -> None:
        """Tell a step of an attempt; of its endings only the first. Never raises.

        :param seconds: how long the handler ran, where that is not what the run says.
        :param error: default from the exception.
        """
        if not self._listeners:
            return
        starts = name is EventName.STARTED
        if not starts:
            # A handler that comes back when its attempt was given up, or the like: one of the two was first.
            if run.told:
                return
            run.told = True
        if exception is not None:
            error = error or summarize(exception)
        self._tell(
            JobEvent(
                name=name,
                at=dt.datetime.now(dt.UTC),
                worker=self._worker,
                job_id=run.id,
                kind=run.kind,
                queue=run.queue,
                attempt=run.attempt,
                max_attempts=run.max_attempts,
                status=STATUSES.get(name),
                seconds=None if starts else run.seconds if seconds is None else seconds,
                waited_seconds=max(0.0, time.time() - run.due) if starts and math.isfinite(run.due) else None,
                delay=delay,
                error=error,
                exception=exception,
            )
        )

    def reaped(self, row: sa.Row[Any]) -> None:
        """Tell of a job that was taken from a worker that let its lease run out."""
        if not self._listeners:
            return
        self._tell(
            JobEvent(
                name=EventName.REAPED,
                at=dt.datetime.now(dt.UTC),
                worker=self._worker,
                job_id=row.id,
                kind=row.kind,
                queue=row.queue,
                attempt=row.attempt,
                max_attempts=row.max_attempts,
                status=row.status,
                error=f"worker lost: {row.worker} let the lease run out",
            )
        )

    def _tell(self, event: JobEvent) -> None:
        self._here.called = True
        for number, listener in enumerate(self._listeners):
            try:
                answer = listener(event)
                if inspect.iscoroutine(answer):
                    answer.close()
                    raise TypeError("it returned a coroutine, which nobody awaits")
            except BaseException as error:  # SystemExit in a metrics library is no reason to lose a job
                self._complain(number, listener, error)
        self._here.called = False

    def _complain(self, number: int, listener: Listener, error: BaseException) -> None:
        """Log what a listener raised: once for each class, it would be at every job."""
        complaint = (number, type(error).__qualname__)
        if complaint not in self._complained:
            self._complained.add(complaint)
            # As text, without the bound parameters that an exception in its chain may carry.
            logger.error(
                "the event listener %s failed; this is said once, the jobs are not affected: %s",
                _name(listener),
                describe(error),
            )
