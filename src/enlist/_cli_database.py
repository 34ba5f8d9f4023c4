"""The command line's way to a database: any URL people have, errors on one line, passwords never shown."""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from enlist._driver import server_message, shown_url
from enlist.exceptions import ConfigurationError, EnlistError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["DatabaseUnreachable", "connecting", "engine_for", "one_line", "parse_url"]

DRIVER: Final = "postgresql+psycopg"
BACKENDS: Final = frozenset({"postgresql", "postgres"})
ASYNCPG_ONLY: Final = frozenset({"prepared_statement_cache_size", "statement_cache_size", "async_fallback"})
"""What SQLAlchemy's asyncpg URLs may have and libpq refuses."""

CONNECT_SECONDS: Final = 10
EXAMPLE: Final = "postgresql://user:password@host:5432/database"


class DatabaseUnreachable(EnlistError):
    """No connection to the database could be made."""


def parse_url(text: str) -> sa.URL:
    """Return the URL for psycopg: from any SQLAlchemy URL of a PostgreSQL driver, or a plain ``postgres://`` one.

    :raises ConfigurationError: it is no such URL. Its text is not in the message: it may hold a password.
    """
    try:
        url = sa.make_url(text.strip())
    except (sa.exc.ArgumentError, ValueError):
        raise ConfigurationError(f"the database URL cannot be read; it should look like {EXAMPLE}") from None
    backend, _, driver = url.drivername.lower().partition("+")
    if "@" in (url.host or "") or re.search(":.*@", url.database or ""):
        # Part of a password is where it would be shown.
        raise ConfigurationError(
            "the database URL cannot be read: in the user's name and the password @ is written %40, / %2F and : %3A"
        )
    if backend not in BACKENDS:
        raise ConfigurationError(
            f"enlist works on PostgreSQL, not on {backend!r}; the database URL should look like {EXAMPLE}"
        )
    query = dict(url.query)
    if driver == "asyncpg":
        query = {name: value for name, value in query.items() if name not in ASYNCPG_ONLY}
        if "ssl" in query:
            query["sslmode"] = query.pop("ssl")
    return url.set(drivername=DRIVER, query=query)


def engine_for(url: sa.URL) -> sa.Engine:
    """An engine for a command: it keeps no connections, and gives up connecting after ten seconds.

    :raises ConfigurationError: psycopg cannot be used here.
    """
    arguments: dict[str, Any] = {}
    if "connect_timeout" not in url.query and "PGCONNECT_TIMEOUT" not in os.environ:
        arguments["connect_timeout"] = CONNECT_SECONDS
    try:
        return sa.create_engine(url, poolclass=sa.NullPool, connect_args=arguments, isolation_level="READ COMMITTED")
    except ImportError as error:
        raise ConfigurationError(
            f"psycopg cannot be used here ({one_line(error)}): pip install 'enlist[binary]' brings it with libpq"
        ) from error


@contextmanager
def connecting(engine: sa.Engine) -> Iterator[sa.Connection]:
    """A connection in a transaction, which is committed at the end.

    :raises DatabaseUnreachable: it could not be made; the message names the database and says why.
    """
    try:
        connection = engine.connect()
    except (sa.exc.DBAPIError, OSError) as error:
        raise DatabaseUnreachable(f"cannot connect to {shown_url(engine.url)}: {one_line(error)}") from error
    with connection, connection.begin():
        yield connection


def one_line(error: BaseException) -> str:
    """Return what an error says, on a line; of a database error what the server said, without statement and data."""
    if isinstance(error, sa.exc.DBAPIError) and error.orig is not None:
        return _joined(server_message(error))
    return _joined(str(error)) or type(error).__qualname__


def _joined(text: str) -> str:
    lines = (" ".join(line.split()) for line in text.splitlines())
    return " | ".join(line for line in lines if line)
