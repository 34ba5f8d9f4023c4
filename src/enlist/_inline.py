"""Runs due jobs one after the other within the transaction of somebody's session: for tests, in place of a worker.

The statements, the guarded session and the meaning of an exception are the worker's. What differs is where it happens:
each handler's session has joined the caller's connection, so its commit is the release of a savepoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import itertools
import logging
import math
import time
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from enlist._attempt import call_async, call_plain, ending, failure, job_of, reruns, timed_out
from enlist._completer import Settlement, parameters_of
from enlist._driver import is_autocommit, is_transaction_over
from enlist._finish import finish
from enlist._guard import Guard
from enlist._joined import discard, join, join_async
from enlist._slots import Run
from enlist._statements import NO_MARKS, ahead, keys, statements_for
from enlist.exceptions import ConfigurationError, EnlistError, LeaseLost, SessionError
from enlist.job import Retry
from enlist.models import JobStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from enlist.handlers import HandlerRegistry
    from enlist.job import Job
    from enlist.models import JobRecordMixin

__all__ = ["DrainLimitExceeded", "Inline"]

logger = logging.getLogger("enlist.testing")

T = TypeVar("T")

CAUGHT: Final = (Exception, SystemExit, asyncio.CancelledError)
"""What fails an attempt. The rest ends the drain: the interrupt of a keyboard, a test framework's own exceptions."""

LEASE: Final = dt.timedelta(days=1)
"""Nobody else sees the row while it is running; long enough for a debugger."""

KEY_TRIES: Final = 100
KEY_SECONDS: Final = 0.05
"""How often, and in what distance, a concurrency key is asked for that another open transaction has in use."""


class DrainLimitExceeded(EnlistError):
    """``drain()`` has run as many jobs as its ``limit`` and more are due: a chain of jobs without an end, as a rule."""


