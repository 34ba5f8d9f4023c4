"""Runs one attempt and says how it ended."""

from __future__ import annotations

import asyncio
import datetime as dt
import heapq
import itertools
import logging
import random
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Final, TypeVar

import sqlalchemy as sa

from enlist._attempt import call_async, call_plain, ending, failure, job_of, reruns, timed_out
from enlist._completer import Completer, log_lost
from enlist._driver import brief, trace
from enlist._loop import Loop
from enlist._session import Guard, GuardedSession, finish
from enlist._threads import DaemonExecutor, Threads
from enlist.exceptions import LeaseLost
from enlist.job import Job
from enlist.models import JobStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from sqlalchemy.orm import Session

    from enlist._database import Database
    from enlist._engines import AsyncSessions, SyncSessions
    from enlist._leases import Leases
    from enlist._slots import Run, Slots

__all__ = ["Executor"]

logger = logging.getLogger("enlist.worker")

T = TypeVar("T")

LONGEST_RERUN_WAIT: Final = 0.1

ASYNC_HANDLERS_THREADS: Final = 32
"""Most threads for what async handlers give to ``asyncio.to_thread``."""

FATE_LOOKUPS: Final = 2
"""How many look-ups of what became of a COMMIT may be under way at once."""

ASIDE_THREADS: Final = 8
"""Threads for the worker's own blocking calls around async handlers, which may have taken all of theirs."""


