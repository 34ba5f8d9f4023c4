"""``enlist worker --processes N``: keeps N worker processes, and ends with them.

Each is a fresh interpreter that imports the application by itself: here it is never imported, so nothing of it (an
engine's connections, threads, locks) is shared by a fork. To each there is a socket. Over it go the orders to stop,
not as signals: a service manager may send its signal to every process, and the second one means *now*. And when it
closes since this process is gone, the children stop by themselves.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

import tenacity

from enlist._log import Log
from enlist.exceptions import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["NOW", "STOP", "Supervisor"]

logger = Log("enlist.supervisor")

STOP: Final = b"s"
NOW: Final = b"n"
"""What is said to a child: stop, and stop at once."""

RESTART_WAIT: Final = tenacity.wait_exponential(multiplier=0.5, max=30) + tenacity.wait_random(0, 0.5)
"""How long a place of a process that has died stays empty: 0.5 s, 1 s ... up to 30 s."""

LIVED_SECONDS: Final = 60.0
"""A process that has lived for so long is replaced after the shortest wait again."""

KILL_SECONDS: Final = 10.0
"""How long after its ``shutdown_timeout`` a process may take to end before it is killed."""

KILL_NOW_SECONDS: Final = 5.0
"""The same when it was asked to stop at once."""

LOOK_SECONDS: Final = 1.0
"""How often to look at the processes, should no signal tell of an end."""

HEEDED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


class _Child:
    """A worker process."""

    def __init__(self, number: int, arguments: Sequence[str]) -> None:
        self.link, theirs = socket.socketpair()
        self.link.setblocking(False)
        try:
            with theirs:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "enlist._supervised", str(number), str(theirs.fileno()), *arguments],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    process_group=0,  # the terminal's Ctrl-C comes here, and is passed on once
                )
        except BaseException:
            self.link.close()
            raise
        self.name = f"worker process {number} (pid {self.process.pid})"
        self.began = time.monotonic()
        self.started = False
        """It has the database, and works."""
        self.failure: str | None = None
        """Why it cannot start."""
        self.shutdown_seconds = 0.0
        """What it gives its handlers at a stop; before it has said so there are none."""
        self.kill_at: float | None = None
        self.silent = False
        """It has closed the socket: it ends."""
        self._heard = b""

    def tell(self, order: bytes) -> None:
        """Have it stop, or be killed when it takes too long."""
        with suppress(OSError):  # it has ended
            self.link.send(order)
        seconds = KILL_NOW_SECONDS if order == NOW else self.shutdown_seconds + KILL_SECONDS
        self.kill_at = min(self.kill_at or float("inf"), time.monotonic() + seconds)

    def hear(self) -> None:
        """Take what it has said, lines of JSON: ``{"started": true}``."""
        while not self.silent:
            try:
                said = self.link.recv(65536)
            except BlockingIOError:
                break
            except ConnectionResetError:  # it has ended and left an order unread; what it has said is still there
                continue
            self._heard += said
            self.silent = not said
        *lines, self._heard = self._heard.split(b"\n")
        for line in lines:
            for name, value in json.loads(line).items():
                setattr(self, name, value)

    def kill_if_late(self) -> None:
        if self.kill_at is not None and time.monotonic() > self.kill_at:
            logger.warning("%s has not ended in time and is killed", self.name)
            self.process.kill()
            self.kill_at = float("inf")


class _Place:
    """One of the N, where a child after the other works."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.child: _Child | None = None
        self.restart_at = 0.0
        self.failure: str | None = None
        """Why the latest child could not start."""
        self.clean = True
        """The latest child ended with status 0."""
        self._deaths = tenacity.RetryCallState(retry_object=tenacity.Retrying(), fn=None, args=(), kwargs={})
        self._deaths.attempt_number = 0

    def wait_after(self, lived: float) -> float:
        """The seconds until the next child, after one that has lived for so long."""
        self._deaths.attempt_number = 1 if lived > LIVED_SECONDS else self._deaths.attempt_number + 1
        return RESTART_WAIT(self._deaths)


