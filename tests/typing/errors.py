"""Uses of the public API that a type checker must refuse: each marked line, and no other (tests/test_typing.py)."""

from __future__ import annotations

import uuid
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from enlist import AsyncJobRepository, HandlerRegistry, Job, JobPayload, JobRepository, Worker
from tests.shop import Order


class SendReceipt(JobPayload, kind="send_receipt"):
    order_id: int


class SendReminder(SendReceipt, kind="send_reminder"):
    days: int = 3


class Other(JobPayload, kind="other"):
    pass


handlers = HandlerRegistry()


@handlers.handler(SendReceipt)  # E: incompatible type
async def async_with_a_sync_session(session: Session, job: Job[SendReceipt]) -> None: ...


@handlers.handler(SendReceipt)  # E: cannot be "AsyncSession"
def plain_with_an_async_session(session: AsyncSession, job: Job[SendReceipt]) -> None: ...


@handlers.handler(SendReceipt)  # E: incompatible type
def of_another_payload(session: Session, job: Job[Other]) -> None: ...


@handlers.handler(SendReceipt)  # E: incompatible type
def of_a_narrower_payload(session: Session, job: Job[SendReminder]) -> None: ...


@handlers.handler(SendReceipt)  # E: incompatible type
def without_a_job(session: Session) -> None: ...


@handlers.handler("other")  # E: incompatible type
def a_kind_has_a_dict(session: Session, job: Job[SendReceipt]) -> None: ...


@handlers.handler(SendReceipt)  # E: incompatible type
def returns_something(session: Session, job: Job[SendReceipt]) -> int:
    return 1


@handlers.handler(SendReceipt, timeout="30")  # E: No overload variant
def timeout_is_a_duration(session: Session, job: Job[SendReceipt]) -> None: ...


def covariance_goes_one_way(receipt: Job[SendReceipt]) -> Job[SendReminder]:
    return receipt  # E: Incompatible return value type


def a_payload_is_typed() -> None:
    SendReceipt(order_id="one")  # E: incompatible type "str"; expected "int"
    SendReceipt()  # E: Missing named argument "order_id"


def enqueue(repo: JobRepository, session: Session, order: Order, anything: Any) -> None:
    repo.enqueue(session, {"order_id": 1})  # E: No overload variant
    repo.enqueue(session, "kind")  # E: No overload variant
    repo.enqueue(session, SendReceipt(order_id=1), {"a": 1})  # E: No overload variant
    repo.enqueue(session, SendReceipt(order_id=1), of=order)  # E: No overload variant
    repo.enqueue(session, lambda o: SendReceipt(order_id=o.id))  # E: incompatible type
    repo.enqueue(session, lambda o: o.id, of=order)  # E: incompatible type
    repo.enqueue(session, SendReceipt(order_id=1), prio=5)  # E: No overload variant


def commands(repo: JobRepository, session: Session, async_session: AsyncSession, job_id: uuid.UUID) -> None:
    JobRepository(record=Order)  # E: RecordT_co
    repo.cancel(session, str(job_id))  # E: incompatible type "str"
    repo.cancel(session, repo.enqueue(session, Other()))  # E: incompatible type "JobHandle"
    repo.retry(session, True)  # E: incompatible type "bool"
    repo.retry(async_session, job_id)  # E: incompatible type "AsyncSession"
    repo.reschedule(session, job_id, 60)  # E: incompatible type "int"
    repo.prune(session)  # E: Missing named argument "older_than"


async def async_commands(repo: AsyncJobRepository, session: Session, async_session: AsyncSession) -> None:
    await repo.counts(session)  # E: incompatible type "Session"
    repo.counts(async_session)  # E: must be used


def workers(engine: Engine) -> None:
    Worker(engine)  # E: Missing positional argument "handlers"
    Worker("postgresql://", handlers)  # E: has incompatible type "str"
