"""``enlist bench indexes``: what each index of the job table costs in WAL, what it is for, and what fillfactor costs.

Read from the WAL itself by the extension ``pg_walinspect``: each record names the file that it changes, so the bytes
of each index are known from runs with all of them. Nothing has to be dropped (without the claim's index a claim is a
scan of the table), and what else the server writes meanwhile does not blur it.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import sqlalchemy as sa
from sqlalchemy.orm import Session

from enlist._claimer import SOON_SECONDS, Claimer
from enlist._cli_database import connecting, engine_for, one_line
from enlist._completer import Completer
from enlist._database import Database
from enlist._engines import housekeeping_engine
from enlist._leases import Heartbeat, Leases
from enlist._reaper import expired
from enlist._slots import Demand, Slots
from enlist.bench._index_facts import (
    CLAIM_BATCH,
    FILLFACTORS,
    INSERT_BATCH,
    PHASES,
    REST,
    SORTS,
    TABLE,
    IndexFacts,
    Life,
)
from enlist.demo.scratch import scratch
from enlist.exceptions import ConfigurationError, EnlistError
from enlist.handlers import HandlerRegistry
from enlist.models import STORAGE_PARAMETERS, JobRecord
from enlist.payload import JobPayload
from enlist.repository import EnqueueOptions, JobRepository

__all__ = ["run_indexes"]

SCHEMA: Final = "enlist_bench_indexes"
QUEUE: Final = "mail"
LEASE: Final = dt.timedelta(hours=1)
PATIENCE_SECONDS: Final = 10.0

SETTINGS: Final = {
    # No copies of whole pages: which job pays for one is a matter of when the last checkpoint was.
    "full_page_writes": "off",
    "checkpoint_timeout": "1d",
    "max_wal_size": "16GB",
    "autovacuum": "off",
}
"""Of a server of our own. That of a ``url`` is taken as it is."""


class SendReceipt(JobPayload, kind="send_receipt", queue=QUEUE):
    """A small payload."""

    order_id: int
    language: str = "en"


class SendInOrder(SendReceipt, kind="send_in_order", ordered=True):
    """The same, of which those with one key run one after the other."""


def run_indexes(*, url: sa.URL | None = None, jobs: int = 20_000) -> IndexFacts:
    """Measure.

    :param url: the database, in which a schema ``enlist_bench_indexes`` is made and dropped; default a server of its
        own. It takes a user who may install ``pg_walinspect`` and use it: a superuser.
    :param jobs: how many of each sort.
    :raises ConfigurationError: the server has no ``pg_walinspect``, which comes with PostgreSQL 15 and later.
    :raises EnlistError: no server or schema could be had.
    """
    own = int(str(STORAGE_PARAMETERS["fillfactor"]))
    with scratch(SCHEMA, url, settings=SETTINGS) as place, _bench(place.url) as bench:
        lives = {sort: bench.live(sort, jobs, own) for sort in SORTS}
        by_fillfactor = {own: lives["plain"]}
        for fillfactor in FILLFACTORS:
            if fillfactor not in by_fillfactor:
                by_fillfactor[fillfactor] = bench.live("plain", jobs, fillfactor)
        server, fsync, full_page_writes = map(bench.show, ("server_version", "fsync", "full_page_writes"))
    fillfactors = tuple(by_fillfactor[fillfactor] for fillfactor in FILLFACTORS)
    return IndexFacts(tuple(lives.values()), fillfactors, server, fsync, full_page_writes)


@contextmanager
def _bench(url: sa.URL) -> Iterator[_Bench]:
    engine = sa.create_engine(url)
    database = Database(housekeeping_engine(engine, None), JobRecord)
    try:
        functions = _install_walinspect(url)
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            # By itself it would come at any time, in any phase.
            connection.exec_driver_sql(f"ALTER TABLE {TABLE} SET (autovacuum_enabled = off)")
            yield _Bench(engine, database, connection, functions)
    finally:
        database.close()
        engine.dispose()


def _install_walinspect(url: sa.URL) -> str:
    """Install the extension, where it is not; return the schema of its functions, quoted."""
    try:
        with connecting(engine_for(url)) as connection:
            connection.exec_driver_sql("CREATE EXTENSION IF NOT EXISTS pg_walinspect")
            found = sa.text(
                "SELECT quote_ident(nspname) FROM pg_extension JOIN pg_namespace ON pg_namespace.oid = extnamespace"
                " WHERE extname = 'pg_walinspect'"
            )
            return str(connection.scalar(found))
    except sa.exc.DBAPIError as error:
        raise ConfigurationError(
            f"the extension pg_walinspect cannot be installed ({one_line(error)}): it reads what is written to the WAL;"
            " it comes with PostgreSQL 15 and later (in the contrib package), and a superuser installs it"
        ) from error


@dataclass
class _Bench:
    """The parts of a worker, without its threads, and a connection to look at the server."""

    engine: sa.Engine
    database: Database
    connection: sa.Connection
    functions: str
    """The schema of ``pg_walinspect``."""
    _spans: list[tuple[str, str, str]] = field(default_factory=list)
    """(phase, where the WAL was before, and after)."""

    def show(self, setting: str) -> str:
        """A setting of the server."""
        return str(self.connection.exec_driver_sql(f"SHOW {setting}").scalar_one())

    def live(self, sort: str, jobs: int, fillfactor: int) -> Life:
        """Lead some jobs through their lives, in a table that is new: no page in it can be from before a checkpoint."""
        for statement in (
            f"ALTER TABLE {TABLE} SET (fillfactor = {fillfactor})",
            f"TRUNCATE {TABLE}",
        ):
            self.connection.exec_driver_sql(statement)
        self._spans.clear()
        before = self._scans()
        self._insert(sort, jobs)
        queued_bytes = self._size()
        self._work_off(jobs)
        done_bytes = self._size()
        after = self._scans()
        with self._phase("vacuum"):
            self.connection.exec_driver_sql(f"VACUUM (INDEX_CLEANUP ON) {TABLE}")
        wal, page_images = self._wal(list(after))
        scans = {name: after[name] - before[name] for name in after}
        return Life(sort, jobs, fillfactor, wal, page_images, scans, queued_bytes, done_bytes)

    def _insert(self, sort: str, jobs: int) -> None:
        repo = JobRepository(notify=None)
        with Session(self.engine) as session:
            for first in range(0, jobs, INSERT_BATCH):
                numbers = range(first, min(first + INSERT_BATCH, jobs))
                with self._phase("insert"):
                    repo.enqueue_many(session, [_job(sort, number) for number in numbers])
                    session.execute(_FLUSH_SCANS)
                    session.commit()

    def _work_off(self, jobs: int) -> None:
        """Claim, renew and complete; between the two the reaper looks, and finds nothing."""
        registry = HandlerRegistry()
        for payload_type in (SendReceipt, SendInOrder):
            registry.handler(payload_type)(_ignore)
        leases = Leases()
        claimer = Claimer(
            self.database,
            registry,
            leases,
            worker="bench",
            lease=LEASE,
            poll_interval=1.0,
            give_back=_unexpected,
        )
        claimer.slots = Slots({QUEUE: CLAIM_BATCH}, _unexpected, _ignore)
        heartbeat = Heartbeat(self.database, leases, LEASE, _unexpected, _unexpected)
        completer = Completer(self.database, leases, _ignore, _ignore)
        done, last = 0, time.monotonic()
        while done < jobs:
            with self._phase("claim"):
                runs = claimer.claim([Demand(QUEUE, free=CLAIM_BATCH, number=CLAIM_BATCH)])
            if not runs:  # it does not look at all of the queue every time
                if time.monotonic() > last + PATIENCE_SECONDS:
                    raise EnlistError(f"no claim finds the {jobs - done:,} jobs that are left")
                time.sleep(SOON_SECONDS)
                continue
            last = time.monotonic()
            with self._phase("renew"):
                heartbeat.beat()
            expired(self.database)
            with self._phase("complete"):
                for run in runs:
                    completer.complete(run)
                completer.step()
            done += len(runs)
        self.database.execute(_FLUSH_SCANS, {})

    @contextmanager
    def _phase(self, phase: str) -> Iterator[None]:
        start = self._position()
        yield
        self._spans.append((phase, start, self._position()))

    def _position(self) -> str:
        return str(self.connection.exec_driver_sql("SELECT pg_current_wal_insert_lsn()").scalar_one())

    def _wal(self, indexes: list[str]) -> tuple[dict[str, dict[str, int]], int]:
        """Add up what the spans have in the WAL, by name and phase; and how much of it are copies of whole pages."""
        # Commits: what was written before is on disk then, and only from there it can be read.
        self.connection.exec_driver_sql("SELECT pg_logical_emit_message(true, 'enlist', '')")
        spans = [span for span in self._spans if span[1] != span[2]]
        phases, starts, ends = (list(column) for column in zip(*spans, strict=True))
        rows = self.connection.execute(
            _records(self.functions), {"phases": phases, "starts": starts, "ends": ends, "table": TABLE}
        ).all()
        wal = {name: dict.fromkeys(PHASES, 0) for name in (TABLE, *indexes, REST)}
        for row in rows:
            if row.name is not None:
                wal[row.name][row.phase] = row.bytes
        for phase, total in self.connection.execute(_TOTALS, {"phases": phases, "starts": starts, "ends": ends}).all():
            wal[REST][phase] = total - sum(found[phase] for found in wal.values())
        return wal, sum(row.page_images for row in rows if row.name is not None)

    def _size(self) -> int:
        return int(self.connection.exec_driver_sql(f"SELECT pg_relation_size('{TABLE}')").scalar_one())

    def _scans(self) -> dict[str, int]:
        found = self.connection.execute(_SCANS, {"table": TABLE}).all()
        return {row.indexrelname: row.idx_scan for row in found}


def _job(sort: str, number: int) -> tuple[JobPayload, EnqueueOptions]:
    """A job; what it is short of a key is the same for all."""
    if sort == "plain":
        return SendReceipt(order_id=number), {}
    if sort == "unique":
        return SendReceipt(order_id=number), {"unique_key": f"receipt:{number}"}
    payload = SendInOrder(order_id=number) if sort == "ordered" else SendReceipt(order_id=number)
    return payload, {"concurrency_key": f"customer:{number}", "concurrency_limit": 1}


def _ignore(*_: object) -> None:
    pass


def _unexpected(run: object, _why: str = "") -> None:
    raise EnlistError(f"{run} was not to be lost: is something else at work on this table?")


_FLUSH_SCANS: Final = sa.text("SELECT pg_stat_force_next_flush()")
"""What a connection has counted is seen by others at the end of the transaction, not up to a second later."""

_SCANS: Final = sa.text(
    """
    SELECT indexrelname, idx_scan
    FROM pg_stat_user_indexes
    WHERE relid = to_regclass(:table)
    ORDER BY indexrelid
    """
)

_SPANS: Final = """
    unnest(CAST(:phases AS text[]), CAST(:starts AS pg_lsn[]), CAST(:ends AS pg_lsn[])) AS span(phase, begins, ends)
