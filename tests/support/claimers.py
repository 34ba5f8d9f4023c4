"""Claimers without a worker around them, and second opinions on what concurrency keys allow.

``python -m tests.support.claimers URL NUMBER`` has claimers in processes of their own, see :func:`main`.
"""

from __future__ import annotations

import datetime as dt
import json
import multiprocessing
import secrets
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Any, Self

import pytest
from psycopg import sql
from psycopg.types.json import Jsonb
from sqlalchemy import URL, create_engine, event, make_url
from sqlalchemy.orm import Session

from enlist import HandlerRegistry, Job, JobRecord, JobStatus
from enlist._claimer import Claimer
from enlist._completer import Settlement, parameters_of
from enlist._database import Database
from enlist._engines import housekeeping_engine
from enlist._leases import Leases
from enlist._marks import Marks
from enlist._slots import Demand, Run, Slots
from tests.support.observer import Observer

QUEUES = ("default", "mail", "other")

SWITCHES = (
    "hashjoin",
    "mergejoin",
    "nestloop",
    "hashagg",
    "sort",
    "material",
    "seqscan",
    "indexscan",
    "indexonlyscan",
    "bitmapscan",
    "memoize",
    "incremental_sort",
)
"""What the planner may be told to avoid: enable_hashjoin and so on."""


def key_of(run: Run) -> str | None:
    """The concurrency key of a claimed job: these tests write it in the payload as well."""
    key: str | None = json.loads(run.payload).get("key")
    return key


# -- jobs ----------------------------------------------------------------------------------------------------


def new_ids(number: int, random: Random | None = None) -> list[uuid.UUID]:
    """Ids as the producer's, ascending; with ``random`` in any order."""
    start = int.from_bytes(secrets.token_bytes(12), "big") << 32
    ids = [uuid.UUID(int=start + n) for n in range(number)]
    if random is not None:
        random.shuffle(ids)
    return ids


def insert_jobs(observer: Observer, jobs: Sequence[Mapping[str, Any]]) -> list[uuid.UUID]:
    """Insert jobs with any columns, of a default ``kind`` "work", in one transaction; their ids.

    ``due_in`` and ``made_in`` are seconds from the server's now, for ``run_at`` and ``created_at``.
    """
    ids = [job.get("id") or new_id for job, new_id in zip(jobs, new_ids(len(jobs)), strict=True)]
    by_columns: dict[tuple[str, ...], list[list[Any]]] = {}
    now = observer.scalar("SELECT statement_timestamp()")
    for job_id, job in zip(ids, jobs, strict=True):
        row = {"kind": "work", **job, "id": job_id, "payload": Jsonb({"key": job.get("concurrency_key")})}
        for column, seconds in (("run_at", row.pop("due_in", -1)), ("created_at", row.pop("made_in", 0))):
            row[column] = now + dt.timedelta(seconds=seconds)
        by_columns.setdefault(tuple(row), []).append(list(row.values()))
    with observer.connection.transaction(), observer.connection.cursor() as cursor:
        for columns, rows in by_columns.items():
            statement = sql.SQL("INSERT INTO enlist_job ({}) VALUES ({})")
            names = sql.SQL(", ").join(map(sql.Identifier, columns))
            cursor.executemany(statement.format(names, sql.SQL(", ").join([sql.Placeholder()] * len(columns))), rows)
    return ids


def check_table(observer: Observer) -> None:
    """Fail if the rows contradict themselves: slots shared, kept or too many, running jobs that are nobody's."""
    assert (
        observer.rows(
            "SELECT id, status, locked_by, locked_until, concurrency_key, concurrency_slot FROM enlist_job WHERE CASE"
            " WHEN status = 'running' THEN locked_until IS NULL OR locked_by IS NULL OR attempt < 1"
            " OR (concurrency_key IS NULL) <> (concurrency_slot IS NULL)"
            " OR NOT coalesce(concurrency_slot BETWEEN 1 AND concurrency_limit, true)"
            " ELSE locked_until IS NOT NULL OR concurrency_slot IS NOT NULL END"
        )
        == []
    )
    assert (
        observer.rows(
            "SELECT concurrency_key, count(*) FROM enlist_job WHERE status = 'running' AND concurrency_key IS NOT NULL"
            " GROUP BY 1 HAVING count(*) > max(concurrency_limit) OR count(*) > count(DISTINCT concurrency_slot)"
        )
        == []
    )


# -- what is inside of a key ---------------------------------------------------------------------------------


