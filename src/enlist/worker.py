"""The worker: takes jobs from its queues, runs their handlers, and stops without losing any."""

from __future__ import annotations

import datetime as dt
import gc
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from typing import Final

import sqlalchemy as sa

from enlist._claimer import Claimer
from enlist._engines import (
    AsyncSessions,
    Bind,
    SyncSessions,
    async_sessions,
    check_binds,
    sync_sessions,
)
from enlist._lifespan import AnyLifespan
from enlist._options import Duration, as_timedelta, check_integer, check_name
from enlist._orders import Orders
from enlist._rates import RateLimit
from enlist._running import Running
from enlist.events import Listener, listeners_of
from enlist.exceptions import ConfigurationError
from enlist.handlers import HandlerRegistry
from enlist.health import Health
from enlist.models import JobRecord, JobRecordMixin

__all__ = ["Worker"]

DEFAULT_CONCURRENCY: Final = 10
MAX_CONCURRENCY: Final = 1000
SHORTEST_LEASE: Final = 0.1
LONGEST_INTERVAL: Final = dt.timedelta(days=1)
DRAIN_LOOK_SECONDS: Final = 0.02
SIGNAL_SECONDS: Final = 0.5
"""How long a signal may go unnoticed."""

_first_process: Final = os.getpid()
"""In a child of this one an engine may have connections of the parent's, though the worker is made in the child."""

_inherited: Final[list[object]] = []
"""Workers that the parent process has started. Collected they would end its transactions, over the same sockets."""


