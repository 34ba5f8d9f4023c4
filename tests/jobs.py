"""Payloads that the tests of the producer enqueue, and what the database has of them."""

from __future__ import annotations

from enlist import JobHandle, JobPayload, JobState
from tests.support import Observer


class SendReceipt(JobPayload, kind="send_receipt", queue="mail", max_attempts=8):
    order_id: int


class Note(JobPayload, kind="note"):
    text: str = ""


def texts(observer: Observer) -> list[str]:
    """The texts of the notes that are committed, in the order of their ids."""
    return [text for (text,) in observer.rows("SELECT payload->>'text' FROM enlist_job ORDER BY id")]


def state_of(handle: JobHandle) -> JobState:
    """The handle's state now: a type checker takes ``handle.state`` for what it was when it last saw it."""
    return handle.state
