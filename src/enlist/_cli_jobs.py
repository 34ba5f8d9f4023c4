"""``enlist jobs``, ``retry`` and ``cancel``: what on-call looks at, and does about it."""

from __future__ import annotations

import json
import os
import sys
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import sqlalchemy as sa
import typer
from rich.console import Console

from enlist._cli_changes import DONE, Change, print_tally, tally_as_json
from enlist._cli_common import OptionalDatabaseURL, engine_of, load, record_of, target_argument
from enlist._cli_database import connecting
from enlist._cli_listing import COLUMNS, jobs_as_json, print_jobs, read_jobs
from enlist.migrations import verify_schema
from enlist.models import JobStatus

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from enlist.models import JobRecordMixin

__all__ = ["cancel", "jobs", "retry"]

Statuses = Annotated[
    list[JobStatus] | None,
    typer.Option("--status", help="Only jobs of this status. May be given again.", show_default=False),
]
Kind = Annotated[str | None, typer.Option(help="Only jobs of this kind.", show_default=False)]
Queue = Annotated[str | None, typer.Option(help="Only jobs of this queue.", show_default=False)]
Key = Annotated[str | None, typer.Option(help="Only jobs with this concurrency key or unique key.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Which = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODULE:OBJECT|ID",
        show_default=False,
        help="The ids of the jobs, if options don't pick them. Before them a Worker, if it has a job class or a"
        " database of its own; default what ENLIST_APP names.",
    ),
]
Batch = Annotated[
    int, typer.Option("--limit", min=1, max=100_000, help="The most jobs of one transaction; all are changed.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Change nothing, say what would be changed.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask whether the jobs that options pick are meant.")]


@dataclass(frozen=True)
class Picked:
    """Which jobs the options pick."""

    statuses: Sequence[JobStatus] | None
    kind: str | None
    queue: str | None
    key: str | None

    @property
    def is_empty(self) -> bool:
        return not (self.statuses or self.kind is not None or self.queue is not None or self.key is not None)

    def conditions(self, table: sa.Table) -> list[sa.ColumnElement[bool]]:
        """What they say, but for the statuses."""
        c = table.c
        conditions: list[sa.ColumnElement[bool]] = []
        if self.kind is not None:
            conditions.append(c.kind == self.kind)
        if self.queue is not None:
            conditions.append(c.queue == self.queue)
        if self.key is not None:
            conditions.append(sa.or_(c.concurrency_key == self.key, c.unique_key == self.key))
        return conditions


