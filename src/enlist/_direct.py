"""Statements straight to psycopg, for the few that are sent for each job or that a job waits for.

On its way through SQLAlchemy a statement takes longer than the server needs for some of them, most of all after a
pause, when no cache has any of it. So it is compiled once, and sent by a cursor of psycopg's in the transaction that
SQLAlchemy has begun; errors are SQLAlchemy's. Where anybody would miss it, a listener or a log, it goes the usual way.
"""

from __future__ import annotations

import logging
import re
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

import psycopg
import sqlalchemy as sa
from psycopg.rows import namedtuple_row
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.engine.default import DefaultDialect

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["Direct", "direct"]

_PLACE: Final = re.compile(r"%\((\w+)\)s|%%")

_DIALECT: Final[sa.Dialect] = cast("Any", PGDialect_psycopg)()
"""One for all engines, with its own style of parameters: theirs may be another."""


class Direct:
    """A statement that is sent often.

    Its parameters are those that it has by name; psycopg must read the values of its rows as they are to be.
    """

    def __init__(self, statement: sa.Executable) -> None:
        self._statement = statement

    def rows(self, connection: sa.Connection, parameters: Mapping[str, Any]) -> Sequence[Any]:
        """Send it and return its rows; their columns have names.

        They are fetched, not counted by the driver: in a pipeline it does not know yet.

        :raises DBAPIError: as SQLAlchemy does.
        """
        if (driver_connection := _driver_of(connection)) is None:
            return connection.execute(self._statement, parameters).all()
        values = self._compiled.values(parameters)
        try:
            cursor = psycopg.RawCursor(driver_connection, row_factory=namedtuple_row)
            return cursor.execute(self._compiled.text, values).fetchall()
        except BaseException as error:
            self._raise(connection, error)

    @cached_property
    def _compiled(self) -> _Compiled:
        return _Compiled(self._statement)

    def _raise(self, connection: sa.Connection, error: BaseException) -> NoReturn:
        """Have SQLAlchemy raise what it makes of an error: with its listeners, and a lost connection given up."""
        cast("Any", connection)._handle_dbapi_exception(error, self._compiled.text, None, None, None)
        raise error  # it does not return


@lru_cache(maxsize=64)
def direct(statement: sa.Executable) -> Direct:
    """The same one for a statement each time."""
    return Direct(statement)


class _Compiled:
    """A statement in PostgreSQL's own terms: psycopg would read one with names each time, if it is a long one."""

    def __init__(self, statement: sa.Executable) -> None:
        compiled = cast("Any", statement).compile(dialect=_DIALECT)
        self._names: list[str] = []
        self.text = cast("Any", _PLACE.sub(self._numbered, str(compiled)))
        self._constants: dict[str, Any] = {}
        self._converters: dict[str, Callable[[Any], Any]] = {}
        for name in self._names:
            bind = compiled.binds[name]
            convert = bind.type.dialect_impl(_DIALECT).bind_processor(_DIALECT)
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

    That is for other drivers, and what somebody has put in the place of psycopg's connection or cursor, or of the
    dialect's way to use it, to look on say; where no transaction is begun as far as SQLAlchemy knows; where statements
    are logged, or heard by listeners of others; where names of tables are translated.
    """
    if not connection.in_transaction():
        return None
    driver_connection = connection.connection.driver_connection
    if type(driver_connection) is not psycopg.Connection or driver_connection.cursor_factory is not psycopg.Cursor:
        return None
    engine = cast("Any", connection.engine)
    if engine.logger.isEnabledFor(logging.INFO):
        return None
    if type(engine.dialect).do_execute is not DefaultDialect.do_execute:
        return None
    events, dialect_events = cast("Any", connection).dispatch, engine.dialect.dispatch
    for listeners in (
        events.before_cursor_execute,
        events.after_cursor_execute,
        events.before_execute,
        events.after_execute,
        dialect_events.do_execute,
    ):
        for listener in listeners:
            # Ours look for the end of a transaction and for COPY, which these statements are not.
            if not (getattr(listener, "__module__", None) or "").startswith("enlist."):  # None: of a type in C
                return None
    return None if "schema_translate_map" in connection.get_execution_options() else driver_connection
