"""What the jobs of a group have added to their session is inserted together: at the end, or before anybody could look.

A flush for each job is most of what a small job costs: two hundred objects are inserted at the price of ten flushes. So
what a handler has added, if it is nothing but new rows, waits while the next handlers run. It waits outside of the
session, which each handler is to find empty, and comes back with its next flush or before its next statement.

A flush asks the application's code for values: listeners, defaults and types, which may look at what the handler has
left in a variable. Where there is such code, or a value that may change meanwhile, each job has a flush of its own.
"""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import uuid
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, cast

import sqlalchemy as sa
from sqlalchemy.orm import Mapper, Session

from enlist._direct import DIALECT

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Deferred", "are_plain_rows", "has_flush_of_its_own"]

MOST_OBJECTS: Final = 1000
"""So many wait at most: they take memory, and more of them make the INSERT no cheaper."""

HEARD: Final = (
    "before_flush",
    "after_flush",
    "after_flush_postexec",
    "pending_to_persistent",
    "persistent_to_detached",
    # These hear twice of an object that leaves its session and comes back.
    "before_attach",
    "after_attach",
    "transient_to_pending",
    "pending_to_transient",
)

OVERRIDDEN: Final = ("add", "add_all", "expunge", "expunge_all", "flush")

PYTHONS_OWN: Final = frozenset({"builtins", "datetime", "secrets", "time", "uuid"})
"""Modules whose functions, as defaults of a column, depend on no variable."""

UNCHANGING: Final = frozenset(
    {type(None), bool, int, float, decimal.Decimal, str, bytes, uuid.UUID, dt.datetime, dt.date, dt.time, dt.timedelta}
)


class Deferred:
    """The objects of a group's session that wait to be inserted."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._objects: list[object] = []

    @property
    def is_full(self) -> bool:
        """Whether no more are to wait."""
        return len(self._objects) >= MOST_OBJECTS

    def take(self) -> None:
        """Take what is pending out of the session."""
        self._objects += self.session.new
        self.session.expunge_all()

    def come_back(self) -> None:
        """Make them pending again; they are inserted before what the session has pending now."""
        later = list(self.session.new)
        self.session.add_all(self._objects)
        for place, each in enumerate((*self._objects, *later)):
            sa.inspect(each, raiseerr=True).insert_order = place  # what the unit of work sorts a class's rows by

    def leave(self) -> None:
        """Let the session go on without them, now that they are inserted."""
        for each in self._objects:
            if each in self.session:  # else one that it belongs to has taken it along
                self.session.expunge(each)


def has_flush_of_its_own(session: Session) -> bool:
    """Whether the application has a say in the session's flushes, by its class or by listeners."""
    return any(_overrides(kind) for kind in type(session).__mro__) or any(
        not (getattr(listener, "__module__", None) or "").startswith("enlist.")
        for name in HEARD
        for listener in getattr(cast("Any", session).dispatch, name)
    )


def _overrides(kind: type[Any]) -> bool:
    return kind.__module__ not in {"sqlalchemy.orm.session", "enlist._session"} and not vars(kind).keys().isdisjoint(
        OVERRIDDEN
    )


def are_plain_rows(session: Session) -> bool:
    """Whether the session has new rows to flush and nothing else, and their values will be the same later."""
    if len(session.identity_map) or session.deleted:
        return False
    new = session.new
    return 0 < len(new) <= MOST_OBJECTS and all(_is_plain_row(each) for each in new)


def _is_plain_row(each: object) -> bool:
    state = sa.inspect(each, raiseerr=True)
    heard = cast("Any", state.mapper).dispatch  # not remembered: a listener may come at any time
    if heard.before_insert or heard.after_insert:
        return False
    keys = _plain_keys(state.mapper)
    return keys is not None and all(_is_unchanging(state.dict.get(key)) for key in keys)


def _is_unchanging(value: object) -> bool:
    return type(value) in UNCHANGING or isinstance(value, enum.Enum)


@lru_cache(maxsize=200)
def _plain_keys(mapper: Mapper[Any]) -> Sequence[str] | None:
    """The attributes for the columns of a class, if none of the application's code makes values for them."""
    if mapper.version_id_col is not None:
        return None
    for table in mapper.tables:
        for column in table.columns:
            if _is_applications(column.type) or _is_made_by_application(column.default):
                return None
    return [attribute.key for attribute in mapper.column_attrs]


def _is_applications(type_: sa.types.TypeEngine[Any]) -> bool:
    return not type(type_.dialect_impl(DIALECT)).__module__.startswith("sqlalchemy.")


def _is_made_by_application(default: Any) -> bool:
    """Whether a column's default is a function other than Python's own."""
    if default is None or not default.is_callable:
        return False
    function = getattr(default.arg, "__wrapped__", default.arg)
    module = getattr(function, "__module__", None) or getattr(getattr(function, "__self__", None), "__module__", None)
    return module not in PYTHONS_OWN
