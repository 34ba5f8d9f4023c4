"""The machine and the server: their facts, their load, and quiet before a measure."""

from __future__ import annotations

import os
import platform
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

import psutil
import sqlalchemy as sa

from tests.peers.peer import connect

__all__ = ["QUIET_CORES", "SETTINGS", "Meter", "Used", "machine", "server_version", "versions", "wait_for_quiet"]

SETTINGS: Final = {
    "fsync": "on",
    "synchronous_commit": "on",
    "shared_buffers": "512MB",
    "max_wal_size": "4GB",
    "max_connections": "200",
}
"""Of the server."""

QUIET_CORES: Final = 0.3
"""Less than that of other programs is quiet."""

PATIENCE_SECONDS: Final = 3.0
SAMPLE_SECONDS: Final = 0.3


@dataclass(frozen=True)
class Used:
    """CPU seconds used so far, by everything and by the server."""

    all: float
    server: float
    at: float


class Meter:
    """Reads CPU times.

    :param server_pid: of the server's main process; None if it is on another machine, or unknown.
    """

    def __init__(self, server_pid: int | None) -> None:
        self._server = psutil.Process(server_pid) if server_pid is not None else None

    def read(self) -> Used:
        times = psutil.cpu_times()
        return Used(times.user + times.nice + times.system + getattr(times, "irq", 0), self._of_server(), time.time())

    def foreign_cores(self, before: Used, ours: float) -> float:
        """How many cores others have used since ``before``; we used ``ours`` CPU seconds beside the server."""
        if self._server is None:
            return 0.0
        now = self.read()
        used = now.all - before.all - (now.server - before.server) - ours
        return max(0.0, used / max(now.at - before.at, 0.01))

    def _of_server(self) -> float:
        if self._server is None:
            return 0.0
        own = self._server.cpu_times()
        total = own.user + own.system + own.children_user + own.children_system
        for child in self._server.children():
            with suppress(psutil.Error):  # it has ended meanwhile
                times = child.cpu_times()
                total += times.user + times.system
        return total


def wait_for_quiet(patience: float = PATIENCE_SECONDS) -> float:
    """Wait until other programs leave the processors alone, but not for long; how many cores they use."""
    end = time.monotonic() + patience
    while True:
        busy = psutil.cpu_percent(SAMPLE_SECONDS) / 100 * (os.cpu_count() or 1)
        if busy < QUIET_CORES or time.monotonic() > end:
            return busy


def machine(server_version: str) -> str:
    """A line of facts."""
    kernel = platform.release().partition("-")[0]
    return (
        f"{os.cpu_count()} CPUs ({_processor()}), {platform.system()} {kernel}, PostgreSQL"
        f" {server_version}, Python {platform.python_version()}"
    )


def server_version(url: sa.URL) -> str:
    """PostgreSQL's."""
    with connect(url) as connection:
        return str(connection.info.parameter_status("server_version"))


def versions(packages: list[str]) -> str:
    """The packages with their versions."""
    found = []
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            found.append(f"{package} {metadata.version(package)}")
    return ", ".join(found)


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
