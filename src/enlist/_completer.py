"""Writes how attempts ended, many in a statement, on a connection apart from the handlers'."""

from __future__ import annotations

import datetime as dt
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError

from enlist._loop import Loop
from enlist.models import JobStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from enlist._database import Database
    from enlist._leases import Leases
    from enlist._slots import Run

__all__ = ["Completer", "Settlement", "log_lost", "parameters_of"]

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

    def __init__(
        self, database: Database, leases: Leases, due_in: Callable[[float], None], freed: Callable[[], None]
    ) -> None:
        """:param due_in: told in how many seconds a job is due again; :param freed: told that a key has a slot free."""
        self._database = database
        self._leases = leases
        self._due_in = due_in
        self._freed = freed
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
        written, refused = self._write(self._complete, runs)
        states = self._states([run for run in runs if run.id not in written and run not in refused])
        _remove(self._done, len(runs))
        for run in runs:
            token, status = states.get(run.id, (None, None))
            # Done with our token: written before, and the answer was lost.
            if run.id in written or run in refused or (token == run.token and status is JobStatus.DONE):
                self._leases.drop(run)
            elif token == run.token:
                self._done.append(run)
                self._locked = True
            else:
                self._lost(run)
        if any(run.keyed for run in runs):
            self._freed()

    def _write_settled(self) -> None:
        batch = _first(self._settled)
        if not batch:
            return
        written, refused = self._write(self._settle, batch)
        states = self._states([one.run for one in batch if one.run.id not in written and one not in refused])
        _remove(self._settled, len(batch))
        for settlement in batch:
            run = settlement.run
            token, status = states.get(run.id, (None, None))
            if run.id in written or (token == run.token + 1 and status is settlement.status):
                self._leases.drop(run)
                if settlement.status is JobStatus.QUEUED:
                    self._due_in((settlement.delay or dt.timedelta(0)).total_seconds())
            elif settlement in refused:
                self._leases.drop(run)
            elif token == run.token:
                self._settled.append(settlement)
                self._locked = True
            else:
                self._lost(run)
        if any(settlement.run.keyed for settlement in batch):
            self._freed()

    def _lost(self, run: Run) -> None:
        self._leases.drop(run)
        if run.abandon("lease lost"):
            log_lost(run)

    def _write(self, write: Callable[[list[T]], set[object]], items: list[T]) -> tuple[set[object], list[T]]:
        """Write endings; the ids of the jobs that were, and the endings that the server refuses, say by a trigger.

        Those are found out one by one, so that they don't hold up the others'; their leases end by themselves.
        """
        try:
            return write(items), []
        except DBAPIError as error:
            if isinstance(error, (OperationalError, InterfaceError)) or error.connection_invalidated:
                raise
            if len(items) == 1:
                (item,) = items
                run = item.run if isinstance(item, Settlement) else cast("Run", item)
                logger.exception("%s: the server refuses how it ended, it is left to the end of its lease", run)
                return set(), items
        parts = [self._write(write, [item]) for item in items]
        return set().union(*(written for written, _ in parts)), [item for _, refused in parts for item in refused]

    def _states(self, runs: list[Run]) -> dict[object, tuple[int, JobStatus]]:
        """What the jobs are, (token, status), whose endings were not written.

        Still ours and running: somebody has locked the row, and it is tried again. That may be the handler itself,
        whose time is over and which still holds its row's lock; waiting for it would hold up the endings of others.
        """
        if not runs:
            return {}
        rows = self._database.execute(self._database.statements.states, {"ids": [run.id for run in runs]})
        return {row.id: (row.lease_token, row.status) for row in rows}

    def _complete(self, runs: list[Run]) -> set[object]:
        rows = self._database.execute(
            self._database.statements.complete,
            {"ids": [run.id for run in runs], "tokens": [run.token for run in runs]},
        )
        return {row.id for row in rows}

    def _settle(self, batch: list[Settlement]) -> set[object]:
        rows = self._database.execute(self._database.statements.settle, parameters_of(batch))
        return {row.id for row in rows}


def parameters_of(batch: list[Settlement]) -> dict[str, list[Any]]:
    """The parameters of the statement that writes endings."""
    return {
        "ids": [s.run.id for s in batch],
        "tokens": [s.run.token for s in batch],
        "statuses": [s.status.value for s in batch],
        "delays": [s.delay for s in batch],
        "returned": [s.returned for s in batch],
        "errors": [s.error for s in batch],
        "entries": [s.entry for s in batch],
    }


def log_lost(run: Run) -> None:
    """Say that an attempt's work was for nothing."""
    logger.warning("%s: its lease was lost, nothing of this attempt is committed", run, extra={"job_id": str(run.id)})


def _first(items: deque[T]) -> list[T]:
    return [items[n] for n in range(min(len(items), BATCH))]


def _remove(items: deque[Any], count: int) -> None:
    for _ in range(count):
        items.popleft()