class Worker:
    """Claims jobs from queues and runs their handlers.

    :param bind: where the jobs and the handlers' data are: an Engine, AsyncEngine, sessionmaker, async_sessionmaker,
        scoped_session or async_scoped_session. Handlers get sessions made like its own.
    :param handlers: the registry; only its kinds are claimed.
    :param sync_bind: for plain handlers, when ``bind`` is async; default an engine derived from its URL.
    :param async_bind: for async handlers, when ``bind`` is not async; default an engine derived from its URL.
    :param queues: names of queues with their slots, ``{"mail": 10, "default": 20}``; or names, which get
        ``concurrency`` slots each; default the queue ``default``.
    :param rate_limits: by queue, how many of its jobs may be claimed in a time, by all workers together:
        ``{"mail": RateLimit(100, per=60)}``; default none. See :class:`RateLimit`.
    :param concurrency: how many jobs of a queue run at once, where ``queues`` does not say; default 10.
    :param lease: how long a job stays this worker's without a sign of life, in seconds or as a timedelta; default 60.
        It is renewed three times as often. The job of a worker that died runs again after that.
    :param poll_interval: how often the queues are looked at when nobody says that there is something; default 1 s.
    :param shutdown_timeout: how long handlers may go on after a stop was asked for; default 30 s.
    :param reaper_interval: how often the jobs of dead workers are looked for; default half the lease.
    :param record: the mapped class of the jobs; default :class:`~enlist.models.JobRecord`.
    :param lifespan: makes a context manager, plain or async, that is entered at each start and left at its end; what
        it yields is ``job.resources``. An async one is on the event loop of the async handlers: what it opens is for
        them. What entering it raises :meth:`start` raises; what leaving it raises is logged.
    :param listen_bind: an engine whose connections go directly to the server, for LISTEN, where ``bind`` goes through
        PgBouncer in transaction mode: LISTEN is of no use there, jobs are found by polling, and the worker says so.
        Default connections as those of ``bind``.
    :param events: a function, or several, called with a :class:`~enlist.JobEvent` at each step of each job, on the
        worker's threads. What it raises is logged once; while it runs, something of the worker waits. Default none.
    :raises ConfigurationError: these do not fit together.
    :raises InvalidOption: one of them is not what it may be.
    """

    def __init__(
        self,
        bind: Bind,
        handlers: HandlerRegistry,
        *,
        sync_bind: Bind | None = None,
        async_bind: Bind | None = None,
        queues: Mapping[str, int] | Sequence[str] | None = None,
        rate_limits: Mapping[str, RateLimit] | None = None,
        concurrency: int = DEFAULT_CONCURRENCY,
        lease: Duration = 60,
        poll_interval: Duration = 1,
        shutdown_timeout: Duration = 30,
        reaper_interval: Duration | None = None,
        listen_bind: sa.Engine | None = None,
        record: type[JobRecordMixin] = JobRecord,
        lifespan: Callable[[], AnyLifespan] | None = None,
        events: Listener | Iterable[Listener] | None = None,
    ) -> None:
        if not isinstance(handlers, HandlerRegistry) or not len(handlers):
            raise ConfigurationError(f"a worker needs a HandlerRegistry with at least one handler, not {handlers!r}")
        check_binds(bind, sync_bind, async_bind)
        if listen_bind is not None:
            if not isinstance(listen_bind, sa.Engine):
                raise ConfigurationError(f"listen_bind= takes an Engine, not {listen_bind!r}")
            check_binds(listen_bind, None, None)
        if not (isinstance(record, type) and issubclass(record, JobRecordMixin) and sa.inspect(record, raiseerr=False)):
            raise ConfigurationError(f"record must be a mapped class with JobRecordMixin, not {record!r}")
        if lifespan is not None and not callable(lifespan):
            raise ConfigurationError(f"lifespan must be a function that makes a context manager, not {lifespan!r}")
        self.name = _new_name()
        self.handlers = handlers
        self.queues = _check_queues(queues, concurrency)
        self.rate_limits = _check_rate_limits(rate_limits, self.queues)
        self._bind, self._sync_bind, self._async_bind = bind, sync_bind, async_bind
        self._listen_bind = listen_bind
        self._lease = _interval("lease", lease, SHORTEST_LEASE)
        self._poll_seconds = _interval("poll_interval", poll_interval, 0.01).total_seconds()
        self._shutdown_seconds = as_timedelta("shutdown_timeout", shutdown_timeout).total_seconds()
        reaper = self._lease / 2 if reaper_interval is None else reaper_interval
        self._reaper_seconds = _interval("reaper_interval", reaper, 0.01).total_seconds()
        self._record = record
        self._lifespan = lifespan
        self._listeners = listeners_of(events)
        self._stop_asked = threading.Event()
        self._stop_now = threading.Event()
        self._running: Running | None = None
        self._start_lock = threading.Lock()
        self._stopper: int | None = None
        self._stopping = threading.RLock()
        self._clean = True
        self._sync: SyncSessions | None = None
        self._async: AsyncSessions | None = None
        self._process = _first_process
        self._make_sessions()  # found wrong now, not when the first job comes

    def _leave_to_parent(self) -> None:
        """After a fork: threads are gone, and connections are open in both processes, for the one that opened them."""
        if self._process == os.getpid():
            return
        self._process = os.getpid()
        _inherited.extend([self._running, self._async])
        self._running = self._async = None
        self._stopping, self._start_lock = threading.RLock(), threading.Lock()
        if self._sync is not None:
            self._sync.engine.dispose(close=False)

    def _make_sessions(self) -> None:
        """Sessions for the kinds of handlers that there are; more may have been registered since the last time."""
        kinds = {handler.is_async for handler in self.handlers}
        slots = sum(self.queues.values())
        if False in kinds and self._sync is None:
            self._sync = sync_sessions(self._bind, self._sync_bind, slots)
        if True in kinds and self._async is None:
            self._async = async_sessions(self._bind, self._async_bind, slots)

    # -- running -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Work until SIGTERM, SIGINT or SIGHUP, or :meth:`stop` from another thread.

        The first signal stops claiming and lets the handlers finish, for at most ``shutdown_timeout``; a second one
        ends at once. To be called in the main thread.

        :raises SchemaError: as :meth:`start`.
        :raises ConfigurationError: as :meth:`start`, or it was not called in the main thread.
        :raises SystemExit: with status 1, if a second signal ended it or a handler could not be stopped.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ConfigurationError(
                "Worker.run() takes signals, so it must be called in the main thread; elsewhere use start() and stop()"
            )
        self._run(Orders(), lambda: None)

    def _run(self, orders: Orders, started: Callable[[], None]) -> None:
        """The same for whoever gives orders, and wants to know when the worker has begun."""
        with ExitStack() as stack:
            with self._starting():
                stack.enter_context(orders.heeded(self._stop_asked, self._stop_now))
                stack.enter_context(_less_collecting())
                self._begin()
            started()
            # With a timeout: a signal that comes between Python's last look for one and the lock's sleep would wait
            # for the next wake (measured: 1 in 8 of those sent while the worker starts).
            while not self._stop_asked.wait(SIGNAL_SECONDS):
                pass
            clean = self.stop()
        if not clean or self._stop_now.is_set():
            raise SystemExit(1)

    def start(self) -> None:
        """Begin to work, on threads; return when the worker has the database. For a web application's lifespan.

        While the database cannot be reached it tries again, with growing pauses, and says so once.

        :raises SchemaError: the database lacks enlist's tables, or they are at an older step.
        :raises ConfigurationError: the connections are in AUTOCOMMIT mode.
        """
        with self._starting():
            self._begin()
        if self._stop_asked.is_set():  # by stop() from another thread, while this one waited for the database
            self.stop()

    @contextmanager
    def _starting(self) -> Iterator[None]:
        """One start at a time: a second would take back the order to stop that the first was given.

        :raises ConfigurationError: the worker is running, or being started.
        """
        self._leave_to_parent()
        if self._running is not None:
            raise ConfigurationError("the worker is running already: stop it first")
        if not self._start_lock.acquire(blocking=False):
            raise ConfigurationError("the worker is being started already, by another thread: wait for that to return")
        try:
            if self._running is not None:
                raise ConfigurationError("the worker is running already: stop it first")
            self._stop_asked.clear()
            self._stop_now.clear()
            yield
        finally:
            self._start_lock.release()

    def _begin(self, seconds: float | None = None) -> None:
        self.name = _new_name()  # the worker may have been made before a fork: two must never have the same
        self._clean = True
        self._make_sessions()
        running = Running(self)
        try:
            running.open(self._stop_asked, seconds)
            self._running = running
            running.work()
        except BaseException:
            self._running = None
            running.close()
            raise

    def stop(self) -> bool:
        """Stop claiming, wait for the handlers that run, write what is left, and end the threads.

        What is not finished after ``shutdown_timeout`` is given back, the attempt with it; a plain handler cannot
        be stopped: its job is left to the end of its lease. Called by a handler it does not wait, since that would
        be for itself.

        :return: whether every handler had ended.
        """
        self._leave_to_parent()
        self._stop_asked.set()
        running = self._running
        if running is not None and (running.executor.in_handler or running.events.in_listener):
            running.claim_no_more()
            threading.Thread(target=self.stop, name="enlist-stop").start()
            return False
        with self._stopping:  # whoever comes second waits for the first
            if self._stopper == threading.get_ident():  # from the lifespan's end or a signal's handler: not for itself
                return False
            self._stopper = threading.get_ident()
            try:
                if self._running is not None:
                    self._clean = self._running.stop(self._shutdown_seconds, self._stop_now)
            finally:
                self._running = self._stopper = None
            return self._clean

    def health(self) -> Health:
        """Tell how the worker is, from any thread and at any time; no IO."""
        running = self._running
        if running is not None:
            return running.health()
        slots = sum(self.queues.values())
        return Health(running=False, listening=False, jobs=0, stuck=0, slots=slots, free=0)

    def drain(self, timeout: Duration | None = None) -> None:
        """Run jobs until none is due, then stop. For scripts, and for tests with connections of their own.

        :param timeout: seconds after which it gives up; default none.
        :raises TimeoutError: there still were jobs then, or the database could not be reached.
        """
        seconds = None if timeout is None else as_timedelta("timeout", timeout).total_seconds()
        with self._starting():
            self._begin(seconds)
        running = self._running
        if running is None:  # stopped already, by another thread
            return
        try:
            drained = _wait_until_drained(running.claimer, seconds, self._stop_asked)
        finally:
            self.stop()
        if not drained:
            raise TimeoutError(f"jobs were still due after {seconds:g} seconds")


