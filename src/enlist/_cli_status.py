"""What ``enlist status`` shows: jobs by queue and status, how late the oldest is, and kinds that nobody handles."""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from rich.table import Table
from rich.text import Text

from enlist._statements import statements_for
from enlist.migrations import verify_schema
from enlist.models import JobRecord, JobRecordMixin, JobStatus

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from rich.console import Console

__all__ = ["Status", "print_status", "read_status", "status_as_json"]


@dataclass
class Count:
    """Jobs of a queue, or of a kind."""

    by_status: dict[JobStatus, int] = field(default_factory=lambda: dict.fromkeys(JobStatus, 0))
    due: int = 0
    """Those queued whose time has come."""
    oldest_due: dt.timedelta | None = None
    """For how long the oldest of them has been due."""
    overdue: int = 0
    """Those running whose lease has ended: no worker renews it."""

    def add(self, status: JobStatus, jobs: int, due: int, oldest_due: dt.timedelta | None, overdue: int) -> None:
        self.by_status[status] += jobs
        self.due += due
        self.overdue += overdue
        if oldest_due is not None and (self.oldest_due is None or oldest_due > self.oldest_due):
            self.oldest_due = oldest_due

    def as_json(self, statuses: Iterable[JobStatus] = JobStatus) -> dict[str, Any]:
        seconds = None if self.oldest_due is None else round(self.oldest_due.total_seconds(), 3)
        counts = {status.value: self.by_status[status] for status in statuses}
        overdue = {"overdue": self.overdue} if JobStatus.RUNNING in counts else {}
        return {**counts, "due": self.due, "oldest_due_seconds": seconds, **overdue}


@dataclass
class Status:
    """What the job table looks like at one moment."""

    total: Count
    queues: dict[str, Count]
    queued_kinds: dict[str, Count]
    """Kinds that have queued jobs."""
    unhandled: list[str] | None
    """Those of them that the application has no handler for; None when no application was given."""
    unserved: list[str] | None
    """Queues with queued jobs that the worker doesn't serve; None when no worker was given."""


def read_status(
    connection: sa.Connection,
    *,
    record: type[JobRecordMixin] = JobRecord,
    handled: Collection[str] | None = None,
    served: Collection[str] | None = None,
) -> Status:
    """Count the jobs: one scan of the table, which reads no payloads.

    :param record: the mapped class of the jobs.
    :param handled: the kinds that the application has handlers for, if it is known.
    :param served: the queues that the worker serves, if it is known.
    :raises SchemaError: the database lacks enlist's tables, or they are at an older step.
    """
    verify_schema(connection, record=record)
    table = sa.inspect(record).local_table
    assert isinstance(table, sa.Table)
    total = Count()
    queues: dict[str, Count] = {}
    kinds: dict[str, Count] = {}
    for row in connection.execute(statements_for(table).summary):
        counts = [total, queues.setdefault(row.queue, Count())]
        if row.status is JobStatus.QUEUED:
            counts.append(kinds.setdefault(row.kind, Count()))
        for count in counts:
            count.add(row.status, row.jobs, row.due, row.oldest_due_age, row.overdue)
    unhandled = None if handled is None else sorted(kinds.keys() - set(handled))
    waiting = {queue for queue, count in queues.items() if count.by_status[JobStatus.QUEUED]}
    unserved = None if served is None else sorted(waiting - set(served))
    return Status(total, dict(sorted(queues.items())), dict(sorted(kinds.items())), unhandled, unserved)


def status_as_json(status: Status) -> str:
    """Return the same as JSON, for programs."""
    return json.dumps(
        {
            **status.total.as_json(),
            "queues": {queue: count.as_json() for queue, count in status.queues.items()},
            "queued_kinds": {kind: count.as_json([JobStatus.QUEUED]) for kind, count in status.queued_kinds.items()},
            "unhandled_kinds": status.unhandled,
            "unserved_queues": status.unserved,
        },
        indent=2,
    )


def print_status(status: Status, console: Console) -> None:
    """Print tables for people."""
    console.print(_queue_table(status))
    if status.total.overdue:
        text = f"Running past the end of their lease, so no worker has them: {status.total.overdue:,}"
        console.print(Text(text, style="bold red"))
    if not status.queued_kinds:
        console.print("No jobs are queued.")
        return
    console.print(_kind_table(status))
    if status.unhandled is None:
        console.print("`enlist status module:object` shows which of these kinds your worker has no handler for.")
    elif status.unhandled:
        names = ", ".join(map(printable, status.unhandled))
        console.print(Text(f"Queued, but no handler here: {names}", style="bold red"))
    if status.unserved:
        names = ", ".join(map(printable, status.unserved))
        console.print(Text(f"Queued in a queue that this worker does not serve: {names}", style="bold red"))


def _queue_table(status: Status) -> Table:
    table = Table("queue", title="Jobs by queue and status", title_justify="left")
    columns = ["queued", "due now", *(s.value for s in JobStatus if s is not JobStatus.QUEUED), "oldest due since"]
    for column in columns:
        table.add_column(column, justify="right")
    for name, count in status.queues.items():
        table.add_row(*_queue_cells(printable(name), count))
    if len(status.queues) != 1:
        table.add_section()
        table.add_row(*_queue_cells("all", status.total), style="bold")
    return table


def _queue_cells(name: str, count: Count) -> list[Text]:
    others = [count.by_status[status] for status in JobStatus if status is not JobStatus.QUEUED]
    numbers = [count.by_status[JobStatus.QUEUED], count.due, *others]
    return [Text(name), *(Text(f"{number:,}") for number in numbers), Text(_age(count.oldest_due))]


def _kind_table(status: Status) -> Table:
    table = Table("queued kind", title="Kinds with queued jobs", title_justify="left")
    for column in ("queued", "due now", "oldest due since"):
        table.add_column(column, justify="right")
    if status.unhandled is not None:
        table.add_column("handler")
    for kind, count in status.queued_kinds.items():
        cells = [printable(kind), f"{count.by_status[JobStatus.QUEUED]:,}", f"{count.due:,}", _age(count.oldest_due)]
        row = [Text(cell) for cell in cells]
        if status.unhandled is not None:
            row.append(Text("none here", style="bold red") if kind in status.unhandled else Text("yes"))
        table.add_row(*row)
    return table


def _age(age: dt.timedelta | None) -> str:
    return "" if age is None else str(dt.timedelta(seconds=int(age.total_seconds())))


def printable(name: str) -> str:
    """Return a name with what a terminal would act on escaped: anybody may have chosen it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
