"""One attempt at a job, whoever runs it: what its handler gets, how it is called, and what an exception means."""

from __future__ import annotations

import asyncio
import contextvars
import datetime as dt
import inspect
import os
import time
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from enlist._completer import Settlement
from enlist._driver import is_never_connected, sqlstate
from enlist._encoding import parse_stored
from enlist._log import Log
from enlist._options import as_timedelta
from enlist.events import EventName
from enlist.exceptions import HandlerError, HandlerTimeout, PayloadMismatch
from enlist.job import Cancel, Job, Retry, Snooze
from enlist.models import JobStatus
from enlist.payload import decode_text
from enlist.retry import describe, error_entry, storable, summarize, wait_after

if TYPE_CHECKING:
    from enlist._slots import Run

__all__ = ["CONFLICTS", "call_async", "call_plain", "ending", "failure", "job_of", "reruns", "timed_out"]

logger = Log("enlist.worker")

CONFLICTS: Final = frozenset({"40001", "40P01"})
"""Serialization failure, deadlock: the handler is run again, in the same attempt."""

RERUNS: Final = 3

SHORTEST_SNOOZE: Final = dt.timedelta(seconds=1)
"""It costs no attempt, so nothing else would end a loop of them."""

IDLE_IN_TRANSACTION: Final = "25P03"
"""The server cut a transaction that had been idle too long: it would do so again."""

NEWER_SECONDS: Final = 86_400.0
"""For how long after it was made a job that a newer release has written is left to the workers of that release.

By the job's age, since that is for how long the newer release has been out at least: a day later it is not being
deployed any more. It needs no counter in the row, and no worker's memory.
"""

NEWER_WAITS: Final = (10.0, 60.0)
"""The shortest and the longest time until such a job is looked at again: a tenth of its age in between."""


# -- what the handler gets -----------------------------------------------------------------------------------------


def job_of(run: Run, resources: Any) -> Job[Any]:
    """Make the job that the handler sees.

    :raises PayloadError: what is stored cannot be read, or does not fit the payload class; a validator of the
        application may raise anything.
    """
    payload_type = run.handler.payload_type
    if payload_type is None:
        payload: Any = parse_stored("payload", run.payload)
    else:
        payload = decode_text(payload_type, run.payload, run.payload_version, run.id)
    meta = {} if run.meta == "{}" else parse_stored("meta", run.meta)
    return Job(
        payload=payload,
        id=run.id,
        kind=run.kind,
        queue=run.queue,
        attempt=run.attempt,
        max_attempts=run.max_attempts,
        meta=meta,
        resources=resources,
        _signals=run.signals,
    )


def _begin_time(run: Run) -> None:
    """Let the handler's time begin: at each call anew, also when it is run again in the same attempt."""
    run.started = time.monotonic()
    timeout = run.handler.timeout_seconds
    if timeout is not None:
        run.signals.deadline = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=timeout)


# -- how it is called ----------------------------------------------------------------------------------------------


def call_plain(run: Run, session: Any, job: Job[Any]) -> None:
    """Call a plain handler."""
    _begin_time(run)
    process = os.getpid()
    try:
        # In a context of its own: what it sets there is not for the next job of its thread.
        returned = contextvars.copy_context().run(run.handler.function, session, job)
    finally:
        _end_fork(process)
    if returned is not None:
        _check_returned(run, returned)


async def call_async(run: Run, session: Any, job: Job[Any]) -> None:
    """Call an async handler, and cancel it when its time is over.

    :raises HandlerTimeout: it was.
    """
    _begin_time(run)
    process = os.getpid()
    try:
        if run.handler.timeout_seconds is None:
            await run.handler.function(session, job)
        else:
            await _in_time(run, session, job)
    finally:
        _end_fork(process)


async def _in_time(run: Run, session: Any, job: Job[Any]) -> None:
    try:
        async with asyncio.timeout(run.handler.timeout_seconds) as scope:
            await run.handler.function(session, job)
    except TimeoutError as error:
        if scope.expired():
            raise timed_out(run) from error
        raise
    if scope.expired():  # it has caught its cancellation, and returned
        raise timed_out(run)


