"""Several jobs in one transaction: which, and how many.

A group is made while it runs: a job that has a slot is followed, in the same Session, by those of its kind that wait
for one. It ends at its size, or after some milliseconds, so that what it has done is not kept from the others for
long. It is optimistic: when anything goes wrong all is rolled back and each job runs by itself; and a kind that has had
that runs by itself for a while (groups on rows that others write too are mostly deadlocks).
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

from enlist.exceptions import LeaseLost

if TYPE_CHECKING:
    from enlist._slots import Run
    from enlist.handlers import Handler

__all__ = ["Group", "GroupSizes"]

GROUP_SECONDS: Final = 0.05
"""How long a group takes in further jobs."""

CLEAN_JOBS: Final = 100
"""So many jobs without a failure double the size that a failure had made 1."""


class Group:
    """Jobs of one kind that run one after the other and commit together."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._closes = time.monotonic() + GROUP_SECONDS
        self.members: list[Run] = []
        self.current: Run | None = None
        """The one whose handler runs."""

    @property
    def takes_more(self) -> bool:
        """Whether another job may follow."""
        return len(self.members) < self._size and time.monotonic() < self._closes

    def enter(self, run: Run) -> None:
        """Take a job in, whose handler is called now."""
        self.members.append(run)
        self.current = run
        run.group = self

    def alone(self, run: Run) -> None:
        """Note that a member is run by itself: those behind it wait for it all the same."""
        self.current = run

    def leave(self) -> None:
        """Note that the handler has returned."""
        if self.current is not None:
            self.current.finished = time.monotonic()
        self.current = None

    def is_whole(self) -> bool:
        """Whether there is something to commit.

        :raises LeaseLost: a member was given up while it waited for the others: nothing of it may be committed.
        """
        for run in self.members:
            if run.abandoned is not None:
                raise LeaseLost(run.id, run.token)
        return bool(self.members)

    def others(self, run: Run) -> list[Run]:
        """Those that wait for a member's handler."""
        return [other for other in self.left if other is not run] if self.current is run else []

    @property
    def left(self) -> list[Run]:
        """The members whose end is not known."""
        return [run for run in self.members if not run.ended]


class GroupSizes:
    """How many jobs of a kind may be in a group now."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reduced: dict[str, int] = {}
        self._clean: dict[str, int] = {}

    def size_for(self, run: Run) -> int:
        """The most jobs of a group that begins with this one; 1: it runs by itself.

        So do jobs with a concurrency key, which others wait for, and careful ones.
        """
        if run.handler.commit_every == 1 or run.careful or run.keyed:
            return 1
        return self._reduced.get(run.kind, run.handler.commit_every)

    def failed(self, handler: Handler) -> None:
        """Note that something went wrong: the next run by themselves."""
        if handler.commit_every > 1:
            with self._lock:
                self._reduced[handler.kind] = 1
                self._clean[handler.kind] = 0

    def went_well(self, handler: Handler, jobs: int) -> None:
        """Note jobs that were done."""
        if handler.kind not in self._reduced:
            return
        with self._lock:
            clean = self._clean.get(handler.kind, 0) + jobs
            if clean >= CLEAN_JOBS:
                clean = 0
                size = self._reduced[handler.kind] * 2
                if size >= handler.commit_every:
                    self._reduced.pop(handler.kind)
                else:
                    self._reduced[handler.kind] = size
            self._clean[handler.kind] = clean
