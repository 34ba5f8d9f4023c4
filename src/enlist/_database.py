"""The worker's own way to the database: its statements and an engine apart from the handlers'."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from enlist._statements import Statements, statements_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from enlist.models import JobRecordMixin

__all__ = ["Database"]


class Database:
    """Runs the worker's statements, each in a transaction of its own, READ COMMITTED whatever the server's default."""

    def __init__(self, engine: sa.Engine, record: type[JobRecordMixin]) -> None:
        self.engine = engine
        self.record = record
        table = sa.inspect(record).local_table
        assert isinstance(table, sa.Table)
        self.statements: Statements = statements_for(table)
        self._explicit = engine.execution_options(isolation_level="READ COMMITTED")
        # One round trip a statement; a transaction of its own is begun only where the server would otherwise run
        # it at another level: SKIP LOCKED raises serialization errors above READ COMMITTED.
        self._single = engine

    def open(self) -> None:
        """Connect, and look which isolation level a single statement gets."""
        with self.engine.connect() as connection:
            level = connection.exec_driver_sql("SHOW default_transaction_isolation").scalar_one()
        self._single = self.engine if level == "read committed" else self._explicit

    def execute(self, statement: sa.Executable, parameters: Mapping[str, Any]) -> Sequence[sa.Row[Any]]:
        """Run one statement in a transaction of its own and return its rows."""
        with self._single.begin() as connection:
            return connection.execute(statement, parameters).all()

    def transaction(self) -> Any:
        """A context manager with a connection in an explicit transaction."""
        return self._explicit.begin()

    def close(self) -> None:
        self.engine.dispose()
