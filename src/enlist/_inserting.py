"""Rows into one job table: one INSERT for up to 1,000 jobs, and what becomes of those whose unique key is held."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from enlist._statements import INSERT_LIMIT
from enlist.exceptions import SchemaError, UniqueKeyContended
from enlist.models import JobStatus

if TYPE_CHECKING:
    import uuid

    from enlist._staged import Content, StagedJob, Target

__all__ = ["Row", "insert_rows"]

logger = logging.getLogger("enlist")

INSERT_TRIES: Final = 3
"""How often a job is inserted whose unique key was held, yet by nobody when looked for."""

INSERT_CHARACTERS: Final = 1_000_000
"""Most characters of payloads and metas in one INSERT: the server's time for an array grows with its square
(300 payloads of 1 MB take 50 s in one statement and 7 in many), and its length ends at 1 GB."""

_PLAIN: Final = {"stream_results": False, "yield_per": None}
"""Whatever the engine's options say: there is no cursor on the server for an INSERT."""


@dataclass(eq=False, slots=True)
class Row:
    """A job that is ready to be inserted."""

    job: StagedJob
    content: Content
    values: Mapping[str, Any]
    """Of the application's own columns, by the names of their attributes."""
    latest: Row | None = None
    """The last job of the same flush that replaces this one's payload and run_at."""
    replacing: list[Row] = field(default_factory=list)
    """All that do: they have no row of their own."""

    @property
    def key(self) -> tuple[str, str]:
        assert self.job.unique is not None
        return self.content.kind, self.job.unique.key

    @property
    def replaces(self) -> bool:
        return self.job.unique is not None and self.job.unique.replace

    def refused_by(self, holder: uuid.UUID, *, replaced: bool = False) -> None:
        """Note that another job holds the key."""
        for row in (self, *self.replacing):
            row.job.handle.refused_by(holder, replaced=replaced)


def insert_rows(
    connection: sa.Connection, target: Target, rows: list[Row], queues: set[str], running: uuid.UUID | None
) -> list[Row]:
    """Insert the jobs; tell the handles of those whose key is held, and add the queues that there are new jobs in.

    :param running: the job whose handler's transaction this is.
    :return: the jobs whose key is held by just that job: they are to be inserted when it is done.
    """
    pending = _ordered(rows)
    own: list[Row] = []
    for _ in range(INSERT_TRIES):
        refused = [row for chunk in _chunks(target, pending) for row in _execute(connection, target, chunk, queues)]
        if not refused:
            return own
        if any(row.job.unique is None for row in refused):
            raise SchemaError(
                f"jobs without a unique key were not inserted into the table {target.statements.table.fullname}, and"
                " there was no error: a trigger or a rule of the table keeps them out; it must let them in or raise"
            )
        pending = _undecided(connection, target, refused, running, own)
        if not pending:
            return own
    kind, key = pending[0].key
    raise UniqueKeyContended(
        f"unique key {key!r} of kind {kind!r} was held at each of {INSERT_TRIES} tries to insert, and its holder was"
        " gone each time it was looked for: retry the transaction"
    )


def _ordered(rows: list[Row]) -> list[Row]:
    """Keyed rows in the order of their keys: two transactions with the same keys wait instead of deadlocking.

    Of one key in the order of the calls; those that only replace what the one before them says are joined to it.
    """
    keyed = [row for row in rows if row.job.unique is not None]
    if not keyed:
        return rows
    keyed.sort(key=lambda row: row.key)
    ordered = [row for row in rows if row.job.unique is None]
    last: Row | None = None
    for row in keyed:
        if last is not None and row.replaces and last.replaces and row.key == last.key:
            last.replacing.append(row)
            last.latest = row
        else:
            ordered.append(row)
            last = row
    return ordered


def _chunks(target: Target, rows: list[Row]) -> Iterator[list[Row]]:
    """The rows of each INSERT: of one shape, at most :data:`INSERT_LIMIT` and :data:`INSERT_CHARACTERS`, or one row.

    Rows that replace stand in a statement without another of their key: it could not meet a row twice.
    """
    chunk: list[Row] = []
    characters = 0
    previous: tuple[object, ...] | None = None
    for row in rows:
        length = len((row.latest or row).content.payload) + len(row.job.meta)
        shape = (row.replaces, _names(target, row))
        full = len(chunk) >= INSERT_LIMIT or characters + length > INSERT_CHARACTERS
        if chunk and (full or shape != previous or (row.replaces and row.key == chunk[-1].key)):
            yield chunk
            chunk, characters = [], 0
        chunk.append(row)
        characters += length
        previous = shape
    if chunk:
        yield chunk


