"""``flush="group"``: what the jobs of a group add to their session is inserted together.

A flush for each job is most of what a small job costs: two hundred objects are inserted at the price of ten flushes. So
what a handler has added, if it is nothing but new objects, waits while the next handlers run: outside of the session,
which each handler is to find empty. It is inserted at the group's end, or before a later handler's flush or statement.
"""

from __future__ import annotations

import datetime as dt
import uuid
from decimal import Decimal
from enum import Enum
from typing import TYPE_CHECKING, Final

import sqlalchemy as sa
from sqlalchemy.orm import Session

from enlist.exceptions import TransactionAborted
from enlist.models import JobRecordMixin

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Deferred"]

MOST_OBJECTS: Final = 1000
"""So many wait at most: they take memory, and more of them make the INSERT no cheaper."""


UNCHANGING: Final = frozenset(
    {type(None), bool, int, float, Decimal, str, bytes, uuid.UUID, dt.datetime, dt.date, dt.time, dt.timedelta}
)


class Deferred:
    """The objects of a group's session that wait to be inserted."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._objects: list[object] = []
        self._values: list[Sequence[object]] = []

    def take(self) -> bool:
        """Take what is pending out of the session; return False if it is to be flushed instead."""
        session = self._session
        new = list(session.new)
        if len(session.identity_map) or _has_jobs(session) or len(self._objects) + len(new) > MOST_OBJECTS:
            return False
        values = list(map(_values, new))
        if not all(map(_is_plain, new, values)):
            return False
        self._objects += new
        self._values += values
        session.expunge_all()
        return True

    def insert(self) -> None:
        """Insert them now, but not what the running handler has added: it may not be complete.

        :raises TransactionAborted: the one cannot be done without the other.
        """
        session = self._session
        if len(session.identity_map):  # what is changed there, and may refer to what is added, would be flushed
            raise TransactionAborted("a job of the group has brought objects from another session")
        if _has_jobs(session):  # they may refer to the others
            session.flush()
            return
        own = list(session.new)
        session.expunge_all()
        session.flush()
        session.expunge_all()  # what listeners have added, too
        session.add_all(own)
        if len(session.new) != len(own):
            raise TransactionAborted("a job of the group has taken out of its session what belongs to what is in it")

    def come_back(self) -> None:
        """Make them pending again; they are inserted before what the session has pending now.

        :raises TransactionAborted: a handler has kept one, and a later job has changed it or put it to use.
        """
        session = self._session
        own = list(session.new)
        session.add_all(self._objects)
        are_apart = len(session.new) == len(self._objects) + len(own)
        if not are_apart or not all(map(_is_as_it_was, self._objects, self._values)):
            raise TransactionAborted("an object that a job of the group has added was used by a later one as well")
        for place, each in enumerate((*self._objects, *own)):
            sa.inspect(each, raiseerr=True).insert_order = place  # what the unit of work sorts a class's rows by

    def leave(self) -> None:
        """Let the session go on without them, now that they are inserted.

        :raises TransactionAborted: they are not, since the application's ``flush()`` did something else.
        """
        for each in self._objects:
            if sa.inspect(each, raiseerr=True).key is None:
                raise TransactionAborted("flush() of the session has not inserted what jobs of the group have added")
            if each in self._session:  # else a listener has taken it out
                self._session.expunge(each)


def _has_jobs(session: Session) -> bool:
    """Whether jobs are to be written with the next flush: an object of their class stands for them."""
    return any(isinstance(each, JobRecordMixin) for each in session.new)


def _values(each: object) -> Sequence[object]:
    """What the columns of an object's row are to have."""
    state = sa.inspect(each, raiseerr=True)
    return [state.dict.get(attribute.key) for attribute in state.mapper.column_attrs]


def _is_plain(each: object, values: Sequence[object]) -> bool:
    """Whether an object is complete by itself: it refers to no others, and no value can change, as a dict can."""
    return all(type(value) in UNCHANGING or isinstance(value, Enum) for value in values) and not _refers(each)


def _refers(each: object) -> bool:
    state = sa.inspect(each, raiseerr=True)
    return any(state.dict.get(relationship.key) for relationship in state.mapper.relationships)


def _is_as_it_was(each: object, values: Sequence[object]) -> bool:
    return all(now is before for now, before in zip(_values(each), values, strict=True)) and not _refers(each)
