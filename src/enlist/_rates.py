"""Rate limits of queues: how many jobs may be claimed in a time, over all workers together."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from enlist._options import MAX_INTEGER, Duration, as_timedelta, check_integer
from enlist.exceptions import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from enlist._database import Database
    from enlist._slots import Demand

__all__ = ["RateLimit", "Rates"]


@dataclass(frozen=True, slots=True)
class RateLimit:
    """At most ``n`` jobs of a queue are claimed in ``per``, by all workers together; by the server's clock.

    A queue that had nothing to do may start ``burst`` jobs at once; each gives back its place after ``per / n``. So in
    any time ``t`` at most ``burst + t * n / per`` jobs are started, and with ``burst=1`` one every ``per / n``: then
    no window of the length ``per`` has more than ``n``. Claims are counted, retries too. (It is the generic cell rate
    algorithm, ITU-T I.371.) ::

        Worker(engine, handlers, queues={"mail": 10}, rate_limits={"mail": RateLimit(100, per=60)})

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
        self.limits = limits
        self._database = database
        self._closed_until: dict[str, float] = {}

    def parameters(self, queues: Iterable[str]) -> dict[str, list[Any]]:
        """What the statements are given for these queues; empty if none of them has a limit."""
        limited = [queue for queue in queues if queue in self.limits]
        if not limited:
            return {}
        return {
            "rate_queues": limited,
            "rate_intervals": [self.limits[queue].interval for queue in limited],
            "rate_bursts": [self.limits[queue].burst or self.limits[queue].n for queue in limited],
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

    def look(self, short: Iterable[str]) -> bool:
        """See whether queues that brought less than they were asked for did so because of their rate."""
        parameters = self.parameters(short)
        if not parameters:
            return False
        rows = self._database.execute(self._database.statements.rate_wait, parameters)
        now = time.monotonic()
        waits = {row.queue: now + row.seconds for row in rows if row.seconds > 0}
        if len(rows) < len(parameters["rate_queues"]):  # at the start, or somebody emptied the table
            made = self._database.execute(self._database.statements.open_rates, parameters)
            waits |= {row.queue: now for row in made}  # look at them again at once
        self._closed_until |= waits
        return bool(waits)
