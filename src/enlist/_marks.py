"""Up to where a worker has taken jobs: so that it need not walk over them again and again.

What a claim took leaves entries in the index, and while an old transaction is open anywhere in the database nothing can
remove them: a claim that starts at the front of its line walks over them all. So a worker remembers where it stopped in
each class, the jobs of a queue with one priority. What comes to lie before a mark, say a job whose transaction was
open for long, is found by the next look at everything: at once when a claim finds less than it asked for, and now
and then while all slots are busy. Jobs that wait for a slot of their key lie before a mark as well: the keys that the
worker has had jobs of are looked at by themselves. While a look at everything is cheap each claim is one, and no mark
counts.
"""

from __future__ import annotations

import math
import time
import uuid
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from enlist._statements import NO_MARKS

if TYPE_CHECKING:
    from collections.abc import Iterable

    import sqlalchemy as sa

    from enlist._slots import Run

__all__ = ["Marks"]

CHEAP_SECONDS: Final = 0.005
"""A look at everything that takes no longer, beside the jobs that it brings, is cheap."""

JOB_SECONDS: Final = 0.00003
"""What a job more makes any claim take, about."""

SHARE: Final = 20
"""While all slots are busy, looks at everything may take this part of the time."""

SELDOM_SECONDS: Final = 1.0
"""How often they are made then, at most."""

LONGEST_SECONDS: Final = 10.0
"""But so often they are, however long they take."""

MOST: Final = 100
"""How many classes, and how many keys, are remembered: the latest."""

LOOKS: Final = 5
"""So many looks at everything in a row must be dear: one may be so because the machine was busy."""

_FRONT: Final = (-math.inf, uuid.UUID(int=0))


class Marks:
    """The marks of one worker. For the thread that claims."""

    def __init__(self) -> None:
        self._marks: dict[tuple[str, bool, int], tuple[float, uuid.UUID]] = {}
        self.in_use = False
        """Whether they count: looks at everything were dear the last times."""
        self._whole_wanted = False
        self._keys: dict[tuple[str, str], None] = {}
        self._looks: deque[float] = deque(maxlen=LOOKS)
        self._whole_ended = -math.inf
        self._no_use_until = -math.inf

    @property
    def any_keyed(self) -> bool:
        """Whether they count, and the worker has taken jobs with a concurrency key."""
        return self.in_use and any(keyed for _, keyed, _ in self._marks)

    def want_whole(self) -> None:
        """Have the next claim look at everything: something lies before a mark. From any thread."""
        self._whole_wanted = True

    def whole_next(self) -> bool:
        """Whether the next claim is to look at everything."""
        if not self.in_use or self._whole_wanted:
            return True
        pause = min(max(SELDOM_SECONDS, SHARE * self._looks[-1]), LONGEST_SECONDS)
        return time.monotonic() >= self._whole_ended + pause

    def parameters(self, *, whole: bool) -> dict[str, list[Any]]:
        """What the statements are given.

        For a look at everything the classes alone: what lies between them is looked for, and it need not be at the
        front of one that is known.
        """
        if not self.in_use:
            return NO_MARKS
        classes = list(self._marks)
        ends = [_FRONT] * len(classes) if whole else list(self._marks.values())
        keys = [] if whole else list(self._keys)
        return {
            "mark_queues": [queue for queue, _, _ in classes],
            "mark_keyed": [keyed for _, keyed, _ in classes],
            "mark_priorities": [priority for _, _, priority in classes],
            "mark_dues": [due for due, _ in ends],
            "mark_ids": [id_ for _, id_ in ends],
            "held_queues": [queue for queue, _ in keys],
            "held_keys": [key for _, key in keys],
        }

    def begin_whole(self) -> None:
        """Note that everything is looked at now."""
        self._whole_wanted = False

    def end(self, *, whole: bool, seconds: float, jobs: int) -> None:
        """Note how long a claim took, and judge whether marks are of use."""
        now = time.monotonic()
        seconds = max(0.0, seconds - jobs * JOB_SECONDS)
        if whole:
            self._looks.append(seconds)
            self._whole_ended = now
            dear = len(self._looks) == LOOKS and min(self._looks) > CHEAP_SECONDS
            self.in_use = dear and now >= self._no_use_until
        elif seconds * 2 > min(self._looks):
            # It is not what was taken that takes the time: the machine is slow.
            self.in_use = False
            self._no_use_until = now + SELDOM_SECONDS

    def note(self, jobs: Iterable[Run | sa.Row[Any]], *, keyed: bool) -> None:
        """Note jobs that were taken, or seen with their key and taken, in their order: none before them is left."""
        last = {(job.queue, keyed, job.priority): (job.due, job.id) for job in jobs}
        for name, place in last.items():
            known = self._marks.pop(name, None)  # and put it at the end: it is the latest
            self._marks[name] = place if known is None or place > known else known
        _forget(self._marks)

    def hold(self, jobs: Iterable[Run]) -> None:
        """Note jobs that were taken with their keys: others of these wait, maybe before a mark."""
        for job in jobs:
            if job.concurrency_key is not None:
                self._keys.pop((job.queue, job.concurrency_key), None)
                self._keys[job.queue, job.concurrency_key] = None
        _forget(self._keys)


def _forget(remembered: dict[Any, Any]) -> None:
    while len(remembered) > MOST:
        del remembered[next(iter(remembered))]
