"""Claims jobs for free slots: asks, sorts, hands over. Polling is the truth; a wake makes it quick.

Jobs without a concurrency key are one statement. Those with one are looked at first, so that all of a queue have their
places in one line; then, with a lock on each key, they are claimed.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from itertools import takewhile
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from enlist._driver import brief
from enlist._due import DueTimes
from enlist._log import Log
from enlist._loop import Loop
from enlist._marks import Marks
from enlist._rates import Rates
from enlist._slots import Demand, Run, Slots
from enlist._statements import ahead, keys

if TYPE_CHECKING:
    import datetime as dt
    import uuid
    from collections.abc import Callable, Mapping, Sequence

    import sqlalchemy as sa

    from enlist._database import Database
    from enlist._leases import Leases
    from enlist._others import Others
    from enlist._rates import RateLimit
    from enlist.handlers import HandlerRegistry

__all__ = ["Claimer"]

SOON_SECONDS: Final = 0.005
"""When to look again at keys that somebody had locked, or go on to others."""

BEHIND_SECONDS: Final = 0.02
"""When to look again whether there are fewer endings to be written."""

MISSED_SECONDS: Final = 0.1
"""How long a job that could not be taken is passed by at first; twice as long each time, up to a poll interval."""

LOOKS_IN_VAIN: Final = 10
"""So many looks at keys in a row, none with a job in turn, are made without a pause to speak of."""

HANDLERS_FIRST_SECONDS: Final = 0.001
"""A claim that follows at once on one that brought jobs waits for so long: their handlers begin 0.4 ms sooner than if
it took the interpreter from them. Mostly it is a commit of this process that wakes twice, directly and by NOTIFY."""

logger = Log("enlist.worker")

LONGEST_WAIT_FOR_SLOT: Final = 0.5
"""Seconds after which a prefetched job that still waits is given back."""


class Claimer:
    """Keeps a worker's slots filled from the database."""

    def __init__(
        self,
        database: Database,
        handlers: HandlerRegistry,
        leases: Leases,
        *,
        worker: str,
        lease: dt.timedelta,
        poll_interval: float,
        give_back: Callable[[Run], None],
        others: Others | None = None,
        rate_limits: Mapping[str, RateLimit] = MappingProxyType({}),
    ) -> None:
        self._database = database
        self._handlers = handlers
        self._kinds = list(handlers.kinds)
        self._leases = leases
        self._rates = Rates(rate_limits, database)
        self._marks = Marks()
        self._any_keyed = False
        """Whether the queues have jobs with a concurrency key: then these are looked at before each claim."""
        self._after_keys: dict[str, str] = {}
        """By queue, the key where a look stopped: the next goes on there."""
        self._in_vain = 0
        """How many claims in a row have brought nothing."""
        self._careful = True
        """Whether the last claim might take careful jobs, and passed by none."""
        self._missed: dict[uuid.UUID, tuple[float, float]] = {}
        """Jobs with a key that were seen and could not be taken: until when they are passed by, and for how long."""
        self._left: set[str] = set()
        """Queues in which the last claim has seen jobs with a key that there was no free slot for."""
        self._said_behind = False
        self._limited = False
        """Whether the last claim brought less for a rate's sake."""
        self._worker = worker
        self._lease = lease
        self._poll_interval = poll_interval
        self._give_back = give_back
        self.slots: Slots
        self.loop = Loop("claim", self.step, poll_interval)
        self._due = DueTimes(poll_interval)
        self._others = others
        self._keyed: set[Run] = set()
        """The jobs in hand that have a concurrency key."""
        self._again = math.inf
        """In how many seconds to claim again, if nothing makes it come sooner."""
        self._unanswered = False
        """Whether a claim may have been carried out whose answer is lost."""
        self.drained = threading.Event()
        """Set when a claim found nothing while nothing was running."""
        self.all_known: Callable[[], bool] = lambda: True
        """Whether no job is about to be queued again: by its ending here, or since its worker died."""
        self.is_behind: Callable[[], bool] = lambda: False
        """Whether endings cannot be written as quickly as jobs end."""

    def wake(self) -> None:
        """Claim now."""
        self.loop.wake()

    def due_in(self, seconds: float, queue: str) -> None:
        """Claim again then: this worker has put a job back into a queue. What it cannot take then is for others."""
        if seconds <= 0:  # given back, to its old place
            self._marks.want_whole()
        if self._due.add(seconds, queue):
            self.loop.wake()

    def hand_over(self) -> None:
        """Leave what has become ready to other workers: there will be no more claims here."""
        if self._others is not None:
            self._others.wake(self._due.take_all(), keys=self._freed_keys())

    def step(self) -> float:
        """Claim what the free slots can take; return the seconds until the next claim."""
        wait = self._step()
        # However seldom the queues are looked at: what waits for a slot is given back in time.
        return min(wait, LONGEST_WAIT_FOR_SLOT) if self.slots.waiting else wait

    def _step(self) -> float:
        for run in self.slots.take_back(LONGEST_WAIT_FOR_SLOT):
            self._give_back(run)
        self.give_back_unheld()
        if self.is_behind():
            if not self._said_behind:
                logger.warning("how jobs have ended cannot be written as quickly as they end: nothing more is claimed")
            self._said_behind = True
            return BEHIND_SECONDS
        self._said_behind = False
        came, freed = self._due.take(), self._freed_keys()
        asked = self.slots.demands()
        demands = self._rates.open(asked)
        if not demands:
            self._leave_to_others(came, freed)
            return self._next_wait()
        nothing_ran = self.slots.idle and self.all_known()
        self._left.clear()
        try:
            runs = self.claim(demands)
        except Exception:
            self._leave_to_others(came, freed)
            raise
        taken = Counter(run.queue for run in runs)
        if self._careful:  # where fewer came than were asked for, nothing is left
            came -= {demand.queue for demand in demands if taken[demand.queue] < demand.number}
        self._leave_to_others(came, freed - {run.concurrency_key for run in runs} if freed else freed)
        if refused := self.slots.place(runs, demands):
            for run in refused:
                self._give_back(run)
            return self._poll_interval  # not at once: it would be the same
        self.slots.leave(self._left)
        if runs:
            # Short of what was asked: the rest of the line may be held up by a careful job.
            full = len(runs) >= sum(demand.number for demand in demands)
            if not full and self.loop.woken:
                time.sleep(HANDLERS_FIRST_SECONDS)
            return 0.0 if full or any(run.careful for run in runs) else self._next_wait()
        if nothing_ran and self._again == math.inf and not self._limited and len(demands) == len(asked):
            now = time.monotonic()
            # What was missed once may be free in a moment; what is missed again somebody holds on to.
            if not any(until > now and pause <= MISSED_SECONDS for until, pause in self._missed.values()):
                self.drained.set()
        return self._next_wait()

    def _freed_keys(self) -> set[str]:
        """The keys of the jobs that have ended since it was last asked for."""
        if not self._keyed:
            return set()
        held = set(self._leases.all())
        ended = self._keyed - held
        self._keyed -= ended
        return {run.concurrency_key for run in ended if run.concurrency_key is not None}

    def _leave_to_others(self, queues: set[str], keys: set[str]) -> None:
        if self._others is not None and (queues or keys):
            self._others.wake(queues, keys=keys)

    def give_back_unheld(self) -> None:
        """After a claim that failed: it may have been carried out, its answer lost."""
        if not self._unanswered:
            return
        # Not those that were given up: nobody is to be told that they never started.
        held = self._leases.begun()
        rows = self._database.execute(self._database.statements.disown, {"worker": self._worker, "ids": held})
        if rows:
            logger.warning("%d jobs of a claim whose answer was lost are given back", len(rows))
        self._unanswered = False

    def _again_in(self, seconds: float) -> None:
        """Have the next claim made then, if nothing else makes it come sooner."""
        self._again = min(self._again, seconds)

    def _next_wait(self) -> float:
        again, self._again = self._again, math.inf
        opens = self._rates.seconds_to_open()
        now = time.monotonic()
        # Those that were passed by are looked at again, together: nobody may tell that they can be taken now.
        passed_by = min((until - now for until, _ in self._missed.values() if until > now), default=math.inf)
        passed_by = max(passed_by, 2 * MISSED_SECONDS)
        waits = [self._poll_interval, again, passed_by, self._due.seconds(), math.inf if opens is None else opens]
        return max(0.0, min(waits))

    def claim(self, demands: list[Demand]) -> list[Run]:
        """Claim jobs, in the order in which they are to start."""
        careful = self.slots.careful_free and any(demand.free for demand in demands)
        if careful and not self._careful:
            self._marks.want_whole()  # careful jobs were passed by
        self._careful = careful
        taken: list[Run] = []
        try:
            whole = self._marks.whole_next()
            self._claim(taken, demands, careful=careful, whole=whole, all_asked=True)
            if not whole and (rest := _less(demands, taken)):
                # What lies before the marks: a job committed late, or with an earlier due time.
                careful = careful and not any(run.careful for run in taken)
                self._claim(taken, rest, careful=careful, whole=True, all_asked=len(rest) == len(demands))
            self._limited = self._rates.close([demand.queue for demand in _less(demands, taken)])
        except Exception as error:
            if not taken:
                raise
            # What has been claimed already must not be lost with it.
            logger.warning("no more jobs could be claimed: %s", brief(error))
        if any(run.careful for run in taken):
            self._careful = False  # others were passed by
        self._in_vain = 0 if taken else self._in_vain + 1
        taken.sort(key=_place)
        return taken

    def _claim(self, taken: list[Run], demands: list[Demand], *, careful: bool, whole: bool, all_asked: bool) -> None:
        """Claim once, what comes after the marks or of all, and add it to what is taken.

        :param all_asked: whether it is for all queues that have slots free: what it takes time tells of the marks.
        """
        self._unanswered = True
        if whole and all_asked:
            self._marks.begin_whole()
        began = time.monotonic()
        parameters = {
            **self._marks.parameters(whole=whole),
            **self._rates.parameters(demand.queue for demand in demands),
            "queues": [demand.queue for demand in demands],
            "limits": [demand.number for demand in demands],
            "kinds": self._kinds,
            "careful": careful,
            "worker": self._worker,
            "lease": self._lease,
        }
        looks = self._any_keyed or self._marks.any_keyed
        seen = self._look(parameters) if looks else []
        plain = self._claim_plain(parameters, seen, look_first=not looks)
        if plain is None:
            seen = self._look(parameters)
            plain = self._claim_plain(parameters, seen, look_first=False) or []
        taken += plain
        if all_asked:
            self._marks.end(whole=whole, seconds=time.monotonic() - began, jobs=len(plain))
        self._marks.note(plain, keyed=False)
        if seen:
            taken += self._claim_keyed(seen, plain, demands, parameters)
        self._unanswered = False

    def _look(self, parameters: dict[str, Any]) -> list[sa.Row[Any]]:
        """See which jobs with a concurrency key are next, in the order of their places."""
        began = time.monotonic()
        queues = parameters["queues"]
        passed_by = {job for job, (until, _) in self._missed.items() if until > began}
        look = {
            "limits": [limit + len(passed_by) for limit in parameters["limits"]],
            "after_keys": [self._after_keys.get(queue) for queue in queues],
        }
        rows = self._database.execute(self._database.statements.look, {**parameters, **look})
        seconds = time.monotonic() - began
        self._due.tell((row.due for row in rows if row.part == "later"), began)
        for queue in queues:
            self._after_keys.pop(queue, None)
        for row in rows:
            if row.part == "more":
                self._after_keys[row.queue] = row.concurrency_key
                # On with the keys. If that goes on and on, in a fifth of the time: most have nothing due, it seems.
                self._again_in(SOON_SECONDS if self._in_vain < LOOKS_IN_VAIN else 4 * seconds)
        if not self._marks.in_use:
            self._any_keyed = any(row.part != "later" for row in rows)
        return sorted((row for row in rows if row.part == "job" and row.id not in passed_by), key=_place)

    def _miss(self, jobs: list[sa.Row[Any]]) -> None:
        """Pass jobs by for a while: another worker has just taken them, or somebody has locked them or their key.

        They must neither keep their places from others nor make a hot loop.
        """
        now = time.monotonic()
        known = {job: (until, pause) for job, (until, pause) in self._missed.items() if until + pause > now}
        for row in jobs:
            _, pause = known.get(row.id, (0.0, MISSED_SECONDS / 2))
            pause = min(pause * 2, self._poll_interval)
            known[row.id] = (now + pause, pause)
        if jobs:
            self._again_in(SOON_SECONDS)  # at what stands behind them
        self._missed = known

    def _claim_plain(
        self, parameters: dict[str, Any], seen: list[sa.Row[Any]], *, look_first: bool
    ) -> list[Run] | None:
        """Claim jobs without a concurrency key; None if there are others, which are to be looked at first."""
        statements = self._database.statements
        statement = statements.claim_among if seen or self._marks.in_use else statements.claim
        if "rate_queues" in parameters:
            statement = statements.claim_limited
        asked = time.monotonic()  # before the claim is sent: the lease may begin as early as that
        rows = self._database.execute(statement, {**parameters, **ahead(seen), "look_first": look_first})
        jobs = self._rates.note(rows, asked)
        told = [row for row in rows if row[0] is None] if len(jobs) < len(rows) else []
        if any(row.kind == "keyed" for row in told):
            return None
        self._due.tell((row.due for row in told if row.kind == "later"), asked)
        return self._hold(jobs, asked)

    def _claim_keyed(
        self, seen: list[sa.Row[Any]], plain: list[Run], demands: list[Demand], parameters: dict[str, Any]
    ) -> list[Run]:
        """Claim jobs with a concurrency key, for free slots only: one that waits here would hold its key idly."""
        limits = {demand.queue: demand.free for demand in demands}
        places: Counter[str] = Counter()
        placed: list[sa.Row[Any]] = []
        line: list[Run | sa.Row[Any]] = [*seen, *plain]
        for job in sorted(line, key=_place):
            places[job.queue] += 1
            if places[job.queue] > limits[job.queue]:
                if not isinstance(job, Run):
                    self._left.add(job.queue)
            elif isinstance(job, Run):
                limits[job.queue] -= 1
                places[job.queue] -= 1
            else:
                placed.append(job)
        if not placed:
            return []
        parameters = {
            **parameters,
            "queues": list(limits),
            "limits": list(limits.values()),
            "careful": parameters["careful"] and not any(run.careful for run in plain),
        }
        statements = self._database.statements
        asked = time.monotonic()
        with self._database.transaction() as connection:
            wanted = list({row.concurrency_key for row in placed})
            locked = set(connection.execute(statements.lock_keys, {"keys": wanted}).scalars())
            if not locked:
                self._miss(placed)
                return []
            rows: Sequence[sa.Row[Any]] = connection.execute(
                statements.claim_keyed_limited if "rate_queues" in parameters else statements.claim_keyed,
                {**parameters, **keys(row for row in placed if row.concurrency_key in locked)},
            ).all()
        rows = self._rates.note(rows, asked)
        keys_taken = {row.concurrency_key for row in rows}
        self._miss([row for row in placed if row.concurrency_key not in keys_taken])
        self._marks.note(takewhile(lambda row: row.concurrency_key in keys_taken, placed), keyed=True)
        runs = self._hold(rows, asked)
        self._marks.hold(runs)
        return runs

    def _hold(self, rows: Sequence[sa.Row[Any]], asked: float) -> list[Run]:
        """Have the leases of claimed jobs renewed from now on; return them in their order."""
        ends = asked + self._lease.total_seconds()
        runs = [Run.of(row, self._handlers[row.kind], ends, self._worker) for row in rows]
        self._leases.add(*runs)
        if self._others is not None:
            self._keyed.update(run for run in runs if run.keyed)
        runs.sort(key=_place)
        return runs


def _place(job: Run | sa.Row[Any]) -> tuple[int, float, int]:
    """What a job's place in its queue is told by; the id as a number, since UUIDs take long to compare."""
    return -job.priority, job.due, job.id.int


def _less(demands: list[Demand], taken: list[Run]) -> list[Demand]:
    """What is left of demands that were not met."""
    counts = Counter(run.queue for run in taken)
    return [
        Demand(demand.queue, max(0, demand.free - counts[demand.queue]), demand.number - counts[demand.queue])
        for demand in demands
        if demand.number > counts[demand.queue]
    ]
