"""What ``enlist bench drain`` measures: the rows of its table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from enlist.bench._claim_table import Jobs
from enlist.bench.drainer import KIND, QUEUE, Way

__all__ = ["ROWS", "STATES", "Row", "State"]

GROUP: Final = 100


@dataclass(frozen=True)
class State:
    """What is in the job table beside the jobs that are measured."""

    number: int
    """At the scale 1."""
    jobs: Jobs | None = None
    """What there are so many of; None: jobs that the workers have run while an old transaction is open."""


@dataclass(frozen=True)
class Row:
    """A drain that is measured in each round, or two in turn."""

    name: str
    title: str
    """May say the number of processes, or how many jobs the state has."""
    way: Way = field(default_factory=Way)
    share: float = 1.0
    """Of the jobs asked for: fewer where each takes much longer."""
    several: bool = False
    """By two processes at least; in turn with one."""
    state: State | None = None
    """In turn with a table that has nothing else in it."""

    @property
    def beside(self) -> str:
        """With what it is in turn; empty: with nothing."""
        if self.several:
            return "by one process"
        return "" if self.state is None else "in an empty table"


ROWS: Final = (
    Row("noop", "no-op, plain handler"),
    Row("noop-async", "no-op, async handler", Way(asynchronous=True)),
    Row("insert", "one INSERT, one commit a job, plain", Way("insert"), share=0.1),
    Row("insert-async", "one INSERT, one commit a job, async", Way("insert", asynchronous=True), share=0.1),
    Row("grouped", f"one INSERT, commit_every={GROUP}, plain", Way("insert", commit_every=GROUP), share=0.25),
    Row(
        "grouped-async",
        f"one INSERT, commit_every={GROUP}, async",
        Way("insert", asynchronous=True, commit_every=GROUP),
        share=0.25,
    ),
    Row("added", f"one object added, one flush of {GROUP}, plain", Way("add", commit_every=GROUP), share=0.5),
    Row(
        "added-async",
        f"one object added, one flush of {GROUP}, async",
        Way("add", asynchronous=True, commit_every=GROUP),
        share=0.5,
    ),
    Row("noop-processes", "no-op, plain, by {processes} processes", several=True),
    Row("burn-processes", "1 ms of Python, plain, by {processes} processes", Way("burn"), share=0.1, several=True),
)

FINISHED: Final = Jobs(kind=KIND, queue=f"'{QUEUE}'", status="done")
TOMORROW: Final = Jobs(kind=KIND, queue=f"'{QUEUE}'", priority="32767", due="made + interval '1 day' * (1 + random())")

STATES: Final = (
    Row("finished", "beside {number:,} jobs that are done", state=State(1_000_000, FINISHED)),
    Row("future", "beside {number:,} jobs that are due tomorrow", state=State(100_000, TOMORROW)),
    Row("pinned", "after {number:,} jobs, an old transaction open", state=State(100_000)),
)
"""Each is drained as ``noop`` is, in turn with it."""
