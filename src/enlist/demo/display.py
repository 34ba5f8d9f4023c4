"""How the demo shows what is going on: live bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Display"]

LINE_SECONDS: Final = 1.0
"""How often a plain line is written."""


class Display:
    """Tells of events, and of how far orders and jobs are."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()
        self._last_line = 0.0
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._orders = self._progress.add_task("orders placed", total=None)
        self._jobs = self._progress.add_task("jobs done", total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._progress.stop()

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._started

    def say(self, text: str) -> None:
        """Tell of an event."""
        self._console.print(Text(f"{self.seconds:5.1f} s  {text}"), soft_wrap=True)

    def update(self, orders: int, of_orders: int, jobs: int, of_jobs: int) -> None:
        """Show how far it is."""
        if not self._progress.disable:
            self._progress.update(self._orders, completed=orders, total=of_orders)
            self._progress.update(self._jobs, completed=jobs, total=of_jobs)
        elif self.seconds - self._last_line >= LINE_SECONDS:
            self._last_line = self.seconds
            self.say(f"orders placed: {orders:,} of {of_orders:,}; jobs done: {jobs:,} of {of_jobs:,}")
