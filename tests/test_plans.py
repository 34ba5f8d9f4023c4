"""The plan of each hot statement does not depend on what the statistics say: no scan of the whole table, ever."""

from __future__ import annotations

import datetime as dt
import re
import uuid
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine

from enlist import JobRecord
from enlist._statements import Statements, statements_for

STATEMENTS: Statements = statements_for(JobRecord.metadata.tables["enlist_job"])
LEASE = dt.timedelta(seconds=60)
IDS = [uuid.uuid4() for _ in range(50)]
HELD = {"ids": IDS, "tokens": [1] * 50}
CLAIM = {
    "queues": ["default", "mail"],
    "limits": [10, 10],
    "kinds": ["a"],
    "careful": True,
    "worker": "w",
    "lease": LEASE,
}
OUTCOMES = {
    "statuses": ["queued"] * 50,
    "delays": [None] * 50,
    "returned": [0] * 50,
    "errors": ["e"] * 50,
    "entries": ["{}"] * 50,
}

HOT: dict[str, tuple[Any, dict[str, Any]]] = {
    "claim": (STATEMENTS.claim, CLAIM),
    "claim_keyed": (STATEMENTS.claim_keyed, {**CLAIM, "keys": ["k1", "k2"]}),
    "renew": (STATEMENTS.renew, {**HELD, "lease": LEASE}),
    "complete": (STATEMENTS.complete, HELD),
    "settle": (STATEMENTS.settle, {**HELD, **OUTCOMES}),
    "reap": (STATEMENTS.reap, {"limit": 500}),
    "start": (STATEMENTS.start, {"job_id": IDS[0], "token": 1}),
    "finish": (STATEMENTS.finish(1), {"job_id": IDS[0], "token": 1}),
    "lock_row": (STATEMENTS.lock_row, {"job_id": IDS[0], "token": 1, "idle_limit": "60s"}),
    "states": (STATEMENTS.states, {"ids": IDS}),
    "fate": (STATEMENTS.fate, {"job_id": IDS[0]}),
    "disown": (STATEMENTS.disown, {"worker": "w", "ids": IDS}),
    "cancel": (STATEMENTS.cancel.run, {"ids": IDS}),
    "retry": (STATEMENTS.retry.run, {"ids": IDS}),
    "reschedule": (STATEMENTS.reschedule.run, {"ids": IDS, "run_at": None, "delay": LEASE}),
    "release_lapsed": (STATEMENTS.release_lapsed, {"ids": IDS}),
    "present": (STATEMENTS.present, {"ids": IDS}),
    "holders": (STATEMENTS.holders, {"kinds": ["a", "a"], "keys": ["1", "2"]}),
    "release": (STATEMENTS.release, {"kinds": ["a", "a"], "keys": ["1", "2"], "started": [True, False]}),
}

FILL = """
    INSERT INTO enlist_job (id, kind, queue, unique_key, unique_held, concurrency_key, concurrency_limit)
    SELECT gen_random_uuid(), 'a', CASE WHEN mod(n, 2) = 0 THEN 'default' ELSE 'mail' END, n, true,
        CASE WHEN mod(n, 5) = 0 THEN 'k' || mod(n, 100) END, CASE WHEN mod(n, 5) = 0 THEN 2 END
    FROM generate_series(1, 20000) AS n
"""
STATISTICS = {
    "never analyzed": ["FILL"],
    "analyzed when empty": ["ANALYZE enlist_job", "FILL"],
    "analyzed when all were queued": ["FILL", "ANALYZE enlist_job", "UPDATE enlist_job SET status = 'done'"],
    "analyzed when all were done": ["FILL", "UPDATE enlist_job SET status = 'done'", "ANALYZE enlist_job"],
}


@pytest.fixture(params=list(STATISTICS))
def table(request: pytest.FixtureRequest, engine: Engine) -> Engine:
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE enlist_job SET (autovacuum_enabled = off)")
        for step in STATISTICS[request.param]:
            connection.exec_driver_sql(FILL if step == "FILL" else step)
    return engine


@pytest.mark.parametrize("generic", [False, True], ids=["custom", "generic"])
def test_no_hot_statement_scans_the_table(table: Engine, generic: bool) -> None:
    explain = _explain_generic if generic else _explain
    with table.connect() as connection:
        plans = {name: explain(connection, *hot) for name, hot in HOT.items()}
    assert [name for name, plan in plans.items() if "Seq Scan on enlist_job" in plan] == []
    assert "enlist_job_ready" in plans["claim"]
    assert "enlist_job_lease" in plans["reap"]


def _explain(connection: sa.Connection, statement: Any, parameters: dict[str, Any], options: str = "") -> str:
    compiled = statement.compile(dialect=connection.dialect)
    values = {
        name: processor(value) if (processor := compiled._bind_processors.get(name)) else value
        for name, value in compiled.construct_params(parameters).items()
    }
    lines = connection.exec_driver_sql(f"EXPLAIN ({options or 'COSTS'}) {compiled}", values).scalars()
    return "\n".join(lines)


def _explain_generic(connection: sa.Connection, statement: Any, _parameters: dict[str, Any]) -> str:
    """The plan for parameters that the planner does not know: what a server keeps of a prepared statement."""
    compiled = str(statement.compile(dialect=connection.dialect))
    names = list(dict.fromkeys(re.findall(r"%\((\w+)\)s", compiled)))
    numbered = re.sub(r"%\((\w+)\)s", lambda match: f"${names.index(match[1]) + 1}", compiled)
    lines = connection.exec_driver_sql(f"EXPLAIN (GENERIC_PLAN) {numbered}").scalars()
    return "\n".join(lines)


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
        with connection.begin_nested() as savepoint:
            plan = _explain(connection, STATEMENTS.claim, CLAIM, "ANALYZE, BUFFERS")
            savepoint.rollback()
        rows = connection.execute(STATEMENTS.claim, CLAIM).all()
    buffers = int(re.findall(r"Buffers: shared hit=(\d+)", plan)[0])
    assert len([row for row in rows if row.taken]) == 5
    assert {row.concurrency_key for row in rows if not row.taken} == (set() if held else {"hot"})
    assert buffers < (25_000 if held else 5_000)