def _end_fork(process: int) -> None:
    """End a child that the handler forked and let return: it must not use the connections that it shares with us."""
    if os.getpid() != process:
        os._exit(1)


def _check_returned(run: Run, value: object) -> None:
    """Refuse what a plain function returned without having done anything: a coroutine that nobody awaits."""
    if inspect.isawaitable(value) or inspect.isgenerator(value):
        if inspect.iscoroutine(value):
            value.close()
        raise HandlerError(
            f"the handler of kind {run.kind!r} is a plain function and returned {value!r}, which nobody runs: make it"
            " `async def`"
        )


def timed_out(run: Run) -> HandlerTimeout:
    """The error of a handler whose time is over."""
    return HandlerTimeout(
        f"the handler of kind {run.kind!r} ran longer than its timeout of {run.handler.timeout_seconds:g} seconds"
    )


# -- what an exception means ---------------------------------------------------------------------------------------


def reruns(error: BaseException) -> int:
    """How often a handler may be run again in the same attempt after an error that is not of its making."""
    if not isinstance(error, sa.exc.DBAPIError):
        return 0
    if sqlstate(error) in CONFLICTS:
        return RERUNS
    # Once: the pool gave out a connection that had died in it, or the server was restarted. It runs when the server is
    # back, since whether the job is still ours is asked before.
    disconnected = error.connection_invalidated or is_never_connected(error)
    return 1 if disconnected and sqlstate(error) != IDLE_IN_TRANSACTION else 0


def ending(run: Run, error: BaseException) -> Settlement:
    """What becomes of a job whose handler has raised."""
    try:
        return _ending(run, error)
    except BaseException as fault:  # a Snooze whose delay is none, say: that is the attempt's failure then
        fault.__context__ = error
        return failure(run, fault)


def _ending(run: Run, error: BaseException) -> Settlement:
    if isinstance(error, Snooze):
        delay = max(as_timedelta("delay", error.delay), SHORTEST_SNOOZE)
        logger.debug("%s is snoozed for %s", run, delay, extra=run.extra(event=EventName.SNOOZED))
        return Settlement(run, JobStatus.QUEUED, delay, returned=1, exception=error)
    if isinstance(error, Cancel):
        text = storable(str(error.reason), 1000)
        logger.info("%s is cancelled by its handler: %s", run, text, extra=run.extra(event=EventName.CANCELLED))
        entry = error_entry(run.attempt, text)
        return Settlement(run, JobStatus.CANCELLED, error=text, entry=entry, exception=error)
    return failure(run, error)


def failure(run: Run, error: BaseException) -> Settlement:
    """What becomes of a job whose attempt has failed: queued for the next one, or dead."""
    is_final = run.attempt >= run.max_attempts
    if isinstance(error, PayloadMismatch):
        if error.stored_version <= error.version:
            is_final = is_final or run.handler.on_mismatch == "dead"
        elif run.age < NEWER_SECONDS:
            return _left_to_newer(run, error)
    text, entry = describe(error), error_entry(run.attempt, summarize(error))
    if is_final:
        logger.error("%s is dead: %s", run, summarize(error), extra=run.extra(event=EventName.DEAD))
        return Settlement(run, JobStatus.DEAD, error=text, entry=entry, exception=error)
    if isinstance(error, Retry):
        delay = as_timedelta("delay", error.delay)
    else:
        delay = wait_after(run.attempt, error, run.handler.wait)
    extra = run.extra(event=EventName.RETRIED)
    logger.warning("%s failed, next attempt in %s: %s", run, delay, summarize(error), extra=extra)
    return Settlement(run, JobStatus.QUEUED, delay, error=text, entry=entry, exception=error)


def _left_to_newer(run: Run, error: PayloadMismatch) -> Settlement:
    """Put a job back, its attempt with it, for a worker that knows the version it was written with."""
    shortest, longest = NEWER_WAITS
    delay = dt.timedelta(seconds=min(max(run.age / 10, shortest), longest))
    text = f"{summarize(error)}; left to a worker that knows version {error.stored_version}"
    logger.info("%s is put back, looked at again in %s: %s", run, delay, text, extra=run.extra(event=EventName.SNOOZED))
    return Settlement(run, JobStatus.QUEUED, delay, returned=1, error=text, exception=error)
