"""Where an application enqueues its jobs: :class:`JobRepository`."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeAlias, Unpack, cast, get_args, overload

import sqlalchemy as sa
from sqlalchemy.exc import NoInspectionAvailable
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
from sqlalchemy.orm import Mapper, Session, scoped_session
from typing_extensions import TypeVar

from enlist._commands import Changes, Condition, Which, change, count, oldest_queued_age, prune
from enlist._encoding import DEFAULT_MAX_BYTES
from enlist._making import EnqueueOptions, JobMaker, OnConflict, Until
from enlist._options import ABSENT, MAX_INTEGER, Duration, as_instant, as_timedelta, check_integer, shown
from enlist._staged import Notify, StagedJob, Target
from enlist._staging import flush_staged, stage_of
from enlist._uuid7 import uuid7s
from enlist.exceptions import ConfigurationError, EnlistError, InvalidOption, SessionError
from enlist.handle import JobHandle
from enlist.models import JobRecord, JobRecordMixin, JobStatus
from enlist.payload import JobPayload

__all__ = ["AnySession", "EnqueueOptions", "JobRepository", "RecordT_co", "RepositoryBase", "SyncSession"]

AnySession: TypeAlias = Session | AsyncSession | scoped_session[Any] | async_scoped_session[Any]
"""What jobs can be enqueued in."""

SyncSession: TypeAlias = Session | scoped_session[Any]
"""What a :class:`JobRepository` reads and changes jobs in."""

EntityT = TypeVar("EntityT")
RecordT_co = TypeVar("RecordT_co", bound=JobRecordMixin, covariant=True, default=JobRecord)

Item: TypeAlias = JobPayload | Callable[[], JobPayload] | tuple[JobPayload | Callable[[], JobPayload], EnqueueOptions]
"""A job for :meth:`JobRepository.enqueue_many`: a payload, or a payload with options."""


class RepositoryBase(Generic[RecordT_co]):
    """What the repositories of sync and async applications share: enqueuing, which does no IO."""

    @overload
    def __init__(
        self: RepositoryBase[JobRecord], *, notify: Notify = "after_commit", max_payload_bytes: int = DEFAULT_MAX_BYTES
    ) -> None: ...
    @overload
    def __init__(
        self, record: type[RecordT_co], *, notify: Notify = "after_commit", max_payload_bytes: int = DEFAULT_MAX_BYTES
    ) -> None: ...
    def __init__(
        self, record: Any = JobRecord, *, notify: Notify = "after_commit", max_payload_bytes: int = DEFAULT_MAX_BYTES
    ) -> None:
        known = [*get_args(get_args(Notify)[0]), None]
        if notify not in known:
            raise InvalidOption(f"notify must be one of {known}, not {notify!r}")
        self.record: type[RecordT_co] = record
        max_bytes = check_integer("max_payload_bytes", max_payload_bytes, 1, MAX_INTEGER)
        mapper = _mapper_of(record)
        self._target = Target.of(mapper, notify)
        self._maker = JobMaker(self._target, max_bytes)

    @overload
    def enqueue(self, session: AnySession, payload: JobPayload, /, **options: Unpack[EnqueueOptions]) -> JobHandle: ...
    @overload
    def enqueue(
        self, session: AnySession, payload: Callable[[], JobPayload], /, **options: Unpack[EnqueueOptions]
    ) -> JobHandle: ...
    @overload
    def enqueue(
        self,
        session: AnySession,
        payload: Callable[[EntityT], JobPayload],
        /,
        *,
        of: EntityT,
        **options: Unpack[EnqueueOptions],
    ) -> JobHandle: ...
    @overload
    def enqueue(
        self,
        session: AnySession,
        kind: str,
        data: dict[str, Any] | Callable[[], dict[str, Any]],
        /,
        **options: Unpack[EnqueueOptions],
    ) -> JobHandle: ...
    @overload
    def enqueue(
        self,
        session: AnySession,
        kind: str,
        data: Callable[[EntityT], dict[str, Any]],
        /,
        *,
        of: EntityT,
        **options: Unpack[EnqueueOptions],
    ) -> JobHandle: ...
    def enqueue(
        self,
        session: AnySession,
        payload: Any,
        data: Any = ABSENT,
        /,
        *,
        of: Any = ABSENT,
        queue: str | None = None,
        priority: int = ABSENT,
        run_at: dt.datetime | None = None,
        delay: Duration | None = None,
        unique_key: str | None = None,
        unique_until: Until | None = None,
        unique_for: Duration | None = None,
        on_conflict: OnConflict | None = None,
        concurrency_key: str | None = None,
        concurrency_limit: int | None = None,
        max_attempts: int | None = None,
        values: Mapping[str, Any] | None = None,
        meta: dict[str, Any] | None = None,
    ) -> JobHandle:
        """Stage a job in the session's unit of work: it commits with the session's rows, or is gone with them.

        No IO, and never blocks; so it is the same plain call for every kind of session. The row is written by the
        session's next flush, after the domain rows. The payload is one of

        - an instance of a :class:`~enlist.JobPayload` class;
        - a function that returns one, called by the flush when new rows have their keys, with the object given as
          ``of=`` (which is bound now: safe in a loop) or with nothing;
        - a kind's name and a dict of JSON's types (or a function that returns one), for handlers elsewhere.

        Options of the call beat those of the payload class, which beat the defaults. All are checked here, before any
        SQL: after an error the transaction is as it was.

        :param session: a Session, AsyncSession, scoped_session or async_scoped_session.
        :param queue: at most 200 bytes; default ``"default"``.
        :param priority: -32768 to 32767, higher is run first; default 0. None is refused: in an order NULL would be the
            highest.
        :param run_at: an aware datetime before which the job is not run; default the server's time at the flush.
        :param delay: the same as seconds or a timedelta, from the server's time at the flush.
        :param unique_key: while a job of this kind holds the key, no other is made; at most 2,000 bytes. A flush that
            meets a key of another transaction, not committed yet, waits for its end (see ``lock_timeout``).
        :param unique_until: when the job gives up the key: ``"started"``, when a worker takes it (one waits while
            another runs); ``"finished"``; or ``"pruned"``, the default: a done job holds it until its row is deleted.
            Dead and cancelled jobs never hold it, and a key that was given up is not taken again by an automatic retry.
        :param unique_for: seconds or a timedelta that the key is held at least, from the flush on; default none.
        :param on_conflict: ``"ignore"``, the default: no job is made while another holds the key. ``"replace"``: if
            that one is queued, it gets this call's payload and run_at, and its attempts begin anew; if it runs or is
            done, it loses the key and a new job is made (and ``unique_until`` is ``"started"`` by default).
        :param concurrency_key: of the jobs with this key at most ``concurrency_limit`` run at a time; one after the
            other, in the order in which they were written, if their payload classes are ``ordered=True``.
        :param concurrency_limit: 1 to 32767; default 1.
        :param max_attempts: how often the job is tried before it is dead, at least 1; default 20.
        :param values: values of the columns that the application's own job class has, by the names of its
            attributes; a function is called by the flush, when new rows have their keys:
            ``{"order_id": lambda: order.id}``.
        :param meta: a dict of JSON's types for the application's own use; the handler reads it as ``job.meta``.
        :raises PayloadError: the payload cannot be stored, or not read back equal. For a late payload the flush raises
            it, and fails.
        :raises InvalidOption: an option is outside of what it may be. The flush raises it where jobs of a
            concurrency key are ordered and others are not.
        :raises SessionError: the session cannot carry a job: AUTOCOMMIT, no bind for the table, or its transaction has
            failed. What only shows on the connection is raised by the flush.
        """
        sync = _sync_session(session)
        job = self._maker.make(
            payload,
            data,
            of=of,
            queue=queue,
            priority=priority,
            run_at=run_at,
            delay=delay,
            unique_key=unique_key,
            unique_until=unique_until,
            unique_for=unique_for,
            on_conflict=on_conflict,
            concurrency_key=concurrency_key,
            concurrency_limit=concurrency_limit,
            max_attempts=max_attempts,
            values=values,
            meta=meta,
        )
        stage = stage_of(sync, self._target)
        (number,) = uuid7s(1)
        job.stage(number, stage.batch)
        stage.jobs.append(job)
        return job

    def enqueue_many(self, session: AnySession, items: Iterable[Item]) -> list[JobHandle]:
        """Stage many jobs, as :meth:`enqueue` does each; all or, when one is refused, none.

        :param items: payloads, or pairs of a payload and its options: ``(payload, {"unique_key": "receipt:1"})``.
        :return: the handles, in the order of the items.
        :raises PayloadError: as from :meth:`enqueue`; the message begins with the item, ``items[3]``.
        :raises InvalidOption: likewise.
        :raises SessionError: likewise.
        """
        sync = _sync_session(session)
        if isinstance(items, (JobPayload, str, Mapping)) or not isinstance(items, Iterable):
            raise InvalidOption(f"items must be an iterable of payloads, such as a list, not a {type(items).__name__}")
        jobs: list[StagedJob] = []
        for index, item in enumerate(items):
            try:
                jobs.append(self._maker.from_item(item))
            except EnlistError as error:
                raise type(error)(f"items[{index}]: {error}") from error.__cause__
        if not jobs:
            return []
        stage = stage_of(sync, self._target)
        batch = stage.batch
        for job, number in zip(jobs, uuid7s(len(jobs)), strict=True):
            job.stage(number, batch)
        stage.jobs += jobs
        return cast("list[JobHandle]", jobs)


class JobRepository(RepositoryBase[RecordT_co]):
    """Enqueues jobs in the caller's transaction, and looks after them. Make one, use it everywhere.

    It holds no connection and no session. With an AsyncSession enqueue by the same; for the rest, which does IO, there
    is :class:`~enlist.AsyncJobRepository`.

    :param record: the mapped class of the jobs; default :class:`~enlist.models.JobRecord`, the table ``enlist_job``.
    :param notify: how workers learn of a new job without waiting for their next poll.

        - ``"after_commit"``, the default: once the session has committed, on a connection of enlist's own, at most one
          NOTIFY per queue and 50 ms. Costs the transaction nothing. Not for a session that has joined a transaction
          begun outside of it: when that commits is not seen.
        - ``"transaction"``: by the transaction itself. Its COMMIT then takes a lock that is one for the whole server,
          which halves the commits per second under load. In a two-phase session, which PostgreSQL does not let notify,
          this is the same as ``"after_commit"``.
        - ``None``: not at all, workers poll.
    :param max_payload_bytes: the longest payload, and the longest ``meta``, in bytes of JSON; default 1 MiB.
    :raises ConfigurationError: ``record`` is not a mapped class with :class:`~enlist.models.JobRecordMixin`.
    :raises InvalidOption: ``notify`` or ``max_payload_bytes`` is none of these.
    """

    def get(self, session: SyncSession, job_id: uuid.UUID) -> RecordT_co | None:
        """Read a job in the session's transaction, as it is now; None if there is none of this id.

        An object of it that the session has loaded is brought up to date.

        :raises InvalidOption: ``job_id`` is no UUID.
        """
        sync = _session_for_io(session, "get")
        if not isinstance(job_id, uuid.UUID):
            raise InvalidOption(f"job_id must be a uuid.UUID, such as handle.id, not {shown(job_id)}")
        flush_staged(sync)
        statement = sa.select(self.record).where(self._target.statements.table.c.id == job_id)
        known = sync.identity_map.get(self._target.mapper.identity_key_from_primary_key((job_id,)))
        # What was set on it and is not flushed (without autoflush) stays.
        fresh = known is None or not sa.inspect(known).modified
        return sync.scalars(statement, execution_options={"populate_existing": fresh}).one_or_none()

    def cancel(self, session: SyncSession, *which: Which, limit: int | None = None) -> Changes:
        """Cancel queued and running jobs, in the session's transaction.

        A running job's worker is fenced off: what its handler does is rolled back, and nothing of it is committed.
        Once the session has committed it is told, and gives the attempt up: ``job.cancel_requested`` becomes true, an
        async handler is cancelled. (With ``notify=None`` it finds out when it renews its lease.) A cancelled job gives
        up its unique key. Jobs that are done, dead or cancelled stay what they are. A handler cannot cancel its own job
        in its own session: it raises :class:`~enlist.Cancel`.

        It waits for whoever has locked a queued job; ``SET LOCAL lock_timeout`` bounds that. A running job whose row
        its handler has locked (``hold_lock=True``, or a session at REPEATABLE READ or SERIALIZABLE) is not waited for
        longer than 0.2 s: its worker is asked to give it up and to write that it is cancelled, and the job is in
        ``asked`` of the result. With ``notify=None`` nobody could be asked, and it is waited for.

        :param which: one id, an iterable of ids, or one or more conditions on the record class, which are joined by
            AND: ``JobRecord.kind == "mail", JobRecord.priority < 0``.
        :param limit: with conditions, the most jobs that are changed or asked, those with the lowest ids; default all.
            Jobs that are in no state for the command are not counted, and not told of.
        :return: what was changed, and what was not; see :class:`Changes`.
        :raises InvalidOption: it is not said which jobs, or wrongly, or the session's own job is one of them; nothing
            was written.
        :raises SessionError: the session is an AsyncSession, in AUTOCOMMIT mode, or has no bind for the table.
        """
        statements = self._target.statements
        command = statements.cancel_waiting if self._target.notify is None else statements.cancel
        return change(_session_for_io(session, "cancel"), self._target, command, which, limit)

    def retry(self, session: SyncSession, *which: Which, limit: int | None = None) -> Changes:
        """Queue jobs again that are dead, cancelled or done, due now, with all their attempts before them.

        Their errors stay, and how often they have killed a worker. A job that is queued and not due yet becomes due,
        its attempts as they are; a running one stays as it is. Workers are woken when the session has committed.

        A job that has given up its unique key takes it again. If another holds it, the job is left as it is and is in
        ``superseded`` of the result; so is the later of two that want the same key.

        ``which``, ``limit`` and what else is raised as for :meth:`cancel`.

        :raises UniqueKeyContended: others took a key at each of three tries; retry the transaction.
        """
        return change(_session_for_io(session, "retry"), self._target, self._target.statements.retry, which, limit)

    def reschedule(
        self,
        session: SyncSession,
        *which: Which,
        run_at: dt.datetime | None = None,
        delay: Duration | None = None,
        limit: int | None = None,
    ) -> Changes:
        """Set when queued jobs are due; jobs in other states stay as they are.

        ``which``, ``limit`` and what else is raised as for :meth:`cancel`.

        :param run_at: an aware datetime.
        :param delay: instead of it seconds or a timedelta, from the server's time; 0 is now, and wakes workers.
        :raises InvalidOption: not just one of the two is given, or it is outside of what :meth:`enqueue` takes.
        """
        sync = _session_for_io(session, "reschedule")
        if (run_at is None) == (delay is None):
            raise InvalidOption("reschedule takes either run_at, an aware datetime, or delay, seconds or a timedelta")
        at = None if run_at is None else as_instant("run_at", run_at)
        wait = None if delay is None else as_timedelta("delay", delay)
        return change(sync, self._target, self._target.statements.reschedule, which, limit, run_at=at, delay=wait)

    def counts(self, session: SyncSession, *where: Condition) -> dict[JobStatus, int]:
        """Count the jobs of each status, those with none included; it reads the whole table.

        :param where: conditions on the record class; default all jobs.
        """
        return count(_session_for_io(session, "counts"), self._target, where)

    def oldest_queued_age(self, session: SyncSession, *where: Condition) -> dt.timedelta | None:
        """Read how long the queued job that is due longest has been due, by the server's clock; None if none is due.

        :param where: conditions on the record class; default all jobs.
        """
        return oldest_queued_age(_session_for_io(session, "oldest_queued_age"), self._target, where)

    def prune(self, session: SyncSession, *where: Condition, older_than: Duration, limit: int = 1000) -> int:
        """Delete jobs that finished (done, dead or cancelled) some time ago; return how many it were.

        One statement, which passes by what others have locked: several may prune at a time. To delete all, repeat it
        with a commit each time until it returns less than the limit. With a done job goes its unique key; a job that
        is to hold it longer, by ``unique_for``, stays. A job that other rows reference is an IntegrityError.

        :param where: further conditions on the record class.
        :param older_than: how long ago they finished, at least; seconds or a timedelta, by the server's clock.
        :param limit: the most jobs that are deleted; default 1000.
        """
        return prune(_session_for_io(session, "prune"), self._target, where, older_than, limit)


def _mapper_of(record: Any) -> Mapper[Any]:
    try:
        mapper = sa.inspect(record) if issubclass(record, JobRecordMixin) else None
    except (TypeError, NoInspectionAvailable):
        mapper = None
    if not isinstance(mapper, Mapper):
        raise ConfigurationError(
            f"record must be a mapped class: class AppJob(JobRecordMixin, Base) with a __tablename__, not {record!r}"
        )
    return mapper


def _sync_session(session: Any) -> Session:
    if isinstance(session, (scoped_session, async_scoped_session)):
        session = session.registry()
    if isinstance(session, AsyncSession):
        session = session.sync_session
    if not isinstance(session, Session):
        raise SessionError(
            "jobs are enqueued in a Session, AsyncSession, scoped_session or async_scoped_session, not in a"
            f" {type(session).__name__}; of a sessionmaker make a session first"
        )
    return session


def _session_for_io(session: Any, method: str) -> Session:
    if isinstance(session, (AsyncSession, async_scoped_session)):
        raise SessionError(
            f"JobRepository.{method}() does IO: with a {type(session).__name__} await AsyncJobRepository.{method}(),"
            f" or session.run_sync(repo.{method}, ...)"
        )
    return _sync_session(session)
