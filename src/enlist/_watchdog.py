"""Statements that must end: a connection whose other end is silent raises nothing by itself, ever."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import psycopg

from enlist._loop import Loop

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["NoAnswer", "Watchdog", "Watched"]

GRACE_SECONDS: Final = 1.0
"""How long a server that was asked to cancel a statement has to answer, before its connection is cut."""


class NoAnswer(TimeoutError):
    """A statement took longer than it may."""


@dataclass(slots=True, eq=False)
class Watched:
    """What is under way on a connection."""

    connection: psycopg.Connection[Any]
    seconds: float
    end: float
    """When something has to be done about it, by the monotonic clock."""
    thread_id: int = field(default_factory=threading.get_ident)
    """Of the thread that waits for it."""
    cancelled: bool = False
    """The server was asked to cancel it. That may reach the connection late: nobody else may use it any more."""
    cut: bool = False


class Watchdog:
    """Ends what takes too long on a psycopg connection, whatever the reason: the wait for it raises.

    First the server is asked to cancel the statement: one that waits for a lock or reads too much does not go on
    without us. When there is still no answer the socket is shut down on this side. It is done from here and not by a
    ``statement_timeout``: that would be state of the session, which a pooler shares with others, or another round
    trip; and no setting of the server ends the wait for a network that swallows everything.

    One thread, which sleeps as long as nothing can be late: beginning a statement wakes nobody.
    """

    def __init__(self, shortest: float) -> None:
        """:param shortest: the least number of seconds that will be given to a statement."""
        self._shortest = shortest
        self._most: float | None = None
        self._lock = threading.Lock()
        self._watched: set[Watched] = set()
        self._loop = Loop("statement watch", self._look, shortest)
        self._started = False

    @contextmanager
    def watch(self, connection: psycopg.Connection[Any], seconds: float) -> Iterator[Watched]:
        """Have what is done with the connection in the block end within this time, and little more.

        :raises NoAnswer: it did not, from whatever the driver raised then.
        """
        watched = self.begin(connection, seconds)
        try:
            yield watched
        except Exception as error:
            if watched.cancelled:
                raise NoAnswer(_told(watched)) from error
            raise
        finally:
            self.end(watched)

    def begin(self, connection: psycopg.Connection[Any], seconds: float) -> Watched:
        """Begin to watch; what is done takes no longer than this."""
        if self._most is not None:
            seconds = min(seconds, self._most)
        watched = Watched(connection, seconds, time.monotonic() + seconds)
        with self._lock:
            self._watched.add(watched)
            if not self._started:
                self._started = True
                self._loop.start()
        return watched

    def end(self, watched: Watched) -> None:
        """End to watch: after this nobody shuts a socket that has another owner by then."""
        with self._lock:
            self._watched.discard(watched)

    def hurry(self, seconds: float, thread_id: int | None = None) -> None:
        """From now on nothing lasts longer than this; nor does what is under way. Of a thread: what is under way."""
        if thread_id is None:
            self._most = seconds
        with self._lock:
            for watched in self._watched:
                if thread_id in {None, watched.thread_id} and not watched.cancelled:
                    watched.end = min(watched.end, time.monotonic() + seconds)
        self._loop.wake()

    def close(self) -> None:
        """Cut what is still under way, and end the thread."""
        with self._lock:
            for watched in self._watched:
                watched.cancelled = True
                _cut(watched)
        self._loop.stop(GRACE_SECONDS)

    def _look(self) -> float:
        """End what is late; return when something may be late the next time."""
        with self._lock:
            now = time.monotonic()
            for watched in [one for one in self._watched if one.end <= now]:
                if watched.cancelled:
                    _cut(watched)
                    self._watched.discard(watched)
                else:
                    watched.cancelled = True
                    watched.end = now + GRACE_SECONDS
                    # Aside: it makes a connection of its own, and that one may hang as well.
                    threading.Thread(target=_cancel, args=(watched,), name="enlist-cancel", daemon=True).start()
            following = min((one.end for one in self._watched), default=now + self._shortest)
        return max(0.0, min(following - now, self._shortest if self._most is None else self._most))


def _cancel(watched: Watched) -> None:
    with contextlib.suppress(Exception):  # then it is cut
        watched.connection.cancel_safe(timeout=GRACE_SECONDS)


def _cut(watched: Watched) -> None:
    watched.cut = True
    try:
        duplicate = socket.socket(fileno=os.dup(watched.connection.fileno()))
    except (psycopg.Error, OSError):  # closed already
        return
    with duplicate, contextlib.suppress(OSError):
        duplicate.shutdown(socket.SHUT_RDWR)


def _told(watched: Watched) -> str:
    if watched.cut:
        return f"no answer within {watched.seconds:g} seconds; the connection is cut"
    return f"not done within {watched.seconds:g} seconds; it was cancelled"
