"""The commands of ``enlist``, and how their errors are told: a line on standard error, never a traceback unasked."""

from __future__ import annotations

import enum
import logging
import os
import sys
import threading
import time
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any, Final

import sqlalchemy as sa
import typer
from rich.console import Console
from typer.core import TyperGroup

from enlist._cli_database import connecting, engine_for, one_line, parse_url
from enlist._cli_load import load_application, load_worker
from enlist._cli_status import print_status, read_status, status_as_json
from enlist._engines import housekeeping_engine
from enlist.exceptions import ConfigurationError, EnlistError
from enlist.migrations import LATEST_STEP, current_step
from enlist.migrations import migrate as run_migration
from enlist.models import JobRecord, JobRecordMixin
from enlist.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["app"]

LINGER_SECONDS: Final = 5.0
"""How long after the worker the process may take to end, such as for what an application sends at exit."""

LINGER_UNCLEAN_SECONDS: Final = 1.0
"""The same when a handler could not be stopped: it will not return now either."""

LOG_FORMAT: Final = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


class LogLevel(enum.StrEnum):
    """How much a worker says on standard error."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Commands(TyperGroup):
    """Tells errors on one line, and takes ``--traceback`` anywhere."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--traceback" in args:
            args = ["--traceback", *(arg for arg in args if arg != "--traceback")]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (EnlistError, sa.exc.SQLAlchemyError, OSError) as error:
            # A closed pipe (`| head -1`) is click's to end, in silence.
            if ctx.params.get("traceback") or isinstance(error, BrokenPipeError):
                raise
            typer.echo(f"enlist: {one_line(error)}", err=True)
            raise typer.Exit(1) from None


app: Final = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # they would show local variables
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench: Final = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure enlist on this machine.")
app.add_typer(bench, name="bench")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"enlist {version('enlist')}, schema step {LATEST_STEP}")
        raise typer.Exit


@app.callback()
def _enlist(
    traceback: Annotated[
        bool, typer.Option("--traceback", envvar="ENLIST_TRACEBACK", help="Show the traceback of an error.")
    ] = False,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """A job queue for SQLAlchemy applications on PostgreSQL: jobs enlist in your transaction."""


DatabaseURL = Annotated[
    str,
    typer.Option(
        envvar="ENLIST_DATABASE_URL",
        show_default=False,
        help="The database: a postgresql:// URL, or any SQLAlchemy URL of one.",
    ),
]
OwnDatabaseURL = Annotated[
    str | None,
    typer.Option(
        show_default=False,
        help="Use this PostgreSQL, in a schema of its own that is dropped afterwards; default a server started for it."
        " ENLIST_DATABASE_URL is not used here.",
    ),
]


def _check_target(target: str | None) -> str | None:
    if target is not None and ":" not in target:
        raise typer.BadParameter(f"{target!r} should be module:object, such as shop.jobs:worker")
    return target


@app.command()
def migrate(
    database_url: DatabaseURL,
    to: Annotated[
        int | None, typer.Option(help="The schema step to reach.", show_default=f"the latest, {LATEST_STEP}")
    ] = None,
    schema: Annotated[
        str | None,
        typer.Option(
            envvar="ENLIST_SCHEMA", help="The schema for the tables.", show_default="the first of the search_path"
        ),
    ] = None,
) -> None:
    """Create enlist's tables, or bring them to this release's step. Safe to run at every deployment."""
    with connecting(engine_for(parse_url(database_url))) as connection:
        steps = run_migration(connection, to=to, schema=schema)
        step = current_step(connection, schema=schema)
        name = connection.scalar(sa.text("SELECT current_database()"))
    if steps:
        typer.echo(f"database {name}: carried out {', '.join(f'step {done}' for done in steps)}")
    else:
        typer.echo(f"database {name}: nothing to do, it is at step {step}")


@app.command()
def worker(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:OBJECT",
            envvar="ENLIST_APP",
            show_default=False,
            callback=_check_target,
            help="A Worker, or a function that returns one, such as shop.jobs:worker.",
        ),
    ],
    log_level: Annotated[
        LogLevel, typer.Option(envvar="ENLIST_LOG_LEVEL", case_sensitive=False, help="How much to log.")
    ] = LogLevel.INFO,
) -> None:
    """Run an application's worker until SIGTERM or SIGINT. A second signal ends it at once."""
    found = load_worker(target)
    _configure_logging(log_level)
    status = 0
    try:
        found.run()
    except SystemExit as exit_:
        status = exit_.code if isinstance(exit_.code, int) else 1
    _end_soon(status)
    raise typer.Exit(status)


