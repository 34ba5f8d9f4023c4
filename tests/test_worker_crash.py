"""Processes that die: a poison job is dead after its attempts, and takes nobody with it."""

from __future__ import annotations

import asyncio
import signal
import threading
from typing import Any

import pytest
from sqlalchemy import URL, Engine
from sqlalchemy.ext.asyncio import AsyncSession

from enlist import HandlerRegistry, Job, Worker
from tests.shop import Effect
from tests.support import Observer, wait_until
from tests.support.jobs import Jobs, running
from tests.support.process import WorkerProcess

SETTINGS: dict[str, Any] = {"lease": 0.6, "reaper_interval": 0.1, "queues": {"default": 5}}

SLOW = pytest.mark.slow


@pytest.fixture
def jobs(observer: Observer) -> Jobs:
    return Jobs(observer)


def supervise(url: URL, jobs: Jobs, *, deaths: int, **settings: Any) -> list[int]:
    """Start a worker, and another when it dies, until all jobs have ended; the exit statuses of the dead."""
    statuses: list[int] = []
    while True:
        with WorkerProcess(url, **{**SETTINGS, **settings}) as process:
            wait_until(lambda: process.ended or jobs.counts().keys() <= {"done", "dead"}, 20)
            if not process.ended:
                process.terminate()
                assert process.wait() == 0
                return statuses
            statuses.append(process.wait())
            assert len(statuses) <= deaths


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("sigkill", -signal.SIGKILL),
        pytest.param("exit", 1, marks=SLOW),
        pytest.param("segfault", -signal.SIGSEGV, marks=SLOW),
    ],
)
def test_a_poison_job_kills_max_attempts_processes_and_no_more(
    kind: str, status: int, database_url: URL, jobs: Jobs
) -> None:
    healthy = jobs.add_many("healthy", 5)
    poison = jobs.add(kind, max_attempts=3)
    healthy += jobs.add_many("healthy", 5)
    assert supervise(database_url, jobs, deaths=3) == [status] * 3
    row = jobs.row(poison)
    assert (row["status"], row["attempt"], row["lost"]) == ("dead", 3, 3)
    assert "worker lost" in row["last_error"]
    assert [entry["attempt"] for entry in row["errors"]] == [1, 2, 3]
    assert all("worker lost" in entry["error"] for entry in row["errors"])
    assert {jobs.status(job_id) for job_id in healthy} == {"done"}
    assert jobs.effects_by_job() == dict.fromkeys(healthy, 1)


@pytest.mark.slow
def test_those_that_share_its_transaction_lose_nothing(database_url: URL, jobs: Jobs) -> None:
    """A job that kills its process in the middle of a group: the others are done, and it alone is dead."""
    healthy = jobs.add_many("grouped", 150)
    poison = jobs.add("grouped", {"kills": True}, max_attempts=3)
    healthy += jobs.add_many("grouped", 30)
    assert supervise(database_url, jobs, deaths=3, queues={"default": 1}) == [-signal.SIGKILL] * 3
    assert (jobs.status(poison), jobs.row(poison)["lost"]) == ("dead", 3)
    assert {jobs.status(job_id) for job_id in healthy} == {"done"}
    assert {jobs.row(job_id)["lost"] for job_id in healthy} == {0, 1}  # it had company
    assert jobs.effects_by_job() == dict.fromkeys(healthy, 1)


@pytest.mark.slow
def test_with_one_attempt_it_runs_once(database_url: URL, jobs: Jobs) -> None:
    poison = jobs.add("sigkill", max_attempts=1)
    healthy = jobs.add_many("healthy", 3, max_attempts=1)
    assert supervise(database_url, jobs, deaths=1) == [-signal.SIGKILL]
    row = jobs.row(poison)
    assert (row["status"], row["attempt"], row["lost"]) == ("dead", 1, 1)
    assert "worker lost" in row["last_error"]
    assert jobs.effects_by_job() == dict.fromkeys(healthy, 1)


@pytest.mark.slow
def test_a_killed_holder_of_a_key_frees_it_with_its_lease(database_url: URL, jobs: Jobs) -> None:
    key: dict[str, Any] = {"concurrency_key": "k", "concurrency_limit": 1}
    held = jobs.add("holding", **key)
    with WorkerProcess(database_url, label="first", **SETTINGS) as first:
        first.expect(f"run holding {held} 1")
        first.kill()
        first.wait()
    with WorkerProcess(database_url, label="second", **SETTINGS) as second:
        second.expect(f"run holding {held} 2")
        following = jobs.add("healthy", **key)
        assert jobs.status(following) == "queued"
        second.say("go")
        jobs.wait(following)
        second.terminate()
        assert second.wait() == 0
    assert jobs.effects(held) == [(2, "second")]
    assert jobs.effects(following) == [(1, "second")]


@pytest.mark.slow
def test_what_a_stop_gives_back_uses_no_attempt(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    """The control to the poison job: three times released in good order, then run."""
    handlers = HandlerRegistry()
    runs: list[int] = []
    inside = threading.Event()

    @handlers.handler("async")
    async def asynchronous(session: AsyncSession, job: Job[Any]) -> None:
        runs.append(job.attempt)
        session.add(Effect(job_id=job.id, attempt=job.attempt))
        await session.flush()
        if len(runs) <= 3:
            inside.set()
            await asyncio.Event().wait()

    job_id = jobs.add("async", max_attempts=3)
    for _ in range(3):
        inside.clear()
        with running(Worker(engine, handlers, poll_interval=0.05, shutdown_timeout=0.05)):
            assert inside.wait(5)
        row = jobs.row(job_id)
        assert (row["status"], row["attempt"], row["lost"], row["errors"]) == ("queued", 0, 0, [])
        assert (row["locked_by"] is None, row["locked_until"]) == (True, None)
    with running(Worker(engine, handlers, poll_interval=0.05)):
        row = jobs.wait(job_id)
    assert (row["status"], row["attempt"]) == ("done", 1)
    assert runs == [1] * 4
    assert jobs.effects(job_id) == [(1, "")]


@pytest.mark.slow
def test_released_by_sigterm_three_times_it_has_all_its_attempts(database_url: URL, jobs: Jobs) -> None:
    job_id = jobs.add("async holding", max_attempts=3)
    for _ in range(3):
        with WorkerProcess(database_url, shutdown_timeout=0.1, **SETTINGS) as process:
            process.expect(f"run async holding {job_id} 1")
            process.terminate()
            assert process.wait() == 0
        row = jobs.row(job_id)
        assert (row["status"], row["attempt"], row["lost"]) == ("queued", 0, 0)
