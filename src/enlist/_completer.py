"""Writes how attempts ended, many in a statement, on a connection apart from the handlers'."""

from __future__ import annotations

import datetime as dt
import math
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from sqlalchemy.exc import DBAPIError, InterfaceError

from enlist._driver import brief, sqlstate
from enlist._log import Log
from enlist._loop import Loop
from enlist.events import EventName, Events
from enlist.models import JobStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from enlist._database import Database
    from enlist._leases import Leases
    from enlist._slots import Run

__all__ = ["Completer", "Settlement", "parameters_of"]

logger = Log("enlist.worker")

T = TypeVar("T")

OUTAGES: Final = ("08", "25006", "53", "57P", "58")
"""How the SQLSTATEs begin of errors that are about no row."""

WAITS: Final = ("40", "55", "57")
"""How those begin that are about no row mostly: a deadlock, a lock on the table, a statement's time. But a trigger may
raise them for one: so all is tried again together, :data:`TRIES` times."""

TRIES: Final = 5

REFUSALS: Final = ("22", "23", "44", "P0")
"""How those begin that say of a row that it will never be written so, by a constraint or a trigger. All others may
pass: a right that is revoked for a moment, a table that is being changed."""

TOLD_WHEN_WRITTEN: Final = frozenset({"cancelled", "released", "stopped", "timed out"})
"""Why attempts are given up whose ending is told when it is written."""

BATCH: Final = 500
MOST_UNWRITTEN: Final = 2000
"""With so many endings to be written nothing more is claimed: handlers would only run further ahead of their rows."""

IDLE_SECONDS: Final = 1.0
LOCKED_SECONDS: Final = 0.02
LONGEST_LOCKED_SECONDS: Final = 1.0
"""How long to wait before another try at a row that somebody has locked: at first, and at most."""

LONGEST_REFUSED_SECONDS: Final = 10.0
"""The same for one that the server refuses to write, maybe for a while only."""


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
    exception: BaseException | None = None
    """What the handler raised, for the listeners."""

    @property
    def event(self) -> EventName:
        """What is told of it."""
        if self.status is not JobStatus.QUEUED:
            return EventName.DEAD if self.status is JobStatus.DEAD else EventName.CANCELLED
        if not self.returned:
            return EventName.RETRIED
        return EventName.RELEASED if self.exception is None else EventName.SNOOZED


