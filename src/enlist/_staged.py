"""What a job is between ``enqueue`` and its row."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import sqlalchemy as sa

from enlist._statements import Statements, statements_for
from enlist.models import JobRecordMixin

if TYPE_CHECKING:
    from sqlalchemy.orm import Mapper

    from enlist.handle import JobHandle

__all__ = ["Content", "LatePayload", "Notify", "StagedJob", "Target", "UniqueKey", "Values"]

Notify: TypeAlias = Literal["after_commit", "transaction"] | None


@dataclass(frozen=True, eq=False, slots=True)
class Target:
    """Where the jobs of a repository go."""

    mapper: Mapper[Any]
    statements: Statements
    notify: Notify
    columns: Mapping[str, sa.Column[Any]]
    """The application's own columns of the table, by the names of their attributes."""
    required: frozenset[str]
    """Those that have no default and cannot be NULL."""
    has_defaults: bool
    """Whether some have a default that is made in Python, row by row."""

    @classmethod
    def of(cls, mapper: Mapper[Any], notify: Notify) -> Target:
        """Describe a mapped job class."""
        table = mapper.local_table
        assert isinstance(table, sa.Table)
        columns = {
            attribute.key: column
            for attribute in mapper.column_attrs
            for column in attribute.columns
            if isinstance(column, sa.Column) and column.table is table and attribute.key not in _OWN
        }
        required = frozenset(
            name
            for name, column in columns.items()
            if not (column.nullable or column.default or column.server_default or column.identity or column.computed)
        )
        has_defaults = any(column.default is not None for column in columns.values())
        return cls(mapper, statements_for(table), notify, columns, required, has_defaults)


_OWN = frozenset(JobRecordMixin.__annotations__)


@dataclass(eq=False, slots=True)
class Content:
    """What a payload says of its job; the call's own options have been put in already."""

    kind: str
    queue: str
    priority: int
    max_attempts: int
    payload: str


@dataclass(frozen=True, eq=False, slots=True)
class LatePayload:
    """A payload that is made at the flush, when the domain rows have their keys."""

    make: Callable[[], Content]
    source: str
    """File and line of the call of ``enqueue``."""


@dataclass(frozen=True, eq=False, slots=True)
class UniqueKey:
    """A unique key, and what becomes of it."""

    key: str
    until: str
    hold: dt.timedelta | None
    """How long it is held at least, from the server's clock at the flush."""
    replace: bool
    """Whether payload and run_at go to a queued job that holds the key."""


@dataclass(frozen=True, eq=False, slots=True)
class Values:
    """Values for the application's own columns; those of functions are made at the flush."""

    given: Mapping[str, Any]
    source: str


@dataclass(eq=False, slots=True)
class StagedJob:
    """A job on its way into the table."""

    id: uuid.UUID
    target: Target
    content: Content | LatePayload
    unique: UniqueKey | None
    concurrency_key: str | None
    concurrency_limit: int | None
    run_at: dt.datetime | None
    delay: dt.timedelta | None
    meta: str
    values: Values | None
    handle: JobHandle
