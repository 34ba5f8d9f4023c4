"""The measurement of drains: that it counts what it says, and what is off. What it finds is the machine's affair."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import pytest
from sqlalchemy import URL, Engine, create_engine
from sqlalchemy.orm import Session

from enlist import ConfigurationError, EnlistError, InvalidOption, JobRepository
from enlist.bench import _drain_side, drainer
from enlist.bench._drain_facts import Drain, DrainFacts, RowFacts, SideFacts
from enlist.bench._drain_rows import STATES, Row
from enlist.bench._drain_side import Side
from enlist.bench._processes import Processes
from enlist.bench._progress import Progress
from enlist.bench.drain import run_drain
from enlist.bench.drainer import Base, Drainer, DrainJob, Way
from tests.support import Observer, wait_until

RIGHT = Drain(
    jobs=1000, seconds=0.5, cpu_seconds=0.1, wal_bytes=800_000, enqueued=1500, done=1500, runs=1500, distinct=1500
)
WITH_ROWS = dataclasses.replace(
    RIGHT, enqueued=1000, done=1000, runs=1000, distinct=1000, rows=1000, distinct_rows=1000
)


NAMES = ["noop", "insert", "grouped-async", "added", "added-async", "burn-processes"]


def slower(drain: Drain, seconds: float) -> Drain:
    return dataclasses.replace(drain, seconds=seconds)


FACTS = DrainFacts(
    rows=(
        RowFacts("insert", "one INSERT", SideFacts(1, (WITH_ROWS, slower(WITH_ROWS, 1.0), slower(WITH_ROWS, 0.8)))),
        RowFacts(
            "pinned",
            "after 500 jobs",
            SideFacts(2, (RIGHT, slower(RIGHT, 0.25), slower(RIGHT, 1.0))),
            "in an empty table",
            SideFacts(2, (slower(RIGHT, 0.4), slower(RIGHT, 0.25), slower(RIGHT, 0.5))),
        ),
    ),
    slots=10,
    scale=0.5,
    cores=2,
    server="18.6",
    fsync="on",
    synchronous_commit="off",
)


def test_the_facts_as_text_and_json() -> None:
    assert FACTS.as_text().splitlines() == [
        "Jobs a second, from the commit that enqueues them to the last one done: the median of 3.",
        "CPU: of the worker processes. WAL: what the server writes for claim and completion.",
        "",
        "                               jobs  jobs/s    min    max  CPU us/job  WAL bytes/job  ratio",
        "one INSERT                    1,000   1,250  1,000  2,000         100            800",
        "after 500 jobs                1,000   2,000  1,000  4,000         100            800   0.80",
        "  in an empty table, in turn  1,000   2,500  2,000  4,000         100            800      1",
        "",
        "10 slots a process, scale 0.5, 2 cores",
        "PostgreSQL 18.6, fsync on, synchronous_commit off",
        "every job is done, each was run once",
    ]
    found = json.loads(FACTS.as_json())
    assert found["right"] is True
    assert found["rows"]["insert"]["jobs_per_second"] == 1250
    assert found["rows"]["insert"]["jobs_per_second_of_rounds"] == [2000, 1000, 1250]
    assert (found["rows"]["insert"]["cpu_us_per_job"], found["rows"]["insert"]["wal_bytes_per_job"]) == (100, 800)
    assert "ratio" not in found["rows"]["insert"]
    assert found["rows"]["pinned"]["ratio"] == 0.8  # of the rounds' ratios the median, not of the medians the ratio
    assert found["rows"]["pinned"]["beside"]["jobs_per_second"] == 2500
    assert found["rows"]["pinned"]["beside"]["title"] == "in an empty table"


@pytest.mark.parametrize(
    ("off", "said"),
    [
        ({"done": 999}, "999 of 1,000 jobs done, 1,000 runs of 1,000 jobs, 1,000 rows of 1,000 jobs"),
        ({"runs": 1001}, "1,000 of 1,000 jobs done, 1,001 runs of 1,000 jobs, 1,000 rows of 1,000 jobs"),
        ({"distinct": 999}, "1,000 of 1,000 jobs done, 1,000 runs of 999 jobs, 1,000 rows of 1,000 jobs"),
        ({"rows": 1002}, "1,000 of 1,000 jobs done, 1,000 runs of 1,000 jobs, 1,002 rows of 1,000 jobs"),
        ({"distinct_rows": 998}, "1,000 of 1,000 jobs done, 1,000 runs of 1,000 jobs, 1,000 rows of 998 jobs"),
    ],
)
@pytest.mark.parametrize("which", ["side", "other"])
def test_a_fact_that_is_off_is_said(off: dict[str, int], said: str, which: str) -> None:
    wrong = SideFacts(1, (WITH_ROWS, dataclasses.replace(WITH_ROWS, **off)))
    right = SideFacts(1, (WITH_ROWS, WITH_ROWS))
    sides = (wrong, right) if which == "side" else (right, wrong)
    row = RowFacts("grouped", "grouped", sides[0], "beside", sides[1])
    facts = dataclasses.replace(FACTS, rows=(*FACTS.rows, row))
    assert not facts.right
    assert facts.as_text().endswith(f"NOT as it should be:\n  grouped: {said}")
    assert json.loads(facts.as_json())["right"] is False


@pytest.mark.slow
def test_all_is_measured_and_nothing_is_left(database_url: URL, observer: Observer) -> None:
    # By a role that may make a schema, and nothing else that it takes.
    observer.execute(f'GRANT CREATE ON DATABASE "{database_url.database}" TO pg_monitor')
    facts = run_drain(
        url=database_url.update_query_dict({"options": "-crole=pg_monitor"}),
        jobs=40,
        repeat=2,
        slots=3,
        rows=NAMES,
        states=[row.name for row in STATES],
        scale=1e-4,
    )
    assert [row.name for row in facts.rows] == [*NAMES, "finished", "future", "pinned"]
    assert facts.right
    sizes = {"insert": 4, "grouped-async": 10, "added": 20, "added-async": 20, "burn-processes": 4}
    for row in facts.rows:
        for side in (row.side, row.other):
            for drain in side.drains if side is not None else ():
                assert min(drain.seconds, drain.cpu_seconds, drain.wal_bytes) > 0
                assert drain.jobs == sizes.get(row.name, 40)
                assert (drain.rows is not None) == (row.name in {"insert", "grouped-async", "added", "added-async"})
    by_name = {row.name: row for row in facts.rows}
    assert "beside 100 jobs that are done" in facts.as_text()
    assert [drain.enqueued for drain in by_name["pinned"].side.drains] == [50, 50]
    several = by_name["burn-processes"]
    assert several.other is not None
    assert (several.side.processes, several.other.processes) == (2, 1)
    assert (facts.fsync, facts.slots) == (observer.scalar("SHOW fsync"), 3)
    assert not observer.scalar("SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'enlist_bench%'")
    assert not observer.scalar("SELECT count(*) FROM public.enlist_job")


@pytest.mark.parametrize("schema", ["enlist_bench_drain", "enlist_bench_drain_state"])
def test_a_schema_that_is_there_is_left_alone(database_url: URL, observer: Observer, schema: str) -> None:
    observer.connection.execute(f"CREATE SCHEMA {schema}".encode())
    with pytest.raises(ConfigurationError, match=f"has a schema '{schema}' already"):
        run_drain(url=database_url)
    found = "SELECT array_agg(nspname::text) FROM pg_namespace WHERE nspname LIKE 'enlist_bench_%%'"
    assert observer.scalar(found) == [schema]


def test_what_is_not_there_is_not_measured() -> None:
    with pytest.raises(
        InvalidOption, match="there is no row 'noops' to measure: choose among noop, noop-async, insert"
    ):
        run_drain(rows=["noops"])
    with pytest.raises(InvalidOption, match="there is no state 'noop' to measure: choose among finished, future, pinn"):
        run_drain(states=["noop"])
    with pytest.raises(InvalidOption, match="slots is 0: it must be above 0"):
        run_drain(slots=0)


class Watching(Progress):
    """Looks, each time that it is told how far a drain is, which transactions are idle."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer
        self.idle: list[int] = []

    def within(self, share: float) -> None:
        assert 0 <= share <= 1
        self.idle.append(self._observer.scalar(IDLE))


