"""Old and new code side by side: workers and producers of two releases on one database."""

from __future__ import annotations

import io
from typing import Any

import pytest
import sqlalchemy as sa
import tenacity
from pydantic import ConfigDict
from rich.console import Console
from sqlalchemy import URL, Engine
from sqlalchemy.orm import Session

from enlist import HandlerRegistry, Job, JobPayload, JobRepository, SchemaError, Worker
from enlist._cli_status import print_status, read_status
from enlist.migrations import migrate
from tests.shop import Effect
from tests.support import Observer, wait_until
from tests.support.jobs import Jobs, running

repo = JobRepository()


# A(x), then A(x, *, y), then A(*, y). Each release has a class of the kind, of the same name.


class Ship1(JobPayload, kind="ship"):
    x: int


class Ship2(JobPayload, kind="ship", version=2):
    x: int
    y: str

    @classmethod
    def upgrade(cls, version: int, data: dict[str, Any]) -> dict[str, Any]:
        return {**data, "y": f"of {data['x']}"}


class Ship3(JobPayload, kind="ship", version=3):
    model_config = ConfigDict(extra="forbid")

    y: str

    @classmethod
    def upgrade(cls, version: int, data: dict[str, Any]) -> dict[str, Any]:
        if version < 2:
            data = Ship2.upgrade(version, data)
        return {"y": data["y"]}


RELEASES: list[type[JobPayload]] = [Ship1, Ship2, Ship3]
PAYLOADS: list[JobPayload] = [Ship1(x=1), Ship2(x=2, y="b"), Ship3(y="c")]


@pytest.fixture
def jobs(observer: Observer) -> Jobs:
    return Jobs(observer)


def release(label: str, *kinds: type[JobPayload] | str) -> HandlerRegistry:
    """The handlers that a release has: each notes by whom a job was done, and with what."""
    handlers = HandlerRegistry()

    def handle(session: Session, job: Job[Any]) -> None:
        seen = job.payload if isinstance(job.payload, dict) else job.payload.model_dump()
        session.add(Effect(job_id=job.id, attempt=job.attempt, worker=f"{label} {seen}"))

    for kind in kinds:
        handlers.handler(kind, wait=tenacity.wait_fixed(600))(handle)
    return handlers


def worker(engine: Engine, handlers: HandlerRegistry) -> Worker:
    return Worker(engine, handlers, poll_interval=0.05)


def enqueue(engine: Engine, *payloads: JobPayload) -> list[Any]:
    with Session(engine) as session, session.begin():
        return [repo.enqueue(session, payload).id for payload in payloads]


# -- kinds -----------------------------------------------------------------------------------------------------------


def test_an_old_worker_never_touches_a_new_kind_and_goes_on_with_its_own(
    engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    with running(worker(engine, release("v1", "A"))):
        new = jobs.add_many("B", 20)
        written = observer.rows("SELECT id, xmin FROM enlist_job ORDER BY id")
        for _ in range(5):  # behind the 20 in the queue's order: to get at each it passes them by
            (effect,) = _effects(jobs, jobs.add("A"), timeout=2)
            assert effect == (1, "v1 {}")
        assert observer.rows("SELECT id, xmin FROM enlist_job WHERE kind = 'B' ORDER BY id") == written
        with running(worker(engine, release("v2", "A", "B"))):
            jobs.wait_all()
    assert [jobs.effects(job_id) for job_id in new] == [[(1, "v2 {}")]] * 20


def _effects(jobs: Jobs, job_id: Any, timeout: float) -> list[tuple[Any, ...]]:
    assert jobs.wait(job_id, timeout=timeout)["status"] == "done"
    return jobs.effects(job_id)


def test_a_kind_that_was_removed_for_good_is_seen_in_the_status(engine: Engine, jobs: Jobs) -> None:
    jobs.add_many("removed", 3)
    jobs.add("A", due_in=60)
    with engine.connect() as connection:
        status = read_status(connection, handled=release("v2", "A").kinds)
    assert status.unhandled == ["removed"]
    assert (status.queued_kinds["removed"].due, status.queued_kinds["A"].due) == (3, 0)
    console = Console(file=io.StringIO(), width=120)
    print_status(status, console)
    assert isinstance(console.file, io.StringIO)
    assert "Queued, but no handler here: removed" in console.file.getvalue()


# -- payloads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (1, ["v1 {'x': 1}", "v1 {'x': 2}", None]),  # of version 2 it takes no notice of y
        (2, ["v2 {'x': 1, 'y': 'of 1'}", "v2 {'x': 2, 'y': 'b'}", None]),
        (3, ["v3 {'y': 'of 1'}", "v3 {'y': 'b'}", "v3 {'y': 'c'}"]),
    ],
    ids=["A(x)", "A(x, *, y)", "A(*, y)"],
)
def test_a_worker_of_each_release_with_payloads_of_each(
    number: int, expected: list[str | None], engine: Engine, jobs: Jobs
) -> None:
    """What it cannot read is left, with all its attempts, to a worker that can."""
    ids = enqueue(engine, *PAYLOADS)
    with running(worker(engine, release(f"v{number}", RELEASES[number - 1]))):
        for job_id, effect in zip(ids, expected, strict=True):
            if effect is not None:
                assert _effects(jobs, job_id, timeout=5) == [(1, effect)]
            else:
                row = jobs.wait_failed(job_id, attempt=0)
                assert (row["status"], row["attempt"]) == ("queued", 0)
                assert f"does not fit Ship{number} version {number}: stored as version 3" in row["last_error"]
    jobs.set_due()
    with running(worker(engine, release("v3", Ship3))):
        jobs.wait_all()
    assert jobs.row(ids[2])["attempt"] == 1
    assert jobs.effects(ids[2]) == [(1, "v3 {'y': 'c'}")]