@contextmanager
def _less_collecting() -> Iterator[None]:
    """Keep the garbage collector from what is there already: the application and its libraries.

    Each job leaves some objects behind for a moment, so the collector looks through everything that there is again and
    again, for a fifth of a small job's time. For a process of the worker's own: of what is there now, and is dropped
    later in cycles, nothing is collected before the worker stops.
    """
    if gc.get_freeze_count() or not gc.isenabled():  # the application has its own ways
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _wait_until_drained(claimer: Claimer, seconds: float | None, stop_asked: threading.Event) -> bool:
    """Have it look again and again: the poll interval is too long for somebody who waits for the end."""
    end = None if seconds is None else time.monotonic() + seconds
    while not claimer.drained.wait(DRAIN_LOOK_SECONDS) and not stop_asked.is_set():
        if end is not None and time.monotonic() > end:
            return False
        claimer.wake()
    return True


def _new_name() -> str:
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"


def _check_queues(queues: Mapping[str, int] | Sequence[str] | None, concurrency: int) -> dict[str, int]:
    check_integer("concurrency", concurrency, 1, MAX_CONCURRENCY)
    if queues is None:
        queues = ("default",)
    if isinstance(queues, (str, bytes)) or not isinstance(queues, (Mapping, Sequence, AbstractSet)):
        raise ConfigurationError(f"queues must be a mapping or a list of names, not {queues!r}")
    if not queues:
        raise ConfigurationError("a worker needs at least one queue")
    if not isinstance(queues, Mapping):
        queues = dict.fromkeys([check_name("queue", name) for name in queues], concurrency)
    for name, slots in queues.items():
        check_name("queue", name)
        check_integer(f"the slots of queue {name!r}", slots, 1, MAX_CONCURRENCY)
    return dict(queues)


def _check_rate_limits(limits: Mapping[str, RateLimit] | None, queues: Mapping[str, int]) -> dict[str, RateLimit]:
    if limits is None:
        return {}
    if not isinstance(limits, Mapping):
        raise ConfigurationError(f"rate_limits must be a mapping of queues to RateLimit, not {limits!r}")
    for queue, limit in limits.items():
        if not isinstance(limit, RateLimit):
            raise ConfigurationError(f"the rate limit of queue {queue!r} must be a RateLimit, not {limit!r}")
        if queue not in queues:
            raise ConfigurationError(
                f"a rate limit is given for queue {queue!r}, which the worker does not serve: its queues are"
                f" {', '.join(queues)}"
            )
    return dict(limits)


def _interval(name: str, value: Duration, low: float) -> dt.timedelta:
    duration = as_timedelta(name, value)
    if duration.total_seconds() < low:
        raise ConfigurationError(f"{name} must be at least {low:g} seconds, not {value!r}")
    if duration > LONGEST_INTERVAL:  # a mistake, milliseconds perhaps: a dead worker's jobs would wait for so long
        raise ConfigurationError(f"{name} must be at most a day, 86400 seconds, not {value!r}")
    return duration
