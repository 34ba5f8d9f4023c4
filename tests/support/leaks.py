"""What a test leaves behind: threads, processes, connections."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import psutil
import psycopg

GRACE_SECONDS = float(os.environ.get("ENLIST_TEST_GRACE_SECONDS", "2"))


class Snapshot:
    """The threads and child processes that are there now."""

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._children = set(_children())

    def leaks(self) -> list[str]:
        """What is there that was not, once it has had :data:`GRACE_SECONDS` to go."""
        deadline = time.monotonic() + GRACE_SECONDS
        for thread in self._new_threads():
            thread.join(max(0.0, deadline - time.monotonic()))
        while (children := self._new_children()) and time.monotonic() < deadline:
            time.sleep(0.005)  # not psutil.wait_procs(): it would take the exit status from whoever waits for it
        return [
            *(f"thread {thread.name!r} is still running" for thread in self._new_threads()),
            *(f"process {_describe(process)} was left behind" for process in children),
        ]

    def _new_threads(self) -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread not in self._threads]

    def _new_children(self) -> list[psutil.Process]:
        return [process for process in _children() if process not in self._children]


def open_connections(admin: psycopg.Connection[tuple[Any, ...]], database: str) -> list[str]:
    """The sessions on a database that are still there after :data:`GRACE_SECONDS`, described."""
    deadline = time.monotonic() + GRACE_SECONDS
    while rows := admin.execute(
        "SELECT pid, application_name, state, query FROM pg_stat_activity"
        " WHERE datname = %s AND backend_type = 'client backend'",
        (database,),
    ).fetchall():
        if time.monotonic() > deadline:
            return [
                f"connection {pid} ({application or 'no application_name'}, {state}) is still open; its last"
                f" statement: {query}"
                for pid, application, state, query in rows
            ]
        time.sleep(0.005)
    return []


def _children() -> list[psutil.Process]:
    # multiprocessing's own helper lives as long as the interpreter.
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if "multiprocessing.resource_tracker" not in _describe(process)
    ]


def _describe(process: psutil.Process) -> str:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return f"{process.pid} (ended, but nobody waited for it)"
        return f"{process.pid} ({' '.join(process.cmdline())})"
    except psutil.Error:
        return str(process.pid)
