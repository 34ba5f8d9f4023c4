"""``enlist bench lab``: 1,000 short jobs, one that fails twice, one whose worker dies; facts first, then seconds."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa
import tenacity
from sqlalchemy.orm import Session

from enlist._cli_database import connecting, engine_for
from enlist._database import Database
from enlist._reaper import expired, reap
from enlist.bench import victim
from enlist.bench._progress import Progress
from enlist.bench._text import table
from enlist.demo.scratch import scratch
from enlist.exceptions import EnlistError
from enlist.handlers import HandlerRegistry
from enlist.job import Job
from enlist.models import JobRecord
from enlist.payload import JobPayload
from enlist.repository import JobRepository
from enlist.worker import Worker

if TYPE_CHECKING:
    import uuid

__all__ = ["Facts", "LabError", "run_lab"]

SCHEMA: Final = "enlist_lab"
JOBS: Final = 1000
JOB_SECONDS: Final = 0.002
SLOTS: Final = 8
FAILURES: Final = 2
"""How often the one job fails before it succeeds."""

PATIENCE_SECONDS: Final = 60.0


class LabError(EnlistError):
    """The lab could not be brought to its end."""


class ShortJob(JobPayload, kind="lab_short", queue="lab"):
    """Takes two milliseconds."""

    failures: int = 0


@dataclass(frozen=True)
class Round:
    """What came of the 1,000 jobs."""

    done: int
    """As the database counts."""
    distinct: int
    """Jobs whose handler ran."""
    more_than_once: int
    most_runs: int
    seconds: float
    """From the worker's start, connections included, until the database says that all are done."""

    @property
    def right(self) -> bool:
        """Whether each job ran once, but for the one that failed twice."""
        return (self.done, self.distinct, self.more_than_once, self.most_runs) == (JOBS, JOBS, 1, FAILURES + 1)


@dataclass(frozen=True)
class Facts:
    """What the lab found."""

    rounds: tuple[Round, ...]
    reaped_before: int
    """Jobs taken back while the dead worker's lease lasted."""
    reaped_after: int
    attempt: int
    """Of the job that was taken back, when it ran again."""
    server: str
    fsync: str

    @property
    def round(self) -> Round:
        """The round to show: one that is off, if there is any."""
        return next((one for one in self.rounds if not one.right), self.rounds[-1])

    @property
    def right(self) -> bool:
        """Whether all is as it should be; the seconds are not judged."""
        returned = (self.reaped_before, self.reaped_after, self.attempt)
        return self.round.right and returned == (0, 1, 2)

    @property
    def seconds(self) -> float:
        """The median."""
        return statistics.median(one.seconds for one in self.rounds)

    def as_text(self) -> str:
        """For people."""
        shown, all_seconds = self.round, [one.seconds for one in self.rounds]
        facts = [
            ("jobs done", shown.done, JOBS),
            ("distinct jobs run", shown.distinct, JOBS),
            ("jobs run more than once", shown.more_than_once, 1),
            ("most runs of a job", shown.most_runs, FAILURES + 1),
            ("reaped before the dead worker's lease ends", self.reaped_before, 0),
            ("reaped after that", self.reaped_after, 1),
            ("run again as attempt", self.attempt, 2),
        ]
        lines = [
            f"{JOBS:,} jobs of {JOB_SECONDS * 1000:g} ms on {SLOTS} slots, one fails {FAILURES} times.",
            "A worker is killed while it holds another job.",
            "",
            *table(
                ["", "found", "must be"], [[title, f"{found:,}", f"{must_be:,}"] for title, found, must_be in facts]
            ),
            "",
            f"seconds for the {JOBS:,}: {self.seconds:.3f} (ideal {JOBS * JOB_SECONDS / SLOTS:.2f})",
            f"  the median of {len(all_seconds)}, {min(all_seconds):.3f} to {max(all_seconds):.3f}",
            f"PostgreSQL {self.server}, fsync {self.fsync}",
            f"done={shown.done}, {'all' if self.right else 'NOT'} as it should be",
        ]
        return "\n".join(lines)

    def as_json(self) -> str:
        """For programs."""
        shown = self.round
        facts = {
            "done": shown.done,
            "distinct_jobs_run": shown.distinct,
            "run_more_than_once": shown.more_than_once,
            "most_runs": shown.most_runs,
            "reaped_before": self.reaped_before,
            "reaped_after": self.reaped_after,
            "attempt": self.attempt,
            "seconds": round(self.seconds, 4),
            "seconds_of_rounds": [round(one.seconds, 4) for one in self.rounds],
            "server": self.server,
            "fsync": self.fsync,
            "right": self.right,
        }
        return json.dumps(facts, indent=2)


