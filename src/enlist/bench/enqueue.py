"""``enlist bench enqueue``: what jobs cost beside rows that are written by hand, how many a second, and the memory."""

from __future__ import annotations

import datetime as dt
import json
import resource
import statistics
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from enlist import notifier
from enlist._cli_database import connecting, engine_for
from enlist.bench._progress import Progress
from enlist.bench._text import table
from enlist.demo.scratch import scratch
from enlist.models import JobRecord
from enlist.payload import JobPayload
from enlist.repository import JobRepository

__all__ = ["EnqueueFacts", "Ratio", "run_enqueue"]

SCHEMA: Final = "enlist_bench_enqueue"
WARM_UP: Final = 50
"""Transactions of each kind before the first is timed: statements get compiled and prepared."""

IN_A_ROW: Final = 20
"""Transactions of one kind before it is the other's turn."""

COMMIT_EVERY: Final = 1000
"""How many jobs the long-lived session enqueues in each of its transactions."""

ONE_JOB_GOAL: Final = 1.25
TEN_JOBS_GOAL: Final = 1.05
BULK_GOAL: Final = 100_000


class Base(DeclarativeBase):
    """The application's tables."""


class Order(Base):
    """The domain row."""

    __tablename__ = "bench_order"

    id: Mapped[int] = mapped_column(primary_key=True)
    note: Mapped[str]


class PlainJob(Base):
    """A job table as one makes it by hand: no unique keys, no leases, no checks."""

    __tablename__ = "bench_plain_job"
    __table_args__ = (sa.Index(None, "queue", "run_at", "id", postgresql_where=sa.text("status = 'queued'")),)

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True, default=uuid.uuid4)
    kind: Mapped[str]
    queue: Mapped[str] = mapped_column(default="default")
    status: Mapped[str] = mapped_column(default="queued")
    payload: Mapped[dict[str, Any]] = mapped_column(JSONB)
    run_at: Mapped[dt.datetime] = mapped_column(sa.DateTime(timezone=True), server_default=sa.func.now())
    created_at: Mapped[dt.datetime] = mapped_column(sa.DateTime(timezone=True), server_default=sa.func.now())


class SendReceipt(JobPayload, kind="send_receipt", queue="mail"):
    """A small payload."""

    order_id: int
    language: str = "en"


@dataclass(frozen=True)
class Ratio:
    """What a domain row, some jobs and the commit take, in microseconds: the medians of each round."""

    jobs: int
    goal: float
    plain: tuple[float, ...]
    enlist: tuple[float, ...]

    @property
    def value(self) -> float:
        """Time with enlist to time by hand: the median of the rounds' ratios."""
        return statistics.median(mine / theirs for mine, theirs in zip(self.enlist, self.plain, strict=True))

    def as_cells(self) -> list[str]:
        """A row of the table."""
        jobs = "1 job" if self.jobs == 1 else f"{self.jobs} jobs"
        times = (f"{statistics.median(each):,.0f}" for each in (self.enlist, self.plain))
        return [f"{jobs}, a row of yours, the commit", *times, f"{self.value:.2f}", f"{self.goal:g}"]


@dataclass(frozen=True)
class EnqueueFacts:
    """What was measured."""

    one_job: Ratio
    ten_jobs: Ratio
    bulk_jobs: int
    bulk_enqueue_seconds: tuple[float, ...]
    """Of ``enqueue_many``, which sends nothing."""
    bulk_commit_seconds: tuple[float, ...]
    """Of the commit that follows."""
    long_jobs: int
    """How many jobs were enqueued in one session, with a commit for each thousand."""
    long_growth_bytes: int
    """By how much the most memory that the process ever had went up, after the first tenth of them."""
    server: str
    fsync: str

    @property
    def bulk_rate(self) -> float:
        """Jobs a second in bulk, the median."""
        both = zip(self.bulk_enqueue_seconds, self.bulk_commit_seconds, strict=True)
        return self.bulk_jobs / statistics.median(map(sum, both))

    def as_text(self) -> str:
        """For people."""
        parts = [
            f"{statistics.median(seconds) * 1e6 / self.bulk_jobs:.1f}"
            for seconds in (self.bulk_enqueue_seconds, self.bulk_commit_seconds)
        ]
        bulk = [f"enqueue_many of {self.bulk_jobs:,}, the commit", f"{self.bulk_rate:,.0f}", *parts, f"{BULK_GOAL:,}"]
        lines = [
            f"What jobs cost their producer: the median of {len(self.one_job.plain)}.",
            "",
            *table(
                ["microseconds a transaction", "enlist", "rows by hand", "ratio", "at most"],
                [self.one_job.as_cells(), self.ten_jobs.as_cells()],
            ),
            "",
            *table(["in bulk", "jobs/s", "us to enqueue", "us to write", "at least"], [bulk]),
            "",
        ]
        if self.long_jobs:
            growth = f"{self.long_growth_bytes / 1e6:.1f} MB"
            lines.append(f"While one session enqueued {self.long_jobs:,} jobs, memory grew by {growth}.")
        return "\n".join([*lines, f"PostgreSQL {self.server}, fsync {self.fsync}"])

    def as_json(self) -> str:
        """For programs."""
        facts = {
            name: {
                "ratio": round(ratio.value, 4),
                "goal": ratio.goal,
                "plain_us": [round(one, 1) for one in ratio.plain],
                "enlist_us": [round(one, 1) for one in ratio.enlist],
            }
            for name, ratio in (("one_job", self.one_job), ("ten_jobs", self.ten_jobs))
        }
        bulk = {
            "jobs": self.bulk_jobs,
            "jobs_per_second": round(self.bulk_rate),
            "goal": BULK_GOAL,
            "enqueue_seconds": [round(one, 4) for one in self.bulk_enqueue_seconds],
            "commit_seconds": [round(one, 4) for one in self.bulk_commit_seconds],
        }
        memory = {"jobs": self.long_jobs, "growth_bytes": self.long_growth_bytes}
        return json.dumps(
            {**facts, "bulk": bulk, "memory": memory, "server": self.server, "fsync": self.fsync}, indent=2
        )


