"""The plan of each hot statement does not depend on what the statistics say: never a scan of the whole table."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine

from enlist import JobRecord
from enlist._statements import NO_MARKS, Statements, keys, statements_for
from tests.support import Observer
from tests.support.claims import claim, claim_parameters, look
from tests.support.databases import Databases
from tests.support.plans import Mode, Scan, nodes, plan_of, scans

TABLE = "enlist_job"
STATEMENTS: Statements = statements_for(JobRecord.metadata.tables[TABLE])
LEASE = dt.timedelta(seconds=60)
IDS = [uuid.uuid4() for _ in range(50)]
HELD = {"ids": IDS, "tokens": [1] * 50}
CLAIM = claim_parameters({"default": 10, "mail": 10}, kinds=["a"]) | {"look_first": True}
MARKS = {
    "mark_queues": ["default"],
    "mark_keyed": [False],
    "mark_priorities": [0],
    "mark_dues": [0.0],
    "mark_ids": [IDS[0]],
    "held_queues": ["default"],
    "held_keys": ["k1"],
}
LOOKED_AT: list[Any] = [
    SimpleNamespace(queue="default", concurrency_key="k1", concurrency_limit=2, ordered=False),
    SimpleNamespace(queue="default", concurrency_key="k2", concurrency_limit=1, ordered=True),
]
KEYS = keys(LOOKED_AT)
RATE = {"rate_queues": ["mail"], "rate_intervals": [0.1], "rate_bursts": [5]}
UNIQUE = {"kinds": ["a", "a"], "keys": ["1", "2"]}
OUTCOMES = {
    "statuses": ["queued"] * 50,
    "delays": [None] * 50,
    "returned": [0] * 50,
    "errors": ["e"] * 50,
    "entries": ["{}"] * 50,
}


class Hot(NamedTuple):
    """A statement that has to be quick whatever the size of the table."""

    statement: Any
    parameters: dict[str, Any]
    indexes: str
    """Those that it uses, all of them, by the ends of their names; "|" stands between two that serve as well."""
    whole: str = ""
    """The one of them that it reads from end to end, once; of running jobs alone, which are few."""


HOT = {
    "look": Hot(STATEMENTS.look, CLAIM, "ready_key queue_key ordered slot pkey", "slot"),
    "look from the marks on": Hot(STATEMENTS.look, CLAIM | MARKS, "ready_key queue_key ordered slot pkey", "slot"),
    "claim": Hot(STATEMENTS.claim, CLAIM, "ready ready_key|queue_key pkey"),
    "claim_among": Hot(STATEMENTS.claim_among, CLAIM, "ready ready_key|queue_key pkey"),
    "claim_among from the marks on": Hot(STATEMENTS.claim_among, CLAIM | MARKS, "ready ready_key|queue_key pkey"),
    "claim_limited": Hot(STATEMENTS.claim_limited, CLAIM | RATE, "ready ready_key|queue_key pkey"),
    "claim_keyed": Hot(STATEMENTS.claim_keyed, CLAIM | KEYS, "queue_key ordered slot pkey"),
    "notify_of_keys": Hot(STATEMENTS.notify_of_keys, {"keys": ["k1", "k2"]}, "queue_key slot"),
    "claim_keyed_limited": Hot(STATEMENTS.claim_keyed_limited, CLAIM | KEYS | RATE, "queue_key ordered slot pkey"),
    "renew": Hot(STATEMENTS.renew, {**HELD, "lease": LEASE}, "pkey"),
    "complete": Hot(STATEMENTS.complete, HELD, "pkey"),
    "settle": Hot(STATEMENTS.settle, {**HELD, **OUTCOMES}, "pkey"),
    "expired": Hot(STATEMENTS.expired, {"limit": 500}, "lease"),
    "reap": Hot(STATEMENTS.reap, {"ids": IDS}, "lease pkey"),
    "start": Hot(STATEMENTS.start, {"job_id": IDS[0], "token": 1}, "pkey"),
    "finish_group": Hot(STATEMENTS.finish_group(1), HELD, "pkey"),
    "finish": Hot(STATEMENTS.finish(1), {"job_id": IDS[0], "token": 1}, "pkey"),
    "lock_row": Hot(STATEMENTS.lock_row(1), {"job_id": IDS[0], "token": 1, "idle_limit": "60s"}, "pkey"),
    "states": Hot(STATEMENTS.states, {"ids": IDS}, "pkey"),
    "fate": Hot(STATEMENTS.fate, {"job_id": IDS[0]}, "pkey"),
    "disown": Hot(STATEMENTS.disown, {"worker": "w", "ids": IDS}, "lease pkey", "lease"),
    "cancel": Hot(STATEMENTS.cancel.run, {"ids": IDS}, "pkey"),
    "cancel_again": Hot(STATEMENTS.cancel_again.run, {"ids": IDS}, "pkey"),
    "cancel_waiting": Hot(STATEMENTS.cancel_waiting.run, {"ids": IDS}, "pkey"),
    "retry": Hot(STATEMENTS.retry.run, {"ids": IDS}, "pkey unique"),
    "reschedule": Hot(STATEMENTS.reschedule.run, {"ids": IDS, "run_at": None, "delay": LEASE}, "pkey"),
    "release_lapsed": Hot(STATEMENTS.release_lapsed, {"ids": IDS}, "pkey unique"),
    "present": Hot(STATEMENTS.present, {"ids": IDS}, "pkey"),
    "at_odds": Hot(
        STATEMENTS.at_odds(1), {"queues": ["mail"], "keys": ["k1"], "ordered": [True]}, "ordered slot queue_key"
    ),
    "holders": Hot(STATEMENTS.holders, UNIQUE, "unique"),
    "release": Hot(STATEMENTS.release, {**UNIQUE, "started": [True, False]}, "pkey unique"),
}


def queued(jobs: int) -> str:
    return f"""
    INSERT INTO enlist_job (id, kind, queue, unique_key, unique_held, concurrency_key, concurrency_limit, ordered)
    SELECT gen_random_uuid(), 'a', CASE WHEN mod(n, 2) = 0 THEN 'default' ELSE 'mail' END, n, true,
        CASE WHEN mod(n, 5) = 0 THEN 'k' || mod(n, 100) END, CASE WHEN mod(n, 5) = 0 THEN 1 END, mod(n, 50) = 0
    FROM generate_series(1, {jobs}) AS n
    """


QUEUED = queued(20_000)
RUNNING = """
    INSERT INTO enlist_job (id, kind, status, locked_by, locked_until, concurrency_key, concurrency_limit,
        concurrency_slot)
    SELECT gen_random_uuid(), 'a', 'running', 'w', 'infinity', 'r' || n, 1, 1 FROM generate_series(1, 500) AS n
