"""Checks of what callers pass, shared by producer and worker: each error names the value, the limit and the remedy."""

from __future__ import annotations

import datetime as dt
import math
from typing import Any, Final, TypeAlias

from enlist.exceptions import InvalidOption
from enlist.models import MAX_KEY_BYTES, MAX_NAME_BYTES

__all__ = [
    "ABSENT",
    "Duration",
    "as_instant",
    "as_timedelta",
    "check_boolean",
    "check_integer",
    "check_key",
    "check_name",
    "shown",
]

Duration: TypeAlias = int | float | dt.timedelta
"""Seconds, or a timedelta."""

MAX_INTEGER: Final = 2_147_483_647
"""What a PostgreSQL integer holds."""

LONGEST: Final = dt.timedelta(days=365_000)
"""A thousand years; PostgreSQL's timestamps and Python's end somewhere beyond."""


ABSENT: Final[Any] = object()
"""An argument that was not given, where None may be meant, or is refused."""


def as_timedelta(name: str, value: Duration) -> dt.timedelta:
    """Return a duration as a timedelta.

    :raises InvalidOption: it is no number of seconds, negative, or longer than a thousand years.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, dt.timedelta)):
        raise InvalidOption(f"{name} must be seconds (int or float) or a timedelta, not {shown(value)}")
    if not isinstance(value, dt.timedelta) and (
        (isinstance(value, float) and not math.isfinite(value)) or abs(value) > LONGEST.total_seconds()
    ):
        raise InvalidOption(f"{name} must be between 0 and {LONGEST.total_seconds():.0f} seconds, not {shown(value)}")
    duration = value if isinstance(value, dt.timedelta) else dt.timedelta(seconds=value)
    if not dt.timedelta(0) <= duration <= LONGEST:
        raise InvalidOption(f"{name} must be between 0 and {LONGEST.days} days, not {shown(value)}")
    return (
        duration
        if type(duration) is dt.timedelta
        else dt.timedelta(duration.days, duration.seconds, duration.microseconds)
    )


EARLIEST: Final = dt.datetime(1, 1, 3, tzinfo=dt.UTC)
LATEST: Final = dt.datetime(9999, 12, 29, tzinfo=dt.UTC)
"""Python's own limits less two days: the session's time zone must not carry a value that is read back beyond them."""


def as_instant(name: str, value: dt.datetime) -> dt.datetime:
    """Return an aware datetime in UTC.

    :raises InvalidOption: it is no datetime, has no time zone, or is outside of the years 1 to 9999.
    """
    if not isinstance(value, dt.datetime):
        raise InvalidOption(f"{name} must be an aware datetime, not {shown(value)}")
    if value.utcoffset() is None:
        raise InvalidOption(
            f"{name} must have a time zone, {shown(value)} has none: datetime.now(UTC), or value.replace(tzinfo=...)"
        )
    try:
        instant = value.astimezone(dt.UTC)
    except OverflowError:
        instant = None
    if instant is None or not EARLIEST <= instant <= LATEST:
        raise InvalidOption(f"{name} must be between {EARLIEST} and {LATEST}, not {shown(value)}")
    # What it is, not what its class makes of it: a dataframe's Timestamp writes nanoseconds.
    return dt.datetime.combine(dt.datetime.date(instant), dt.datetime.time(instant), dt.UTC)


def check_integer(name: str, value: Any, low: int, high: int) -> int:
    """Return the value if it is an integer in the range.

    :raises InvalidOption: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidOption(f"{name} must be an integer from {low} to {high}, not {shown(value)}")
    return value


def check_boolean(name: str, value: Any) -> bool:
    """Return the value if it is True or False.

    :raises InvalidOption: it is not.
    """
    if not isinstance(value, bool):
        raise InvalidOption(f"{name} must be True or False, not {shown(value)}")
    return value


def check_name(name: str, value: Any) -> str:
    """Return a kind's or queue's name if PostgreSQL can store it and it is not too long.

    :raises InvalidOption: it is not a string, empty, has a NUL or a lone surrogate, or more bytes than the limit.
    """
    return _check_text(name, value, MAX_NAME_BYTES)


def check_key(name: str, value: Any) -> str:
    """Return a unique or concurrency key if PostgreSQL can store and index it.

    :raises InvalidOption: it is not a string, empty, has a NUL or a lone surrogate, or more bytes than the limit.
    """
    return _check_text(name, value, MAX_KEY_BYTES)


def _check_text(name: str, value: Any, limit: int) -> str:
    if not isinstance(value, str):
        raise InvalidOption(f"{name} must be a string, not {shown(value)}")
    if not value:
        raise InvalidOption(f"{name} must not be empty")
    if "\x00" in value:
        raise InvalidOption(f"{name} has a NUL character, which PostgreSQL cannot store: {shown(value)}")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise InvalidOption(f"{name} has a lone surrogate, which is not text: {shown(value)}") from None
    if size > limit:
        raise InvalidOption(
            f"{name} has {size} bytes, at most {limit} are allowed: {shown(value)}; shorten it or use a digest"
        )
    return value


def shown(value: object) -> str:
    """A value for a message: at most 80 characters of it, whatever it is."""
    try:
        text = repr(value)
    except Exception:  # an integer of 5,000 digits, an object whose __repr__ fails
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}..."
