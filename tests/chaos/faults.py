"""What is done to the workers, by chance."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable
from random import Random

import psycopg
import sqlalchemy as sa
from sqlalchemy import URL
from sqlalchemy.orm import Session

from enlist import JobRepository
from enlist.demo.server import EmbeddedServer
from tests.chaos.fleet import Fleet, Member
from tests.chaos.process import APPLICATION
from tests.support.observer import connect

LONGEST_FREEZE = 4.0
"""Of a worker or its network, in seconds: some leases."""

repo = JobRepository(notify=None)


class Faults:
    """Does one after the other to a fleet and its server."""

    def __init__(self, fleet: Fleet, server: EmbeddedServer, url: URL, random: Random) -> None:
        self._fleet = fleet
        self._server = server
        self._url = url
        self._random = random
        self._engine = sa.create_engine(url, poolclass=sa.NullPool, connect_args={"options": "-c lock_timeout=1s"})
        self.counts: Counter[str] = Counter()
        self.cancelled: set[uuid.UUID] = set()
        """The jobs that were cancelled while they ran."""
        self._kinds: dict[Callable[[], bool], int] = {
            self.kill: 36,
            self.freeze: 12,
            self.stop: 6,
            self.terminate: 14,
            self.cut: 8,
            self.cut_all: 1,
            self.freeze_network: 8,
            self.refuse: 4,
            self.lose_answer: 20,
            self.freeze_commit: 10,
            self.cancel: 10,
        }
        self.first = [*self._kinds, self.restart]
        """What is still to be done once."""
        random.shuffle(self.first)

    def one(self) -> None:
        """Do something: everything once, in any order, and then what chance has it."""
        if self.first:
            if self.first[-1]():
                self.first.pop()
            else:
                self._random.shuffle(self.first)
        else:
            (fault,) = self._random.choices(list(self._kinds), list(self._kinds.values()))
            fault()

    def _some_time(self) -> float:
        """A moment to come: mostly within a lease or so, sometimes long after it."""
        return time.monotonic() + self._random.choice([0.3, 1.2, 2.0, LONGEST_FREEZE]) * self._random.uniform(0.5, 1)

    def _victim(self) -> Member | None:
        """One that is not about to end anyway."""
        living = [member for member in self._fleet.members if member.stop_by is None and not member.may_end]
        return self._random.choice(living) if living else None

    def _free_victim(self) -> Member | None:
        """One that moves; as long as enough do."""
        free = [member for member in self._fleet.members if not member.held and member.stop_by is None]
        return self._random.choice(free) if len(free) * 2 > len(self._fleet.members) else None

    # Each does one thing, and returns whether there was somebody to do it to.

    def kill(self) -> bool:
        if member := self._victim():
            self._fleet.kill(member)
        return member is not None

    def stop(self) -> bool:
        if member := self._free_victim():
            self._fleet.stop(member)
        return member is not None

    def freeze(self) -> bool:
        if member := self._free_victim():
            self._fleet.freeze(member, self._some_time())
            self.counts["freezes"] += 1
        return member is not None

    def freeze_network(self) -> bool:
        if member := self._free_victim():
            member.proxy.freeze()
            member.network_frozen_until = self._some_time()
            self.counts["network freezes"] += 1
        return member is not None

    def freeze_commit(self) -> bool:
        """The server gets a COMMIT, and the worker hears of it when its network thaws."""
        if member := self._free_victim():
            member.proxy.freeze_at(b"COMMIT")
            member.network_frozen_until = self._some_time()
            self.counts["network freezes"] += 1
        return member is not None

    def cut(self) -> bool:
        if member := self._victim():
            member.proxy.cut()
            self.counts["cuts"] += 1
        return member is not None

    def cut_all(self) -> bool:
        for member in self._fleet.members:
            member.proxy.cut()
            self.counts["cuts"] += 1
        return True

    def lose_answer(self) -> bool:
        """Cut the next connection that sends a COMMIT when it is answered."""
        if member := self._free_victim():
            member.proxy.lose_answer_to(b"COMMIT")
            self.counts["cuts"] += 1
        return member is not None

    def refuse(self) -> bool:
        """A network that is down for some time."""
        if member := self._free_victim():
            member.proxy.refuse()
            member.proxy.cut()
            member.refused_until = self._some_time()
            self.counts["cuts"] += 1
        return member is not None

    def terminate(self) -> bool:
        """End sessions on the server: of handlers, of the worker itself, of its listener."""
        number = self._random.choice([1, 1, 2, 5])
        listeners = self._random.random() < 0.2
        with connect(self._url) as connection:
            found = connection.execute(
                "SELECT count(*) FILTER (WHERE pg_terminate_backend(pid)) FROM (SELECT pid FROM pg_stat_activity"
                " WHERE application_name = %s AND (query ILIKE 'listen%%' OR NOT %s) ORDER BY random() LIMIT %s)"
                " AS found",
                (APPLICATION, listeners, number),
            ).fetchone()
        assert found is not None
        self.counts["terminations"] += found[0]
        return bool(found[0])

    def cancel(self) -> bool:
        """Cancel a job that runs."""
        with connect(self._url) as connection:
            row = connection.execute(
                "SELECT id FROM enlist_job WHERE status = 'running' ORDER BY random() LIMIT 1"
            ).fetchone()
        if row is None:
            return False
        try:
            with Session(self._engine) as session, session.begin():
                changed = repo.cancel(session, row[0])
        except sa.exc.OperationalError as error:
            if not isinstance(error.orig, psycopg.errors.LockNotAvailable):
                raise
            return False
        self.cancelled.update(changed.changed)
        self.counts["cancels"] += len(changed)
        return bool(changed)

    def restart(self) -> bool:
        """Crash the server."""
        self._server.restart("immediate")
        self.counts["restarts"] += 1
        return True
