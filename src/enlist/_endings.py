"""What becomes of an attempt: done, run again, failed, given back, or somebody else's by now."""

from __future__ import annotations

import logging
import random
import threading
import time
from typing import TYPE_CHECKING, Final

import sqlalchemy as sa

from enlist._attempt import CONFLICTS, ending, failure, reruns, timed_out
from enlist._driver import brief, sqlstate, trace
from enlist._log import Log
from enlist.events import EventName
from enlist.exceptions import LeaseLost
from enlist.models import JobStatus
from enlist.retry import summarize

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Sequence

    from enlist._completer import Completer
    from enlist._database import Database
    from enlist._guard import Guard
    from enlist._leases import Leases
    from enlist._slots import Run
    from enlist.events import Events

__all__ = ["Endings"]

logger = Log("enlist.worker")

LONGEST_RERUN_WAIT: Final = 0.1
"""Seconds at most before the first time that a handler is run again after a conflict, so as not to meet it again."""

FATE_LOOKUPS: Final = 2
"""How many look-ups of what became of a COMMIT may be under way at once."""

FATE_PAUSE: Final = 0.2


class Endings:
    """Tells the database, the log and the listeners how attempts ended."""

    def __init__(
        self, database: Database, leases: Leases, completer: Completer, events: Events, lease: dt.timedelta
    ) -> None:
        self._lease = lease
        self._database = database
        self._leases = leases
        self._completer = completer
        self._events = events
        # They may wait for long, on connections that the heartbeat needs as well.
        self._fate_lookups = threading.BoundedSemaphore(FATE_LOOKUPS)

    def succeeded(self, run: Run, committed: bool) -> None:
        """Note that a handler has returned, and whether its effects and its job's status are committed."""
        if run.abandoned is not None and (run.ended or run.abandoned != "stopped"):
            self._came_late(run)
            if committed:
                self._leases.drop(run)
            return
        if not committed:
            self._completer.complete(run)
        else:
            self._is_done(run)
        if logger.isEnabledFor(logging.DEBUG):  # its fields are of some cost, and each job comes by here
            logger.debug("%s done", run, extra=run.extra(event=EventName.DONE))

    def _is_done(self, run: Run) -> None:
        run.ended = True
        run.finished = run.finished or time.monotonic()
        self._leases.drop(run)
        self._events.emit(EventName.DONE, run)

    def raised(self, run: Run, guard: Guard | None, error: BaseException, rerun: int) -> float | None:
        """Write an attempt's end by an exception; return the seconds to wait if it is to be run again instead.

        :param rerun: how often it was run again already.
        """
        if run.abandoned is not None:
            if run.abandoned == "stopped":
                logger.info("%s is given back, since the worker stops", run, extra=run.extra(event=EventName.RELEASED))
                self.release(run)
            else:
                self._came_late(run)
            return None
        if isinstance(error, LeaseLost):
            self._leases.give_up(run)
            if run.abandon("lease lost"):
                self._completer.fenced(run)
            return None
        again = rerun < reruns(error)
        committing = guard is not None and guard.committing
        if (committing or again) and self._landed(run):
            self._was_committed([run], error)
            return None
        if run.abandoned is not None:  # found lost just now
            return None
        if again:
            logger.info("%s is run again in the same attempt: %s", run, brief(error), extra=run.extra())
            if sqlstate(error) not in CONFLICTS:
                return 0.0
            return random.uniform(0, LONGEST_RERUN_WAIT * 2**rerun)  # noqa: S311
        self._completer.settle(ending(run, error))
        return None

    def group_landed(self, runs: Sequence[Run], guard: Guard | None, error: BaseException) -> bool:
        """Whether a group's effects are committed, though an exception came out of it."""
        if guard is None or not guard.committing or not self._landed(runs[0]):
            return False
        self._was_committed(runs, error)
        return True

    def _was_committed(self, runs: Sequence[Run], error: BaseException) -> None:
        """Note that COMMIT was sent and has landed: its answer was lost, or a listener raised after it."""
        for run in runs:
            self._is_done(run)
            text = "%s: committed, though its COMMIT raised %s"
            logger.warning(text, run, brief(error), exc_info=trace(error), extra=run.extra(event=EventName.DONE))

    def unexpected(self, run: Run, error: BaseException) -> None:
        """End an attempt after a fault of ours: the job fails, or else its lease ends by itself."""
        if run.ended or run.abandoned is not None:
            self._leases.give_up(run)
        else:
            try:
                self.failed(run, error)
            except BaseException:
                self._leases.give_up(run)
                raise
        text = "%s: the attempt ended in an unexpected way: %s"
        logger.error(text, run, summarize(error), exc_info=trace(error), extra=run.extra())

    def failed(self, run: Run, error: BaseException) -> None:
        """Write an ordinary failure."""
        self._completer.settle(failure(run, error))

    def timed_out(self, run: Run) -> None:
        """Write that a plain handler's time is over."""
        self.failed(run, timed_out(run))

    def release(self, run: Run, delay: dt.timedelta | None = None) -> None:
        """Give a job back, its attempt with it; after a while, where at once would be too soon."""
        if not run.ended:
            self._completer.release(run, delay)

    def is_held(self, run: Run) -> bool:
        """Whether the job is this attempt's still; False if that cannot be read."""
        if run.abandoned is not None:
            return False
        try:
            rows = self._database.execute(self._database.statements.states, {"ids": [run.id]})
        except sa.exc.SQLAlchemyError:
            return False
        return any(row.lease_token == run.token and row.status is JobStatus.RUNNING for row in rows)

    def lost(self, run: Run) -> None:
        """Note that the job is not this attempt's any more."""
        self._leases.give_up(run)
        if run.abandon("lease lost"):
            self._completer.lost(run)

    def _came_late(self, run: Run) -> None:
        """Say that a handler has come back after it was given up. One whose job was cancelled was told to."""
        level = logging.DEBUG if run.abandoned == "cancelled" else logging.WARNING
        text = "%s: its handler has come back after it was given up (%s)"
        logger.log(level, text, run, run.abandoned, extra=run.extra())
        self._completer.returned()

    def _landed(self, run: Run) -> bool:
        """Whether an attempt's COMMIT took effect, read under the row's lock; if not, its lease begins anew.

        While the lease lasts, as it is now: it may be renewed as long as the row is locked. If that is still so then
        (the commit hangs), the reaper decides later.
        """
        end = run.lease_ends
        while (left := end - time.monotonic()) > 0:
            if not self._fate_lookups.acquire(timeout=left):
                break
            statements = self._database.statements
            asked = time.monotonic()
            try:
                with self._database.transaction() as connection:
                    limit = f"{max(1, int((end - asked) * 1000))}ms"
                    connection.execute(statements.limit_lock, {"limit": limit})
                    row = connection.execute(statements.fate, {"job_id": run.id}).one_or_none()
                    status = row.status if row is not None and row.lease_token == run.token else None
                    if status is JobStatus.RUNNING:
                        # While the attempt had its row locked the heartbeat could not.
                        held = {"ids": [run.id], "tokens": [run.token], "lease": self._lease}
                        connection.execute(statements.renew, held)
            except sa.exc.SQLAlchemyError:
                failed = True
            else:
                failed = False
            finally:
                self._fate_lookups.release()
            if failed:
                time.sleep(min(left, FATE_PAUSE))
                continue
            if status is None:
                self._leases.give_up(run)
                if run.abandon("lease lost"):
                    self._completer.fenced(run)
            elif status is JobStatus.RUNNING:
                run.lease_ends = asked + self._lease.total_seconds()
            return status is JobStatus.DONE
        self.lost(run)
        return False