IDLE = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND state = 'idle in transaction' AND backend_xmin IS NOT NULL
"""


@pytest.mark.slow
@pytest.mark.parametrize("row", STATES, ids=lambda row: row.name)
def test_the_table_is_in_its_state_for_each_drain(
    database_url: URL, observer: Observer, engine: Engine, row: Row
) -> None:
    enqueue(engine, 3)  # what somebody else has left
    expected = {"done": 7, "queued": 30} if row.name == "future" else {"done": 37}
    with Side(database_url, row.way, 1, 2, state=row.state, number=30) as side:
        side.warm_up(4)
        for _ in range(2):
            watching = Watching(observer)
            assert side.drain(7, watching).right
            counts = dict(observer.rows("SELECT status, count(*) FROM enlist_job GROUP BY status"))
            assert counts == expected
            if row.name == "pinned":
                assert min(watching.idle) >= 1
    assert observer.scalar("SELECT reloptions @> '{autovacuum_enabled=off}' FROM pg_class WHERE relname = 'enlist_job'")
    assert not observer.scalar(
        "SELECT count(*) FROM enlist_job WHERE status = 'queued' AND run_at < now() + '20 hours'"
    )
    # The filling is as measured jobs are, but older.
    assert observer.scalar("SELECT count(DISTINCT (kind, queue)) FROM enlist_job") == 1


# -- a worker process, in this one -------------------------------------------------------------------------------


@pytest.fixture
def worker(database_url: URL) -> Iterator[Drainer]:
    drainer = Drainer(lambda slots: create_engine(database_url, pool_size=slots))
    yield drainer
    drainer.stop()


def enqueue(engine: Engine, jobs: int) -> None:
    Base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        JobRepository(notify="transaction").enqueue_many(session, [DrainJob(number=number) for number in range(jobs)])


@pytest.mark.parametrize(
    "way",
    [
        Way(),
        Way(asynchronous=True),
        Way("burn"),
        Way("insert"),
        Way("insert", asynchronous=True),
        Way("insert", commit_every=5),
        Way("insert", asynchronous=True, commit_every=5),
    ],
)
def test_a_worker_tells_what_it_has_run(worker: Drainer, engine: Engine, observer: Observer, way: Way) -> None:
    worker.start(way, slots=2)
    before = worker.look()
    assert (before["runs"], before["in_hand"]) == (0, 0)
    enqueue(engine, 70)
    wait_until(lambda: worker.look()["runs"] == 70 and not worker.look()["in_hand"])
    # What it has not in hand any more is done, and not only about to be.
    assert observer.scalar("SELECT count(*) FROM enlist_job WHERE status = 'done'") == 70
    assert worker.look()["cpu_seconds"] > before["cpu_seconds"]
    assert sorted(worker.stop()) == list(range(70))
    rows = [number for (number,) in observer.rows("SELECT job FROM bench_effect ORDER BY job")]
    assert rows == (list(range(70)) if way.does == "insert" else [])
    # In groups, jobs share their transactions.
    commits = observer.scalar("SELECT count(DISTINCT xmin::text) FROM bench_effect")
    assert commits <= 70
    assert (commits < 70) == (way.does != "insert" or way.commit_every > 1)


TWICE = """
CREATE FUNCTION twice() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF pg_trigger_depth() = 1 THEN INSERT INTO bench_effect (job) VALUES (NEW.job); END IF;
    RETURN NULL;
