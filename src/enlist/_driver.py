"""What must be asked of the driver, since SQLAlchemy has no common word for it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import psycopg
import sqlalchemy as sa

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "brief",
    "constraint_name",
    "is_autocommit",
    "is_known_autocommit",
    "is_never_connected",
    "is_outage",
    "is_read_only",
    "is_transaction_failed",
    "is_transaction_over",
    "server_message",
    "shown_url",
    "sqlstate",
    "trace",
]


SHOWN: Final = frozenset({"host", "hostaddr", "port", "user", "dbname", "service", "sslmode", "application_name"})
"""Parameters of a URL whose values may be shown; what has another name may be a password, or a misspelt one."""


def shown_url(url: sa.URL) -> str:
    """Return a URL for people to read: without its password, wherever it is."""
    hidden = {name: "hidden" for name in url.query if name not in SHOWN}
    return url.update_query_dict(hidden).render_as_string(hide_password=True)


def is_autocommit(connection: sa.Connection) -> bool:
    """Whether the connection commits each statement by itself.

    The driver's flag tells; the name of the isolation level does not: a ``creator`` or a listener can set the flag.
    """
    return bool(getattr(connection.connection.dbapi_connection, "autocommit", False))


def is_closed(driver_connection: object) -> bool:
    """Whether a driver's connection is closed or broken, as far as the driver has noticed. No IO."""
    closed = getattr(driver_connection, "closed", None)
    if closed is None and (is_closed := getattr(driver_connection, "is_closed", None)) is not None:
        closed = is_closed()  # asyncpg
    return bool(closed)


def is_transaction_failed(driver_connection: object) -> bool | None:
    """Whether the server would answer a COMMIT with a rollback; None if the driver doesn't tell (asyncpg). No IO."""
    status = _transaction_status(driver_connection)
    return None if status is None else status == _IN_ERROR


def is_transaction_over(driver_connection: object) -> bool:
    """Whether the server has no transaction open, as far as the driver tells. No IO."""
    status = _transaction_status(driver_connection)
    if status is None and (in_transaction := getattr(driver_connection, "is_in_transaction", None)) is not None:
        return not in_transaction()  # asyncpg
    return status == _IDLE


_IDLE, _IN_ERROR, _UNKNOWN = 0, 3, 4  # of libpq


def _transaction_status(driver_connection: object) -> int | None:
    if (libpq := getattr(driver_connection, "pgconn", None)) is not None:  # psycopg; its `info` makes an object
        known: int = libpq.transaction_status
        return None if known == _UNKNOWN else known
    if is_closed(driver_connection):
        return None
    status: int | None = getattr(getattr(driver_connection, "info", None), "transaction_status", None)
    return status


def is_known_autocommit(bind: sa.Engine | sa.Connection) -> bool:
    """Whether it shows without IO that an engine's connections, or an open one, commit each statement."""
    if isinstance(bind, sa.Connection) and not bind.closed and not bind.invalidated:
        return is_autocommit(bind)
    option = bind.get_execution_options().get("isolation_level")
    # create_engine(isolation_level=...) is kept by the dialect only.
    level = getattr(bind.dialect, "_on_connect_isolation_level", None) if option is None else option
    return isinstance(level, str) and level.upper() == "AUTOCOMMIT"


def sqlstate(error: BaseException) -> str | None:
    """Return the SQLSTATE of a database error; None when it has none (a lost connection, another kind of error).

    By code, never by class: SQLAlchemy reports some lost connections as ``InternalError``.
    """
    for cause in _origins(error):
        code = getattr(cause, "sqlstate", None)
        if isinstance(code, str):
            return code
    return None


READ_ONLY: Final = "25006"
"""The server, or its transactions, are read-only."""


def is_read_only(error: BaseException) -> bool:
    """Whether an error says that the server cannot be written to: after a failover it is the old primary."""
    return sqlstate(error) == READ_ONLY


OUTAGES: Final = ("08", "28", "53", "57P")
"""How the SQLSTATEs begin of what passes: connections, authorization, resources, a server that starts or stops."""


def is_never_connected(error: sa.exc.DBAPIError) -> bool:
    """Whether an error is that a connection could not be made. psycopg's has no code then, and no statement."""
    return isinstance(error, sa.exc.OperationalError) and error.statement is None and sqlstate(error) is None


def is_outage(error: BaseException) -> bool:
    """Whether an error is about the connection or the server's state, and another try may do: not a refusal.

    That is a connection lost or not made, a timeout, too many connections, a wrong password, a server that starts,
    stops or is read-only. (:class:`~sqlalchemy.exc.TimeoutError` is the pool's.)
    """
    if isinstance(error, sa.exc.DBAPIError):
        if isinstance(error, (sa.exc.OperationalError, sa.exc.InterfaceError)) or error.connection_invalidated:
            return True
        # asyncpg's are of no class of the DBAPI while a connection is being made.
        return is_read_only(error) or (sqlstate(error) or "").startswith(OUTAGES)
    return isinstance(error, (OSError, sa.exc.TimeoutError))


def constraint_name(error: BaseException) -> str | None:
    """Return the constraint or unique index that a database error is about; None if it is about none."""
    for cause in _origins(error):
        # psycopg's diag; asyncpg's error has it itself.
        name = getattr(getattr(cause, "diag", cause), "constraint_name", None)
        if isinstance(name, str):
            return name
    return None


def brief(error: BaseException) -> str:
    """Return an error's class and message. Of a database error only the server's message: no statement, no data."""
    try:
        return _brief(error)
    except BaseException:  # a hostile __str__, which may raise SystemExit as well
        return type(error).__name__


def _brief(error: BaseException) -> str:
    if isinstance(error, sa.exc.DBAPIError) and error.orig is not None:
        names = dict.fromkeys([type(error).__name__, type(error.orig).__name__])
        return f"{' / '.join(names)}: {server_message(error)}"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def server_message(error: sa.exc.DBAPIError) -> str:
    """Return a database error's own text without what may be anybody's data.

    The server's first line is its message; the others may quote a row (DETAIL) or the statement (LINE 1). Without a
    SQLSTATE the text is the driver's, of a connection: it is kept whole, in one line. What is wrong with a value
    (class 22) is told with the value in quotes.
    """
    text, code = str(error.orig).strip(), sqlstate(error)
    if code is None:
        return " ".join(text.split())
    line = text.partition("\n")[0]
    return _QUOTED.sub('"..."', line) if code.startswith("22") else line


_QUOTED: Final = re.compile(r'".*"|".*$')


def trace(error: BaseException) -> BaseException | None:
    """Return the error if its traceback is worth a log's space: a database's trouble is said in a line."""
    return None if isinstance(error, (sa.exc.SQLAlchemyError, psycopg.Error, OSError)) else error


def _origins(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    known: set[int] = set()
    while seen is not None and id(seen) not in known:  # a chain may be a circle
        known.add(id(seen))
        yield seen
        # DBAPIError.orig is the adapted error; asyncpg's own, with the code, is the adapted one's cause.
        seen = seen.orig if isinstance(seen, sa.exc.DBAPIError) else seen.__cause__
