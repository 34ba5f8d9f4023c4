"""What was planned on an empty table does not read the whole of one that has grown: run as workers run it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import URL, Engine
from sqlalchemy.orm import Session

from enlist import JobRecord
from enlist._database import Database
from enlist._engines import housekeeping_engine
from tests.support import Observer
from tests.test_plans import ANALYZE, HOT, RUNNING, STATEMENTS, queued

JOBS = 100_000
ENOUGH_TO_CACHE = 15
"""Runs after which the plan for any parameters is kept: psycopg prepares after 5, and then PostgreSQL tries 5 times."""

HOUSEKEEPING = [
    "look",
    "look from the marks on",
    "claim",
    "claim_among",
    "claim_among from the marks on",
    "notify_of_keys",
    "claim_limited",
    "claim_keyed",
    "claim_keyed_limited",
    "renew",
    "complete",
    "settle",
    "expired",
    "reap",
    "start",
    "states",
    "fate",
    "disown",
]


@pytest.fixture
def observer(observer: Observer) -> Observer:
    """On a table that was analyzed when it was empty, and is not analyzed again."""
    observer.execute("ALTER TABLE enlist_job SET (autovacuum_enabled = off)")
    observer.execute(ANALYZE)
    return observer


@pytest.fixture
def one_connection(database_url: URL) -> Iterator[Engine]:
    """An application's engine whose sessions share one connection."""
    engine = sa.create_engine(database_url, pool_size=1, max_overflow=0)
    yield engine
    engine.dispose()


def grow(observer: Observer) -> list[uuid.UUID]:
    """Fill the table, without a look at it; return the ids of running jobs."""
    observer.connection.execute(queued(JOBS).encode())
    return [job_id for (job_id,) in observer.rows(RUNNING + " RETURNING id")[:50]]


def rows_read(observer: Observer, run: Callable[[], object], flush: Callable[[str], object]) -> int:
    """How many rows of the job table are read by scans of the table while ``run`` runs.

    ``flush`` executes a statement on the same connection, which then adds what it has read to the server's statistics.
    """
    statement = "SELECT seq_tup_read FROM pg_stat_user_tables WHERE relname = 'enlist_job'"
    before = observer.scalar(statement)
    run()
    flush("SELECT pg_stat_force_next_flush()")
    rows: int = observer.scalar(statement) - before
    return rows


def shortest(run: Callable[[], object]) -> float:
    """The seconds of the quickest of three runs: the plan is the same each time, the machine is not."""

    def seconds() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return min(seconds() for _ in range(3))


@pytest.mark.slow
def test_housekeeping_does_not_scan_the_table_that_was_empty_before(engine: Engine, observer: Observer) -> None:
    database, fresh = (Database(housekeeping_engine(engine, None), JobRecord) for _ in range(2))
    for name in HOUSEKEEPING:
        for _ in range(ENOUGH_TO_CACHE):
            database.execute(HOT[name].statement, HOT[name].parameters)

    ids = grow(observer)
    of_a_job: dict[str, Any] = {"ids": ids, "tokens": [0] * len(ids), "job_id": ids[0], "token": 0}
    scanned, slow = {}, {}
    for name in HOUSEKEEPING:
        hot = HOT[name]
        parameters = hot.parameters | {key: of_a_job[key] for key in hot.parameters.keys() & of_a_job.keys()}
        run = partial(database.execute, hot.statement, parameters)
        if rows := rows_read(observer, run, lambda text: database.execute(sa.text(text), {})):
            scanned[name] = rows
        seconds, planned_now = shortest(run), shortest(partial(fresh.execute, hot.statement, parameters))
        if seconds > 10 * planned_now + 0.02:
            slow[name] = (seconds, planned_now)
    database.close()
    fresh.close()
    assert scanned == {}
    assert slow == {}


@pytest.mark.slow
def test_the_next_generation_of_a_handlers_last_update_does_not_scan_the_table_that_was_empty_before(
    one_connection: Engine, observer: Observer
) -> None:
    """The driver of an application prepares it, and the server keeps the plan that it made on the empty table."""
    job: dict[str, Any] = {"job_id": uuid.uuid4(), "token": 0}

    def finish(generation: int, times: int = 1) -> None:
        for _ in range(times):
            with Session(one_connection) as session, session.begin():
                session.execute(STATEMENTS.finish(generation), job)

    def execute(text: str) -> Any:
        with Session(one_connection) as session, session.begin():
            return session.execute(sa.text(text)).scalar()

    finish(1, ENOUGH_TO_CACHE)
    assert execute("SELECT generic_plans FROM pg_prepared_statements WHERE statement LIKE '%/* g1 */%'") > 0

    job["job_id"] = grow(observer)[0]
    # So the plan that is kept is one that scans: else the rest would show nothing.
    assert rows_read(observer, lambda: finish(1), execute) >= JOBS
    assert rows_read(observer, lambda: finish(2, ENOUGH_TO_CACHE), execute) == 0
    unprepared = Database(housekeeping_engine(one_connection, None), JobRecord)
    planned_now = shortest(lambda: unprepared.execute(HOT["start"].statement, job))
    unprepared.close()
    assert shortest(lambda: finish(2)) < 10 * planned_now + 0.02
