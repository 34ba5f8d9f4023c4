"""The worker's own way to the database: its statements and an engine apart from the handlers'."""

from __future__ import annotations

import itertools
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import psycopg
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError, OperationalError

from enlist._direct import direct
from enlist._driver import sqlstate
from enlist._log import Log
from enlist._statements import Statements, statements_for
from enlist._watchdog import NoAnswer, Watchdog, Watched

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from enlist.models import JobRecordMixin

__all__ = ["Database"]

logger = Log("enlist.worker")

SHORTEST_SECONDS: Final = 1.0
LONGEST_SECONDS: Final = 15.0

CONNECTING: Final = "enlist: connecting"

PREPARE_AFTER: Final = 5
"""How often a statement is sent before it is prepared."""

PREPARED_SECONDS: Final = 60
"""How long a prepared statement is kept: with it its plan, which may have been made while the table was empty."""

PREPARED: Final = "enlist: prepared since"

NOT_OURS: Final = frozenset({"26000", "42P05", "0A000"})
"""There is no such prepared statement, or another's; or it returns something else since the table was changed."""

CLAIMS: Final = ("claim", "claim_among", "claim_limited")
"""Statements that jobs wait for: they go straight to the driver."""

SEARCHES: Final = (*CLAIMS, "look", "notify_of_keys", "expired")
"""Statements that may read much: they get twice the time. What is always cut off never comes to an end."""


