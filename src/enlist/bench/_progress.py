"""How a measurement says how far it is: on standard error, and only where that is of use."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import TypeVar

    T = TypeVar("T")

__all__ = ["Progress", "progress_of_command"]

LINE_SECONDS: Final = 1.0
"""How often a plain line is written, at most."""


class Progress:
    """Tells the steps of a measurement as they begin: a bar on a terminal, plain lines elsewhere.

    Nothing is drawn between the steps: a thread that draws would take from what is measured.

    :param console: where to; default nowhere.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console
        self._started = time.monotonic()
        self._last_line = -LINE_SECONDS
        self._steps = self._step = 0
        self._bars: Bars | None = None
        if console is not None and console.is_terminal:
            columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
            self._bars = Bars(*columns, console=console, auto_refresh=False, transient=True)
            self._task = self._bars.add_task("starting", total=None)

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def begin(self, steps: int) -> None:
        """Say of how many steps it will be."""
        self._steps, self._step = steps, 0

    def step(self, what: str) -> None:
        """Tell that the next step begins."""
        self._step += 1
        now = time.monotonic()
        if self._bars is not None:
            self._draw(self._step - 1, f"{self._step} of {self._steps}: {what}")
        elif self._console is not None and now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            line = Text(f"{now - self._started:6.1f} s  {self._step} of {self._steps}: {what}")
            self._console.print(line, soft_wrap=True)

    def within(self, share: float) -> None:
        """Tell how much of the step is done, from 0 to 1; only a bar shows it."""
        if self._bars is not None:
            self._draw(self._step - 1 + share)

    def rounds(self, number: int, what: str) -> Iterator[int]:
        """Count to ``number``, each a step."""
        return self.each(range(number), what)

    def each(self, items: Iterable[T], what: str) -> Iterator[T]:
        """Go through some items, each a step."""
        for item in items:
            self.step(what)
            yield item

    def _draw(self, done: float, what: str | None = None) -> None:
        assert self._bars is not None
        self._bars.update(self._task, completed=done, total=self._steps, description=what, refresh=True)


def progress_of_command(*, as_json: bool) -> Progress:
    """For a command: on a terminal always, else only if a person is going to read what comes.

    :param as_json: it is a program that will.
    """
    console = Console(stderr=True)
    return Progress(None if as_json and not console.is_terminal else console)
