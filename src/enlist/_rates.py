"""Rate limits of queues: how many jobs may be claimed in a time, over all workers together."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from enlist._options import MAX_INTEGER, Duration, as_timedelta, check_integer
from enlist.exceptions import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import sqlalchemy as sa

    from enlist._database import Database
    from enlist._slots import Demand

__all__ = ["RateLimit", "Rates"]

LONGEST_SECONDS: Final = 10.0
"""After which a queue is claimed from again, whatever its rate was."""

UNSEEN_SECONDS: Final = 0.005
"""After which a rate that somebody had locked is looked at again; twice as long each time."""

LONGEST_UNSEEN_SECONDS: Final = 0.2

ROUNDING_SECONDS: Final = 1e-6
"""What sums of fractions of a second may lack."""


@dataclass(frozen=True, slots=True)
class RateLimit:
    """At most ``n`` jobs of a queue are claimed in ``per``, by all workers together; by the server's clock.

    A queue that had nothing to do may start ``burst`` jobs at once; each gives back its place after ``per / n``. So in
    any time ``t`` at most ``burst + t * n / per`` jobs are started, and with ``burst=1`` one every ``per / n``: then
    no window of the length ``per`` has more than ``n``. Claims are counted, retries too. (It is the generic cell rate
    algorithm, ITU-T I.371.) ::

        Worker(engine, handlers, queues={"mail": 10}, rate_limits={"mail": RateLimit(100, per=60)})

    All workers of a queue should have the same limit. After a change what was spent before counts, but for no more
    than a burst of the new limit and a minute.

    :param n: how many jobs, 1 or more.
    :param per: in what time, in seconds or as a timedelta; a microsecond for each of them or more.
    :param burst: how many at once, 1 to ``n``; default ``n``.
    :raises InvalidOption: one of them is not what it may be.
    """

    n: int
    per: Duration
    burst: int | None = None

    def __post_init__(self) -> None:
        check_integer("n of a RateLimit", self.n, 1, MAX_INTEGER)
        seconds = as_timedelta("per of a RateLimit", self.per).total_seconds()
        if seconds * 1e6 < self.n:
            raise InvalidOption(
                f"RateLimit({self.n}, per={self.per!r}) is more than a job a microsecond: leave the limit out"
            )
        if self.burst is not None:
            check_integer("burst of a RateLimit", self.burst, 1, self.n)

    @property
    def interval(self) -> float:
        """The seconds that a job costs."""
        return as_timedelta("per", self.per).total_seconds() / self.n


class Rates:
    """The rate limits of one worker. For the thread that claims."""

    def __init__(self, limits: Mapping[str, RateLimit], database: Database) -> None:
        self._limits = {
            queue: (limit.interval, limit.n if limit.burst is None else limit.burst) for queue, limit in limits.items()
        }
        """By queue, the seconds that a job costs, and how many may be owed."""
        self._database = database
        self._seen: dict[str, tuple[float, float]] = {}
        """By queue, when the last claim was sent, and in how many seconds from then its rate allowed another job."""
        self._closed_until: dict[str, float] = {}
        self._unseen: dict[str, float] = {}
        """By queue whose row the last claims did not get, how long it was closed for that."""

    def parameters(self, queues: Iterable[str]) -> dict[str, list[Any]]:
        """What the statements are given for these queues; empty if none of them has a limit."""
        limited = [queue for queue in queues if queue in self._limits]
        if not limited:
            return {}
        return {
            "rate_queues": limited,
            "rate_intervals": [self._limits[queue][0] for queue in limited],
            "rate_bursts": [self._limits[queue][1] for queue in limited],
        }

    def open(self, demands: list[Demand]) -> list[Demand]:
        """Those of the demands whose queue may have a job now, as far as is known here."""
        if not self._closed_until:
            return demands
        now = time.monotonic()
        self._closed_until = {queue: until for queue, until in self._closed_until.items() if until > now}
        return [demand for demand in demands if demand.queue not in self._closed_until]

    def seconds_to_open(self) -> float | None:
        """When the first of the closed queues may have a job again; None if none is closed."""
        if not self._closed_until:
            return None
        return max(0.0, min(self._closed_until.values()) - time.monotonic())

    def note(self, rows: Sequence[sa.Row[Any]], asked: float) -> list[sa.Row[Any]]:
        """Note what a claim, sent at ``asked``, says of the rates; return its jobs."""
        jobs = [row for row in rows if row[0] is not None]
        if len(jobs) == len(rows) or not self._limits:
            return jobs
        taken = Counter(row.queue for row in jobs)
        for row in rows:
            if row.id is None and row.queue is not None:
                interval, burst = self._limits[row.queue]
                self._seen[row.queue] = (asked, row.due + (taken[row.queue] + 1 - burst) * interval)
                self._unseen.pop(row.queue, None)
        return jobs

    def close(self, short: Iterable[str]) -> bool:
        """Close the queues that brought less than they were asked for because of their rate.

        As the claim saw it: meanwhile they may be open again, and then are not known to have no more jobs.

        :return: whether there are some, or some whose row the claim did not get.
        """
        limited = [queue for queue in short if queue in self._limits]
        unseen = [queue for queue in limited if queue not in self._seen]
        if unseen:  # at the start, or somebody emptied the table; or another worker claims just now, or holds it
            self._database.execute(self._database.statements.open_rates, {"rate_queues": unseen})
            now = time.monotonic()
            for queue in unseen:
                self._unseen[queue] = min(self._unseen.get(queue, UNSEEN_SECONDS / 2) * 2, LONGEST_UNSEEN_SECONDS)
                self._closed_until[queue] = now + self._unseen[queue]
        waits = {queue: self._seen[queue] for queue in limited if self._seen.get(queue, (0, 0))[1] > ROUNDING_SECONDS}
        # Not for longer, however far away: somebody may have changed the row.
        self._closed_until |= {queue: sent + min(seconds, LONGEST_SECONDS) for queue, (sent, seconds) in waits.items()}
        self._seen.clear()
        return bool(unseen or waits)
