"""``enlist bench latency``: how soon an idle worker starts a job, how exactly at its time, what telling costs."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from enlist import notifier
from enlist._cli_database import connecting, engine_for
from enlist.bench import producer
from enlist.bench._claim_facts import percentile
from enlist.bench._processes import Processes
from enlist.bench._progress import Progress
from enlist.bench._text import table
from enlist.bench.producer import Base, Task, enqueued
from enlist.demo.scratch import scratch
from enlist.exceptions import EnlistError
from enlist.handlers import HandlerRegistry
from enlist.job import Job
from enlist.models import JobRecord
from enlist.worker import Worker

__all__ = ["Idle", "Latency", "LatencyFacts", "Throughput", "run_latency"]

SCHEMA: Final = "enlist_bench_latency"
PLAIN: Final = "bench_plain"
ASYNC: Final = "bench_async"

SORTS: Final = tuple((kind, apart) for apart in (True, False) for kind in (PLAIN, ASYNC))
"""Of jobs that are enqueued one by one: the handler's kind; whether the producer is a process apart."""

COMMITTERS: Final = 8
NOTIFIES: Final = ("after_commit", "transaction", None)
WARM_UP: Final = 20
DUE_JOBS: Final = 100
DUE_SECONDS: Final = (0.2, 1.5)
POLL_SECONDS: Final = 60.0
IDLE_SECONDS: Final = 5.0
PATIENCE_SECONDS: Final = 30.0

P50_GOAL: Final = 1.5
P99_GOAL: Final = 5.0
DUE_GOAL: Final = 50.0
COMMITS_GOAL: Final = 0.9


@dataclass(frozen=True)
class Latency:
    """How much later jobs began than they might have."""

    title: str
    milliseconds: tuple[float, ...]

    def as_cells(self) -> list[str]:
        """A row of the table, without its goals."""
        values = (percentile(self.milliseconds, 50), percentile(self.milliseconds, 99), max(self.milliseconds))
        return [self.title, *(f"{value:.2f}" for value in values)]

    def as_dict(self) -> dict[str, float]:
        """For programs."""
        return {
            "jobs": len(self.milliseconds),
            "p50_ms": round(percentile(self.milliseconds, 50), 3),
            "p99_ms": round(percentile(self.milliseconds, 99), 3),
            "max_ms": round(max(self.milliseconds), 3),
        }


@dataclass(frozen=True)
class Throughput:
    """How many transactions of a row and a job were committed in a second, by eight processes: of each round."""

    by_notify: dict[str | None, tuple[float, ...]]

    def ratio(self, notify: str) -> float:
        """To those that tell nobody: the median of the rounds' ratios."""
        rounds = zip(self.by_notify[notify], self.by_notify[None], strict=True)
        return statistics.median(some / most for some, most in rounds)

    def as_lines(self) -> list[str]:
        """The table."""
        rows = [["notify=None", f"{statistics.median(self.by_notify[None]):,.0f}", "", ""]]
        for name in NOTIFIES:
            if name is not None:
                goal = f"{COMMITS_GOAL:g}" if name == "after_commit" else ""
                rate = f"{statistics.median(self.by_notify[name]):,.0f}"
                rows.append([f"notify={name!r}", rate, f"{self.ratio(name):.2f}", goal])
        return table([f"a row and a job a transaction, {COMMITTERS} processes", "commits/s", "ratio", "at least"], rows)


@dataclass(frozen=True)
class Idle:
    """What a worker with nothing to do asks the database."""

    poll_seconds: float
    statements: int
    seconds: float

    @property
    def rate(self) -> float:
        """Statements a second."""
        return self.statements / self.seconds


