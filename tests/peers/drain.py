"""A drain: jobs that wait are run by workers in processes of their own, and each must be run exactly once."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, LiteralString

import psycopg
import sqlalchemy as sa

from tests.peers.board import Board
from tests.peers.child import Task
from tests.peers.machine import Meter
from tests.peers.peer import Load, Peer, Settings

__all__ = ["Drained", "Failed", "Workers", "drain", "workers"]

ROOT: Final = Path(__file__).parents[2]
READY_SECONDS: Final = 30.0
PATIENCE_SECONDS: Final = 120.0
LOOK_SECONDS: Final = 0.002


class Failed(Exception):
    """A measure could not be taken."""


@dataclass(frozen=True)
class Drained:
    """What a drain did."""

    jobs: int
    seconds: float
    """From the start of the workers' `run` until each job has run and is recorded as done."""
    wal_bytes: float
    client_cpu_seconds: float
    """Of all workers' processes."""
    peak_rss_bytes: int
    """Of the largest."""
    foreign_cores: float
    wrong: str
    """What is not as it should be; empty if all is well."""


class Workers:
    """Processes of workers, and the memory that they share with us."""

    def __init__(self, path: Path, board: Board, processes: list[subprocess.Popen[bytes]], log: Path) -> None:
        self.path = path
        self.board = board
        self._processes = processes
        self._log = log
        self.cpu_seconds = 0.0
        self.peak_rss_bytes = 0

    def wait_until_ready(self) -> None:
        end = time.monotonic() + READY_SECONDS
        while not self.board.ready(len(self._processes)):
            self.check()
            if time.monotonic() > end:
                raise Failed(f"the workers were not ready in {READY_SECONDS:.0f} s{self._said()}")
            time.sleep(LOOK_SECONDS)

    def check(self, began: float | None = None, what: str = "") -> None:
        """Raise :class:`Failed` if one has died, or ``what`` has lasted for too long since the drain began."""
        if began is not None and time.monotonic() - began > PATIENCE_SECONDS:
            raise Failed(f"{what} in {PATIENCE_SECONDS:.0f} s{self._said()}")
        for process in self._processes:
            if process.poll() is not None:
                raise Failed(f"a worker ended with status {process.returncode}{self._said()}")

    def end(self) -> None:
        """Kill them, and see what they have used since the start. May be called twice."""
        for number, process in enumerate(self._processes):
            if process.returncode is not None:
                continue
            peak = _peak_rss_bytes(process.pid)
            process.kill()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            self.cpu_seconds += usage.ru_utime + usage.ru_stime - self.board.cpu_before(number)
            self.peak_rss_bytes = max(self.peak_rss_bytes, peak)

    def _said(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines() if self._log.exists() else []
        return f": {lines[-1]}" if lines else ""


@contextmanager
def workers(peer: Peer, url: sa.URL, load: Load, settings: Settings, processes: int = 1) -> Iterator[Workers]:
    """Workers that wait for the start; they are killed at the end.

    :raises Failed: one died before, or was not ready in half a minute.
    """
    with tempfile.TemporaryDirectory(prefix="enlist-peers-") as directory:
        path, log = Path(directory, "board"), Path(directory, "log")
        board = Board(path)
        started = []
        with log.open("wb") as output:
            for process in range(processes):
                task = Task.of(peer, "work", url, board=str(path), process=process, load=load, settings=settings)
                started.append(subprocess.Popen(task.as_arguments(), cwd=ROOT, stdout=output, stderr=output))
        found = Workers(path, board, started, log)
        try:
            found.wait_until_ready()
            yield found
        finally:
            found.end()


def drain(
    started: Workers, connection: psycopg.Connection[Any], jobs: int, unfinished: str, meter: Meter, *, effects: bool
) -> Drained:
    """Have the jobs run that are there, numbers 0 to ``jobs`` - 1.

    :param unfinished: the SQL condition that tells whether any of them is not recorded as done.
    :param effects: whether each job writes one.
    :raises Failed: a worker died, or it took more than two minutes.
    """
    wal, before, own = _wal(connection), meter.read(), time.process_time()
    began = time.monotonic()
    started.board.start()
    while left := started.board.runs(jobs).count(0):
        started.check(began, f"{left} of {jobs} jobs were not run")
        time.sleep(LOOK_SECONDS)
    while (took := _time_of(connection, f"SELECT {unfinished}")) is not None:
        started.check(began, "not all jobs were recorded as done")
        time.sleep(max(2 * LOOK_SECONDS, 2 * took))  # a look costs the server something too
    seconds = time.monotonic() - began
    wal = _wal(connection) - wal
    started.end()
    ours = started.cpu_seconds + time.process_time() - own
    return Drained(
        jobs=jobs,
        seconds=seconds,
        wal_bytes=wal,
        client_cpu_seconds=started.cpu_seconds,
        peak_rss_bytes=started.peak_rss_bytes,
        foreign_cores=meter.foreign_cores(before, ours),
        wrong=_wrong(connection, started.board.runs(jobs), effects=effects),
    )


def _peak_rss_bytes(pid: int) -> int:
    """The most memory that a process ever had. (The rusage of a child knows no less than its parent has.)"""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def _time_of(connection: psycopg.Connection[Any], question: LiteralString) -> float | None:
    """The seconds that it took to find the answer to be yes; None if it is no."""
    began = time.monotonic()
    (answer,) = connection.execute(question).fetchone() or (False,)
    return time.monotonic() - began if answer else None


def _wal(connection: psycopg.Connection[Any]) -> float:
    """How many bytes were ever written to the write-ahead log."""
    (position,) = connection.execute("SELECT pg_current_wal_insert_lsn() - '0/0'").fetchone() or (0,)
    return float(position)


def _wrong(connection: psycopg.Connection[Any], runs: bytes, *, effects: bool) -> str:
    found = []
    if twice := sum(times > 1 for times in runs):
        found.append(f"{twice} jobs ran more than once")
    if effects:
        (rows,) = connection.execute("SELECT count(*) FROM peers_effect").fetchone() or (0,)
        if rows != len(runs):
            found.append(f"{len(runs)} jobs left {rows} effects")
    return ", ".join(found)
