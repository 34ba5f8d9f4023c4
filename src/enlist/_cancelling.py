"""Cancelling jobs, those that run too: what is locked is not waited for, and the workers are told.

A running job's row may be locked for as long as its handler works: with ``hold_lock=True``, or where the session's
snapshot is its transaction's. So such a row is tried a few times, and then nothing is written: its worker is *asked*.
It hears of it when the caller has committed, as the workers of all other running jobs do that were cancelled; it gives
the attempt up, and writes the job's end under its fence.
"""

from __future__ import annotations

import re
import uuid
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY

from enlist._statements import PLAIN
from enlist.exceptions import InvalidOption
from enlist.models import JobStatus

if TYPE_CHECKING:
    from collections.abc import Mapping

    from enlist._statements import Statements

__all__ = ["attempts_of", "cancel_by_conditions", "cancel_by_ids", "messages_of", "refuse_own"]

PAUSES: Final = (0.01, 0.02, 0.04, 0.08, None)
"""Seconds between the tries at rows that somebody has locked: a claim, a renewal or a COMMIT is over by then."""

ATTEMPTS_OF_A_MESSAGE: Final = 100
"""At most 57 bytes each, of the 8,000 that a notification may have."""

_LIVE: Final = frozenset({JobStatus.QUEUED, JobStatus.RUNNING})

_ATTEMPT: Final = re.compile(r"([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}):([0-9]{1,19})")


# -- what workers are told ---------------------------------------------------------------------------------------------


def messages_of(attempts: Mapping[uuid.UUID, int]) -> list[str]:
    """The notifications that tell of attempts, by their jobs' ids and lease tokens.

    With the token, for a job that is retried at once may be in its next attempt when the worker hears of it.
    """
    words = [f"{job_id}:{token}" for job_id, token in attempts.items()]
    starts = range(0, len(words), ATTEMPTS_OF_A_MESSAGE)
    return [" ".join(words[start : start + ATTEMPTS_OF_A_MESSAGE]) for start in starts]


def attempts_of(message: str) -> list[tuple[uuid.UUID, int]]:
    """The attempts that a notification tells of, (id, token). Anybody can send one: what cannot be read is nobody's."""
    found = (_ATTEMPT.fullmatch(word) for word in message.split(" "))
    return [(uuid.UUID(match[1]), int(match[2])) for match in found if match is not None]


# -- the command -------------------------------------------------------------------------------------------------------


def cancel_by_ids(
    connection: sa.Connection, statements: Statements, ids: list[uuid.UUID], own: uuid.UUID | None
) -> tuple[list[Any], dict[uuid.UUID, int]]:
    """Cancel jobs; return the rows of :meth:`Statements._cancel`, and the attempts that hold their jobs' rows locked.

    :param own: the job whose handler this is.
    """
    refuse_own(own, ids)
    rows: list[Any] = []
    left = ids
    command = statements.cancel
    for pause in PAUSES:
        found = connection.execute(command.run, {"ids": left}, execution_options=PLAIN).all()
        rows += found
        command = statements.cancel_again
        known = {row.id for row in found}
        unknown = [job_id for job_id in left if job_id not in known]
        if not unknown:
            return rows, {}
        states = connection.execute(statements.states, {"ids": unknown}, execution_options=PLAIN).all()
        left = [row.id for row in states]  # the others do not exist
        if not left:
            return rows, {}
        _pause(connection, statements, pause)
    # Not waited for even if it has ended by now: with locks on other jobs that might be a deadlock.
    ended = [row for row in states if row.status not in _LIVE]
    rows += [
        SimpleNamespace(id=row.id, verdict="unchanged", status=row.status, token=None, woken=None) for row in ended
    ]
    return rows, {row.id: row.lease_token for row in states if row.status in _LIVE}


def cancel_by_conditions(
    connection: sa.Connection,
    statements: Statements,
    conditions: list[Any],
    limit: int | None,
    own: uuid.UUID | None,
) -> tuple[list[Any], dict[uuid.UUID, int]]:
    """The same for the jobs that meet conditions. A limit counts those that are locked last."""
    rows: list[Any] = []
    held: dict[uuid.UUID, int] = {}
    for pause in PAUSES:
        # The first look is at the whole table, and it alone may wait.
        which = [*conditions, _among(statements, held)] if held else conditions
        unheld = statements.unheld(which, _room(limit, rows), waits=not held)
        found = connection.execute(unheld, execution_options=PLAIN)
        if ids := list(found.scalars()):
            refuse_own(own, ids)
            rows += connection.execute(statements.cancel_waiting.run, {"ids": ids}, execution_options=PLAIN).all()
        room = _room(limit, rows)
        if room == 0:
            return rows, {}
        locked = connection.execute(statements.running(which, room), execution_options=PLAIN)
        held = {row.id: row.lease_token for row in locked}
        if not held:
            break
        _pause(connection, statements, pause)
    return rows, held


def _room(limit: int | None, rows: list[Any]) -> int | None:
    return None if limit is None else limit - len(rows)


def _among(statements: Statements, ids: Mapping[uuid.UUID, int]) -> sa.ColumnElement[bool]:
    array = sa.literal(list(ids), ARRAY(sa.Uuid))
    return statements.table.c.id == sa.any_(array)


def _pause(connection: sa.Connection, statements: Statements, seconds: float | None) -> None:
    """Wait; on the server, for an AsyncSession's event loop must not."""
    if seconds is not None:
        connection.execute(statements.pause, {"seconds": seconds}, execution_options=PLAIN)


def refuse_own(own: uuid.UUID | None, ids: list[uuid.UUID]) -> None:
    """Refuse the job whose handler this is.

    :raises InvalidOption: it is among the ids.
    """
    if own is not None and own in ids:
        raise InvalidOption(
            f"job {own} is the one whose handler this is: its transaction cannot both cancel it and set it done; raise"
            " enlist.Cancel(reason) to end it, or leave it out of the jobs to cancel"
        )
