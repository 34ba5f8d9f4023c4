"""Wakes workers after a commit: the producer's half. Polling finds every job; this makes it quick.

NOTIFY within a transaction takes a lock at COMMIT that is one for the whole server (with 8 committers 6,346 commits/s
become 3,875, and 1,883 with 8 listeners), and a transaction that has notified cannot be prepared. So it is sent after
the real commit, by a thread with a connection of its own, and coalesced: the first for a queue goes at once, and so do
those that come one by one; where commits are many one NOTIFY stands for all of :data:`INTERVAL_SECONDS`. The producer
only puts a name in a dictionary: it is never delayed, and nothing here makes it fail. What cannot be sent is left to
the workers' polling.

Those who run jobs that were cancelled are told in the same way, on a channel of its own.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import sqlalchemy as sa

from enlist._direct import direct
from enlist._driver import shown_url
from enlist._log import Log
from enlist._loop import Backoff

if TYPE_CHECKING:
    from enlist._statements import Statements

__all__ = ["close_all", "committed", "local"]

logger = Log("enlist.notifier")

INTERVAL_SECONDS: Final = 0.05
"""Least time between two NOTIFYs for one queue, where commits are many."""

CALM_SECONDS: Final = 0.01
"""The same where they are few. (With 50 ms throughout, jobs 20 ms apart began 27 ms after their commits in the median;
8 processes that commit as often as they can don't get to these.)"""

FEW: Final = 2
"""If a NOTIFY stands for more commits than this the next waits twice as long, else half as long."""

IDLE_SECONDS: Final = 10.0
"""Without anything to send for so long, the connection is closed and the thread ends; the next commit starts anew."""

EXIT_SECONDS: Final = 1.0
"""How long the interpreter's exit may wait for what is still to be sent."""

ASYNCPG_ONLY: Final = {
    "command_timeout",
    "max_cacheable_statement_size",
    "max_cached_statement_lifetime",
    "prepared_statement_cache_size",
    "statement_cache_size",
    "timeout",
}
"""What a URL can say to asyncpg only, and a connection that sends NOTIFY does not need."""

CONNECT_SECONDS: Final = 5
MOST_PENDING: Final = 10_000
"""Queues, and messages of cancelled jobs, that can wait while the server cannot be reached; those beyond are left to
the workers' polling and heartbeats."""


class LocalWakes:
    """Wakes workers of the same process directly."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: dict[str, tuple[Callable[[str], object], ...]] = {}

    def subscribe(self, channel: str, callback: Callable[[str], object]) -> Callable[[], None]:
        """Have ``callback(queue)`` called after each commit that adds jobs; return a function that ends it.

        On the channel of cancelled jobs, ``callback(message)``, see :func:`enlist._cancelling.messages_of`.
        It is called in the committing thread: it must be quick. What it raises is logged.
        """
        entry = _Callback(callback)
        with self._lock:
            self._callbacks[channel] = (*self._callbacks.get(channel, ()), entry)

        def unsubscribe() -> None:
            with self._lock:
                rest = tuple(other for other in self._callbacks.get(channel, ()) if other is not entry)
                if rest:
                    self._callbacks[channel] = rest
                else:
                    self._callbacks.pop(channel, None)

        return unsubscribe

    def publish(self, channel: str, queues: Iterable[str]) -> None:
        """Call the callbacks of a channel."""
        for callback in self._callbacks.get(channel, ()):
            for queue in queues:
                try:
                    callback(queue)
                except Exception:
                    logger.exception("a worker could not be woken for queue %r; it polls", queue)


class _Callback:
    """A callable with an identity of its own: the same function may be subscribed twice."""

    def __init__(self, function: Callable[[str], object]) -> None:
        self._function = function

    def __call__(self, queue: str) -> object:
        return self._function(queue)


class _Topic(NamedTuple):
    """What is notified of once in a while, however much there is to tell."""

    statements: Statements
    queue: str | None = None
    """None: the jobs that were cancelled while they ran; of these there are messages."""


@dataclass(slots=True)
class _News:
    """What is pending of a topic."""

    commits: int = 0
    messages: set[str] = field(default_factory=set)


class Notifier:
    """Sends the NOTIFYs for one database, on a thread that is started when there is something to send."""

    def __init__(self, source: sa.Engine, running: set[Notifier]) -> None:
        self._name = shown_url(source.url)
        self._make_engine = _notifying_engine(source, self._is_the_applications)
        self._used: weakref.ref[object] | None = None
        self._running = running  # while it has a thread
        self._changed = threading.Condition()
        self._pending: dict[_Topic, _News] = {}
        self._thread: threading.Thread | None = None
        self._closing = False
        self._sent: dict[_Topic, tuple[float, float]] = {}
        """When a topic was last notified of, and for how long it is not to be again."""
        self._backoff = Backoff(f"notifying the workers of {self._name}")

    def add(self, statements: Statements, queues: Iterable[str], messages: Iterable[str], used: object) -> None:
        """Have workers notified; returns at once. ``used`` is the driver's connection that has committed."""
        with self._changed:
            self._used = weakref.ref(used)
            if len(self._pending) >= MOST_PENDING or self._closing:
                return
            known = len(self._pending)
            for queue in queues:
                self._pending.setdefault(_Topic(statements, queue), _News()).commits += 1
            if messages := list(messages):
                news = self._pending.setdefault(_Topic(statements), _News())
                news.commits += 1
                news.messages.update(messages[: MOST_PENDING - len(news.messages)])
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="enlist-notify", daemon=True)
                thread.start()
                self._thread = thread
                self._running.add(self)
            elif len(self._pending) > known:  # else it knows when to send: not woken by each of a thousand commits/s
                self._changed.notify()

    def close(self) -> threading.Thread | None:
        """Begin to end: send what is pending, try nothing twice. Returns the thread to join."""
        with self._changed:
            self._closing = True
            self._changed.notify()
            return self._thread

    def _is_the_applications(self, driver_connection: object) -> bool:
        return self._used is not None and self._used() is driver_connection

    def _run(self) -> None:
        sender = _Sender(self._make_engine)
        try:
            while due := self._next():
                try:
                    for topic, news in due.items():
                        sender.send(topic, news.messages)
                        _, interval = self._sent.get(topic, (0.0, CALM_SECONDS))
                        interval *= 2 if news.commits > FEW else 0.5
                        self._sent[topic] = (time.monotonic(), min(max(interval, CALM_SECONDS), INTERVAL_SECONDS))
                    self._backoff.succeeded()
                except _Underivable as reason:
                    sender.close()
                    _say_underivable(self._name, reason)
                    with self._changed:
                        self._closing = True
                        self._pending.clear()
                except Exception as error:
                    sender.close()
                    self._failed(error, due)
        finally:
            sender.close()

    def _next(self) -> dict[_Topic, _News]:
        """Wait for what is due to be sent; empty when it is time to end."""
        with self._changed:
            idle_until = time.monotonic() + IDLE_SECONDS
            while True:
                now = time.monotonic()
                wait = idle_until - now
                if self._closing:
                    due = list(self._pending)
                else:
                    waits = {key: sum(self._sent.get(key, (0.0, 0.0))) - now for key in self._pending}
                    due = [key for key, left in waits.items() if left <= 0]
                    wait = min([wait, *waits.values()])
                if due:
                    if len(self._sent) > MOST_PENDING:
                        self._sent.clear()
                    return {topic: self._pending.pop(topic) for topic in due}
                if self._closing or (wait <= 0 and not self._pending):
                    # Under the lock: whoever adds next sees that there is no thread.
                    self._thread = None
                    self._running.discard(self)
                    return {}
                self._changed.wait(max(wait, 0.001))

    def _failed(self, error: Exception, due: dict[_Topic, _News]) -> None:
        end = time.monotonic() + self._backoff.failed(error)
        with self._changed:
            for topic, news in due.items():
                pending = self._pending.setdefault(topic, _News())
                pending.commits += news.commits
                pending.messages |= news.messages
            while not self._closing and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
            if self._closing:
                self._pending.clear()