class Inside:
    """A table that refuses one job more of a key than its limit: a counter that knows nothing of slots.

    It writes on autocommit connections of its own, so whoever holds it open sees each step at once.
    """

    @staticmethod
    def create(observer: Observer, limits: Mapping[str, int]) -> None:
        observer.execute(
            "CREATE TABLE inside (key text PRIMARY KEY, room int NOT NULL, now int NOT NULL DEFAULT 0,"
            " most int NOT NULL DEFAULT 0, CONSTRAINT inside_limit CHECK (now BETWEEN 0 AND room))"
        )
        for key, limit in limits.items():
            observer.execute("INSERT INTO inside (key, room) VALUES (%s, %s)", key, limit)

    @staticmethod
    def most(observer: Observer) -> dict[str, int]:
        """The most jobs of each key that ever were inside; fails if any is inside still."""
        assert observer.rows("SELECT key, now FROM inside WHERE now <> 0") == []
        return dict(observer.rows("SELECT key, most FROM inside"))

    def __init__(self, url: URL) -> None:
        self._observer = Observer(url)
        self._observer.execute("SET default_transaction_isolation = 'read committed'")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._observer.__exit__(*exc_info)

    def enter(self, key: str) -> None:
        self._observer.execute("UPDATE inside SET now = now + 1, most = greatest(most, now + 1) WHERE key = %s", key)

    def leave(self, key: str) -> None:
        self._observer.execute("UPDATE inside SET now = now - 1 WHERE key = %s", key)


class KeySampler:
    """Counts the running jobs of each key over and over, on a thread and a connection of its own."""

    def __init__(self, url: URL) -> None:
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="key sampler")
        self.samples = 0
        self.most: Counter[str] = Counter()
        self.too_many: list[tuple[Any, ...]] = []
        """(key, running, limit) wherever there were more running than the limit."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        with Observer(self._url) as observer:
            while not self._stop.is_set():
                rows = observer.rows(
                    "SELECT concurrency_key, count(*), max(concurrency_limit) FROM enlist_job"
                    " WHERE status = 'running' AND concurrency_key IS NOT NULL GROUP BY 1"
                )
                self.samples += 1
                for key, count, limit in rows:
                    self.most[key] = max(self.most[key], count)
                    if count > limit:
                        self.too_many.append((key, count, limit))
                self._stop.wait(0.001)


# -- claimers ------------------------------------------------------------------------------------------------


def idle_handlers(*kinds: str) -> HandlerRegistry:
    """Handlers that are never run: a claimer claims the kinds that there are."""
    handlers = HandlerRegistry()
    for kind in kinds:

        @handlers.handler(kind)
        def nothing(session: Session, job: Job[Any]) -> None: ...

    return handlers


class Claiming:
    """A worker's claimer with the worker's own connections; what it takes stays as it is until it is told to end it.

    :param settings: of its sessions on the server, such as ``{"enable_hashjoin": "off"}``.
    :param prepared: have statements prepared at their first use, which a worker never does.
    :param isolation_level: of the application's engine, which the worker's is made from.
    """

    def __init__(
        self,
        url: URL,
        name: str = "claiming",
        *,
        kinds: Iterable[str] = ("work",),
        lease: float = 60,
        settings: Mapping[str, str] | None = None,
        prepared: bool = False,
        isolation_level: Any = None,
    ) -> None:
        self.name = name
        options = " ".join(f"-c {key}={value}" for key, value in (settings or {}).items())
        given: dict[str, Any] = {} if isolation_level is None else {"isolation_level": isolation_level}
        engine = housekeeping_engine(create_engine(url, connect_args={"options": options}, **given), None)
        if prepared:
            event.listen(engine, "connect", _prepare_at_once)
        self.database = Database(engine, JobRecord)
        self.database.open()
        self._leases = Leases()
        self._lease = dt.timedelta(seconds=lease)
        self._claimer = Claimer(
            self.database,
            idle_handlers(*kinds),
            self._leases,
            worker=name,
            lease=self._lease,
            poll_interval=1,
            give_back=lambda run: None,
        )
        self._claimer.slots = Slots(dict.fromkeys(QUEUES, 1000), lambda run: None, lambda: None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.database.close()

    def claim(self, wanted: Mapping[str, int]) -> list[Run]:
        """Claim at most so many jobs of each queue, in the order in which they are to start."""
        return self._claimer.claim([Demand(queue, number, number) for queue, number in wanted.items()])

    def complete(self, runs: Sequence[Run]) -> set[uuid.UUID]:
        """Set jobs done; the ids of those that were."""
        parameters = {"ids": [run.id for run in runs], "tokens": [run.token for run in runs]}
        return self._ended(runs, self.database.execute(self.database.statements.complete, parameters))

    def settle(self, runs: Sequence[Run], status: JobStatus, delay: float = 0, returned: int = 0) -> set[uuid.UUID]:
        """End attempts otherwise; the ids of those that were."""
        after = dt.timedelta(seconds=delay)
        error = None if returned else "no"
        entry = None if returned else '[{"attempt": 1, "at": "", "error": "no"}]'
        batch = [Settlement(run, status, after, returned, error, entry) for run in runs]
        return self._ended(runs, self.database.execute(self.database.statements.settle, parameters_of(batch)))

    def renew(self, runs: Sequence[Run]) -> None:
        """Renew the leases of jobs that are still its own."""
        parameters = {"ids": [run.id for run in runs], "tokens": [run.token for run in runs], "lease": self._lease}
        self.database.execute(self.database.statements.renew, parameters)

    def _ended(self, runs: Sequence[Run], rows: Sequence[Any]) -> set[uuid.UUID]:
        for run in runs:
            self._leases.drop(run)
        return {row.id for row in rows}


def _prepare_at_once(connection: Any, _record: object) -> None:
    connection.prepare_threshold = 0


def random_settings(random: Random, plan: str) -> dict[str, str]:
    """A session whose planner must do without some of its ways, and with ``plan`` "custom" or "generic"."""
    off = random.sample(SWITCHES, random.choice((0, 0, 1, 2, 4, 8, len(SWITCHES))))
    return {**{f"enable_{name}": "off" for name in off}, "plan_cache_mode": f"force_{plan}_plan"}


def use_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have claimers start at their marks, which otherwise they do where looks at everything take long."""
    judge = Marks.end

    def end(self: Marks, **given: Any) -> None:
        judge(self, **given)
        self.in_use = True

    monkeypatch.setattr(Marks, "end", end)


