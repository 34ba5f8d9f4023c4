"""The schema: what migrate() makes, what it refuses, and what a worker finds wrong with it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import URL, Connection, create_engine
from sqlalchemy.orm import DeclarativeBase
from sqlalchemy.pool import NullPool

from enlist import ConfigurationError, InvalidOption, JobRecord, JobRecordMixin, SchemaError
from enlist.migrations import LATEST_STEP, current_step, migrate, verify_schema

ODD_SCHEMAS = ["jobs", 'Jobs of "Ours"', "it's", "100%", "select", "a.b", "{schema}"]


@pytest.fixture
def empty(empty_database_url: URL) -> Any:
    engine = create_engine(empty_database_url, poolclass=NullPool)
    with engine.connect() as connection:
        yield connection
    engine.dispose()


def _catalog(connection: Connection, schema: str) -> dict[str, list[tuple[Any, ...]]]:
    """Everything of the job table that a model and a migration could say differently."""
    statements = {
        "columns": """
            SELECT attname, format_type(atttypid, atttypmod), attnotnull, pg_get_expr(adbin, adrelid)
            FROM pg_attribute LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
            WHERE attrelid = CAST(:name AS regclass) AND attnum > 0 AND NOT attisdropped ORDER BY attnum""",
        "indexes": """
            SELECT relname, replace(pg_get_indexdef(indexrelid), :prefix, ''), reloptions
            FROM pg_index JOIN pg_class ON oid = indexrelid
            WHERE indrelid = CAST(:name AS regclass) ORDER BY relname""",
        "constraints": """
            SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint
            WHERE conrelid = CAST(:name AS regclass) ORDER BY conname""",
        "storage": "SELECT reloptions FROM pg_class WHERE oid = CAST(:name AS regclass)",
    }
    parameters = {"name": f"{schema}.enlist_job", "prefix": f"{schema}."}
    return {
        what: [tuple(row) for row in connection.execute(sa.text(statement), parameters)]
        for what, statement in statements.items()
    }


def test_the_migration_makes_what_the_model_says(empty: Connection) -> None:
    empty.exec_driver_sql("CREATE SCHEMA migrated")
    empty.exec_driver_sql("CREATE SCHEMA created")
    migrate(empty, schema="migrated")
    JobRecord.metadata.create_all(empty.execution_options(schema_translate_map={None: "created"}))
    migrated, created = _catalog(empty, "migrated"), _catalog(empty, "created")
    assert len(migrated["columns"]) > 20
    assert len(migrated["indexes"]) > 4
    (storage,) = created["storage"]
    assert "fillfactor=70" in storage[0]
    for what in migrated:
        assert migrated[what] == created[what], what


def test_migrating_again_does_nothing(empty: Connection) -> None:
    assert current_step(empty) == 0
    assert migrate(empty) == list(range(1, LATEST_STEP + 1))
    before = _catalog(empty, "public")
    assert migrate(empty) == []
    assert _catalog(empty, "public") == before
    assert current_step(empty) == LATEST_STEP
    verify_schema(empty)


def test_a_step_that_was_half_recorded_is_carried_out_again(empty: Connection) -> None:
    migrate(empty)
    before = _catalog(empty, "public")
    empty.exec_driver_sql("DELETE FROM enlist_schema")
    empty.exec_driver_sql("DROP INDEX enlist_job_lease")
    assert migrate(empty) == list(range(1, LATEST_STEP + 1))
    assert _catalog(empty, "public") == before


def test_a_migration_is_the_callers_transaction(empty: Connection) -> None:
    migrate(empty)
    empty.rollback()
    assert current_step(empty) == 0
    with pytest.raises(SchemaError, match="has no table enlist_job"):
        verify_schema(empty)


@pytest.mark.parametrize("schema", ODD_SCHEMAS)
def test_a_schemas_name_may_be_anything(empty: Connection, schema: str) -> None:
    quoted = '"' + schema.replace('"', '""') + '"'
    empty.execute(sa.schema.CreateSchema(schema))
    assert migrate(empty, schema=schema) == list(range(1, LATEST_STEP + 1))
    assert migrate(empty, schema=schema) == []
    assert current_step(empty, schema=schema) == LATEST_STEP
    assert current_step(empty) == 0
    found = empty.execute(sa.text("SELECT to_regclass(:name)"), {"name": f"{quoted}.enlist_job"}).scalar()
    assert found is not None
    assert empty.scalar(sa.text("SELECT count(*) FROM pg_class WHERE relname = 'enlist_job'")) == 1

    class Base(DeclarativeBase):
        pass

    class Record(JobRecordMixin, Base):
        __tablename__ = "enlist_job"
        __table_args__ = {"schema": schema}

    verify_schema(empty, record=Record)


def test_a_schema_that_is_not_there_is_named(empty: Connection) -> None:
    with pytest.raises(SchemaError, match="has no schema 'jobs': create it first"):
        migrate(empty, schema="jobs")


@pytest.mark.parametrize("to", [-1, LATEST_STEP + 1, "1", True, 1.0])
def test_a_step_that_is_not_there_is_refused(empty: Connection, to: Any) -> None:
    with pytest.raises(InvalidOption, match=f"no schema step {to!r}: this release of enlist has the steps 0 to"):
        migrate(empty, to=to)


def test_a_connection_that_commits_by_itself_is_refused(empty_database_url: URL) -> None:
    engine = create_engine(empty_database_url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        with pytest.raises(ConfigurationError, match=r"in AUTOCOMMIT mode.*use engine\.begin\(\)"):
            migrate(connection)
        assert connection.scalar(sa.text("SELECT count(*) FROM pg_class WHERE relname LIKE 'enlist%'")) == 0


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_connection_with_an_old_snapshot_is_refused(empty_database_url: URL, level: Any) -> None:
    engine = create_engine(empty_database_url, poolclass=NullPool, isolation_level=level)
    with engine.begin() as connection, pytest.raises(ConfigurationError, match=f"at {level}.*READ COMMITTED"):
        migrate(connection)


def test_two_migrations_at_once_wait_for_each_other(empty_database_url: URL) -> None:
    engine = create_engine(empty_database_url, poolclass=NullPool)
    steps: list[list[int]] = []
    errors: list[BaseException] = []
    start = threading.Barrier(4)

    def run() -> None:
        try:
            start.wait(10)
            with engine.begin() as connection:
                steps.append(migrate(connection))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sorted(steps) == [[], [], [], list(range(1, LATEST_STEP + 1))]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("DROP TABLE enlist_job", "has no table enlist_job: run `enlist migrate`"),
        ("ALTER TABLE enlist_job DROP COLUMN meta", "lacks the columns meta: run `enlist migrate`"),
        ("DROP INDEX enlist_job_slot", "lacks the indexes enlist_job_slot"),
        ("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'enlist_job_ready'::regclass", "enlist_job_ready"),
    ],
)
def test_what_is_missing_is_named_with_the_remedy(empty: Connection, damage: str, message: str) -> None:
    migrate(empty)
    empty.exec_driver_sql(damage)
    with pytest.raises(SchemaError, match=message):
        verify_schema(empty)


def test_an_older_step_is_named_with_the_remedy(empty: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    migrate(empty)
    monkeypatch.setattr("enlist.migrations.LATEST_STEP", LATEST_STEP + 1)
    message = f"at schema step {LATEST_STEP}, this release needs {LATEST_STEP + 1}: run `enlist migrate`"
    with pytest.raises(SchemaError, match=message):
        verify_schema(empty)


def test_a_newer_step_is_no_reason_to_stop(empty: Connection) -> None:
    migrate(empty)
    empty.exec_driver_sql(f"INSERT INTO enlist_schema (step) VALUES ({LATEST_STEP + 1})")
    verify_schema(empty)


def test_tables_made_by_create_all_will_do(empty: Connection) -> None:
    JobRecord.metadata.create_all(empty)
    verify_schema(empty)


def test_an_applications_own_table_is_its_own_affair(empty: Connection) -> None:
    class Base(DeclarativeBase):
        pass

    class AppJob(JobRecordMixin, Base):
        __tablename__ = "app_job"

    with pytest.raises(SchemaError, match="the table of AppJob is yours: migrate it with your own Alembic"):
        verify_schema(empty, record=AppJob)
    Base.metadata.create_all(empty)
    verify_schema(empty, record=AppJob)
