"""Processes that a measurement starts, and that do what they are told: lines of JSON there and back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from enlist.exceptions import EnlistError

if TYPE_CHECKING:
    from types import ModuleType

    import sqlalchemy as sa

__all__ = ["Processes"]


class Processes:
    """Some processes of one module. They end with the process that started them, however that one ends.

    :param module: what to run. It gets the database's URL as ``ENLIST_DATABASE_URL``, answers each line of its standard
        input with a line, and ends with its input.
    """

    def __init__(self, module: ModuleType, url: sa.URL, number: int) -> None:
        self._name = module.__name__.rpartition(".")[2]
        environment = {**os.environ, "ENLIST_DATABASE_URL": url.render_as_string(hide_password=False)}
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", module.__name__],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,  # a Ctrl-C is for the measurement, which then ends them
            )
            for _ in range(number)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it has ended, and left something unread
                process.stdin.close()
        for process in self._processes:
            assert process.stdout is not None
            process.stdout.close()  # first: one that has much to say would wait for a reader
            process.wait()

    def ask(self, task: dict[str, Any]) -> list[Any]:
        """Have all of them do a task at once; their answers.

        :raises EnlistError: one of them has ended.
        """
        line = json.dumps(task) + "\n"
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except BrokenPipeError:
                self._ended(process)
        return [self._answer(process) for process in self._processes]

    def _answer(self, process: subprocess.Popen[str]) -> Any:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            self._ended(process)
        return json.loads(line)

    def _ended(self, process: subprocess.Popen[str]) -> None:
        raise EnlistError(f"a {self._name} process has ended with status {process.wait()}: see what it says above")
