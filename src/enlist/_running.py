"""What a worker is made of between its start and its stop: threads, connections, and how they end."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

import sqlalchemy as sa

from enlist import notifier
from enlist._claimer import Claimer
from enlist._completer import Completer, log_lost
from enlist._database import Database
from enlist._driver import is_autocommit, shown_url
from enlist._engines import housekeeping_engine
from enlist._executor import Executor
from enlist._leases import Heartbeat, Leases
from enlist._listener import Listener
from enlist._loop import Backoff
from enlist._reaper import Reaper
from enlist._slots import Run, Slots
from enlist.exceptions import ConfigurationError
from enlist.migrations import verify_schema
from enlist.payload import options_of

if TYPE_CHECKING:
    from enlist._engines import AsyncSessions
    from enlist.worker import Worker

__all__ = ["Running"]

logger = logging.getLogger("enlist.worker")

STOPPING_SECONDS: Final = 5.0
"""For writing what is left, beside the time that handlers get."""


class Running:
    """The parts of a worker between its start and its stop."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._stack = ExitStack()
        self.database = Database(housekeeping_engine(worker._bind, worker._sync_bind), worker._record)
        self._stack.callback(self.database.close)
        self.leases = Leases()
        self.claimer = Claimer(
            self.database,
            worker.handlers,
            self.leases,
            worker=worker.name,
            lease=worker._lease,
            poll_interval=worker._poll_seconds,
            give_back=self._give_back,
            rate_limits=worker.rate_limits,
        )
        self.completer = Completer(self.database, self.leases, self.claimer.due_in, self.claimer.wake)
        self.claimer.all_recorded = lambda: self.completer.empty
        plain = any(not handler.is_async for handler in worker.handlers)
        self.executor = Executor(
            self.database,
            self.leases,
            self.completer,
            sync=worker._sync,
            asynchronous=worker._async,
            threads=sum(worker.queues.values()) if plain else 0,
            lease=worker._lease,
        )
        self.slots = Slots(worker.queues, self.executor.start, self.claimer.wake, one_by_one=worker.rate_limits.keys())
        self.claimer.slots = self.executor.slots = self.slots
        self.heartbeat = Heartbeat(self.database, self.leases, worker._lease, self._lost)
        self.reaper = Reaper(self.database, worker._reaper_seconds, self.claimer.wake)
        self.listener = Listener(self.database, self._woken)
        self._executor_open = False
        self._started = False

    # -- start -------------------------------------------------------------------------------------------------

    def open(self, stop_asked: threading.Event, seconds: float | None) -> None:
        worker = self._worker
        end = None if seconds is None else time.monotonic() + seconds
        url = shown_url(self.database.engine.url)
        backoff = Backoff(f"the worker's connection to {url}")
        while not stop_asked.is_set():
            try:
                self._check()
            except (sa.exc.OperationalError, sa.exc.InterfaceError, OSError) as error:
                pause = backoff.failed(error)
                if end is not None and time.monotonic() + pause > end:
                    raise TimeoutError(f"the database could not be reached in {seconds:g} seconds") from error
                stop_asked.wait(pause)
            else:
                break
        if stop_asked.is_set():
            return
        backoff.succeeded()
        if worker._lifespan is not None:
            self.executor.resources = self._stack.enter_context(worker._lifespan())
        self._started = True
        logger.info(
            "worker %s starts: queues %s, kinds %s",
            worker.name,
            ", ".join(f"{name} ({slots})" for name, slots in worker.queues.items()),
            ", ".join(worker.handlers.kinds),
        )
        self._warn_of_unserved_queues()
        self.heartbeat.loop.start()
        self.completer.loop.start()
        self.reaper.loop.start()
        self.listener.start()
        unsubscribe = notifier.local.subscribe(self.database.statements.channel, self._woken)
        self._stack.callback(unsubscribe)
        self.claimer.loop.start()

    def _warn_of_unserved_queues(self) -> None:
        """Say which handlers will have nothing to do: their jobs go to queues that are not looked at here."""
        queues: dict[str, list[str]] = {}
        for handler in self._worker.handlers:
            if handler.payload_type is not None:
                queues.setdefault(options_of(handler.payload_type).queue, []).append(handler.kind)
        for queue in queues.keys() - self._worker.queues.keys():
            logger.warning(
                "worker %s has handlers for %s, whose jobs go to the queue %r by default: it does not serve that queue",
                self._worker.name,
                ", ".join(sorted(queues[queue])),
                queue,
            )

    def _check(self) -> None:
        """Connect in every way that will be needed, and look whether it will do."""
        worker = self._worker
        with self.database.engine.connect() as connection:
            verify_schema(connection, record=worker._record, rate_limits=bool(worker.rate_limits))
        self.database.open()
        if worker._sync is not None:
            with worker._sync.engine.connect() as connection:
                self.executor.isolation[False] = _isolation_of(connection)
            _check_pool(worker._sync.engine, worker)
        if not self._executor_open:
            self._executor_open = True
            self.executor.open()
        if worker._async is not None:
            self.executor.isolation[True] = self.executor.run_on_loop(_async_isolation(worker._async))

    # -- while it runs -----------------------------------------------------------------------------------------

    def _woken(self, queue: str) -> None:
        if not queue or queue in self._worker.queues:
            self.claimer.wake()

    def _give_back(self, run: Run) -> None:
        self.completer.release(run)

    def _lost(self, run: Run) -> None:
        if self.executor.abandon(run, "lease lost"):
            self.leases.drop(run)
            log_lost(run)

    # -- stop --------------------------------------------------------------------------------------------------

    def stop(self, timeout: float, stop_now: threading.Event) -> bool:
        worker = self._worker
        logger.info("worker %s stops: no more claims, %d jobs in hand", worker.name, len(self.leases))
        end = time.monotonic() + timeout
        waiting = self.slots.close()
        self.claimer.loop.stop(STOPPING_SECONDS)
        for run in waiting:
            self.completer.release(run)
        if waiting:
            logger.info("worker %s: %d jobs that had not begun are given back", worker.name, len(waiting))
        while not self.slots.idle and not stop_now.is_set() and (left := end - time.monotonic()) > 0:
            stop_now.wait(min(left, 0.01))
        if not self.slots.idle:
            logger.warning(
                "worker %s: %s; handlers that still run are given up",
                worker.name,
                "asked to stop at once" if stop_now.is_set() else f"{timeout:g} seconds are over",
            )
            self._give_up()
        self.completer.flush(STOPPING_SECONDS)
        return self.close()

    def _give_up(self) -> None:
        """Cancel the async handlers, whose jobs are then given back; tell the plain ones."""
        for run in self.leases.all():
            if run.ended:
                continue
            if run.handler.is_async:
                self.executor.abandon(run, "stopped")
                if not run.started:  # behind a handler that blocks the event loop
                    self.completer.release(run)
            else:
                run.signals.cancel_requested = True
        end = time.monotonic() + 1.0
        while not self.slots.idle and time.monotonic() < end:
            time.sleep(0.005)
        for run in self.leases.all():
            if not run.ended and (run.abandon("stopped") or run.handler.is_async):
                logger.warning("%s cannot be stopped: it is left to the end of its lease", run)

    def close(self) -> bool:
        """End all threads and close all connections that are the worker's own; return whether handlers had ended."""
        self.slots.close()
        self.claimer.loop.stop(STOPPING_SECONDS)
        self.listener.stop(STOPPING_SECONDS)
        self.reaper.loop.stop(STOPPING_SECONDS)
        self.completer.loop.stop(STOPPING_SECONDS)
        self.heartbeat.loop.stop(STOPPING_SECONDS)
        idle = self.slots.idle
        ended = True
        if self._executor_open:
            ended = self.executor.close(STOPPING_SECONDS if idle else 0.1)
        if self._worker._sync is not None:
            self._worker._sync.close()
        self._stack.close()
        if self._started:
            logger.info("worker %s has stopped", self._worker.name)
        return idle and ended


def _isolation_of(connection: sa.Connection) -> str:
    """The isolation level that handlers' sessions will have.

    :raises ConfigurationError: each statement would commit by itself.
    """
    if is_autocommit(connection):
        raise ConfigurationError(
            f"the engine of {shown_url(connection.engine.url)} is in AUTOCOMMIT mode: a handler's effects could not"
            " commit together with its job's status; give the worker an engine without isolation_level='AUTOCOMMIT'"
        )
    return connection.get_isolation_level()


async def _async_isolation(sessions: AsyncSessions) -> str:
    async with sessions.engine.connect() as connection:
        return await connection.run_sync(_isolation_of)


def _check_pool(engine: sa.Engine, worker: Worker) -> None:
    """Say so if handlers will have to wait for each other's connections."""
    pool = engine.pool
    if not isinstance(pool, sa.QueuePool):
        return
    most = pool.size() + pool._max_overflow if pool._max_overflow >= 0 else None
    slots = sum(worker.queues.values())
    if most is not None and most < slots:
        logger.warning(
            "worker %s has %d slots, the engine's pool at most %d connections: handlers may wait for one;"
            " create_engine(..., pool_size=%d) gives each its own",
            worker.name,
            slots,
            most,
            slots,
        )
