"""What must be true, while it goes on and in the end; each check says what it finds wrong."""

from __future__ import annotations

import re
import uuid
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, LiteralString

from psycopg.rows import dict_row

from tests.chaos.ways import CHILD, WAYS
from tests.support.observer import Observer

SHOWN = 5
"""Rows of what is wrong in the same way."""

CONTRADICTIONS: LiteralString = (
    "SELECT id, kind, status, attempt, locked_by, locked_until, concurrency_key, concurrency_slot FROM enlist_job"
    " WHERE CASE WHEN status = 'running' THEN locked_until IS NULL OR locked_by IS NULL OR attempt < 1"
    " OR (concurrency_key IS NULL) <> (concurrency_slot IS NULL)"
    " OR NOT coalesce(concurrency_slot BETWEEN 1 AND concurrency_limit, true)"
    " ELSE locked_until IS NOT NULL OR concurrency_slot IS NOT NULL END OR attempt > max_attempts"
)
"""Rows that contradict themselves."""

CROWDED: LiteralString = (
    "SELECT concurrency_key, count(*), max(concurrency_limit) FROM enlist_job"
    " WHERE status = 'running' AND concurrency_key IS NOT NULL GROUP BY 1"
    " HAVING count(*) > max(concurrency_limit) OR count(*) > count(DISTINCT concurrency_slot)"
)
"""Keys with more running jobs than their limit."""


def check_now(observer: Observer) -> Iterator[str]:
    """What must be true at any moment."""
    for row in observer.rows(CONTRADICTIONS)[:SHOWN]:
        yield f"a row contradicts itself: {row}"
    for key, running, limit in observer.rows(CROWDED)[:SHOWN]:
        yield f"{running} jobs of key {key!r} run, and its limit is {limit}"


class End:
    """The state when all workers have ended."""

    def __init__(self, observer: Observer, enqueued: Collection[uuid.UUID], cancelled: Collection[uuid.UUID]) -> None:
        self._observer = observer
        self._enqueued = enqueued
        self._cancelled = cancelled
        with observer.connection.cursor(row_factory=dict_row) as cursor:
            rows = cursor.execute(
                "SELECT id, kind, status, attempt, max_attempts, lost, concurrency_key AS key, payload, created_at,"
                " last_error, errors, lease_token, locked_by, finished_at"
                " FROM enlist_job WHERE kind NOT LIKE '%present%' ORDER BY created_at, id"
            ).fetchall()
        self.jobs: dict[uuid.UUID, dict[str, Any]] = {row["id"]: row for row in rows}
        self._effects = dict(observer.rows("SELECT job_id, id FROM chaos_effect"))

    def grouped(self) -> int:
        """How many jobs were committed together with others."""
        found: int = self._observer.scalar(
            "SELECT coalesce(sum(jobs), 0)::bigint FROM"
            " (SELECT count(*) AS jobs FROM chaos_effect GROUP BY xmin HAVING count(*) > 1) AS together"
        )
        return found

    def check(self) -> Iterator[str]:
        """What is wrong."""
        yield from check_now(self._observer)
        for check in (
            self._kept,
            self._ended,
            self._effects_once,
            self._counted,
            self._tallied,
            self._in_order,
            self._children,
            self._errors,
        ):
            found = list(check())
            yield from found[:SHOWN]
            if len(found) > SHOWN:
                yield f"... and {len(found) - SHOWN} more like this"

    def _kept(self) -> Iterator[str]:
        for job_id in self._enqueued:
            if job_id not in self.jobs:
                yield f"job {job_id} was enqueued and is not there"

    def _ended(self) -> Iterator[str]:
        for job_id, job in self.jobs.items():
            expected = way_of(job["kind"]).ends
            if job_id in self._cancelled:
                expected = "cancelled"
            if job["status"] != expected:
                yield f"a job should be {expected}: {job}"
            if expected == "dead" and job["attempt"] != job["max_attempts"]:
                yield f"a job is dead after {job['attempt']} of {job['max_attempts']} attempts: {job}"

    def _effects_once(self) -> Iterator[str]:
        for job_id, job in self.jobs.items():
            expected = job["status"] == "done" and way_of(job["kind"]).leaves
            if (job_id in self._effects) != expected:
                yield f"a job has {'no effect' if expected else 'an effect'}: {job}"
        for job_id in self._effects:
            if job_id not in self.jobs:
                yield f"an effect of no job: {job_id}"

    def _counted(self) -> Iterator[str]:
        done = Counter(job["kind"] for job in self.jobs.values() if job["status"] == "done")
        for kind, count in self._observer.rows("SELECT kind, sum(value)::bigint FROM chaos_count GROUP BY kind"):
            expected = done[kind] if way_of(kind).leaves else 0
            if count != expected:
                yield f"the count of {kind} is {count}, and {expected} jobs are done"

    def _tallied(self) -> Iterator[str]:
        done = Counter(job["key"] for job in self.jobs.values() if job["status"] == "done")
        for key, value in self._observer.rows("SELECT key, value FROM chaos_tally"):
            if value != done[key]:
                yield f"the tally of key {key!r} is {value}, and {done[key]} jobs are done: two ran at once"

    def _in_order(self) -> Iterator[str]:
        latest: dict[str, dict[str, Any]] = {}
        for job_id, job in self.jobs.items():
            if job["kind"] == "ordered" and job_id in self._effects:
                before = latest.get(job["key"])
                if before is not None and self._effects[before["id"]] > self._effects[job_id]:
                    yield f"a job of an ordered key was done before an earlier one: {job}, {before}"
                latest[job["key"]] = job

    def _children(self) -> Iterator[str]:
        children = Counter(job["payload"]["parent"] for job in self.jobs.values() if job["kind"] == CHILD.name)
        for job_id, job in self.jobs.items():
            expected = int(way_of(job["kind"]).spawns and job["status"] == "done")
            if children[str(job_id)] != expected:
                yield f"a job has {children[str(job_id)]} children, not {expected}: {job}"

    def _errors(self) -> Iterator[str]:
        for job in self.jobs.values():
            for entry in job["errors"]:
                if not EXPECTED_ERRORS.search(entry["error"]):
                    yield f"an attempt failed by {entry['error']!r}: {job}"


