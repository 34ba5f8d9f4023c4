"""Wake-ups: with a poll interval of half a minute, jobs start at once."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import sqlalchemy as sa
import tenacity
from sqlalchemy import URL, Engine
from sqlalchemy.orm import Session

from enlist import HandlerRegistry, Job, JobRecord, JobRepository, Worker
from enlist._statements import channel_of
from tests.shop import Effect
from tests.support import Observer
from tests.support.jobs import Jobs, running
from tests.support.process import WorkerProcess

SOON = 3
"""Seconds; a tenth of the poll interval."""

SLOW_POLL: dict[str, Any] = {"poll_interval": 30}


@pytest.fixture
def jobs(observer: Observer) -> Jobs:
    return Jobs(observer)


@pytest.fixture
def channel() -> str:
    table = sa.inspect(JobRecord).local_table
    assert isinstance(table, sa.Table)
    return channel_of(table)


def effects() -> HandlerRegistry:
    handlers = HandlerRegistry()

    @handlers.handler("work", wait=tenacity.wait_fixed(0.2))
    def work(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id, attempt=job.attempt))
        if job.attempt < job.payload.get("until", 1):
            raise ValueError("not yet")

    return handlers


def listening(observer: Observer) -> int:
    """Wait until a worker listens and has looked once; the server's process that serves it."""
    return int(
        observer.wait_for(
            "SELECT coalesce(max(pid), 0) FROM pg_stat_activity"
            " WHERE datname = current_database() AND starts_with(query, 'LISTEN ')"
        )
    )


def test_a_commit_in_the_same_process_wakes_the_worker(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    repo = JobRepository()
    with running(Worker(engine, effects(), **SLOW_POLL)):
        listening(observer)
        for _ in range(3):
            with Session(engine) as session, session.begin():
                handle = repo.enqueue(session, "work", {})
            assert jobs.wait(handle.id, timeout=SOON)["status"] == "done"


def test_a_commit_wakes_a_worker_in_another_process(
    engine: Engine, database_url: URL, jobs: Jobs, observer: Observer
) -> None:
    repo = JobRepository()
    with WorkerProcess(database_url, **SLOW_POLL) as process:
        process.expect("ready")
        listening(observer)
        for _ in range(3):
            with Session(engine) as session, session.begin():
                handle = repo.enqueue(session, "healthy", {})
            process.expect(f"run healthy {handle.id}", timeout=SOON)
        process.terminate()
        assert process.wait() == 0


def test_a_notify_from_any_client_wakes_it(engine: Engine, jobs: Jobs, observer: Observer, channel: str) -> None:
    with running(Worker(engine, effects(), **SLOW_POLL)):
        listening(observer)
        job_id = jobs.add("work")
        observer.execute("SELECT pg_notify(%s, 'default')", channel)
        assert jobs.wait(job_id, timeout=SOON)["status"] == "done"


def test_a_retry_starts_when_it_is_due(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    with running(Worker(engine, effects(), **SLOW_POLL)):
        job_id = jobs.add("work", {"until": 4})
        _wake(observer)
        row = jobs.wait(job_id, timeout=SOON)
    assert (row["status"], row["attempt"]) == ("done", 4)
    assert observer.scalar("SELECT started_at >= run_at FROM enlist_job")


def test_what_is_reaped_starts_at_once(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    job_id = jobs.add("work")
    observer.execute(
        "UPDATE enlist_job SET status = 'running', attempt = 1, lease_token = 1, locked_by = 'gone',"
        " started_at = statement_timestamp(), locked_until = statement_timestamp() + interval '0.4 s'"
    )
    with running(Worker(engine, effects(), reaper_interval=0.1, **SLOW_POLL)):
        row = jobs.wait(job_id, timeout=SOON)
    assert (row["status"], row["attempt"], row["lost"]) == ("done", 2, 1)


def _wake(observer: Observer) -> None:
    table = sa.inspect(JobRecord).local_table
    assert isinstance(table, sa.Table)
    listening(observer)
    observer.execute("SELECT pg_notify(%s, 'default')", channel_of(table))


@pytest.mark.parametrize("what", ["wake", "retry"])
def test_what_comes_while_all_slots_are_busy_starts_when_one_is_free(
    what: str, engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    """The wake finds no free slot. It is not forgotten: it counts once there is one."""
    handlers = effects()
    inside, go = threading.Event(), threading.Event()

    @handlers.handler("hold")
    def hold(session: Session, job: Job[Any]) -> None:
        inside.set()
        go.wait(20)

    # Quick ones first, so that the claim asks for more than there is, and expects nothing after.
    jobs.add_many("work", 40, priority=2)
    if what == "retry":
        jobs.add("work", {"until": 2}, priority=1)
    jobs.add("hold")
    try:
        with running(Worker(engine, handlers, queues={"default": 1}, **SLOW_POLL)):
            assert inside.wait(SOON)
            if what == "wake":
                job_id = jobs.add("work")
                _wake(observer)
            else:
                job_id = observer.scalar("SELECT id FROM enlist_job WHERE payload ? 'until'")
                observer.wait_for("SELECT run_at < statement_timestamp() FROM enlist_job WHERE id = %s", job_id)
            # The claimer has looked, and found no slot.
            threading.Event().wait(0.1)
            go.set()
            assert jobs.wait(job_id, timeout=SOON)["status"] == "done"
    finally:
        go.set()


def test_what_waits_behind_a_slow_job_is_given_to_others(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    """Prefetched behind quick jobs, stuck behind a slow one: given back within a second, though nobody polls."""
    handlers = effects()
    inside, go = threading.Event(), threading.Event()

    @handlers.handler("hold")
    def hold(session: Session, job: Job[Any]) -> None:
        inside.set()
        go.wait(20)

    jobs.add_many("work", 60, priority=3)
    jobs.add("hold", priority=2)
    behind = jobs.add_many("work", 60, priority=1)
    try:
        with running(Worker(engine, handlers, queues={"default": 1}, **SLOW_POLL)):
            assert inside.wait(SOON)
            prefetched = observer.scalar("SELECT count(*) FROM enlist_job WHERE status = 'running'")
            assert prefetched > 1, "nothing was prefetched: this test tests nothing"
            observer.wait_for("SELECT count(*) = 1 FROM enlist_job WHERE status = 'running'", timeout=SOON)
            assert {jobs.row(job_id)["attempt"] for job_id in behind} == {0}
            with running(Worker(engine, effects(), queues={"default": 1}, **SLOW_POLL)):
                for job_id in behind:
                    assert jobs.wait(job_id, timeout=SOON)["status"] == "done"
            go.set()
    finally:
        go.set()


def test_a_listener_that_is_cut_off_listens_again(
    engine: Engine, jobs: Jobs, observer: Observer, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    with running(Worker(engine, effects(), **SLOW_POLL)):
        pid = listening(observer)
        observer.execute("SELECT pg_terminate_backend(%s, 5000)", pid)
        # In the gap nobody hears a wake: it looks once by itself when it listens again.
        in_the_gap = jobs.add("work")
        assert jobs.wait(in_the_gap, timeout=SOON)["status"] == "done"
        assert listening(observer) != pid
        job_id = jobs.add("work")
        observer.execute("SELECT pg_notify(%s, 'default')", channel)
        assert jobs.wait(job_id, timeout=SOON)["status"] == "done"
    assert caplog.text.count("listener failed, trying again") == 1
