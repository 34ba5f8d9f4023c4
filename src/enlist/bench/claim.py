"""``enlist bench claim``: what a claim costs by the state of the table, beside an empty one."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa

from enlist._cli_database import connecting, engine_for, one_line
from enlist._driver import shown_url
from enlist.bench._claim_facts import ClaimFacts, Claims, History, PickUp, StateFacts
from enlist.bench._claim_pinned import make_history, pick_ups, snapshot
from enlist.bench._claim_table import JUST_NOW, QUEUE, Jobs, Table, fresh_table
from enlist.bench._progress import Progress
from enlist.demo.scratch import scratch
from enlist.exceptions import ConfigurationError, InvalidOption

__all__ = ["STATES", "ClaimFacts", "Claims", "History", "PickUp", "State", "StateFacts", "run_claim"]

SCHEMA: Final = "enlist_bench_claim"

SETTINGS: Final = {"max_wal_size": "4GB", "checkpoint_timeout": "1h"}
"""Of a server of its own: no checkpoint falls into the measurement."""

SIZES: Final = (1, 100)
IN_A_ROW: Final = 5
"""Claims on one table before it is the other's turn."""

WARM_UP: Final = 3
"""Claims of each size on each table before the first is timed: connections are made, statements get compiled."""

LEVEL: Final = 1000
"""Jobs that are ready whenever it is a table's turn: more than are claimed then."""

GOAL: Final = 1.5
PINNED_GOAL: Final = 2.0

# Due in the opposite order of their ids, which is the same in both tables: where jobs differ, so are the claims.
PLAIN: Final = Jobs(made=JUST_NOW, due="statement_timestamp() - interval '1 millisecond' * share")
KEYED: Final = Jobs(made=PLAIN.made, due=PLAIN.due, key="'key ' || random_id")
MIXED: Final = Jobs(made=PLAIN.made, due=PLAIN.due, key="CASE WHEN n % 5 = 0 THEN 'key ' || random_id END")


@dataclass(frozen=True)
class State:
    """What is in a job table beside the jobs that are claimed."""

    name: str
    title: str
    number: int
    """At the scale 1."""
    jobs: Jobs | None = None
    """What there are so many of; None: jobs that were claimed and completed under an old snapshot."""
    supply: Jobs = PLAIN
    """What is put in for the claims to take."""
    ready_one_in: int | None = None
    """Every how many of the jobs could be claimed like those."""
    running: Jobs | None = None
    """A job that another worker runs."""
    beside: str = "an empty table, to claim plain jobs"
    empty_supply: Jobs | None = None
    """What is put into the empty table, if it is something else."""
    both: bool = False
    """Each claim takes one of the jobs: the empty table has no more of them than will be claimed."""
    goal: float = GOAL


STATES: Final = (
    State("done", "{:,} done jobs", 1_000_000, Jobs(status="done")),
    State(
        "future",
        "{:,} jobs of the highest priority that are due tomorrow",
        1_000_000,
        Jobs(priority="32767", due="made + interval '1 day' + interval '10 minutes' * random()"),
    ),
    State(
        "ready",
        "{:,} jobs that are ready, in 50 queues and 10 priorities; one queue is claimed from",
        1_000_000,
        Jobs(
            queue=f"CASE WHEN n % 50 = 0 THEN '{QUEUE}' ELSE '{QUEUE} ' || n % 50 END",
            priority="n / 50 % 10",
        ),
        supply=Jobs(made=PLAIN.made, due=PLAIN.due, priority="n % 10"),
        ready_one_in=50,
        empty_supply=PLAIN,
    ),
    State(
        "hot-key",
        "{:,} jobs wait in front for a key that another worker has; behind, jobs without a key and of other keys",
        100_000,
        Jobs(key="'hot'"),
        supply=MIXED,
        running=Jobs(key="'hot'", status="running"),
        beside="an empty table, to claim the same: one job in five has a key",
    ),
    State(
        "idle-key",
        "{:,} jobs of a key that nothing runs of in front, plain jobs behind; each claim takes the key's first",
        100_000,
        Jobs(key="'idle'"),
        both=True,
        beside="a table that has of the key only what will be claimed",
    ),
    State(
        "keys",
        "{:,} jobs, each with a key of its own",
        100_000,
        Jobs(key="'key ' || random_id"),
        supply=KEYED,
        ready_one_in=1,
        beside=f"a table of {LEVEL:,} such jobs",
    ),
    State(
        "pinned",
        "{:,} jobs claimed and completed by this worker while an idle transaction holds a snapshot",
        300_000,
        goal=PINNED_GOAL,
    ),
)


