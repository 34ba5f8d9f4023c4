"""What a run is to be, and what came of it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field

from enlist import HandlerRegistry
from tests.chaos.ways import WAYS


def _possible() -> list[str]:
    options = inspect.signature(HandlerRegistry.handler).parameters
    return [name for name, way in WAYS.items() if way.options.keys() <= options.keys()]


@dataclass(frozen=True)
class Settings:
    """What a run is to be."""

    seconds: float = 60
    """How long it is made difficult; what comes after, until all jobs have ended, is not in it."""
    workers: int = 6
    ways: Sequence[str] = field(default_factory=_possible)
    seed: int = 0
    jobs: int = 100_000
    """The most that are enqueued; children are made by jobs."""
    depth: float = 1.0
    """How many jobs are kept ready, as a share of what each way says."""
    pace: float = 3.0
    """Faults a second, restarts of the server apart."""
    restart_every: float = 20.0
    """Seconds between two crashes of the server."""
    fatal: float = 0.001
    """The chance that a worker kills itself at a commit."""
    lease: float = 1.0
    calm_seconds: float = 120.0
    """How long it may take until all jobs have ended, when nothing is done to the workers any more."""


@dataclass
class Report:
    """What was done, and what was found."""

    settings: Settings
    counts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    calm: float = 0.0
    met: dict[str, int] = field(default_factory=dict)
    """What the workers' logs, and the rows, say that they have met."""
    statuses: dict[str, int] = field(default_factory=dict)
    by_way: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    directory: str | None = None
    """Where the workers' logs are; kept if something is wrong."""

    def as_dict(self) -> dict[str, object]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        def listed(counts: dict[str, int]) -> str:
            return ", ".join(f"{number} {what}" for what, number in counts.items())

        lines = [
            f"{self.seconds:.0f} s, and {self.calm:.1f} s of calm; seed {self.settings.seed}",
            f"done to {self.settings.workers} workers: {listed(self.counts)}",
            f"met by them: {listed(self.met)}",
            f"jobs: {listed(self.statuses)}",
            "done by way: " + ", ".join(f"{way} {number}" for way, number in sorted(self.by_way.items())),
            f"wrong: {len(self.wrong)}",
            *(f"  {one}" for one in self.wrong),
        ]
        if self.directory:
            lines.append(f"the workers' logs are in {self.directory}")
        return "\n".join(lines)
