"""Writes how attempts ended, many in a statement, on a connection apart from the handlers'."""

from __future__ import annotations

import datetime as dt
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from sqlalchemy.exc import DataError

from enlist._loop import Loop
from enlist.models import JobStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from enlist._database import Database
    from enlist._leases import Leases
    from enlist._slots import Run

__all__ = ["Completer", "Settlement"]

logger = logging.getLogger("enlist.worker")

T = TypeVar("T")

BATCH: Final = 500
IDLE_SECONDS: Final = 1.0
LOCKED_SECONDS: Final = 0.02
"""How long to wait before another try at a row that somebody has locked."""


@dataclass(frozen=True, slots=True)
class Settlement:
    """How an attempt ended other than done."""

    run: Run
    status: JobStatus
    """What the job becomes: queued, dead or cancelled."""
    delay: dt.timedelta | None = None
    """When a queued job is due, from the server's now; None: as before."""
    returned: int = 0
    """1 if the attempt does not count."""
    error: str | None = None
    """The job's last error, if this is one."""
    entry: str | None = None
    """The same for the list of errors, as JSON."""


class Completer:
    """Takes endings from the executor and writes them as soon as the statement before is back.

    One in an idle worker is written at once; under load they gather while a statement is under way. What cannot be
    written is tried again until it can be: meanwhile the leases are renewed, and the fence decides.
    """

    def __init__(self, database: Database, leases: Leases, due_in: Callable[[float], None]) -> None:
        self._database = database
        self._leases = leases
        self._due_in = due_in
        self._done: deque[Run] = deque()
        self._settled: deque[Settlement] = deque()
        self._writing = threading.Lock()
        self._locked = False
        self.loop = Loop("completion", self.step, IDLE_SECONDS)

    def complete(self, run: Run) -> None:
        """Set a job done whose handler had nothing to commit."""
        run.ended = True
        self._done.append(run)
        self.loop.wake()

    def settle(self, settlement: Settlement) -> None:
        """Write another ending."""
        settlement.run.ended = True
        self._settled.append(settlement)
        self.loop.wake()

    def release(self, run: Run) -> None:
        """Give a job back that was never started, its attempt with it."""
        self.settle(Settlement(run, JobStatus.QUEUED, returned=1))

    @property
    def empty(self) -> bool:
        """Whether all is written."""
        if self._done or self._settled:
            return False
        with self._writing:
            return not (self._done or self._settled)

    def step(self) -> float:
        with self._writing:
            self._locked = False
            self._write_done()
            self._write_settled()
        if self._locked:
            return LOCKED_SECONDS
        return 0.0 if self._done or self._settled else IDLE_SECONDS

    def flush(self, timeout: float) -> bool:
        """Wait until all is written; return whether it is, after at most ``timeout`` seconds."""
        end = time.monotonic() + timeout
        while not self.empty:
            if time.monotonic() > end:
                return False
            self.loop.wake()
            time.sleep(0.002)
        return True

    def _write_done(self) -> None:
        runs = _first(self._done)
        if not runs:
            return
        rows = self._database.execute(
            self._database.statements.complete,
            {"ids": [run.id for run in runs], "tokens": [run.token for run in runs]},
        )
        _remove(self._done, len(runs))
        written = {row.id for row in rows}
        locked = self._still_ours([run for run in runs if run.id not in written])
        self._done += locked
        for run in runs:
            if run in locked:
                continue
            self._leases.drop(run)
            if run.id not in written and run.abandon("lease lost"):
                log_lost(run)

    def _write_settled(self) -> None:
        batch = _first(self._settled)
        if not batch:
            return
        try:
            written = self._settle(batch)
        except DataError:
            # The server refuses some error's text, though it was made storable: the endings matter more.
            logger.exception("the text of an error could not be stored; the endings are written without")
            written = self._settle([Settlement(s.run, s.status, s.delay, s.returned) for s in batch])
        _remove(self._settled, len(batch))
        locked = self._still_ours([s.run for s in batch if s.run.id not in written])
        self._settled += [settlement for settlement in batch if settlement.run in locked]
        for settlement in batch:
            if settlement.run in locked:
                continue
            self._leases.drop(settlement.run)
            if settlement.run.id not in written:
                if settlement.run.abandon("lease lost"):
                    log_lost(settlement.run)
            elif settlement.status is JobStatus.QUEUED:
                self._due_in((settlement.delay or dt.timedelta(0)).total_seconds())

    def _still_ours(self, runs: list[Run]) -> list[Run]:
        """Which of the runs that were not written hold their jobs: somebody has locked the rows, it is tried again.

        It may be the handler itself, whose time is over and which still holds its row's lock. Waiting for it would
        hold up the endings of all others.
        """
        if not runs:
            return []
        rows = self._database.execute(self._database.statements.holders_of, {"ids": [run.id for run in runs]})
        tokens = {row.id: row.lease_token for row in rows}
        locked = [run for run in runs if tokens.get(run.id) == run.token]
        self._locked = self._locked or bool(locked)
        return locked

    def _settle(self, batch: list[Settlement]) -> set[object]:
        rows = self._database.execute(
            self._database.statements.settle,
            {
                "ids": [s.run.id for s in batch],
                "tokens": [s.run.token for s in batch],
                "statuses": [s.status.value for s in batch],
                "delays": [s.delay for s in batch],
                "returned": [s.returned for s in batch],
                "errors": [s.error for s in batch],
                "entries": [s.entry for s in batch],
            },
        )
        return {row.id for row in rows}


def log_lost(run: Run) -> None:
    """Say that an attempt's work was for nothing."""
    logger.warning("%s: its lease was lost, nothing of this attempt is committed", run, extra={"job_id": str(run.id)})


def _first(items: deque[T]) -> list[T]:
    return [items[n] for n in range(min(len(items), BATCH))]


def _remove(items: deque[Any], count: int) -> None:
    for _ in range(count):
        items.popleft()
