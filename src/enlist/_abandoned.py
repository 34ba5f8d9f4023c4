"""Ends what handlers wait for that were given up: a silent connection would hold their thread or task for ever."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import TYPE_CHECKING, Any, Final

import psycopg
from sqlalchemy.exc import SQLAlchemyError

from enlist._log import Log
from enlist._loop import Loop
from enlist._runner import NO_COMMIT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from enlist._guard import Guard
    from enlist._leases import Leases
    from enlist._session import GuardedSession

__all__ = ["AbandonedSessions", "cut"]

logger = Log("enlist.worker")

LOOK_SECONDS: Final = 1.0

GRACE_SECONDS: Final = 2.0
"""How long a session may go on after its attempt was given up: to be rolled back, and to cancel what it waits for."""


class AbandonedSessions:
    """Cuts the connections of sessions whose attempts no longer count, and that do not end by themselves.

    The handler's timeout has passed, or the job is another worker's by now. Drivers cancel a statement by asking the
    server, and then wait for its answer: where the network swallows everything there is none.
    """

    def __init__(self, sessions: Callable[[], Iterable[GuardedSession]], leases: Leases) -> None:
        """:param sessions: gives those that handlers have now."""
        self._sessions = sessions
        self._leases = leases
        self._since: dict[GuardedSession, float] = {}
        self.loop = Loop("session watch", self.look, LOOK_SECONDS)

    def look(self) -> None:
        now = time.monotonic()
        given_up = [session for session in self._sessions() if self._is_given_up(session.guard, now)]
        self._since = {session: self._since.get(session, now) for session in given_up}
        for session, since in self._since.items():
            if now - since > GRACE_SECONDS and session.guard is not None and cut(session.guard):
                logger.warning(
                    "job %s: its attempt was given up and still waited for the database: the connection is cut",
                    session.guard.job_id,
                    extra={"job_id": str(session.guard.job_id)},
                )

    def end(self) -> None:
        """Cut them all, now: the worker stops, and what they have locked holds up the endings of their jobs."""
        now = time.monotonic()
        for session in self._sessions():
            if session.guard is not None and self._is_given_up(session.guard, now):
                cut(session.guard)

    def _is_given_up(self, guard: Guard | None, now: float) -> bool:
        if guard is None:
            return False
        run = self._leases.get(guard.job_id)
        if run is None or run.token != guard.token or run.abandoned in NO_COMMIT:
            return True
        # A handler that has returned is no longer watched: then it is its commit that takes so long.
        timeout = run.handler.timeout_seconds
        late = timeout is not None and now > run.started + timeout
        return late or (run.task is not None and run.task.cancelling() > 0)


def cut(guard: Guard) -> bool:
    """Shut the sockets of a handler's connections, so that whoever waits for them gets an error; False if none is open.

    May be called from any thread.
    """
    done = False
    for connection, _ in guard.roots:
        if connection.closed or connection.invalidated:
            continue
        with contextlib.suppress(SQLAlchemyError, psycopg.Error, OSError):  # closed meanwhile
            done = _shut(connection.connection.driver_connection) or done
    return done


def _shut(driver_connection: Any) -> bool:
    """Shut the socket of a connection of psycopg or asyncpg; the driver then finds that it is broken."""
    transport = getattr(driver_connection, "_transport", None)  # asyncpg's: it has no public name for it
    number = driver_connection.fileno() if transport is None else transport.get_extra_info("socket").fileno()
    if number < 0:
        return False
    with socket.socket(fileno=os.dup(number)) as duplicate:
        duplicate.shutdown(socket.SHUT_RDWR)
    return True
