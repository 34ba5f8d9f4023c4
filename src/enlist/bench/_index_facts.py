"""What the audit of the indexes finds, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from enlist.models import JobRecord

__all__ = [
    "CLAIM_BATCH",
    "FILLFACTORS",
    "INSERT_BATCH",
    "PHASES",
    "REST",
    "SERVES",
    "SORTS",
    "TABLE",
    "IndexFacts",
    "Life",
]

TABLE: Final = JobRecord.__tablename__

SERVES: Final = {
    f"{TABLE}_pkey": "every UPDATE by id: claim, renew, complete, retry, cancel",
    f"{TABLE}_ready": "the claim of jobs without a concurrency key, in their order",
    f"{TABLE}_ready_key": "the claim of jobs with a concurrency key, in their order",
    f"{TABLE}_queue_key": "which keys a queue has jobs of, and the next job of each",
    f"{TABLE}_ordered": "the earliest job of an ordered key, whatever its queue and when it is due",
    f"{TABLE}_slot": "how many jobs of a key run; and that they are never more than its limit",
    f"{TABLE}_lease": "the reaper: which leases have ended",
    f"{TABLE}_unique": "one holder of a unique key; who it is",
}
"""What reads each index of the job table. One that nothing reads has no place in it."""

SORTS: Final = ("plain", "keyed", "ordered", "unique")
"""Jobs with no key; each with a concurrency key of its own, of limit 1; the same, ordered; with a unique key."""

PHASES: Final = ("insert", "claim", "renew", "complete", "vacuum")
"""What happens to every job once; at the end of all a VACUUM of the table."""

FILLFACTORS: Final = (100, 85, 70, 50)
INSERT_BATCH: Final = 1000
CLAIM_BATCH: Final = 100

REST: Final = "everything else"
"""Commits, the WAL's page headers, and what others have written on the server."""


@dataclass(frozen=True)
class Life:
    """What jobs of one sort wrote from their insert to their end."""

    sort: str
    jobs: int
    fillfactor: int
    wal: Mapping[str, Mapping[str, int]]
    """Bytes, by what was written (the table, each of its indexes, :data:`REST`) and by phase."""
    page_images: int
    """How many of all these bytes are copies of whole pages."""
    scans: Mapping[str, int]
    """How often each index was read."""
    queued_bytes: int
    """The size of the table when all were queued."""
    done_bytes: int
    """The same when all were done, before the VACUUM: with the row versions that are no longer needed."""

    def per_job(self, name: str, *phases: str) -> float:
        """Bytes a job for the table or an index, in some phases; default in all."""
        return sum(self.wal[name][phase] for phase in phases or PHASES) / self.jobs

    def all_per_job(self, *phases: str) -> float:
        """Bytes a job for the table and its indexes together."""
        return sum(self.per_job(name, *phases) for name in self.wal if name != REST)

    def as_lines(self) -> Iterator[str]:
        """For people."""
        yield f"{self.sort + ' jobs':<22}" + "".join(f"{phase:>10}" for phase in (*PHASES, "life", "scans"))
        for name in self.wal:
            if self.per_job(name):
                bytes_ = [*(self.per_job(name, phase) for phase in PHASES), self.per_job(name)]
                yield f"  {name:<20}" + _row(bytes_) + (f"{self.scans[name]:>10,}" if name in self.scans else "")
        yield f"  {'table and indexes':<20}" + _row([*map(self.all_per_job, PHASES), self.all_per_job()])
        if unwritten := [name for name in self.scans if not self.per_job(name)]:
            yield f"  not written: {', '.join(f'{name} ({self.scans[name]:,} scans)' for name in unwritten)}"


@dataclass(frozen=True)
class IndexFacts:
    """What was measured."""

    lives: tuple[Life, ...]
    """One of each sort, with the fillfactor that the table has."""
    fillfactors: tuple[Life, ...]
    """Plain jobs with each of :data:`FILLFACTORS`."""
    server: str
    fsync: str
    full_page_writes: str

    @property
    def jobs(self) -> int:
        """Of each sort."""
        return self.lives[0].jobs

    def as_text(self) -> str:
        """For people."""
        lines = [
            f"WAL in bytes a job: {self.jobs:,} jobs of each sort, {INSERT_BATCH:,} an insert, {CLAIM_BATCH} a claim",
            f"PostgreSQL {self.server}, fsync {self.fsync}, full_page_writes {self.full_page_writes}",
        ]
        if images := sum(life.page_images for life in (*self.lives, *self.fillfactors)):
            lines.append(f"{images:,} bytes of it all are copies of whole pages")
        for life in self.lives:
            lines += ["", *life.as_lines()]
        lines += ["", "what the indexes serve"]
        lines += [f"  {name:<20}  {what}" for name, what in SERVES.items()]
        headings = ("claim", "complete", "life", "queued", "done")
        lines += ["", "plain jobs by fillfactor: WAL, and the size of the table when all were queued and when done"]
        lines.append(f"{'fillfactor':<22}" + "".join(f"{heading:>10}" for heading in headings))
        for life in self.fillfactors:
            wal = [life.all_per_job("claim"), life.all_per_job("complete"), life.all_per_job()]
            sizes = [life.queued_bytes / life.jobs, life.done_bytes / life.jobs]
            lines.append(f"  {life.fillfactor:<20}" + _row([*wal, *sizes]))
        return "\n".join(lines)

    def as_json(self) -> str:
        """For programs."""
        facts = {
            "jobs": self.jobs,
            "sorts": {
                life.sort: {
                    "wal_bytes_per_job": {
                        name: {phase: round(life.per_job(name, phase), 1) for phase in PHASES} for name in life.wal
                    },
                    "scans": dict(life.scans),
                }
                for life in self.lives
            },
            "serves": SERVES,
            "fillfactors": {
                str(life.fillfactor): {
                    "claim_and_complete_wal_bytes_per_job": round(life.all_per_job("claim", "complete"), 1),
                    "wal_bytes_per_job": round(life.all_per_job(), 1),
                    "queued_table_bytes_per_job": round(life.queued_bytes / life.jobs, 1),
                    "done_table_bytes_per_job": round(life.done_bytes / life.jobs, 1),
                }
                for life in self.fillfactors
            },
            "page_image_bytes": sum(life.page_images for life in (*self.lives, *self.fillfactors)),
            "server": self.server,
            "fsync": self.fsync,
            "full_page_writes": self.full_page_writes,
        }
        return json.dumps(facts, indent=2)


def _row(numbers: Sequence[float]) -> str:
    return "".join(f"{round(number):>10,}" for number in numbers)