class Completer:
    """Takes endings from the executor and writes them as soon as the statement before is back.

    One in an idle worker is written at once; under load they gather while a statement is under way. What cannot be
    written is tried again until it can be: meanwhile the leases are renewed, and the fence decides.
    """

    def __init__(
        self,
        database: Database,
        leases: Leases,
        due_in: Callable[[float, str], None],
        freed: Callable[[], None],
        events: Events | None = None,
    ) -> None:
        """Make it.

        :param due_in: told in how many seconds a job is due again, and in which queue.
        :param freed: told that a key has a slot free.
        """
        self._database = database
        self._leases = leases
        self._due_in = due_in
        self._freed = freed
        self._events = events or Events()
        self._news: list[tuple[EventName, Run, Settlement | None, str | None]] = []
        """What was written and is not yet told to the listeners, and why it was not as it should have been."""
        self._done: deque[Run] = deque()
        self._settled: deque[Settlement] = deque()
        self._fenced: deque[Run] = deque()
        self._writing = threading.Lock()
        self._locked: list[tuple[float, deque[Any], Any]] = []
        """The endings whose rows somebody has locked: when each is tried again, and the line that it is from."""
        self._pauses: weakref.WeakKeyDictionary[Run, float] = weakref.WeakKeyDictionary()
        self._said: weakref.WeakSet[Run] = weakref.WeakSet()
        """Those of which it was said that their ending is refused for now."""
        self._try_all = False
        self._failed = 0
        """How often in a row all that was to be written could not be."""
        self.loop = Loop("completion", self.step, IDLE_SECONDS)

    def complete(self, run: Run) -> None:
        """Set a job done whose handler had nothing to commit."""
        run.ended = True
        run.finished = run.finished or time.monotonic()
        self._done.append(run)
        self.loop.wake()

    def settle(self, settlement: Settlement) -> None:
        """Write another ending."""
        run = settlement.run
        run.ended = True
        run.finished = run.finished or time.monotonic()
        self._settled.append(settlement)
        self.loop.wake()

    def release(self, run: Run, delay: dt.timedelta | None = None) -> None:
        """Give a job back that was never started, its attempt with it."""
        self.settle(Settlement(run, JobStatus.QUEUED, delay, returned=1))

    def returned(self) -> None:
        """Try at once what was locked: a handler has come back that was given up, and its row's lock is gone."""
        self._try_all = True
        self.loop.wake()

    def fenced(self, run: Run) -> None:
        """Find out why an attempt could not commit, and say so. To be called when it has been abandoned."""
        self._fenced.append(run)
        self.loop.wake()

    def cancelled(self, run: Run) -> None:
        """Say, once for a run, that its job was cancelled while it ran. To be called when that is written."""
        logger.info(
            "%s was cancelled: nothing of this attempt is committed", run, extra=run.extra(event=EventName.CANCELLED)
        )
        self._events.emit(EventName.CANCELLED, run)

    def lost(self, run: Run, why: str = "its lease was lost") -> None:
        """Say, once for a run, that its attempt was for nothing. To be called when it has been abandoned."""
        logger.warning(
            "%s: %s, nothing of this attempt is committed", run, why, extra=run.extra(event=EventName.LEASE_LOST)
        )
        self._events.emit(EventName.LEASE_LOST, run, error=why)

    @property
    def is_behind(self) -> bool:
        """Whether it has so much to write that nothing more should be claimed."""
        return len(self._done) + len(self._settled) + len(self._locked) > MOST_UNWRITTEN

    @property
    def empty(self) -> bool:
        """Whether all is written."""
        if self._done or self._settled or self._locked:
            return False
        with self._writing:
            return not (self._done or self._settled or self._locked)

    def step(self) -> float:
        try:
            with self._writing:
                self._take_up()
                try:
                    self._write_done()
                finally:  # the two know nothing of each other's troubles
                    self._write_settled()
            self._explain()
        except Exception:
            self._failed += 1
            raise
        finally:
            self._tell()
        self._failed = 0
        if self._done or self._settled or self._fenced:
            return 0.0
        now = time.monotonic()
        return max(0.0, min((due - now for due, *_ in self._locked), default=IDLE_SECONDS))

    def _take_up(self) -> None:
        """Try again what was locked and is due."""
        now = math.inf if self._try_all else time.monotonic()
        self._try_all = False
        locked, self._locked = self._locked, []
        for due, line, item in locked:
            if due <= now:
                line.append(item)
            else:
                self._locked.append((due, line, item))

    def _put_off(self, run: Run, line: deque[Any], item: Any, longest: float = LONGEST_LOCKED_SECONDS) -> None:
        """Try later: somebody has locked the row, for a moment or for as long as a handler works."""
        pause = min(self._pauses.get(run, LOCKED_SECONDS / 2) * 2, longest)
        self._pauses[run] = pause
        self._locked.append((time.monotonic() + pause, line, item))

    def _explain(self) -> None:
        """Say why attempts could not commit."""
        runs = _first(self._fenced)
        states = self._states(runs)
        _remove(self._fenced, len(runs))
        for run in runs:
            if states.get(run.id) == (run.token + 1, JobStatus.CANCELLED):
                self.cancelled(run)
            else:
                self.lost(run)

    def _tell(self) -> None:
        """Tell what was written. Not under the lock: a listener may look at the worker, or stop it."""
        news, self._news = self._news, []
        for name, run, settlement, why in news:
            if settlement is None:
                self._events.emit(name, run, error=why)
            elif run.abandoned == "cancelled" and name is EventName.CANCELLED:
                self.cancelled(run)
            else:
                error = settlement.error if settlement.exception is None else None
                self._events.emit(name, run, delay=settlement.delay, exception=settlement.exception, error=error)

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
        if len(written) == len(runs):
            _remove(self._done, len(runs))
            self._are_done(runs)
            self._tell_freed(runs)
            return
        states = self._states([run for run in runs if run.id not in written and run.id not in refused])
        _remove(self._done, len(runs))
        for run in runs:
            token, status = states.get(run.id, (None, None))
            if run.id in refused:
                self._refused(run, refused[run.id], self._done, run)
            # Done with our token: written before, and the answer was lost.
            elif run.id in written or (token == run.token and status is JobStatus.DONE):
                self._are_done([run])
            elif token == run.token:
                self._put_off(run, self._done, run)
            else:
                self._lost(run)
        self._tell_freed(runs)

    def _are_done(self, runs: list[Run]) -> None:
        self._leases.drop(*runs)
        self._news += [(EventName.DONE, run, None, None) for run in runs]

    def _tell_freed(self, runs: Iterable[Run]) -> None:
        if any(run.keyed for run in runs):
            self._freed()

    def _write_settled(self) -> None:
        batch = _first(self._settled)
        if not batch:
            return
        written, refused = self._write(self._settle, batch)
        states = self._states([one.run for one in batch if one.run.id not in written and one.run.id not in refused])
        _remove(self._settled, len(batch))
        for settlement in batch:
            run = settlement.run
            token, status = states.get(run.id, (None, None))
            if run.id in written or (token == run.token + 1 and status is settlement.status):
                self._leases.drop(run)
                self._news.append((settlement.event, run, settlement, None))
                if settlement.status is JobStatus.QUEUED:
                    self._due_in((settlement.delay or dt.timedelta(0)).total_seconds(), run.queue)
            elif run.id in refused:
                self._refused(run, refused[run.id], self._settled, settlement)
            elif token == run.token and status is JobStatus.DONE:
                # Given up at the very moment in which its COMMIT went through.
                self._leases.drop(run)
                self._news.append((EventName.DONE, run, None, None))
            elif token == run.token:
                self._put_off(run, self._settled, settlement)
            else:
                self._lost(run)
        self._tell_freed(settlement.run for settlement in batch)

    def _lost(self, run: Run) -> None:
        self._leases.drop(run)
        # One that was given up for another reason has told nothing yet: its ending is the one that was refused.
        if run.abandon("lease lost") or run.abandoned in TOLD_WHEN_WRITTEN:
            self._fenced.append(run)

    def _refused(self, run: Run, error: DBAPIError, line: deque[Any], item: Any) -> None:
        """Deal with an ending that the server refuses, say by a trigger: try again later, if that may be of use.

        Until then its lease is renewed: it would only be run again, to the same end.
        """
        extra = run.extra()
        if not (sqlstate(error) or "").startswith(REFUSALS):
            if run not in self._said:
                self._said.add(run)
                text = "%s: the server refuses how it ended for now, that is tried again: %s"
                logger.warning(text, run, brief(error), extra=extra)
            self._put_off(run, line, item, LONGEST_REFUSED_SECONDS)
            return
        self._leases.give_up(run)
        why = f"the server refuses how it ended, it is left to the end of its lease: {brief(error)}"
        logger.error("%s: %s", run, why, extra={**extra, "event": EventName.LEASE_LOST})
        self._news.append((EventName.LEASE_LOST, run, None, why))

    def _write(self, write: Callable[[list[T]], set[object]], items: list[T]) -> tuple[set[object], dict[object, Any]]:
        """Write endings; the ids of the jobs that were, and the errors by the ids of those that the server refuses.

        Those are found out one by one, so that they don't hold up the others'. If it is all of several, it is an error
        about no row, which is raised, and all are tried again.
        """
        try:
            return write(items), {}
        except DBAPIError as error:
            lost = isinstance(error, InterfaceError) or error.connection_invalidated
            state = sqlstate(error) or ""
            if lost or not state or state.startswith(OUTAGES) or (state.startswith(WAITS) and self._failed < TRIES):
                raise
            if len(items) == 1:
                (item,) = items
                return set(), {(item.run if isinstance(item, Settlement) else cast("Run", item)).id: error}
            written: set[object] = set()
            refused: dict[object, Any] = {}
            for item in items:
                some, others = self._write(write, [item])
                written |= some
                refused |= others
            if not written and not any((sqlstate(one) or "").startswith(REFUSALS) for one in refused.values()):
                raise
            return written, refused

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
        ids = [run.id for run in runs]
        parameters = {"ids": ids, "tokens": [run.token for run in runs]}
        rows = self._database.write(self._database.statements.complete, parameters, len(runs))
        return set(ids) if rows is None else {row.id for row in rows}

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


def _first(items: deque[T]) -> list[T]:
    return [items[n] for n in range(min(len(items), BATCH))]


def _remove(items: deque[Any], count: int) -> None:
    for _ in range(count):
        items.popleft()
