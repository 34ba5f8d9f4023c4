"""Starts workers quickly: a process that has everything imported, nothing opened and no thread, and forks.

A Python process that imports what a worker needs takes 0.7 s of CPU; its fork is there in some milliseconds.
``python -m tests.chaos.zygote`` reads lines of JSON: settings of a worker to start, or ``[pid, signal]`` for one that
it has started; it says ``started PID`` and ``ended PID STATUS``.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

ROOT = Path(__file__).parents[2]


class Zygote:
    """The other end of it. A context manager: at its end no process is left, whatever state it was in."""

    def __init__(self) -> None:
        self.ended: dict[int, int] = {}
        """The exit statuses of the workers that have ended, by pid; minus a signal's number."""
        self._started: SimpleQueue[int] = SimpleQueue()

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.zygote"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._reader = threading.Thread(target=self._read, name="zygote", daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._reader.join()
        self._process.stdout.close()

    def start(self, settings: dict[str, Any]) -> int:
        """Start a worker; its pid."""
        self._say(settings)
        return self._started.get(timeout=30)

    def send(self, pid: int, number: signal.Signals) -> None:
        """Send a signal to a worker; to nobody, if it has ended: only its parent knows whose the pid is then."""
        self._say([pid, number])

    def _say(self, what: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            word, *numbers = line.split()
            if word == "started":
                self._started.put(int(numbers[0]))
            else:
                self.ended[int(numbers[0])] = int(numbers[1])


def serve(work: Callable[[dict[str, Any]], int]) -> None:
    """Fork for each line of the standard input; at its end, kill what is left."""
    gc.collect()
    gc.freeze()  # or the first collection of each child would copy all the memory
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    os.set_blocking(reading, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: whoever holds the other end sees to it
    children: set[int] = set()
    unread = b""
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(reading, selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in selector.select()}
            if reading in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(reading, 4096)
                _bury(children)
            if 0 in ready:
                data = os.read(0, 65536)
                if not data:
                    break
                *lines, unread = (unread + data).split(b"\n")
                for said in map(json.loads, lines):
                    if isinstance(said, dict):
                        children.add(_fork(said, work))
                    elif said[0] in children:
                        os.kill(*said)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    while children:
        _bury(children, wait=True)


def _fork(settings: dict[str, Any], work: Callable[[dict[str, Any]], int]) -> int:
    if pid := os.fork():
        print("started", pid, flush=True)
        return pid
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDONLY)
        raw = os.open(settings["raw"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for old, new in ((nothing, 0), (raw, 1), (raw, 2)):
            os.dup2(old, new)
        status = work(settings)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _bury(children: set[int], *, wait: bool = False) -> None:
    while children:
        pid, status = os.waitpid(-1, 0 if wait else os.WNOHANG)
        if not pid:
            return
        children.discard(pid)
        with contextlib.suppress(BrokenPipeError):
            print("ended", pid, os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    from tests.chaos.process import work

    serve(work)
