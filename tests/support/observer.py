"""A second pair of eyes on the test's database, independent of what is tested."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, LiteralString, Self, TypeVar

import psycopg
from psycopg import sql
from sqlalchemy import URL

from tests.support.waiting import wait_until

T = TypeVar("T")


def connect(url: URL) -> psycopg.Connection[tuple[Any, ...]]:
    """Open an autocommit psycopg connection to a SQLAlchemy URL."""
    _, arguments = url.get_dialect()().create_connect_args(url.set(drivername="postgresql+psycopg"))
    return psycopg.connect(**arguments, autocommit=True)


class Observer:
    """An autocommit connection of its own: it sees what is committed, and nothing else."""

    def __init__(self, url: URL) -> None:
        self.connection = connect(url)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.connection.close()

    def rows(self, statement: LiteralString, *parameters: object) -> list[tuple[Any, ...]]:
        """Run a statement with ``%s`` parameters and return its rows."""
        return self.connection.execute(statement, parameters or None).fetchall()

    def row(self, statement: LiteralString, *parameters: object) -> tuple[Any, ...]:
        """Run a statement that has exactly one row."""
        (row,) = self.rows(statement, *parameters)
        return row

    def scalar(self, statement: LiteralString, *parameters: object) -> Any:
        """Run a statement that has exactly one row and one column."""
        (value,) = self.row(statement, *parameters)
        return value

    def execute(self, statement: LiteralString, *parameters: object) -> int:
        """Run a statement and return the number of rows that it changed."""
        return self.connection.execute(statement, parameters or None).rowcount

    def listen(self, channel: str) -> None:
        """LISTEN; what comes is read by :meth:`notified`."""
        self.connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))

    def notified(self, timeout: float = 5, *, at_least: int = 1) -> list[str]:
        """The payloads of the next ``at_least`` notifications or more; fewer if they don't come in ``timeout`` s."""
        found = self.connection.notifies(timeout=timeout, stop_after=at_least)
        return [notification.payload for notification in found]

    def wait_until(self, predicate: Callable[[], T], timeout: float = 5, *, message: str | None = None) -> T:
        """See :func:`tests.support.wait_until`."""
        return wait_until(predicate, timeout, message=message)

    def wait_for(self, statement: LiteralString, *parameters: object, timeout: float = 5) -> Any:
        """Wait until the single value of a statement is true, and return it."""
        return wait_until(lambda: self.scalar(statement, *parameters), timeout, message=statement)
