"""What sessions must have written and what handles must say: a plain model of transactions, savepoints and keys.

Nothing here knows how enlist works. A transaction is a stack of frames, one for each open savepoint; a frame has what
was staged and written in it, and hands it to the frame below or forgets it.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import NamedTuple

from enlist import JobState

LATE_PAYLOAD = "late payload"
ANY_ERROR = ""
INTEGRITY, LOCK_TIMEOUT, ABORTED = "23", "55P03", "25P02"  # how the SQLSTATEs begin


class Key(NamedTuple):
    """What is unique: a key of a kind in a table."""

    table: str
    kind: str
    name: str


class Job(NamedTuple):
    """A job's row, as far as the model foretells it."""

    table: str
    kind: str
    key: str | None
    number: int
    order: str | None  # the ref of the order whose id is in the payload
    label: str | None = None
    status: str = "queued"
    held: bool = False


@dataclass(eq=False)
class ModelOrder:
    """A domain row; or a job that was added to the session as an object, which is refused."""

    ref: str | None
    is_job: bool = False
    flushed: bool = False


@dataclass(eq=False)
class Call:
    """One call of ``enqueue``, and what its handle has to say."""

    id: uuid.UUID
    table: str
    kind: str
    key: str | None
    number: int | None  # None: its late payload raises
    order: ModelOrder | None = None
    label: str | None = None
    replaces: bool = False
    sends_sql: bool = False  # its late payload does
    state: JobState = JobState.STAGED
    existing: set[uuid.UUID | None] = field(default_factory=lambda: {None})  # more than one: it may be any
    has_replaced: bool = False

    @property
    def inserted(self) -> bool | None:
        return None if self.state == "staged" else self.state in {"inserted", "committed"}

    @property
    def replaced(self) -> bool | None:
        return None if self.state == "staged" else self.has_replaced and self.state == "duplicate"

    @property
    def unique(self) -> Key | None:
        return None if self.key is None else Key(self.table, self.kind, self.key)

    def row(self) -> Job:
        """The row as it is written now."""
        assert self.number is not None
        order = self.order.ref if self.order is not None and self.order.flushed else None
        return Job(self.table, self.kind, self.key, self.number, order, self.label, held=self.key is not None)


