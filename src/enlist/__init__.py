"""enlist: a job queue for SQLAlchemy applications on PostgreSQL. A job enlists in your transaction."""

from __future__ import annotations

from enlist._commands import Changes
from enlist._rates import RateLimit
from enlist.async_repository import AsyncJobRepository
from enlist.events import EventName, JobEvent
from enlist.exceptions import (
    CommitRefused,
    ConfigurationError,
    EnlistError,
    HandlerError,
    HandlerTimeout,
    InvalidOption,
    LeaseLost,
    PayloadError,
    PayloadMismatch,
    SchemaError,
    SessionError,
    TransactionAborted,
    UniqueKeyContended,
)
from enlist.handle import JobHandle, JobState
from enlist.handlers import HandlerRegistry
from enlist.health import Health
from enlist.job import Cancel, Job, Retry, Snooze
from enlist.models import JobRecord, JobRecordMixin, JobStatus
from enlist.payload import JobPayload
from enlist.repository import EnqueueOptions, JobRepository
from enlist.worker import Worker

__all__ = [
    "AsyncJobRepository",
    "Cancel",
    "Changes",
    "CommitRefused",
    "ConfigurationError",
    "EnlistError",
    "EnqueueOptions",
    "EventName",
    "HandlerError",
    "HandlerRegistry",
    "HandlerTimeout",
    "Health",
    "InvalidOption",
    "Job",
    "JobEvent",
    "JobHandle",
    "JobPayload",
    "JobRecord",
    "JobRecordMixin",
    "JobRepository",
    "JobState",
    "JobStatus",
    "LeaseLost",
    "PayloadError",
    "PayloadMismatch",
    "RateLimit",
    "Retry",
    "SchemaError",
    "SessionError",
    "Snooze",
    "TransactionAborted",
    "UniqueKeyContended",
    "Worker",
]
