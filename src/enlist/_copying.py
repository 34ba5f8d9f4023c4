"""Many jobs by COPY: the server takes 4 us for each, half of what it takes to insert it.

COPY has no parameters and no place in SQLAlchemy, but in its event ``do_execute``, by which a statement can be run in
another way than ``cursor.execute()``. So it is a statement like others: it is logged and seen by listeners, its errors
are SQLAlchemy's, and a connection that is lost in it, or left in the middle by KeyboardInterrupt or a cancellation, is
given up.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.util import await_only

from enlist._staged import NO_OPTIONS
from enlist.exceptions import ConfigurationError

if TYPE_CHECKING:
    import datetime as dt

    from enlist._staged import StagedJob
    from enlist._statements import Statements

__all__ = ["can_copy", "copy_jobs", "is_copyable"]

COLUMNS: Final = (
    "id",
    "kind",
    "queue",
    "max_attempts",
    "priority",
    "ordered",
    "payload_version",
    "concurrency_key",
    "concurrency_limit",
    "meta",
    "payload",
)
"""The others get their defaults: what is due now has the server's time at the flush."""

BLOCK_CHARACTERS: Final = 50_000
"""How much is sent at a time: while the server works on it, the next is made."""

COPY_JOBS: Final = 20_000
COPY_CHARACTERS: Final = 20_000_000
"""Most jobs and characters of one COPY (80 ms, 200 ms), for the sake of ``statement_timeout``."""

_OPTIONS: Final = {"stream_results": False, "yield_per": None, "no_parameters": False}
"""Whatever the engine's options say."""

_COPY: Final = "enlist_copy"
"""The execution option with the :class:`_Copy` that a statement is."""


class _Copy:
    """A COPY of the next jobs, into a table."""

    def __init__(self, lines: Iterator[str], table: str, schema: str | None, columns: list[str]) -> None:
        self.lines = lines
        """Of the jobs that are not sent yet."""
        self.table = table
        self.schema = schema
        self.columns = columns
        self.sent = 0
        """How many jobs were sent."""
        self.made = 0
        """How many rows were made of them, as the server says."""


def is_copyable(job: StagedJob) -> bool:
    """Whether a job can come by COPY: it meets no unique key, and nothing in its row is for the server to compute."""
    call = job.call
    return call is NO_OPTIONS or (
        call.unique is None and call.run_at is None and call.delay is None and call.values is None
    )


def can_copy(connection: sa.Connection, statements: Statements) -> bool:
    """Whether the driver and the table let jobs be copied; asks the server.

    So a statement has begun the transaction when the COPY is sent: with asyncpg SQLAlchemy sees to it, not the driver.
    """
    if connection.dialect.driver not in _DRIVERS:
        return False
    table = statements.table
    name = _qualified(connection.schema_for_object(table), table.name)
    return bool(connection.scalar(statements.copyable, {"table": name}))


def copy_jobs(
    connection: sa.Connection, statements: Statements, jobs: list[StagedJob], created_at: dt.datetime | None = None
) -> int:
    """Copy the jobs into their table, in the connection's transaction.

    :param created_at: when they were made; default the time of each COPY.
    :return: how many rows were made: a trigger may keep some out.
    """
    table = statements.table
    names = COLUMNS if created_at is None else (*COLUMNS, "created_at")
    columns = [table.c[name].name for name in names]
    schema = connection.schema_for_object(table)
    statement = f"COPY {_qualified(schema, table.name)} ({', '.join(map(_quoted, columns))}) FROM STDIN"
    left = _lines(jobs, created_at)
    sent = made = 0
    while sent < len(jobs):
        copy = _Copy(left, table.name, schema, columns)
        connection.exec_driver_sql(statement, execution_options={**_OPTIONS, _COPY: copy})
        if not copy.sent:
            raise ConfigurationError(
                "another listener of the event do_execute has run the COPY of jobs: it must return None for a context"
                f" with the execution option {_COPY!r}"
            )
        sent += copy.sent
        made += copy.made
    return made


def _qualified(schema: str | None, name: str) -> str:
    return _quoted(name) if schema is None else f"{_quoted(schema)}.{_quoted(name)}"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


# -- the data ---------------------------------------------------------------------------------------------------------


def _blocks(copy: _Copy) -> Iterator[str]:
    """The data in COPY's text format: tabs between the columns, a newline after each row."""
    characters = 0
    lines: list[str] = []
    length = 0
    for line in islice(copy.lines, COPY_JOBS):
        lines.append(line)
        length += len(line)
        if length >= BLOCK_CHARACTERS:
            yield "".join(lines)
            copy.sent += len(lines)
            characters += length
            if characters >= COPY_CHARACTERS:
                return
            lines, length = [], 0
    yield "".join(lines)
    copy.sent += len(lines)


def _lines(jobs: list[StagedJob], created_at: dt.datetime | None) -> Iterator[str]:
    options = call = None
    end = "" if created_at is None else f"\t{created_at.isoformat()}"
    start = middle = ""
    for job in jobs:
        if job.options is not options:
            options = job.options
            names = f"{_text(options.kind)}\t{_text(options.queue)}"
            start = f"{names}\t{options.max_attempts}\t{options.priority}\t{options.ordered}\t{options.version}"
        if job.call is not call:
            call = job.call
            key, limit = call.concurrency_key, call.concurrency_limit
            concurrency = "\\N\t\\N" if key is None else f"{_text(key)}\t{limit}"  # \N is NULL
            middle = f"{concurrency}\t{_text(call.meta or '{}')}"
        assert isinstance(job.payload, str)
        yield f"{job.number:032x}\t{start}\t{middle}\t{_text(job.payload)}{end}\n"


def _text(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n").replace("\r", "\\r")


# -- the drivers ------------------------------------------------------------------------------------------------------


def _psycopg(cursor: Any, statement: str, copy: _Copy, driver_connection: Any) -> None:
    with cursor.copy(statement) as writer:
        for block in _blocks(copy):
            writer.write(block)
    copy.made = cursor.rowcount


async def _psycopg_async(_cursor: Any, statement: str, copy: _Copy, driver_connection: Any) -> None:
    async with driver_connection.cursor() as cursor:
        async with cursor.copy(statement) as writer:
            for block in _blocks(copy):
                await writer.write(block)
        copy.made = cursor.rowcount


async def _asyncpg(cursor: Any, _statement: str, copy: _Copy, driver_connection: Any) -> None:
    async def encoded() -> AsyncIterator[bytes]:
        for block in _blocks(copy):
            yield block.encode()

    try:
        answer = await driver_connection.copy_to_table(
            copy.table, source=encoded(), columns=copy.columns, schema_name=copy.schema, format="text"
        )
    except Exception as error:
        cursor._adapt_connection._handle_exception(error)  # raises it as the DBAPI's, which SQLAlchemy expects
        raise
    copy.made = int(answer.split()[-1])  # "COPY 1000"


_DRIVERS: Final = frozenset({"psycopg", "asyncpg"})


def _do_execute(cursor: Any, statement: str, _parameters: Any, context: Any) -> bool | None:
    copy = context.execution_options.get(_COPY)
    if copy is None:
        return None
    driver_connection = context.root_connection.connection.driver_connection
    if context.dialect.driver == "asyncpg":
        await_only(_asyncpg(cursor, statement, copy, driver_connection))
    elif context.dialect.is_async:
        await_only(_psycopg_async(cursor, statement, copy, driver_connection))
    else:
        _psycopg(cursor, statement, copy, driver_connection)
    return True


event.listen(sa.Engine, "do_execute", _do_execute)
