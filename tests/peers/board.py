"""The memory that the harness shares with its processes: who is ready, which jobs have run, and when."""

from __future__ import annotations

import mmap
import time
from pathlib import Path
from typing import Final

__all__ = ["MOST_JOBS", "MOST_TIMED", "Board"]

MOST_JOBS: Final = 1 << 20
MOST_TIMED: Final = 1 << 12
_PROCESSES: Final = 16
_DOUBLE: Final = 8
_READY = 64
_CPU = _READY + _PROCESSES
_STARTED = 4096
_COMMITTED = _STARTED + _DOUBLE * MOST_TIMED
_RUNS = _COMMITTED + _DOUBLE * MOST_TIMED
_SIZE = _RUNS + MOST_JOBS


class Board:
    """A file that is mapped by all processes. Jobs are numbered from 0; each has a byte, so nothing is locked.

    :param path: the file; it is made if it is missing.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_SIZE))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self._view = memoryview(self._map)
        self._runs = self._view[_RUNS:]
        self._cpu = self._view[_CPU : _CPU + _DOUBLE * _PROCESSES].cast("d")
        self._started = self._view[_STARTED:_COMMITTED].cast("d")
        self._committed = self._view[_COMMITTED:_RUNS].cast("d")

    # -- in a worker's process ---------------------------------------------------------------------------------

    def wait_for_start(self, process: int) -> None:
        """Say that this process has all it needs; return when the clock runs."""
        self._map[_READY + process] = 1
        while not self._map[0]:
            time.sleep(0.0005)
        self._cpu[process] = time.process_time()

    def ran(self, number: int) -> None:
        """Count a run of a job."""
        runs = self._runs
        if runs[number] < 255:
            runs[number] += 1

    def ran_at_once(self, number: int) -> None:
        """Count a run, and remember when it began: now. The clock is the same in all processes."""
        self._started[number] = time.monotonic()
        self.ran(number)

    # -- in a producer's process -------------------------------------------------------------------------------

    def committed(self, number: int) -> None:
        """Remember when a job's commit returned: now."""
        self._committed[number] = time.monotonic()

    # -- in the harness ----------------------------------------------------------------------------------------

    def ready(self, processes: int) -> bool:
        """Whether so many processes wait for the start."""
        return all(self._map[_READY : _READY + processes])

    def start(self) -> None:
        """Let them go."""
        self._map[0] = 1

    def cpu_before(self, process: int) -> float:
        """The CPU seconds that a process had used at the start."""
        return self._cpu[process]

    def runs(self, jobs: int) -> bytes:
        """How often each of the first ``jobs`` jobs has run; 255 is that or more."""
        return bytes(self._runs[:jobs])

    def latencies(self, jobs: int) -> list[float]:
        """The seconds from each job's commit to its start, of the first ``jobs`` jobs that have both."""
        pairs = zip(self._committed[:jobs], self._started[:jobs], strict=True)
        return [started - committed for committed, started in pairs if committed and started]