class _Sender:
    """The connection of one thread, opened when it is needed."""

    def __init__(self, make_engine: Callable[[], sa.Engine]) -> None:
        self._make_engine = make_engine
        self._engine: sa.Engine | None = None
        self._connection: sa.Connection | None = None

    def send(self, topic: _Topic, messages: set[str]) -> None:
        if self._connection is None:
            self._engine = self._make_engine()
            self._connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            self._connection.begin()  # as SQLAlchemy sees it; the server is told of none
        if topic.queue is not None:
            direct(topic.statements.notify).rows(self._connection, {"queue": topic.queue})
        else:
            self._connection.execute(topic.statements.notify_cancelled, {"messages": list(messages)})

    def close(self) -> None:
        connection, self._connection = self._connection, None
        engine, self._engine = self._engine, None
        try:
            if connection is not None:
                connection.close()
            if engine is not None:
                engine.dispose()
        except Exception:
            logger.debug("closing the notifier's connection failed", exc_info=True)


class _Underivable(Exception):
    """There is no telling how a psycopg connection to the engine's database would be made."""


def _say_underivable(name: str, reason: _Underivable) -> None:
    logger.warning(
        "workers of %s cannot be notified, they poll: %s; JobRepository(notify='transaction') notifies"
        " without a connection of its own",
        name,
        reason,
    )


