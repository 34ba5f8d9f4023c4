"""A worker in a process of its own, to talk to, to freeze and to kill."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, Any, Self

from sqlalchemy import URL

from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]


class WorkerProcess:
    """Runs ``python -m tests.workers.NAME`` with settings as JSON; it talks in lines on its standard streams.

    A context manager: whatever state the process is in, it is ended and waited for.
    """

    def __init__(self, url: URL, name: str = "shop", **settings: Any) -> None:
        self._settings = {"url": url.render_as_string(hide_password=False), **settings}
        self._module = f"tests.workers.{name}"
        self._lines: list[str] = []
        self._read = 0
        self._final_log = ""
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close)
        self._process = subprocess.Popen(
            [sys.executable, "-m", self._module, json.dumps(self._settings)],
            cwd=ROOT,
            env={**os.environ, "PYTHONFAULTHANDLER": "", "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._reader = threading.Thread(target=self._collect, name="worker process output", daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _collect(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line.rstrip("\n"))

    def expect(self, start: str, timeout: float = 15) -> str:
        """Wait for the next line that begins so, pass over those before, and return it."""

        def found() -> str | None:
            while self._read < len(self._lines):
                line = self._lines[self._read]
                self._read += 1
                if line.startswith(start):
                    return line
            return None

        def found_or_ended() -> str | None:
            line = found()
            if line is None and self._process.poll() is not None and not self._reader.is_alive():
                return found() or f"ended: {self._process.returncode}"
            return line

        line = wait_until(found_or_ended, timeout, message=f"a line {start!r}; lines {self._lines}\n{self.log()}")
        assert line is not None
        assert line.startswith(start), f"no line {start!r}; {line}; lines {self._lines}\n{self.log()}"
        return line

    def lines(self, start: str) -> list[str]:
        """All lines so far that begin so."""
        return [line for line in self._lines if line.startswith(start)]

    def say(self, line: str) -> None:
        """Write a line to the process."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def log(self) -> str:
        """What it has logged so far; also after its end."""
        if self._log.closed:
            return self._final_log
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def terminate(self) -> None:
        self.send(signal.SIGTERM)

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    def freeze(self) -> None:
        """Stop it where it is; return when it stands."""
        self.send(signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)

    def thaw(self) -> None:
        self.send(signal.SIGCONT)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self, timeout: float = 15) -> int:
        """Wait for its end; its exit status, or minus the signal's number."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s; lines {self._lines}\n{self.log()}") from None

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # what was said last was not heard
            self._process.stdin.close()
        self._reader.join()
        self._process.stdout.close()
        self._final_log = self.log()
        self._log.close()
