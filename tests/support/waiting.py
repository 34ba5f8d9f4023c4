"""Waiting for something that other threads or processes bring about."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import TypeVar

import pytest

T = TypeVar("T")

POLL_SECONDS = 0.005


def wait_until(predicate: Callable[[], T], timeout: float = 5, *, message: str | None = None) -> T:
    """Return the first true value of ``predicate``; fail the test after ``timeout`` seconds without one."""
    deadline = time.monotonic() + timeout
    while not (value := predicate()):
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout} s: {message or _source(predicate)} (last value: {value!r})")
        time.sleep(POLL_SECONDS)
    return value


def _source(predicate: Callable[[], object]) -> str:
    try:
        return inspect.getsource(predicate).strip()
    except (OSError, TypeError):
        return repr(predicate)
