"""Jobs into one table: one INSERT for up to 1,000, COPY for more, and what becomes of those whose key is held."""

from __future__ import annotations

import datetime as dt
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from enlist._copying import can_copy, copy_jobs, is_copyable
from enlist._staged import NO_OPTIONS
from enlist._statements import INSERT_LIMIT, OWN, PLAIN
from enlist.exceptions import SchemaError, UniqueKeyContended
from enlist.models import JobStatus

if TYPE_CHECKING:
    import uuid

    from enlist._staged import CallOptions, StagedJob, Target

__all__ = ["Insertion", "insert_jobs"]

logger = logging.getLogger("enlist")

INSERT_TRIES: Final = 3
"""How often a job is inserted whose unique key was held, yet by nobody when looked for."""

INSERT_CHARACTERS: Final = 1_000_000
"""Most characters of payloads and metas in one INSERT: the server holds several copies of what it reads, and a jsonb
ends at 256 MB."""

_MICROSECOND: Final = dt.timedelta(microseconds=1)

_NO_NAMES: Final[frozenset[str]] = frozenset()

_COUNTED: Final = {**PLAIN, "preserve_rowcount": True}


@dataclass(eq=False, slots=True)
class Row:
    """A job that is about to be inserted."""

    job: StagedJob
    latest: Row | None = None
    """The last job of the same flush that replaces this one's payload and run_at."""
    followers: list[Row] | None = None
    """Those that replace them, or are refused for this one: they have no row of their own."""

    @property
    def key(self) -> tuple[str, str]:
        unique = self.job.call.unique
        assert unique is not None
        return self.job.options.kind, unique.key

    @property
    def replaces(self) -> bool:
        unique = self.job.call.unique
        return unique is not None and unique.replace

    @property
    def jobs(self) -> list[StagedJob]:
        return [self.job, *(row.job for row in self.followers or ())]

    @property
    def keeps(self) -> bool:
        """Whether a queued job that holds the key must not start before the commit: it is to do this one's work."""
        unique = self.job.call.unique
        return unique is not None and not unique.replace and unique.until == "started"

    def refused_by(self, holder: uuid.UUID, *, replaced: bool = False) -> None:
        """Note that another job holds the key."""
        for job in self.jobs:
            job.refused_by(holder, replaced=replaced)


@dataclass(eq=False, slots=True)
class Insertion:
    """How jobs are inserted, and which are to be looked at again."""

    running: uuid.UUID | None
    """The job whose handler's transaction this is."""
    at_commit: bool
    """Whether the transaction is about to be committed: then the jobs that others are refused for are locked."""
    own: list[StagedJob] = field(default_factory=list)
    """Not inserted, since the running job itself holds their key: they are to be when it is done."""
    created_at: dt.datetime | None = None
    """When the jobs were made, if some of them are ordered; else each statement has its own time."""
    refused: list[StagedJob] = field(default_factory=list)
    """Refused for a job that gives up their key when it starts, which it may do before the commit."""


def insert_jobs(
    connection: sa.Connection, target: Target, jobs: list[StagedJob], queues: set[str], insertion: Insertion
) -> None:
    """Insert the jobs; tell the handles of those whose key is held, and add the queues that there are new jobs in."""
    if len(jobs) > INSERT_LIMIT:
        jobs = _copied(connection, target, jobs, queues, insertion)
    _insert_rows(connection, target, [Row(job) for job in jobs], queues, insertion)


def _copied(
    connection: sa.Connection, target: Target, jobs: list[StagedJob], queues: set[str], insertion: Insertion
) -> list[StagedJob]:
    """Copy the jobs that can be, if they are many; return the others."""
    able: list[StagedJob] = []
    others: list[StagedJob] = []
    for job in jobs:
        (able if is_copyable(job) else others).append(job)
    if target.has_defaults or len(able) <= INSERT_LIMIT or not can_copy(connection, target.statements):
        return jobs
    if copy_jobs(connection, target.statements, able, insertion.created_at) != len(able):
        raise _kept_out(target)
    queues.update(job.options.queue for job in able)
    return others


def _kept_out(target: Target) -> SchemaError:
    return SchemaError(
        f"jobs without a unique key were not inserted into the table {target.statements.table.fullname}, and"
        " there was no error: a trigger or a rule of the table keeps them out; it must let them in or raise"
    )