"""
DONE = """
    INSERT INTO enlist_job (id, kind, status, unique_key, finished_at)
    SELECT gen_random_uuid(), 'a', 'done', 'done' || n, now() FROM generate_series(1, 200000) AS n
"""
ANALYZE = "ANALYZE enlist_job"
STATISTICS = {
    "never analyzed": [QUEUED, RUNNING],
    "analyzed when empty": [ANALYZE, QUEUED, RUNNING],
    "analyzed when all were queued": [QUEUED, ANALYZE, "UPDATE enlist_job SET status = 'done'", RUNNING],
    "analyzed when 200,000 were done": [DONE, ANALYZE, QUEUED, RUNNING],
    "analyzed as it is, with 200,000 done": [DONE, QUEUED, RUNNING, ANALYZE],
}


SLOW_ONE = "analyzed when 200,000 were done"  # the other one with 200,000 rows is enough for every day
STATES = [pytest.param(name, marks=[pytest.mark.slow] * (name == SLOW_ONE)) for name in STATISTICS]
MODES: tuple[Mode, ...] = ("custom", "generic")


@pytest.fixture(scope="module", params=STATES)
def table(request: pytest.FixtureRequest, server: Databases) -> Iterator[Engine]:
    """A database whose job table is large, and whose statistics are of some other time."""
    name = server.clone()
    engine = sa.create_engine(server.url(name), poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE enlist_job SET (autovacuum_enabled = off)")
        for step in STATISTICS[request.param]:
            connection.exec_driver_sql(step)
    yield engine
    server.drop(name)


def test_every_hot_statement_looks_its_rows_up_in_its_own_indexes(table: Engine) -> None:
    found = {
        (name, mode): scans(plan_of(table, hot.statement, hot.parameters, mode), TABLE)
        for name, hot in HOT.items()
        for mode in MODES
    }
    assert {key: faults for key, seen in found.items() if (faults := _faults(HOT[key[0]], seen))} == {}


def _faults(hot: Hot, found: set[Scan]) -> list[str]:
    """What is wrong with a plan: rows that are looked for without an index, or in one that grows for other reasons."""
    choices = [{f"{TABLE}_{index}" for index in choice.split("|")} for choice in hot.indexes.split()]
    used = {scan.index_name for scan in found if scan.index_name is not None}
    walks = [
        f"{scan.how} of {scan.index_name or 'the table'} from end to end{' for each row of another' * scan.repeated}"
        for scan in found
        if scan.condition is None and (scan.repeated or scan.index_name != f"{TABLE}_{hot.whole}")
    ]
    unexpected = [f"uses {index}" for index in used if not any(index in choice for choice in choices)]
    missing = [f"does not use {' or '.join(choice)}" for choice in choices if not choice & used]
    return [*walks, *unexpected, *missing]


@pytest.mark.parametrize(
    "table", [state for state in STATES if "queued" not in str(state.values)], indirect=True, scope="module"
)
def test_the_oldest_queued_age_is_found_in_the_lines_of_queued_jobs(table: Engine) -> None:
    """While few of all jobs are queued, as far as is known; to many of them the table is the shorter way."""
    found = {
        scan for mode in MODES for scan in scans(plan_of(table, STATEMENTS.oldest_queued_age([]), {}, mode), TABLE)
    }
    assert {scan.index_name for scan in found} <= {f"{TABLE}_{name}" for name in ("ready", "ready_key", "queue_key")}
    assert not any(scan.repeated for scan in found)


@pytest.mark.parametrize("statement", [STATEMENTS.counts([]), STATEMENTS.summary], ids=["counts", "summary"])
def test_counting_jobs_reads_the_table_once(table: Engine, statement: Any) -> None:
    for mode in MODES:
        (scan,) = scans(plan_of(table, statement, {}, mode), TABLE)
        assert not scan.repeated


def test_the_marks_are_all_those_of_a_claim() -> None:
    assert MARKS.keys() == NO_MARKS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("held", [False, True], ids=["its slot is free", "its slot is taken"])
def test_a_long_line_for_one_key_holds_up_nobody(engine: Engine, held: bool) -> None:
    """20,000 jobs of one key stand in front: those without a key are claimed, and no row is looked up for each."""
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "INSERT INTO enlist_job (id, kind, concurrency_key, concurrency_limit)"
            " SELECT gen_random_uuid(), 'a', 'hot', 1 FROM generate_series(1, 20000)"
        )
        if held:
            connection.exec_driver_sql(
                "UPDATE enlist_job SET status = 'running', locked_until = 'infinity', concurrency_slot = 1"
                " WHERE id = (SELECT id FROM enlist_job LIMIT 1)"
            )
        connection.exec_driver_sql(
            "INSERT INTO enlist_job (id, kind, priority) SELECT gen_random_uuid(), 'a', -1 FROM generate_series(1, 5)"
        )
    plan = plan_of(engine, STATEMENTS.look, CLAIM, "custom", ", ANALYZE, BUFFERS")
    with engine.connect() as connection:
        seen = look(connection, STATEMENTS, {"default": 10}, kinds=["a"])
        taken = claim(connection, STATEMENTS, {"default": 10}, kinds=["a"])
    assert len(taken) == 5
    assert {row.concurrency_key for row in seen} == (set() if held else {"hot"})
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < (25_000 if held else 5_000)


def test_beside_an_old_snapshot_a_claim_walks_over_the_taken_jobs_once(engine: Engine, observer: Observer) -> None:
    """Their entries stay in the index: one walk finds where a class begins, and what is taken begins there."""
    with engine.connect() as old:
        old.execution_options(isolation_level="REPEATABLE READ").exec_driver_sql("SELECT count(*) FROM enlist_job")
        insert = "INSERT INTO enlist_job (id, kind) SELECT gen_random_uuid(), 'a' FROM generate_series(1, %s)"
        observer.execute(insert, 5000)
        observer.execute("UPDATE enlist_job SET status = 'done'")
        observer.execute(insert, 20)
        plan = plan_of(engine, STATEMENTS.claim, CLAIM, "custom", ", ANALYZE, BUFFERS")
    walks = [node["Shared Hit Blocks"] for node in nodes(plan) if node.get("Index Name") == "enlist_job_ready"]
    assert sum(blocks > 50 for blocks in walks) == 1, walks
