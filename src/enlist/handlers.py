"""The registry: which function handles which kind of job, and how."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeAlias, TypeVar, get_args, overload

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from tenacity.wait import wait_base

from enlist._options import Duration, as_timedelta, check_boolean, check_integer, check_name
from enlist.exceptions import HandlerError, InvalidOption
from enlist.job import Job
from enlist.payload import JobPayload, options_of
from enlist.retry import DEFAULT_WAIT

__all__ = ["Handler", "HandlerRegistry"]

MOST_PER_COMMIT: Final = 1000
"""Most jobs of one transaction."""

Flush: TypeAlias = Literal["job", "group"]
OnCommit: TypeAlias = Literal["refuse", "savepoint"]
Complete: TypeAlias = Literal["batch", "commit"]
OnMismatch: TypeAlias = Literal["retry", "dead"]

PayloadT = TypeVar("PayloadT", bound=JobPayload)
DataT = TypeVar("DataT")
SessionT = TypeVar("SessionT", bound=Session)
AsyncSessionT = TypeVar("AsyncSessionT", bound=AsyncSession)

SyncFunction = Callable[[SessionT, Job[DataT]], None]
AsyncFunction = Callable[[AsyncSessionT, Job[DataT]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Handler:
    """A registered function and its options."""

    kind: str
    function: Callable[[Any, Job[Any]], Any]
    payload_type: type[JobPayload] | None
    is_async: bool
    timeout_seconds: float | None = None
    wait: wait_base = DEFAULT_WAIT
    hold_lock: bool = False
    commit_every: int = 1
    """Most jobs of one transaction."""
    flush: Flush = "job"
    on_commit: OnCommit = "refuse"
    complete: Complete = "batch"
    on_mismatch: OnMismatch = "retry"


class HandlerDecorator(Protocol[DataT]):
    """What :meth:`HandlerRegistry.handler` returns: it registers a function and gives it back as it was."""

    @overload
    def __call__(self, function: SyncFunction[SessionT, DataT]) -> SyncFunction[SessionT, DataT]: ...

    @overload
    def __call__(self, function: AsyncFunction[AsyncSessionT, DataT]) -> AsyncFunction[AsyncSessionT, DataT]: ...


class HandlerRegistry:
    """The handlers of an application. A worker claims only the kinds that its registry has.

    ::

        handlers = HandlerRegistry()


        @handlers.handler(SendReceipt, timeout=30)
        def send_receipt(session: Session, job: Job[SendReceipt]) -> None:
            session.add(Receipt(order_id=job.payload.order_id))
    """

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}

    @overload
    def handler(
        self,
        payload: type[PayloadT],
        *,
        timeout: Duration | None = None,
        wait: wait_base = DEFAULT_WAIT,
        hold_lock: bool = False,
        commit_every: int = 1,
        flush: Flush = "job",
        on_commit: OnCommit = "refuse",
        complete: Complete = "batch",
        on_mismatch: OnMismatch = "retry",
    ) -> HandlerDecorator[PayloadT]: ...

    @overload
    def handler(
        self,
        payload: str,
        *,
        timeout: Duration | None = None,
        wait: wait_base = DEFAULT_WAIT,
        hold_lock: bool = False,
        commit_every: int = 1,
        flush: Flush = "job",
        on_commit: OnCommit = "refuse",
        complete: Complete = "batch",
        on_mismatch: OnMismatch = "retry",
    ) -> HandlerDecorator[dict[str, Any]]: ...

    def handler(
        self,
        payload: type[JobPayload] | str,
        *,
        timeout: Duration | None = None,
        wait: wait_base = DEFAULT_WAIT,
        hold_lock: bool = False,
        commit_every: int = 1,
        flush: Flush = "job",
        on_commit: OnCommit = "refuse",
        complete: Complete = "batch",
        on_mismatch: OnMismatch = "retry",
    ) -> HandlerDecorator[Any]:
        """Register the decorated function for a kind of job.

        The function takes ``(session, job)``. A plain function gets a :class:`~sqlalchemy.orm.Session` and runs on
        a thread; an async one gets an :class:`~sqlalchemy.ext.asyncio.AsyncSession` and runs on the worker's event
        loop. What it writes with that session commits in one transaction with the job's status. No transaction is
        open until the function first uses the session, so slow calls go before it. It must not commit.

        :param payload: the payload class, or a kind's name (then ``job.payload`` is a dict).
        :param timeout: longest run, in seconds or as a timedelta; default none. An async function is cancelled; a
            plain one cannot be stopped: its attempt is failed, and what it still does is rolled back.
        :param wait: when to run again after a failure: a tenacity ``wait_*`` strategy; default exponential with
            jitter from 5 s to 1 h.
        :param hold_lock: lock the job's row from the session's first use to its commit. The lease cannot be lost
            meanwhile; by itself where the session is REPEATABLE READ or SERIALIZABLE.
        :param commit_every: up to how many jobs share a Session and a transaction, one after the other, when several
            wait; default 1, at most 1000. For many small jobs: a commit is most of what such a job costs. If one of
            them fails the transaction is rolled back, and each runs by itself, in the same attempt: so the function
            may run twice, its database effects happen once. The locks that it takes are held while the next ones
            run: jobs that write the same rows should do so in one order.
        :param flush: ``"job"`` (default) flushes the Session after each job; ``"group"``, with ``commit_every`` of 2 or
            more, has what jobs have added inserted together, at the group's end or before a later job's flush or
            statement. That halves what a job costs which does nothing but ``session.add()``; one that reads or
            enqueues has a flush of its own. Defaults, types, listeners and triggers run at that one flush: they must
            not depend on which job is running.
        :param on_commit: what ``session.commit()`` and ``rollback()`` do: ``"refuse"`` (default) raises
            :class:`~enlist.CommitRefused`; ``"savepoint"``, for code that commits by itself, makes each commit a
            savepoint to which a later rollback returns. All of it commits with the job's status, or nothing.
        :param complete: how a job whose function never used its Session is set done: ``"batch"`` (default) with
            others, some milliseconds later; ``"commit"`` before the slot is free. Should the worker die between,
            the job runs again.
        :param on_mismatch: what becomes of a job whose payload does not fit the class: ``"retry"`` (default), a
            failed attempt, so that a worker of another release may take it; ``"dead"``, at once. What a newer version
            of the class has written is put back for a worker that knows it, for a day, whatever this says.
        :raises HandlerError: the kind has a handler already, the function does not take ``(session, job)``, or
            the options exclude each other.
        :raises InvalidOption: an option is not what it may be.
        """
        if isinstance(payload, str):
            kind, payload_type = check_name("kind", payload), None
        elif isinstance(payload, type) and issubclass(payload, JobPayload):
            kind, payload_type = options_of(payload).kind, payload
        else:
            raise InvalidOption(f"a handler is registered for a JobPayload class or a kind's name, not for {payload!r}")
        seconds = None if timeout is None else as_timedelta("timeout", timeout).total_seconds()
        if seconds is not None and seconds <= 0:
            raise InvalidOption(f"timeout must be more than 0 seconds, not {timeout!r}; None is no limit")
        if not isinstance(wait, wait_base):
            raise InvalidOption(f"wait must be a tenacity wait strategy, such as tenacity.wait_fixed(5), not {wait!r}")
        check_boolean("hold_lock", hold_lock)
        check_integer("commit_every", commit_every, 1, MOST_PER_COMMIT)
        _check_choice("flush", flush, Flush)
        _check_choice("on_commit", on_commit, OnCommit)
        _check_choice("complete", complete, Complete)
        _check_choice("on_mismatch", on_mismatch, OnMismatch)
        if commit_every > 1:
            _check_group(kind, payload_type, hold_lock=hold_lock, on_commit=on_commit)
        elif flush == "group":
            raise HandlerError(
                f"kind {kind!r}: flush='group' is for jobs that share a transaction; give commit_every=2 or more, or"
                " leave it out"
            )

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            self._add(
                Handler(
                    kind,
                    function,
                    payload_type,
                    is_async=_check_signature(kind, function),
                    timeout_seconds=seconds,
                    wait=wait,
                    hold_lock=hold_lock,
                    commit_every=commit_every,
                    flush=flush,
                    on_commit=on_commit,
                    complete=complete,
                    on_mismatch=on_mismatch,
                )
            )
            return function

        return typing.cast("HandlerDecorator[Any]", register)

    def include(self, other: HandlerRegistry) -> None:
        """Take over the handlers of another registry.

        :raises HandlerError: both have a handler for a kind; then none is taken over.
        """
        for kind in other._handlers:
            self._check_new(kind, other._handlers[kind].function)
        for handler in other._handlers.values():
            self._add(handler)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that have a handler, sorted."""
        return tuple(sorted(self._handlers))

    def __getitem__(self, kind: str) -> Handler:
        return self._handlers[kind]

    def __contains__(self, kind: object) -> bool:
        return kind in self._handlers

    def __iter__(self) -> Iterator[Handler]:
        return iter(self._handlers.values())

    def __len__(self) -> int:
        return len(self._handlers)

    def _check_new(self, kind: str, function: Callable[..., Any]) -> None:
        if (known := self._handlers.get(kind)) is not None:
            raise HandlerError(
                f"kind {kind!r} already has the handler {_name(known.function)}; {_name(function)} cannot be"
                " registered for it too: a kind has one handler"
            )

    def _add(self, handler: Handler) -> None:
        self._check_new(handler.kind, handler.function)
        self._handlers[handler.kind] = handler