def run_enqueue(
    *,
    url: sa.URL | None = None,
    repeat: int = 5,
    transactions: int = 200,
    bulk_jobs: int = 100_000,
    long_jobs: int = 1_000_000,
    progress: Progress | None = None,
) -> EnqueueFacts:
    """Measure.

    :param url: the database, in which a schema ``enlist_bench_enqueue`` is made and dropped; default a server of its
        own.
    :param repeat: how many rounds; what is told are medians of them.
    :param transactions: how many of each kind to time in a round.
    :param bulk_jobs: how many jobs to enqueue at a time.
    :param long_jobs: how many to enqueue in one long-lived session; 0 for none.
    :param progress: told how far it is.
    :raises EnlistError: no server or schema could be had.
    """
    progress = progress or Progress()
    progress.begin(3 * repeat + 1)
    with scratch(SCHEMA, url) as place:
        with connecting(engine_for(place.url)) as connection:
            server = connection.scalar(sa.text("SHOW server_version"))
            fsync = connection.scalar(sa.text("SHOW fsync"))
        engine = sa.create_engine(place.url)
        try:
            Base.metadata.create_all(engine)
            one_job = _ratio(engine, 1, ONE_JOB_GOAL, repeat=repeat, transactions=transactions, progress=progress)
            ten_jobs = _ratio(engine, 10, TEN_JOBS_GOAL, repeat=repeat, transactions=transactions, progress=progress)
            progress.step(f"{long_jobs:,} jobs in one session")
            growth = _growth(engine, long_jobs)  # before the bulk: it is the most memory ever that is read
            bulk = [_bulk(engine, bulk_jobs) for _ in progress.rounds(repeat, f"{bulk_jobs:,} jobs in bulk")]
        finally:
            notifier.close_all()
            engine.dispose()
    return EnqueueFacts(
        one_job,
        ten_jobs,
        bulk_jobs,
        tuple(enqueue for enqueue, _ in bulk),
        tuple(commit for _, commit in bulk),
        long_jobs,
        growth,
        str(server),
        str(fsync),
    )


def _ratio(engine: sa.Engine, jobs: int, goal: float, *, repeat: int, transactions: int, progress: Progress) -> Ratio:
    """Time some of each kind in turn: what slows the machine slows both, and what follows a commit slows its own."""
    repo = JobRepository()

    def plain() -> None:
        with Session(engine) as session:
            session.add(Order(note="a"))
            payload = {"order_id": 1, "language": "en"}
            session.add_all([PlainJob(kind="send_receipt", queue="mail", payload=payload) for _ in range(jobs)])
            session.commit()

    def enlisted() -> None:
        with Session(engine) as session:
            session.add(Order(note="a"))
            for _ in range(jobs):
                repo.enqueue(session, SendReceipt(order_id=1))
            session.commit()

    medians: dict[Callable[[], None], list[float]] = {plain: [], enlisted: []}
    for _ in range(WARM_UP):
        plain()
        enlisted()
    for _ in progress.rounds(repeat, f"transactions with {jobs} of enlist's jobs, and with rows by hand"):
        taken: dict[Callable[[], None], list[float]] = {plain: [], enlisted: []}
        for _ in range(0, transactions, IN_A_ROW):
            for function, seconds in taken.items():
                seconds += [_timed(function) for _ in range(IN_A_ROW)]
        for function, seconds in taken.items():
            medians[function].append(statistics.median(seconds) * 1e6)
    return Ratio(jobs, goal, tuple(medians[plain]), tuple(medians[enlisted]))


def _bulk(engine: sa.Engine, jobs: int) -> tuple[float, float]:
    """Enqueue many jobs in an empty table; return the seconds of that and of the commit."""
    _empty(engine)
    payloads = [SendReceipt(order_id=number) for number in range(jobs)]
    repo = JobRepository()
    with Session(engine) as session:
        handles: list[object] = []
        enqueue = _timed(lambda: handles.extend(repo.enqueue_many(session, payloads)))
        commit = _timed(session.commit)
    with engine.connect() as connection:
        made = connection.scalar(sa.select(sa.func.count()).select_from(JobRecord))
    assert made == len(handles) == jobs
    return enqueue, commit


def _growth(engine: sa.Engine, jobs: int) -> int:
    """Enqueue jobs in one session, a thousand a transaction; return how much memory was added after a tenth of them."""
    repo = JobRepository()
    start = 0
    with Session(engine) as session:
        for done in range(0, jobs, COMMIT_EVERY):
            if start == 0 and done >= jobs // 10:
                _empty(engine)
                start = _most_memory()
            repo.enqueue_many(session, [SendReceipt(order_id=number) for number in range(done, done + COMMIT_EVERY)])
            session.commit()
    return _most_memory() - start if start else 0


def _most_memory() -> int:
    """The most memory that this process ever had, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _empty(engine: sa.Engine) -> None:
    with engine.begin() as connection:
        connection.execute(sa.text(f"TRUNCATE {JobRecord.__tablename__}"))


def _timed(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began
