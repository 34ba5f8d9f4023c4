"""When a failed job runs again, and what is kept of its error."""

from __future__ import annotations

import datetime as dt
import json
import math
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Final

import tenacity
from sqlalchemy.exc import DBAPIError, PendingRollbackError, StatementError

from enlist._driver import brief, server_message
from enlist._log import Log

if TYPE_CHECKING:
    from tenacity.wait import wait_base

__all__ = ["DEFAULT_WAIT", "describe", "error_entry", "wait_after"]

logger = Log("enlist.worker")

DEFAULT_WAIT: Final = tenacity.wait_exponential(multiplier=5, max=3600) + tenacity.wait_random(0, 5)
"""5 s, 10 s, 20 s ... up to 1 h, each with up to 5 s of jitter."""

LONGEST_WAIT: Final = dt.timedelta(days=30)
"""What any strategy's wait is cut to: a formula that runs away must not lose the job."""

MAX_ERROR_CHARACTERS: Final = 16_384
"""What is kept of an error's text; the middle is cut out of a longer one."""

OWN_CODE: Final = str(Path(__file__).parent / "_")

MAX_SUMMARY_CHARACTERS: Final = 1_000


def wait_after(attempt: int, error: BaseException, wait: wait_base = DEFAULT_WAIT) -> dt.timedelta:
    """Return how long to wait after a failed attempt, by a tenacity strategy.

    :param attempt: the number of the attempt that failed, from 1.
    :param error: what it failed with: a strategy may look at it.
    :return: between 0 and :data:`LONGEST_WAIT`. A strategy that raises, or gives something that is no number, is
        logged and replaced by the default.
    """
    state = tenacity.RetryCallState(retry_object=tenacity.Retrying(wait=wait), fn=None, args=(), kwargs={})
    state.attempt_number = attempt
    state.set_exception((type(error), error, error.__traceback__))
    try:
        seconds = float(wait(state))
        if math.isnan(seconds):
            raise ValueError("the wait is not a number")
    except BaseException as fault:  # SystemExit too: the failure must be written
        if wait is DEFAULT_WAIT:
            raise
        logger.error(  # noqa: TRY400 (its traceback would quote what the handler's error quotes)
            "the wait strategy %s failed; the default is used instead: %s", type(wait).__qualname__, describe(fault)
        )
        return wait_after(attempt, error)
    return dt.timedelta(seconds=min(max(seconds, 0.0), LONGEST_WAIT.total_seconds()))


def describe(error: BaseException) -> str:
    """Return an error's traceback as text that PostgreSQL stores: bounded, without NUL, without bound parameters.

    It never raises, whatever the exception does when it is turned into text.
    """
    try:
        _hide_parameters(error)
        report = traceback.TracebackException.from_exception(error, compact=True)
        while report.stack and report.stack[0].filename.startswith(OWN_CODE):
            del report.stack[0]  # how enlist came to call the handler is nothing to its author
        text = "".join(report.format()).strip()
        for cause in _chain(error):
            if isinstance(cause, DBAPIError) and cause.orig is not None:
                text = text.replace(str(cause.orig).strip(), server_message(cause))
    except BaseException as failure:  # a hostile __str__ or __cause__
        text = f"{type(error).__qualname__} (its text could not be made: {type(failure).__qualname__})"
    return storable(text, MAX_ERROR_CHARACTERS)


def summarize(error: BaseException) -> str:
    """Return an error's class and message, on a line, without bound parameters. It never raises either."""
    try:
        _hide_parameters(error)
        text = brief(error)
    except BaseException:  # a hostile __cause__
        text = type(error).__qualname__
    # On a line whatever the message is: one that looks like a line of the log must not become one.
    return " ".join(storable(text, MAX_SUMMARY_CHARACTERS).split("\n"))


def error_entry(attempt: int, text: str) -> str:
    """Return one element of a job's ``errors`` as JSON text."""
    at = dt.datetime.now(dt.UTC).isoformat()
    return json.dumps({"attempt": attempt, "at": at, "error": text})


def storable(text: str, limit: int) -> str:
    """Return the text with what PostgreSQL refuses replaced, and its middle cut out beyond ``limit`` characters."""
    if len(text) > limit:
        half = limit // 2
        text = f"{text[:half]}\n... {len(text) - 2 * half} characters cut ...\n{text[-half:]}"
    return text.replace("\x00", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()


def _hide_parameters(error: BaseException) -> None:
    """Have the database errors among an error and its causes not show what was bound: it may be anybody's data."""
    for cause in _chain(error):
        if isinstance(cause, StatementError):
            cause.hide_parameters = True
        elif isinstance(cause, PendingRollbackError):
            # Its text quotes the first error's, parameters and all; that one is in the chain, or was swallowed.
            cause.args = tuple(str(arg).partition(" Original exception was:")[0] for arg in cause.args)


def _chain(error: BaseException) -> list[BaseException]:
    """The error with its causes and contexts, each once (a chain may be a circle)."""
    found: list[BaseException] = []
    pending: list[BaseException | None] = [error]
    while pending and len(found) < sys.getrecursionlimit():
        one = pending.pop()
        if one is None or any(one is other for other in found):
            continue
        found.append(one)
        pending += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            pending += one.exceptions
    return found
