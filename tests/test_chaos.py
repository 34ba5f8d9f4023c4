"""Workers are killed, frozen and cut off, their server crashes: each job is done once all the same."""

from __future__ import annotations

import uuid
from typing import Any, LiteralString

import pytest
from sqlalchemy import Engine

from tests.chaos.checks import End, check_logs
from tests.chaos.report import Report, Settings
from tests.chaos.run import create, run
from tests.support import Observer
from tests.support.jobs import Jobs

QUICK = ["lease", "async_lease", "hold_lock", "batched", "key_of_one", "ordered", "flaky", "parent"]


def check(report: Report) -> None:
    """It found nothing wrong, and it was no picnic."""
    assert not report.wrong, str(report)
    for what in ("kills", "freezes", "network freezes", "cuts", "restarts", "terminations", "cancels"):
        assert report.counts[what] > 0, str(report)
    assert report.statuses["done"] > 0, str(report)


def test_each_job_is_done_once_though_workers_and_server_die() -> None:
    check(run(Settings(seconds=1, workers=4, ways=QUICK, seed=1, depth=0.25, pace=12, fatal=0.01)))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_job_is_done_once_in_whatever_way_its_handler_is_run() -> None:
    check(run(Settings(seconds=20, seed=2, restart_every=8)))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_limits_and_the_order_of_keys_hold_while_workers_die() -> None:
    ways = ["key_of_one", "key_of_three", "ordered"]
    check(run(Settings(seconds=10, seed=3, ways=ways, restart_every=8, pace=5)))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_jobs_that_share_a_transaction_share_its_fate() -> None:
    report = run(Settings(seconds=10, workers=4, seed=4, ways=["grouped", "async_grouped"], restart_every=8, pace=2))
    check(report)
    assert report.met["jobs committed with others"] > 0, str(report)


# -- what is wrong would be found ------------------------------------------------------------------------------

SPOILED: dict[str, tuple[LiteralString, str]] = {
    "a lost job": ("DELETE FROM enlist_job WHERE id = %(lease)s", "was enqueued and is not there"),
    "a job left behind": ("UPDATE enlist_job SET status = 'queued' WHERE id = %(lease)s", "should be done"),
    "a lost effect": ("DELETE FROM chaos_effect WHERE job_id = %(lease)s", "has no effect"),
    "an effect too many": (
        "INSERT INTO chaos_effect (job_id, kind, worker, attempt) VALUES (%(doomed)s, 'doomed', '', 1)",
        "has an effect",
    ),
    "an effect there twice": (
        "UPDATE chaos_count SET value = value + 1 WHERE kind = 'lease' AND number = 7",
        "the count of lease is 2, and 1 jobs are done",
    ),
    "two at once": (
        "UPDATE chaos_tally SET value = value - 1 WHERE key = 'ordered 0'",
        "the tally of key 'ordered 0' is 1, and 2 jobs are done",
    ),
    "out of order": (
        "UPDATE chaos_effect SET id = DEFAULT WHERE job_id = %(ordered)s",
        "was done before an earlier one",
    ),
    "a lost child": ("DELETE FROM enlist_job WHERE kind = 'child'", "has 0 children, not 1"),
    "a child too many": (
        "UPDATE enlist_job SET kind = 'child', payload = jsonb_build_object('parent', id) WHERE kind = 'lease'",
        "has 1 children, not 0",
    ),
    "attempts too many": (
        "UPDATE enlist_job SET attempt = 4 WHERE id = %(doomed)s",
        "a row contradicts itself",
    ),
    "an error that is nobody's": (
        """UPDATE enlist_job SET errors = '[{"error": "UniqueViolation"}]' WHERE id = %(lease)s""",
        "an attempt failed by 'UniqueViolation'",
    ),
}


@pytest.fixture
def ids(engine: Engine, observer: Observer) -> dict[str, uuid.UUID]:
    """Jobs as they should be in the end, and what they have left."""
    create(engine)
    jobs = Jobs(observer)
    done: dict[str, Any] = {"status": "done", "attempt": 1}
    ids = {
        "lease": jobs.add("lease", **done),
        "ordered": jobs.add("ordered", **done, concurrency_key="ordered 0", concurrency_limit=1, ordered=True),
        "later": jobs.add("ordered", **done, concurrency_key="ordered 0", concurrency_limit=1, ordered=True),
        "parent": jobs.add("parent", **done),
        "doomed": jobs.add("doomed", status="dead", attempt=3, max_attempts=3),
    }
    ids["child"] = jobs.add("child", {"parent": str(ids["parent"])}, **done)
    for name, job_id in ids.items():
        if name != "doomed":
            kind = "ordered" if name == "later" else name
            observer.execute(
                "INSERT INTO chaos_effect (job_id, kind, worker, attempt) VALUES (%s, %s, '', 1)", job_id, kind
            )
            observer.execute("UPDATE chaos_count SET value = value + 1 WHERE kind = %s AND number = 7", kind)
    observer.execute("UPDATE chaos_tally SET value = 2 WHERE key = 'ordered 0'")
    return ids


def test_nothing_is_wrong_with_what_is_right(ids: dict[str, uuid.UUID], observer: Observer) -> None:
    assert list(End(observer, ids.values(), []).check()) == []


@pytest.mark.parametrize("what", SPOILED)
def test_what_is_wrong_is_found(what: str, ids: dict[str, uuid.UUID], observer: Observer) -> None:
    statement, message = SPOILED[what]
    observer.connection.execute(statement, ids)
    assert any(message in found for found in End(observer, ids.values(), []).check())


@pytest.mark.parametrize(
    "record",
    [
        "ERROR enlist.worker job 1 (lease, attempt 1 of 9): the attempt ended in an unexpected way",
        "WARNING enlist.worker job 1 (lease, attempt 1 of 9) failed, next attempt in 1: IntegrityError: twice",
        "WARNING enlist.worker something odd\nTraceback (most recent call last):\n  KeyError",
    ],
)
def test_what_a_log_says_is_found(record: str, tmp_path: Any) -> None:
    usual = "2026-01-02 03:04:05,678 INFO enlist.worker worker 1 starts\n"
    (tmp_path / "1.log").write_text(usual)
    assert list(check_logs(tmp_path)) == []
    (tmp_path / "1.log").write_text(f"{usual}2026-01-02 03:04:05,678 {record}\n{usual}")
    (found,) = check_logs(tmp_path)
    assert record in found


def test_a_second_attempt_is_expected_only_of_a_job_that_was_taken_back(tmp_path: Any) -> None:
    second = (
        "2026-01-02 03:04:05,678 WARNING enlist.worker job 1 (lease, attempt 1 of 9) failed, next attempt in 1:"
        ' IntegrityError / UniqueViolation: duplicate key value violates unique constraint "chaos_effect_job_id_key"\n'
    )
    (tmp_path / "1.log").write_text(second)
    assert len(list(check_logs(tmp_path))) == 1
    (tmp_path / "2.log").write_text(
        "2026-01-02 03:04:04,000 WARNING enlist.worker job 1 (lease): worker host:1:abc let its lease run out;"
        " the job is queued again\n"
    )
    assert list(check_logs(tmp_path)) == []


def test_what_a_worker_says_elsewhere_is_found(tmp_path: Any) -> None:
    (tmp_path / "1.raw").write_text("Exception in thread\n")
    assert len(list(check_logs(tmp_path))) == 1
