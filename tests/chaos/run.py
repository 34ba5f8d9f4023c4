"""A run: jobs, workers, what is done to them, and the reckoning."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from random import Random

import sqlalchemy as sa
from sqlalchemy.orm import Session

from enlist.demo.server import EmbeddedServer
from enlist.migrations import migrate
from tests.chaos.checks import End, check_logs, check_now, count_met
from tests.chaos.faults import Faults
from tests.chaos.feeder import Feeder
from tests.chaos.fleet import STOP_SECONDS, Fleet
from tests.chaos.process import SLOTS
from tests.chaos.report import Report, Settings
from tests.chaos.tables import COUNTERS, Base, Tally
from tests.chaos.ways import CHILD, KEYS, WAYS, Way, repo
from tests.chaos.zygote import Zygote
from tests.support.observer import Observer
from tests.support.servers import binaries

LOOK_SECONDS = 0.02


def run(settings: Settings, say: Callable[[str], None] = lambda line: None) -> Report:
    """Carry it out, on a server of its own."""
    with ExitStack() as stack:
        zygote = stack.enter_context(Zygote())
        # Committed is on the disk: what a crash of the server leaves must be what it would leave anywhere.
        server = EmbeddedServer(settings={"max_connections": "400"}, binaries=binaries())
        url = stack.enter_context(server).url()
        create(sa.create_engine(url, poolclass=sa.NullPool))
        directory = Path(tempfile.mkdtemp(prefix="enlist-chaos-"))
        report = Run(settings, zygote, server, directory, say).carry_out()
        if report.wrong:
            report.directory = str(directory)
            shutil.copy(server.log_path, directory / "server.log")
        else:
            shutil.rmtree(directory)
        return report


def create(engine: sa.Engine) -> None:
    """Make the tables, with all counters at 0."""
    with engine.begin() as connection:
        migrate(connection)
        Base.metadata.create_all(connection)
        counts = (
            "INSERT INTO chaos_count (kind, number, value)"
            " SELECT kind, number, 0 FROM unnest(CAST(:kinds AS text[])) AS kind, generate_series(1, :rows) AS number"
        )
        connection.execute(sa.text(counts), {"kinds": [*WAYS, CHILD.name], "rows": COUNTERS})
        keys = [f"{way.name} {number}" for way in WAYS.values() if way.tallies for number in range(KEYS)]
        connection.execute(sa.insert(Tally), [{"key": key} for key in keys])
        connection.execute(sa.text("ANALYZE chaos_count, chaos_tally"))


class Run:
    """Its parts, one after the other."""

    def __init__(
        self, settings: Settings, zygote: Zygote, server: EmbeddedServer, directory: Path, say: Callable[[str], None]
    ) -> None:
        url = server.url()
        self._settings = settings
        self._url = url
        self._directory = directory
        self._say = say
        ways = [WAYS[name] for name in settings.ways]
        random = Random(settings.seed)
        self._random = Random(random.random())
        self._feeder = Feeder(url, ways, Random(random.random()), depth=settings.depth, most=settings.jobs)
        self._fleet = Fleet(
            zygote,
            url,
            directory,
            Random(random.random()),
            settings.ways,
            lease=settings.lease,
            fatal=settings.fatal,
        )
        self._faults = Faults(self._fleet, server, url, Random(random.random()))
        self._ways: list[Way] = ways
        self._wrong: list[str] = []
        self._samples = 0

    def carry_out(self) -> Report:
        report = Report(self._settings)
        began = time.monotonic()
        self._feeder.start()
        try:
            self._trouble(began + self._settings.seconds)
            report.seconds = time.monotonic() - began
            self._feeder.stop()
            self._fleet.calm()
            self._await_the_end()
            self._call_the_roll()
            report.counts = {**self._fleet.counts, **self._faults.counts, "samples": self._samples}
            report.calm = time.monotonic() - began - report.seconds
            self._dismiss()
        finally:
            self._feeder.stop()
            self._fleet.close()
        if self._feeder.error is not None:
            raise self._feeder.error
        with Observer(self._url) as observer:
            end = End(observer, self._feeder.ids, self._faults.cancelled)
            report.met = {**count_met(self._directory), "jobs committed with others": end.grouped()}
            self._wrong += [*self._fleet.wrong, *end.check(), *check_logs(self._directory)]
        report.statuses = dict(Counter(job["status"] for job in end.jobs.values()))
        report.by_way = dict(Counter(job["kind"] for job in end.jobs.values() if job["status"] == "done"))
        report.wrong = self._wrong
        return report

    def _trouble(self, end: float) -> None:
        settings = self._settings
        for _ in range(settings.workers):
            self._fleet.start()
        next_fault = time.monotonic() + 0.5
        next_restart = time.monotonic() + settings.restart_every * self._random.uniform(0.5, 1)
        next_sample = next_word = time.monotonic()
        while (now := time.monotonic()) < end or (self._faults.first and now < end + settings.calm_seconds):
            self._fleet.look(now)
            while len(self._fleet.members) < settings.workers:
                self._fleet.start()
            if now >= next_fault:
                self._faults.one()
                next_fault = now + self._random.expovariate(settings.pace)
            if now >= next_restart:
                self._faults.restart()
                next_restart = now + settings.restart_every * self._random.uniform(0.5, 1.5)
            if now >= next_sample:
                self._sample()
                next_sample = now + 1.0
            if now >= next_word:
                self._say(f"{end - now:.0f} s to go: {dict(self._fleet.counts)}, {len(self._feeder.ids)} jobs enqueued")
                next_word = now + 10
            time.sleep(LOOK_SECONDS)

    def _sample(self) -> None:
        with Observer(self._url) as observer:
            self._wrong += check_now(observer)
        self._samples += 1

    def _await_the_end(self) -> None:
        """Nothing is done to the workers any more: those that are left, and new ones, do all that there is."""
        end = time.monotonic() + self._settings.calm_seconds
        with Observer(self._url) as observer:
            while True:
                self._fleet.look(time.monotonic())
                while len(self._fleet.members) < self._settings.workers:
                    self._fleet.start()
                left = observer.rows(
                    "SELECT kind, status, count(*) FROM enlist_job WHERE status IN ('queued', 'running') GROUP BY 1, 2"
                )
                if not left:
                    return
                if time.monotonic() > end:
                    self._wrong.append(f"not done after {self._settings.calm_seconds:g} s without faults: {left}")
                    return
                self._wrong += check_now(observer)
                time.sleep(0.1)

    def _call_the_roll(self) -> None:
        """Have each worker run as many jobs at once as it has slots: none is lost to what it went through."""
        present = [member for member in self._fleet.members if member.stop_by is None]
        engine = sa.create_engine(self._url, poolclass=sa.NullPool)
        for prefix in ("", "async "):
            with Session(engine) as session, session.begin():
                for member in present:
                    for _ in range(SLOTS):
                        repo.enqueue(session, f"{prefix}present {member.name}", {}, queue=member.crew)
            end = time.monotonic() + 15
            with Observer(self._url) as observer:
                while absent := observer.rows(
                    "SELECT kind, status, last_error FROM enlist_job WHERE kind LIKE %s AND status <> 'done'",
                    f"{prefix}present %",
                ):
                    if time.monotonic() > end:
                        self._wrong.append(f"a worker does not use all its slots: {absent}")
                        break
                    time.sleep(0.05)

    def _dismiss(self) -> None:
        for member in self._fleet.members:
            self._fleet.stop(member)
        end = time.monotonic() + STOP_SECONDS + 5
        while self._fleet.members and time.monotonic() < end:
            self._fleet.look(time.monotonic())
            time.sleep(LOOK_SECONDS)
