"""How the worker's own connections are made: in bounded time, and not again and again while the server is down."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Final

import psycopg
from sqlalchemy import event

from enlist._driver import is_read_only
from enlist._loop import LONGEST_PAUSE

if TYPE_CHECKING:
    from collections.abc import Callable

    import sqlalchemy as sa

__all__ = ["CONNECTING", "Connecting", "drop_read_only", "set_up"]

CONNECTING: Final[dict[str, Any]] = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
"""Arguments of connections that are derived from a URL, where that does not say otherwise. A server that does not
answer is given up after 5 seconds (psycopg: 130); one that has vanished is noticed within half a minute."""

KEEPALIVE: Final = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}
"""The same for a socket: seconds, seconds, probes, milliseconds."""

FIRST_PAUSE: Final = 0.1


class Connecting:
    """Makes connections for all loops of a worker; in place of a pool's creator.

    While the server cannot be reached one of them tries at a time, with growing pauses; the others are told at once
    what the last try has told. So a server that is down, or full, is not asked ten times as often because a worker
    has as many threads.
    """

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._trying = threading.Lock()
        self._failures = 0
        self._next_try = 0.0
        self._told = ""

    def __call__(self, connection_record: Any = None) -> Any:
        """Make a connection. By the parameter's name a pool sees that it may give its record."""
        if not self._failures:
            return self._try(connection_record)
        with self._trying:
            if self._failures and time.monotonic() < self._next_try:
                raise psycopg.OperationalError(self._told)
            return self._try(connection_record)

    def _try(self, record: Any) -> Any:
        try:
            connection = self._make(record)
        except Exception as error:
            with self._lock:
                self._failures += 1
                pause = min(FIRST_PAUSE * 2.0 ** min(self._failures, 10), LONGEST_PAUSE) * random.uniform(0.8, 1)  # noqa: S311
                self._next_try = time.monotonic() + pause
                self._told = str(error)
            raise
        self._failures = 0
        return connection


def set_up(connection: Any, _record: object) -> None:
    """Have statements sent unprepared, and a vanished server noticed; a listener of connections."""
    connection.prepare_threshold = None
    with socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
        if duplicate.family in (socket.AF_INET, socket.AF_INET6):
            duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEPALIVE.items():
                if hasattr(socket, name):
                    duplicate.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def drop_read_only(engine: sa.Engine) -> None:
    """Have an engine drop all its connections when one turns out to be to a server that cannot be written to.

    After a failover that is the old primary. Its connections work, so the pool would give them out for ever; new ones
    go where the server's name points to by then.
    """

    def look(context: sa.engine.ExceptionContext) -> None:
        if context.original_exception is not None and is_read_only(context.original_exception):
            context.is_disconnect = True

    event.listen(engine, "handle_error", look)
