"""A job table on which claims are timed, the worker that makes them, and the jobs that are put into it."""

from __future__ import annotations

import datetime as dt
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from enlist._claimer import Claimer
from enlist._completer import Completer
from enlist._database import Database
from enlist._engines import housekeeping_engine
from enlist._leases import Leases
from enlist._slots import Demand, Run, Slots
from enlist.handlers import HandlerRegistry
from enlist.migrations import migrate
from enlist.models import JobRecord

if TYPE_CHECKING:
    import uuid
    from collections.abc import Iterator

    from sqlalchemy.orm import Session

    from enlist.job import Job

__all__ = ["KIND", "QUEUE", "Claimant", "Jobs", "Table", "fresh_table", "insert_one", "make_anew"]

KIND: Final = "bench_claim"
QUEUE: Final = "work"
LEASE: Final = dt.timedelta(hours=1)

EARLIER: Final = "statement_timestamp() - interval '2 hours' + interval '1 hour' * share"
JUST_NOW: Final = "statement_timestamp() - interval '1 millisecond' * (1 - share)"


@dataclass(frozen=True)
class Jobs:
    """Rows as real ones look, by SQL expressions.

    These may be of ``n``, the row's number from 1; ``share``, the same as a share of all; ``random_id``, a random text;
    and ``made`` and ``due``, the times, in what comes after them.

    Those that were made earlier are spread over an hour and due up to ten minutes later, so that the order of ids,
    which goes by the time, is not the order in which they are due.
    """

    kind: str = KIND
    """Not an expression; nor is the status."""
    status: str = "queued"
    queue: str = f"'{QUEUE}'"
    priority: str = "0"
    key: str = "NULL"
    """Its limit is 1."""
    made: str = EARLIER
    due: str = "made + interval '10 minutes' * random()"

    def insert(self) -> sa.Insert:
        """The statement: parameter ``number``; returns ids."""
        running, queued = self.status == "running", self.status == "queued"
        milliseconds = "to_hex(floor(extract(epoch FROM made) * 1000)::bigint)"
        ended = self.status not in {"queued", "running"}
        values = {
            # Version 7, as enlist's own: new ones go to the right end of the primary key.
            "id": f"(lpad({milliseconds}, 12, '0') || '7' || substr(replace(random_id, '-', ''), 14))::uuid",
            "kind": f"'{self.kind}'",
            "queue": self.queue,
            "status": f"'{self.status}'",
            "attempt": "0" if queued else "1",
            "priority": self.priority,
            "payload": "jsonb_build_object('order_id', n, 'language', 'en')",
            "concurrency_key": self.key,
            "concurrency_limit": "NULL" if self.key == "NULL" else f"CASE WHEN {self.key} IS NOT NULL THEN 1 END",
            "concurrency_slot": "1" if running and self.key != "NULL" else "NULL",
            "lease_token": "0" if queued else "1",
            "locked_by": "NULL" if queued else "'another'",
            "locked_until": "statement_timestamp() + interval '1 hour'" if running else "NULL",
            "run_at": "due",
            "created_at": "made",
            "started_at": "NULL" if queued else "due + interval '1 second'",
            "finished_at": "due + interval '2 seconds'" if ended else "NULL",
        }
        number = sa.bindparam("number", type_=sa.Integer)
        series = sa.func.generate_series(1, number).table_valued(sa.column("n", sa.Integer)).render_derived()
        rows: Any = sa.select(
            series.c.n,
            (sa.cast(series.c.n, sa.Double) / number).label("share"),
            sa.cast(sa.func.gen_random_uuid(), sa.Text).label("random_id"),
        )
        for name, value in {"made": self.made, "due": self.due}.items():
            rows = sa.select(sa.text("*"), sa.literal_column(value).label(name)).select_from(rows.subquery())
        columns: list[Any] = [sa.literal_column(value) for value in values.values()]
        table = sa.inspect(JobRecord).local_table
        assert isinstance(table, sa.Table)
        insert = sa.insert(table).from_select(
            list(values), sa.select(*columns).select_from(rows.subquery()), include_defaults=False
        )
        return insert.returning(table.c.id)


