"""What a worker is made of between its start and its stop: threads, connections, and how they end."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from enlist import notifier
from enlist._abandoned import AbandonedSessions
from enlist._cancelling import attempts_of
from enlist._checks import async_isolation, check_pool, isolation_of, warn_of_unserved_queues
from enlist._claimer import Claimer
from enlist._completer import Completer, Settlement
from enlist._database import Database
from enlist._driver import brief, is_outage, shown_url
from enlist._engines import housekeeping_engine
from enlist._executor import Executor
from enlist._leases import RENEWALS_PER_LEASE, Heartbeat, Leases
from enlist._lifespan import Lifespan
from enlist._listener import Listener
from enlist._log import Log
from enlist._loop import Backoff
from enlist._others import Others
from enlist._reaper import Reaper
from enlist._slots import Run, Slots
from enlist._stalls import StallWatch, here
from enlist._statements import WHILE_IT_RAN
from enlist.events import Events
from enlist.health import Health
from enlist.migrations import verify_schema
from enlist.models import JobStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from enlist._session import GuardedSession
    from enlist.worker import Worker

__all__ = ["Running"]

logger = Log("enlist.worker")

STOPPING_SECONDS: Final = 5.0
"""For writing what is left, beside the time that handlers get."""

CLAIM_SECONDS: Final = 1.0
"""How long a claim that is under way may go on after a stop was asked for."""

GIVE_UP_SECONDS: Final = 0.4
"""How long async handlers that were cancelled may take to end."""

UNCLEAN_SECONDS: Final = 0.2
"""How long each of those is waited for that probably never ends: handlers on threads, the lifespan, the event loop.

