"""The commands of ``enlist``, and how their errors are told: a line on standard error, never a traceback unasked."""

from __future__ import annotations

from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any, Final

import sqlalchemy as sa
import typer
from rich.console import Console
from typer.core import TyperGroup

from enlist._cli_common import (
    LogLevel,
    OptionalDatabaseURL,
    configure_logging,
    engine_of,
    load,
    record_of,
    target_argument,
)
from enlist._cli_database import connecting, engine_for, one_line, parse_url
from enlist._cli_jobs import cancel, jobs, retry
from enlist._cli_status import print_status, read_status, status_as_json
from enlist._cli_worker import worker
from enlist.exceptions import ConfigurationError, EnlistError
from enlist.migrations import LATEST_STEP, current_step
from enlist.migrations import migrate as run_migration
from enlist.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["app"]


class Commands(TyperGroup):
    """Tells errors on one line, and takes ``--traceback`` anywhere."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--traceback" in args:
            args = ["--traceback", *(arg for arg in args if arg != "--traceback")]
        for arg in args:
            if any("\ud800" <= character <= "\udfff" for character in arg):  # bytes that the locale cannot read
                raise typer.BadParameter(f"{arg!a} is no text in this locale's encoding", ctx)
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
        name = connection.scalar(sa.select(sa.func.current_database()))
    if steps:
        typer.echo(f"database {name}: carried out {', '.join(f'step {done}' for done in steps)}")
    else:
        typer.echo(f"database {name}: nothing to do, it is at step {step}")


app.command()(worker)


@app.command()
def status(
    target: Annotated[
        str | None,
        target_argument("A Worker or HandlerRegistry: shows the queued kinds that it has no handler for."),
    ] = None,
    database_url: OptionalDatabaseURL = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Count jobs by queue and status, say how late the oldest is, and name the kinds that wait."""
    application = load(target)
    handled = served = None
    if isinstance(application, Worker):
        handled, served = application.handlers.kinds, application.queues
    elif application is not None:
        handled = application.kinds
    with engine_of(application, database_url) as engine, connecting(engine) as connection:
        found = read_status(connection, record=record_of(application), handled=handled, served=served)
    if as_json:
        typer.echo(status_as_json(found))
    else:
        console = Console()
        # In a file or a pipe nothing need be cut off.
        print_status(found, console if console.is_terminal else Console(width=200))


app.command()(jobs)
app.command()(retry)
app.command()(cancel)


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
    configure_logging(LogLevel.ERROR)  # that a job fails and a worker is lost is what it is about
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
    configure_logging(LogLevel.ERROR)
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
    configure_logging(LogLevel.ERROR)
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
    configure_logging(LogLevel.ERROR)
    facts = run_claim(url=url, repeat=repeat, claims=claims, scale=scale, states=state or (), stale=stale)
    typer.echo(facts.as_json() if as_json else facts.as_text())


@bench.command()
def wake(
    database_url: OwnDatabaseURL = None,
    jobs: Annotated[
        int, typer.Option(min=1, max=100_000, help="How many jobs to enqueue one by one, of each sort.")
    ] = (300),
    repeat: Annotated[int, typer.Option(min=1, max=1000, help="How many rounds of commits to measure.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.05, max=600, help="How long to commit, in each round.")] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure how soon an idle worker starts a job, how exactly at its time, and what waking costs the producers."""
    with _extra("demo"):
        from enlist.bench.wake import run_wake  # noqa: PLC0415 - of another extra
    url = None if database_url is None else parse_url(database_url)
    configure_logging(LogLevel.ERROR)
    facts = run_wake(url=url, jobs=jobs, repeat=repeat, seconds=seconds)
    typer.echo(facts.as_json() if as_json else facts.as_text())


@contextmanager
def _extra(name: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"{error.name} is missing here: pip install 'enlist[{name}]'") from error