class Claimant:
    """Claims and completes as a worker does; its jobs have no handlers that would do anything.

    All that this measurement knows of a worker's inside is here.
    """

    def __init__(self, engine: sa.Engine) -> None:
        handlers = HandlerRegistry()

        @handlers.handler(KIND)
        def nothing(session: Session, job: Job[dict[str, Any]]) -> None:
            """Never called."""

        self._database = Database(housekeeping_engine(engine, None), JobRecord)
        self._database.open()
        leases = Leases()
        self._claimer = Claimer(
            self._database,
            handlers,
            leases,
            worker="bench",
            lease=LEASE,
            poll_interval=1.0,
            give_back=lambda _run: None,
        )
        self._completer = Completer(self._database, leases, self._claimer.due_in, self._claimer.wake)
        self._claimer.slots = Slots({QUEUE: 1000}, start=lambda _run: None, wanted=self._claimer.wake)

    def claim(self, number: int) -> list[Run]:
        """Claim as many jobs at most, for as many free slots."""
        return self._claimer.claim([Demand(QUEUE, free=number, number=number)])

    def complete(self, runs: list[Run]) -> None:
        """Set them done."""
        for run in runs:
            self._completer.complete(run)
        while not self._completer.empty:
            self._completer.step()

    def close(self) -> None:
        """Close its connections."""
        self._database.close()


def insert_one(connection: sa.Connection, jobs: Jobs) -> uuid.UUID:
    """Put one in, in whatever transaction the connection is in; return its id."""
    made: uuid.UUID = connection.execute(jobs.insert(), {"number": 1}).scalar_one()
    return made


class Table:
    """A job table with a worker at it."""

    def __init__(self, engine: sa.Engine, worker: Claimant, supply: Jobs) -> None:
        """:param supply: the jobs that are put in for claims to take."""
        self.engine = engine
        self.worker = worker
        self.supply = supply
        self.ready = 0
        """How many jobs a claim could take by now."""

    def insert(self, jobs: Jobs, number: int) -> None:
        """Put jobs in."""
        if number > 0:
            counted = sa.select(sa.func.count()).select_from(jobs.insert().cte("made_jobs"))
            with self.engine.connect() as connection:
                connection.execute(counted, {"number": number})

    def insert_one(self, jobs: Jobs) -> uuid.UUID:
        """Put one in; return its id."""
        with self.engine.connect() as connection:
            return insert_one(connection, jobs)

    def fill(self, level: int) -> None:
        """Have so many jobs ready."""
        self.insert(self.supply, level - self.ready)
        self.ready = max(level, self.ready)

    def analyze(self) -> None:
        """Have the planner know what is in it."""
        with self.engine.connect() as connection:
            connection.exec_driver_sql("ANALYZE enlist_job")

    def claim(self, number: int) -> tuple[float, list[Run]]:
        """Claim, and complete what was claimed; return the seconds of the claim."""
        began = time.perf_counter()
        runs = self.worker.claim(number)
        seconds = time.perf_counter() - began
        self.worker.complete(runs)
        self.ready -= len(runs)
        return seconds, runs


def make_anew(engine: sa.Engine) -> None:
    """Make a new job table in place of what is there. Autovacuum leaves it: by itself it would come at any time."""
    with engine.connect().execution_options(isolation_level="READ COMMITTED") as connection, connection.begin():
        # Not emptied: what ANALYZE has found out about it would stay.
        JobRecord.metadata.drop_all(connection)
        connection.exec_driver_sql("DROP TABLE enlist_schema")
        migrate(connection)
        connection.exec_driver_sql("ALTER TABLE enlist_job SET (autovacuum_enabled = off)")


@contextmanager
def fresh_table(url: sa.URL, supply: Jobs) -> Iterator[Table]:
    """A new job table in place of what is there, and a worker that has seen nothing yet."""
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT")
    try:
        make_anew(engine)
        worker = Claimant(engine)
        try:
            yield Table(engine, worker, supply)
        finally:
            worker.close()
    finally:
        engine.dispose()
