"""What several commands share: options, logging, and the way to the database that is meant."""

from __future__ import annotations

import enum
import logging
import os
import sys
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from enlist._cli_database import engine_for, parse_url
from enlist._cli_load import load_application
from enlist._engines import housekeeping_engine
from enlist.models import JobRecord, JobRecordMixin
from enlist.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Iterator

    import sqlalchemy as sa

    from enlist.handlers import HandlerRegistry

__all__ = [
    "LogLevel",
    "OptionalDatabaseURL",
    "configure_logging",
    "end_soon",
    "engine_of",
    "load",
    "record_of",
    "target_argument",
]

LINGER_SECONDS: Final = 5.0
"""How long after the worker the process may take to end, such as for what an application sends at exit."""

LINGER_UNCLEAN_SECONDS: Final = 1.0
"""The same when a handler could not be stopped: it will not return now either."""

LINGER_TWICE_SECONDS: Final = 10.0
"""The same after a second signal, whatever the worker waits for."""

LOG_FORMAT: Final = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


class LogLevel(enum.StrEnum):
    """How much a worker says on standard error."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


OptionalDatabaseURL = Annotated[
    str | None,
    typer.Option(
        envvar="ENLIST_DATABASE_URL",
        show_default="the worker's",
        help="The database: a postgresql:// URL, or any SQLAlchemy URL of one.",
    ),
]


def check_target(target: str | None) -> str | None:
    """Refuse a MODULE:OBJECT that cannot be one, as a wrong call."""
    if target is not None and ":" not in target:
        raise typer.BadParameter(f"{target!r} should be module:object, such as shop.jobs:worker")
    return target


def target_argument(meaning: str) -> Any:
    """The argument, or environment variable, that names the application; ``meaning`` is what it is to be."""
    return typer.Argument(
        metavar="MODULE:OBJECT", envvar="ENLIST_APP", show_default=False, callback=check_target, help=meaning
    )


def configure_logging(level: LogLevel, log_format: str = LOG_FORMAT) -> None:
    """Log to standard error, unless the application has set up logging when it was imported; it knows better."""
    number = logging.getLevelNamesMapping()[level.value.upper()]
    # Debugging is for enlist: other libraries have much to say then, such as parameters.
    logging.basicConfig(level=max(number, logging.INFO), format=log_format)
    logging.getLogger("enlist").setLevel(number)


def load(target: str | None) -> Worker | HandlerRegistry | None:
    """The application's worker or registry, if a command was given one."""
    return None if target is None else load_application(target)


def record_of(application: object) -> type[JobRecordMixin]:
    """The mapped class of the jobs: the worker's, or the default one."""
    return application._record if isinstance(application, Worker) else JobRecord


@contextmanager
def engine_of(application: object, database_url: str | None) -> Iterator[sa.Engine]:
    """An engine on the database that a command was given, else on the worker's."""
    if database_url is not None:
        engine = engine_for(parse_url(database_url))
    elif isinstance(application, Worker):
        engine = housekeeping_engine(application._bind, application._sync_bind)
    else:
        raise typer.BadParameter(
            "the database is missing: give --database-url, set ENLIST_DATABASE_URL, or name a worker"
        )
    try:
        yield engine
    finally:
        engine.dispose()


def end_soon(status: int, *, after: threading.Event | None = None) -> None:
    """Have the process ended though some thread never returns.

    :param after: the second signal: from then on it may take :data:`LINGER_TWICE_SECONDS`, whatever happens.

    The worker's own threads don't keep it, but the interpreter waits for others at its exit: such as those of
    ``asyncio.to_thread``, which an async handler may have left something to do for ever.
    """

    def end() -> None:
        if after is not None:
            after.wait()
            time.sleep(LINGER_TWICE_SECONDS)
        else:
            time.sleep(LINGER_UNCLEAN_SECONDS if status else LINGER_SECONDS)
        # On yet another thread: a log may block for ever as well.
        saying = threading.Thread(target=say, args=(threading.current_thread(),), daemon=True)
        saying.start()
        saying.join(LINGER_UNCLEAN_SECONDS)
        os._exit(status or 1)

    def say(*known: threading.Thread) -> None:
        known = (*known, threading.main_thread(), threading.current_thread())
        others = [thread.name for thread in threading.enumerate() if thread not in known]
        with suppress(BaseException):  # a disk that is full, a stream that is closed
            logging.getLogger("enlist").warning("the process ends though threads still run: %s", ", ".join(others))
            logging.shutdown()
            sys.stdout.flush()

    threading.Thread(target=end, name="enlist-exit", daemon=True).start()
