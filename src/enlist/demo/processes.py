"""The demo's worker processes: started, frozen, killed and stopped like any other process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from typing import IO, TYPE_CHECKING, Final

from enlist.exceptions import EnlistError

if TYPE_CHECKING:
    import sqlalchemy as sa

__all__ = ["WorkerDied", "WorkerProcess", "content"]

STOP_SECONDS: Final = 15
LINES_SHOWN: Final = 12


class WorkerDied(EnlistError):
    """A worker of the demo ended, and nobody had killed it; the message has its last words."""


class WorkerProcess:
    """An ``enlist worker`` on the demo's shop. It ends with the process that started it, however that one ends.

    :param name: what its connections to the database are called.
    :param run_log: a file for the log of the runs. It may have no name: the process inherits it.
    """

    def __init__(self, name: str, url: sa.URL, run_log: IO[bytes]) -> None:
        self.name = name
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        url = url.update_query_dict({"application_name": name})
        environment = {
            **os.environ,
            "ENLIST_DATABASE_URL": url.render_as_string(hide_password=False),
            "ENLIST_DEMO_RUN_LOG": str(run_log.fileno()),
            "ENLIST_DEMO_ENDS_WITH_INPUT": "1",
        }
        command = [sys.executable, "-m", "enlist", "worker", "enlist.demo.shop:worker", "--log-level", "warning"]
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=self._output,
            pass_fds=[run_log.fileno()],
            start_new_session=True,  # a Ctrl-C is for the demo, which then stops its workers
        )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def check(self) -> None:
        """Raise :class:`WorkerDied` if the process has ended."""
        if (status := self._process.poll()) is not None:
            lines = content(self._output).splitlines()[-LINES_SHOWN:]
            raise WorkerDied("\n".join([f"{self.name} (pid {self.pid}) ended with status {status}:", *lines]))

    def freeze(self) -> None:
        """Stop the process where it is (SIGSTOP); its connections stay."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process with SIGKILL. It has no moment to give anything back."""
        self._process.kill()
        self._process.wait()
        self._close()

    def ask_to_stop(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()

    def stopped(self) -> int:
        """Wait until it has stopped and return its exit status; kill it after a quarter of a minute."""
        try:
            return self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.returncode
        finally:
            self._close()

    def _close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._output.close()


def content(file: IO[bytes]) -> str:
    """Return what is in a file that others write to, without moving the position that they share."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")