END $$
"""


@pytest.mark.slow
def test_doubled_effects_and_jobs_that_stay_undone_are_found(
    database_url: URL, observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_drain_side, "STALLED_SECONDS", 0.5)
    with Side(database_url, Way("insert"), 1, 2) as side:
        assert side.drain(5, Progress()).right
        observer.execute(TWICE)
        observer.execute("CREATE TRIGGER twice AFTER INSERT ON bench_effect FOR EACH ROW EXECUTE FUNCTION twice()")
        doubled = side.drain(5, Progress())
        assert (doubled.done, doubled.runs, doubled.rows, doubled.distinct_rows) == (5, 5, 10, 5)
        observer.execute("DROP TRIGGER twice ON bench_effect")
        # One of the jobs fails, and comes again only after its handler's wait.
        observer.execute("ALTER TABLE bench_effect ADD CHECK (job <> 3) NOT VALID")
        undone = side.drain(5, Progress())
        assert (undone.done, undone.rows, undone.right, doubled.right) == (4, 4, False, False)


@pytest.mark.slow
def test_a_process_that_ends_is_an_error(database_url: URL) -> None:
    nowhere = database_url.set(database="enlist_no_such_database")
    with Processes(drainer, nowhere, 1) as processes:
        with pytest.raises(EnlistError, match="a drainer process has ended with status 1: see what it says above"):
            processes.ask({"do": "no such thing"})
        with pytest.raises(EnlistError, match="a drainer process has ended with status 1"):
            processes.ask({"do": "look"})