@dataclass(frozen=True)
class LatencyFacts:
    """What was measured."""

    latencies: tuple[Latency, ...]
    due: Latency
    throughput: Throughput
    idle: Idle
    server: str
    fsync: str

    def as_text(self) -> str:
        """For people."""
        goals = f"{P50_GOAL:g} / {P99_GOAL:g}"
        rows = [[*latency.as_cells(), goals] for latency in self.latencies]
        rows.append([*self.due.as_cells(), f"{DUE_GOAL:g}"])
        lines = [
            "How soon an idle worker starts a job: milliseconds from the return of COMMIT, or from the job's time.",
            "",
            *table(["", "p50", "p99", "max", "at most"], rows),
            "",
            *self.throughput.as_lines(),
            "",
            f"The worker polled every {POLL_SECONDS:g} s.",
            f"An idle one that polls every {self.idle.poll_seconds:g} s sends {self.idle.rate:.2f} statements/s.",
            f"PostgreSQL {self.server}, fsync {self.fsync}",
        ]
        return "\n".join(lines)

    def as_json(self) -> str:
        """For programs."""
        rates = {str(notify): [round(rate, 1) for rate in rates] for notify, rates in self.throughput.by_notify.items()}
        ratios = {name: round(self.throughput.ratio(name), 4) for name in NOTIFIES if name}
        facts = {
            "latency": {latency.title: latency.as_dict() for latency in self.latencies},
            "latency_goals": {"p50_ms": P50_GOAL, "p99_ms": P99_GOAL},
            "due": {**self.due.as_dict(), "goal_ms": DUE_GOAL},
            "commits": {"per_second": rates, "ratio": ratios, "goal": COMMITS_GOAL, "processes": COMMITTERS},
            "idle": {"statements_per_second": round(self.idle.rate, 3), "poll_seconds": self.idle.poll_seconds},
            "server": self.server,
            "fsync": self.fsync,
        }
        return json.dumps(facts, indent=2)


def run_latency(
    *,
    url: sa.URL | None = None,
    jobs: int = 300,
    repeat: int = 5,
    seconds: float = 2.0,
    due_jobs: int = DUE_JOBS,
    idle_seconds: float = IDLE_SECONDS,
    progress: Progress | None = None,
) -> LatencyFacts:
    """Measure.

    :param url: the database, in which a schema ``enlist_bench_latency`` is made and dropped; default a server of its
        own.
    :param jobs: how many to enqueue one by one, of each of four sorts.
    :param repeat: how many rounds of commits, by eight processes at once.
    :param seconds: how long each of them.
    :param due_jobs: how many to enqueue for a time.
    :param idle_seconds: how long to look at a worker that has nothing to do.
    :param progress: told how far it is.
    :raises EnlistError: no server or schema could be had, or a job was not started in time.
    """
    progress = progress or Progress()
    progress.begin(len(SORTS) + 2 + repeat * len(NOTIFIES))
    with scratch(SCHEMA, url) as place, ExitStack() as stack:
        with connecting(engine_for(place.url)) as connection:
            server = connection.scalar(sa.text("SHOW server_version"))
            fsync = connection.scalar(sa.text("SHOW fsync"))
        engine = sa.create_engine(place.url)
        stack.callback(engine.dispose)
        stack.callback(notifier.close_all)
        Base.metadata.create_all(engine)
        bench = _Bench(engine, stack.enter_context(Processes(producer, place.url, 1)))
        with bench.working():
            latencies = tuple(
                bench.latency(kind, jobs, apart=apart) for kind, apart in progress.each(SORTS, "jobs one by one")
            )
            progress.step("jobs for a time to come")
            due = bench.due(due_jobs)
            with Processes(producer, place.url, COMMITTERS) as committers:
                throughput = _throughput(committers, repeat, seconds, progress)
        progress.step("a worker with nothing to do")
        idle = bench.idle(idle_seconds)
    return LatencyFacts(latencies, due, throughput, idle, str(server), str(fsync))


