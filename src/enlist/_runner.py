"""Runs attempts, plain and async: one job in a transaction, or several one after the other."""

from __future__ import annotations

import asyncio
import datetime as dt
import itertools
import time
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import sqlalchemy as sa

from enlist._attempt import call_async, call_plain, job_of
from enlist._driver import brief
from enlist._finish import close_member, finish, finish_group, needs_commit
from enlist._groups import Group, GroupSizes
from enlist._guard import Guard
from enlist._log import Log
from enlist._session import GuardedSession
from enlist._timeouts import Timeouts
from enlist.events import EventName
from enlist.exceptions import LeaseLost
from enlist.retry import summarize

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.ext.asyncio import AsyncSession

    from enlist._database import Database
    from enlist._endings import Endings
    from enlist._engines import AsyncSessions, SyncSessions
    from enlist._slots import Run, Slots
    from enlist._threads import DaemonExecutor
    from enlist.events import Events
    from enlist.job import Job

__all__ = ["Runner"]

logger = Log("enlist.worker")

T = TypeVar("T")

START_PAUSE: Final = dt.timedelta(seconds=1)
"""How long a job waits whose start could not be written: another try at once would be a hot loop."""

NO_COMMIT: Final = frozenset({"stopped", "timed out", "cancelled", "lease lost"})
"""Why an attempt was given up that must not commit even if it still can: with its row's lock the fence lets it pass."""


