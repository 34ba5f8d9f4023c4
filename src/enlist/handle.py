"""What ``enqueue`` returns: the job's id, final at once, and what has become of the call."""

from __future__ import annotations

import enum
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import sqlalchemy as sa

__all__ = ["Batch", "Ending", "JobHandle", "JobState", "Write"]


class JobState(enum.StrEnum):
    """What has become of a call of ``enqueue``."""

    STAGED = "staged"
    """In the session's unit of work, not sent yet."""
    INSERTED = "inserted"
    """Its row is in the caller's open transaction."""
    COMMITTED = "committed"
    """The session has committed it. In a session joined into an outer transaction the outer one decides."""
    DUPLICATE = "duplicate"
    """No row was made: another job holds the unique key. Its id is :attr:`JobHandle.existing_id`, and
    :attr:`JobHandle.replaced` says whether it has got this call's payload."""
    DISCARDED = "discarded"
    """Rolled back, with its savepoint or its transaction, or the session was closed."""
    UNKNOWN = "unknown"
    """The row may be there or not: the connection was lost once ``commit()`` had been called, the commit failed on one
    of several connections, or the transaction was ended behind the session's back."""


class Ending(enum.Enum):
    """How the transaction of a connection was ended."""

    COMMIT_SENT = enum.auto()
    ROLLBACK_SENT = enum.auto()
    PAST_US = enum.auto()
    """By SQL, or on the driver's connection: one way or the other."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Write:
    """Jobs of one flush in one table: where they went, and the queues that they went to."""

    connection: sa.Connection
    driver_connection: object
    target: Any
    queues: set[str]
    batch: Batch
    savepoint: sa.NestedTransaction | None
    """The connection's innermost, the session's or not."""
    is_sent: bool = False
    """Whether the server has taken it: before, its transaction may not have begun there."""
    ending: Ending | None = None
    messages: set[str] = field(default_factory=set)
    """What to tell the workers of running jobs that were cancelled."""


@dataclass(eq=False, slots=True)
class Batch:
    """The jobs of one flush. They share their fate, so a savepoint or commit is one step whatever their number."""

    state: JobState = JobState.STAGED
    writes: list[Write] = field(default_factory=list)
    waiting: list[Any] = field(default_factory=list)
    """Staged jobs that are written when the job is done whose handler has enqueued them: it holds their key."""

    refused: list[Any] = field(default_factory=list)
    """Staged jobs that are looked at again before the commit: they were refused for one that may start before."""

    def end(self, state: JobState) -> None:
        """Enter a final state; what handles keep alive from then on is this state alone."""
        self.state = state
        self.writes = []
        for job in (*self.waiting, *self.refused):
            job.release()
        self.waiting, self.refused = [], []


class JobHandle:
    """A job as its producer knows it. Readable at any time, after commit and close too, with no SQL."""

    __slots__ = ("__weakref__", "_batch", "_existing_id", "_number", "_replaced")

    _number: int  # the id as an integer
    _batch: Batch

    def __init__(self) -> None:
        self._existing_id: uuid.UUID | None = None
        self._replaced = False

    @property
    def id(self) -> uuid.UUID:
        """The job's id (UUIDv7), final at once. With ``DUPLICATE`` there is no such row."""
        return uuid.UUID(int=self._number)  # made when asked for: of 100,000 jobs few are

    @property
    def state(self) -> JobState:
        """What has become of the call, true at the moment it is read."""
        state = self._batch.state
        if self._existing_id is not None and state in {JobState.INSERTED, JobState.COMMITTED}:
            return JobState.DUPLICATE
        return state

    @property
    def inserted(self) -> bool | None:
        """Whether this call made a row that is (still) there: None until flushed, and when it is unknown."""
        state = self._batch.state
        if state in {JobState.STAGED, JobState.UNKNOWN}:
            return None
        return state is not JobState.DISCARDED and self._existing_id is None

    @property
    def replaced(self) -> bool | None:
        """Whether payload and run_at of this call went to the queued job :attr:`existing_id` (and are there still).

        By ``on_conflict="replace"``. None until flushed, and when it is unknown.
        """
        state = self._batch.state
        if state in {JobState.STAGED, JobState.UNKNOWN}:
            return None
        return state is not JobState.DISCARDED and self._replaced

    @property
    def existing_id(self) -> uuid.UUID | None:
        """The id of the job that held the unique key at the flush; None if the key was free, or before the flush."""
        return self._existing_id

    def __copy__(self) -> JobHandle:
        return self  # what becomes of the call is told to this object

    def __deepcopy__(self, memo: object) -> JobHandle:
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a JobHandle tells what becomes of a call in this process: send handle.id elsewhere")

    def __repr__(self) -> str:
        return f"<JobHandle {self.id} {self.state}>"
