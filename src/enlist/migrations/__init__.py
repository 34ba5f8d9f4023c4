"""The schema, in numbered steps that can be run again: the one source of what the database looks like.

A step is a module ``step_NNN`` with the SQL that leads to it, frozen when it is released. ``enlist_schema`` holds the
steps that a database has had.
"""

from __future__ import annotations

import importlib
from typing import Final

import sqlalchemy as sa

from enlist._driver import is_autocommit
from enlist.exceptions import ConfigurationError, InvalidOption, SchemaError
from enlist.models import JobRecord, JobRecordMixin, rate_table_of

__all__ = ["LATEST_STEP", "current_step", "migrate", "verify_schema"]

LATEST_STEP: Final = 4
"""The step that this release of enlist needs."""

# Any constant will do: it makes concurrent migrations of one database wait for each other.
_LOCK_KEY: Final = 0x656E6C697374


def migrate(connection: sa.Connection, *, to: int | None = None, schema: str | None = None) -> list[int]:
    """Bring enlist's tables to a step, in the caller's transaction.

    Steps that the database already had are left out, so it may be called at every deployment; two at once wait for
    each other. ::

        with engine.begin() as connection:
            enlist.migrations.migrate(connection)

    :param to: the step to reach; default the latest, :data:`LATEST_STEP`. Steps are not undone.
    :param schema: the schema for the tables, which must exist; default the first of the ``search_path``.
    :return: the steps that were carried out now, in order; empty when there was nothing to do.
    :raises InvalidOption: ``to`` is not a step of this release.
    :raises ConfigurationError: the connection commits by itself (AUTOCOMMIT): a half-made step could stay behind; or
        it is not READ COMMITTED.
    :raises SchemaError: the schema does not exist.
    """
    target = LATEST_STEP if to is None else to
    if isinstance(target, bool) or not isinstance(target, int) or not 0 <= target <= LATEST_STEP:
        raise InvalidOption(f"no schema step {to!r}: this release of enlist has the steps 0 to {LATEST_STEP}")
    if is_autocommit(connection):
        raise ConfigurationError(
            "migrate() was given a connection in AUTOCOMMIT mode; a schema step must be one transaction: "
            "use engine.begin(), or connection.execution_options(isolation_level='READ COMMITTED')"
        )
    level = connection.exec_driver_sql("SHOW transaction_isolation").scalar_one()
    if level != "read committed":
        raise ConfigurationError(
            f"migrate() was given a connection at {level.upper()}: it would not see what a migration that it waited for"
            " has done; use engine.execution_options(isolation_level='READ COMMITTED').begin()"
        )
    prefix = _prefix(connection, schema)
    connection.execute(sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK_KEY})
    connection.exec_driver_sql(
        f"CREATE TABLE IF NOT EXISTS {prefix}enlist_schema ("
        "step integer PRIMARY KEY, applied_at timestamptz NOT NULL DEFAULT statement_timestamp())"
    )
    had = set(connection.exec_driver_sql(f"SELECT step FROM {prefix}enlist_schema").scalars())
    steps = [step for step in range(1, target + 1) if step not in had]
    for step in steps:
        for statement in _statements_of(step):
            connection.exec_driver_sql(statement.replace("{schema}", prefix))
        connection.exec_driver_sql(f"INSERT INTO {prefix}enlist_schema (step) VALUES ({step})")
    return steps


def current_step(connection: sa.Connection, *, schema: str | None = None) -> int:
    """Return the step that the database is at; 0 when it has no enlist tables."""
    prefix = _prefix(connection, schema)
    name = _undoubled(f"{prefix}enlist_schema")
    if connection.scalar(sa.text("SELECT to_regclass(:name)"), {"name": name}) is None:
        return 0
    step = connection.exec_driver_sql(f"SELECT coalesce(max(step), 0) FROM {prefix}enlist_schema").scalar_one()
    return int(step)