@app.command()
def status(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="MODULE:OBJECT",
            envvar="ENLIST_APP",
            show_default=False,
            callback=_check_target,
            help="A Worker or HandlerRegistry: shows which kinds are queued that it has no handler for.",
        ),
    ] = None,
    database_url: Annotated[
        str | None,
        typer.Option(
            envvar="ENLIST_DATABASE_URL",
            show_default="the worker's",
            help="The database: a postgresql:// URL, or any SQLAlchemy URL of one.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Count jobs by queue and status, say how late the oldest is, and name the kinds that wait."""
    application = None if target is None else load_application(target)
    handled = served = None
    record: type[JobRecordMixin] = JobRecord
    if isinstance(application, Worker):
        handled, served, record = application.handlers.kinds, application.queues, application._record
    elif application is not None:
        handled = application.kinds
    with _engine_of(application, database_url) as engine, connecting(engine) as connection:
        found = read_status(connection, record=record, handled=handled, served=served)
    if as_json:
        typer.echo(status_as_json(found))
    else:
        console = Console()
        # In a file or a pipe nothing need be cut off.
        print_status(found, console if console.is_terminal else Console(width=200))


@contextmanager
def _engine_of(application: object, database_url: str | None) -> Iterator[sa.Engine]:
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


@app.command()
def demo(
    # With fewer the jobs may all be done before there is a worker to kill.
    orders: Annotated[int, typer.Option(min=200, max=1_000_000, help="How many orders to place.")] = 2000,
    database_url: OwnDatabaseURL = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the database up, and say how to connect.")] = False,
) -> None:
    """Place orders in a small shop, kill one of its two workers halfway, and check that nothing is lost or doubled."""
    with _extra("demo"):
        from enlist.demo.run import run_demo  # noqa: PLC0415 - of another extra
    url = None if database_url is None else parse_url(database_url)
    if not run_demo(orders=orders, url=url, keep=keep, console=Console()):
        raise typer.Exit(1)


@bench.command()
def lab(
    database_url: OwnDatabaseURL = None,
    repeat: Annotated[int, typer.Option(min=1, max=1000, help="How often to time the 1,000 jobs.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run 1,000 jobs of 2 ms on 8 slots, one of which fails twice, and a job whose worker dies; print the facts."""
    with _extra("demo"):
        from enlist.bench.lab import run_lab  # noqa: PLC0415 - of another extra
    url = None if database_url is None else parse_url(database_url)
    _configure_logging(LogLevel.ERROR)  # that a job fails and a worker is lost is what it is about
    facts = run_lab(url=url, repeat=repeat)
    typer.echo(facts.as_json() if as_json else facts.as_text())
    if not facts.right:
        raise typer.Exit(1)


@bench.command()
def enqueue(
    database_url: OwnDatabaseURL = None,
    repeat: Annotated[int, typer.Option(min=1, max=1000, help="How many rounds to measure.")] = 5,
    bulk: Annotated[int, typer.Option(min=1, help="How many jobs to enqueue at a time.")] = 100_000,
    long: Annotated[int, typer.Option(min=0, help="How many jobs to enqueue in one session, to see its memory.")] = (
        1_000_000
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure what jobs cost beside rows that are written by hand, how many a second are enqueued, and the memory."""
    with _extra("demo"):
        from enlist.bench.enqueue import run_enqueue  # noqa: PLC0415 - of another extra
    url = None if database_url is None else parse_url(database_url)
    _configure_logging(LogLevel.ERROR)
    facts = run_enqueue(url=url, repeat=repeat, bulk_jobs=bulk, long_jobs=long)
    typer.echo(facts.as_json() if as_json else facts.as_text())


@bench.command()
def indexes(
    database_url: OwnDatabaseURL = None,
    jobs: Annotated[int, typer.Option(min=100, max=200_000, help="How many jobs of each sort.")] = 20_000,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure what each index of the job table adds to the WAL over a job's life, and what fillfactor does."""
    with _extra("demo"):
        from enlist.bench.indexes import run_indexes  # noqa: PLC0415 - of another extra
    url = None if database_url is None else parse_url(database_url)
    _configure_logging(LogLevel.ERROR)
    facts = run_indexes(url=url, jobs=jobs)
    typer.echo(facts.as_json() if as_json else facts.as_text())


@bench.command()
def claim(
    *,
    database_url: OwnDatabaseURL = None,
    repeat: Annotated[int, typer.Option(min=1, max=1000, help="How many rounds to measure.")] = 5,
    claims: Annotated[int, typer.Option(min=1, max=10_000, help="How many claims of each size to time in a round.")] = (
        40
    ),
    scale: Annotated[float, typer.Option(min=1e-6, max=100, help="A factor for the number of jobs of each state.")] = (
        1.0
    ),
    state: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            show_default="all",
            help="Measure this state: done, future, ready, hot-key, idle-key, keys or pinned. May be given again.",
        ),
    ] = None,
    stale: Annotated[
        bool, typer.Option("--stale", help="Let the planner's statistics be those of the table when it was empty.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure what a claim of 1 and of 100 jobs costs by what else is in the table, beside an empty one.

    It takes some minutes, and needs the right to create a database.
    """
    with _extra("demo"):
        from enlist.bench.claim import run_claim  # noqa: PLC0415 - of another extra
    url = None if database_url is None else parse_url(database_url)
    _configure_logging(LogLevel.ERROR)
    facts = run_claim(url=url, repeat=repeat, claims=claims, scale=scale, states=state or (), stale=stale)
    typer.echo(facts.as_json() if as_json else facts.as_text())


@contextmanager
def _extra(name: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"{error.name} is missing here: pip install 'enlist[{name}]'") from error


def _configure_logging(level: LogLevel) -> None:
    """Log to standard error, unless the application has set up logging when it was imported; it knows better."""
    number = logging.getLevelNamesMapping()[level.value.upper()]
    # Debugging is for enlist: other libraries have much to say then, such as parameters.
    logging.basicConfig(level=max(number, logging.INFO), format=LOG_FORMAT)
    logging.getLogger("enlist").setLevel(number)


def _end_soon(status: int) -> None:
    """Have the process ended though some thread never returns.

    The worker's own threads don't keep it, but the interpreter waits for others at its exit: such as those of
    ``asyncio.to_thread``, which an async handler may have left something to do for ever.
    """

    def end() -> None:
        time.sleep(LINGER_UNCLEAN_SECONDS if status else LINGER_SECONDS)
        others = [
            t.name for t in threading.enumerate() if t not in {threading.main_thread(), threading.current_thread()}
        ]
        logging.getLogger("enlist").warning("the process ends though threads still run: %s", ", ".join(others))
        logging.shutdown()
        sys.stdout.flush()
        os._exit(status or 1)

    threading.Thread(target=end, name="enlist-exit", daemon=True).start()
