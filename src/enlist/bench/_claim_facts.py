"""What was measured of claims, as text and as JSON."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from typing import Any

__all__ = ["ClaimFacts", "Claims", "History", "PickUp", "StateFacts", "percentile", "slowest"]

HEADING = f"{'state':<10} {'jobs':>4}   {'empty table':^13}   {'this state':^13}   {'times as long':^24}"
UNITS = f"{'':<10} {'':>4}   {'p50':>6} {'p95':>6}   {'p50':>6} {'p95':>6}   {'p50':>6} {'(all)':>8} {'p95':>8}   goal"


def percentile(values: tuple[float, ...] | list[float], percent: float) -> float:
    """The smallest of the values that so many percent of them don't exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(len(ordered) * percent / 100) - 1, 0)]


def slowest(values: tuple[float, ...] | list[float]) -> tuple[float, float]:
    """Of the slowest hundredth of some times, one at least: the mean, and its share of all the time."""
    first = sorted(values, reverse=True)[: math.ceil(len(values) / 100)]
    return statistics.mean(first), sum(first) / sum(values)


def _slowest_of(times: tuple[float, ...], jobs: int) -> str:
    mean, share = slowest(times)
    return f"the slowest 1 % of {len(times):,} claims of {jobs}: {mean:.2f} ms, {share * 100:.1f} % of the time"


@dataclass(frozen=True)
class Claims:
    """Claims of one size on the table and on an empty one, in turn; milliseconds, a tuple for each round."""

    jobs: int
    """How many jobs each asked for."""
    empty: tuple[tuple[float, ...], ...]
    state: tuple[tuple[float, ...], ...]
    asked: int
    """Jobs, by the claims on each of the tables."""
    claimed_empty: int
    """Jobs, by those on the empty one."""
    claimed: int
    """Jobs, by those on the table that is measured."""
    keyed_empty: int = 0
    """Of these, those with a concurrency key."""
    keyed: int = 0

    @property
    def ratio(self) -> float:
        """How many times as long the median claim takes: the median of the rounds' ratios."""
        return self._median_ratio(50)

    @property
    def ratio_p95(self) -> float:
        """The same for the claim that one in twenty exceeds."""
        return self._median_ratio(95)

    @property
    def ratio_of_all(self) -> float:
        """The median of all claims to that of all on the empty table."""
        return percentile(self.all_state, 50) / percentile(self.all_empty, 50)

    @property
    def all_empty(self) -> tuple[float, ...]:
        """Those of all rounds."""
        return tuple(one for each in self.empty for one in each)

    @property
    def all_state(self) -> tuple[float, ...]:
        """Those of all rounds."""
        return tuple(one for each in self.state for one in each)

    def _median_ratio(self, percent: float) -> float:
        rounds = zip(self.state, self.empty, strict=True)
        return statistics.median(percentile(mine, percent) / percentile(other, percent) for mine, other in rounds)

    def as_text(self, name: str, goal: float) -> str:
        """A line of the table."""
        times = [percentile(values, percent) for values in (self.all_empty, self.all_state) for percent in (50, 95)]
        empty, empty_95, state, state_95 = (f"{one:6.2f}" for one in times)
        ratios = f"{self.ratio:6.2f} ({self.ratio_of_all:6.2f}) {self.ratio_p95:8.2f}"
        line = f"{name:<10} {self.jobs:>4}   {empty} {empty_95}   {state} {state_95}   {ratios}   {goal:g}"
        if self.ratio > goal:
            line += " MISSED"
        if (self.claimed_empty, self.claimed) != (self.asked, self.asked):
            line += f" of {self.asked:,} asked for got {self.claimed:,}, on the empty table {self.claimed_empty:,}"
        if self.keyed_empty != self.keyed:
            line += f" with a key {self.keyed:,}, on the empty table {self.keyed_empty:,}"
        return line

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        mean, share = slowest(self.all_state)
        return {
            "ratio": round(self.ratio, 3),
            "ratio_of_all": round(self.ratio_of_all, 3),
            "ratio_p95": round(self.ratio_p95, 3),
            "empty_p50_ms": round(percentile(self.all_empty, 50), 3),
            "empty_p95_ms": round(percentile(self.all_empty, 95), 3),
            "p50_ms": round(percentile(self.all_state, 50), 3),
            "p95_ms": round(percentile(self.all_state, 95), 3),
            "slowest_hundredth_ms": round(mean, 3),
            "slowest_hundredth_share": round(share, 4),
            "asked": self.asked,
            "claimed": self.claimed,
            "claimed_empty": self.claimed_empty,
            "keyed": self.keyed,
            "keyed_empty": self.keyed_empty,
        }