class Inline:
    """Runs jobs in the transaction of ``session``. With an AsyncSession its plain methods run in ``run_sync``."""

    def __init__(
        self,
        session: Session,
        handlers: HandlerRegistry,
        record: type[JobRecordMixin],
        *,
        asynchronous: AsyncSession | None = None,
        registry: Any = None,
        queues: list[str] | None = None,
        with_scheduled: bool = False,
        raise_errors: bool = False,
        limit: int,
        resources: Any = None,
    ) -> None:
        """:param registry: that of the application's scoped_session or async_scoped_session, if it uses one."""
        self._session = session
        self._async = asynchronous
        self._registry = registry
        self._handlers = handlers
        self._record = record
        self._mapper = sa.inspect(record)
        table = self._mapper.local_table
        assert isinstance(table, sa.Table)
        self._statements = statements_for(table)
        self._write = sa.update(table)  # for sessions that send reads elsewhere, and tell them by the statement
        self._asked = {"kinds": list(handlers.kinds), "queues": queues}
        self._with_scheduled = with_scheduled
        self._raise_errors = raise_errors
        self._limit = limit
        self._resources = resources
        self._root: sa.RootTransaction | None = None
        self.endings: list[tuple[Run, Settlement | None, BaseException | None]] = []
        """The runs so far: how each ended, None for done, and by what exception."""

    def _connection(self) -> sa.Connection:
        return self._session.connection(bind_arguments={"mapper": self._mapper, "clause": self._write})

    def run(self) -> None:
        """Run what is due until nothing is."""
        try:
            self._open()
            while (run := self._next()) is not None:
                self._attempt(run)
        finally:
            self._session.expire_all()

    async def run_async(self) -> None:
        """The same with an AsyncSession."""
        try:
            await self._aside(self._open)
            while (run := await self._aside(self._next)) is not None:
                if run.handler.is_async:
                    await self._attempt_async(run)
                else:
                    await self._aside(self._attempt, run)
        except BaseException:
            self._session.expire_all()
            raise
        await self._aside(_read_again, self._session)

    async def _aside(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function that does IO on the AsyncSession's connection."""
        assert self._async is not None
        return await self._async.run_sync(lambda _: function(*arguments))

    # -- the claim ---------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Look whether the session's transaction can hold what handlers do."""
        connection = self._connection()
        if is_autocommit(connection):
            raise SessionError(
                "the session's connection is in AUTOCOMMIT mode: drain() runs handlers in savepoints of its"
                " transaction, and there is none; use an engine without isolation_level='AUTOCOMMIT'"
            )
        self._root = connection.get_transaction()

    def _next(self) -> Run | None:
        """Claim the job whose turn it is; None if none is left.

        :raises ConfigurationError: its handler cannot be run here; it is still queued.
        :raises DrainLimitExceeded: ``limit`` runs are over; it is still queued.
        """
        self._session.flush()  # each time: a handler may have used the caller's session
        run = self._claim()
        while run is None and self._with_scheduled and self._hasten():
            run = self._claim()
        if run is None:
            return None
        if len(self.endings) >= self._limit:
            self._give_back(run)
            raise DrainLimitExceeded(
                f"drain() has run {self._limit} jobs and one of kind {run.kind!r} is due: do handlers enqueue each"
                f" other for ever? If not, raise limit={self._limit}"
            )
        if run.handler.is_async and self._async is None:
            self._give_back(run)
            raise ConfigurationError(
                f"the handler of kind {run.kind!r} is async, and drain() was given a Session: give it an AsyncSession,"
                f" await drain(async_session, handlers); job {run.id} is still queued"
            )
        return run

    def _claim(self) -> Run | None:
        connection = self._connection()
        for queue in connection.execute(self._statements.front, self._asked).scalars().all():
            parameters = {
                **NO_MARKS,
                **ahead(()),
                "look_first": True,
                "after_keys": [None],
                "queues": [queue],
                "limits": [1],
                "kinds": self._asked["kinds"],
                "careful": True,
                "worker": "enlist.testing",
                "lease": LEASE,
            }
            rows: Sequence[sa.Row[Any]] = connection.execute(self._statements.claim, parameters).all()
            if any(row.id is None and row.kind == "keyed" for row in rows):
                rows = self._claim_with_keyed(parameters)
            rows = [row for row in rows if row.id is not None]
            if rows:
                return Run.of(rows[0], self._handlers[rows[0].kind], math.inf)
        return None

    def _claim_with_keyed(self, parameters: dict[str, Any]) -> Sequence[sa.Row[Any]]:
        """Take the first job in a line in which some have a concurrency key."""
        connection = self._connection()
        seen = [row for row in connection.execute(self._statements.look, parameters) if row.part == "job"]
        told = {**parameters, **ahead(seen), "look_first": False}
        rows = [row for row in connection.execute(self._statements.claim_among, told) if row.id is not None]
        return rows or (self._claim_keyed(seen, told) if seen else [])

    def _claim_keyed(self, seen: Sequence[sa.Row[Any]], parameters: dict[str, Any]) -> Sequence[sa.Row[Any]]:
        connection = self._connection()
        key = seen[0].concurrency_key
        for _ in range(KEY_TRIES):
            if connection.execute(self._statements.lock_keys, {"keys": [key]}).first() is not None:
                return connection.execute(self._statements.claim_keyed, {**parameters, **keys(seen)}).all()
            # The server sleeps: with an AsyncSession the event loop goes on meanwhile.
            connection.execute(self._statements.pause, {"seconds": KEY_SECONDS})
        raise SessionError(
            f"jobs with the concurrency key {key!r} are in use by another transaction that is still open, after"
            f" {KEY_TRIES * KEY_SECONDS:g} seconds: end it before drain(), and give tests that run at the same time"
            " on one database keys of their own"
        )

    def _hasten(self) -> bool:
        return bool(self._connection().execute(self._statements.hasten, self._asked).all())

    def _give_back(self, run: Run) -> None:
        self._settle(Settlement(run, JobStatus.QUEUED, returned=1))

    # -- an attempt --------------------------------------------------------------------------------------------

    def _attempt(self, run: Run) -> None:
        """Run a plain handler, and write how it ended."""
        job = self._prepare(run)
        if job is None:
            return
        for rerun in itertools.count():
            guard = self._guard(run)
            try:
                session = join(self._session, self._connection(), guard)
                try:
                    self._enter(session if self._async is None else None)
                    call_plain(run, session, job)
                    seconds = run.handler.timeout_seconds
                    if seconds is not None and time.monotonic() > run.started + seconds:
                        raise timed_out(run)
                    committed = finish(session)
                finally:
                    self._leave()
                    discard(session)
            except CAUGHT as error:
                if not self._ended(run, guard, error, rerun):
                    return
            else:
                self._succeeded(run, committed)
                return

    async def _attempt_async(self, run: Run) -> None:
        """The same for an async handler."""
        assert self._async is not None
        job = await self._aside(self._prepare, run)
        if job is None:
            return
        for rerun in itertools.count():
            guard = self._guard(run)
            try:
                bind = await self._async.connection(bind_arguments={"mapper": self._mapper, "clause": self._write})
                session = join_async(self._async, bind, guard)
                try:
                    self._enter(session)
                    await call_async(run, session, job)
                    committed = await session.run_sync(cast("Any", finish))
                finally:
                    self._leave()
                    await session.run_sync(discard)
            except CAUGHT as error:
                if not await self._aside(self._ended, run, guard, error, rerun):
                    return
            else:
                await self._aside(self._succeeded, run, committed)
                return

    def _prepare(self, run: Run) -> Job[Any] | None:
        """Make the job that the handler sees; None if that failed, and with it the attempt."""
        if run.careful:
            parameters = {"job_id": run.id, "token": run.token}
            self._connection().execute(self._statements.start, parameters)
        run.started = time.monotonic()
        try:
            return job_of(run, self._resources)
        except CAUGHT as error:
            self._end(failure(run, error), error)
            return None

    def _guard(self, run: Run) -> Guard:
        return Guard(self._statements, self._record, run, lease=LEASE)

    def _enter(self, session: Session | AsyncSession | None) -> None:
        """Have the application's scoped_session give the handler's session, as a worker does."""
        if self._registry is not None and session is not None:
            self._registry.set(session)

    def _leave(self) -> None:
        if self._registry is not None:
            self._registry.set(self._async or self._session)

    # -- how it ended ------------------------------------------------------------------------------------------

    def _succeeded(self, run: Run, committed: bool) -> None:
        self._check_transaction(run, None)
        if not committed:
            parameters = {"ids": [run.id], "tokens": [run.token]}
            if not self._connection().execute(self._statements.complete, parameters).all():
                raise LeaseLost(run.id)
        self.endings.append((run, None, None))

    def _ended(self, run: Run, guard: Guard, error: BaseException, rerun: int) -> bool:
        """Write an attempt's end by an exception; return whether it is to be run again instead."""
        if isinstance(error, asyncio.CancelledError) and _is_being_cancelled():
            raise error
        self._check_transaction(run, error)
        if guard.committing and self._is_done(run):
            logger.warning("%s: its effects are there, though a listener raised after its commit", run, exc_info=error)
            self.endings.append((run, None, error))
            return False
        if rerun < reruns(error):
            return True
        self._end(ending(run, error), error)
        return False

    def _end(self, settlement: Settlement, error: BaseException) -> None:
        self._settle(settlement)
        self.endings.append((settlement.run, settlement, error))
        failed = settlement.status is not JobStatus.CANCELLED and not settlement.returned
        if self._raise_errors and failed and not isinstance(error, Retry):
            raise error

    def _settle(self, settlement: Settlement) -> None:
        if not self._connection().execute(self._statements.settle, parameters_of([settlement])).all():
            raise LeaseLost(settlement.run.id)

    def _is_done(self, run: Run) -> bool:
        row = self._connection().execute(self._statements.states, {"ids": [run.id]}).one()
        return bool(row.status is JobStatus.DONE and row.lease_token == run.token)

    def _check_transaction(self, run: Run, error: BaseException | None) -> None:
        """Stop where a handler has ended more than its savepoint: nothing could be rolled back any more."""
        root = self._root
        assert root is not None
        connection = root.connection
        if (
            not root.is_active
            or connection.closed
            or connection.invalidated
            or is_transaction_over(connection.connection.driver_connection)
        ):
            raise SessionError(
                f"the transaction that drain() runs in was ended while the handler of kind {run.kind!r} ran: by"
                " commit() or rollback() of the connection, by a lost connection, or by a timeout within a statement"
            ) from error


def _read_again(session: Session) -> None:
    """Load what was loaded before: an expired attribute of an AsyncSession's object cannot be read."""
    loaded = []
    for entity in session.identity_map.values():
        state = sa.inspect(entity)
        loaded.append((entity, state.dict.keys() & state.mapper.attrs.keys()))
    session.expire_all()
    for entity, names in loaded:
        if names:
            with contextlib.suppress(sa.exc.InvalidRequestError):  # a handler has deleted its row
                session.refresh(entity, names)


def _is_being_cancelled() -> bool:
    """Whether it is the test that is cancelled, not only something that the handler awaited."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return False
    return task is not None and task.cancelling() > 0
