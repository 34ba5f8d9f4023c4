"""The measurement of what claims cost: that it measures what it says. What it finds is the machine's affair."""

from __future__ import annotations

import dataclasses
import json
import re
import uuid
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest
from sqlalchemy import URL, Engine, event

from enlist import ConfigurationError, InvalidOption
from enlist.bench import _claim_pinned as pinned
from enlist.bench._claim_facts import percentile, slowest
from enlist.bench._claim_table import Table, fresh_table
from enlist.bench.claim import (
    KEYED,
    MIXED,
    PLAIN,
    STATES,
    ClaimFacts,
    Claims,
    History,
    PickUp,
    State,
    StateFacts,
    run_claim,
)
from enlist.cli import main
from tests.support import Observer

NAMES = [state.name for state in STATES]

WITH_KEYS: dict[str, Callable[[Claims], Collection[int]]] = {
    **dict.fromkeys(("done", "future", "ready", "pinned"), lambda _claims: [0]),
    "hot-key": lambda claims: range(claims.asked // 6, claims.asked // 4 + 2),
    "idle-key": lambda claims: [claims.asked // claims.jobs],
    "keys": lambda claims: [claims.asked],
}
"""How many of the jobs claimed may have a concurrency key."""

FACTS = ClaimFacts(
    states=(
        StateFacts(
            "done",
            "1,000 done jobs",
            "an empty table",
            1.5,
            (
                Claims(1, ((1.0, 2.0), (1.0, 4.0)), ((2.0, 4.0), (1.0, 5.0)), asked=4, claimed_empty=4, claimed=4),
                Claims(10, ((1.0,), (1.0,)), ((2.0,), (3.0,)), asked=20, claimed_empty=20, claimed=19, keyed=2),
            ),
        ),
        StateFacts(
            "pinned",
            "200 jobs",
            "an empty table",
            2.0,
            (Claims(1, ((1.0,),), ((2.0,),), asked=1, claimed_empty=1, claimed=1),),
            History(100, (1.0, 3.0)),
            (PickUp("a job", (1, 2, 1), (3.0, 2.0, 4.25)),),
        ),
    ),
    scale=0.1,
    stale=False,
    server="18.6",
    fsync="on",
)


def state_named(name: str) -> State:
    return next(state for state in STATES if state.name == name)


@pytest.fixture
def table(database_url: URL) -> Iterator[Table]:
    with fresh_table(database_url, PLAIN) as table:
        yield table


# -- the run -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_state_is_measured_and_nothing_is_left(database_url: URL, observer: Observer) -> None:
    databases = observer.scalar(
        "SELECT count(*) FROM pg_database WHERE datname LIKE 'enlist!_bench!_claim%' ESCAPE '!'"
    )
    facts = run_claim(url=database_url, repeat=2, claims=1, scale=0.001, held_seconds=0.01)
    assert [state.name for state in facts.states] == NAMES
    for state in facts.states:
        assert [claims.jobs for claims in state.claims] == [1, 100]
        for claims in state.claims:
            # Each got what it asked for: a claim of nothing costs nothing.
            assert claims.claimed == claims.claimed_empty == claims.asked == claims.jobs * 2
            assert claims.keyed == claims.keyed_empty
            assert claims.keyed in WITH_KEYS[state.name](claims)
            assert [len(one) for one in claims.empty + claims.state] == [1] * 4
            assert min(claims.all_empty + claims.all_state) > 0
        assert (state.history is not None) == bool(state.pick_ups) == (state.name == "pinned")
    history, pick_ups = facts.states[-1].history, facts.states[-1].pick_ups
    assert history is not None
    assert len(history.milliseconds) == 300 / 100
    assert len(pick_ups) == 4
    for pick_up in pick_ups:
        assert len(pick_up.calls) == len(pick_up.milliseconds) == 2
        assert min(pick_up.calls) >= 1
    assert facts.fsync == observer.scalar("SHOW fsync")
    assert not observer.scalar("SELECT count(*) FROM pg_namespace WHERE nspname = 'enlist_bench_claim'")
    assert not observer.scalar("SELECT count(*) FROM public.enlist_job")
    assert databases == observer.scalar(
        "SELECT count(*) FROM pg_database WHERE datname LIKE 'enlist!_bench!_claim%' ESCAPE '!'"
    )


@pytest.mark.slow
@pytest.mark.parametrize("stale", [False, True])
def test_the_statistics_are_of_the_full_table_unless_stale_ones_are_asked_for(database_url: URL, stale: bool) -> None:
    steps: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("ANALYZE"):
            steps.append("analyze")
        elif "INSERT INTO enlist_job (" in statement:
            steps.append("insert")

    event.listen(Engine, "before_cursor_execute", note)
    try:
        run_claim(url=database_url, repeat=1, claims=1, scale=0.001, states=["done"], stale=stale)
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    assert steps.count("analyze") == 2  # the other is the empty table's
    assert steps.index("insert") == (2 if stale else 0)


def test_a_state_that_does_not_exist_is_refused(database_url: URL) -> None:
    with pytest.raises(InvalidOption, match="no state 'full' to measure: choose among done, future, ready"):
        run_claim(url=database_url, states=["done", "full"])


@pytest.mark.parametrize("option", ["repeat", "claims", "scale", "held_seconds"])
def test_a_number_that_measures_nothing_is_refused(database_url: URL, option: str) -> None:
    numbers: dict[str, Any] = {option: 0}
    with pytest.raises(InvalidOption, match=f"{option} is 0: it must be above 0"):
        run_claim(url=database_url, **numbers)


def test_a_schema_that_is_there_is_left_alone(database_url: URL, observer: Observer) -> None:
    observer.execute("CREATE SCHEMA enlist_bench_claim")
    with pytest.raises(ConfigurationError, match="has a schema 'enlist_bench_claim' already"):
        run_claim(url=database_url)
    assert observer.scalar("SELECT to_regnamespace('enlist_bench_claim') IS NOT NULL")


def test_a_database_that_is_there_is_left_alone(database_url: URL, observer: Observer) -> None:
    number = observer.scalar("SELECT oid FROM pg_database WHERE datname = current_database()")
    name = f"enlist_bench_claim_{number}"
    observer.connection.execute(f"CREATE DATABASE {name}".encode())
    try:
        with pytest.raises(ConfigurationError, match=f"has a database '{name}' already.* DROP DATABASE {name}"):
            run_claim(url=database_url)
    finally:
        observer.connection.execute(f"DROP DATABASE {name}".encode())  # fails if it is gone
    assert observer.scalar("SELECT to_regnamespace('enlist_bench_claim') IS NULL")


def test_who_may_not_create_a_database_is_told(database_url: URL, observer: Observer) -> None:
    role = f"enlist_bench_{uuid.uuid4().hex}"
    observer.connection.execute(f"CREATE ROLE {role} LOGIN".encode())
    try:
        observer.connection.execute(f'GRANT CREATE ON DATABASE "{database_url.database}" TO {role}'.encode())
        with pytest.raises(ConfigurationError, match=r"a second database .* is needed.*permission denied"):
            run_claim(url=database_url.set(username=role))
    finally:
        observer.connection.execute(f"DROP OWNED BY {role}".encode())
        observer.connection.execute(f"DROP ROLE {role}".encode())


# -- what is in the tables ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "condition"),
    [
        ("done", "status = 'done' AND finished_at < statement_timestamp()"),
        ("future", "status = 'queued' AND priority = 32767 AND run_at > statement_timestamp() + interval '20 hours'"),
        ("ready", "status = 'queued' AND run_at < statement_timestamp() AND concurrency_key IS NULL"),
        ("hot-key", "status = 'queued' AND run_at < statement_timestamp() AND concurrency_key = 'hot'"),
        ("idle-key", "status = 'queued' AND run_at < statement_timestamp() AND concurrency_key = 'idle'"),
        ("keys", "status = 'queued' AND run_at < statement_timestamp() AND concurrency_limit = 1"),
    ],
)
def test_a_state_is_what_its_name_says(table: Table, observer: Observer, name: str, condition: str) -> None:
    jobs = state_named(name).jobs
    assert jobs is not None
    table.insert(jobs, 1000)
    conditions = f"SELECT count(*) FILTER (WHERE {condition}), count(DISTINCT run_at) FROM enlist_job"
    assert observer.connection.execute(conditions.encode()).fetchone() == (1000, 1000)
    # As real rows: ids in the order in which they were made, which is not the order in which they are due.
    by_id = "SELECT count(*) FROM (SELECT {0} < lag({0}) OVER (ORDER BY id) AS back FROM enlist_job) AS job WHERE back"
    assert observer.connection.execute(by_id.format("created_at").encode()).fetchone() == (0,)
    (back,) = observer.connection.execute(by_id.format("run_at").encode()).fetchone() or (0,)
    assert 200 < back < 800


def test_the_ready_jobs_are_in_fifty_queues_and_ten_priorities(table: Table, observer: Observer) -> None:
    jobs = state_named("ready").jobs
    assert jobs is not None
    table.insert(jobs, 1000)
    assert observer.rows(
        "SELECT count(DISTINCT queue), count(DISTINCT priority), count(DISTINCT (queue, priority)),"
        " count(*) FILTER (WHERE queue = 'work') FROM enlist_job"
    ) == [(50, 10, 500, 20)]


def test_another_worker_runs_the_hot_key(table: Table, observer: Observer) -> None:
    running = state_named("hot-key").running
    assert running is not None
    table.insert(running, 1)
    assert observer.rows(
        "SELECT status, concurrency_key, concurrency_limit, concurrency_slot, locked_by,"
        " locked_until > statement_timestamp() + interval '30 minutes' FROM enlist_job"
    ) == [("running", "hot", 1, 1, "another", True)]


def test_what_claims_take_is_just_due(table: Table, observer: Observer) -> None:
    for jobs, keys in ((PLAIN, 0), (MIXED, 20), (KEYED, 100)):
        table.insert(jobs, 100)
        assert observer.rows(
            "SELECT count(DISTINCT concurrency_key), count(*) FILTER (WHERE run_at <= statement_timestamp()"
            " AND run_at > statement_timestamp() - interval '1 minute') FROM enlist_job"
        ) == [(keys, 100)]
        observer.execute("TRUNCATE enlist_job")


def test_a_claim_is_completed_and_makes_room_for_more(table: Table, observer: Observer) -> None:
    table.fill(10)
    seconds, runs = table.claim(4)
    assert seconds > 0
    assert (len(runs), table.ready) == (4, 6)
    table.fill(10)
    assert observer.rows("SELECT status, count(*) FROM enlist_job GROUP BY 1 ORDER BY 1") == [
        ("done", 4),
        ("queued", 10),
    ]
    assert observer.scalar("SELECT 'autovacuum_enabled=off' = ANY(reloptions) FROM pg_class WHERE relname='enlist_job'")


# -- an old snapshot ---------------------------------------------------------------------------------------------


def test_dead_rows_stay_while_there_is_a_snapshot(table: Table, observer: Observer) -> None:
    said: list[str] = []
    observer.connection.add_notice_handler(lambda notice: said.append(notice.message_primary or ""))

    def rows_kept() -> int:
        said.clear()
        observer.execute("VACUUM (VERBOSE) enlist_job")
        kept, _of_toast = re.findall(r"(\d+) are dead but not yet removable", "\n".join(said))
        return int(kept)

    with pinned.snapshot(table):
        history = pinned.make_history(table, 250)
        assert len(history.milliseconds) == 3
        assert rows_kept() >= 500  # queued and running, of each
    assert rows_kept() == 0
    assert observer.rows("SELECT status, count(*) FROM enlist_job GROUP BY 1") == [("done", 250)]


def test_each_sort_of_late_job_is_picked_up(table: Table, observer: Observer) -> None:
    found = pinned.pick_ups(table, repeat=1, held_seconds=0.05)
    assert [one.title for one in found] == [
        "a job committed while the worker was idle",
        "a job whose transaction was open for 0.05 s",
        "a job that was due an hour ago",
        "the same while more jobs are ready than are claimed",
    ]
    late = observer.scalar("SELECT count(*) FROM enlist_job WHERE run_at < created_at - interval '50 minutes'")
    assert late == 2
    # Of the last, there were others in front of which it was claimed.
    assert observer.scalar("SELECT count(*) FROM enlist_job WHERE status = 'queued'") >= 100


def test_a_job_that_is_not_picked_up_is_told(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "PATIENCE_SECONDS", 0.01)
    job = uuid.uuid4()
    with pytest.raises(pinned.NotClaimed, match=f"the job {job} was not claimed in 0.01 seconds"):
        pinned._pick_up(table, job, 0)


# -- what is told ------------------------------------------------------------------------------------------------


def test_percentiles_and_the_slowest() -> None:
    times = tuple(float(number) for number in range(1, 201))
    assert (percentile(times, 50), percentile(times, 95), percentile((3.0,), 50)) == (100, 190, 3)
    mean, share = slowest(times)
    assert mean == (199 + 200) / 2
    assert share == (199 + 200) / sum(times)
    assert slowest((2.0, 6.0)) == (6.0, 0.75)


def test_the_facts_as_text() -> None:
    assert FACTS.as_text().splitlines() == [
        "claims in milliseconds; MISSED: the median takes longer than the goal has it",
        "",
        "state      jobs    empty table     this state          times as long      ",
        "                     p50    p95      p50    p95      p50    (all)      p95   goal",
        "done          1     1.00   4.00     2.00   5.00     1.50 (  2.00)     1.62   1.5",
        (
            "done         10     1.00   1.00     2.00   3.00     2.50 (  2.00)     2.50   1.5 MISSED"
            " of 20 asked for got 19, on the empty table 20 with a key 2, on the empty table 0"
        ),
        "pinned        1     1.00   1.00     2.00   2.00     2.00 (  2.00)     2.00   2",
        "",
        "done: 1,000 done jobs; beside an empty table",
        "pinned: 200 jobs; beside an empty table",
        "  the slowest 1 % of 1 claims of 1: 2.00 ms, 100.0 % of the time",
        "  the slowest 1 % of 2 claims of 100: 3.00 ms, 75.0 % of the time, while it came about",
        "  of these the last tenth took 3.00 times as long as the first",
        "  a job: in claim 2 at the latest, 4.2 ms at most",
        "",
        "scale 0.1, the planner's statistics are of the table as it is",
        "PostgreSQL 18.6, fsync on",
    ]
    assert "statistics are of an empty table" in dataclasses.replace(FACTS, stale=True).as_text()


def test_the_facts_as_json() -> None:
    found = json.loads(FACTS.as_json())
    done, pinned_state = found["states"]["done"], found["states"]["pinned"]
    assert (done["goal"], done["missed"], pinned_state["missed"]) == (1.5, True, False)
    assert done["claims"]["1"] == {
        "ratio": 1.5,
        "ratio_of_all": 2.0,
        "ratio_p95": 1.625,
        "empty_p50_ms": 1.0,
        "empty_p95_ms": 4.0,
        "p50_ms": 2.0,
        "p95_ms": 5.0,
        "slowest_hundredth_ms": 5.0,
        "slowest_hundredth_share": 0.4167,
        "asked": 4,
        "claimed": 4,
        "claimed_empty": 4,
        "keyed": 0,
        "keyed_empty": 0,
    }
    assert pinned_state["history"]["growth"] == 3.0
    assert pinned_state["pick_up"] == {"a job": {"calls": [1, 2, 1], "ms": [3.0, 2.0, 4.25]}}
    assert (found["scale"], found["stale"], found["server"], found["fsync"]) == (0.1, False, "18.6", "on")


@pytest.mark.slow
def test_the_command_prints_what_it_found(
    database_url: URL, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = database_url.render_as_string(hide_password=False)
    few = ["--repeat", "1", "--claims", "1", "--scale", "0.0001"]
    chosen = ["--state", "done", "--state", "future", "--stale", "--json"]

    def run(*arguments: str) -> str:
        monkeypatch.setattr("sys.argv", ["enlist", "bench", "claim", *arguments])
        with pytest.raises(SystemExit) as exited:
            main()
        assert exited.value.code in (None, 0)
        return capsys.readouterr().out

    found = json.loads(run("--database-url", url, *few, *chosen))
    assert list(found["states"]) == ["done", "future"]
    assert (found["scale"], found["stale"]) == (0.0001, True)
    assert found["states"]["done"]["claims"]["100"]["claimed"] == 100
    assert "100 done jobs; beside an empty table" in run("--database-url", url, *few, "--state", "done")
    told = " ".join(run("--help").split())
    assert [name for name in NAMES if name not in told] == []
