"""The public API as applications use it. Type-checked, not run: tests/test_typing.py."""

from __future__ import annotations

import datetime as dt
import uuid
from typing import Any, assert_type

import tenacity
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from enlist import (
    AsyncJobRepository,
    Changes,
    HandlerRegistry,
    Job,
    JobHandle,
    JobPayload,
    JobRecord,
    JobRecordMixin,
    JobRepository,
    JobStatus,
    Worker,
)
from enlist.testing import Attempt, Drained, assert_enqueued, drain, refute_enqueued
from tests.shop import Base, Order


class SendReceipt(JobPayload, kind="send_receipt", queue="mail", max_attempts=8):
    order_id: int


class SendReminder(SendReceipt, kind="send_reminder"):
    days: int = 3


class ShopSession(Session):
    """An application's own Session."""


class AsyncShopSession(AsyncSession):
    """An application's own AsyncSession."""


handlers = HandlerRegistry()


@handlers.handler(SendReceipt, timeout=30, wait=tenacity.wait_exponential_jitter(initial=5, max=3600))
def send_receipt(session: Session, job: Job[SendReceipt]) -> None:
    assert_type(job.payload, SendReceipt)
    assert_type(job.payload.order_id, int)
    assert_type(job.id, uuid.UUID)
    assert_type(job.attempt, int)
    assert_type(job.deadline, dt.datetime | None)
    assert_type(job.idempotency_key, str)


@handlers.handler(SendReminder, timeout=dt.timedelta(seconds=30), hold_lock=True)
async def send_reminder(session: AsyncSession, job: Job[SendReminder]) -> None:
    assert_type(job.payload.days, int)


@handlers.handler("from_elsewhere")
def from_elsewhere(session: Session, job: Job[dict[str, Any]]) -> None:
    assert_type(job.payload, dict[str, Any])


def with_a_session_subclass(registry: HandlerRegistry) -> None:
    @registry.handler(SendReceipt)
    def plain(session: ShopSession, job: Job[SendReceipt]) -> None: ...

    @registry.handler(SendReminder)
    async def coroutine(session: AsyncShopSession, job: Job[SendReminder]) -> None: ...


def with_a_job_of_the_base_class(registry: HandlerRegistry) -> None:
    """Job is covariant: what handles each receipt handles a reminder."""

    def handle(session: Session, job: Job[SendReceipt]) -> None: ...

    registry.handler(SendReminder)(handle)


def a_decorated_function_stays_callable(session: Session, job: Job[SendReceipt]) -> None:
    send_receipt(session, job)


def covariance(reminder: Job[SendReminder]) -> Job[JobPayload]:
    receipt: Job[SendReceipt] = reminder
    return receipt


def enqueue(
    session: Session,
    async_session: AsyncSession,
    scoped: scoped_session[Session],
    async_scoped: async_scoped_session[AsyncSession],
    order: Order,
) -> None:
    repo = JobRepository()
    handle = repo.enqueue(session, SendReceipt(order_id=1))
    assert_type(handle, JobHandle)
    assert_type(handle.id, uuid.UUID)
    assert_type(handle.inserted, bool | None)
    assert_type(handle.existing_id, uuid.UUID | None)
    repo.enqueue(async_session, SendReceipt(order_id=1), priority=5, delay=3.5)
    repo.enqueue(scoped, SendReceipt(order_id=1), unique_key="receipt:1")
    repo.enqueue(async_scoped, SendReceipt(order_id=1), run_at=dt.datetime.now(dt.UTC))
    repo.enqueue(session, lambda o: SendReceipt(order_id=o.id), of=order)
    repo.enqueue(session, lambda: SendReceipt(order_id=order.id), delay=dt.timedelta(days=1))
    repo.enqueue(session, "from_elsewhere", {"order_id": 1}, queue="mail")
    handles = repo.enqueue_many(session, [SendReceipt(order_id=1), (SendReceipt(order_id=2), {"priority": 5})])
    assert_type(handles, list[JobHandle])


class AppJob(JobRecordMixin, Base):
    __tablename__ = "app_job"