def verify_schema(
    connection: sa.Connection, *, record: type[JobRecordMixin] = JobRecord, rate_limits: bool = False
) -> None:
    """Check that the database has what this release needs; a worker does it at its start.

    :param record: the mapped class of the jobs. For enlist's own table the schema step is checked as well.
    :param rate_limits: whether rate limits are to be kept: then their table is checked, too.
    :raises SchemaError: the table, one of its columns or indexes is missing, or the step is older.
    """
    table = sa.inspect(record).local_table
    assert isinstance(table, sa.Table)
    options = connection.get_execution_options()
    schema = (options.get("schema_translate_map") or {}).get(table.schema, table.schema)
    name = _qualified(connection, schema, table)
    if record is JobRecord or table.name == JobRecord.__tablename__:
        remedy = "run `enlist migrate`, or enlist.migrations.migrate(connection)"
    else:
        remedy = f"the table of {record.__name__} is yours: migrate it with your own Alembic environment"
    if connection.scalar(sa.text("SELECT to_regclass(:name)"), {"name": name}) is None:
        raise SchemaError(f"the database {_database(connection)} has no table {name}: {remedy}")
    rates = _qualified(connection, schema, rate_table_of(table))
    if rate_limits and connection.scalar(sa.text("SELECT to_regclass(:name)"), {"name": rates}) is None:
        raise SchemaError(f"the database {_database(connection)} has no table {rates} for rate limits: {remedy}")
    columns = set(
        connection.execute(
            sa.text(
                "SELECT attname FROM pg_attribute"
                " WHERE attrelid = to_regclass(:name) AND attnum > 0 AND NOT attisdropped"
            ),
            {"name": name},
        ).scalars()
    )
    if missing := [column.name for column in table.columns if column.name not in columns]:
        raise SchemaError(f"table {name} lacks the columns {', '.join(missing)}: {remedy}")
    indexes = set(
        connection.execute(
            sa.text(
                "SELECT relname FROM pg_index JOIN pg_class ON oid = indexrelid"
                " WHERE indrelid = to_regclass(:name) AND indisvalid"
            ),
            {"name": name},
        ).scalars()
    )
    if lacking := sorted(str(index.name) for index in table.indexes if index.name not in indexes):
        raise SchemaError(f"table {name} lacks the indexes {', '.join(lacking)} (or they are invalid): {remedy}")
    if table.name == JobRecord.__tablename__:
        step = current_step(connection, schema=schema)
        # 0: made by create_all(), in a test; the columns and indexes above are what counts then.
        if 0 < step < LATEST_STEP:
            raise SchemaError(f"the database is at schema step {step}, this release needs {LATEST_STEP}: {remedy}")


def _qualified(connection: sa.Connection, schema: str | None, table: sa.Table) -> str:
    preparer = connection.dialect.identifier_preparer
    parts = [] if schema is None else [preparer.quote_schema(schema)]
    return _undoubled(".".join([*parts, preparer.quote(table.name)]))


def _statements_of(step: int) -> tuple[str, ...]:
    statements: tuple[str, ...] = importlib.import_module(f"enlist.migrations.step_{step:03}").STATEMENTS
    return statements


def _prefix(connection: sa.Connection, schema: str | None) -> str:
    """``"schema".``, quoted; empty for the search_path's first."""
    if schema is None:
        return ""
    if connection.scalar(sa.text("SELECT 1 FROM pg_namespace WHERE nspname = :name"), {"name": schema}) is None:
        raise SchemaError(f"the database {_database(connection)} has no schema {schema!r}: create it first")
    return connection.dialect.identifier_preparer.quote_schema(schema) + "."


def _undoubled(name: str) -> str:
    """A quoted name as a parameter's value: in a statement's text the driver has ``%`` doubled."""
    return name.replace("%%", "%")


def _database(connection: sa.Connection) -> str:
    return repr(connection.engine.url.database)