class Taken:
    """What a claimer took, and what was wrong with it."""

    def __init__(self) -> None:
        self.ids: list[uuid.UUID] = []
        self.too_many: list[tuple[str, int, int]] = []
        """(queue, taken, asked) of claims that took more than they were asked."""


def take_all(claiming: Claiming, random: Random, url: URL, *, most: int = 25) -> Taken:
    """Claim random numbers of jobs from random queues until none is left that is due.

    Jobs with a concurrency key are held for some claims and then set done, and counted by :class:`Inside` meanwhile;
    others stay running.
    """
    taken = Taken()
    held: list[Run] = []
    with Observer(url) as observer, Inside(url) as inside:
        while True:
            queues = random.sample(QUEUES, random.randint(1, len(QUEUES)))
            wanted = {queue: random.randint(1, most) for queue in queues}
            runs = claiming.claim(wanted)
            taken.ids += [run.id for run in runs]
            counts = Counter(run.queue for run in runs)
            taken.too_many += [
                (queue, count, wanted.get(queue, 0)) for queue, count in counts.items() if count > wanted.get(queue, 0)
            ]
            keyed = [run for run in runs if run.keyed]
            for run in keyed:
                inside.enter(str(key_of(run)))
            held += keyed
            random.shuffle(held)
            ending, held = held[: len(held) // 2 + 1], held[len(held) // 2 + 1 :]
            if ending:
                for run in ending:
                    inside.leave(str(key_of(run)))
                ended = claiming.complete(ending)
                assert ended == {run.id for run in ending}
            elif not runs:
                left = observer.scalar(
                    "SELECT EXISTS (SELECT FROM enlist_job WHERE status = 'queued' AND kind = 'work'"
                    " AND run_at <= statement_timestamp())"
                )
                if not left:
                    return taken


_start: list[Any] = []


def take_in_processes(url: URL, number: int) -> list[tuple[str, Taken]]:
    """Let claimers loose at once, each in a process of its own; the name of each and what it took.

    To be called in a process without threads and connections: the others are forked from it.
    """
    context = multiprocessing.get_context("fork")
    with context.Pool(number, initializer=_set_barrier, initargs=(context.Barrier(number),)) as pool:
        return pool.starmap(_take_alone, [(url, seed) for seed in range(number)], chunksize=1)


def _set_barrier(barrier: Any) -> None:
    """Only at its start can a process of a pool be given one."""
    _start.append(barrier)


def _take_alone(url: URL, seed: int) -> tuple[str, Taken]:
    random = Random(seed)
    settings = random_settings(random, ("custom", "generic")[seed % 2])
    with Claiming(url, f"process {seed}", settings=settings, prepared=seed % 4 < 2) as claiming:
        _start[0].wait(60)  # all are there; and no process can take a second seed
        return claiming.name, take_all(claiming, random, url)


def main() -> None:
    """Write what processes took as JSON: rows of a name, ids, and claims that took too many."""
    url, number = sys.argv[1:]
    found = take_in_processes(make_url(url), int(number))
    json.dump([(name, [str(job_id) for job_id in taken.ids], taken.too_many) for name, taken in found], sys.stdout)


if __name__ == "__main__":
    main()
