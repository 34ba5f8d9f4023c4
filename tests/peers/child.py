"""``python -m tests.peers.child``: a worker or a producer, in a process of its own; its task is its one argument."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

import sqlalchemy as sa

from tests.peers.board import Board
from tests.peers.peer import Cannot, Load, Peer, Producer, Settings, Work, load_peer, run

__all__ = ["CANNOT", "Task"]

CANNOT: Final = 3
"""The exit status of a producer whose queue has no way to do it."""

WARM_UP: Final = 50
"""Transactions before the first is timed: statements get compiled and prepared, pools get filled."""


What = Literal["work", "one", "ten", "bulk", "spaced"]


@dataclass(frozen=True)
class Task:
    """What a process is to do."""

    peer: str
    what: What
    url: str
    load: dict[str, Any] | None = None
    board: str = ""
    process: int = 0
    jobs: int = 0
    seconds: float = 0
    """How long to enqueue; of `spaced` jobs, from one to the next."""
    settings: Settings | None = None
    """Of the queue; default those that the peer itself chooses."""

    @classmethod
    def of(cls, peer: Peer, what: What, url: sa.URL, load: Load | None = None, **others: Any) -> Task:
        """A task for a peer."""
        return cls(
            peer.name, what, url.render_as_string(hide_password=False), None if load is None else asdict(load), **others
        )

    def as_arguments(self) -> list[str]:
        """The command line of the process."""
        return [sys.executable, "-m", "tests.peers.child", json.dumps(asdict(self))]


def main() -> int:
    """Do it; what a producer has measured is printed as JSON."""
    logging.basicConfig(level=logging.WARNING)
    task = Task(**json.loads(sys.argv[1]))
    peer, url, load = load_peer(task.peer), sa.make_url(task.url), Load(**task.load or {})
    settings = peer.settings(load) if task.settings is None else task.settings
    if task.what == "work":
        peer.work(Work(url, load, Board(Path(task.board)), task.process, settings))
        return 0
    try:
        run(_produce(peer, url, settings, task))
    except Cannot as why:
        print(why)
        return CANNOT
    return 0


async def _produce(peer: Peer, url: sa.URL, settings: Settings, task: Task) -> None:
    async with peer.producer(url, settings) as producer:
        if task.what == "spaced":
            await _spaced(producer, task, Board(Path(task.board)))
            found = {}
        elif task.what == "bulk":
            began = time.perf_counter()
            await producer.bulk(task.jobs)
            found = {"times": task.jobs, "seconds": time.perf_counter() - began}
        else:
            found = await _again_and_again(producer, task)
    print(json.dumps(found))


async def _again_and_again(producer: Producer, task: Task) -> dict[str, float]:
    async def one(number: int) -> None:
        await producer.one(number)

    async def ten(_: int) -> None:
        await producer.ten()

    once: Callable[[int], Awaitable[None]] = one if task.what == "one" else ten
    for number in range(WARM_UP):
        await once(number)
    times, began = 0, time.perf_counter()
    while (seconds := time.perf_counter() - began) < task.seconds:
        await once(times)
        times += 1
    return {"times": times, "seconds": seconds}


async def _spaced(producer: Producer, task: Task, board: Board) -> None:
    due = time.monotonic()
    for number in range(task.jobs):
        await producer.one(number)
        board.committed(number)
        due += task.seconds
        await asyncio.sleep(max(0.0, due - time.monotonic()))


if __name__ == "__main__":
    sys.exit(main())
