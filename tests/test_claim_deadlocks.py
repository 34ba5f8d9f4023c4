"""No two of the statements that change jobs ever wait for each other in a circle."""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from random import Random
from typing import Any, Self

import pytest
import sqlalchemy as sa
from psycopg import sql
from sqlalchemy import URL, create_engine
from sqlalchemy.orm import Session

from enlist import JobRecord, JobRepository, JobStatus, notifier
from enlist._reaper import expired, reap
from enlist._slots import Run
from enlist._statements import statements_for
from tests.support import Observer, wait_until
from tests.support.claimers import QUEUES, Claiming, check_table, insert_jobs

JOBS = 300


class Everybody:
    """Who does what to the same few hundred jobs, each on a thread and on connections of its own, in random order.

    :param url: of the database; all errors that any of them gets are kept in ``errors``.
    """

    def __init__(self, url: URL) -> None:
        self._url = url
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._ids: deque[uuid.UUID] = deque(maxlen=2 * JOBS)
        self._runs: deque[Run] = deque(maxlen=JOBS // 2)
        self._stack = ExitStack()
        self.repository = JobRepository()
        table = sa.inspect(JobRecord).local_table
        assert isinstance(table, sa.Table)
        self.statements = statements_for(table)
        self.rounds: Counter[str] = Counter()
        self.changed: Counter[str] = Counter()
        self.errors: list[str] = []
        self.inserted = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    # -- what they share -----------------------------------------------------------------------------------------

    def ids(self, random: Random) -> list[uuid.UUID]:
        """Some jobs, in any order."""
        with self._lock:
            known = list(self._ids)
        return random.sample(known, min(len(known), random.randint(1, 60)))

    def runs(self, random: Random) -> list[Run]:
        """Some attempts, in any order; some of them are over, and some are in others' hands at the same time."""
        with self._lock:
            known = list(self._runs)
        return random.sample(known, min(len(known), random.randint(1, 60)))

    def latest_run(self, random: Random) -> list[Run]:
        """One of the latest attempts, which few have ended yet."""
        with self._lock:
            known = list(self._runs)[-10:]
        return random.sample(known, min(len(known), 1))

    # -- what they do: each returns how many jobs it changed --------------------------------------------------------

    def insert(self, observer: Observer, random: Random) -> int:
        """Keep the number of jobs up: a third without a key, a third with one, a third with an ordered one."""
        missing = JOBS - int(observer.scalar("SELECT count(*) FROM enlist_job"))
        if missing <= 0:
            return 0
        jobs: list[dict[str, Any]] = []
        for _ in range(min(missing, 50)):
            job: dict[str, Any] = {"queue": random.choice(QUEUES), "priority": random.randint(0, 3)}
            match random.randrange(3):
                case 1:
                    limit = random.randint(1, 3)
                    job |= {"concurrency_key": f"key {limit} {random.randrange(3)}", "concurrency_limit": limit}
                case 2:
                    key = f"ordered {random.randrange(5)}"
                    job |= {"concurrency_key": key, "concurrency_limit": 1, "ordered": True}
            jobs.append({**job, "max_attempts": 10_000})
        ids = insert_jobs(observer, jobs)
        with self._lock:
            self._ids += ids
            self.inserted += len(ids)
        return len(ids)

    def claim(self, claiming: Claiming, random: Random) -> int:
        queues = random.sample(QUEUES, random.randint(1, len(QUEUES)))
        runs = claiming.claim({queue: random.randint(1, 20) for queue in queues})
        with self._lock:
            self._runs += runs
        return len(runs)

    def complete(self, claiming: Claiming, random: Random) -> int:
        runs = self.runs(random)
        return len(claiming.complete(runs[:20])) if runs else 0

    def settle(self, claiming: Claiming, random: Random) -> int:
        runs = self.runs(random)
        status = random.choice((JobStatus.QUEUED, JobStatus.QUEUED, JobStatus.DEAD, JobStatus.CANCELLED))
        return len(claiming.settle(runs, status, random.choice((0, 0.05)), random.randint(0, 1))) if runs else 0

    def renew(self, claiming: Claiming, random: Random) -> int:
        runs = self.runs(random)
        if runs:
            claiming.renew(runs)
        return len(runs)

    def reap(self, claiming: Claiming, random: Random) -> int:
        found = expired(claiming.database)
        return len(reap(claiming.database, random.sample(found, random.randint(0, len(found)))))

    def disown(self, claiming: Claiming, random: Random) -> int:
        """Give back what one of the claimers has in the table, as after a claim whose answer was lost."""
        statements = claiming.database.statements
        held = [run.id for run in self.runs(random)]
        return len(claiming.database.execute(statements.disown, {"worker": "claimer 0", "ids": held}))

    def finish(self, session: Session, random: Random) -> int:
        """A handler that works under the lock of its job's row, or commits its status with its work."""
        statements = self.statements
        for run in self.latest_run(random):
            ours = {"job_id": run.id, "token": run.token}
            if (
                random.random() < 0.5
                and not session.execute(statements.lock_row(0), {**ours, "idle_limit": "5s"}).all()
            ):
                return 0
            time.sleep(random.choice((0, 0.002)))
            if random.random() < 0.3:
                session.rollback()
                return 0
            result = session.connection().execute(statements.finish(0), ours)
            return result.rowcount
        return 0

    def cancel(self, session: Session, random: Random) -> int:
        return len(self.repository.cancel(session, self.ids(random)).changed)

    def retry(self, session: Session, random: Random) -> int:
        return len(self.repository.retry(session, self.ids(random)).changed)

    def reschedule(self, session: Session, random: Random) -> int:
        ids = self.ids(random)
        return len(self.repository.reschedule(session, ids, delay=random.choice((0, 0, 0.05))).changed)

    def prune(self, session: Session, random: Random) -> int:
        return self.repository.prune(session, older_than=0, limit=random.randint(1, 15))

    # -- all at once -----------------------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        """Have them at it for some seconds."""
        observer = self._stack.enter_context(Observer(self._url))
        random = Random(0)
        while self.inserted < JOBS:
            self.insert(observer, random)
        everybody: list[tuple[str, Callable[[Random], int]]] = [
            ("insert", lambda random: self.insert(observer, random))
        ]
        for name, act, number in (
            ("claim", self.claim, 3),
            ("complete", self.complete, 2),
            ("settle", self.settle, 2),
            ("renew", self.renew, 2),
            ("reap", self.reap, 2),
            ("disown", self.disown, 1),
        ):
            for index in range(number):
                # One claimer's leases are short: its jobs are for the reaper.
                lease = 0.05 if index == 0 else 60
                claiming = self._stack.enter_context(Claiming(self._url, f"{name}er {index}", lease=lease))
                everybody.append((name, self._of_worker(act, claiming)))
        for name, act_in, number in (
            ("finish", self.finish, 2),
            ("cancel", self.cancel, 2),
            ("retry", self.retry, 3),
            ("reschedule", self.reschedule, 2),
            ("prune", self.prune, 2),
        ):
            for _ in range(number):
                engine = create_engine(self._url)
                self._stack.callback(engine.dispose)
                everybody.append((name, self._of_application(act_in, engine)))
        with ThreadPoolExecutor(len(everybody)) as pool:
            try:
                for seed, (name, looped) in enumerate(everybody):
                    pool.submit(self._loop, name, looped, Random(seed))
                self._stop.wait(seconds)
                # On a busy machine one may have found nothing to do by then.
                wait_until(lambda: self.errors or all(self.changed[name] for name, _ in everybody), 30)
            finally:
                self._stop.set()

    @staticmethod
    def _of_worker(act: Callable[[Claiming, Random], int], claiming: Claiming) -> Callable[[Random], int]:
        return lambda random: act(claiming, random)

    @staticmethod
    def _of_application(act: Callable[[Session, Random], int], engine: sa.Engine) -> Callable[[Random], int]:
        def in_session(random: Random) -> int:
            with Session(engine) as session, session.begin():
                return act(session, random)

        return in_session

    def _loop(self, name: str, act: Callable[[Random], int], random: Random) -> None:
        while not self._stop.is_set():
            try:
                changed = act(random)
            except Exception as error:
                with self._lock:
                    self.errors.append(f"{name}: {error!r}")
                return
            with self._lock:
                self.rounds[name] += 1
                self.changed[name] += changed


def deadlocks(observer: Observer) -> int:
    """How many deadlocks the server has ended in this database; exact once all other sessions are over."""
    notifier.close_all()
    observer.wait_for(
        "SELECT count(*) = 1 FROM pg_stat_activity"
        " WHERE datname = current_database() AND backend_type = 'client backend'"
    )
    number: int = observer.scalar("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
    return number


@pytest.mark.parametrize(
    ("seconds", "rounds"),
    [(2, 100), pytest.param(40, 5000, marks=[pytest.mark.slow, pytest.mark.timeout(120)])],
)
def test_everything_that_changes_jobs_at_once_deadlocks_never(
    seconds: float, rounds: int, database_url: URL, observer: Observer
) -> None:
    """Claims, heartbeats, endings, the reaper, handlers' commits, operators' commands and pruning.

    Of jobs without unique keys: some commands may deadlock where those are replaced or released.
    """
    name = sql.Identifier(str(database_url.database))
    observer.connection.execute(sql.SQL("ALTER DATABASE {} SET deadlock_timeout = '10ms'").format(name))
    before = deadlocks(observer)
    with Everybody(database_url) as everybody:
        everybody.run(seconds)
    assert everybody.errors == []
    assert deadlocks(observer) == before
    assert everybody.rounds.total() >= rounds
    assert all(everybody.changed[name] for name in everybody.rounds), everybody.changed
    assert observer.scalar("SELECT count(*) FROM enlist_job") == everybody.inserted - everybody.changed["prune"]
    check_table(observer)