def run_claim(
    *,
    url: sa.URL | None = None,
    repeat: int = 5,
    claims: int = 40,
    scale: float = 1.0,
    states: Collection[str] = (),
    stale: bool = False,
    held_seconds: float = 2.0,
    progress: Progress | None = None,
) -> ClaimFacts:
    """Measure.

    :param url: the database, in which a schema ``enlist_bench_claim`` is made and dropped. So is a database on its
        server, ``enlist_bench_claim_`` and a number, for the empty table: a snapshot keeps the dead rows of a whole
        database. Default a server of its own.
    :param repeat: how many rounds; the ratios are medians of them.
    :param claims: how many of each size to time on each table in a round.
    :param scale: a factor for the number of jobs of each state.
    :param states: names of the states to measure; default all of :data:`STATES`.
    :param stale: let the planner's statistics be those of the table when it was empty.
    :param held_seconds: how long the transaction stays open whose job is to be picked up.
    :param progress: told how far it is.
    :raises InvalidOption: there is no such state, or a number is not above 0.
    :raises ConfigurationError: schema or database exist already, or the database must not be made.
    :raises EnlistError: no server could be had.
    """
    known = [state.name for state in STATES]
    for name in states:
        if name not in known:
            raise InvalidOption(f"there is no state {name!r} to measure: choose among {', '.join(known)}")
    for what, value in {"repeat": repeat, "claims": claims, "scale": scale, "held_seconds": held_seconds}.items():
        if not value > 0:
            raise InvalidOption(f"{what} is {value!r}: it must be above 0")
    chosen = [state for state in STATES if not states or state.name in states]
    progress = progress or Progress()
    progress.begin(len(chosen) * (1 + len(SIZES) * repeat))
    with (
        scratch(SCHEMA, url, settings=SETTINGS) as place,
        _database_beside(place.url) as beside,
        scratch(SCHEMA, beside) as empty,
    ):
        with connecting(engine_for(place.url)) as connection:
            server = connection.scalar(sa.text("SHOW server_version"))
            fsync = connection.scalar(sa.text("SHOW fsync"))
        measuring = _Measuring(
            place.url, empty.url, place.own_server, repeat, claims, scale, stale, held_seconds, progress
        )
        found = tuple(measuring.measure(state) for state in chosen)
    return ClaimFacts(found, scale, stale, str(server), str(fsync))


@dataclass(frozen=True)
class _Measuring:
    url: sa.URL
    empty_url: sa.URL
    own_server: bool
    repeat: int
    claims: int
    scale: float
    stale: bool
    held_seconds: float
    progress: Progress

    def measure(self, state: State) -> StateFacts:
        with (
            fresh_table(self.url, state.supply) as table,
            fresh_table(self.empty_url, state.empty_supply or state.supply) as empty,
        ):
            if self.own_server:
                with table.engine.connect() as connection:
                    connection.exec_driver_sql("CHECKPOINT")
            if self.stale:
                table.analyze()
                empty.analyze()
            with snapshot(table) if state.jobs is None else nullcontext():
                self.progress.step(f"{state.name}: bringing the table into its state")
                number, history = self._fill(state, table, empty)
                found = tuple(self._claims(state.name, size, empty, table) for size in SIZES)
                picked = () if history is None else pick_ups(table, self.repeat, self.held_seconds)
        return StateFacts(state.name, state.title.format(number), state.beside, state.goal, found, history, picked)

    def _fill(self, state: State, table: Table, empty: Table) -> tuple[int, History | None]:
        """Bring the tables into their states; return how many jobs that are."""
        number = max(round(state.number * self.scale), 1)
        history = None
        if state.jobs is None:
            history = make_history(table, number)
        else:
            if state.both:
                to_be_claimed = len(SIZES) * (WARM_UP + self.repeat * self.claims)
                number = max(number, to_be_claimed)
                empty.insert(state.jobs, to_be_claimed)
            table.insert(state.jobs, number)
        if state.running is not None:
            table.insert(state.running, 1)
        if state.ready_one_in is not None:
            table.ready = number // state.ready_one_in
        for one in (table, empty):
            one.fill(LEVEL)
            if not self.stale:
                one.analyze()
        return number, history

    def _claims(self, name: str, jobs: int, empty: Table, table: Table) -> Claims:
        """Time some on each table in turn: what slows the machine slows both."""
        tables = [empty, table]
        claimed, keyed = [0, 0], [0, 0]
        rounds: list[list[tuple[float, ...]]] = [[], []]
        for one in tables:
            one.fill(LEVEL)
            for _ in range(WARM_UP):
                one.claim(jobs)
        for _ in self.progress.rounds(self.repeat, f"{name}: claims of {jobs}"):
            milliseconds: list[list[float]] = [[], []]
            for start in range(0, self.claims, IN_A_ROW):
                for which, one in enumerate(tables):
                    one.fill(LEVEL)
                    for _ in range(min(IN_A_ROW, self.claims - start)):
                        seconds, runs = one.claim(jobs)
                        milliseconds[which].append(seconds * 1000)
                        claimed[which] += len(runs)
                        keyed[which] += sum(run.keyed for run in runs)
            for which in range(len(tables)):
                rounds[which].append(tuple(milliseconds[which]))
        asked = jobs * self.claims * self.repeat
        return Claims(jobs, tuple(rounds[0]), tuple(rounds[1]), asked, *claimed, *keyed)


@contextmanager
def _database_beside(url: sa.URL) -> Iterator[sa.URL]:
    """Another database on the same server, dropped at the end.

    :raises ConfigurationError: it exists, or must not be made.
    """
    engine = engine_for(url).execution_options(isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        number = connection.scalar(sa.text("SELECT oid FROM pg_database WHERE datname = current_database()"))
        name = f"{SCHEMA}_{number}"  # one beside each database
        if connection.scalar(sa.text("SELECT 1 FROM pg_database WHERE datname = :name"), {"name": name}):
            raise ConfigurationError(
                f"the server of {shown_url(url)} has a database {name!r} already: another run is using it, or one was"
                f" killed; to remove it: DROP DATABASE {name}"
            )
        try:
            connection.exec_driver_sql(f"CREATE DATABASE {name}")
        except sa.exc.DBAPIError as error:
            raise ConfigurationError(
                f"a second database on the server of {shown_url(url)} is needed, for an empty table to compare with,"
                f" and {name!r} could not be made: {one_line(error)}"
            ) from error
    try:
        yield url.set(database=name)
    finally:
        with engine.connect() as connection:
            connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")