def way_of(kind: str) -> Any:
    return WAYS.get(kind, CHILD)


# -- logs ------------------------------------------------------------------------------------------------------

EXPECTED_ERRORS = re.compile(
    "OnPurpose|HandlerTimeout|worker lost|it quits"
    "|OperationalError|InterfaceError|IdleInTransactionSessionTimeout"
    "|SerializationFailure|SerializationError|DeadlockDetected"
    # asyncpg's, for which SQLAlchemy has no class of its own
    "|DBAPIError / Error: (connection was closed|the database system is|terminating connection|connection is closed)"
    "|Connection(Error|RefusedError|ResetError|DoesNotExistError): |cannot switch to state \\d+"
)
"""How an attempt may fail: on purpose, by a conflict with another, or by the loss of what is taken from it."""

SECOND = re.compile(r'job (\S+) \(.* constraint "chaos_effect_job_id_key"')
"""An attempt that finds the effect of another: it may if the job was taken back from it, and its own end is refused."""

TAKEN_BACK = re.compile(r"job (\S+) \(.*: worker \S+ let its lease run out")

EXPECTED_LINES = re.compile(
    r"ERROR enlist\.worker job \S+ \((doomed, attempt 3 of 3\) is|doomed\): worker .* the job is) dead"
    # asyncpg's own, of a connection that is cut while it is being made
    r"|ERROR asyncio Future exception was never retrieved\nfuture: <Future finished exception=ConnectionError\("
)

MET = {
    "leases lost": "its lease was lost",
    "jobs taken back": "let its lease run out",
    "late handlers": "come back after it was given up",
    "commits that landed unheard": "committed, though its COMMIT raised",
    "claims whose answer was lost": "jobs of a claim whose answer was lost",
    "runs again": "is run again in the same attempt",
}
"""What the workers say they have met, by what their logs say then."""

RECORD = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ([A-Z]+) ")


def count_met(directory: Path) -> Counter[str]:
    """How often the workers have met what."""
    found: Counter[str] = Counter(dict.fromkeys(MET, 0))
    for path in directory.glob("*.log"):
        text = path.read_text(errors="replace")
        found.update({what: text.count(words) for what, words in MET.items()})
    return found


def check_logs(directory: Path) -> Iterator[str]:
    """Records of the workers' logs that no fault accounts for, and whatever they wrote elsewhere."""
    for path in sorted(directory.glob("*.raw")):
        if text := path.read_text(errors="replace"):
            yield f"worker {path.stem} wrote: {_shortened(text)}"
    logs = {path.stem: list(records(path)) for path in sorted(directory.glob("*.log"))}
    taken_back = {match[1] for log in logs.values() for _, record in log if (match := TAKEN_BACK.search(record))}
    for name, log in logs.items():
        for level, record in log:
            if not _is_expected(level, record, taken_back):
                yield f"worker {name} logged: {_shortened(record)}"


def _is_expected(level: str, record: str, taken_back: Collection[str]) -> bool:
    if EXPECTED_LINES.search(record):
        return True
    if level in {"ERROR", "CRITICAL"}:
        return False
    if ": failed," in record or "failed, next attempt" in record:
        second = SECOND.search(record)
        return second[1] in taken_back if second is not None else EXPECTED_ERRORS.search(record) is not None
    return "Traceback" not in record


def _shortened(text: str) -> str:
    return text if len(text) <= 4000 else f"{text[:1500]}\n[...]\n{text[-2500:]}"


def records(path: Path) -> Iterator[tuple[str, str]]:
    """The records of a log, (level, text); a killed worker's last may be incomplete."""
    level = ""
    lines: list[str] = []
    for line in path.read_text(errors="replace").splitlines():
        if (match := RECORD.match(line)) is not None:
            if lines:
                yield level, "\n".join(lines)
            level, lines = match[1], []
        lines.append(line)
    if lines:
        yield level, "\n".join(lines)
