"""What is measured: each measure is a function that has one peer do something, and returns the rows of the table."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import psycopg
import sqlalchemy as sa

from tests.peers.child import What
from tests.peers.drain import Failed, workers
from tests.peers.peer import Load, dsn
from tests.peers.place import Place

__all__ = ["DEFAULT", "FLOORED", "MEASURES", "Rows"]

Rows = dict[str, float]
"""The figures of a measure, by the row of the table that each belongs to."""

ENQUEUE_SECONDS: Final = 2.0
LATENCY_JOBS: Final = 250
LATENCY_SECONDS: Final = 0.02
"""From one job to the next."""
IDLE_SECONDS: Final = 2.0
"""How long a worker is left alone before it is seen how quick it is."""
FINISHED: Final = 1_000_000
FUTURE: Final = 100_000
CONSUMED: Final = 60_000


def _drain_1(place: Place) -> Rows:
    load = Load()
    found = place.drain(load, place.jobs(load, place.run.jobs))
    return {
        "drain-1": found.jobs / found.seconds,
        "wal": found.wal_bytes / found.jobs,
        "client-cpu": found.client_cpu_seconds / found.jobs * 1e6,
        "peak-rss": found.peak_rss_bytes / 2**20,
    }


def _drained(row: str, load: Load, processes: int = 1) -> Callable[[Place], Rows]:
    def measure(place: Place) -> Rows:
        found = place.drain(load, place.jobs(load, place.run.jobs), processes=processes)
        return {row: found.jobs / found.seconds}

    return measure


def _lab(row: str, milliseconds: int, jobs: int) -> Callable[[Place], Rows]:
    def measure(place: Place) -> Rows:
        return {row: place.drain(Load("sleep", milliseconds / 1000, 8), jobs).seconds}

    return measure


def _enqueued(row: str, what: What) -> Callable[[Place], Rows]:
    def measure(place: Place) -> Rows:
        place.checkpoint()
        place.settle()
        found = place.produce(what, seconds=ENQUEUE_SECONDS)
        return {row: found["times"] / found["seconds"]}

    return measure


def _bulk(place: Place) -> Rows:
    place.checkpoint()
    place.settle()
    found = place.produce("bulk", jobs=min(place.run.jobs, place.peer.most_jobs))
    return {"enqueue-bulk": found["times"] / found["seconds"]}


def _latency(place: Place) -> Rows:
    load = Load("latency")
    with workers(place.peer, place.url, load, place.settings(load)) as started:
        started.board.start()
        time.sleep(IDLE_SECONDS)
        place.settle()
        place.produce("spaced", load, jobs=LATENCY_JOBS, seconds=LATENCY_SECONDS, board=str(started.path))
        end = time.monotonic() + IDLE_SECONDS
        while len(found := started.board.latencies(LATENCY_JOBS)) < LATENCY_JOBS:
            started.check()
            if time.monotonic() > end:
                raise Failed(f"{LATENCY_JOBS - len(found)} of {LATENCY_JOBS} jobs were not run")
            time.sleep(0.01)
    percentiles = statistics.quantiles(found, n=100, method="inclusive")
    return {"latency-p50": percentiles[49] * 1e3, "latency-p99": percentiles[98] * 1e3}


def _plain(place: Place) -> float:
    """Jobs a second of a drain with nothing else there; what the ratios are of."""
    load = Load()
    found = place.drain(load, place.jobs(load, place.run.jobs))
    place.clear()
    return found.jobs / found.seconds


def _beside(row: str, add: Callable[[Place], None]) -> Callable[[Place], Rows]:
    def measure(place: Place) -> Rows:
        plain = _plain(place)
        add(place)
        place.connection.execute("VACUUM ANALYZE")
        load = Load()
        found = place.drain(load, place.jobs(load, place.run.jobs))
        return {row: found.jobs / found.seconds / plain}

    return measure


def _pinned(place: Place) -> Rows:
    plain, load = _plain(place), Load()
    with _old_snapshot(place.url):
        place.drain(load, place.jobs(load, CONSUMED))
        found = place.drain(load, place.jobs(load, place.run.jobs))
    return {"pinned": found.jobs / found.seconds / plain}


@contextmanager
def _old_snapshot(url: sa.URL) -> Iterator[None]:
    with psycopg.connect(dsn(url)) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("SELECT count(*) FROM peers_order")
        yield


MEASURES: Final[Mapping[str, Callable[[Place], Rows]]] = {
    "drain-1": _drain_1,
    "drain-2": _drained("drain-2", Load(), 2),
    "insert": _drained("insert", Load("insert")),
    "insert-grouped": _drained("insert-grouped", Load("insert-grouped")),
    "enqueue-one": _enqueued("enqueue-one", "one"),
    "enqueue-ten": _enqueued("enqueue-ten", "ten"),
    "enqueue-bulk": _bulk,
    "latency": _latency,
    "lab-2ms": _lab("lab-2ms", 2, 1000),
    "lab-10ms": _lab("lab-10ms", 10, 200),
    "finished": _beside("finished", lambda place: place.peer.add_finished(place.connection, FINISHED)),
    "future": _beside("future", lambda place: place.peer.add_future(place.connection, FUTURE)),
    "pinned": _pinned,
}
"""By their names on the command line."""

FLOORED: Final = frozenset({"enqueue-one", "enqueue-ten"})
"""What is measured of plain rows too."""

DEFAULT: Final = tuple(name for name in MEASURES if name not in {"finished", "future", "pinned"})