def repositories(session: Session, scoped: scoped_session[Session], job_id: uuid.UUID) -> None:
    assert_type(JobRepository(), JobRepository[JobRecord])
    assert_type(JobRepository(notify=None), JobRepository[JobRecord])
    assert_type(JobRepository(AppJob), JobRepository[AppJob])
    repo = JobRepository(record=AppJob, notify="transaction", max_payload_bytes=1000)
    assert_type(repo, JobRepository[AppJob])
    plain: JobRepository = JobRepository()
    assert_type(plain.get(session, job_id), JobRecord | None)
    anybodys: JobRepository[JobRecordMixin] = repo
    anybodys.counts(session)
    assert_type(repo.get(session, job_id), AppJob | None)
    assert_type(repo.cancel(session, job_id), Changes)
    assert_type(repo.retry(scoped, [job_id]), Changes)
    repo.retry(session, {job_id: JobStatus.DEAD})
    repo.retry(session, AppJob.status == JobStatus.DEAD, AppJob.kind.in_(["a"]), AppJob.unique_held, limit=10)
    repo.reschedule(session, job_id, run_at=dt.datetime.now(dt.UTC))
    repo.reschedule(session, AppJob.status == JobStatus.QUEUED, delay=dt.timedelta(hours=1))
    assert_type(repo.counts(session, AppJob.kind == "a"), dict[JobStatus, int])
    assert_type(repo.oldest_queued_age(session), dt.timedelta | None)
    assert_type(repo.prune(session, AppJob.kind == "a", older_than=dt.timedelta(days=7), limit=10), int)
    changes = repo.cancel(session, job_id)
    assert_type(changes.changed, list[uuid.UUID])
    assert_type(changes.unchanged, dict[uuid.UUID, JobStatus])


async def async_repositories(
    session: AsyncSession, scoped: async_scoped_session[AsyncSession], job_id: uuid.UUID
) -> None:
    assert_type(AsyncJobRepository(), AsyncJobRepository[JobRecord])
    repo = AsyncJobRepository(record=AppJob, notify=None)
    assert_type(repo, AsyncJobRepository[AppJob])
    assert_type(repo.enqueue(session, SendReceipt(order_id=1), delay=1), JobHandle)
    assert_type(repo.enqueue_many(scoped, [SendReceipt(order_id=1)]), list[JobHandle])
    assert_type(await repo.get(session, job_id), AppJob | None)
    assert_type(await repo.cancel(scoped, job_id), Changes)
    assert_type(await repo.retry(session, AppJob.status == JobStatus.DEAD, limit=10), Changes)
    assert_type(await repo.reschedule(session, [job_id], delay=5), Changes)
    assert_type(await repo.counts(session), dict[JobStatus, int])
    assert_type(await repo.oldest_queued_age(session, AppJob.kind == "a"), dt.timedelta | None)
    assert_type(await repo.prune(session, older_than=0), int)


def workers(engine: Engine, async_engine: AsyncEngine) -> None:
    Worker(engine, handlers, queues={"mail": 10, "default": 20})
    Worker(async_engine, handlers, concurrency=10, lease=60, poll_interval=1, shutdown_timeout=30)


async def in_tests(
    session: Session,
    async_session: AsyncSession,
    scoped: scoped_session[Session],
    async_scoped: async_scoped_session[AsyncSession],
    own_record: type[JobRecordMixin],
) -> None:
    assert_type(drain(session, handlers), Drained)
    assert_type(drain(scoped, handlers, queues=["mail"], with_scheduled=True, raise_errors=True, limit=5), Drained)
    assert_type(await drain(async_session, handlers, record=own_record), Drained)
    drained = await drain(async_scoped, handlers, resources=object())
    assert_type(drained.done, list[Attempt])
    assert_type(drained.failed[0].error, BaseException | None)
    assert_type(assert_enqueued(session, SendReceipt, order_id=7), list[JobRecord])
    assert_type(assert_enqueued(scoped, "by_name", {"queue": "mail"}, session=7, payload=8), list[JobRecord])
    assert_type(assert_enqueued(session, SendReceipt, {}, own_record, order_id=7), list[JobRecordMixin])
    assert_type(await assert_enqueued(async_session, SendReceipt, order_id=7), list[JobRecord])
    assert_type(await assert_enqueued(async_scoped, SendReceipt, {}, own_record), list[JobRecordMixin])
    refute_enqueued(session, SendReceipt, {"priority": 5}, order_id=7)
    await refute_enqueued(async_session, SendReceipt, order_id=7)