class _Bench:
    """A worker in this process that notes when its handlers begin."""

    def __init__(self, engine: sa.Engine, apart: Processes) -> None:
        self._engine = engine
        self._apart = apart
        self._started: dict[str, float] = {}
        """By job, when its handler began, by the monotonic clock."""
        self._handlers = HandlerRegistry()

        @self._handlers.handler(PLAIN)
        def plain(session: Session, job: Job[dict[str, Any]]) -> None:
            self._started[str(job.id)] = time.monotonic()

        @self._handlers.handler(ASYNC)
        async def asynchronous(session: AsyncSession, job: Job[dict[str, Any]]) -> None:
            self._started[str(job.id)] = time.monotonic()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Have it work, without any polls to speak of."""
        worker = Worker(self._engine, self._handlers, poll_interval=POLL_SECONDS)
        worker.start()
        try:
            yield
        finally:
            worker.stop()

    def latency(self, kind: str, jobs: int, *, apart: bool) -> Latency:
        """Enqueue jobs one by one, from another process or from a thread of the worker's."""

        def enqueue(number: int) -> dict[str, float]:
            task = Task(kind=kind, jobs=number)
            found: dict[str, float] = self._apart.ask(asdict(task))[0] if apart else enqueued(self._engine, task)
            return found

        self._wait_for(enqueue(min(jobs, WARM_UP)))
        committed = enqueue(jobs)
        self._wait_for(committed)
        handler = "plain handler" if kind == PLAIN else "async handler"
        title = f"{handler}, producer in {'another process' if apart else 'the same process'}"
        return Latency(title, tuple((self._started[job] - when) * 1000 for job, when in committed.items()))

    def due(self, jobs: int) -> Latency:
        """Enqueue jobs for times to come."""
        committed = self._apart.ask(asdict(Task(kind=PLAIN, jobs=jobs, delays=DUE_SECONDS)))[0]
        self._wait_for(committed)
        with self._engine.connect() as connection:
            ahead = _server_ahead(connection)
            found = sa.select(JobRecord.id, sa.cast(sa.extract("epoch", JobRecord.run_at), sa.Double))
            run_at = {str(job_id): due for job_id, due in connection.execute(found).all()}
        late = [(self._started[job] + ahead - run_at[job]) * 1000 for job in committed]
        return Latency("from a job's time to the handler", tuple(late))

    def idle(self, seconds: float) -> Idle:
        """Count what a worker asks that has nothing to do, with the poll interval that workers have."""
        worker = Worker(self._engine, self._handlers)
        sent: list[float] = []
        worker.start()
        try:
            assert worker._running is not None
            time.sleep(worker._poll_seconds)  # what it asks at its start does not count
            event.listen(
                worker._running.database.engine, "before_cursor_execute", lambda *_: sent.append(time.monotonic())
            )
            time.sleep(seconds)
            return Idle(worker._poll_seconds, len(sent), seconds)
        finally:
            worker.stop()

    def _wait_for(self, jobs: dict[str, float]) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while not jobs.keys() <= self._started.keys():
            if time.monotonic() > end:
                missing = len(jobs.keys() - self._started.keys())
                raise EnlistError(f"{missing} of {len(jobs)} jobs were not started in {PATIENCE_SECONDS:g} seconds")
            time.sleep(0.005)


def _server_ahead(connection: sa.Connection) -> float:
    """What to add to this machine's monotonic clock to have the server's time: as the quickest of some answers says."""
    clock = sa.select(sa.cast(sa.extract("epoch", sa.func.clock_timestamp()), sa.Double))

    def ask() -> tuple[float, float]:
        asked = time.monotonic()
        there = connection.scalar(clock)
        took = time.monotonic() - asked
        return took, float(there or 0.0) - (asked + took / 2)

    return min(ask() for _ in range(20))[1]


def _throughput(committers: Processes, repeat: int, seconds: float, progress: Progress) -> Throughput:
    """Let all commit as often as they can, in turn with each way of telling: what slows the machine slows each."""
    rates: dict[str | None, list[float]] = {notify: [] for notify in NOTIFIES}
    committers.ask(asdict(Task(seconds=min(seconds, 0.5))))
    for _ in range(repeat):
        for notify in NOTIFIES:
            progress.step(f"commits by {COMMITTERS} processes, notify={notify!r}")
            rates[notify].append(sum(committers.ask(asdict(Task(seconds=seconds, notify=notify)))) / seconds)
    return Throughput({notify: tuple(found) for notify, found in rates.items()})
