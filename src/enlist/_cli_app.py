"""The commands of ``enlist``, and how their errors are told: a line on standard error, never a traceback unasked."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Any, Final

import sqlalchemy as sa
import typer
from rich.console import Console
from typer.core import TyperGroup

from enlist._cli_bench import OwnDatabaseURL, bench, needing
from enlist._cli_common import (
    OptionalDatabaseURL,
    engine_of,
    load,
    record_of,
    target_argument,
)
from enlist._cli_database import connecting, engine_for, one_line, parse_url
from enlist._cli_jobs import cancel, jobs, retry
from enlist._cli_status import print_status, read_status, status_as_json
from enlist._cli_worker import worker
from enlist.exceptions import EnlistError
from enlist.migrations import LATEST_STEP, current_step
from enlist.migrations import migrate as run_migration
from enlist.worker import Worker

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
    with needing("demo"):
        from enlist.demo.run import run_demo  # noqa: PLC0415 - of another extra
    url = None if database_url is None else parse_url(database_url)
    if not run_demo(orders=orders, url=url, keep=keep, console=Console()):
        raise typer.Exit(1)