def _notifying_engine(source: sa.Engine, is_the_applications: Callable[[object], bool]) -> Callable[[], sa.Engine]:
    """Return what makes an engine to the same database with connections apart from the application's.

    :param is_the_applications: tells of a driver's connection whether the application uses it.
    """
    own_creator = getattr(getattr(source.pool, "_creator", None), "__module__", None) != "sqlalchemy.engine.create"
    if source.dialect.driver == "psycopg" and not source.dialect.is_async:
        # The same arguments, creator and listeners.
        url, pool = source.url, source.pool.recreate()
        if own_creator:
            pool._creator = _apart(pool._invoke_creator, is_the_applications)
        return lambda: sa.create_engine(url, pool=pool.recreate())
    if own_creator:
        raise _Underivable("the engine makes its connections with a creator of its own, for another driver")
    url = source.url.set(drivername="postgresql+psycopg")
    if source.dialect.driver == "asyncpg":
        query = {name: value for name, value in url.query.items() if name not in ASYNCPG_ONLY}
        if "ssl" in query:
            query["sslmode"] = query.pop("ssl")
        url = url.set(query=query)
    arguments = {"connect_timeout": CONNECT_SECONDS, "prepare_threshold": None}
    return lambda: sa.create_engine(url, poolclass=sa.NullPool, connect_args=arguments)


def _apart(create: Callable[[Any], Any], is_the_applications: Callable[[object], bool]) -> Any:
    """A creator that refuses a connection that the application uses: its transaction is not ours to end."""

    def creator(record: Any) -> Any:
        made = create(record)
        if is_the_applications(made):
            raise _Underivable("the engine's creator gives out one connection again and again")
        return made

    return creator


class _Registry:
    """The notifiers of the process."""

    def __init__(self) -> None:
        self._inherited: list[object] = []
        self.reset()

    def reset(self) -> None:
        """Start afresh. In a forked child the threads are gone, and the connections are the parent's to close."""
        self._inherited.append(getattr(self, "_running", None))
        self._lock = threading.Lock()
        # dispose() gives an engine a new pool, so a notifier that still has something to send is kept here.
        self._running: set[Notifier] = set()
        self._by_pool: weakref.WeakKeyDictionary[sa.Pool, Notifier | None] = weakref.WeakKeyDictionary()

    def notifier(self, engine: sa.Engine) -> Notifier | None:
        """The notifier for an engine; None when none can be made, which was logged."""
        with self._lock:
            try:
                return self._by_pool[engine.pool]
            except KeyError:
                found = self._by_pool[engine.pool] = self._make(engine)
                return found

    def _make(self, engine: sa.Engine) -> Notifier | None:
        try:
            return Notifier(engine, self._running)
        except _Underivable as reason:
            _say_underivable(shown_url(engine.url), reason)
            return None

    def close(self, timeout: float) -> None:
        with self._lock:
            self._by_pool = weakref.WeakKeyDictionary()
            running = list(self._running)
        end = time.monotonic() + timeout
        for thread in [notifier.close() for notifier in running]:
            if thread is not None:
                thread.join(max(0.0, end - time.monotonic()))


local: Final = LocalWakes()
"""The workers of this process."""

_registry: Final = _Registry()


def committed(
    engine: sa.Engine,
    statements: Statements,
    queues: set[str],
    *,
    messages: Iterable[str] = (),
    used: object,
    notified: bool,
) -> None:
    """Wake the workers of the queues: jobs have been committed. Never raises: the commit has been done.

    :param messages: what to tell those who run jobs that were cancelled.
    :param used: the driver's connection that has committed them.
    :param notified: the transaction has sent its NOTIFY itself; wake the workers of this process only.
    """
    try:
        local.publish(statements.channel, queues)
        local.publish(statements.cancel_channel, messages)
        if not notified and (queues or messages) and (notifier := _registry.notifier(engine)) is not None:
            notifier.add(statements, queues, messages, used)
    except Exception:  # such as "can't start new thread" while the interpreter ends
        logger.debug("workers could not be notified, they poll", exc_info=True)


def close_all(timeout: float = EXIT_SECONDS) -> None:
    """Send what is still to be sent and close the connections; later commits open new ones.

    Called at the interpreter's exit; tests and applications that end their engines may call it.

    :param timeout: seconds to wait at most.
    """
    _registry.close(timeout)


atexit.register(close_all)
os.register_at_fork(after_in_child=_registry.reset)
