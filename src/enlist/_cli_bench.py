"""``enlist bench``: measurements that anybody can repeat, on a server of their own or on a given database."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Final, Protocol

import typer

from enlist._cli_common import LogLevel, configure_logging
from enlist._cli_database import parse_url
from enlist.exceptions import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import sqlalchemy as sa

    from enlist.bench._progress import Progress

__all__ = ["OwnDatabaseURL", "bench", "needing"]

bench: Final = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Measure enlist on your database, or on a server of its own."
)

OwnDatabaseURL = Annotated[
    str | None,
    typer.Option(
        show_default=False,
        help="Use this PostgreSQL, in a schema of its own that is dropped afterwards; default a server started for it."
        " ENLIST_DATABASE_URL is not used here.",
    ),
]
AsJSON = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Rounds = Annotated[int, typer.Option(min=1, max=1000, help="How many rounds to measure.")]


class Facts(Protocol):
    """What a measurement finds."""

    def as_text(self) -> str:
        """For people."""

    def as_json(self) -> str:
        """For programs."""


@contextmanager
def needing(extra: str) -> Iterator[None]:
    """Import something that an extra brings.

    :raises ConfigurationError: it is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"{error.name} is missing here: pip install 'enlist[{extra}]'") from error


def _url_of(database_url: str | None) -> sa.URL | None:
    return None if database_url is None else parse_url(database_url)


@contextmanager
def _progress(*, as_json: bool) -> Iterator[Progress]:
    """Have the log say nothing but errors (that a job fails is what some are about), and show how far it is."""
    from enlist.bench._progress import progress_of_command  # noqa: PLC0415 - bars take a while to import

    configure_logging(LogLevel.ERROR)
    with progress_of_command(as_json=as_json) as progress:
        yield progress


def _print(facts: Facts, *, as_json: bool, right: bool = True) -> None:
    """Print what was found; exit with status 1 if it is not right."""
    typer.echo(facts.as_json() if as_json else facts.as_text())
    if not right:
        raise typer.Exit(1)


@bench.command()
def drain(
    *,
    database_url: OwnDatabaseURL = None,
    jobs: Annotated[
        int,
        typer.Option(min=1, max=200_000, help="How many to drain at a time; less where each takes much longer."),
    ] = 20_000,
    repeat: Rounds = 5,
    slots: Annotated[int, typer.Option(min=1, max=1000, help="How many slots each worker has.")] = 10,
    processes: Annotated[int, typer.Option(min=1, max=64, help="How many worker processes drain.")] = 1,
    row: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            show_default="all, or none with --state",
            help="Measure this: noop, noop-async, insert, insert-async, grouped, grouped-async, added,"
            " added-async, noop-processes or burn-processes. May be given again.",
        ),
    ] = None,
    state: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            show_default="none",
            help="Measure no-ops in this state of the table as well, in turn with an empty one: finished, future or"
            " pinned. May be given again.",
        ),
    ] = None,
    scale: Annotated[float, typer.Option(min=1e-6, max=100, help="A factor for the number of jobs of the states.")] = (
        1.0
    ),
    as_json: AsJSON = False,
) -> None:
    """Measure how many jobs a second workers finish, what CPU and WAL a job takes, and check that each runs once.

    The exit status is 1 unless each job was done, was run once and has one row.
    """
    with needing("demo"):
        from enlist.bench.drain import run_drain  # noqa: PLC0415 - of another extra
    url = _url_of(database_url)
    with _progress(as_json=as_json) as progress:
        facts = run_drain(
            url=url,
            jobs=jobs,
            repeat=repeat,
            slots=slots,
            processes=processes,
            rows=row or (),
            states=state or (),
            scale=scale,
            progress=progress,
        )
    _print(facts, as_json=as_json, right=facts.right)


@bench.command()
def enqueue(
    database_url: OwnDatabaseURL = None,
    repeat: Rounds = 5,
    bulk: Annotated[int, typer.Option(min=1, help="How many jobs to enqueue at a time.")] = 100_000,
    long: Annotated[int, typer.Option(min=0, help="How many jobs to enqueue in one session, to see its memory.")] = (
        1_000_000
    ),
    as_json: AsJSON = False,
) -> None:
    """Measure what jobs cost beside rows that are written by hand, how many a second are enqueued, and the memory."""
    with needing("demo"):
        from enlist.bench.enqueue import run_enqueue  # noqa: PLC0415 - of another extra
    url = _url_of(database_url)
    with _progress(as_json=as_json) as progress:
        facts = run_enqueue(url=url, repeat=repeat, bulk_jobs=bulk, long_jobs=long, progress=progress)
    _print(facts, as_json=as_json)


@bench.command()
def latency(
    database_url: OwnDatabaseURL = None,
    jobs: Annotated[
        int, typer.Option(min=1, max=100_000, help="How many jobs to enqueue one by one, of each sort.")
    ] = 300,
    repeat: Annotated[int, typer.Option(min=1, max=1000, help="How many rounds of commits to measure.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.05, max=600, help="How long to commit, in each round.")] = 2.0,
    as_json: AsJSON = False,
) -> None:
    """Measure how soon an idle worker starts a job, how exactly at its time, and what waking costs the producers."""
    with needing("demo"):
        from enlist.bench.latency import run_latency  # noqa: PLC0415 - of another extra
    url = _url_of(database_url)
    with _progress(as_json=as_json) as progress:
        facts = run_latency(url=url, jobs=jobs, repeat=repeat, seconds=seconds, progress=progress)
    _print(facts, as_json=as_json)


@bench.command()
def claim(
    *,
    database_url: OwnDatabaseURL = None,
    repeat: Rounds = 5,
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
    as_json: AsJSON = False,
) -> None:
    """Measure what a claim of 1 and of 100 jobs costs by what else is in the table, beside an empty one.

    It takes some minutes, and needs the right to create a database.
    """
    with needing("demo"):
        from enlist.bench.claim import run_claim  # noqa: PLC0415 - of another extra
    url = _url_of(database_url)
    with _progress(as_json=as_json) as progress:
        facts = run_claim(
            url=url, repeat=repeat, claims=claims, scale=scale, states=state or (), stale=stale, progress=progress
        )
    _print(facts, as_json=as_json)


@bench.command()
def lab(
    database_url: OwnDatabaseURL = None,
    repeat: Annotated[int, typer.Option(min=1, max=1000, help="How often to time the 1,000 jobs.")] = 5,
    as_json: AsJSON = False,
) -> None:
    """Run 1,000 jobs of 2 ms on 8 slots, one of which fails twice, and a job whose worker dies; print the facts."""
    with needing("demo"):
        from enlist.bench.lab import run_lab  # noqa: PLC0415 - of another extra
    url = _url_of(database_url)
    with _progress(as_json=as_json) as progress:
        facts = run_lab(url=url, repeat=repeat, progress=progress)
    _print(facts, as_json=as_json, right=facts.right)


@bench.command()
def indexes(
    database_url: OwnDatabaseURL = None,
    jobs: Annotated[int, typer.Option(min=100, max=200_000, help="How many jobs of each sort.")] = 20_000,
    as_json: AsJSON = False,
) -> None:
    """Measure what each index of the job table adds to the WAL over a job's life, and what fillfactor does."""
    with needing("demo"):
        from enlist.bench.indexes import run_indexes  # noqa: PLC0415 - of another extra
    url = _url_of(database_url)
    configure_logging(LogLevel.ERROR)
    _print(run_indexes(url=url, jobs=jobs), as_json=as_json)