def test_an_old_worker_looks_at_what_is_too_new_for_it_once_in_ten_seconds(
    engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    """So its other jobs are not delayed, and when the new worker is there all is done by the first attempt."""

    def all_done() -> bool:
        jobs.set_due()  # in place of ten seconds; either worker may take them then
        return jobs.counts() == {"done": 25}

    with running(worker(engine, release("v1", Ship1))):
        new = enqueue(engine, *[Ship3(y=str(number)) for number in range(20)])
        put_back = "SELECT count(*) = 20 FROM enlist_job WHERE status = 'queued' AND last_error IS NOT NULL"
        wait_until(lambda: observer.scalar(put_back))
        assert observer.scalar("SELECT min(run_at - created_at) >= interval '10 s' FROM enlist_job")
        for number in range(5):
            (job_id,) = enqueue(engine, Ship1(x=number))
            assert _effects(jobs, job_id, timeout=2) == [(1, f"v1 {{'x': {number}}}")]
        # A claim and the putting back change the token: each was looked at once.
        assert observer.scalar("SELECT array_agg(DISTINCT lease_token) FROM enlist_job WHERE payload ? 'y'") == [2]
        with running(worker(engine, release("v3", Ship3))):
            wait_until(all_done, timeout=20)
    assert [len(jobs.effects(job_id)) for job_id in new] == [1] * 20
    assert observer.scalar("SELECT max(attempt) FROM enlist_job") == 1


@pytest.mark.slow
def test_what_is_too_new_holds_up_none_of_those_it_would_share_a_transaction_with(engine: Engine, jobs: Jobs) -> None:
    handlers = HandlerRegistry()

    @handlers.handler(Ship1, commit_every=10)
    def ship(session: Session, job: Job[Ship1]) -> None:
        session.add(Effect(job_id=job.id, attempt=job.attempt))

    ids = enqueue(engine, *[Ship3(y="new") if number == 3 else Ship1(x=number) for number in range(8)])
    new = ids.pop(3)
    with running(Worker(engine, handlers, queues={"default": 1}, poll_interval=0.05)):
        row = jobs.wait_failed(new, attempt=0)
        assert [jobs.wait(job_id)["attempt"] for job_id in ids] == [1] * 7
    assert (row["status"], row["attempt"]) == ("queued", 0)
    assert jobs.effects_by_job() == dict.fromkeys(ids, 1)


def test_a_change_that_forgot_the_version_leaves_the_job_to_the_new_worker(engine: Engine, jobs: Jobs) -> None:
    """The old worker fails, by its handler's wait; the attempt counts."""

    class Forgot(JobPayload, kind="ship"):
        z: int

    (job_id,) = enqueue(engine, Forgot(z=1))
    with running(worker(engine, release("v1", Ship1))):
        row = jobs.wait_failed(job_id)
    assert (row["status"], row["attempt"]) == ("queued", 1)
    assert "does not fit Ship1 version 1: stored as version 1; payload.x: Field required" in row["last_error"]
    jobs.set_due()
    with running(worker(engine, release("v2", Forgot))):
        assert _effects(jobs, job_id, timeout=5) == [(2, "v2 {'z': 1}")]


# -- releases of enlist itself ---------------------------------------------------------------------------------------


def test_rows_of_a_producer_that_knows_no_versions_are_of_version_1(engine: Engine, jobs: Jobs) -> None:
    """The release before wrote no version; nor do programs in other languages."""
    job_id = jobs.add("ship", {"x": 7})
    with running(worker(engine, release("v3", Ship3))):
        assert _effects(jobs, job_id, timeout=5) == [(1, "v3 {'y': 'of 7'}")]


def test_a_worker_does_not_start_before_the_step_that_it_needs(empty_database_url: URL) -> None:
    engine = sa.create_engine(empty_database_url)
    with engine.begin() as connection:
        migrate(connection, to=3)
    with pytest.raises(SchemaError, match="lacks the columns payload_version: run `enlist migrate`"):
        worker(engine, release("v1", Ship1)).start()
    with engine.begin() as connection:
        assert migrate(connection)[0] == 4
    with running(worker(engine, release("v1", Ship1))):
        pass
    engine.dispose()


def test_the_step_rewrites_no_table_and_keeps_what_is_there(empty_database_url: URL) -> None:
    engine = sa.create_engine(empty_database_url, poolclass=sa.NullPool)
    with engine.begin() as connection:
        migrate(connection, to=3)
        connection.exec_driver_sql(
            "INSERT INTO enlist_job (id, kind) SELECT gen_random_uuid(), 'ship' FROM generate_series(1, 100)"
        )
        file = connection.scalar(sa.text("SELECT pg_relation_filenode('enlist_job')"))
    with engine.begin() as connection:
        migrate(connection, to=4)
        assert connection.scalar(sa.text("SELECT pg_relation_filenode('enlist_job')")) == file
        found = connection.execute(sa.text("SELECT payload_version, count(*) FROM enlist_job GROUP BY 1")).all()
        assert found == [(1, 100)]