class Supervisor:
    """Runs worker processes until SIGTERM or SIGINT.

    :param processes: how many.
    :param arguments: of :mod:`enlist._supervised`, after the number and the socket.
    """

    def __init__(self, processes: int, arguments: Sequence[str]) -> None:
        self._arguments = arguments
        self._places = [_Place(number) for number in range(1, processes + 1)]
        self._any_started = False
        self._stopping = False
        self._failure: str | None = None
        self._to_replace: deque[_Place] = deque()
        """What is left of a rolling restart."""
        self._replacing: _Place | None = None

    def run(self) -> bool:
        """Keep the processes until a signal says to stop; return whether all have ended cleanly.

        The first SIGTERM or SIGINT lets the handlers end, the second does not. SIGHUP replaces the processes, one
        after the other; from a terminal that is closed it means stop.

        :raises ConfigurationError: not one of the processes could start.
        """
        with selectors.DefaultSelector() as selector, _signals() as signals:
            selector.register(signals, selectors.EVENT_READ)
            logger.info("%d worker processes are started, by process %d", len(self._places), os.getpid())
            try:
                while not self._stopping or self._children():
                    self._look(selector)
                    selector.select(self._seconds_to_wait())
                    self._heed(signals)
            finally:
                for child in self._children():
                    child.link.close()  # which ends it
        if self._failure is not None:
            raise ConfigurationError(self._failure)
        return all(place.clean for place in self._places)

    def _children(self) -> list[_Child]:
        return [place.child for place in self._places if place.child is not None]

    def _heed(self, signals: socket.socket) -> None:
        with suppress(BlockingIOError):
            for number in signals.recv(4096):
                if number in {signal.SIGTERM, signal.SIGINT} or (number == signal.SIGHUP and os.isatty(0)):
                    self._stop(NOW if self._stopping else STOP, signal.Signals(number).name)
                elif number == signal.SIGHUP and not self._stopping:
                    logger.info("SIGHUP: the worker processes are replaced, one after the other")
                    self._to_replace = deque(self._places)

    def _stop(self, order: bytes, why: str) -> None:
        children = self._children()
        logger.info("%s: %d worker processes stop%s", why, len(children), " at once" if order == NOW else "")
        self._stopping = True
        for child in children:
            child.tell(order)

    def _look(self, selector: selectors.BaseSelector) -> None:
        """Look at each process, and do what is due."""
        for place in self._places:
            child = place.child
            if child is not None:
                ended = child.process.poll() is not None  # before what it has said is taken: then that is all
                if not child.silent:
                    child.hear()
                    if child.silent or ended:  # or: a process that it has forked has the socket open still
                        selector.unregister(child.link)
                self._any_started = self._any_started or child.started
                if ended:
                    child.link.close()
                    place.child = None
                    self._ended(place, child)
                else:
                    child.kill_if_late()
            if place.child is None and not self._stopping and time.monotonic() >= place.restart_at:
                self._start(place, selector)
        self._replace()

    def _start(self, place: _Place, selector: selectors.BaseSelector) -> None:
        try:
            child = _Child(place.number, self._arguments)
        except OSError as error:  # no memory, no more processes
            wait = place.wait_after(0)
            place.restart_at = time.monotonic() + wait
            logger.error("worker process %d cannot be started, next try in %.1f s: %s", place.number, wait, error)  # noqa: TRY400
            return
        place.child = child
        selector.register(child.link, selectors.EVENT_READ)
        logger.info("%s is started", child.name)

    def _ended(self, place: _Place, child: _Child) -> None:
        how = _told(child.process.returncode)
        place.clean = child.process.returncode == 0
        place.failure = child.failure
        if self._stopping:
            logger.log(logging.INFO if place.clean else logging.WARNING, "%s %s", child.name, how)
            return
        if place is self._replacing:
            if child.kill_at is not None:  # the old one, as it was asked to
                logger.info("%s %s: it is replaced", child.name, how)
                place.restart_at = 0.0
                return
            self._replacing = None
            if not child.started:
                logger.error("the rolling restart ends here: the new process could not start; the others stay")
                self._to_replace.clear()
        failures = [place.failure for place in self._places]
        if not self._any_started and all(failures):
            self._failure = failures[0]
            self._stop(NOW, "not one could start")
            return
        wait = place.wait_after(time.monotonic() - child.began)
        place.restart_at = time.monotonic() + wait
        reason = "" if child.failure is None else f": {child.failure}"
        logger.warning("%s %s%s; the next is started in %.1f s", child.name, how, reason, wait)

    def _replace(self) -> None:
        """Go on with a rolling restart: a new process has to work before the next old one is asked to end."""
        place = self._replacing
        if place is not None and place.child is not None and place.child.started and place.child.kill_at is None:
            self._replacing = place = None
        if place is None and self._to_replace and not self._stopping:
            self._replacing = place = self._to_replace.popleft()
            if place.child is not None:
                place.child.tell(STOP)

    def _seconds_to_wait(self) -> float:
        """Until something is due, if no signal and no child's word comes first."""
        now = time.monotonic()
        times = [child.kill_at for child in self._children() if child.kill_at is not None]
        times += [place.restart_at for place in self._places if place.child is None and not self._stopping]
        return max(0.0, min([LOOK_SECONDS, *(time - now for time in times)]))


@contextmanager
def _signals() -> Iterator[socket.socket]:
    """A socket from which the numbers of signals can be read as they come."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    # Started with nohup it is not to hear of SIGHUP.
    numbers = [one for one in HEEDED if one != signal.SIGHUP or signal.getsignal(one) is not signal.SIG_IGN]
    previous: dict[signal.Signals, Any] = {}
    with ours, theirs:
        before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        try:
            for number in numbers:
                previous[number] = signal.signal(number, lambda *_: None)
            yield ours
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(before)


def _told(status: int) -> str:
    """How a process has ended."""
    if status >= 0:
        return "has ended" if status == 0 else f"has ended with exit status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
