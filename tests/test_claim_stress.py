"""The claim under stress: exact whatever runs beside it, keys held at every instant, ordered keys in their order."""

from __future__ import annotations

import json
import logging
import os
import signal
import statistics
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from random import Random
from subprocess import PIPE, Popen
from sys import executable
from typing import Any

import pytest
import tenacity
from psycopg import sql
from sqlalchemy import URL, create_engine
from sqlalchemy.orm import Session

from enlist import Cancel, HandlerRegistry, Job, JobStatus, Retry, Snooze, Worker
from enlist._reaper import reap
from enlist._slots import Run
from tests.shop import Effect
from tests.support import Observer, wait_until
from tests.support.claimers import (
    QUEUES,
    Claiming,
    Inside,
    KeySampler,
    Taken,
    check_table,
    insert_jobs,
    new_ids,
    random_settings,
    take_all,
    use_marks,
)
from tests.support.jobs import Jobs, running
from tests.support.process import ROOT, WorkerProcess

SLOW = pytest.mark.slow


@pytest.fixture
def jobs(observer: Observer) -> Jobs:
    return Jobs(observer)


# -- each job once, and never more than asked --------------------------------------------------------------------


def limits_of(number: int) -> dict[str, int]:
    return {f"key {n}": n % 3 + 1 for n in range(number)}


def mixed_jobs(random: Random, number: int, limits: dict[str, int]) -> list[dict[str, Any]]:
    """Jobs of three queues and four priorities, due at few moments; one in five has a key."""
    made = []
    for _ in range(number):
        job: dict[str, Any] = {
            "queue": random.choice(QUEUES),
            "priority": random.choice((-5, 0, 0, 3, 100)),
            "due_in": -random.choice((1, 1, 2, 3600)),
        }
        if random.random() < 0.2:
            key = random.choice(list(limits))
            job |= {"concurrency_key": key, "concurrency_limit": limits[key]}
        made.append(job)
    return made


