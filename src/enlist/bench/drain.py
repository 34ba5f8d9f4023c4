"""``enlist bench drain``: how many jobs a second workers finish, what that takes, and whether each was run once."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa

from enlist._cli_database import connecting, engine_for
from enlist.bench._drain_facts import Drain, DrainFacts, RowFacts, SideFacts
from enlist.bench._drain_rows import ROWS, STATES, Row, State
from enlist.bench._drain_side import Side
from enlist.bench._progress import Progress
from enlist.demo.scratch import scratch
from enlist.exceptions import InvalidOption

__all__ = ["DrainFacts", "run_drain"]

SCHEMA: Final = "enlist_bench_drain"
STATE_SCHEMA: Final = f"{SCHEMA}_state"
"""For the table of a state: it is there while the other is emptied for each drain."""

SETTINGS: Final = {"max_wal_size": "4GB", "checkpoint_timeout": "1h"}
"""Of a server of its own: no checkpoint falls into a drain, after which whole pages are written to the WAL."""


def run_drain(
    *,
    url: sa.URL | None = None,
    jobs: int = 20_000,
    repeat: int = 5,
    slots: int = 10,
    processes: int = 1,
    rows: Collection[str] = (),
    states: Collection[str] = (),
    scale: float = 1.0,
    progress: Progress | None = None,
) -> DrainFacts:
    """Measure.

    :param url: the database, in which schemas ``enlist_bench_drain`` and ``enlist_bench_drain_state`` are made and
        dropped; default a server of its own.
    :param jobs: how many to drain at a time; a quarter or a tenth of them where each takes much longer.
    :param repeat: how many rounds; what is told are medians of them.
    :param slots: of each worker.
    :param processes: how many worker processes drain. The rows that compare several of them with one take two at least.
    :param rows: names of the rows to measure; default all of :data:`ROWS`, or none if there are states.
    :param states: the same of :data:`STATES`; default none.
    :param scale: a factor for the number of jobs of the states.
    :param progress: told how far it is.
    :raises InvalidOption: there is no such row or state, or a number is not above 0.
    :raises ConfigurationError: a schema exists already.
    :raises EnlistError: no server could be had, or a worker process ended.
    """
    for what, value in {"jobs": jobs, "repeat": repeat, "slots": slots, "processes": processes, "scale": scale}.items():
        if not value > 0:
            raise InvalidOption(f"{what} is {value!r}: it must be above 0")
    chosen = [*_chosen("row", ROWS, rows, all_of_them=not states), *_chosen("state", STATES, states)]
    progress = progress or Progress()
    progress.begin((1 + repeat) * sum(2 if row.beside else 1 for row in chosen))
    with scratch(SCHEMA, url, settings=SETTINGS) as place, scratch(STATE_SCHEMA, place.url) as other:
        with connecting(engine_for(place.url)) as connection:
            server = connection.scalar(sa.text("SHOW server_version"))
            fsync = connection.scalar(sa.text("SHOW fsync"))
            synchronous_commit = connection.scalar(sa.text("SHOW synchronous_commit"))
        measuring = _Measuring(place.url, other.url, place.own_server, jobs, repeat, slots, processes, scale, progress)
        found = tuple(measuring.measure(row) for row in chosen)
    cores = os.cpu_count() or 1
    return DrainFacts(found, slots, scale, cores, str(server), str(fsync), str(synchronous_commit))


def _chosen(what: str, known: tuple[Row, ...], names: Collection[str], *, all_of_them: bool = False) -> list[Row]:
    """Those of the names, in their order in the table."""
    for name in names:
        if name not in [row.name for row in known]:
            choice = ", ".join(row.name for row in known)
            raise InvalidOption(f"there is no {what} {name!r} to measure: choose among {choice}")
    return [row for row in known if row.name in names or (all_of_them and not names)]


@dataclass(frozen=True)
class _Measuring:
    url: sa.URL
    state_url: sa.URL
    own_server: bool
    jobs: int
    repeat: int
    slots: int
    processes: int
    scale: float
    progress: Progress

    def measure(self, row: Row) -> RowFacts:
        """Drain once in each round; in turn with what it is compared with, so that what slows one slows both."""
        processes = max(self.processes, 2) if row.several else self.processes
        number = 0 if row.state is None else max(round(row.state.number * self.scale), 1)
        title = row.title.format(processes=processes, number=number)
        jobs = max(round(self.jobs * row.share), 1)
        with ExitStack() as stack:
            sides = {title: stack.enter_context(self._side(row, processes, row.state, number))}
            if row.beside:
                other = self._side(row, 1 if row.several else processes)
                sides[f"{title} ({row.beside}, in turn)"] = stack.enter_context(other)
            for what, side in sides.items():
                self.progress.step(f"{what}: getting ready")
                side.warm_up(jobs)
            drains: dict[str, list[Drain]] = {what: [] for what in sides}
            for _ in range(self.repeat):
                for what, side in sides.items():
                    self.progress.step(what)
                    drains[what].append(side.drain(jobs, self.progress))
        facts = [SideFacts(side.processes, tuple(drains[what])) for what, side in sides.items()]
        return RowFacts(row.name, title, facts[0], row.beside, facts[1] if row.beside else None)

    def _side(self, row: Row, processes: int, state: State | None = None, number: int = 0) -> Side:
        url = self.url if state is None else self.state_url
        return Side(url, row.way, processes, self.slots, state=state, number=number, own_server=self.own_server)
