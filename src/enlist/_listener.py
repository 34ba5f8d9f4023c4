"""Hears the wakes of producers: LISTEN on a connection of its own, never in a transaction."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
from typing import TYPE_CHECKING, Any, Final

from psycopg import sql

from enlist._loop import Backoff

if TYPE_CHECKING:
    from collections.abc import Callable

    from enlist._database import Database

__all__ = ["Listener"]

logger = logging.getLogger("enlist.worker")

CHECK_SECONDS: Final = 30.0
"""How often a silent connection is asked whether it still lives."""


class Listener:
    """Calls ``woken(queue)`` for each wake, and ``woken("")`` after (re)connecting: something may have been missed."""

    def __init__(self, database: Database, woken: Callable[[str], None]) -> None:
        self._database = database
        self._woken = woken
        self._stop = threading.Event()
        self._backoff = Backoff("the worker's listener")
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="enlist-listen", daemon=True)
        self._thread.start()

    def stop(self, timeout: float | None = None) -> bool:
        """End the thread; return whether it has ended."""
        self._stop.set()
        if self._thread is None:
            return True
        self._theirs.send(b"x")
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        self._ours.close()
        self._theirs.close()
        return True

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._listen()
            except Exception as error:
                self._stop.wait(self._backoff.failed(error))

    def _listen(self) -> None:
        pooled = self._database.engine.raw_connection()
        connection: Any = pooled.driver_connection
        pooled.detach()  # from the pool: it stays here for good
        try:
            connection.autocommit = True
            connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._database.statements.channel)))
            self._backoff.succeeded()
            self._woken("")
            with selectors.DefaultSelector() as selector:
                selector.register(connection, selectors.EVENT_READ)
                selector.register(self._ours, selectors.EVENT_READ)
                while not self._stop.is_set():
                    ready = selector.select(CHECK_SECONDS)
                    if not ready:
                        connection.execute("SELECT 1")
                    for queue in {notify.payload for notify in connection.notifies(timeout=0)}:
                        self._woken(queue)
        finally:
            pooled.close()