def run_lab(*, url: sa.URL | None = None, repeat: int = 1, progress: Progress | None = None) -> Facts:
    """Run the lab.

    :param url: the database, in which a schema ``enlist_lab`` is made and dropped; default a server of its own.
    :param repeat: how often to time the 1,000 jobs.
    :param progress: told how far it is.
    :raises EnlistError: no server or schema could be had, or jobs were not done within a minute.
    """
    progress = progress or Progress()
    progress.begin(repeat + 1)
    with scratch(SCHEMA, url) as place:
        with connecting(engine_for(place.url)) as connection:
            server = connection.scalar(sa.text("SHOW server_version"))
            fsync = connection.scalar(sa.text("SHOW fsync"))
        engine = sa.create_engine(place.url, pool_size=SLOTS + 2)
        try:
            rounds = tuple(_short_jobs(engine) for _ in progress.rounds(repeat, f"{JOBS:,} short jobs"))
            progress.step("a job whose worker is killed")
            before, after, attempt = _dying_worker(engine, place.url)
        finally:
            engine.dispose()
    return Facts(rounds, before, after, attempt, str(server), str(fsync))


def _short_jobs(engine: sa.Engine) -> Round:
    """Time the jobs on a fresh table."""
    runs: Counter[uuid.UUID] = Counter()
    succeeded = threading.Semaphore(0)
    handlers = HandlerRegistry()

    @handlers.handler(ShortJob, wait=tenacity.wait_none())
    def short_job(session: Session, job: Job[ShortJob]) -> None:
        time.sleep(JOB_SECONDS)
        runs[job.id] += 1  # this job's alone: an attempt at a time
        if job.attempt <= job.payload.failures:
            raise RuntimeError("this job fails twice")
        succeeded.release()

    with engine.begin() as connection:
        connection.exec_driver_sql("TRUNCATE enlist_job")
    with Session(engine) as session, session.begin():
        jobs = [ShortJob(failures=FAILURES if number == JOBS // 2 else 0) for number in range(JOBS)]
        JobRepository(notify=None).enqueue_many(session, jobs)

    worker = Worker(engine, handlers, queues={"lab": SLOTS})
    deadline = time.monotonic() + PATIENCE_SECONDS
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        count = sa.text("SELECT count(*) FROM enlist_job WHERE status = 'done'")
        began = time.perf_counter()
        worker.start()
        try:
            for _ in range(JOBS):
                if not succeeded.acquire(timeout=max(0.0, deadline - time.monotonic())):
                    break
            while (done := connection.scalar(count)) != JOBS and time.monotonic() < deadline:
                time.sleep(0.001)
            seconds = time.perf_counter() - began
        finally:
            worker.stop()
    return Round(
        done=done or 0,
        distinct=len(runs),
        more_than_once=sum(times > 1 for times in runs.values()),
        most_runs=max(runs.values(), default=0),
        seconds=seconds,
    )


def _dying_worker(engine: sa.Engine, url: sa.URL) -> tuple[int, int, int]:
    """Let a worker die with a job; return how many jobs are reaped too early, then in time, and the next attempt."""
    attempts: list[int] = []
    handlers = HandlerRegistry()

    @handlers.handler(victim.KIND)
    def doomed(session: Session, job: Job[dict[str, Any]]) -> None:
        attempts.append(job.attempt)

    with Session(engine) as session, session.begin():
        handle = JobRepository(notify=None).enqueue(session, victim.KIND, {}, queue=victim.QUEUE)
    _let_it_die(url)
    database = Database(engine, JobRecord)
    before = len(reap(database, expired(database)))
    lease_over = sa.select(JobRecord.locked_until < sa.func.clock_timestamp()).where(JobRecord.id == handle.id)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        with engine.connect() as connection:
            if connection.scalar(lease_over):
                break
        time.sleep(0.01)
    after = len(reap(database, expired(database)))
    worker = Worker(engine, handlers, queues={victim.QUEUE: 1})
    worker.drain(timeout=PATIENCE_SECONDS)
    return before, after, attempts[0] if attempts else 0


def _let_it_die(url: sa.URL) -> None:
    """Start a worker in a process, wait until it has the job, and kill it."""
    process = subprocess.Popen(
        [sys.executable, "-m", victim.__name__],
        env={**os.environ, "ENLIST_DATABASE_URL": url.render_as_string(hide_password=False)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    impatience = threading.Timer(PATIENCE_SECONDS, process.kill)
    impatience.start()
    with process:
        try:
            assert process.stdout is not None
            attempt = process.stdout.readline()
        finally:
            impatience.cancel()
            process.kill()
    if attempt.strip() != b"1":
        raise LabError(f"the worker that was to die said {attempt!r} instead of its job's first attempt, 1")
