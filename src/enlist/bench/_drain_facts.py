"""What was measured of drains, as text and as JSON."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from enlist.bench._text import table

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Drain", "DrainFacts", "RowFacts", "SideFacts"]

HEADINGS: Final = ("", "jobs", "jobs/s", "min", "max", "CPU us/job", "WAL bytes/job", "ratio")


@dataclass(frozen=True)
class Drain:
    """One drain: how long it took, and what came of the jobs."""

    jobs: int
    """Those that were measured."""
    seconds: float
    cpu_seconds: float
    """User and system, of the workers' processes."""
    wal_bytes: int
    """Of the whole server, from the claim of the first to the end of the last."""
    enqueued: int
    """With those that were run before, to bring the table into its state."""
    done: int
    """As the database counts."""
    runs: int
    """Of handlers."""
    distinct: int
    """Jobs whose handler was run."""
    rows: int | None = None
    """That the handlers inserted; None: they insert none."""
    distinct_rows: int | None = None
    """Jobs that have such a row."""

    @property
    def right(self) -> bool:
        """Whether every job is done and was run once, and has one row if its handler inserts any."""
        counts = {self.done, self.runs, self.distinct, self.rows, self.distinct_rows} - {None}
        return counts == {self.enqueued}

    def as_text(self) -> str:
        """What came of the jobs."""
        text = f"{self.done:,} of {self.enqueued:,} jobs done, {self.runs:,} runs of {self.distinct:,} jobs"
        return text if self.rows is None else f"{text}, {self.rows:,} rows of {self.distinct_rows:,} jobs"


@dataclass(frozen=True)
class SideFacts:
    """The drains of one table by the same number of processes, one for each round; so are the figures."""

    processes: int
    drains: tuple[Drain, ...]

    @property
    def rates(self) -> list[float]:
        """Jobs a second."""
        return [drain.jobs / drain.seconds for drain in self.drains]

    @property
    def cpu_us(self) -> list[float]:
        """Microseconds of CPU a job, of all worker processes together."""
        return [drain.cpu_seconds * 1e6 / drain.jobs for drain in self.drains]

    @property
    def wal_bytes(self) -> list[float]:
        """Bytes of WAL a job."""
        return [drain.wal_bytes / drain.jobs for drain in self.drains]

    def as_cells(self, title: str, ratio: str) -> list[str]:
        """A row of the table."""
        rates = (statistics.median(self.rates), min(self.rates), max(self.rates))
        numbers = (self.drains[0].jobs, *rates, statistics.median(self.cpu_us), statistics.median(self.wal_bytes))
        return [title, *(f"{number:,.0f}" for number in numbers), ratio]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        found: dict[str, Any] = {"processes": self.processes, "jobs": self.drains[0].jobs}
        for name, values in (
            ("jobs_per_second", self.rates),
            ("cpu_us_per_job", self.cpu_us),
            ("wal_bytes_per_job", self.wal_bytes),
        ):
            found[name] = round(statistics.median(values), 1)
            found[f"{name}_of_rounds"] = [round(value, 1) for value in values]
        return found | {"right": all(drain.right for drain in self.drains)}


@dataclass(frozen=True)
class RowFacts:
    """What was measured for a row, and in turn with it."""

    name: str
    title: str
    side: SideFacts
    beside: str = ""
    """With what it was in turn."""
    other: SideFacts | None = None

    @property
    def ratio(self) -> float | None:
        """How many times as many jobs a second as the other: the median of the rounds' ratios."""
        if self.other is None:
            return None
        rounds = zip(self.side.rates, self.other.rates, strict=True)
        return statistics.median(mine / theirs for mine, theirs in rounds)

    def as_rows(self) -> Iterator[list[str]]:
        """The rows of the table."""
        yield self.side.as_cells(self.title, "" if self.ratio is None else f"{self.ratio:.2f}")
        if self.other is not None:
            yield self.other.as_cells(f"  {self.beside}, in turn", "1")

    def wrong(self) -> Iterator[str]:
        """What is not as it should be."""
        for side in (self.side, self.other):
            for drain in side.drains if side is not None else ():
                if not drain.right:
                    yield f"{self.name}: {drain.as_text()}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        found = {"title": self.title, **self.side.as_dict()}
        if self.other is not None and self.ratio is not None:
            found |= {"ratio": round(self.ratio, 3), "beside": {"title": self.beside, **self.other.as_dict()}}
        return found


@dataclass(frozen=True)
class DrainFacts:
    """What was measured."""

    rows: tuple[RowFacts, ...]
    slots: int
    scale: float
    cores: int
    """Of the machine that the workers run on."""
    server: str
    fsync: str
    synchronous_commit: str

    @property
    def right(self) -> bool:
        """Whether every job of every drain is done and was run once."""
        return not self._wrong

    @property
    def _wrong(self) -> list[str]:
        return [line for row in self.rows for line in row.wrong()]

    def as_text(self) -> str:
        """For people."""
        rounds = len(self.rows[0].side.drains)
        conditions = f"{self.slots} slots a process, scale {self.scale:g}, {self.cores} cores"
        lines = [
            f"Jobs a second, from the commit that enqueues them to the last one done: the median of {rounds}.",
            "CPU: of the worker processes. WAL: what the server writes for claim and completion.",
            "",
            *table(HEADINGS, [cells for row in self.rows for cells in row.as_rows()]),
            "",
            conditions,
            f"PostgreSQL {self.server}, fsync {self.fsync}, synchronous_commit {self.synchronous_commit}",
        ]
        if self.right:
            return "\n".join([*lines, "every job is done, each was run once"])
        return "\n".join([*lines, "NOT as it should be:", *(f"  {line}" for line in self._wrong)])

    def as_json(self) -> str:
        """For programs."""
        facts = {
            "rows": {row.name: row.as_dict() for row in self.rows},
            "slots": self.slots,
            "scale": self.scale,
            "cores": self.cores,
            "server": self.server,
            "fsync": self.fsync,
            "synchronous_commit": self.synchronous_commit,
            "right": self.right,
        }
        return json.dumps(facts, indent=2)
