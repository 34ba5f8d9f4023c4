"""Hears what workers are told: LISTEN on a connection of its own, never in a transaction.

Nothing here waits for the network longer than it says: a connection whose other end has vanished reports no error, it
is silent, as one is that nobody has anything to tell. So after some silence it is asked, and after as much again given
up. And LISTEN may have been of no use from the start, behind a pooler that gives each transaction another connection:
so the worker sends itself a notification now and then, on another connection, and says if it doesn't come.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final, cast

import psycopg
from psycopg import sql

from enlist._log import Log
from enlist._loop import Backoff, Loop

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import sqlalchemy as sa

    from enlist._database import Database

__all__ = ["Listener"]

logger = Log("enlist.worker")

SHORTEST_SILENCE: Final = 0.5
LONGEST_SILENCE: Final = 30.0

TEST_SECONDS: Final = 3.0
"""How long a notification to itself may take to be heard."""

RETEST_SECONDS: Final = 300.0
RETEST_SOON_SECONDS: Final = 30.0
"""How often it is looked whether LISTEN is (still) effective, and how often while it is not."""

CLOSING_SECONDS: Final = 0.5


class Listener:
    """Passes on what comes on the channels of a job table, and makes sure that it would come.

    :attr:`listening` is true while a notification was heard on the connection that is open.
    """

    def __init__(
        self,
        engine: sa.Engine,
        database: Database,
        channels: Mapping[str, Callable[[str], None]],
        missed: Callable[[], None],
        *,
        silence: float,
    ) -> None:
        """Make it.

        :param engine: whose connections go to the server itself.
        :param database: where the worker does everything else.
        :param channels: by the channel what is called with the payload of a notification; it must be quick.
        :param missed: called when it listens (again): something may have been missed before.
        :param silence: seconds after which a silent connection is asked for a sign of life, and given up when there is
            none for as long again; at least 0.5, at most 30.
        """
        self._engine = engine
        self._database = database
        self._channels = channels
        self._missed = missed
        self._silence = min(max(silence, SHORTEST_SILENCE), LONGEST_SILENCE)
        self._stop = threading.Event()
        self._backoff = Backoff("the worker's listener")
        self._thread: threading.Thread | None = None
        self._test = Loop("test of LISTEN", self._test_once, RETEST_SECONDS)
        self._connecting = False
        self._connected = 0
        """The number of the connection that listens; 0 while there is none."""
        self._connections = 0
        self._expected = ""
        """What the notification to itself says."""
        self._heard = threading.Event()
        self._said = False
        self.listening = False

    def start(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="enlist-listen", daemon=True)
        self._thread.start()
        self._test.start()

    def stop(self, timeout: float) -> bool:
        """End the threads; return whether they have ended. A frozen network keeps nobody waiting."""
        self._stop.set()
        self._heard.set()
        if self._thread is None:
            return True
        self._theirs.send(b"x")
        # What connects hears nothing; it closes the connection when it has it.
        self._thread.join(CLOSING_SECONDS if self._connecting else timeout)
        ended = self._test.stop(CLOSING_SECONDS)
        if self._thread.is_alive():
            return False
        self._thread = None
        self._ours.close()
        self._theirs.close()
        return ended

    # -- listening -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._listen()
            except Exception as error:
                if not self._stop.is_set():
                    self._stop.wait(self._backoff.failed(error))

    def _listen(self) -> None:
        self._connecting = True
        try:
            line = _Line(self._engine, self._ours, self._stop)
        finally:
            self._connecting = False
        try:
            # Also the question for a sign of life: who listens already does nothing then, and in pg_stat_activity it
            # is what the connection is there for.
            listen = sql.SQL("; ").join([sql.SQL("LISTEN {}").format(sql.Identifier(name)) for name in self._channels])
            question = listen.as_string().encode()
            line.ask(question, self._silence)
            self._backoff.succeeded()
            self._connections += 1
            self._connected = self._connections
            self._missed()
            self._test.wake()
            while not self._stop.is_set():
                if not line.wait(self._silence):
                    line.ask(question, self._silence)
                self._pass_on(line)
        finally:
            self._connected = 0
            self.listening = False
            self._heard.set()  # the test need not wait any longer
            with suppress(Exception), self._database.watch(line.connection, CLOSING_SECONDS):
                line.close()

    def _pass_on(self, line: _Line) -> None:
        for channel, payload in line.heard():
            if payload == self._expected:
                self._heard.set()
            elif channel in self._channels:
                self._channels[channel](payload)

    # -- the test ------------------------------------------------------------------------------------------------

    def _test_once(self) -> float | None:
        """Send a notification to itself, and see whether it comes. On another connection: one's own comes anyway."""
        connected = self._connected
        if not connected:
            return None  # woken when there is something to test
        self._heard.clear()
        # Nothing that is a queue's name, or tells of a job.
        self._expected = f"are you listening? {secrets.token_hex(8)}"
        self._database.execute(self._database.statements.notify_cancelled, {"messages": [self._expected]})
        heard = self._heard.wait(TEST_SECONDS)
        if self._stop.is_set() or self._connected != connected:
            return None
        self.listening = heard
        self._database.prepares = heard and self._database.is_unpooled()
        if heard:
            if self._said:
                logger.info("LISTEN is effective again: jobs start when they are enqueued")
            self._said = False
            return RETEST_SECONDS
        if not self._said:
            logger.warning(
                "LISTEN is not effective (a transaction-mode pooler?): jobs are found by polling; give listen_bind= a"
                " direct connection"
            )
        self._said = True
        return RETEST_SOON_SECONDS


