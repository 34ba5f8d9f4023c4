"""From the arguments of ``enqueue`` to a job that can be staged: everything is checked here, nothing is sent."""

from __future__ import annotations

import datetime as dt
import inspect
import sys
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypedDict, get_args

from enlist._encoding import encode_data
from enlist._options import (
    ABSENT,
    MAX_INTEGER,
    Duration,
    as_instant,
    as_timedelta,
    check_integer,
    check_key,
    check_name,
    shown,
)
from enlist._staged import NO_OPTIONS, CallOptions, LatePayload, StagedJob, Target, UniqueKey, Values
from enlist.exceptions import InvalidOption, PayloadError
from enlist.models import MAX_SMALLINT, PRIORITY_RANGE
from enlist.payload import JobPayload, PayloadOptions, encode, options_of

__all__ = ["EnqueueOptions", "JobMaker", "OnConflict", "Until"]

Until: TypeAlias = Literal["started", "finished", "pruned"]
OnConflict: TypeAlias = Literal["ignore", "replace"]

_DEFAULTS: Final = PayloadOptions()


class EnqueueOptions(TypedDict, total=False):
    """The options of :meth:`JobRepository.enqueue`, which describes them. None: not given (priority: refused)."""

    queue: str | None
    priority: int
    run_at: dt.datetime | None
    delay: Duration | None
    unique_key: str | None
    unique_until: Until | None
    unique_for: Duration | None
    on_conflict: OnConflict | None
    concurrency_key: str | None
    concurrency_limit: int | None
    max_attempts: int | None
    values: Mapping[str, Any] | None
    meta: dict[str, Any] | None


class _Overrides(NamedTuple):
    """What the call says instead of the payload's class."""

    queue: str | None
    priority: int | None
    max_attempts: int | None

    def applied_to(self, options: PayloadOptions) -> PayloadOptions:
        return PayloadOptions(
            options.kind,
            options.queue if self.queue is None else self.queue,
            options.priority if self.priority is None else self.priority,
            options.max_attempts if self.max_attempts is None else self.max_attempts,
            options.ordered,
            options.version,
        )


_NO_OVERRIDES: Final = _Overrides(None, None, None)