All in all the process is gone a second after the ``shutdown_timeout``.
"""


class Running:
    """The parts of a worker between its start and its stop."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._stack = ExitStack()
        self.database = Database(
            housekeeping_engine(worker._bind, worker._sync_bind),
            worker._record,
            lease=worker._lease.total_seconds(),
        )
        self._stack.callback(self.database.close)
        self.leases = Leases()
        self.events = Events(worker._listeners, worker.name)
        self.others = Others(self.database)
        self.claimer = Claimer(
            self.database,
            worker.handlers,
            self.leases,
            worker=worker.name,
            lease=worker._lease,
            poll_interval=worker._poll_seconds,
            give_back=self._give_back,
            others=self.others,
            rate_limits=worker.rate_limits,
        )
        self.completer = Completer(self.database, self.leases, self.claimer.due_in, self.claimer.wake, self.events)
        self.claimer.all_known = lambda: self.completer.empty and self.reaper.looked
        self.claimer.is_behind = lambda: self.completer.is_behind
        plain = any(not handler.is_async for handler in worker.handlers)
        self.executor = Executor(
            self.database,
            self.leases,
            self.completer,
            sync=worker._sync,
            asynchronous=worker._async,
            threads=sum(worker.queues.values()) if plain else 0,
            lease=worker._lease,
            events=self.events,
        )
        self.slots = Slots(worker.queues, self.executor.start, self.claimer.wake, one_by_one=worker.rate_limits.keys())
        self.claimer.slots = self.slots
        self.executor.use(self.slots)
        self.heartbeat = Heartbeat(self.database, self.leases, worker._lease, self._lost, self._cancelled)
        self.reaper = Reaper(self.database, worker._reaper_seconds, self._reaped, self.events, worker=worker.name)
        statements = self.database.statements
        self.listener = Listener(
            self._listening_engine(),
            self.database,
            {statements.channel: self._woken, statements.cancel_channel: self._told_of_cancelled},
            self._may_have_missed,
            silence=worker._lease.total_seconds() / RENEWALS_PER_LEASE,
        )
        self.stalls: StallWatch | None = None
        self.abandoned = AbandonedSessions(self._sessions_used, self.leases)
        self._executor_open = False
        self._lifespan: Lifespan | None = None
        self._started = False
        self._beginning = threading.Lock()
        """Held while the loops are started: the first job may stop the worker."""
        self._ending = False

    def _listening_engine(self) -> sa.Engine:
        """Whose connections go to the server itself, if it was given."""
        if self._worker._listen_bind is None:
            return self.database.engine
        engine = housekeeping_engine(self._worker._listen_bind, None, "listen_bind")
        self._stack.callback(engine.dispose)
        return engine

    # -- start -------------------------------------------------------------------------------------------------

    def open(self, stop_asked: threading.Event, seconds: float | None) -> None:
        worker = self._worker
        end = None if seconds is None else time.monotonic() + seconds
        url = shown_url(self.database.engine.url)
        backoff = Backoff(f"the worker's connection to {url}")
        while not stop_asked.is_set():
            try:
                self._check()
            except (sa.exc.SQLAlchemyError, OSError) as error:
                if not is_outage(error):
                    raise
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
            self._lifespan = Lifespan(worker._lifespan(), self.executor.loop)
            self.executor.runner.resources = self._lifespan.enter(stop_asked)
            if stop_asked.is_set():
                return
        self._started = True
        logger.info(
            "worker %s starts: queues %s, kinds %s",
            worker.name,
            ", ".join(f"{name} ({slots})" for name, slots in worker.queues.items()),
            ", ".join(worker.handlers.kinds),
        )
        warn_of_unserved_queues(worker)
        self.completer.loop.start()
        self.heartbeat.loop.start()
        self.heartbeat.watch.start()
        self.abandoned.loop.start()
        if worker._async is not None:
            self.stalls = StallWatch(*self.executor.run_on_loop(here()), self.leases)
            self.stalls.loop.start()

    def work(self) -> None:
        """Take jobs, from now on. To be called when the worker can be stopped: their handlers may do so."""
        with self._beginning:
            if not self._started or self._ending:
                return
            self.claimer.loop.start()  # before what listens: it takes what is there already
            self.others.loop.start()
            self.reaper.loop.start()
            self.listener.start()
            statements = self.database.statements
            self._stack.callback(notifier.local.subscribe(statements.channel, self._woken))
            self._stack.callback(notifier.local.subscribe(statements.cancel_channel, self._told_of_cancelled))

    def _check(self) -> None:
        """Connect in every way that will be needed, and look whether it will do."""
        worker = self._worker
        with self.database.connection() as connection:
            verify_schema(connection, record=worker._record, rate_limits=bool(worker.rate_limits))
        self.database.open()
        if worker._sync is not None:
            with (
                worker._sync.engine.connect() as connection,
                self.database.watch(connection.connection.driver_connection),
            ):
                self.executor.runner.isolation[False] = isolation_of(connection)
            check_pool(worker._sync.engine, worker)
        if not self._executor_open:
            self._executor_open = True
            self.executor.open()
        if worker._async is not None:
            self.executor.runner.isolation[True] = self.executor.run_on_loop(
                async_isolation(worker._async, self.database.seconds)
            )

    # -- while it runs -----------------------------------------------------------------------------------------

    def _woken(self, queue: str) -> None:
        if not queue or queue in self._worker.queues:
            self.claimer.wake()

    def _reaped(self, rows: Sequence[sa.Row[Any]]) -> None:
        """Jobs of any queue and kind: they are for all workers, and run one at a time in each."""
        queued = {row.queue for row in rows if row.status is JobStatus.QUEUED}
        self.others.wake(queued, keys={row.concurrency_key for row in rows if row.concurrency_key is not None})
        self.claimer.wake()

    def _told_of_cancelled(self, message: str) -> None:
        for job_id, token in attempts_of(message):
            run = self.leases.get(job_id)
            if run is not None and run.token == token:
                self._cancelled(run)

    def _cancelled(self, run: Run) -> None:
        """Give up an attempt whose job was cancelled, or is to be: if nobody has, the completer writes it."""
        if self.executor.abandon(run, "cancelled"):
            self.completer.settle(Settlement(run, JobStatus.CANCELLED, error=WHILE_IT_RAN))

    def _may_have_missed(self) -> None:
        """Look for what nobody heard: jobs that are due, and jobs in hand that were cancelled."""
        self.claimer.wake()
        self.heartbeat.loop.wake()

    def health(self) -> Health:
        slots = self.slots
        return Health(
            running=True,
            listening=self.listener.listening,
            jobs=len(self.leases),
            stuck=self.executor.runner.stuck,
            slots=sum(self._worker.queues.values()),
            free=slots.free,
        )

    def _sessions_used(self) -> list[GuardedSession]:
        made_by = (self._worker._sync, self._worker._async)
        return [session for sessions in made_by if sessions is not None for session in sessions.used.copy()]

    def _give_back(self, run: Run) -> None:
        if not run.ended:  # cancelled while it waited
            self.completer.release(run)

    def _lost(self, run: Run, why: str) -> None:
        if self.executor.abandon(run, "lease lost"):
            self.leases.give_up(run)
            self.completer.lost(run, why)

    # -- stop --------------------------------------------------------------------------------------------------

    def claim_no_more(self) -> None:
        """Make this claim the last; returns at once."""
        self.claimer.loop.stop(0)

    def stop(self, timeout: float, stop_now: threading.Event) -> bool:
        with self._beginning:
            self._ending = True
        worker = self._worker
        logger.info("worker %s stops: no more claims, %d jobs in hand", worker.name, len(self.leases))
        end = time.monotonic() + timeout
        waiting = self.slots.close()
        self._end_claims()
        for run in waiting:
            self._give_back(run)
        if waiting:
            logger.info("worker %s: %d jobs that had not begun are given back", worker.name, len(waiting))
        while not self.slots.idle and not stop_now.is_set() and (left := end - time.monotonic()) > 0:
            stop_now.wait(min(left, 0.01))
            self.claimer.hand_over()
        if not self.slots.idle:
            logger.warning(
                "worker %s: %s; handlers that still run are given up",
                worker.name,
                "asked to stop at once" if stop_now.is_set() else f"{timeout:g} seconds are over",
            )
            self._give_up()
        self.database.hurry(STOPPING_SECONDS)
        self.completer.flush(STOPPING_SECONDS)
        self.claimer.hand_over()
        self.others.flush(STOPPING_SECONDS)
        self._give_back_unheld()
        clean = self.close()
        unfinished = self.leases.all()
        for run in unfinished:
            text = "%s: how it ended could not be written: %s" if run.ended else "%s cannot be stopped: %s"
            logger.warning(text, run, "it is left to the end of its lease", extra=run.extra())
        return clean and not unfinished

    def _end_claims(self) -> None:
        """Claim no more. The claim under way may come to its end, and what it brings is given back.

        One that waits, for a lock say, is cancelled: it must not be carried out when there is nobody any more.
        """
        loop = self.claimer.loop
        end = time.monotonic() + STOPPING_SECONDS
        if loop.stop(CLAIM_SECONDS):
            return
        logger.info("worker %s: the claim under way is cancelled", self._worker.name)
        while not loop.stop(0.05) and time.monotonic() < end:
            self.database.hurry(0, loop.thread_id)

    def _give_back_unheld(self) -> None:
        """If the last claim got no answer: it may have been carried out."""
        try:
            if self.claimer.loop.stop(0):
                self.claimer.give_back_unheld()
        except Exception as error:
            logger.warning("worker %s: what an unanswered claim has taken is left: %s", self._worker.name, brief(error))

    def _give_up(self) -> None:
        """Cancel the async handlers and tell the plain ones: what they have done is rolled back, the jobs given back.

        Also if they return now: nobody knows whether they have finished, or have seen that they should not.
        """
        for run in self.leases.all():
            if run.ended:
                continue
            if not run.in_handler:  # it has not begun, or has returned and waits for another of its group
                self.executor.abandon(run, "released")
                self.completer.release(run)
                continue
            self.executor.abandon(run, "stopped")
        end = time.monotonic() + GIVE_UP_SECONDS
        while not self.slots.idle and time.monotonic() < end:
            time.sleep(0.005)
        self.abandoned.end()

    def close(self) -> bool:
        """End all threads and close all connections that are the worker's own; return whether handlers had ended."""
        self.slots.close()
        self.database.hurry(STOPPING_SECONDS)
        for seconds in (0, STOPPING_SECONDS):  # all are told before the first is waited for
            self.claimer.loop.stop(seconds)
            self.reaper.loop.stop(seconds)
            self.completer.loop.stop(seconds)
            self.others.loop.stop(seconds)
            self.heartbeat.loop.stop(seconds)
            self.heartbeat.watch.stop(seconds)
            self.abandoned.loop.stop(seconds)
        self.listener.stop(STOPPING_SECONDS)
        if self.stalls is not None:
            self.stalls.loop.stop(STOPPING_SECONDS)
        idle = self.slots.idle
        ended = True
        if self._lifespan is not None:  # on the handlers' loop, which is there until the executor is closed
            self._lifespan.leave(STOPPING_SECONDS if idle else UNCLEAN_SECONDS)
        if self._executor_open:
            ended = self.executor.close(STOPPING_SECONDS if idle else UNCLEAN_SECONDS)
        if self._worker._sync is not None:
            self._worker._sync.close()
        self._stack.close()
        if self._started:
            logger.info("worker %s has stopped", self._worker.name)
        return idle and ended