class FailsError(Exception):
    """The step must fail: in a late payload, or in the database with a SQLSTATE that begins with ``how``."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how


@dataclass(eq=False)
class Frame:
    """What belongs to one savepoint, or to the transaction outside of all savepoints."""

    calls: list[Call] = field(default_factory=list)
    jobs: dict[uuid.UUID, Job] = field(default_factory=dict)
    orders: list[ModelOrder] = field(default_factory=list)
    pending: list[ModelOrder] = field(default_factory=list)

    @property
    def staged(self) -> list[Call]:
        return [call for call in self.calls if call.state == "staged"]

    def discard(self) -> None:
        for call in self.calls:
            call.state = JobState.DISCARDED
        for found in (self.calls, self.jobs, self.orders, self.pending):
            found.clear()

    def expunge_jobs(self) -> None:
        self.pending = [order for order in self.pending if not order.is_job]

    def hand_to(self, below: Frame) -> None:
        below.calls += self.calls
        below.jobs |= self.jobs
        below.orders += self.orders


class Database:
    """What is committed, and the transactions that are open."""

    def __init__(self) -> None:
        self.jobs: dict[uuid.UUID, Job] = {}
        self.refs: set[str | None] = set()
        self.units: list[UnitOfWork] = []


class UnitOfWork:
    """A session's transaction. Each step raises :class:`FailsError` where the session must fail."""

    def __init__(self, database: Database) -> None:
        self._database = database
        database.units.append(self)
        self.frames = [Frame()]
        self.failed = False  # a flush has failed: nothing but a rollback helps
        self.aborted = False  # an SQL error was swallowed: PostgreSQL refuses all but a rollback
        self.has_enqueued = False

    # -- what is visible -----------------------------------------------------------------------------------------

    @property
    def innermost(self) -> Frame:
        return self.frames[-1]

    @property
    def calls(self) -> list[Call]:
        return [call for frame in self.frames for call in frame.calls]

    @property
    def orders(self) -> list[ModelOrder]:
        """The orders that have come in this transaction."""
        return [order for frame in self.frames for order in frame.orders + frame.pending]

    @property
    def jobs(self) -> dict[uuid.UUID, Job]:
        """The jobs that were written, or changed, in this transaction."""
        return {job_id: job for frame in self.frames for job_id, job in frame.jobs.items()}

    def visible(self) -> dict[uuid.UUID, Job]:
        return self._database.jobs | self.jobs

    def holders(self) -> dict[Key, uuid.UUID]:
        return _held(self.visible())

    def contended(self) -> set[Key]:
        """The keys that other transactions have, for which this one would wait."""
        return {key for unit in self._database.units if unit is not self for key in _held(unit.jobs)}

    # -- steps ---------------------------------------------------------------------------------------------------

    def add(self, order: ModelOrder) -> None:
        self.innermost.pending.append(order)

    def enqueue(self, call: Call) -> None:
        self.innermost.calls.append(call)
        self.has_enqueued = True

    def expunge_all(self) -> None:
        """Domain rows not written yet are lost with the session's objects; accepted jobs are not."""
        self.innermost.pending.clear()

    def flush(self) -> None:
        frame = self.innermost
        try:
            self._write_orders(frame)
            self._write_jobs(frame)
        except FailsError:
            frame.discard()
            self.failed = True
            raise

    def _write_orders(self, frame: Frame) -> None:
        pending, frame.pending = frame.pending, []
        if any(order.is_job for order in pending):
            raise FailsError(ANY_ERROR)  # which comes first is SQLAlchemy's choice
        if pending and self.aborted:
            raise FailsError(ABORTED)
        for order in pending:
            taken = self._database.refs.union(order.ref for order in self.orders)
            if order.ref is None or order.ref in taken:
                raise FailsError(INTEGRITY)
            order.flushed = True
            frame.orders.append(order)

    def _write_jobs(self, frame: Frame) -> None:
        staged = frame.staged
        for call in staged:
            if call.number is None:
                raise FailsError(LATE_PAYLOAD)
            if call.sends_sql and self.aborted:
                raise FailsError(ABORTED)
        if staged and self.aborted:
            raise FailsError(ABORTED)
        contended = self.contended()
        for call in staged:
            self._write_job(frame, call)
        if any(call.unique in contended for call in staged):
            for call in staged:
                call.existing.add(None)
            raise FailsError(LOCK_TIMEOUT)
        for call in staged:
            call.state = JobState.INSERTED if None in call.existing else JobState.DUPLICATE

    def _write_job(self, frame: Frame, call: Call) -> None:
        row = call.row()
        holder = None if call.unique is None else self.holders().get(call.unique)
        if holder is not None:
            job = self.visible()[holder]
            if call.replaces and job.status == "queued":
                frame.jobs[holder] = job._replace(number=row.number, order=row.order)
                call.has_replaced = True
            elif call.replaces:
                frame.jobs[holder] = job._replace(held=False)
                holder = None
        if holder is None:
            frame.jobs[call.id] = row
        call.existing = {holder}

    def begin_nested(self) -> None:
        self.flush()
        self.frames.append(Frame())

    def release(self, depth: int) -> None:
        self.flush()
        while len(self.frames) > depth:
            self.frames.pop().hand_to(self.innermost)

    def rollback_to(self, depth: int) -> None:
        while len(self.frames) > depth:
            self.frames.pop().discard()
        self.failed = self.aborted = False

    def abort(self) -> None:
        """An SQL error, swallowed. What was written since the savepoint is lost, though nobody was told."""
        self.aborted = True

    def commit(self) -> None:
        self.release(1)
        (frame,) = self.frames
        for call in frame.calls:
            if call.state == "inserted":
                call.state = JobState.COMMITTED
        self._database.jobs |= frame.jobs
        self._database.refs |= {order.ref for order in frame.orders}
        self._begin()

    def rollback(self) -> None:
        self.rollback_to(0)
        self._begin()

    def _begin(self) -> None:
        self.frames = [Frame()]
        self.has_enqueued = False


def _held(jobs: dict[uuid.UUID, Job]) -> dict[Key, uuid.UUID]:
    return {
        Key(job.table, job.kind, job.key): job_id for job_id, job in jobs.items() if job.held and job.key is not None
    }
