"""A peer and its database: how it is filled, settled and drained."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import sqlalchemy as sa

from tests.peers.child import CANNOT, Task, What
from tests.peers.domain import Base
from tests.peers.drain import ROOT, Drained, Failed, drain, workers
from tests.peers.machine import QUIET_CORES, Meter, wait_for_quiet
from tests.peers.peer import Cannot, Load, Peer, Settings, connect

__all__ = ["Place", "Run"]

NOTHING: Final = Load()
PAUSE_SECONDS: Final = 0.3
PRODUCER_SECONDS: Final = 120.0


@dataclass(frozen=True)
class Run:
    """What is the same for all peers."""

    meter: Meter
    jobs: int = 20_000
    """Of a drain."""
    report: Callable[[str], None] = lambda line: None
    """Is told what was found, what goes wrong, and what disturbs."""
    overrides: Mapping[str, Settings] = field(default_factory=dict)
    """By the peer, settings to try in place of its own."""
    patience: float = 3.0
    """How many seconds other programs may take to become quiet."""


class Place:
    """A peer and its database."""

    def __init__(self, run: Run, peer: Peer, url: sa.URL) -> None:
        self.run = run
        self.peer = peer
        self.url = url
        self.connection = connect(url)
        # Looks for what is unfinished are part of the time: with 1,000,000 finished a scan of them all would show.
        self.connection.execute("SET enable_seqscan = off")
        self.wrong: list[str] = []
        """What was found wrong with its jobs."""
        self.foreign_cores: list[float] = []
        """How many cores other programs used during each of its drains."""

    def install(self) -> None:
        """Make the tables, the application's too."""
        engine = sa.create_engine(self.url, poolclass=sa.NullPool)
        Base.metadata.create_all(engine)
        self.peer.install(self.url)

    def close(self) -> None:
        self.connection.close()

    def clear(self) -> None:
        """Leave nothing behind that autovacuum would work on while it is another peer's turn."""
        self.peer.clear(self.connection)
        self.connection.execute("TRUNCATE peers_effect, peers_order, peers_plain_job")

    def checkpoint(self) -> None:
        """Have nothing left to write of what was before. Not between enqueueing and a drain: each page that the drain
        then changes would be written to the log whole, and how often that happens is a matter of the server's settings.
        """
        self.connection.execute("CHECKPOINT")

    def settle(self) -> None:
        """Before a timed part."""
        time.sleep(PAUSE_SECONDS)
        busy = wait_for_quiet(self.run.patience)
        if busy > QUIET_CORES:
            self.run.report(f"{self.peer.name}: other programs use {busy:.1f} cores")

    def settings(self, load: Load) -> Settings:
        """The peer's own, and what is to be tried in their place."""
        return {**self.peer.settings(load), **self.run.overrides.get(self.peer.name, {})}

    def jobs(self, load: Load, wanted: int) -> int:
        """How many jobs a drain has."""
        if load.name.startswith("insert"):
            wanted = max(wanted // 4, 1)
        return min(wanted, self.peer.most_jobs)

    def enqueue(self, jobs: int) -> str:
        """Enqueue jobs; the condition that tells whether one is not done."""
        self.checkpoint()
        unfinished = self.peer.unfinished(self.connection, jobs)
        if not self.peer.seed(self.connection, jobs):
            self.produce("bulk", jobs=jobs)
        self.connection.execute("ANALYZE")
        return unfinished

    def produce(self, what: What, load: Load = NOTHING, **arguments: Any) -> dict[str, float]:
        """Have a process enqueue.

        :param load: what the workers of the measure do.
        :raises Cannot: the peer has no way to.
        :raises Failed: it failed.
        """
        task = Task.of(self.peer, what, self.url, load, settings=self.settings(load), **arguments)
        done = subprocess.run(
            task.as_arguments(), cwd=ROOT, capture_output=True, text=True, timeout=PRODUCER_SECONDS, check=False
        )
        lines = done.stdout.strip().splitlines()
        if done.returncode == CANNOT:
            raise Cannot(lines[-1])
        if done.returncode:
            raise Failed((done.stderr.strip().splitlines() or ["no message"])[-1])
        found: dict[str, float] = json.loads(lines[-1])
        return found

    def drain(self, load: Load, jobs: int, *, processes: int = 1) -> Drained:
        """Enqueue jobs, and have them run."""
        unfinished = self.enqueue(jobs)
        self.connection.execute("TRUNCATE peers_effect")
        with workers(self.peer, self.url, load, self.settings(load), processes) as started:
            self.settle()
            effects = load.name.startswith("insert")
            drained = drain(started, self.connection, jobs, unfinished, self.run.meter, effects=effects)
        if drained.wrong:
            self.wrong.append(drained.wrong)
            self.run.report(f"{self.peer.name}: {drained.wrong}")
        self.foreign_cores.append(drained.foreign_cores)
        if drained.foreign_cores > QUIET_CORES:
            self.run.report(f"{self.peer.name}: other programs used {drained.foreign_cores:.1f} cores during a drain")
        return drained
