"""For applications' tests: run the jobs that are due inside of the test's session, and see what is enqueued.

No worker, no thread, no commit: everything happens in the session's own transaction, and is gone with its rollback.
"""

from __future__ import annotations

import uuid
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar, overload

from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from enlist._enqueued import Wanted
from enlist._inline import DrainLimitExceeded, Inline
from enlist._options import MAX_INTEGER, check_integer, check_name, shown
from enlist.exceptions import ConfigurationError, InvalidOption, SessionError
from enlist.handlers import HandlerRegistry
from enlist.models import JobRecord, JobRecordMixin, JobStatus
from enlist.payload import JobPayload
from enlist.repository import JobRepository
from enlist.retry import summarize

if TYPE_CHECKING:
    from enlist._completer import Settlement
    from enlist._slots import Run

__all__ = ["Attempt", "DrainLimitExceeded", "Drained", "assert_enqueued", "drain", "refute_enqueued"]

RecordT = TypeVar("RecordT", bound=JobRecordMixin)

SyncCaller: TypeAlias = Session | scoped_session[Any]
AsyncCaller: TypeAlias = AsyncSession | async_scoped_session[Any]

_ANYHOW: Final[Mapping[str, Any]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, repr=False)
class Attempt:
    """One run of a handler by :func:`drain`."""

    id: uuid.UUID
    """The job's id."""
    kind: str
    number: int
    """Which attempt at this job it was, from 1."""
    outcome: Literal["done", "failed", "cancelled", "snoozed"]
    status: JobStatus
    """What the job became: a failed one is queued for its retry, or dead."""
    error: BaseException | None
    """What the handler raised, with its traceback; also a Snooze, Cancel or Retry."""

    def __repr__(self) -> str:
        status = "" if self.status == self.outcome else f", {self.status}"
        error = "" if self.error is None else f": {summarize(self.error)}"
        return f"<{self.kind} {self.id}, attempt {self.number} {self.outcome}{status}{error}>"


@dataclass(frozen=True, slots=True, repr=False)
class Drained:
    """What :func:`drain` has run; its length is the number of runs."""

    runs: tuple[Attempt, ...]
    """All, in the order in which they ran."""

    @property
    def done(self) -> list[Attempt]:
        """Those whose handler returned, and whose effects are in the session's transaction."""
        return self._of("done")

    @property
    def failed(self) -> list[Attempt]:
        """Those that raised, ran too long or did what a handler must not: to be retried, or dead."""
        return self._of("failed")

    @property
    def cancelled(self) -> list[Attempt]:
        """Those that raised :class:`~enlist.Cancel`."""
        return self._of("cancelled")

    @property
    def snoozed(self) -> list[Attempt]:
        """Those that raised :class:`~enlist.Snooze`."""
        return self._of("snoozed")

    def _of(self, outcome: str) -> list[Attempt]:
        return [run for run in self.runs if run.outcome == outcome]

    def __len__(self) -> int:
        return len(self.runs)

    def __repr__(self) -> str:
        counts = {outcome: len(self._of(outcome)) for outcome in ("done", "failed", "cancelled", "snoozed")}
        text = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count) or "nothing was due"
        return f"<Drained {text}{''.join(f' {run}' for run in self.failed)}>"


