"""The worker prepares its statements only on connections that are its own, and keeps no plan for long."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from psycopg import sql
from sqlalchemy import Engine

from enlist import HandlerRegistry, JobRecord, Worker
from enlist._database import Database
from enlist._engines import housekeeping_engine
from tests.support import Observer, wait_until
from tests.support.jobs import running

CLAIM: dict[str, Any] = {
    "queues": ["default"],
    "limits": [1],
    "kinds": ["a"],
    "careful": True,
    "worker": "w",
    "lease": dt.timedelta(seconds=60),
    "look_first": True,
}
OFTEN = 12


@pytest.fixture
def own(engine: Engine) -> Iterator[Database]:
    housekeeping = housekeeping_engine(engine, None)
    own = Database(housekeeping, JobRecord, lease=60)
    own.open()
    yield own
    own.close()


def prepared(own: Database) -> list[str]:
    """What the connection has prepared that the pool gives out, and how its plans were made."""
    with own.connection() as connection:
        statement = sa.text("SELECT statement, generic_plans FROM pg_prepared_statements WHERE from_sql = false")
        return [row.statement[:4] for row in connection.execute(statement)]


def claim(own: Database, times: int = OFTEN) -> None:
    for _ in range(times):
        own.execute(own.statements.claim, CLAIM)


def test_nothing_is_prepared_where_a_pooler_may_share_the_connection(own: Database) -> None:
    claim(own)
    assert prepared(own) == []


def test_a_claim_is_prepared_where_it_may_be(own: Database) -> None:
    own.prepares = True
    claim(own)
    assert "WITH" in prepared(own)
    own.prepares = False  # LISTEN is not effective any more: a pooler came in between
    assert prepared(own) == []


def test_it_may_be_forgotten_any_number_of_times(own: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when there was nothing to forget, since little had happened: the driver goes by what it has seen."""
    own.prepares = True
    for times in (1, 2, OFTEN, 1, OFTEN, OFTEN):
        claim(own, times)
        with monkeypatch.context() as patch:
            patch.setattr("enlist._database.PREPARED_SECONDS", -1)
            claim(own, 1)


def test_its_plan_is_made_anew_now_and_then(own: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    own.prepares = True
    claim(own)
    monkeypatch.setattr("enlist._database.PREPARED_SECONDS", -1)
    assert prepared(own) == []


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_also_where_statements_are_in_transactions_of_another_level_than_the_default(
    level: str, engine: Engine, observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = observer.scalar("SELECT current_database()")
    setting = sql.SQL("ALTER DATABASE {} SET default_transaction_isolation = {}")
    observer.connection.execute(setting.format(sql.Identifier(database), sql.Literal(level)))
    own = Database(housekeeping_engine(engine, None), JobRecord, lease=60)
    own.open()
    own.prepares = True
    claim(own)
    assert "WITH" in prepared(own)
    monkeypatch.setattr("enlist._database.PREPARED_SECONDS", -1)
    claim(own, 1)
    monkeypatch.setattr("enlist._database.PREPARED_SECONDS", 60)
    assert "WITH" not in prepared(own)
    own.close()


@pytest.mark.parametrize("lost", ["DEALLOCATE ALL", "ALTER TABLE enlist_job ALTER COLUMN queue TYPE varchar(200)"])
def test_a_prepared_statement_that_is_gone_or_does_not_fit_any_more_costs_one_error(
    lost: str, own: Database, engine: Engine
) -> None:
    """As after another client of a shared connection, or a migration."""
    own.prepares = True
    claim(own)
    if lost.startswith("ALTER"):
        with engine.begin() as connection:
            connection.exec_driver_sql(lost)
    else:
        with own.connection() as connection:
            behind_psycopgs_back = connection.connection.driver_connection.pgconn  # type: ignore[union-attr]
            behind_psycopgs_back.exec_(lost.encode())
    errors = 0
    for _ in range(OFTEN):
        try:
            claim(own, 1)
        except sa.exc.DBAPIError:
            errors += 1
    assert errors <= 1


def test_a_worker_that_hears_itself_prepares(engine: Engine) -> None:
    handlers = HandlerRegistry()
    handlers.handler("a")(lambda session, job: None)
    worker = Worker(engine, handlers)
    with running(worker):
        assert worker._running is not None
        database = worker._running.database
        wait_until(lambda: database.prepares)


def test_a_connection_that_is_dead_when_it_is_to_forget_is_an_ordinary_loss(
    own: Database, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    own.prepares = True
    claim(own)
    monkeypatch.setattr("enlist._database.PREPARED_SECONDS", -1)
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
    with pytest.raises(sa.exc.DBAPIError) as caught:
        claim(own, 1)
    assert caught.value.connection_invalidated
    claim(own, 1)