class JobMaker:
    """Makes the jobs of one repository."""

    def __init__(self, target: Target, max_bytes: int) -> None:
        self._target = target
        self._max_bytes = max_bytes

    def from_item(self, item: Any) -> StagedJob:
        """Make a job of a payload, or of a pair of a payload and its options."""
        if not isinstance(item, tuple):
            return self.make(item) if self._target.required else self._staged(item)
        if len(item) != 2:
            raise InvalidOption(f"an item is a payload or a pair (payload, options), not a tuple of {len(item)}")
        payload, options = item
        if not isinstance(options, Mapping):
            raise InvalidOption(f"the options of an item must be a dict, not {options!r}")
        if unknown := options.keys() - EnqueueOptions.__annotations__.keys():
            known = ", ".join(EnqueueOptions.__annotations__)
            raise InvalidOption(f"unknown option {min(unknown, key=repr)!r}: the options are {known}")
        return self.make(payload, **options)

    def make(
        self,
        payload: Any,
        data: Any = ABSENT,
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
    ) -> StagedJob:
        """Make a job of the arguments of ``enqueue``, and check everything that can be checked now."""
        if queue is not None:
            check_name("queue", queue)
        if priority is not ABSENT:
            check_integer("priority", priority, *PRIORITY_RANGE)
        if max_attempts is not None:
            check_integer("max_attempts", max_attempts, 1, MAX_INTEGER)
        if run_at is not None:
            run_at = as_instant("run_at", run_at)
            if delay is not None:
                raise InvalidOption(f"run_at ({run_at}) and delay ({delay!r}) are given: leave one out")
        wait = None if delay is None else as_timedelta("delay", delay)
        unique = None
        if not (unique_key is None and unique_until is None and unique_for is None and on_conflict is None):
            unique = _unique(unique_key, unique_until, unique_for, on_conflict)
        if concurrency_key is not None:
            check_key("concurrency_key", concurrency_key)
            concurrency_limit = (
                1
                if concurrency_limit is None
                else check_integer("concurrency_limit", concurrency_limit, 1, MAX_SMALLINT)
            )
        elif concurrency_limit is not None:
            raise InvalidOption(f"concurrency_limit {concurrency_limit!r} needs a concurrency_key")
        meta_text = None if meta is None else encode_data(meta, self._max_bytes, "meta")
        own = None if values is None and not self._target.required else self._values(values)
        call = NO_OPTIONS
        if any(option is not None for option in (unique, concurrency_key, run_at, wait, meta_text, own)):
            call = CallOptions(unique, concurrency_key, concurrency_limit, run_at, wait, meta_text, own)
        overrides = _NO_OVERRIDES
        if not (queue is None and priority is ABSENT and max_attempts is None):
            overrides = _Overrides(queue, None if priority is ABSENT else priority, max_attempts)
        return self._staged(payload, data, of, overrides, call)

    def _staged(
        self,
        payload: Any,
        data: Any = ABSENT,
        of: Any = ABSENT,
        overrides: _Overrides = _NO_OVERRIDES,
        call: CallOptions = NO_OPTIONS,
    ) -> StagedJob:
        if data is ABSENT:
            kind, value = None, payload
        else:
            kind, value = check_name("kind", payload), data
        options: PayloadOptions = _DEFAULTS
        text: str | LatePayload
        if not _is_late(value):
            if of is not ABSENT:
                raise InvalidOption("of= is the argument of a late payload: give a function as the payload")
            options, text = self._encoded(kind, value, overrides, call)
        elif inspect.iscoroutinefunction(value):
            raise PayloadError("a late payload is made within the flush: give a plain function, not an async one")
        else:
            text = LatePayload(
                lambda: self._encoded(kind, value() if of is ABSENT else value(of), overrides, call), _calling_line()
            )
        return StagedJob(self._target, options, text, call)

    def _values(self, values: Mapping[str, Any] | None) -> Values | None:
        target = self._target
        name = target.mapper.class_.__name__
        if not isinstance(values, Mapping | None):
            raise InvalidOption(f"values must be a dict of {name}'s own columns, not {shown(values)}")
        given = dict(values or {})
        if unknown := given.keys() - target.columns.keys():
            own = ", ".join(target.columns) or "none"
            raise InvalidOption(
                f"values has {min(unknown, key=repr)!r}, which is no column of {name}'s own: those are {own}; enlist's"
                " columns are set by the options of enqueue"
            )
        if missing := target.required - given.keys():
            raise InvalidOption(
                f"{name}.{min(missing)} can be neither NULL nor defaulted: give it, values={{{min(missing)!r}: ...}}"
            )
        if not given:
            return None
        return Values(given, _calling_line() if any(map(callable, given.values())) else "")

    def _encoded(
        self, kind: str | None, value: Any, overrides: _Overrides, call: CallOptions
    ) -> tuple[PayloadOptions, str]:
        if kind is None:
            if not isinstance(value, JobPayload):
                raise PayloadError(_not_a_payload(value))
            options = options_of(value)
            if options.ordered:
                _check_ordered(type(value).__name__, call)
            text = encode(value, self._max_bytes)
        elif isinstance(value, JobPayload):
            raise PayloadError(
                f"the kind {kind!r} is given and a {type(value).__name__}, which has its own: leave the kind out"
            )
        else:
            options = PayloadOptions(kind)
            text = encode_data(value, self._max_bytes)
        if overrides is not _NO_OVERRIDES:
            options = overrides.applied_to(options)
        return options, text


def _unique(
    key: str | None, until: Until | None, hold: Duration | None, on_conflict: OnConflict | None
) -> UniqueKey | None:
    if until is not None and until not in get_args(Until):
        raise InvalidOption(f"unique_until must be one of {', '.join(get_args(Until))}, not {shown(until)}")
    if on_conflict is not None and on_conflict not in get_args(OnConflict):
        raise InvalidOption(f"on_conflict must be one of {', '.join(get_args(OnConflict))}, not {shown(on_conflict)}")
    held = None if hold is None else as_timedelta("unique_for", hold)
    replace = on_conflict == "replace"
    if key is None:
        for name, value in (("unique_until", until), ("unique_for", hold), ("on_conflict", replace or None)):
            if value is not None:
                raise InvalidOption(f"{name} is given without a unique_key: give both or none")
        return None
    default: Until = "started" if replace else "pruned"
    return UniqueKey(check_key("unique_key", key), until or default, held, replace)


def _check_ordered(name: str, call: CallOptions) -> None:
    if call.concurrency_key is None:
        raise InvalidOption(f"{name} is ordered: give a concurrency_key=, that of the jobs which are to run in order")
    if call.concurrency_limit != 1:
        raise InvalidOption(
            f"{name} is ordered, one job after the other: concurrency_limit must be 1, not {call.concurrency_limit};"
            " leave it out"
        )


def _is_late(value: Any) -> bool:
    return callable(value) and not isinstance(value, (JobPayload, type))


def _not_a_payload(value: Any) -> str:
    if isinstance(value, type):
        return f"the payload is the class {value.__name__}: give an instance, {value.__name__}(...)"
    if isinstance(value, dict):
        return "the payload is a dict without a kind: repo.enqueue(session, 'kind', {...}), or use a JobPayload class"
    if isinstance(value, str):
        return "a kind is given without its data: repo.enqueue(session, 'kind', {...})"
    if inspect.iscoroutine(value):
        value.close()
        return "the late payload is a coroutine: it is made within the flush, so give a plain function"
    return f"the payload is a {type(value).__name__}: derive its class from JobPayload"


def _calling_line() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "enlist":
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