def _check_choice(name: str, value: object, choices: Any) -> None:
    if value not in get_args(choices):
        known = " or ".join(repr(choice) for choice in get_args(choices))
        raise InvalidOption(f"{name} must be {known}, not {value!r}")


def _check_group(kind: str, payload_type: type[JobPayload] | None, *, hold_lock: bool, on_commit: OnCommit) -> None:
    """Refuse what cannot be had together with several jobs in a transaction."""
    if hold_lock:
        raise HandlerError(
            f"kind {kind!r}: commit_every and hold_lock exclude each other: a row would stay locked while the other"
            " jobs of the transaction run; leave one of them out"
        )
    if on_commit == "savepoint":
        raise HandlerError(
            f"kind {kind!r}: commit_every and on_commit='savepoint' exclude each other: savepoints cost what a shared"
            " commit saves; leave one of them out"
        )
    if payload_type is not None and options_of(payload_type).ordered:
        raise HandlerError(
            f"kind {kind!r} is ordered: its jobs run one after the other, each when the one before has committed, so"
            " they cannot share a commit; leave commit_every out"
        )


def _name(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"


def _check_signature(kind: str, function: Callable[..., Any]) -> bool:
    """Return whether the function is async; refuse one that cannot be called with (session, job)."""
    if not callable(function):
        raise HandlerError(f"the handler of kind {kind!r} is not callable: {function!r}")
    if isinstance(function, type):
        raise HandlerError(
            f"the handler {_name(function)} is a class: calling it would only make an instance; register an instance's"
            " method"
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise HandlerError(f"the handler {_name(function)} is a generator; it must return, not yield")
    call = type(function).__call__ if not inspect.isroutine(function) else function
    is_async = inspect.iscoroutinefunction(inspect.unwrap(function)) or inspect.iscoroutinefunction(call)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some callables written in C have none
        return is_async
    try:
        signature.bind(object(), object())
    except TypeError as error:
        raise HandlerError(
            f"the handler {_name(function)}{signature} must take two positional arguments (session, job): {error}"
        ) from None
    _check_session(function, signature, is_async=is_async)
    return is_async


def _check_session(function: Callable[..., Any], signature: inspect.Signature, *, is_async: bool) -> None:
    """Refuse a session annotation of the other world: it would fail at the first statement, in production."""
    first = next(iter(signature.parameters.values()))
    annotation = first.annotation
    if isinstance(annotation, str):
        try:
            annotation = typing.get_type_hints(function).get(first.name)
        except Exception:  # names known to the type checker only
            return
    if not isinstance(annotation, type):
        return
    if is_async and issubclass(annotation, Session):
        raise HandlerError(f"the handler {_name(function)} is async: its session is an AsyncSession, not a Session")
    if not is_async and issubclass(annotation, AsyncSession):
        raise HandlerError(
            f"the handler {_name(function)} is a plain function: its session is a Session; make it `async def`"
            " to get an AsyncSession"
        )
