"""Statements straight to psycopg, for the few that are sent for each job or that a job waits for.

A statement's way through SQLAlchemy takes 60 us, and 0.35 ms after a pause of 20 ms, when no cache has any of it: as
much as the server needs for some of them. So it is compiled once, and sent by a cursor of psycopg's in the transaction
that the connection is in; errors are told as SQLAlchemy tells them. Where anybody would miss it, a listener or a log,
it goes the usual way.
"""

from __future__ import annotations

import logging
import re
import weakref
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, cast

import psycopg
import sqlalchemy as sa
from psycopg.rows import namedtuple_row

from enlist._driver import is_read_only

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["Direct", "direct"]

_PLACE: Final = re.compile(r"%\((\w+)\)s|%%")


class Direct:
    """A statement that is sent often.

    Its parameters are those that it has by name; psycopg must read the values of its rows as they are to be.
    """

    def __init__(self, statement: sa.Executable) -> None:
        self._statement = statement
        self._compiled: weakref.WeakKeyDictionary[sa.Dialect, _Compiled] = weakref.WeakKeyDictionary()

    def rows(self, connection: sa.Connection, parameters: Mapping[str, Any]) -> Sequence[Any]:
        """Send it and return its rows; their columns have names.

        :raises DBAPIError: as SQLAlchemy does.
        """
        if (driver_connection := _driver_of(connection)) is None:
            return connection.execute(self._statement, parameters).all()
        cursor = psycopg.RawCursor(driver_connection, row_factory=namedtuple_row)
        return self._send(connection, cursor, parameters).fetchall()

    def count(self, connection: sa.Connection, parameters: Mapping[str, Any]) -> int:
        """Send it and return how many rows it has written and returned, or found.

        :raises DBAPIError: as SQLAlchemy does.
        """
        if (driver_connection := _driver_of(connection)) is None:
            return len(connection.execute(self._statement, parameters).all())
        return self._send(connection, psycopg.RawCursor(driver_connection), parameters).rowcount

    def compile(self, dialect: sa.Dialect) -> _Compiled:
        """Compile it now, and not when it is first sent: a large one takes 10 ms."""
        compiled = self._compiled[dialect] = _Compiled(self._statement, dialect)
        return compiled

    def _send(
        self, connection: sa.Connection, cursor: psycopg.RawCursor[Any], parameters: Mapping[str, Any]
    ) -> psycopg.RawCursor[Any]:
        compiled = self._compiled.get(connection.dialect) or self.compile(connection.dialect)
        values = compiled.values(parameters)
        try:
            return cursor.execute(compiled.text, values)
        except psycopg.Error as error:
            raise _told(connection, error, compiled.text) from error


@lru_cache(maxsize=256)
def direct(statement: sa.Executable) -> Direct:
    """The same one for a statement each time."""
    return Direct(statement)


class _Compiled:
    """A statement in PostgreSQL's own terms: psycopg would read one with names each time, if it is a long one."""

    def __init__(self, statement: sa.Executable, dialect: sa.Dialect) -> None:
        compiled = cast("Any", statement).compile(dialect=dialect)
        self._names: list[str] = []
        self.text = cast("Any", _PLACE.sub(self._numbered, str(compiled)))
        self._constants: dict[str, Any] = {}
        self._converters: dict[str, Callable[[Any], Any]] = {}
        for name in self._names:
            bind = compiled.binds[name]
            convert = bind.type.dialect_impl(dialect).bind_processor(dialect)
            if not bind.required:
                self._constants[name] = bind.effective_value if convert is None else convert(bind.effective_value)
            if convert is not None:
                self._converters[name] = convert

    def _numbered(self, place: re.Match[str]) -> str:
        name = place[1]
        if name is None:
            return "%"
        if name not in self._names:
            self._names.append(name)
        return f"${self._names.index(name) + 1}"

    def values(self, parameters: Mapping[str, Any]) -> list[Any]:
        """The values of its parameters, in their order."""
        found = []
        for name in self._names:
            if name not in parameters:
                found.append(self._constants[name])
                continue
            value, convert = parameters[name], self._converters.get(name)
            found.append(value if convert is None else convert(value))
        return found


def _driver_of(connection: sa.Connection) -> psycopg.Connection[Any] | None:
    """The driver's connection to send to; None where SQLAlchemy is to do it.

    That is for other drivers, and what somebody has put in the place of psycopg's connection, to look on say; where
    statements are logged, or heard by listeners of others; where names of tables are translated.
    """
    driver_connection = connection.connection.driver_connection
    engine = cast("Any", connection.engine)
    if type(driver_connection) is not psycopg.Connection or engine.logger.isEnabledFor(logging.INFO):
        return None
    events, dialect_events = engine.dispatch, engine.dialect.dispatch
    for listeners in (
        events.before_cursor_execute,
        events.after_cursor_execute,
        events.before_execute,
        events.after_execute,
        dialect_events.do_execute,
        dialect_events.handle_error,
    ):
        for listener in listeners:
            if not getattr(listener, "__module__", "").startswith("enlist."):
                return None
    return None if "schema_translate_map" in connection.get_execution_options() else driver_connection


def _told(connection: sa.Connection, error: psycopg.Error, text: str) -> sa.exc.DBAPIError:
    """What SQLAlchemy makes of a driver's error. A connection that is lost is given up, and the pool's others too."""
    wrapped, driver_connection = connection.connection, cast("Any", connection.connection.driver_connection)
    lost = is_read_only(error) or connection.dialect.is_disconnect(cast("Any", error), driver_connection, None)
    told = sa.exc.DBAPIError.instance(
        text, None, error, psycopg.Error, hide_parameters=True, connection_invalidated=lost, dialect=connection.dialect
    )
    if lost:
        cast("Any", connection.engine.pool)._invalidate(wrapped, error)
        connection.invalidate(error)
    return cast("sa.exc.DBAPIError", told)