@overload
def drain(
    session: SyncCaller,
    handlers: HandlerRegistry,
    *,
    queues: Iterable[str] | None = None,
    with_scheduled: bool = False,
    raise_errors: bool = False,
    limit: int = 1000,
    resources: Any = None,
    record: type[JobRecordMixin] = JobRecord,
) -> Drained: ...
@overload
def drain(
    session: AsyncCaller,
    handlers: HandlerRegistry,
    *,
    queues: Iterable[str] | None = None,
    with_scheduled: bool = False,
    raise_errors: bool = False,
    limit: int = 1000,
    resources: Any = None,
    record: type[JobRecordMixin] = JobRecord,
) -> Coroutine[Any, Any, Drained]: ...
def drain(
    session: SyncCaller | AsyncCaller,
    handlers: HandlerRegistry,
    *,
    queues: Iterable[str] | None = None,
    with_scheduled: bool = False,
    raise_errors: bool = False,
    limit: int = 1000,
    resources: Any = None,
    record: type[JobRecordMixin] = JobRecord,
) -> Drained | Coroutine[Any, Any, Drained]:
    """Run every job that is due, those that handlers enqueue included, in the session's own transaction.

    With an AsyncSession or async_scoped_session: ``await drain(session, handlers)``.

    The session is flushed first, so staged jobs are seen. Then one job after the other is claimed, run and finished as
    by a worker: its handler gets a fresh guarded session of the same class, joined to the session's connection in a
    savepoint, so that its effects and its status are there together or not at all. Nothing is committed. In the end
    the session's objects are expired, so that they show what handlers did (those of an AsyncSession are read again
    at once: they could not be, when they are next looked at).

    A job that fails is queued for its retry, as in production, which is later than now: it is not run again, unless
    ``with_scheduled``. A kind without a handler stays queued. A plain handler cannot be interrupted: one that has run
    longer than its ``timeout`` is failed when it returns.

    :param session: a Session or scoped_session, for plain handlers only; with an AsyncSession or async_scoped_session
        async ones run on the event loop of the test, and plain ones as well.
    :param queues: run jobs of these alone; default all queues.
    :param with_scheduled: run what is due later too, retries included, in the order of time, as if time had passed;
        their ``run_at`` becomes now. A job that always fails ends at its ``max_attempts``.
    :param raise_errors: raise the first exception of a handler, once the failure is written, instead of going on.
        Snooze, Cancel and Retry are no errors.
    :param limit: the most runs, at least 1.
    :param resources: what handlers see as ``job.resources``.
    :param record: the mapped class of the jobs, as for :class:`~enlist.JobRepository`.
    :raises ConfigurationError: an async handler's job is due, and this is no AsyncSession; nothing of it has run, and
        it is still queued. Likewise if ``handlers`` is no registry, or ``record`` no mapped job class.
    :raises DrainLimitExceeded: ``limit`` jobs have run and more are due.
    :raises InvalidOption: ``queues`` or ``limit`` is not what it may be.
    :raises SessionError: the session is none, is in AUTOCOMMIT mode, or a handler has ended the transaction on the
        connection itself, where no savepoint can protect it.
    """
    if not isinstance(handlers, HandlerRegistry):
        raise ConfigurationError(f"handlers must be a HandlerRegistry, not {shown(handlers)}")
    if queues is not None:
        if isinstance(queues, str):
            raise InvalidOption(f"queues must be a list of names, not the name {queues!r}")
        queues = [check_name("queue", queue) for queue in queues]
    sync, asynchronous = _resolve(session)
    inline = Inline(
        sync,
        handlers,
        _checked(record),
        asynchronous=asynchronous,
        registry=session.registry if isinstance(session, (scoped_session, async_scoped_session)) else None,
        queues=queues,
        with_scheduled=with_scheduled,
        raise_errors=raise_errors,
        limit=check_integer("limit", limit, 1, MAX_INTEGER),
        resources=resources,
    )
    if asynchronous is not None:
        return _drain_async(inline)
    inline.run()
    return _drained(inline)


async def _drain_async(inline: Inline) -> Drained:
    await inline.run_async()
    return _drained(inline)


def _drained(inline: Inline) -> Drained:
    return Drained(tuple(_attempt(*ending) for ending in inline.endings))


def _attempt(run: Run, settlement: Settlement | None, error: BaseException | None) -> Attempt:
    if settlement is None:
        return Attempt(run.id, run.kind, run.attempt, "done", JobStatus.DONE, error)
    outcome: Literal["failed", "cancelled", "snoozed"] = "failed"
    if settlement.status is JobStatus.CANCELLED:
        outcome = "cancelled"
    elif settlement.returned:
        outcome = "snoozed"
    return Attempt(run.id, run.kind, run.attempt, outcome, settlement.status, error)


# -- what is enqueued ----------------------------------------------------------------------------------------------


