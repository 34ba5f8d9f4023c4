"""Enqueues jobs of all ways, so that there always are some."""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Sequence
from random import Random

import sqlalchemy as sa
from sqlalchemy import URL
from sqlalchemy.orm import Session

from enlist import JobRecord
from tests.chaos.ways import Way

LOOK_SECONDS = 0.2


class Feeder:
    """On a thread of its own. The server may be restarted under it."""

    def __init__(self, url: URL, ways: Sequence[Way], random: Random, *, depth: float, most: int) -> None:
        self._ways = ways
        self._random = random
        self._depth = depth
        self._most = most
        self._engine = sa.create_engine(url, poolclass=sa.NullPool)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="feeder", daemon=True)
        self._numbers: Counter[str] = Counter()
        self.ids: list[uuid.UUID] = []
        """The jobs that were enqueued for sure."""
        self.error: Exception | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set() and len(self.ids) < self._most:
            try:
                self._feed()
            except sa.exc.OperationalError:  # no server just now
                pass
            except Exception as error:
                self.error = error
                return
            self._stop.wait(LOOK_SECONDS)

    def _feed(self) -> None:
        with Session(self._engine) as session:
            queued = sa.select(JobRecord.kind, sa.func.count().label("ready")).where(JobRecord.status == "queued")
            rows = session.execute(queued.group_by(JobRecord.kind))
            ready = {row.kind: row.ready for row in rows}
        for way in self._ways:
            depth = max(1, int(way.depth * self._depth))
            missing = min(depth - ready.get(way.name, 0), self._most - len(self.ids))
            if missing * 2 < depth:
                continue
            with Session(self._engine) as session:
                ids = []
                for _ in range(missing):
                    ids.append(way.enqueue(session, self._random, self._numbers[way.name]))
                    self._numbers[way.name] += 1
                session.commit()
            self.ids += ids