class Executor:
    """Runs claimed jobs: plain handlers on threads, async ones on an event loop of its own."""

    def __init__(
        self,
        database: Database,
        leases: Leases,
        completer: Completer,
        *,
        sync: SyncSessions | None,
        asynchronous: AsyncSessions | None,
        threads: int,
        lease: dt.timedelta,
    ) -> None:
        self._database = database
        self._leases = leases
        self._completer = completer
        self._sync = sync
        self._async = asynchronous
        self._threads = Threads(threads)
        self._lease = lease
        self.slots: Slots
        self.resources: Any = None
        """What handlers see as ``job.resources``."""
        self.isolation: dict[bool, str | None] = {}
        """The sessions' isolation level, by whether they are async."""
        # Weakly: a run that has ended needs no watching, and must not stay in memory for its timeout.
        self._timeouts: list[tuple[float, int, weakref.ref[Run]]] = []
        self._timeouts_lock = threading.Lock()
        self._order = itertools.count()
        self._watchdog = Loop("timeout watch", self._watch, 3600.0)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._aside = DaemonExecutor(ASIDE_THREADS)
        # They may wait for long, on connections that the heartbeat needs as well.
        self._fate_lookups = threading.BoundedSemaphore(FATE_LOOKUPS)
        self._closing = False

    # -- life --------------------------------------------------------------------------------------------------

    def open(self) -> None:
        self._watchdog.start()
        if self._async is not None:
            self._loop = asyncio.new_event_loop()
            self._loop.set_default_executor(DaemonExecutor(ASYNC_HANDLERS_THREADS))
            self._loop_thread = threading.Thread(target=self._run_loop, name="enlist-async", daemon=True)
            self._loop_thread.start()

    def close(self, timeout: float) -> bool:
        """End threads and loop; return whether every handler had ended."""
        self._watchdog.stop(timeout)
        self._threads.stop()
        ended = self._threads.join(timeout)
        if self._loop is not None and self._loop_thread is not None:
            self._closing = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop_thread.join(max(timeout, 1.0))
            ended = ended and not self._loop_thread.is_alive()
        return ended

    @property
    def in_handler(self) -> bool:
        """Whether this thread is one that handlers run on."""
        return self._threads.here or threading.current_thread() is self._loop_thread

    def abandon(self, run: Run, reason: str) -> bool:
        """Have an attempt given up; return False if it was before, or has ended."""
        if run.ended or not run.abandon(reason):
            return False
        if self._loop is not None and run.handler.is_async:
            self._loop.call_soon_threadsafe(run.cancel_task)
        return True

    def _run_loop(self) -> None:
        assert self._loop is not None
        asyncio.set_event_loop(self._loop)
        while not self._closing:
            try:
                self._loop.run_forever()
            except BaseException:  # SystemExit in a task that a handler made comes out here
                logger.exception("the event loop of the async handlers was interrupted; it goes on")
        if self._async is not None:
            self._loop.run_until_complete(self._async.close())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
        self._aside.shutdown()

    def run_on_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the handlers' event loop, from another thread."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    # -- one after the other -----------------------------------------------------------------------------------

    def start(self, run: Run) -> None:
        """Run a job that has a slot."""
        if run.handler.is_async:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._spawn, run)
        else:
            self._threads.submit(lambda: self._run_sync(run))

    def _next(self, run: Run) -> Run | None:
        """The job that takes over the slot of a run, if it is of the same world; the other kind is started."""
        following = self.slots.finished(run)
        if following is not None and following.handler.is_async != run.handler.is_async:
            self.start(following)
            return None
        return following

    def _run_sync(self, first: Run) -> None:
        run: Run | None = first
        while run is not None:
            try:
                self._attempt_sync(run)
            except BaseException as error:
                self._ended_unexpectedly(run, error)
            run = self._next(run)

    def _spawn(self, run: Run) -> None:
        assert self._loop is not None
        task = self._loop.create_task(self._run_async(run))
        self._tasks.add(task)

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if run.task is None:  # cancelled before its first step, by a handler that cancels all tasks
                self._completer.release(run)
                self._follow(run)

        task.add_done_callback(done)

    def _follow(self, run: Run) -> None:
        if (following := self._next(run)) is not None:
            self._spawn(following)

    async def _run_async(self, run: Run) -> None:
        task = asyncio.current_task()
        assert task is not None
        run.task = task
        try:
            await self._attempt_async(run)
        except BaseException as error:
            self._ended_unexpectedly(run, error)
        finally:
            self._follow(run)

    async def _run_aside(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function that blocks, off the loop; to its end, even if the task is cancelled meanwhile."""
        future = asyncio.get_running_loop().run_in_executor(self._aside, function, *arguments)
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError:
                continue
        return future.result()

    # -- an attempt --------------------------------------------------------------------------------------------

    def _prepare(self, run: Run) -> Job[Any] | None:
        """Make the job that the handler sees; None if the job is not ours any more or was ended here."""
        run.started = time.monotonic()
        if run.abandoned is not None:
            if run.abandoned == "stopped" and not run.ended:
                self._completer.release(run)
            return None
        if run.lease_ends < run.started:
            self._lost(run)
            return None
        if run.careful and not self._write_start(run):
            return None
        try:
            return job_of(run, self.resources)
        except BaseException as error:  # a validator may raise SystemExit
            self._failed(run, error)
            return None

    def _write_start(self, run: Run) -> bool:
        """Commit that a careful job's handler starts now: should the process die, it is this job's doing."""
        try:
            rows = self._database.execute(self._database.statements.start, {"job_id": run.id, "token": run.token})
        except sa.exc.SQLAlchemyError as error:
            logger.warning("%s: its start could not be written, it is given back: %s", run, brief(error))
            self._completer.release(run)
            return False
        if not rows:
            self._lost(run)
        return bool(rows)

    def _guard(self, run: Run) -> Guard:
        return Guard(
            self._database.statements,
            self._database.record,
            run.id,
            run.token,
            lease=self._lease,
            hold_lock=run.handler.hold_lock,
            isolation=self.isolation.get(run.handler.is_async),
        )

    def _attempt_sync(self, run: Run) -> None:
        job = self._prepare(run)
        if job is None:
            return
        assert self._sync is not None
        if run.handler.timeout_seconds is not None:
            self._watch_for(run, run.handler.timeout_seconds)
        for rerun in itertools.count():
            guard = self._guard(run)
            try:
                with self._sync() as session:
                    session.guard_by(guard)
                    call_plain(run, session, job)
                    if run.abandoned == "timed out":  # with the row's lock in hand the fence would let it pass
                        raise LeaseLost(run.id)
                    committed = finish(session)
            except BaseException as error:
                wait = self._ended(run, guard, error, rerun)
                if wait is None:
                    return
                time.sleep(wait)
            else:
                self._succeeded(run, committed)
                return

    async def _attempt_async(self, run: Run) -> None:
        # Decoding and, for a careful job, one short statement; off the loop only where it does IO.
        job = await self._run_aside(self._prepare, run) if run.careful else self._prepare(run)
        if job is None:
            return
        assert self._async is not None
        for rerun in itertools.count():
            guard = self._guard(run)
            try:
                session = self._async.open()
                try:
                    sync_session = session.sync_session
                    assert isinstance(sync_session, GuardedSession)
                    sync_session.guard_by(guard)
                    await call_async(run, session, job)
                    committed = await session.run_sync(_finish)
                finally:
                    await self._async.discard(session)
            except BaseException as error:
                wait = await self._run_aside(self._ended, run, guard, error, rerun)
                if wait is None:
                    return
                await asyncio.sleep(wait)
            else:
                self._succeeded(run, committed)
                return

    # -- how it ended ------------------------------------------------------------------------------------------

    def _succeeded(self, run: Run, committed: bool) -> None:
        if run.abandoned is not None:
            log_late(run)
            if committed:
                self._leases.drop(run)
            return
        if committed:
            run.ended = True
            self._leases.drop(run)
        else:
            self._completer.complete(run)
        logger.debug("%s done", run, extra={"job_id": str(run.id), "kind": run.kind, "attempt": run.attempt})

    def _ended(self, run: Run, guard: Guard, error: BaseException, rerun: int) -> float | None:
        """Write an attempt's end by an exception; return the seconds to wait if it is to be run again instead."""
        if run.abandoned is not None:
            if run.abandoned == "stopped":
                self._completer.release(run)
            else:
                log_late(run)
            return None
        if isinstance(error, LeaseLost):
            self._lost(run)
            return None
        again = rerun < reruns(error)
        if (guard.committing or again) and self._landed(run):
            # COMMIT was sent, and its answer lost, or a listener raised after it.
            run.ended = True
            logger.warning("%s: committed, though its COMMIT raised %s", run, brief(error), exc_info=trace(error))
            self._leases.drop(run)
            return None
        if run.abandoned is not None:  # found lost just now
            return None
        if again:
            logger.info("%s is run again in the same attempt: %s", run, brief(error))
            return random.uniform(0, LONGEST_RERUN_WAIT * 2**rerun)  # noqa: S311
        self._completer.settle(ending(run, error))
        return None

    def _ended_unexpectedly(self, run: Run, error: BaseException) -> None:
        """A fault of ours: the thread and the slot live on, and the job fails, or else its lease ends by itself."""
        logger.error("%s: the attempt ended in an unexpected way", run, exc_info=error)
        if run.ended or run.abandoned is not None:
            self._leases.drop(run)
            return
        try:
            self._failed(run, error)
        except Exception:
            logger.exception("%s: its failure could not be written", run)
            self._leases.drop(run)

    def _failed(self, run: Run, error: BaseException) -> None:
        self._completer.settle(failure(run, error))

    def _lost(self, run: Run) -> None:
        self._leases.drop(run)
        if run.abandon("lease lost"):
            log_lost(run)

    def _landed(self, run: Run) -> bool:
        """Whether an attempt's COMMIT took effect, read under the row's lock.

        While the lease lasts, as it is now: it may be renewed as long as the row is locked. If that is still so then
        (the commit hangs), the reaper decides later.
        """
        end = run.lease_ends
        while (left := end - time.monotonic()) > 0:
            if not self._fate_lookups.acquire(timeout=left):
                break
            try:
                with self._database.transaction() as connection:
                    milliseconds = max(1, int((end - time.monotonic()) * 1000))
                    connection.exec_driver_sql(f"SET LOCAL lock_timeout = {milliseconds}")
                    row = connection.execute(self._database.statements.fate, {"job_id": run.id}).one_or_none()
            except sa.exc.SQLAlchemyError:
                time.sleep(min(left, 0.2))
                continue
            finally:
                self._fate_lookups.release()
            if row is not None and row.status is JobStatus.DONE and row.lease_token == run.token:
                return True
            if row is None or row.lease_token != run.token:
                self._lost(run)
            return False
        self._lost(run)
        return False

    # -- timeouts of plain handlers ----------------------------------------------------------------------------

    def _watch_for(self, run: Run, seconds: float) -> None:
        with self._timeouts_lock:
            entry = (run.started + seconds, next(self._order), weakref.ref(run))
            heapq.heappush(self._timeouts, entry)
            first = self._timeouts[0] is entry
        if first:
            self._watchdog.wake()

    def _watch(self) -> float | None:
        """Fail the plain handlers whose time is over: their threads go on, but are fenced off."""
        now = time.monotonic()
        with self._timeouts_lock:
            late = []
            while self._timeouts and self._timeouts[0][0] <= now:
                late.append(heapq.heappop(self._timeouts)[2])
            following = self._timeouts[0][0] - now if self._timeouts else None
        for run in [run for reference in late if (run := reference()) is not None]:
            # Should it end at this moment, then the fence decides which of the two endings counts.
            if not run.ended and run.abandon("timed out"):
                self._failed(run, timed_out(run))
        return following


def _finish(session: Session) -> bool:
    assert isinstance(session, GuardedSession)
    return finish(session)


def log_late(run: Run) -> None:
    """Say that a handler has come back too late."""
    logger.warning("%s: its handler has come back after it was given up (%s)", run, run.abandoned)