def _insert_rows(
    connection: sa.Connection, target: Target, rows: list[Row], queues: set[str], insertion: Insertion
) -> None:
    pending = _ordered(rows)
    for _ in range(INSERT_TRIES):
        refused: list[Row] = []
        for chunk in _chunks(target, pending):
            refused += _execute(connection, target, chunk, queues, insertion)
        if not refused:
            return
        if any(row.job.call.unique is None for row in refused):
            raise _kept_out(target)
        pending = _undecided(connection, target, refused, queues, insertion)
        if not pending:
            return
    kind, key = pending[0].key
    raise UniqueKeyContended(
        f"unique key {key!r} of kind {kind!r} was held at each of {INSERT_TRIES} tries to insert, and its holder was"
        " gone each time it was looked for: retry the transaction"
    )


def _ordered(rows: list[Row]) -> list[Row]:
    """Keyed rows in the order of their keys: two transactions with the same keys wait instead of deadlocking.

    Of one key in the order of the calls; those that want the same as the one before them are joined to it.
    """
    keyed = [row for row in rows if row.job.call.unique is not None]
    if not keyed:
        return rows
    keyed.sort(key=lambda row: row.key)
    ordered = [row for row in rows if row.job.call.unique is None]
    last: Row | None = None
    for row in keyed:
        alike = last is not None and (row.key, row.replaces, row.keeps) == (last.key, last.replaces, last.keeps)
        if alike and last is not None:
            if last.followers is None:
                last.followers = []
            last.followers.append(row)
            if row.replaces:
                last.latest = row
        else:
            ordered.append(row)
            last = row
    return ordered


def _chunks(target: Target, rows: list[Row]) -> Iterator[list[Row]]:
    """The rows of each INSERT: of one shape, at most :data:`INSERT_LIMIT` and :data:`INSERT_CHARACTERS`, or one row.

    Rows that lock the holder of their key stand in a statement without another of it: it could not meet a row twice.
    """
    chunk: list[Row] = []
    characters = 0
    previous: tuple[object, ...] | None = None
    for row in rows:
        payload = (row.latest or row).job.payload
        assert isinstance(payload, str)
        length = len(payload) + len(row.job.call.meta or "")
        shape = (row.replaces, row.keeps, _names(target, row))
        full = len(chunk) >= INSERT_LIMIT or characters + length > INSERT_CHARACTERS
        if chunk and (full or shape != previous):
            yield chunk
            chunk, characters = [], 0
        chunk.append(row)
        characters += length
        previous = shape
    if chunk:
        yield chunk


def _names(target: Target, row: Row) -> frozenset[str] | None:
    """The application's columns that a row has values for; None if it needs no parameter set of its own."""
    values = row.job.call.values
    if values is None:
        return _NO_NAMES if target.has_defaults else None
    return frozenset(values.given)


def _execute(
    connection: sa.Connection, target: Target, rows: list[Row], queues: set[str], insertion: Insertion
) -> list[Row]:
    """Run one INSERT; return the rows that met a holder of their key."""
    statements = target.statements
    replaces = rows[0].replaces
    locks = insertion.at_commit and rows[0].keeps
    if _names(target, rows[0]) is not None:
        statement = statements.insert_rows_replacing if replaces else statements.insert_rows
        statement = statements.insert_rows_locking if locks else statement
        sets = [_parameters(target, row, insertion.created_at) for row in rows]
        found = connection.execute(statement, sets, execution_options=PLAIN)
    elif rows[-1].job.call.unique is not None:
        statement = statements.insert_replacing if replaces else statements.insert_returning
        statement = statements.insert_locking if locks else statement
        found = connection.execute(statement, _as_json(rows, insertion.created_at), execution_options=PLAIN)
    else:  # none can meet a holder: their number says enough, and costs 40 us less than the ids
        parameters = _as_json(rows, insertion.created_at)
        found = connection.execute(statements.insert, parameters, execution_options=_COUNTED)
        queues.update(row.job.options.queue for row in rows)
        return [] if found.rowcount == len(rows) else rows
    made: set[int] = set()
    replaced: dict[tuple[str, str], uuid.UUID] = {}
    for result in found:
        made.add(result[0].int)
        if replaces:
            replaced[result[1], result[2]] = result[0]
            queues.add(result[3])
    refused = []
    for row in rows:
        if row.job.number in made:
            queues.add(row.job.options.queue)
            for follower in row.followers or ():
                follower.job.refused_by(row.job.id, replaced=replaces)
        elif replaces and row.key in replaced:
            row.refused_by(replaced[row.key], replaced=True)
        else:
            refused.append(row)
    return refused