class _Line:
    """A connection that listens, used without ever blocking: by libpq's own functions, since psycopg's wait."""

    def __init__(self, engine: sa.Engine, waker: socket.socket, stop: threading.Event) -> None:
        """Connect. What is sent to ``waker`` ends each wait."""
        self._pooled = engine.raw_connection()
        self.connection = cast("psycopg.Connection", self._pooled.driver_connection)
        self._pooled.detach()  # from the pool: it stays here for good
        self.connection.autocommit = True
        self._libpq = self.connection.pgconn
        self._stop = stop
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._libpq.socket, selectors.EVENT_READ)
        self._selector.register(waker, selectors.EVENT_READ)
        self._broken = False

    def wait(self, seconds: float) -> bool:
        """Wait until something is there to be read, or somebody wakes; False if nothing was."""
        return bool(self._selector.select(seconds))

    def heard(self) -> list[tuple[str, str]]:
        """Read what is there, without waiting: the notifications, (channel, payload)."""
        self._read()
        found = []
        while (notice := self._libpq.notifies()) is not None:
            found.append((notice.relname.decode(), notice.extra.decode(errors="replace")))
        return found

    def ask(self, statement: bytes, seconds: float) -> None:
        """Run a statement; its notifications are heard later.

        :raises TimeoutError: there was no answer in so many seconds, or the worker stops.
        """
        end = time.monotonic() + seconds
        self._broken = True  # until there is an answer
        self._libpq.send_query(statement)
        while True:
            self._libpq.flush()
            while not self._libpq.is_busy():
                result = self._libpq.get_result()
                if result is None:
                    self._broken = False
                    return
                if result.status == psycopg.pq.ExecStatus.FATAL_ERROR:
                    raise psycopg.OperationalError(result.error_message.decode(errors="replace"))
            left = end - time.monotonic()
            if left <= 0 or not self.wait(left) or self._stop.is_set():
                raise TimeoutError(f"no answer in {seconds:g} seconds: the network has lost the connection")
            self._read()

    def _read(self) -> None:
        try:
            self._libpq.consume_input()
        except psycopg.OperationalError:
            self._broken = True
            raise

    def close(self) -> None:
        """End the connection; unless it is broken, as whoever has made it would like to have it back."""
        self._selector.close()
        if self._broken:
            self.connection.close()  # at once, without a word to the server
            self._pooled.invalidate()
        else:
            self._pooled.close()
