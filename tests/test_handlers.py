"""The registry of handlers: what it takes, and what it refuses at the decorator rather than in production."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import tenacity
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from enlist import HandlerRegistry, InvalidOption, Job, JobPayload
from enlist.exceptions import HandlerError


class Send(JobPayload, kind="send"):
    number: int = 0


def handle(session: Session, job: Job[Any]) -> None: ...


async def handle_async(session: AsyncSession, job: Job[Any]) -> None: ...


class Service:
    def method(self, session: Session, job: Job[Any]) -> None: ...

    async def async_method(self, session: AsyncSession, job: Job[Any]) -> None: ...

    def __call__(self, session: Session, job: Job[Any]) -> None: ...


class Pair:
    def __init__(self, session: Session, job: Job[Any]) -> None: ...


class AsyncService:
    async def __call__(self, session: AsyncSession, job: Job[Any]) -> None: ...


def of_three(extra: str, session: Session, job: Job[Any]) -> None: ...


async def async_of_three(extra: str, session: AsyncSession, job: Job[Any]) -> None: ...


def decorated(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize(
    ("function", "is_async"),
    [
        (handle, False),
        (handle_async, True),
        (Service().method, False),
        (Service().async_method, True),
        (Service(), False),
        (AsyncService(), True),
        (functools.partial(of_three, "x"), False),
        (functools.partial(async_of_three, "x"), True),
        (decorated(handle), False),
        (decorated(handle_async), True),
        (lambda session, job: None, False),
        (lambda *args: None, False),
        (lambda session, job, extra=None: None, False),
    ],
)
def test_whatever_can_be_called_with_session_and_job_is_a_handler(function: Any, is_async: bool) -> None:
    handlers = HandlerRegistry()
    assert handlers.handler(Send)(function) is function
    assert handlers["send"].is_async is is_async


def _generator(session: Session, job: Job[Any]) -> Any:
    yield


async def _async_generator(session: AsyncSession, job: Job[Any]) -> Any:
    yield


async def _async_with_plain_session(session: Session, job: Job[Any]) -> None: ...


def _plain_with_async_session(session: AsyncSession, job: Job[Any]) -> None: ...


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: None, r"must take two positional arguments \(session, job\)"),
        (lambda session: None, r"must take two positional arguments \(session, job\)"),
        (lambda session, job, more: None, r"must take two positional arguments .*'more'"),
        (lambda session, *, job: None, r"must take two positional arguments"),
        (lambda session, job, *, more: None, r"'more'"),
        (of_three, r"of_three\(.*must take two positional arguments"),
        (Service.method, r"Service\.method.*must take two positional arguments"),
        (_generator, "is a generator; it must return, not yield"),
        (_async_generator, "is a generator; it must return, not yield"),
        (_async_with_plain_session, "is async: its session is an AsyncSession, not a Session"),
        (_plain_with_async_session, "is a plain function: its session is a Session; make it `async def`"),
        (Service, "is a class"),
        (Pair, "is a class"),
        (None, "is not callable: None"),
        ("handle", "is not callable: 'handle'"),
    ],
)
def test_a_wrong_signature_is_refused_at_the_decorator(function: Any, message: str) -> None:
    handlers = HandlerRegistry()
    with pytest.raises(HandlerError, match=message):
        handlers.handler(Send)(function)
    assert "send" not in handlers


def test_a_kind_has_one_handler() -> None:
    handlers = HandlerRegistry()
    handlers.handler(Send)(handle)
    with pytest.raises(
        HandlerError, match=r"'send' already has the handler tests\.test_handlers\.handle; .*handle_async"
    ):
        handlers.handler("send")(handle_async)
    assert handlers["send"].function is handle


def test_include_takes_all_handlers_of_another_registry_or_none() -> None:
    shop, mail = HandlerRegistry(), HandlerRegistry()
    shop.handler("order")(handle)
    mail.handler("send")(handle)
    mail.handler("order")(handle_async)
    with pytest.raises(HandlerError, match="'order' already has the handler"):
        shop.include(mail)
    assert list(shop.kinds) == ["order"]

    other = HandlerRegistry()
    other.handler("send")(handle)
    shop.include(other)
    assert list(shop.kinds) == ["order", "send"]
    assert len(shop) == 2


@pytest.mark.parametrize("timeout", [0, -1, 0.0, float("nan"), float("inf"), True, "30", 1e12])
def test_a_timeout_is_a_positive_number_of_seconds(timeout: Any) -> None:
    with pytest.raises(InvalidOption, match="timeout must be"):
        HandlerRegistry().handler(Send, timeout=timeout)


@pytest.mark.parametrize("wait", [5, None, lambda state: 5, tenacity.wait_fixed])
def test_a_wait_is_a_tenacity_strategy(wait: Any) -> None:
    with pytest.raises(InvalidOption, match=r"wait must be a tenacity wait strategy, such as tenacity.wait_fixed\(5\)"):
        HandlerRegistry().handler(Send, wait=wait)


@pytest.mark.parametrize("payload", [None, 3, dict, Session, Send(), ""])
def test_a_handler_is_for_a_payload_class_or_a_kind(payload: Any) -> None:
    with pytest.raises(InvalidOption):
        HandlerRegistry().handler(payload)


def test_a_payload_class_without_a_kind_has_no_handler() -> None:
    class Base(JobPayload):
        number: int = 0

    with pytest.raises(Exception, match=r"Base has no kind: class Base\(JobPayload, kind='...'\)"):
        HandlerRegistry().handler(Base)
