"""What ``enlist jobs`` shows of jobs: read without their payloads, printed so that a terminal acts on nothing."""

from __future__ import annotations

import datetime as dt
import json
from typing import TYPE_CHECKING, Any, Final

from rich.table import Table
from rich.text import Text

from enlist._cli_status import printable
from enlist._statements import statements_for
from enlist.models import JobStatus

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import sqlalchemy as sa
    from rich.console import Console

__all__ = ["COLUMNS", "jobs_as_json", "print_jobs", "read_jobs"]

COLUMNS: Final = (
    *("id", "kind", "queue", "status", "attempt", "max_attempts", "priority", "unique_key", "concurrency_key"),
    *("created_at", "run_at", "started_at", "finished_at", "locked_by", "locked_until"),
)
"""What is read of each job."""

JSON_COLUMNS: Final = {"payload", "errors"}

STYLES: Final = {JobStatus.DEAD: "bold red", JobStatus.RUNNING: "bold"}


def read_jobs(
    connection: sa.Connection,
    table: sa.Table,
    conditions: Iterable[Any],
    *,
    statuses: Sequence[JobStatus],
    names: Iterable[str],
    limit: int,
) -> list[sa.Row[Any]]:
    """Read the first jobs that meet conditions; see :meth:`Statements.listed` for which those are."""
    return list(connection.execute(statements_for(table).listed(conditions, statuses, names, limit)))


def jobs_as_json(jobs: Iterable[sa.Row[Any]]) -> str:
    """Return them as JSON, for programs: a list of objects, times in UTC."""
    return json.dumps([_facts(job) for job in jobs], indent=2)


def _facts(job: sa.Row[Any]) -> dict[str, Any]:
    facts = {name: _plain(value) for name, value in job._mapping.items() if name not in {"error", "now"}}
    facts |= {name: _value(facts[name]) for name in JSON_COLUMNS & facts.keys()}
    facts.setdefault("last_error", last_line(job.error))
    return {**facts, "overdue": is_overdue(job)}


def _plain(value: Any) -> Any:
    if isinstance(value, dt.datetime):
        return value.astimezone(dt.UTC).isoformat()
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _value(text: str) -> Any:
    """What a JSON text says; the text itself if that cannot be written as JSON again, such as a too large number."""
    try:
        value = json.loads(text)
        json.dumps(value, indent=2, allow_nan=False)
    except (ValueError, RecursionError):
        return text
    return value


def print_jobs(jobs: Sequence[sa.Row[Any]], console: Console, *, in_full: bool) -> None:
    """Print a table, or with payloads or errors a paragraph for each."""
    if not jobs:
        console.print("There are no such jobs.")
    elif in_full:
        for job in jobs:
            # Not wrapped: it is to be copied, and searched.
            console.print(Text("\n".join(_paragraph(job))), soft_wrap=True)
    else:
        console.print(_table(jobs))


def _table(jobs: Iterable[sa.Row[Any]]) -> Table:
    table = Table()
    table.add_column("id", no_wrap=True, min_width=36)
    for column in ("kind", "queue", "status"):
        table.add_column(column, no_wrap=True)
    table.add_column("attempt", justify="right", no_wrap=True)
    table.add_column("when", no_wrap=True)
    table.add_column("last error")
    for job in jobs:
        cells = [printable(job.kind), printable(job.queue), job.status, _attempts(job), _when(job)]
        error = last_line(job.error)
        style = "bold red" if is_overdue(job) else STYLES.get(job.status, "")
        table.add_row(str(job.id), *map(Text, cells), Text(printable(error or "")), style=style)
    return table


def _paragraph(job: sa.Row[Any]) -> list[str]:
    names = f"{printable(job.kind)}  queue {printable(job.queue)}"
    lines = [f"{job.id}  {names}  {job.status}  attempt {_attempts(job)}  {_when(job)}"]
    facts = job._mapping
    if job.locked_by is not None:
        lines.append(f"  worker: {printable(job.locked_by)}")
    if job.unique_key is not None:
        lines.append(f"  unique key: {printable(job.unique_key)}")
    if job.concurrency_key is not None:
        lines.append(f"  concurrency key: {printable(job.concurrency_key)}")
    if "payload" in facts:
        lines.append(f"  payload: {printable(facts['payload'])}")
    if "errors" in facts:
        errors = _value(facts["errors"])
        entries = errors if isinstance(errors, list) else [errors]
        lines += [f"  error: {printable(json.dumps(entry, ensure_ascii=False))}" for entry in entries]
        lines += [f"  | {printable(line)}" for line in (facts["last_error"] or "").splitlines()]
    elif job.error:
        lines.append(f"  last error: {printable(last_line(job.error) or '')}")
    return lines


def _attempts(job: sa.Row[Any]) -> str:
    return f"{job.attempt}/{job.max_attempts}"


def _when(job: sa.Row[Any]) -> str:
    """What matters of a job's times, by its status."""
    if job.status is JobStatus.QUEUED:
        wait = job.run_at - job.now
        return f"due in {_length(wait)}" if wait > dt.timedelta(0) else f"due for {_length(-wait)}"
    if job.status is JobStatus.RUNNING:
        left = job.locked_until - job.now
        return f"overdue for {_length(-left)}" if is_overdue(job) else f"lease for {_length(left)}"
    return "" if job.finished_at is None else f"{_length(job.now - job.finished_at)} ago"


def _length(time: dt.timedelta) -> str:
    return str(dt.timedelta(seconds=int(time.total_seconds())))


def is_overdue(job: sa.Row[Any]) -> bool:
    """Whether a job runs past the end of its lease, so that no worker has it."""
    return job.locked_until is not None and job.locked_until < job.now


def last_line(error: str | None) -> str | None:
    """The last line of an error: of a traceback the exception."""
    lines = [line.strip() for line in (error or "").splitlines() if line.strip()]
    return lines[-1] if lines else error