def _names(target: Target, row: Row) -> frozenset[str] | None:
    """The application's columns that a row has values for; None if it needs no parameter set of its own."""
    return frozenset(row.values) if row.values or target.has_defaults else None


def _execute(connection: sa.Connection, target: Target, rows: list[Row], queues: set[str]) -> list[Row]:
    """Run one INSERT; return the rows that met a holder of their key."""
    statements = target.statements
    replaces = rows[0].replaces
    if _names(target, rows[0]) is None:
        statement = statements.insert_replacing if replaces else statements.insert
        found = connection.execute(statement, _arrays(rows), execution_options=_PLAIN)
    else:
        statement = statements.insert_rows_replacing if replaces else statements.insert_rows
        found = connection.execute(statement, [_parameters(target, row) for row in rows], execution_options=_PLAIN)
    made: set[uuid.UUID] = set()
    replaced: dict[tuple[str, str], uuid.UUID] = {}
    for result in found:
        made.add(result[0])
        if replaces:
            replaced[result[1], result[2]] = result[0]
            queues.add(result[3])
    refused = []
    for row in rows:
        if row.job.id in made:
            queues.add(row.content.queue)
            for later in row.replacing:
                later.refused_by(row.job.id, replaced=True)
        elif replaces and row.key in replaced:
            row.refused_by(replaced[row.key], replaced=True)
        else:
            refused.append(row)
    return refused


def _undecided(
    connection: sa.Connection, target: Target, refused: list[Row], running: uuid.UUID | None, own: list[Row]
) -> list[Row]:
    """Look who holds the keys; return the rows that are to be tried again, since the key is free or was freed now."""
    keys = dict.fromkeys(row.key for row in refused)
    parameters = {"kinds": [kind for kind, _ in keys], "keys": [key for _, key in keys]}
    found = connection.execute(target.statements.holders, parameters, execution_options=_PLAIN)
    holders = {(holder.kind, holder.unique_key): holder for holder in found}
    again, release, done = [], {}, []
    for row in refused:
        holder = holders.get(row.key)
        if holder is None or row.replaces or holder.lapsed:
            again.append(row)
            if holder is not None:
                release[row.key] = row.replaces
        elif holder.id == running:
            own.append(row)
        else:
            row.refused_by(holder.id)
            if holder.status is JobStatus.DONE:
                done.append(row)
    if release:
        parameters = {"kinds": [kind for kind, _ in release], "keys": [key for _, key in release]}
        connection.execute(target.statements.release, parameters | {"started": list(release.values())})
    if done:
        logger.info(
            "%d of a flush's jobs not made: a done job holds the unique key, until it is pruned or for its unique_for;"
            " such as one of kind %r, whose key job %s holds",
            len(done),
            done[0].content.kind,
            done[0].job.handle.existing_id,
        )
    return again


def _arrays(rows: list[Row]) -> dict[str, list[Any]]:
    jobs = [row.job for row in rows]
    contents = [row.content for row in rows]
    latest = [row.latest or row for row in rows]
    uniques = [job.unique for job in jobs]
    return {
        "ids": [job.id for job in jobs],
        "kinds": [content.kind for content in contents],
        "queues": [content.queue for content in contents],
        "max_attempts": [content.max_attempts for content in contents],
        "priorities": [content.priority for content in contents],
        "payloads": [row.content.payload for row in latest],
        "unique_keys": [None if unique is None else unique.key for unique in uniques],
        "untils": [None if unique is None else unique.until for unique in uniques],
        "holds": [None if unique is None else unique.hold for unique in uniques],
        "concurrency_keys": [job.concurrency_key for job in jobs],
        "concurrency_limits": [job.concurrency_limit for job in jobs],
        "run_ats": [row.job.run_at for row in latest],
        "delays": [row.job.delay for row in latest],
        "metas": [job.meta for job in jobs],
    }


def _parameters(target: Target, row: Row) -> dict[str, Any]:
    job, content, latest = row.job, row.content, row.latest or row
    unique = job.unique
    return {
        "id": job.id,
        "kind": content.kind,
        "queue": content.queue,
        "max_attempts": content.max_attempts,
        "priority": content.priority,
        "payload_text": latest.content.payload,
        "unique_key": None if unique is None else unique.key,
        "unique_until": None if unique is None else unique.until,
        "unique_held": unique is not None,
        "hold": None if unique is None else unique.hold,
        "concurrency_key": job.concurrency_key,
        "concurrency_limit": job.concurrency_limit,
        "at": latest.job.run_at,
        "delay": latest.job.delay,
        "meta_text": job.meta,
        **{target.columns[name].key: value for name, value in row.values.items()},
    }