class Runner:
    """Runs a job that has a slot, on the thread or in the task that calls it."""

    def __init__(
        self,
        database: Database,
        endings: Endings,
        events: Events,
        *,
        sync: SyncSessions | None,
        asynchronous: AsyncSessions | None,
        lease: dt.timedelta,
        aside: DaemonExecutor,
        timed_out: Callable[[Run], None],
    ) -> None:
        """:param aside: threads for blocking calls around async handlers; :param timed_out: told of a plain handler."""
        self._database = database
        self._endings = endings
        self._events = events
        self._sync = sync
        self._async = asynchronous
        self._lease = lease
        self._aside = aside
        self._sizes = GroupSizes()
        self._in_handlers: set[Run] = set()
        self.timeouts = Timeouts(timed_out)
        self.slots: Slots
        self.resources: Any = None
        """What handlers see as ``job.resources``."""
        self.isolation: dict[bool, str | None] = {}
        """The sessions' isolation level, by whether they are async."""

    @property
    def stuck(self) -> int:
        """How many plain handlers were given up and have not come back."""
        runs = self._in_handlers.copy()
        return sum(run.abandoned is not None and not run.handler.is_async for run in runs)

    # -- plain handlers ----------------------------------------------------------------------------------------

    def run(self, run: Run) -> int:
        """Run a job, and those that join it; return how many."""
        assert self._sync is not None
        if (size := self._sizes.size_for(run)) == 1:
            self._attempt(run)
            return 1
        group = Group(size)
        guard = None
        try:
            session = self._sync.open()
            try:
                following: Run | None = run
                while following is not None:
                    job = self._prepare(following)
                    if job is not None:
                        group.enter(following)
                        guard = self._guard_next(session, guard, following)
                        self._call(following, session, job)
                        group.leave()
                        if not _may_go_on(following, session):
                            break
                    following = self.slots.join(run) if group.takes_more else None
                committed = group.is_whole() and finish_group(session, group.members)
            finally:
                self._sync.discard(session)
        except BaseException as error:
            left = self._left_of(group, guard, error)
        else:
            left = []
            self._group_succeeded(group, committed)
        for member in left:  # not in the block above: its exception would be told as the context of theirs
            group.alone(member)
            try:
                self._attempt(member)
            except BaseException as fault:  # the others have not run yet
                self._endings.unexpected(member, fault)
        return len(group.members)

    def _attempt(self, run: Run) -> None:
        """Run a job by itself."""
        assert self._sync is not None
        job = self._prepare(run)
        if job is None:
            return
        wait: float | None = None
        for rerun in itertools.count():
            guard = self._guard(run)
            try:
                if rerun:
                    time.sleep(wait or 0.0)
                    _check_wanted(run)
                    job = job_of(run, self.resources)  # as it is stored: the handler may have changed it
                session = self._sync.open()
                try:
                    session.guard_by(guard)
                    self._call(run, session, job)
                    if run.abandoned in NO_COMMIT:
                        raise LeaseLost(run.id)
                    committed = finish(session)
                finally:
                    self._sync.discard(session)
            except BaseException as error:
                wait = self._raised(run, guard, error, rerun)
                if wait is None:
                    return
            else:
                self._succeeded(run, committed)
                return

    def _call(self, run: Run, session: GuardedSession, job: Job[Any]) -> None:
        self._enter(run)
        self.timeouts.watch(run)
        try:
            call_plain(run, session, job)
        finally:
            self.timeouts.forget(run)
            self._leave(run)

    # -- async handlers ----------------------------------------------------------------------------------------

    async def run_async(self, run: Run) -> int:
        """The same for an async handler."""
        assert self._async is not None
        if (size := self._sizes.size_for(run)) == 1:
            await self._attempt_async(run)
            return 1
        group = Group(size)
        guard = None
        try:
            session = self._async.open()
            try:
                sync_session = cast("GuardedSession", session.sync_session)
                following: Run | None = run
                while following is not None:
                    following.task = run.task
                    job = self._prepare(following)
                    if job is not None:
                        group.enter(following)
                        guard = self._guard_next(sync_session, guard, following)
                        await self._call_async(following, session, job)
                        group.leave()
                        if not await session.run_sync(lambda s, of=following: _may_go_on(of, s)):  # type: ignore[misc]
                            break
                    following = self.slots.join(run) if group.takes_more else None
                committed = group.is_whole() and await _on(session, finish_group, group.members)
            finally:
                await self._async.discard(session)
        except BaseException as error:
            left = await self._run_aside(self._left_of, group, guard, error)
        else:
            left = []
            self._group_succeeded(group, committed)
        for member in left:
            group.alone(member)
            try:
                await self._attempt_async(member)
            except BaseException as fault:
                self._endings.unexpected(member, fault)
        return len(group.members)

    async def _attempt_async(self, run: Run) -> None:
        task = asyncio.current_task()
        while task is not None and task.cancelling():  # one before it in its group was cancelled
            task.uncancel()
        # Decoding and, for a careful job, one short statement; off the loop only where it does IO.
        job = await self._run_aside(self._prepare, run) if run.careful else self._prepare(run)
        if job is None:
            return
        assert self._async is not None
        wait: float | None = None
        for rerun in itertools.count():
            guard = self._guard(run)
            try:
                if rerun:
                    await asyncio.sleep(wait or 0.0)
                    _check_wanted(run)
                    job = job_of(run, self.resources)
                session = self._async.open()
                try:
                    sync_session = cast("GuardedSession", session.sync_session)
                    sync_session.guard_by(guard)
                    await self._call_async(run, session, job)
                    if run.abandoned in NO_COMMIT:
                        raise LeaseLost(run.id)
                    committed = needs_commit(sync_session) and await _on(session, finish)
                finally:
                    await self._async.discard(session)
            except BaseException as error:
                wait = await self._run_aside(self._raised, run, guard, error, rerun)
                if wait is None:
                    return
            else:
                self._succeeded(run, committed)
                return

    async def _call_async(self, run: Run, session: AsyncSession, job: Job[Any]) -> None:
        self._enter(run)
        try:
            await call_async(run, session, job)
        finally:
            self._leave(run)

    async def _run_aside(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function that blocks, off the loop; to its end, even if the task is cancelled meanwhile."""
        future = asyncio.get_running_loop().run_in_executor(self._aside, function, *arguments)
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError:
                continue
        return future.result()

    # -- before the handler ------------------------------------------------------------------------------------

    def _prepare(self, run: Run) -> Job[Any] | None:
        """Make the job that the handler sees; None if the job is not ours any more or was ended here."""
        run.started = time.monotonic()
        if run.ended:
            return None
        if run.abandoned is not None:
            if run.abandoned == "stopped":
                self._endings.release(run)
            return None
        if run.lease_ends < run.started:
            self._endings.lost(run)
            return None
        if run.careful and not self._write_start(run):
            return None
        try:
            job = job_of(run, self.resources)
        except BaseException as error:  # a validator may raise SystemExit
            self._endings.failed(run, error)
            return None
        if run.abandoned is not None:  # while its payload was read
            return self._prepare(run)
        run.finished = 0.0
        if not run.began:  # else it is run again, in the same attempt
            run.began = time.monotonic()
            self._events.emit(EventName.STARTED, run)
        return job

    def _write_start(self, run: Run) -> bool:
        """Commit that a careful job's handler starts now: should the process die, it is this job's doing."""
        try:
            rows = self._database.execute(self._database.statements.start, {"job_id": run.id, "token": run.token})
        except sa.exc.SQLAlchemyError as error:
            text = "%s: its start could not be written, it is given back: %s"
            logger.warning(text, run, brief(error), extra=run.extra())
            self._endings.release(run, START_PAUSE)
            return False
        if not rows:
            self._endings.lost(run)
        return bool(rows)

    def _guard(self, run: Run) -> Guard:
        isolation = self.isolation.get(run.handler.is_async)
        return Guard(self._database.statements, self._database.record, run, lease=self._lease, isolation=isolation)

    def _guard_next(self, session: GuardedSession, guard: Guard | None, run: Run) -> Guard:
        """Guard a group's session for its next job."""
        if guard is None:
            guard = self._guard(run)
            session.guard_by(guard)
        else:
            guard.follow(session, run.id, run.token)
        return guard

    def _enter(self, run: Run) -> None:
        """Note that the handler is called now.

        :raises LeaseLost: it is not to be. Who gives an attempt up says so first and then cancels what runs.
        """
        run.in_handler = True
        self._in_handlers.add(run)
        if run.abandoned is not None:
            self._leave(run)
            raise LeaseLost(run.id, run.token)

    def _leave(self, run: Run) -> None:
        run.in_handler = False
        self._in_handlers.discard(run)

    # -- after it ----------------------------------------------------------------------------------------------

    def _succeeded(self, run: Run, committed: bool) -> None:
        self._sizes.went_well(run.handler, 1)
        self._endings.succeeded(run, committed)

    def _raised(self, run: Run, guard: Guard, error: BaseException, rerun: int) -> float | None:
        self._sizes.failed(run.handler)
        return self._endings.raised(run, guard, error, rerun)

    def _group_succeeded(self, group: Group, committed: bool) -> None:
        for run in group.left:
            self._succeeded(run, committed)

    def _left_of(self, group: Group, guard: Guard | None, error: BaseException) -> list[Run]:
        """The same as :meth:`_ungrouped`; whatever goes wrong there, no member is forgotten."""
        try:
            return self._ungrouped(group, guard, error)
        except BaseException as fault:
            if not group.members:
                raise
            for run in group.left:
                self._endings.unexpected(run, fault)
            return []

    def _ungrouped(self, group: Group, guard: Guard | None, error: BaseException) -> list[Run]:
        """What is to be run by itself, since an exception came out of a group: nothing of it is committed."""
        group.leave()
        if not group.members:
            raise error
        self._sizes.failed(group.members[0].handler)
        if self._endings.group_landed(group.members, guard, error):
            return []
        runs = group.left
        if isinstance(error, LeaseLost):
            for run in runs:
                if run.id == error.job_id and error.token in {None, run.token} and not self._endings.is_held(run):
                    self._endings.lost(run)
        elif len(runs) == 1 and guard is not None and (len(group.members) == 1 or not guard.flushes_together):
            # As if it had run by itself: nobody else's rows were in its flush.
            wait = self._endings.raised(runs[0], guard, error, 0)
            return [] if wait is None else runs
        if len(runs) > 1:
            logger.info("%d jobs of kind %s are run one by one: %s", len(runs), runs[0].kind, summarize(error))
        return runs


def _check_wanted(run: Run) -> None:
    """Do not run again what was given up meanwhile.

    :raises LeaseLost: it was.
    """
    if run.abandoned is not None:
        raise LeaseLost(run.id, run.token)


def _may_go_on(run: Run, session: GuardedSession) -> bool:
    """End a member's part of its group's transaction; return whether another may follow."""
    _check_wanted(run)
    return close_member(session)


async def _on(session: AsyncSession, function: Callable[..., T], *arguments: Any) -> T:
    """Call a function with an AsyncSession's guarded session, where it may do IO."""
    return await session.run_sync(lambda sync_session: function(sync_session, *arguments))
