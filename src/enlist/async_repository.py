"""Where an asyncio application enqueues and looks after its jobs: :class:`AsyncJobRepository`."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Callable
from functools import cached_property
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
from sqlalchemy.orm import Session

from enlist._commands import Changes, Condition, Which
from enlist._options import Duration
from enlist.exceptions import SessionError
from enlist.models import JobStatus
from enlist.repository import JobRepository, RecordT_co, RepositoryBase

__all__ = ["AnyAsyncSession", "AsyncJobRepository"]

AnyAsyncSession: TypeAlias = AsyncSession | async_scoped_session[Any]
"""What an :class:`AsyncJobRepository` reads and changes jobs in."""

P = ParamSpec("P")
T = TypeVar("T")


class AsyncJobRepository(RepositoryBase[RecordT_co]):
    """A :class:`~enlist.JobRepository` for an AsyncSession: the same parameters, methods, results and errors.

    :meth:`enqueue` and :meth:`enqueue_many` are plain calls, as ``AsyncSession.add`` is; the others are awaited. Each
    is the method of that name of a JobRepository, run by ``AsyncSession.run_sync``.
    """

    async def get(self, session: AnyAsyncSession, job_id: uuid.UUID) -> RecordT_co | None:
        """See :meth:`enlist.JobRepository.get`."""
        return await self._run(session, self._sync.get, job_id)

    async def cancel(self, session: AnyAsyncSession, *which: Which, limit: int | None = None) -> Changes:
        """See :meth:`enlist.JobRepository.cancel`."""
        return await self._run(session, self._sync.cancel, *which, limit=limit)

    async def retry(self, session: AnyAsyncSession, *which: Which, limit: int | None = None) -> Changes:
        """See :meth:`enlist.JobRepository.retry`."""
        return await self._run(session, self._sync.retry, *which, limit=limit)

    async def reschedule(
        self,
        session: AnyAsyncSession,
        *which: Which,
        run_at: dt.datetime | None = None,
        delay: Duration | None = None,
        limit: int | None = None,
    ) -> Changes:
        """See :meth:`enlist.JobRepository.reschedule`."""
        return await self._run(session, self._sync.reschedule, *which, run_at=run_at, delay=delay, limit=limit)

    async def counts(self, session: AnyAsyncSession, *where: Condition) -> dict[JobStatus, int]:
        """See :meth:`enlist.JobRepository.counts`."""
        return await self._run(session, self._sync.counts, *where)

    async def oldest_queued_age(self, session: AnyAsyncSession, *where: Condition) -> dt.timedelta | None:
        """See :meth:`enlist.JobRepository.oldest_queued_age`."""
        return await self._run(session, self._sync.oldest_queued_age, *where)

    async def prune(self, session: AnyAsyncSession, *where: Condition, older_than: Duration, limit: int = 1000) -> int:
        """See :meth:`enlist.JobRepository.prune`."""
        return await self._run(session, self._sync.prune, *where, older_than=older_than, limit=limit)

    @cached_property
    def _sync(self) -> JobRepository[RecordT_co]:
        return JobRepository(self.record, notify=self._target.notify)

    async def _run(
        self,
        session: AnyAsyncSession,
        method: Callable[Concatenate[Session, P], T],
        *arguments: P.args,
        **options: P.kwargs,
    ) -> T:
        if isinstance(session, async_scoped_session):
            session = session.registry()
        if not isinstance(session, AsyncSession):
            name = method.__name__
            raise SessionError(
                f"AsyncJobRepository.{name}() takes an AsyncSession or async_scoped_session, not a"
                f" {type(session).__name__}: with a Session call JobRepository.{name}()"
            )
        return await session.run_sync(method, *arguments, **options)