def jobs(
    *,
    target: Annotated[str | None, target_argument("A Worker, if it has a job class or a database of its own.")] = None,
    database_url: OptionalDatabaseURL = None,
    status: Statuses = None,
    kind: Kind = None,
    queue: Queue = None,
    key: Key = None,
    ids: Annotated[
        list[str] | None, typer.Option("--id", help="Only this job. May be given again.", show_default=False)
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="The most jobs to show.")] = 50,
    payload: Annotated[bool, typer.Option("--payload", help="Show the payloads too; they are not read otherwise.")] = (
        False
    ),
    errors: Annotated[
        bool, typer.Option("--errors", help="Show the whole of the last error, and in short those before.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List jobs, without their payloads.

    Running ones by the end of their leases, queued ones by when they are due, finished ones and all together the
    latest first. Running jobs, those of --id, and the latest of all are found by an index; else the table is read once.
    """
    application = load(target)
    record = record_of(application)
    table = _table_of(record)
    names = [*COLUMNS, *(["payload"] if payload else []), *(["last_error", "errors"] if errors else [])]
    conditions = Picked(status, kind, queue, key).conditions(table)
    if ids:
        conditions.append(table.c.id.in_(_as_ids(ids)))
    with engine_of(application, database_url) as engine, connecting(engine) as connection:
        verify_schema(connection, record=record)
        found = read_jobs(connection, table, conditions, statuses=status or (), names=names, limit=limit)
    if as_json:
        typer.echo(jobs_as_json(found))
        return
    console = Console()
    # In a file or a pipe nothing need be cut off.
    print_jobs(found, console if console.is_terminal else Console(width=240), in_full=payload or errors)
    if len(found) == limit:
        typer.echo(f"These are the first {limit:,}; there may be more, see --limit.", err=True)


def retry(
    *,
    which: Which = None,
    database_url: OptionalDatabaseURL = None,
    status: Statuses = None,
    kind: Kind = None,
    queue: Queue = None,
    key: Key = None,
    limit: Batch = 1000,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Queue jobs again, due now, with all attempts before them.

    By their ids, or those that options pick: dead ones, unless --status says otherwise. Exits with 1 if nothing was
    changed or there is no job of an id.
    """
    picked = Picked(status, kind, queue, key)
    if not status and not picked.is_empty:  # the done ones would be all that the kind has ever done
        picked = Picked([JobStatus.DEAD], kind, queue, key)
    _change("retry", which, picked, database_url, limit, dry_run=dry_run, yes=yes, as_json=as_json)


def cancel(
    *,
    which: Which = None,
    database_url: OptionalDatabaseURL = None,
    status: Statuses = None,
    kind: Kind = None,
    queue: Queue = None,
    key: Key = None,
    limit: Batch = 1000,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Cancel queued and running jobs, by their ids or those that options pick.

    Exits with 1 if nothing was changed or there is no job of an id.
    """
    picked = Picked(status, kind, queue, key)
    _change("cancel", which, picked, database_url, limit, dry_run=dry_run, yes=yes, as_json=as_json)


def _change(
    verb: str,
    which: Sequence[str] | None,
    picked: Picked,
    database_url: str | None,
    batch: int,
    *,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    target, ids = _split(which or [])
    if bool(ids) is not picked.is_empty:
        raise typer.BadParameter(
            "which jobs? Give either their ids or options that pick them, such as --status dead --kind send_receipt"
        )
    application = load(target)
    record = record_of(application)
    with engine_of(application, database_url) as engine:
        with connecting(engine) as connection:
            verify_schema(connection, record=record)
        change = Change(verb, engine, record)
        if ids:
            tally = change.by_ids(ids, batch, dry_run=dry_run)
        else:
            conditions = picked.conditions(_table_of(record))
            if picked.statuses:
                conditions.append(_table_of(record).c.status.in_(picked.statuses))
            if dry_run:
                jobs = change.count(conditions)
                done = f"would be {DONE[verb]}: {jobs:,}"
                typer.echo(json.dumps({"jobs": jobs, "dry_run": True}, indent=2) if as_json else done)
                raise typer.Exit(0 if jobs else 1)
            if not yes:
                _ask(f"{verb} {change.count(conditions):,} jobs?")
            tally = change.by_conditions(conditions, batch)
    if as_json:
        typer.echo(tally_as_json(tally, dry_run=dry_run))
    else:
        print_tally(verb, tally, dry_run=dry_run)
    if not tally.is_success:
        raise typer.Exit(1)


def _ask(question: str) -> None:
    if not sys.stdin.isatty():
        raise typer.BadParameter(f"{question} There is nobody to ask here: say --yes, or --dry-run to see how many")
    typer.confirm(question, abort=True, err=True)


def _split(which: Sequence[str]) -> tuple[str | None, list[uuid.UUID]]:
    """Tell the application, if it is named, from the ids."""
    if which and ":" in which[0]:
        return which[0], _as_ids(which[1:])
    return os.environ.get("ENLIST_APP") or None, _as_ids(which)


def _as_ids(texts: Iterable[str]) -> list[uuid.UUID]:
    ids = []
    for text in texts:
        try:
            ids.append(uuid.UUID(text))
        except ValueError:
            raise typer.BadParameter(
                f"{text!r} is no id of a job, such as 01890a5d-ac96-774b-bcce-b302099a8057"
            ) from None
    return ids


def _table_of(record: type[JobRecordMixin]) -> sa.Table:
    table = sa.inspect(record).local_table
    assert isinstance(table, sa.Table)
    return table