class Database:
    """Runs the worker's statements, each in a transaction of its own, READ COMMITTED whatever the server's default.

    Each ends in bounded time, whatever the server and the network do: after a quarter of the lease, 1 second at least
    and 15 at most, it is cancelled, and its connection cut if that brings no answer. So a heartbeat that got stuck is
    tried again before the lease ends.

    :param lease: the worker's lease in seconds; default none, then statements may take for ever.
    """

    def __init__(self, engine: sa.Engine, record: type[JobRecordMixin], *, lease: float | None = None) -> None:
        self.engine = engine
        self.record = record
        table = sa.inspect(record).local_table
        assert isinstance(table, sa.Table)
        self.statements: Statements = statements_for(table)
        self._explicit = engine.execution_options(isolation_level="READ COMMITTED")
        # One round trip a statement; a transaction of its own is begun only where the server would otherwise run
        # it at another level: SKIP LOCKED raises serialization errors above READ COMMITTED.
        self._single = engine
        self.seconds = LONGEST_SECONDS if lease is None else min(max(lease / 4, SHORTEST_SECONDS), LONGEST_SECONDS)
        """How long a statement may take."""
        self._watchdog = None if lease is None else Watchdog(self.seconds)
        if self._watchdog is not None:
            # Before all other listeners, among them the one with which SQLAlchemy asks who the server is.
            event.listen(engine, "connect", self._connected, insert=True)
            event.listen(engine, "checkout", self._checked_out)
        self._times_forgotten = itertools.count()
        self.prepares = False
        """Whether connections keep prepared statements: that halves the time of a claim (1.3 and 0.45 ms where nothing
        is found). Only where a connection of ours is one to the server, and not shared by a pooler."""

    def open(self) -> None:
        """Connect, and look which isolation level a single statement gets."""
        with self.connection() as connection:
            level = connection.execute(self.statements.isolation).scalar_one()
        self._single = self.engine if level == "read committed" else self._explicit

    def execute(self, statement: sa.Executable, parameters: Mapping[str, Any]) -> Sequence[sa.Row[Any]]:
        """Run one statement in a transaction of its own and return its rows."""
        built = vars(self.statements)
        searches = any(built.get(name) is statement for name in SEARCHES)
        seconds = self.seconds * 2 if searches else self.seconds
        waits = any(built.get(name) is statement for name in CLAIMS)
        with self._connection(self._single, seconds) as connection, connection.begin():
            if waits:
                return direct(statement).rows(connection, parameters)
            return connection.execute(statement, parameters).all()

    def write(
        self, statement: sa.Executable, parameters: Mapping[str, Any], number: int
    ) -> Sequence[sa.Row[Any]] | None:
        """The same for an UPDATE of ``number`` rows; return those that it has written, or None for all of them.

        To read 500 ids only to find them all there takes as long as to send them.
        """
        with self._connection(self._single, self.seconds) as connection, connection.begin():
            result = connection.execute(statement, parameters)
            if result.rowcount == number:
                result.close()
                return None
            return result.all()

    @contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        """A connection in an explicit transaction, for as long as a search may take."""
        with self._connection(self._explicit, self.seconds * 2) as connection, connection.begin():
            yield connection

    @contextmanager
    def connection(self) -> Iterator[sa.Connection]:
        """A connection in AUTOCOMMIT mode, for as long as a search may take."""
        with self._connection(self.engine, self.seconds * 2) as connection:
            yield connection

    @contextmanager
    def watch(self, connection: object, seconds: float | None = None) -> Iterator[Watched | None]:
        """Have what is done with a driver's connection end in time, if it is psycopg's.

        :param seconds: default :attr:`seconds`.
        :raises NoAnswer: it did not.
        """
        if self._watchdog is None or not isinstance(connection, psycopg.Connection):
            yield None
        else:
            with self._watchdog.watch(connection, self.seconds if seconds is None else seconds) as watched:
                yield watched

    @contextmanager
    def _connection(self, engine: sa.Engine, seconds: float) -> Iterator[sa.Connection]:
        with engine.connect() as connection:
            try:
                with self.watch(connection.connection.driver_connection, seconds) as watched:
                    self._prepare(connection)
                    yield connection
            except DBAPIError as error:
                if sqlstate(error) in NOT_OURS:
                    connection.invalidate(error)
                raise
            except NoAnswer as error:
                connection.invalidate(error)
                raise OperationalError(None, None, error, connection_invalidated=True) from error.__cause__
            if watched is not None and watched.cancelled:  # done at that very moment
                connection.invalidate()

    def _prepare(self, connection: sa.Connection) -> None:
        """Have the driver prepare what it sends again and again, and forget it after a while."""
        driver_connection, info = connection.connection.driver_connection, connection.info
        if not isinstance(driver_connection, psycopg.Connection):
            return
        since = info.get(PREPARED)
        if since is not None and (not self.prepares or time.monotonic() > since + PREPARED_SECONDS):
            connection.execute(self.statements.forget(next(self._times_forgotten)))
            connection.commit()  # in AUTOCOMMIT mode it is only SQLAlchemy's own idea of a transaction
            since = info.pop(PREPARED)
        if self.prepares and since is None:
            info[PREPARED] = time.monotonic()
        driver_connection.prepare_threshold = PREPARE_AFTER if self.prepares else None

    def _connected(self, connection: Any, record: Any) -> None:
        if self._watchdog is not None:
            record.info[CONNECTING] = self._watchdog.begin(connection, self.seconds)

    def _checked_out(self, _connection: object, record: Any, _proxy: object) -> None:
        if self._watchdog is not None and (watched := record.info.pop(CONNECTING, None)) is not None:
            self._watchdog.end(watched)

    def is_unpooled(self) -> bool:
        """Whether connections go to the server itself: a pooler tells its clients process ids of its own."""
        with self.connection() as connection:
            driver_connection = connection.connection.driver_connection
            assert isinstance(driver_connection, psycopg.Connection)
            there: int = connection.execute(self.statements.backend).scalar_one()
            return there == driver_connection.info.backend_pid

    def hurry(self, seconds: float, thread_id: int | None = None) -> None:
        """From now on no statement takes longer than this, those under way included: the worker stops.

        :param thread_id: then only the one that this thread waits for.
        """
        if self._watchdog is not None:
            self._watchdog.hurry(seconds, thread_id)

    def close(self) -> None:
        """Close the connections; cut those that still wait for an answer."""
        if self._watchdog is not None:
            self._watchdog.close()
        self.engine.dispose()
