"""Where handlers run: plain ones on threads, async ones on an event loop of the worker's own."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

from enlist._endings import Endings
from enlist._log import Log
from enlist._runner import Runner
from enlist._threads import DaemonExecutor, Threads

try:
    import uvloop
except ImportError:
    uvloop = None  # type: ignore[assignment,unused-ignore]

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Coroutine

    from enlist._completer import Completer
    from enlist._database import Database
    from enlist._engines import AsyncSessions, SyncSessions
    from enlist._leases import Leases
    from enlist._slots import Run, Slots
    from enlist.events import Events

__all__ = ["Executor"]

logger = Log("enlist.worker")

T = TypeVar("T")

ASYNC_HANDLERS_THREADS: Final = 32
"""Most threads for what async handlers give to ``asyncio.to_thread``."""

TASKS_SECONDS: Final = 1.0
"""How long tasks that are left at the end may take to do so."""

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
        events: Events,
    ) -> None:
        self._completer = completer
        self._async = asynchronous
        self._threads = Threads(threads)
        self._aside = DaemonExecutor(ASIDE_THREADS)
        self._endings = Endings(database, leases, completer, events, lease)
        self.runner = Runner(
            database,
            self._endings,
            events,
            sync=sync,
            asynchronous=asynchronous,
            lease=lease,
            aside=self._aside,
            timed_out=self._timed_out,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    # -- life --------------------------------------------------------------------------------------------------

    def use(self, slots: Slots) -> None:
        """Say whose slots the jobs have."""
        self._slots = self.runner.slots = slots

    def open(self) -> None:
        self.runner.timeouts.loop.start()
        if self._async is not None:
            self.loop()

    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of the async handlers; begun for an async lifespan where there are none."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop() if uvloop is None else uvloop.new_event_loop()
            self._loop.set_default_executor(DaemonExecutor(ASYNC_HANDLERS_THREADS))
            self._loop_thread = threading.Thread(target=self._run_loop, name="enlist-async", daemon=True)
            self._loop_thread.start()
        return self._loop

    def close(self, timeout: float) -> bool:
        """End threads and loop; return whether every handler had ended."""
        self.runner.timeouts.loop.stop(timeout)
        self._threads.stop()
        ended = self._threads.join(timeout)
        if self._loop is not None and self._loop_thread is not None:
            self._closing = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop_thread.join(max(timeout, 0.2))
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
        # Those that share its transaction, or its thread, must not wait until it has noticed.
        group = run.group
        for other in group.others(run) if group is not None else ():
            if other.abandon("released"):
                self._endings.release(other)
        if self._loop is not None and run.handler.is_async:
            self._loop.call_soon_threadsafe(run.cancel_task)
        return True

    def _timed_out(self, run: Run) -> None:
        """Fail a plain handler whose time is over: its thread goes on, but is fenced off."""
        # Should it end at this moment, then the fence decides which of the two endings counts.
        if self.abandon(run, "timed out"):
            self._endings.timed_out(run)

    def _run_loop(self) -> None:
        assert self._loop is not None
        asyncio.set_event_loop(self._loop)
        while not self._closing:
            try:
                self._loop.run_forever()
            except BaseException:  # SystemExit in a task that a handler made comes out here
                logger.exception("the event loop of the async handlers was interrupted; it goes on")
        self._loop.run_until_complete(_end_tasks())
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
            self._loop.call_soon_threadsafe(self._spawn, run, context=contextvars.Context())
        else:
            self._threads.submit(lambda: self._run_sync(run))

    def _next(self, run: Run, jobs: int, since: float) -> Run | None:
        """The job that takes over the slot of a run, if it is of the same world; the other kind is started."""
        following = self._slots.finished(run, jobs, since)
        if following is not None and following.handler.is_async != run.handler.is_async:
            self.start(following)
            return None
        return following

    def _run_sync(self, first: Run) -> None:
        run: Run | None = first
        while run is not None:
            jobs, since = 1, time.monotonic()
            try:
                jobs = self.runner.run(run)
            except BaseException as error:
                self._ended_unexpectedly(run, error)
            run = self._next(run, jobs, since)

    def _ended_unexpectedly(self, run: Run, error: BaseException) -> None:
        """Whatever goes wrong here as well, a log's handler say: the thread and the slot live on."""
        with suppress(BaseException):
            self._endings.unexpected(run, error)

    def _spawn(self, run: Run) -> None:
        assert self._loop is not None
        task = self._loop.create_task(self._run_async(run))
        self._tasks.add(task)

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if run.task is None:  # cancelled before its first step, by a handler that cancels all tasks
                self._completer.release(run)
                if (following := self._next(run, 1, time.monotonic())) is not None:
                    self._spawn_soon(following)

        task.add_done_callback(done)

    def _spawn_soon(self, run: Run) -> None:
        """Later, or a loop whose tasks begin at once would go ever deeper; and not in the context of this one."""
        assert self._loop is not None
        self._loop.call_soon(self._spawn, run, context=contextvars.Context())

    async def _run_async(self, run: Run) -> None:
        # A task for each job, though it takes 6 us: others may know it, and what they do to it, or keep by it (a
        # scoped session, say), is not for the next job.
        task = asyncio.current_task()
        assert task is not None
        run.task = task
        jobs, since = 1, time.monotonic()
        try:
            jobs = await self.runner.run_async(run)
        except BaseException as error:
            self._ended_unexpectedly(run, error)
        finally:
            if (following := self._next(run, jobs, since)) is not None:
                self._spawn_soon(following)


async def _end_tasks() -> None:
    """Have what is left on the loop roll back and give up its connections: handlers, and tasks that they have made."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=TASKS_SECONDS)
