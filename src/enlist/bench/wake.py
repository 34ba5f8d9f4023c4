"""``enlist bench wake``: how soon an idle worker starts a job, how exactly at its time, and what telling it costs."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final, Self

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from enlist import notifier
from enlist._cli_database import connecting, engine_for
from enlist.bench import producer
from enlist.bench._claim_facts import percentile
from enlist.bench.producer import Base, Task, as_line, enqueued
from enlist.demo.scratch import scratch
from enlist.exceptions import EnlistError
from enlist.handlers import HandlerRegistry
from enlist.job import Job
from enlist.models import JobRecord
from enlist.worker import Worker

__all__ = ["Idle", "Latency", "Throughput", "WakeFacts", "run_wake"]

SCHEMA: Final = "enlist_bench_wake"
PLAIN: Final = "bench_plain"
ASYNC: Final = "bench_async"

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

    def as_text(self) -> str:
        """For people."""
        p50, p99 = percentile(self.milliseconds, 50), percentile(self.milliseconds, 99)
        return f"{self.title:<58} {p50:7.2f} {p99:7.2f} {max(self.milliseconds):7.2f}"

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

    def as_text(self) -> str:
        """For people."""
        medians = {notify: statistics.median(rates) for notify, rates in self.by_notify.items()}
        told = [f"{medians[name]:,.0f} with {name!r} ({self.ratio(name):.2f} times)" for name in NOTIFIES if name]
        return (
            f"commits/s of {COMMITTERS} processes, a row and a job each: {medians[None]:,.0f} with notify=None,"
            f" {', '.join(told)} (goal for 'after_commit': at least {COMMITS_GOAL})"
        )


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
class WakeFacts:
    """What was measured."""

    latencies: tuple[Latency, ...]
    due: Latency
    throughput: Throughput
    idle: Idle
    server: str
    fsync: str

    def as_text(self) -> str:
        """For people."""
        lines = [
            f"{'from the return of COMMIT to the handler, in milliseconds':<58} {'p50':>7} {'p99':>7} {'max':>7}",
            *(latency.as_text() for latency in self.latencies),
            f"  (goals: p50 {P50_GOAL}, p99 {P99_GOAL})",
            self.due.as_text(),
            f"  (goal: {DUE_GOAL:g} at most; the worker polls every {POLL_SECONDS:g} s)",
            self.throughput.as_text(),
            f"an idle worker that polls every {self.idle.poll_seconds:g} s sends {self.idle.rate:.2f} statements/s",
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


def run_wake(
    *,
    url: sa.URL | None = None,
    jobs: int = 300,
    repeat: int = 5,
    seconds: float = 2.0,
    due_jobs: int = DUE_JOBS,
    idle_seconds: float = IDLE_SECONDS,
) -> WakeFacts:
    """Measure.

    :param url: the database, in which a schema ``enlist_bench_wake`` is made and dropped; default a server of its own.
    :param jobs: how many to enqueue one by one, of each of four sorts.
    :param repeat: how many rounds of commits, by eight processes at once.
    :param seconds: how long each of them.
    :param due_jobs: how many to enqueue for a time.
    :param idle_seconds: how long to look at a worker that has nothing to do.
    :raises EnlistError: no server or schema could be had, or a job was not started in time.
    """
    with scratch(SCHEMA, url) as place, ExitStack() as stack:
        with connecting(engine_for(place.url)) as connection:
            server = connection.scalar(sa.text("SHOW server_version"))
            fsync = connection.scalar(sa.text("SHOW fsync"))
        engine = sa.create_engine(place.url)
        stack.callback(engine.dispose)
        stack.callback(notifier.close_all)
        Base.metadata.create_all(engine)
        bench = _Bench(engine, stack.enter_context(_Producers(place.url, 1)))
        with bench.working():
            latencies = tuple(
                bench.latency(kind, jobs, apart=apart) for apart in (True, False) for kind in (PLAIN, ASYNC)
            )
            due = bench.due(due_jobs)
            with _Producers(place.url, COMMITTERS) as committers:
                throughput = _throughput(committers, repeat, seconds)
        idle = bench.idle(idle_seconds)
    return WakeFacts(latencies, due, throughput, idle, str(server), str(fsync))


class _Producers:
    """Producers in processes of their own."""

    def __init__(self, url: sa.URL, number: int) -> None:
        environment = {**os.environ, "ENLIST_DATABASE_URL": url.render_as_string(hide_password=False)}
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", producer.__name__],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(number)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def do(self, task: Task) -> list[Any]:
        """Have all of them do a task at once; their answers."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(as_line(task))
            process.stdin.flush()
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise EnlistError(f"a producer has ended with status {process.wait()}: see what it says above")
            answers.append(json.loads(line))
        return answers


class _Bench:
    """A worker in this process that notes when its handlers begin."""

    def __init__(self, engine: sa.Engine, apart: _Producers) -> None:
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
            found: dict[str, float] = self._apart.do(task)[0] if apart else enqueued(self._engine, task)
            return found

        self._wait_for(enqueue(min(jobs, WARM_UP)))
        committed = enqueue(jobs)
        self._wait_for(committed)
        handler = "plain handler" if kind == PLAIN else "async handler"
        title = f"{handler}, producer in {'another process' if apart else 'the same process'}"
        return Latency(title, tuple((self._started[job] - when) * 1000 for job, when in committed.items()))

    def due(self, jobs: int) -> Latency:
        """Enqueue jobs for times to come."""
        committed = self._apart.do(Task(kind=PLAIN, jobs=jobs, delays=DUE_SECONDS))[0]
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


def _throughput(committers: _Producers, repeat: int, seconds: float) -> Throughput:
    """Let all commit as often as they can, in turn with each way of telling: what slows the machine slows each."""
    rates: dict[str | None, list[float]] = {notify: [] for notify in NOTIFIES}
    committers.do(Task(seconds=min(seconds, 0.5)))
    for _ in range(repeat):
        for notify in NOTIFIES:
            rates[notify].append(sum(committers.do(Task(seconds=seconds, notify=notify))) / seconds)
    return Throughput({notify: tuple(found) for notify, found in rates.items()})