def fill(observer: Observer, random: Random, number: int, analyzed: str) -> set[uuid.UUID]:
    """Fill the table; the ids of the jobs that are to be claimed. Others are of the future, or of an unknown kind."""
    limits = limits_of(12)
    Inside.create(observer, limits)
    if analyzed == "empty":
        observer.execute("ANALYZE enlist_job")
    ids = insert_jobs(observer, mixed_jobs(random, number, limits))
    others = mixed_jobs(random, number // 4, limits)
    insert_jobs(observer, [{**job, "priority": 32767, "due_in": 3600} for job in others])
    insert_jobs(observer, [{**job, "priority": 32767, "kind": "unknown"} for job in others])
    if analyzed == "full":
        observer.execute("ANALYZE enlist_job")
    return set(ids)


def check_log(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing went wrong that a worker gets over: it would have said so."""
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def check_taken(observer: Observer, ids: set[uuid.UUID], taken: dict[str, Taken]) -> None:
    """Each job once; what turned to running is what was returned, claimer by claimer; keys held; the rest untouched."""
    assert [one.too_many for one in taken.values() if one.too_many] == []
    everything = [job_id for one in taken.values() for job_id in one.ids]
    assert len(everything) == len(ids)
    assert set(everything) == ids
    touched: dict[str, set[uuid.UUID]] = defaultdict(set)
    for name, job_id in observer.rows("SELECT locked_by, id FROM enlist_job WHERE status IN ('running', 'done')"):
        touched[name].add(job_id)
    assert touched == {name: set(one.ids) for name, one in taken.items() if one.ids}
    assert (
        observer.rows(
            "SELECT id FROM enlist_job WHERE CASE WHEN status = 'queued' THEN attempt <> 0 OR lease_token <> 0"
            " OR kind = 'work' AND run_at <= statement_timestamp() ELSE attempt <> 1 OR lease_token <> 1 END"
        )
        == []
    )
    assert observer.scalar("SELECT count(*) FROM enlist_job WHERE status = 'queued'") == len(ids) // 4 * 2
    most = Inside.most(observer)
    for key, limit in observer.rows(
        "SELECT DISTINCT concurrency_key, concurrency_limit FROM enlist_job WHERE status = 'done'"
    ):
        assert 1 <= most[key] <= limit
    check_table(observer)


@contextmanager
def analyzing(url: URL) -> Iterator[None]:
    """Have the table analyzed over and over, so that plans change under the claimers."""
    stop = threading.Event()

    def analyze() -> None:
        with Observer(url) as observer:
            while not stop.is_set():
                observer.execute("ANALYZE enlist_job")

    with ThreadPoolExecutor(1) as pool:
        try:
            looping = pool.submit(analyze)
            yield
        finally:
            stop.set()
        looping.result()


def take_in_threads(url: URL, claimers: Sequence[Callable[[], Claiming]], seed: int) -> dict[str, Taken]:
    """Let claimers loose at once; what each took. The first error of any of them is raised."""
    with ExitStack() as stack, ThreadPoolExecutor(len(claimers)) as pool:
        opened = [stack.enter_context(make()) for make in claimers]
        start = threading.Barrier(len(opened))

        def take(number: int) -> Taken:
            start.wait(20)
            return take_all(opened[number], Random(f"{seed} {number}"), url)

        results = list(pool.map(take, range(len(opened))))
        return {claiming.name: taken for claiming, taken in zip(opened, results, strict=True)}


@pytest.mark.parametrize(
    ("claimers", "number", "analyzed", "plan", "marks"),
    [
        (1, 120, "empty", "generic", False),
        (4, 240, "never", "custom", False),
        (3, 180, "full", "generic", True),
        pytest.param(2, 1500, "full", "custom", False, marks=SLOW),
        pytest.param(16, 2000, "never", "custom", False, marks=SLOW),
        pytest.param(16, 2000, "never", "generic", True, marks=SLOW),
        pytest.param(16, 2000, "empty", "custom", True, marks=SLOW),
        pytest.param(16, 2000, "empty", "generic", False, marks=SLOW),
        pytest.param(16, 2000, "full", "custom", False, marks=SLOW),
        pytest.param(16, 2000, "full", "generic", False, marks=SLOW),
    ],
)
def test_concurrent_claimers_take_each_job_once_and_no_more_than_asked(
    *,
    claimers: int,
    number: int,
    analyzed: str,
    plan: str,
    marks: bool,
    database_url: URL,
    observer: Observer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each claimer has a planner without some of its ways; half of them have their statements prepared."""
    if marks:
        use_marks(monkeypatch)
    random = Random(f"{claimers} {analyzed} {plan}")
    ids = fill(observer, random, number, analyzed)

    def maker(index: int) -> Callable[[], Claiming]:
        settings = random_settings(random, plan)
        prepared = plan == "generic" or index % 2 == 1
        return lambda: Claiming(database_url, f"claimer {index}", settings=settings, prepared=prepared)

    with analyzing(database_url):
        taken = take_in_threads(database_url, [maker(index) for index in range(claimers)], number)
    check_log(caplog)
    check_taken(observer, ids, taken)


@pytest.mark.parametrize(
    ("processes", "number"),
    [pytest.param(2, 80, marks=SLOW), pytest.param(16, 3000, marks=[SLOW, pytest.mark.timeout(120)])],
)
def test_claimers_in_processes_of_their_own_take_each_job_once(
    processes: int, number: int, database_url: URL, observer: Observer
) -> None:
    ids = fill(observer, Random(processes), number, "never")
    url = database_url.render_as_string(hide_password=False)
    command = [executable, "-m", "tests.support.claimers", url, str(processes)]
    with Popen(command, cwd=ROOT, stdout=PIPE, stderr=PIPE, text=True, start_new_session=True) as launched:
        try:
            with analyzing(database_url):
                output, errors = launched.communicate()
            assert (launched.returncode, errors) == (0, "")  # warnings are written there
        finally:
            with suppress(ProcessLookupError):
                os.killpg(launched.pid, signal.SIGKILL)
    taken: dict[str, Taken] = {}
    for name, taken_ids, too_many in json.loads(output):
        taken[name] = Taken()
        taken[name].ids = [uuid.UUID(job_id) for job_id in taken_ids]
        taken[name].too_many = too_many
    assert len(taken) == processes
    check_taken(observer, ids, taken)


# -- whatever isolation level is the default ---------------------------------------------------------------------


LEVELS = [
    pytest.param("engine", "AUTOCOMMIT", marks=SLOW),
    pytest.param("engine", "READ COMMITTED", marks=SLOW),
    ("engine", "REPEATABLE READ"),
    pytest.param("engine", "SERIALIZABLE", marks=SLOW),
    ("database", "repeatable read"),
    pytest.param("database", "serializable", marks=SLOW),
    pytest.param("role", "repeatable read", marks=SLOW),
    pytest.param("role", "serializable", marks=SLOW),
]


@contextmanager
def leveled(url: URL, observer: Observer, where: str, level: str) -> Iterator[tuple[URL, str | None]]:
    """A default isolation level set somewhere: the URL to connect to, and the engine's ``isolation_level``."""
    if where == "engine":
        yield url, level
        return
    name = sql.Identifier(str(url.database))
    value = sql.SQL("SET default_transaction_isolation = {}").format(sql.Literal(level))
    if where == "database":
        observer.connection.execute(sql.SQL("ALTER DATABASE {} {}").format(name, value))
        yield url, None
        return
    role = sql.Identifier(f"{url.database}_role")
    observer.connection.execute(sql.SQL("CREATE ROLE {} LOGIN SUPERUSER PASSWORD 'secret'").format(role))
    try:
        observer.connection.execute(sql.SQL("ALTER ROLE {} IN DATABASE {} {}").format(role, name, value))
        yield url.set(username=f"{url.database}_role", password="secret"), None
    finally:
        observer.connection.execute(sql.SQL("ALTER ROLE {} IN DATABASE {} RESET ALL").format(role, name))
        observer.connection.execute(sql.SQL("DROP ROLE {}").format(role))


@pytest.mark.slow
@pytest.mark.parametrize(("where", "level"), LEVELS)
def test_claimers_raise_no_error_at_any_default_isolation_level(
    where: str, level: str, database_url: URL, observer: Observer, caplog: pytest.LogCaptureFixture
) -> None:
    """Above READ COMMITTED, SKIP LOCKED raises serialization errors: claims are never made there."""
    ids = fill(observer, Random(level), 200, "never")
    with leveled(database_url, observer, where, level) as (url, isolation):
        taken = take_in_threads(
            url,
            [lambda index=index: Claiming(url, f"claimer {index}", isolation_level=isolation) for index in range(4)],  # type: ignore[misc]
            1,
        )
    check_log(caplog)
    check_taken(observer, ids, taken)


class Row:
    """A queued job as an onlooker sees it."""

    def __init__(self, row: tuple[Any, ...]) -> None:
        self.id, self.queue, priority, run_at, self.key, self.limit = row
        self.place = (-priority, run_at, self.id)


def next_in_queue(rows: list[Row], number: int) -> list[uuid.UUID]:
    """The jobs of a queue to start next while none of their keys is taken, worked out by the book."""
    found: list[uuid.UUID] = []
    inside: Counter[str | None] = Counter()
    for row in sorted(rows, key=lambda row: row.place):
        if len(found) < number and (row.key is None or inside[row.key] < row.limit):
            found.append(row.id)
            inside[row.key] += 1
    return found


@pytest.mark.parametrize(
    ("where", "level"),
    [
        pytest.param("engine", "AUTOCOMMIT", marks=SLOW),
        pytest.param("engine", "SERIALIZABLE", marks=SLOW),
        ("database", "serializable"),
    ],
)
@pytest.mark.parametrize("keyed", [False, True], ids=["plain", "with keys"])
@pytest.mark.parametrize("marks", [False, True], ids=["of all", "from marks"])
def test_one_claimer_takes_jobs_by_priority_then_due_time_then_id(
    *,
    where: str,
    level: str,
    keyed: bool,
    marks: bool,
    database_url: URL,
    observer: Observer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Claim by claim, compared with what a reader of the whole table would take. Keys are of one queue each.

    A claim may bring less than it was asked for, when another look would be dear: but nothing out of its turn.
    """
    if marks:
        use_marks(monkeypatch)
    random = Random(f"{level} {keyed}")
    made: list[dict[str, Any]] = []
    for job_id in new_ids(150, random):
        queue = random.choice(QUEUES)
        job = {"id": job_id, "queue": queue, "priority": random.randint(-2, 2), "due_in": -random.choice((1, 2, 3))}
        if keyed and random.random() < 0.4:
            number = random.randint(1, 3)
            job |= {"concurrency_key": f"{queue} {number}", "concurrency_limit": number}
        made.append(job)
    insert_jobs(observer, made)
    taken: list[uuid.UUID] = []
    with (
        leveled(database_url, observer, where, level) as (url, isolation),
        Claiming(url, isolation_level=isolation) as claiming,
    ):
        while len(taken) < len(made):
            queued: dict[str, list[Row]] = defaultdict(list)
            for row in observer.rows(
                "SELECT id, queue, priority, run_at, concurrency_key, concurrency_limit FROM enlist_job"
                " WHERE status = 'queued'"
            ):
                queued[row[1]].append(Row(row))
            wanted = {queue: random.randint(1, 6) for queue in random.sample(QUEUES, random.randint(1, 3))}
            runs = claiming.claim(wanted)
            place = {row.id: row.place for rows in queued.values() for row in rows}
            assert [run.id for run in runs] == sorted((run.id for run in runs), key=place.__getitem__)
            for queue, number in wanted.items():
                ids = [run.id for run in runs if run.queue == queue]
                assert ids == next_in_queue(queued[queue], number)[: len(ids)]
            assert claiming.complete(runs) == {run.id for run in runs}
            taken += [run.id for run in runs]
    assert len(set(taken)) == len(taken)
    check_table(observer)


# -- concurrency keys --------------------------------------------------------------------------------------------


def keyed_jobs(number: int, *keys: tuple[str, int], **columns: Any) -> list[dict[str, Any]]:
    """So many jobs of each key, those of different keys in turn."""
    return [
        {"kind": "keyed", "concurrency_key": key, "concurrency_limit": limit, **columns}
        for _ in range(number)
        for key, limit in keys
    ]


def sleeping_handlers(seconds: float, inside: Callable[[], Inside] | None = None) -> HandlerRegistry:
    """Handlers that take their time; with ``inside``, the thread's own counter, they are counted meanwhile."""
    handlers = HandlerRegistry()

    @handlers.handler("keyed", wait=tenacity.wait_fixed(0))
    def keyed(session: Session, job: Job[Any]) -> None:
        if inside is not None:
            inside().enter(job.payload["key"])
        time.sleep(seconds)
        session.add(Effect(job_id=job.id))
        if inside is not None:
            inside().leave(job.payload["key"])

    return handlers


@contextmanager
def counters(url: URL) -> Iterator[Callable[[], Inside]]:
    """A counter for each thread that asks for one."""
    own = threading.local()
    with ExitStack() as stack:

        def counter() -> Inside:
            if not hasattr(own, "counter"):
                own.counter = stack.enter_context(Inside(url))
            found: Inside = own.counter
            return found

        yield counter


@contextmanager
def working(
    url: URL, workers: int, handlers: HandlerRegistry, *, slots: int, poll_interval: float, **options: Any
) -> Iterator[None]:
    """Workers with engines of their own."""
    with ExitStack() as stack:
        engines = [create_engine(url, pool_size=slots) for _ in range(workers)]
        for engine in engines:
            stack.callback(engine.dispose)
        options = {"queues": {"default": slots}, **options}
        with running(*(Worker(engine, handlers, poll_interval=poll_interval, **options) for engine in engines)):
            yield


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "keys", "number"),
    [
        (3, [("k", 1)], 40),
        (3, [("one", 1), ("two", 2), ("three", 3)], 20),
        pytest.param(12, [("k", 1)], 300, marks=SLOW),
        pytest.param(8, [(f"{limit} {n}", limit) for limit in (1, 2, 3) for n in range(2)], 60, marks=SLOW),
    ],
)
def test_a_keys_limit_holds_at_every_instant(
    *,
    workers: int,
    keys: list[tuple[str, int]],
    number: int,
    database_url: URL,
    observer: Observer,
    jobs: Jobs,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By an observer that counts all the time, by a counter that the handlers keep, and without any error."""
    Inside.create(observer, dict(keys))
    ids = insert_jobs(observer, keyed_jobs(number, *keys))
    with (
        counters(database_url) as inside,
        KeySampler(database_url) as sampler,
        working(database_url, workers, sleeping_handlers(0.005, inside), slots=3, poll_interval=1),
    ):
        jobs.wait_all(timeout=50)
    assert sampler.too_many == []
    assert sampler.samples > 50
    assert sampler.most == dict(keys)
    most = Inside.most(observer)
    assert most.keys() == dict(keys).keys()
    assert all(1 <= most[key] <= limit for key, limit in keys)
    assert jobs.effects_by_job() == dict.fromkeys(ids, 1)
    assert observer.row("SELECT min(attempt), max(attempt) FROM enlist_job") == (1, 1)
    check_log(caplog)
    check_table(observer)


@pytest.mark.slow
def test_jobs_of_one_key_with_different_limits_each_have_their_own(database_url: URL, observer: Observer) -> None:
    """A job starts only while fewer of its key run than its own limit says."""
    random = Random(5)
    insert_jobs(
        observer,
        [{"concurrency_key": "k", "concurrency_limit": random.randint(1, 4), "id": None} for _ in range(60)],
    )
    limits = dict(observer.rows("SELECT id, concurrency_limit FROM enlist_job"))
    with Claiming(database_url) as claiming:
        held: list[Run] = []
        done = 0
        while done < 60:
            for run in claiming.claim({"default": random.randint(1, 5)}):
                assert len(held) < limits[run.id]
                held.append(run)
            assert held
            ended = [held.pop(random.randrange(len(held))) for _ in range(random.randint(1, len(held)))]
            assert len(claiming.complete(ended)) == len(ended)
            done += len(ended)
            check_table(observer)


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "number"), [(1, 60), pytest.param(2, 200, marks=SLOW)])
def test_the_next_job_of_a_key_starts_when_the_slot_is_free_not_when_a_poll_is_due(
    *,
    workers: int,
    number: int,
    database_url: URL,
    observer: Observer,
    jobs: Jobs,
) -> None:
    insert_jobs(observer, keyed_jobs(number, ("k", 1)))
    with working(database_url, workers, sleeping_handlers(0.005), slots=2, poll_interval=5):
        jobs.wait_all(timeout=50)
    gaps = [
        float(gap)
        for (gap,) in observer.rows(
            "SELECT extract(epoch FROM started_at - lag(finished_at) OVER (ORDER BY started_at)) FROM enlist_job"
            " ORDER BY started_at OFFSET 1"
        )
    ]
    assert len(gaps) == number - 1
    assert min(gaps) >= 0
    median, p95 = statistics.median(gaps), statistics.quantiles(gaps, n=20)[-1]
    print(f"from an end to the next start: median {median * 1000:.1f} ms, p95 {p95 * 1000:.1f} ms")
    assert median < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, pytest.param(3, marks=SLOW)])
def test_a_keys_slots_are_used_up_as_those_of_a_worker_are(
    workers: int, database_url: URL, observer: Observer, jobs: Jobs
) -> None:
    """A limit of 5, beside 5 slots of a worker and no key: at the best of three times, others want the machine too."""
    handlers = sleeping_handlers(0.05)

    def occupied(made: list[dict[str, Any]], workers: int, slots: int) -> float:
        observer.execute("DELETE FROM enlist_job")
        insert_jobs(observer, made)
        with working(database_url, workers, handlers, slots=slots, poll_interval=5):
            jobs.wait_all(timeout=15)
        found: float = observer.scalar(
            "SELECT (sum(extract(epoch FROM finished_at - started_at))"
            " / extract(epoch FROM max(finished_at) - min(started_at)))::float FROM enlist_job"
        )
        return found

    shares = []
    with KeySampler(database_url) as sampler:
        for _ in range(3):
            of_key = occupied(keyed_jobs(50, ("k", 5)), workers, 8)
            of_worker = occupied([{"kind": "keyed"} for _ in range(50)], 1, 5)
            print(f"on average {of_key:.2f} of a key's 5 slots are used, {of_worker:.2f} of a worker's 5")
            shares.append(of_key / of_worker)
            if shares[-1] > 0.8:
                break
    assert sampler.most["k"] == 5
    assert max(shares) > 0.8
    check_table(observer)


@pytest.mark.slow
def test_a_killed_worker_frees_all_its_slots_of_a_key_and_no_more(database_url: URL, observer: Observer) -> None:
    """Three of three slots are a dead process's until its lease is over; then they are the others', exactly."""
    jobs = Jobs(observer)
    settings: dict[str, Any] = {"lease": 0.6, "reaper_interval": 0.1, "queues": {"default": 4}, "poll_interval": 5}
    key: dict[str, Any] = {"concurrency_key": "k", "concurrency_limit": 3}
    observer.execute("INSERT INTO shop_counter (name, value) VALUES ('k', 0), ('k most', 0)")
    held = jobs.add_many("holding", 3, **key)
    with ExitStack() as stack:
        sampler = stack.enter_context(KeySampler(database_url))
        first = stack.enter_context(WorkerProcess(database_url, label="first", **settings))
        for _ in held:
            first.expect("run holding")
        following = jobs.add_many("counting", [{"name": "k", "seconds": 0.005}] * 40, **key)
        others = [
            stack.enter_context(WorkerProcess(database_url, label=label, **settings)) for label in ("second", "third")
        ]
        for process in others:
            process.expect("ready")
        assert observer.rows("SELECT DISTINCT locked_by IS NULL FROM enlist_job WHERE id = ANY(%s)", following) == [
            (True,)
        ]
        first.kill()
        first.wait()
        for process in others:
            for _ in held:
                process.say("go")
        jobs.wait_all(timeout=20)
        for process in others:
            process.terminate()
            assert process.wait() == 0
            assert "duplicate key" not in process.log()
            assert "violates" not in process.log()
    assert sampler.too_many == []
    assert sampler.most == {"k": 3}
    assert dict(observer.rows("SELECT name, value FROM shop_counter")) == {"k": 0, "k most": 3}
    assert {job_id: jobs.row(job_id)["lost"] for job_id in held} == dict.fromkeys(held, 1)
    assert jobs.effects_by_job() == dict.fromkeys([*held, *following], 1)
    check_table(observer)


@pytest.mark.parametrize("marks", [False, True], ids=["of all", "from marks"])
def test_a_job_that_waited_for_its_key_is_not_overtaken_once_the_key_is_free(
    *, marks: bool, database_url: URL, observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though another claim has taken jobs that come after it, and there is enough else to take."""
    if marks:
        use_marks(monkeypatch)
    first, waiting, other, *_ = insert_jobs(
        observer,
        [
            {"concurrency_key": key, "concurrency_limit": 1, "priority": 1, "due_in": due_in}
            for key, due_in in (("k", -3), ("k", -2), ("other", -1))
        ]
        + [{}] * 5,
    )
    with Claiming(database_url) as claiming:
        runs = claiming.claim({"default": 2})
        assert [run.id for run in runs] == [first, other]
        claiming.complete(runs)
        assert [run.id for run in claiming.claim({"default": 1})] == [waiting]


def test_the_empty_string_is_a_key_and_null_is_none(database_url: URL, observer: Observer) -> None:
    """The producer refuses an empty key; one that was written by SQL is held like any other."""
    empty = insert_jobs(observer, [{"concurrency_key": "", "concurrency_limit": 2}] * 10)
    none = insert_jobs(observer, [{"priority": -1}] * 60)
    with Claiming(database_url) as claiming:
        first = claiming.claim({"default": 40})
        assert [run.id for run in first] == empty[:2] + none[:38]
        second = claiming.claim({"default": 40})
        assert [run.id for run in second] == none[38:]
        assert claiming.complete(first[:1]) == {empty[0]}
        assert [run.id for run in claiming.claim({"default": 40})] == [empty[2]]


# -- ordered keys ------------------------------------------------------------------------------------------------


def ordered_jobs(random: Random, keys: int, number: int, **columns: Any) -> list[dict[str, Any]]:
    """Jobs of ordered keys whose order is in ``created_at`` and ``id``, and in nothing else.

    Of each key some are of one moment, so that the id decides; a key's jobs are in several queues.
    """
    ids = new_ids(keys * number, random)
    return [
        {
            "kind": "ordered",
            "id": ids.pop(),
            "queue": random.choice(QUEUES),
            "priority": random.randint(-100, 100),
            "due_in": -random.uniform(0, 100),
            "made_in": -random.randint(1, number // 2),
            "concurrency_key": f"key {key}",
            "concurrency_limit": 1,
            "ordered": True,
            **columns,
        }
        for _ in range(number)
        for key in range(keys)
    ]


def by_key(observer: Observer) -> dict[str, list[uuid.UUID]]:
    """The jobs of each key in the order in which they were made."""
    found: dict[str, list[uuid.UUID]] = defaultdict(list)
    for key, job_id in observer.rows("SELECT concurrency_key, id FROM enlist_job ORDER BY created_at, id"):
        found[key].append(job_id)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "keys", "number", "marks"),
    [(2, 4, 12, False), (2, 4, 12, True), pytest.param(8, 20, 50, False, marks=SLOW)],
)
def test_jobs_of_an_ordered_key_end_in_the_order_in_which_they_were_made(
    *,
    workers: int,
    keys: int,
    number: int,
    marks: bool,
    database_url: URL,
    observer: Observer,
    jobs: Jobs,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever their priorities, due times and queues, how often they fail, and how they end."""
    if marks:
        use_marks(monkeypatch)
    caplog.set_level(logging.ERROR, "enlist.worker")  # each failure is a warning
    insert_jobs(observer, ordered_jobs(Random(keys), keys, number))
    handlers = HandlerRegistry()
    ended: dict[str, list[uuid.UUID]] = defaultdict(list)
    started: dict[str, list[uuid.UUID]] = defaultdict(list)
    lock = threading.Lock()
    draws = Random(1)

    @handlers.handler("ordered", wait=tenacity.wait_fixed(0.01))
    def ordered(session: Session, job: Job[Any]) -> None:
        with lock:
            draw = draws.random()
            started[job.payload["key"]].append(job.id)
        session.add(Effect(job_id=job.id, attempt=job.attempt))
        session.flush()
        if draw < 0.1:
            raise ValueError("again")
        if draw < 0.15:
            raise Retry(0)
        if draw < 0.2:
            raise Snooze(0.01)
        with lock:
            ended[job.payload["key"]].append(job.id)
        if draw < 0.25:
            raise Cancel("no more")

    expected = by_key(observer)
    with working(database_url, workers, handlers, slots=4, poll_interval=0.2, queues=dict.fromkeys(QUEUES, 2)):
        wait_until(lambda: jobs.counts().keys() <= {"done", "cancelled"}, 55, message="all jobs ended")
    assert ended == expected
    # An attempt that failed, and the one after it, are of the same job: nothing came between.
    for key, ids in started.items():
        assert [job_id for n, job_id in enumerate(ids) if n == 0 or ids[n - 1] != job_id] == expected[key]
    ran = observer.rows("SELECT concurrency_key, id FROM enlist_job ORDER BY finished_at, created_at, id")
    finished: dict[str, list[uuid.UUID]] = defaultdict(list)
    for key, job_id in ran:
        finished[key].append(job_id)
    assert finished == expected
    check_table(observer)


def ordered_key(observer: Observer, number: int = 3) -> list[uuid.UUID]:
    """Jobs of one ordered key, the later ones of a higher priority and due for longer; in their order."""
    return insert_jobs(
        observer,
        [
            {"concurrency_key": "k", "concurrency_limit": 1, "ordered": True, "priority": n, "due_in": -n - 1}
            for n in range(number)
        ],
    )


def taken_next(claiming: Claiming) -> list[uuid.UUID]:
    return [run.id for run in claiming.claim(dict.fromkeys(QUEUES, 5))]


@pytest.mark.parametrize("returned", [0, 1], ids=["failed", "snoozed"])
def test_a_head_that_waits_holds_the_rest_of_its_ordered_key(
    returned: int, database_url: URL, observer: Observer
) -> None:
    first, second, third = ordered_key(observer)
    plain = insert_jobs(observer, [{"priority": -5}])
    with Claiming(database_url) as claiming:
        runs = claiming.claim({"default": 5})
        assert [run.id for run in runs] == [first, *plain]
        claiming.settle(runs[:1], JobStatus.QUEUED, delay=600, returned=returned)
        assert taken_next(claiming) == []
        observer.execute("UPDATE enlist_job SET run_at = statement_timestamp() WHERE id = %s", first)
        again = claiming.claim({"default": 5})
        assert [run.id for run in again] == [first]
        claiming.complete(again)
        assert taken_next(claiming) == [second]
    check_table(observer)
    assert observer.scalar("SELECT status FROM enlist_job WHERE id = %s", third) == "queued"


@pytest.mark.parametrize("status", [JobStatus.DONE, JobStatus.DEAD, JobStatus.CANCELLED])
def test_a_head_that_has_ended_lets_the_rest_of_its_ordered_key_pass(
    status: JobStatus, database_url: URL, observer: Observer
) -> None:
    first, second, third = ordered_key(observer)
    with Claiming(database_url) as claiming:
        for job_id in (first, second, third):
            runs = claiming.claim({"default": 5})
            assert [run.id for run in runs] == [job_id]
            if status is JobStatus.DONE:
                claiming.complete(runs)
            else:
                claiming.settle(runs, status)
        assert taken_next(claiming) == []


def test_what_the_reaper_takes_back_keeps_its_place_in_an_ordered_key(database_url: URL, observer: Observer) -> None:
    first, second, _ = ordered_key(observer)
    with Claiming(database_url, lease=0.01) as dying, Claiming(database_url, "alive") as claiming:
        assert taken_next(dying) == [first]
        observer.wait_for("SELECT locked_until < statement_timestamp() FROM enlist_job WHERE id = %s", first)
        (row,) = reap(claiming.database, [first])
        assert row.id == first
        runs = claiming.claim(dict.fromkeys(QUEUES, 5))
        assert [run.id for run in runs] == [first]
        assert taken_next(claiming) == []
        claiming.complete(runs)
        assert taken_next(claiming) == [second]


def test_an_ordered_key_waits_for_its_head_in_a_queue_that_is_not_asked(database_url: URL, observer: Observer) -> None:
    head, following = insert_jobs(
        observer,
        [
            {"queue": queue, "concurrency_key": "k", "concurrency_limit": 1, "ordered": True}
            for queue in ("other", "default")
        ],
    )
    with Claiming(database_url) as claiming:
        assert claiming.claim({"default": 5}) == []
        runs = claiming.claim({"other": 5})
        assert [run.id for run in runs] == [head]
        claiming.complete(runs)
        assert [run.id for run in claiming.claim({"default": 5})] == [following]


def test_what_is_to_come_holds_an_ordered_key(database_url: URL, observer: Observer) -> None:
    """Unlike another key, which the job of next week leaves to those that are due."""
    ids = insert_jobs(
        observer,
        [
            {"concurrency_key": key, "concurrency_limit": 1, "ordered": ordered, "due_in": due_in}
            for key, ordered in (("ordered", True), ("other", False))
            for due_in in (3600, -1)
        ],
    )
    with Claiming(database_url) as claiming:
        assert taken_next(claiming) == [ids[3]]