"""

_TOTALS: Final = sa.text(
    f"SELECT span.phase, CAST(sum(span.ends - span.begins) AS bigint) FROM {_SPANS} GROUP BY 1"  # noqa: S608
)


def _records(functions: str) -> sa.TextClause:
    """Add up the records of spans of the WAL, by phase and by the file that they change (of several, the first).

    Each record takes a multiple of eight bytes.
    """
    return sa.text(
        rf"""
        SELECT
            span.phase,
            relation.name,
            CAST(sum((record.record_length + 7) / 8 * 8) AS bigint) AS bytes,
            CAST(sum(record.fpi_length) AS bigint) AS page_images
        FROM {_SPANS}
        CROSS JOIN LATERAL {functions}.pg_get_wal_records_info(span.begins, span.ends) AS record
        LEFT JOIN (
            SELECT pg_class.relname AS name, concat(pg_database.oid, '/', pg_relation_filenode(pg_class.oid)) AS file
            FROM pg_class, pg_database
            WHERE datname = current_database()
            AND (
                pg_class.oid = to_regclass(:table)
                OR pg_class.oid IN (SELECT indexrelid FROM pg_index WHERE indrelid = to_regclass(:table))
            )
        ) AS relation ON relation.file = substring(record.block_ref FROM 'rel \d+/(\d+/\d+)')
        GROUP BY 1, 2
        """  # noqa: S608 - the schema is quoted
    )
