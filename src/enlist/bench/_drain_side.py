"""A job table that is drained again and again, the processes that do it, and the clock beside them."""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import sqlalchemy as sa
from sqlalchemy.orm import Session

from enlist.bench import drainer
from enlist.bench._claim_table import make_anew
from enlist.bench._drain_facts import Drain
from enlist.bench._processes import Processes
from enlist.bench._progress import Progress
from enlist.bench.drainer import Base, DrainJob, Effect
from enlist.models import JobRecord, JobStatus
from enlist.repository import JobRepository

if TYPE_CHECKING:
    import uuid
    from collections.abc import Iterator

    from enlist.bench._drain_rows import State
    from enlist.bench.drainer import Way

__all__ = ["Side"]

WARM_UP: Final = 200
"""Jobs."""

STALLED_SECONDS: Final = 30.0
"""Without a run for so long the drain is over, and what is missing is told."""

SHORTEST_PAUSE: Final = 0.002
LONGEST_PAUSE: Final = 0.25
"""Seconds between two looks at the workers: half of what is left, as it seems. Each look takes a moment of theirs."""


class Look(NamedTuple):
    """How far the workers are, all together."""

    runs: int
    in_hand: int
    cpu_seconds: float


class Side:
    """A table and its workers.

    :param way: what the handler does.
    :param state: what is in the table beside the jobs that are measured; default nothing.
    :param number: how many jobs that is.
    :param own_server: the server is there for this only, and may be told to write a checkpoint.
    """

    def __init__(
        self,
        url: sa.URL,
        way: Way,
        processes: int,
        slots: int,
        *,
        state: State | None = None,
        number: int = 0,
        own_server: bool = False,
    ) -> None:
        self.processes = processes
        self._way = way
        self._slots = slots
        self._state = state
        self._number = number
        self._own_server = own_server
        self._first: uuid.UUID | None = None
        """The id of the last drain's first job. What else is in the table has lower ones."""
        self._stack = ExitStack()
        self._engine = sa.create_engine(url)
        self._stack.callback(self._engine.dispose)
        self._admin = self._engine.execution_options(isolation_level="AUTOCOMMIT")
        Base.metadata.create_all(self._engine)
        make_anew(self._engine)
        self._workers = self._stack.enter_context(Processes(drainer, url, processes))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def warm_up(self, jobs: int) -> None:
        """Drain some jobs, a few at most: in a new process statements get compiled and modules imported."""
        self._make_ready()
        self._drain(0, min(jobs, WARM_UP), Progress())

    def drain(self, jobs: int, progress: Progress) -> Drain:
        """Bring the table into its state, start the workers, and time some jobs."""
        self._make_ready()
        pinned = self._state is not None and self._state.jobs is None
        return self._drain(self._number if pinned else 0, jobs, progress)

    def _drain(self, before: int, jobs: int, progress: Progress) -> Drain:
        """Time some jobs; before them have others run, if any, while an old transaction is open."""
        self._workers.ask({"do": "start", "way": asdict(self._way), "slots": self._slots})
        clock = _Clock(self._engine, self._workers, before + jobs, progress)
        with self._old_transaction() if before else nullcontext():
            if before:
                clock.work_off(before)
            seconds, cpu_seconds, wal_bytes = clock.work_off(jobs)
        runs = [number for numbers in self._workers.ask({"do": "stop"}) for number in numbers]
        self._first = clock.first
        counts = (clock.done(), len(runs), len(set(runs)), *self._rows())
        return Drain(jobs, seconds, cpu_seconds, wal_bytes, before + jobs, *counts)

    def _make_ready(self) -> None:
        filling = None if self._state is None else self._state.jobs
        with self._admin.connect() as connection:
            connection.exec_driver_sql(f"TRUNCATE {Effect.__tablename__}")
            if filling is None:
                connection.exec_driver_sql("TRUNCATE enlist_job")
                return
            if self._first is None:
                counted = sa.select(sa.func.count()).select_from(filling.insert().cte("made_jobs"))
                connection.execute(counted, {"number": self._number})
            else:
                connection.execute(sa.delete(JobRecord).where(JobRecord.id >= self._first))
            connection.exec_driver_sql("VACUUM (ANALYZE) enlist_job")
            if self._own_server and self._first is None:  # else the first drain waits while all that is written to disk
                connection.exec_driver_sql("CHECKPOINT")

    @contextmanager
    def _old_transaction(self) -> Iterator[None]:
        """An idle transaction with a snapshot of now, such as a long report, or a session that somebody forgot."""
        with self._engine.connect().execution_options(isolation_level="REPEATABLE READ") as connection:
            connection.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = 0")
            connection.exec_driver_sql("SELECT 1")
            yield

    def _rows(self) -> tuple[int, int] | tuple[()]:
        """How many rows the handlers have inserted, and of how many jobs."""
        if self._way.does not in {"insert", "add"}:
            return ()
        with self._admin.connect() as connection:
            counts = sa.select(sa.func.count(), sa.func.count(sa.distinct(Effect.job)))
            rows, distinct = connection.execute(counts).one()
        return rows, distinct


class _Clock:
    """The clock of a drain: from the commit that enqueues the jobs until the database says that all are done."""

    def __init__(self, engine: sa.Engine, workers: Processes, of: int, progress: Progress) -> None:
        self._engine = engine
        self._workers = workers
        self._of = of
        self._progress = progress
        self._enqueued = 0
        self.first: uuid.UUID | None = None
        """The first job's id. What else is in the table has lower ones."""

    def work_off(self, jobs: int) -> tuple[float, float, int]:
        """Enqueue jobs and have them run; return the seconds, those of CPU, and the bytes of WAL.

        The workers are there, and find nothing until the commit: then all at once.
        """
        numbers = range(self._enqueued, self._enqueued + jobs)
        with Session(self._engine) as session:
            payloads = [DrainJob(number=number) for number in numbers]
            handles = JobRepository(notify="transaction").enqueue_many(session, payloads)
            session.flush()
            before, wal = self._look(), session.scalar(_WAL)
            session.commit()
            began = time.perf_counter()
        self._enqueued += jobs
        self.first = self.first or handles[0].id
        ended = self._all_done()
        cpu_seconds = self._look().cpu_seconds - before.cpu_seconds
        with self._engine.connect() as connection:
            return ended - began, cpu_seconds, int(connection.scalar(_WAL)) - int(wal)

    def done(self) -> int:
        """How many are done, as the database counts."""
        mine = sa.select(sa.func.count()).where(JobRecord.id >= self.first, JobRecord.status == JobStatus.DONE)
        with self._engine.connect() as connection:
            return connection.scalar(mine) or 0

    def _all_done(self) -> float:
        """Wait; return when it was. The database is asked when the workers have nothing in hand any more."""
        began = changed = time.perf_counter()
        start = last = self._look().runs
        while True:
            found, now = self._look(), time.perf_counter()
            self._progress.within(found.runs / self._of)
            if found.runs >= self._enqueued and not found.in_hand and self.done() >= self._enqueued:
                return now
            if found.runs != last:
                last, changed = found.runs, now
            elif now - changed > STALLED_SECONDS:
                return now
            left = (now - began) * (self._enqueued - found.runs) / max(found.runs - start, 1)
            time.sleep(min(max(left / 2, SHORTEST_PAUSE), LONGEST_PAUSE))

    def _look(self) -> Look:
        looks = self._workers.ask({"do": "look"})
        return Look(*(sum(look[field] for look in looks) for field in Look._fields))


_WAL: Final = sa.text("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')")
