"""The report: a Markdown table of medians, how enlist stands to the best peer, and what each one was told to do."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tests.peers.peer import PLAIN
from tests.peers.run import Results

__all__ = ["ROWS", "Row", "ratios", "table"]


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    measure: str
    label: str
    digits: int = 0
    less_is_better: bool = False


ROWS: Final[Mapping[str, Row]] = {
    "drain-1": Row("drain-1", "drain, 1 process, jobs/s"),
    "drain-2": Row("drain-2", "drain, 2 processes, jobs/s"),
    "insert": Row("insert", "one INSERT a job, a commit each, jobs/s"),
    "insert-grouped": Row("insert-grouped", "one INSERT a job, the quickest way, jobs/s"),
    "enqueue-one": Row("enqueue-one", "enqueue 1 job and commit, transactions/s"),
    "enqueue-ten": Row("enqueue-ten", "enqueue 10 jobs and a row, transactions/s"),
    "enqueue-bulk": Row("enqueue-bulk", "enqueue in bulk, jobs/s"),
    "latency-p50": Row("latency", "commit to start, p50, ms", 2, less_is_better=True),
    "latency-p99": Row("latency", "commit to start, p99, ms", 2, less_is_better=True),
    "lab-2ms": Row("lab-2ms", "1,000 jobs of 2 ms on 8 slots, s", 3, less_is_better=True),
    "lab-10ms": Row("lab-10ms", "200 jobs of 10 ms on 8 slots, s", 3, less_is_better=True),
    "wal": Row("drain-1", "WAL, bytes a job", less_is_better=True),
    "client-cpu": Row("drain-1", "worker's CPU, us a job", less_is_better=True),
    "peak-rss": Row("drain-1", "worker's peak memory, MiB", less_is_better=True),
    "finished": Row("finished", "drain with 1,000,000 finished, ratio", 2),
    "future": Row("future", "drain with 100,000 future, ratio", 2),
    "pinned": Row("pinned", "drain under an old snapshot, ratio", 2),
}


def ratios(row: Row, ours: Mapping[int, float], theirs: Sequence[Mapping[int, float]]) -> float | None:
    """How many times better ours is than the best of theirs: the median over the rounds that both have."""
    found = []
    for number, mine in ours.items():
        others = [figures[number] for figures in theirs if number in figures]
        if others:
            found.append(min(others) / mine if row.less_is_better else mine / max(others))
    return statistics.median(found) if found else None


def table(results: Results, measures: Sequence[str]) -> str:
    """The Markdown table: a column for each peer, a row for each figure, the best in bold."""
    rows = {name: row for name, row in ROWS.items() if row.measure in measures}
    columns = [*results.peers]
    if any(PLAIN in results.figures.get(name, {}) for name in rows):
        columns.append(PLAIN)
    titles = ["plain rows" if name == PLAIN else name for name in columns]
    lines = [
        f"| | {' | '.join(titles)} | enlist to the best peer |",
        f"|---|{'---:|' * len(columns)}---:|",
    ]
    for name, row in rows.items():
        cells = _cells(results, name, row, columns)
        lines.append(f"| {row.label} | {' | '.join(cells)} | {_standing(results, name, row)} |")
    return "\n".join(lines)


def _cells(results: Results, name: str, row: Row, columns: Sequence[str]) -> Iterator[str]:
    figures = results.figures.get(name, {})
    medians = {peer: statistics.median(figures[peer].values()) for peer in columns if figures.get(peer)}
    of_peers = [median for peer, median in medians.items() if peer != PLAIN]
    best = (min if row.less_is_better else max)(of_peers, default=None)
    for peer in columns:
        if peer in medians:
            text = f"{medians[peer]:,.{row.digits}f}"
            yield f"**{text}**" if peer != PLAIN and medians[peer] == best else text
        elif error := results.error(row.measure, peer):
            yield f"error: {error.replace('|', '/')}"
        else:
            yield "cannot" if peer in results.cannot.get(row.measure, {}) else ""


def _standing(results: Results, name: str, row: Row) -> str:
    """enlist's ratios: of the better of its two ways, and, where there is such a column, to plain rows."""
    figures = results.figures.get(name, {})
    ours = {peer: of_peer for peer, of_peer in figures.items() if _is_ours(peer)}
    if not ours:
        return ""
    best = (min if row.less_is_better else max)(ours, key=lambda peer: statistics.median(ours[peer].values()))
    theirs = [of_peer for peer, of_peer in figures.items() if not _is_ours(peer) and peer != PLAIN]
    ratio = ratios(row, ours[best], theirs)
    text = "" if ratio is None else f"{ratio:.2f}" + (f" ({best.removeprefix('enlist-')})" if len(ours) > 1 else "")
    if PLAIN in figures:
        to_plain = ratios(row, ours[best], [figures[PLAIN]])
        text += f"{'; ' if text else ''}{to_plain:.2f} of plain rows"
    return text


def _is_ours(peer: str) -> bool:
    return peer.startswith("enlist")
