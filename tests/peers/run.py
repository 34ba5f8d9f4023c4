"""The rounds: in each one, measure after measure, the peers in turn; so what disturbs one disturbs all."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import sqlalchemy as sa
from psycopg import sql

from tests.peers.drain import Failed
from tests.peers.measures import FLOORED, MEASURES
from tests.peers.peer import PLAIN, Cannot, connect, load_peer
from tests.peers.place import Place, Run

__all__ = ["Results", "measure"]


@dataclass
class Results:
    """What was found."""

    peers: Sequence[str]
    figures: dict[str, dict[str, dict[int, float]]] = field(default_factory=dict)
    """By row, peer and round."""
    errors: dict[str, dict[str, str]] = field(default_factory=dict)
    """By measure and peer: the last message."""
    cannot: dict[str, dict[str, str]] = field(default_factory=dict)
    """The same, of what a peer has no way to do."""
    wrong: dict[str, list[str]] = field(default_factory=dict)
    """By peer: which jobs were lost or run twice."""
    foreign_cores: list[float] = field(default_factory=list)
    """How many cores other programs used during each drain."""
    seconds: float = 0
    """How long it all took."""

    def error(self, what: str, name: str) -> str:
        """Why a peer has no figure in a measure; empty if it has not failed."""
        return self.errors.get("install", {}).get(name, "") or self.errors.get(what, {}).get(name, "")

    @property
    def status(self) -> int:
        """The exit status: whether enlist did all it should."""
        ours = [name for name in self.peers if name.startswith("enlist")]
        failed = any(name in errors for errors in self.errors.values() for name in ours)
        return 1 if failed or any(self.wrong.get(name) for name in ours) else 0


def measure(url: sa.URL, run: Run, peers: Sequence[str], measures: Sequence[str], rounds: int) -> Results:
    """Measure.

    :param url: of a database of the server; the peers get databases of their own beside it, which are dropped.
    """
    began, results = time.monotonic(), Results(peers)
    floor = [PLAIN] if FLOORED & set(measures) else []
    with ExitStack() as stack:
        places: dict[str, Place] = {}
        for name in [*peers, *floor]:
            try:
                places[name] = stack.enter_context(_place(url, run, name))
            except Exception as error:  # one that cannot be had does not stop the others
                results.errors.setdefault("install", {})[name] = error_line(error)
                run.report(f"{name}: error: {error_line(error)}")
        for number in range(1, rounds + 1):
            for what in measures:
                for name, place in places.items():
                    if name != PLAIN or what in FLOORED:
                        _take(results, what, place, number)
        for name, place in places.items():
            results.foreign_cores += place.foreign_cores
            if place.wrong:
                results.wrong[name] = place.wrong
    results.seconds = time.monotonic() - began
    return results


@contextmanager
def _place(url: sa.URL, run: Run, name: str) -> Iterator[Place]:
    """A peer with its tables in a database of its own."""
    peer = load_peer(name)
    database = f"peers_{name.replace('-', '_')}_{secrets.token_hex(4)}"
    with connect(url) as admin:
        admin.execute(sql.SQL("CREATE DATABASE {} TEMPLATE template0").format(sql.Identifier(database)))
        try:
            place = Place(run, peer, url.set(database=database))
            try:
                place.install()
                yield place
            finally:
                place.close()
        finally:
            admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(database)))


def _take(results: Results, what: str, place: Place, number: int) -> None:
    name = place.peer.name
    began, failed = time.monotonic(), ""
    try:
        place.clear()
        for row, figure in MEASURES[what](place).items():
            of_row = results.figures.setdefault(row, {}).setdefault(name, {})
            of_row[number] = figure
            place.run.report(f"round {number}, {row}, {name}: {figure:,.4g} ({time.monotonic() - began:.1f} s)")
    except Cannot as why:
        results.cannot.setdefault(what, {})[name] = str(why)
    except Exception as error:  # it does not stop the others
        failed = error_line(error)
    try:
        place.clear()
    except Exception as error:
        failed = failed or error_line(error)
    if failed:
        results.errors.setdefault(what, {})[name] = failed
        place.run.report(f"round {number}, {what}, {name}: error: {failed}")


def error_line(error: Exception) -> str:
    """An error on one line."""
    lines = str(error).strip().splitlines() or [""]
    return (lines[0] if isinstance(error, Failed) else f"{type(error).__name__}: {lines[0]}")[:300]
