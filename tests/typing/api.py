"""The public API as applications use it. Type-checked, not run: tests/test_typing.py."""

from __future__ import annotations

import datetime as dt
import uuid
from typing import Any, assert_type

import tenacity
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from enlist import HandlerRegistry, Job, JobHandle, JobPayload, JobRepository, Worker
from tests.shop import Order


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


def workers(engine: Engine, async_engine: AsyncEngine) -> None:
    Worker(engine, handlers, queues={"mail": 10, "default": 20})
    Worker(async_engine, handlers, concurrency=10, lease=60, poll_interval=1, shutdown_timeout=30)