@overload
def assert_enqueued(
    session: SyncCaller, payload: type[JobPayload] | str, where: Mapping[str, Any] = ..., /, **fields: Any
) -> list[JobRecord]: ...
@overload
def assert_enqueued(
    session: SyncCaller,
    payload: type[JobPayload] | str,
    where: Mapping[str, Any],
    record: type[RecordT],
    /,
    **fields: Any,
) -> list[RecordT]: ...
@overload
def assert_enqueued(
    session: AsyncCaller, payload: type[JobPayload] | str, where: Mapping[str, Any] = ..., /, **fields: Any
) -> Coroutine[Any, Any, list[JobRecord]]: ...
@overload
def assert_enqueued(
    session: AsyncCaller,
    payload: type[JobPayload] | str,
    where: Mapping[str, Any],
    record: type[RecordT],
    /,
    **fields: Any,
) -> Coroutine[Any, Any, list[RecordT]]: ...
def assert_enqueued(
    session: SyncCaller | AsyncCaller,
    payload: type[JobPayload] | str,
    where: Mapping[str, Any] = _ANYHOW,
    record: type[Any] = JobRecord,
    /,
    **fields: Any,
) -> list[Any] | Coroutine[Any, Any, list[Any]]:
    """Fail unless a job of this kind, with these fields, is queued in the session's view; return all such jobs.

    ::

        [job] = assert_enqueued(session, SendReceipt, order_id=7)  # exactly one
        assert_enqueued(session, SendReceipt, {"queue": "mail", "priority": 5}, order_id=7)

    The session is flushed first, so staged jobs are seen. With an AsyncSession it is awaited. All parameters are
    positional, so that a payload's field may have any name.

    :param payload: the payload class, or a kind's name (then ``fields`` are keys of the stored dict).
    :param where: columns of the job that must be equal, such as queue, priority, run_at, unique_key, meta. The status
        is ``queued``, which delayed jobs and those that wait for a retry are too, unless it is given.
    :param record: the mapped class of the jobs, as for :class:`~enlist.JobRepository`.
    :param fields: fields of the payload that must be equal; other fields may be anything.
    :return: the jobs, in the order in which they were enqueued: objects of the session, not empty.
    :raises AssertionError: there is none; the message shows what is there instead.
    :raises InvalidOption: the payload class has no such field, or the job no such column.
    """
    __tracebackhide__ = True
    wanted = Wanted(payload, where, _checked(record), fields)
    sync, asynchronous = _resolve(session)
    if asynchronous is not None:
        return asynchronous.run_sync(wanted.found_in)
    return wanted.found_in(sync)


@overload
def refute_enqueued(
    session: SyncCaller,
    payload: type[JobPayload] | str,
    where: Mapping[str, Any] = ...,
    record: type[JobRecordMixin] = ...,
    /,
    **fields: Any,
) -> None: ...
@overload
def refute_enqueued(
    session: AsyncCaller,
    payload: type[JobPayload] | str,
    where: Mapping[str, Any] = ...,
    record: type[JobRecordMixin] = ...,
    /,
    **fields: Any,
) -> Coroutine[Any, Any, None]: ...
def refute_enqueued(
    session: SyncCaller | AsyncCaller,
    payload: type[JobPayload] | str,
    where: Mapping[str, Any] = _ANYHOW,
    record: type[JobRecordMixin] = JobRecord,
    /,
    **fields: Any,
) -> Coroutine[Any, Any, None] | None:
    """Fail if a job of this kind, with these fields, is queued in the session's view.

    Parameters and errors are those of :func:`assert_enqueued`.
    """
    __tracebackhide__ = True
    wanted = Wanted(payload, where, _checked(record), fields)
    sync, asynchronous = _resolve(session)
    if asynchronous is not None:
        return asynchronous.run_sync(wanted.absent_from)
    wanted.absent_from(sync)
    return None


# -- what they are given -------------------------------------------------------------------------------------------


def _resolve(session: SyncCaller | AsyncCaller) -> tuple[Session, AsyncSession | None]:
    """The Session behind whatever was given, and the AsyncSession if it is one."""
    found: object = session.registry() if isinstance(session, (scoped_session, async_scoped_session)) else session
    if isinstance(found, AsyncSession):
        return found.sync_session, found
    if not isinstance(found, Session):
        raise SessionError(
            "give the test's Session, AsyncSession, scoped_session or async_scoped_session, not a"
            f" {type(found).__name__}; of a sessionmaker make a session first"
        )
    return found, None


def _checked(record: type[RecordT]) -> type[RecordT]:
    JobRepository(record)  # refuses what is no mapped class
    return record