@dataclass(frozen=True)
class History:
    """The claims by which a table got the history that it has."""

    jobs: int
    milliseconds: tuple[float, ...]
    """Each claim, in their order."""

    @property
    def growth(self) -> float:
        """How many times as long as the first tenth of the claims the last took, by their medians."""
        tenth = math.ceil(len(self.milliseconds) / 10)
        return statistics.median(self.milliseconds[-tenth:]) / statistics.median(self.milliseconds[:tenth])


@dataclass(frozen=True)
class PickUp:
    """How soon a job was claimed once it was committed, each time that it was tried."""

    title: str
    calls: tuple[int, ...]
    """Claims, the one that brought it included, made one right after the other."""
    milliseconds: tuple[float, ...]

    def as_text(self) -> str:
        """For people."""
        most, slow = max(self.calls), max(self.milliseconds)
        return f"{self.title}: in claim {most} at the latest, {slow:.1f} ms at most"


@dataclass(frozen=True)
class StateFacts:
    """What was measured of one state."""

    name: str
    title: str
    beside: str
    goal: float
    claims: tuple[Claims, ...]
    history: History | None = None
    pick_ups: tuple[PickUp, ...] = ()

    def as_lines(self) -> list[str]:
        """The lines of the table."""
        return [claims.as_text(self.name, self.goal) for claims in self.claims]

    def as_notes(self) -> list[str]:
        """What there is to say beside the table."""
        lines = [f"{self.name}: {self.title}; beside {self.beside}"]
        if self.history is not None:
            lines += [f"  {_slowest_of(claims.all_state, claims.jobs)}" for claims in self.claims]
            lines.append(f"  {_slowest_of(self.history.milliseconds, self.history.jobs)}, while it came about")
            lines.append(f"  of these the last tenth took {self.history.growth:.2f} times as long as the first")
        return lines + [f"  {pick_up.as_text()}" for pick_up in self.pick_ups]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        found: dict[str, Any] = {
            "goal": self.goal,
            "missed": any(claims.ratio > self.goal for claims in self.claims),
            "claims": {str(claims.jobs): claims.as_dict() for claims in self.claims},
        }
        if self.history is not None:
            mean, share = slowest(self.history.milliseconds)
            found["history"] = {
                "claims": len(self.history.milliseconds),
                "growth": round(self.history.growth, 3),
                "slowest_hundredth_ms": round(mean, 3),
                "slowest_hundredth_share": round(share, 4),
            }
        if self.pick_ups:
            found["pick_up"] = {
                one.title: {"calls": one.calls, "ms": [round(ms, 2) for ms in one.milliseconds]}
                for one in self.pick_ups
            }
        return found


@dataclass(frozen=True)
class ClaimFacts:
    """What was measured."""

    states: tuple[StateFacts, ...]
    scale: float
    stale: bool
    server: str
    fsync: str

    def as_text(self) -> str:
        """For people."""
        lines = ["claims in milliseconds; MISSED: the median takes longer than the goal has it", "", HEADING, UNITS]
        lines += [line for state in self.states for line in state.as_lines()]
        lines += ["", *(note for state in self.states for note in state.as_notes()), ""]
        statistics_of = "an empty table" if self.stale else "the table as it is"
        lines.append(f"scale {self.scale:g}, the planner's statistics are of {statistics_of}")
        return "\n".join([*lines, f"PostgreSQL {self.server}, fsync {self.fsync}"])

    def as_json(self) -> str:
        """For programs."""
        facts = {
            "states": {state.name: state.as_dict() for state in self.states},
            "scale": self.scale,
            "stale": self.stale,
            "server": self.server,
            "fsync": self.fsync,
        }
        return json.dumps(facts, indent=2)
