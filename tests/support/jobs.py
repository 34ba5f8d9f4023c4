"""Jobs in the test's database, written and read with plain SQL: what a worker does is checked without its code."""

from __future__ import annotations

import json
import secrets
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from psycopg import sql
from psycopg.rows import dict_row

from enlist import Worker
from tests.support.observer import Observer
from tests.support.waiting import wait_until

FINAL = ("done", "dead", "cancelled")


class Jobs:
    """Puts jobs into the table and tells what has become of them."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def add(self, kind: str, payload: dict[str, Any] | None = None, *, due_in: float = 0, **columns: Any) -> uuid.UUID:
        """Insert a job and return its id. ``columns`` are those of the table."""
        (job_id,) = self.add_many(kind, [payload or {}], due_in=due_in, **columns)
        return job_id

    def add_many(
        self, kind: str, payloads: Sequence[dict[str, Any]] | int, *, due_in: float = 0, **columns: Any
    ) -> list[uuid.UUID]:
        """Insert a job for each payload, or a number of jobs, in one transaction; their ids, in the claim's order."""
        if isinstance(payloads, int):
            payloads = [{}] * payloads
        # Ascending, as the producer's are, and unlike those of another call.
        start = int.from_bytes(secrets.token_bytes(12), "big") << 32
        ids = [uuid.UUID(int=start + number) for number in range(len(payloads))]
        names = ["id", "kind", "payload", "run_at", *columns]
        due = sql.SQL("statement_timestamp() + {} * interval '1 s'").format(due_in)
        row: list[sql.Composable] = [sql.SQL("id"), sql.Literal(kind), sql.SQL("payload::jsonb"), due]
        row += [sql.Literal(value) for value in columns.values()]
        statement = sql.SQL(
            "INSERT INTO enlist_job ({}) SELECT {} FROM unnest(%s::uuid[], %s::text[]) AS row (id, payload)"
        )
        self._observer.connection.execute(
            statement.format(sql.SQL(", ").join(map(sql.Identifier, names)), sql.SQL(", ").join(row)),
            (ids, [json.dumps(payload) for payload in payloads]),
        )
        return ids

    def row(self, job_id: uuid.UUID) -> dict[str, Any]:
        """All columns of a job."""
        with self._observer.connection.cursor(row_factory=dict_row) as cursor:
            found = cursor.execute("SELECT * FROM enlist_job WHERE id = %s", (job_id,)).fetchone()
        assert found is not None
        return found

    def status(self, job_id: uuid.UUID) -> str:
        status: str = self.row(job_id)["status"]
        return status

    def counts(self) -> dict[str, int]:
        """How many jobs there are of each status that there is."""
        return dict(self._observer.rows("SELECT status, count(*) FROM enlist_job GROUP BY status"))

    def wait(self, job_id: uuid.UUID, *statuses: str, timeout: float = 5) -> dict[str, Any]:
        """Wait until the job has one of the statuses, default a final one, and return its columns."""
        wanted = statuses or FINAL
        wait_until(lambda: self.status(job_id) in wanted, timeout, message=f"a job that is {' or '.join(wanted)}")
        return self.row(job_id)

    def wait_all(self, status: str = "done", timeout: float = 10) -> None:
        """Wait until all jobs have a status."""
        wait_until(lambda: self.counts().keys() <= {status}, timeout, message=f"all jobs {status}; now {self.counts()}")

    def wait_failed(self, job_id: uuid.UUID, attempt: int = 1, timeout: float = 5) -> dict[str, Any]:
        """Wait until the failure of an attempt is written."""
        wait_until(
            lambda: (
                (row := self.row(job_id))["status"] != "running" and row["last_error"] and row["attempt"] >= attempt
            ),
            timeout,
            message=f"a written failure of attempt {attempt}",
        )
        return self.row(job_id)

    def effects(self, job_id: uuid.UUID) -> list[tuple[Any, ...]]:
        """The committed effects of a job: (attempt, worker)."""
        return self._observer.rows("SELECT attempt, worker FROM shop_effect WHERE job_id = %s ORDER BY id", job_id)

    def effects_by_job(self) -> dict[uuid.UUID, int]:
        return dict(self._observer.rows("SELECT job_id, count(*) FROM shop_effect GROUP BY job_id"))

    def set_due(self) -> None:
        """Make all queued jobs due now: for retries whose wait is not what is tested."""
        self._observer.execute("UPDATE enlist_job SET run_at = statement_timestamp() WHERE status = 'queued'")


@contextmanager
def running(*workers: Worker) -> Iterator[None]:
    """Have workers work."""
    started: list[Worker] = []
    try:
        for worker in workers:
            worker.start()
            started.append(worker)
        yield
    finally:
        for worker in started:
            worker.stop()