def _undecided(
    connection: sa.Connection, target: Target, refused: list[Row], queues: set[str], insertion: Insertion
) -> list[Row]:
    """Look who holds the keys; return the rows that are to be tried again, since the key is free or was freed now."""
    found = connection.execute(target.statements.holders, _keys(refused), execution_options=PLAIN)
    holders = {(holder.kind, holder.unique_key): holder for holder in found}
    again: list[Row] = []
    release: dict[tuple[str, str], bool] = {}
    done: list[Row] = []
    for row in refused:
        holder = holders.get(row.key)
        # Also where an earlier job of the flush takes the key from its holder.
        if holder is None or row.replaces or holder.lapsed or row.key in release:
            again.append(row)
            if holder is not None:
                release[row.key] = row.replaces or release.get(row.key, False)
        elif holder.id == insertion.running:
            insertion.own += row.jobs
        else:
            row.refused_by(holder.id)
            if row.keeps and holder.status is JobStatus.QUEUED:
                if insertion.at_commit:  # workers that pass it by now are to look again after the commit
                    queues.add(holder.queue)
                else:
                    insertion.refused += row.jobs
            if holder.status is JobStatus.DONE:
                done.append(row)
    if release:
        parameters: dict[str, Any] = {"kinds": [kind for kind, _ in release], "keys": [key for _, key in release]}
        parameters["started"] = list(release.values())
        connection.execute(target.statements.release, parameters, execution_options=PLAIN)
    if done:
        logger.info(
            "%d of a flush's jobs not made: a done job holds the unique key, until it is pruned or for its unique_for;"
            " such as one of kind %r, whose key job %s holds",
            len(done),
            done[0].job.options.kind,
            done[0].job.existing_id,
        )
    return again


def _keys(rows: list[Row]) -> dict[str, list[str]]:
    keys = dict.fromkeys(row.key for row in rows)
    return {"kinds": [kind for kind, _ in keys], "keys": [key for _, key in keys]}


def _as_json(rows: list[Row], created_at: dt.datetime | None) -> dict[str, Any]:
    """The parameters of the INSERT. Payloads and metas are JSON already, so it is put together as text."""
    objects = []
    options = None
    start = ""
    for row in rows:
        latest = (row.latest or row).job
        if row.job.options is not options:
            options = row.job.options
            start = _members(
                kind=options.kind,
                queue=options.queue,
                max_attempts=options.max_attempts,
                priority=options.priority,
                ordered=options.ordered or None,
            )
        call = row.job.call
        more = "" if call is NO_OPTIONS and latest.call is NO_OPTIONS else _call_members(call, latest.call)
        if latest.options.version != 1:
            more = f'{more},"payload_version":{latest.options.version}'
        objects.append(f'{{"id":"{row.job.number:032x}"{start}{more},"payload":{latest.payload}}}')
    return {"rows": f"[{','.join(objects)}]", f"{OWN}created_at": created_at}


def _call_members(call: CallOptions, latest: CallOptions) -> str:
    unique = call.unique
    members = _members(
        unique_key=None if unique is None else unique.key,
        unique_until=None if unique is None else unique.until,
        hold=None if unique is None else _interval(unique.hold),
        concurrency_key=call.concurrency_key,
        concurrency_limit=call.concurrency_limit,
        run_at=None if latest.run_at is None else latest.run_at.isoformat(),
        delay=_interval(latest.delay),
    )
    return members if call.meta is None else f'{members},"meta":{call.meta}'


def _members(**given: Any) -> str:
    return "".join(
        f',"{name}":{json.dumps(value, ensure_ascii=False)}' for name, value in given.items() if value is not None
    )


def _interval(duration: dt.timedelta | None) -> str | None:
    """An interval without days: those are of 23 or 25 hours when the clocks change."""
    return None if duration is None else f"{duration // _MICROSECOND} microseconds"


def _parameters(target: Target, row: Row, created_at: dt.datetime | None) -> dict[str, Any]:
    job, latest = row.job, (row.latest or row).job
    options, call, unique = job.options, job.call, job.call.unique
    given = {} if call.values is None else call.values.given
    return {
        "id": job.id,
        "kind": options.kind,
        "queue": options.queue,
        "max_attempts": options.max_attempts,
        "priority": options.priority,
        f"{OWN}payload": latest.payload,
        "payload_version": latest.options.version,
        "unique_key": None if unique is None else unique.key,
        "unique_until": None if unique is None else unique.until,
        "unique_held": unique is not None,
        f"{OWN}hold": None if unique is None else _interval(unique.hold),
        "concurrency_key": call.concurrency_key,
        "concurrency_limit": call.concurrency_limit,
        "ordered": options.ordered,
        f"{OWN}created_at": created_at,
        f"{OWN}run_at": latest.call.run_at,
        f"{OWN}delay": _interval(latest.call.delay),
        f"{OWN}meta": call.meta or "{}",
        **{target.columns[name].key: value for name, value in given.items()},
    }
