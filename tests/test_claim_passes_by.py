"""What cannot be taken just now keeps nobody else waiting: locked jobs, locked keys, jobs that others have taken."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from enlist import HandlerRegistry, Job, JobRecord, Worker
from enlist._database import Database
from enlist._slots import Demand, Slots
from enlist._statements import statements_for
from tests.support import Observer, wait_until
from tests.support.claims import look
from tests.support.jobs import Jobs, running

STATEMENTS = statements_for(JobRecord.metadata.tables["enlist_job"])


@pytest.fixture
def jobs(observer: Observer) -> Jobs:
    return Jobs(observer)


def handlers_for(seconds: float = 0) -> HandlerRegistry:
    handlers = HandlerRegistry()

    @handlers.handler("work")
    def work(session: Session, job: Job[Any]) -> None:
        session.execute(sa.text("SELECT 1"))
        time.sleep(seconds)

    return handlers


@pytest.mark.parametrize("number", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_locked_jobs_with_a_key_keep_no_places(
    engine: Engine, jobs: Jobs, observer: Observer, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    locked = [
        jobs.add("work", concurrency_key=f"k{n}", concurrency_limit=1, priority=9, due_in=-1) for n in range(number)
    ]
    free = jobs.add_many("work", 40)
    keyed = [jobs.add("work", concurrency_key=f"other {n}", concurrency_limit=1) for n in range(5)]
    looks: list[float] = []
    execute = Database.execute

    def counting(self: Database, statement: Any, parameters: Any) -> Any:
        if statement is self.statements.look:
            looks.append(time.monotonic())
        return execute(self, statement, parameters)

    with engine.begin() as held:
        held.exec_driver_sql("SELECT FROM enlist_job WHERE priority = 9 FOR UPDATE")
        with running(Worker(engine, handlers_for(), concurrency=number, poll_interval=0.5)):
            for job_id in free + keyed:
                jobs.wait(job_id, timeout=10)
            monkeypatch.setattr(Database, "execute", counting)
            wait_until(lambda: len(looks) >= 6)
            # No hot loop while there is nothing to do: that would be some 5 ms a look.
            assert looks[5] - looks[0] > 0.3
            monkeypatch.undo()
            held.rollback()
            for job_id in locked:
                jobs.wait(job_id, timeout=10)


@pytest.mark.slow
def test_a_key_that_is_locked_keeps_no_place(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    jobs.add("work", concurrency_key="k", concurrency_limit=1, priority=9)
    free = jobs.add_many("work", 20)
    with engine.begin() as held:
        assert held.execute(STATEMENTS.lock_keys, {"keys": ["k"]}).scalars().all() == ["k"]
        with running(Worker(engine, handlers_for(), concurrency=1, poll_interval=2)):
            for job_id in free:
                jobs.wait(job_id, timeout=10)
            held.rollback()
            jobs.wait_all(timeout=10)


@pytest.mark.slow
def test_workers_that_meet_at_the_same_keys_all_go_on(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    for number in range(40):
        jobs.add("work", concurrency_key=f"k{number}", concurrency_limit=1)
    workers = [Worker(engine, handlers_for(0.1), concurrency=1, poll_interval=60) for _ in range(4)]
    with running(*workers):
        jobs.wait_all(timeout=30)
    assert len(observer.rows("SELECT DISTINCT locked_by FROM enlist_job")) == 4


@pytest.mark.slow
def test_drains_that_meet_leave_nothing(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    for number in range(200):
        jobs.add("work", concurrency_key=f"k{number}", concurrency_limit=1)
    left: list[int] = []

    def drain() -> None:
        Worker(engine, handlers_for()).drain(timeout=30)
        left.append(observer.scalar("SELECT count(*) FROM enlist_job WHERE status = 'queued'"))

    threads = [threading.Thread(target=drain) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert left == [0, 0, 0]


def test_a_careful_job_with_a_key_keeps_its_place_before_careful_ones_without(
    engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    first = jobs.add("work", concurrency_key="k", concurrency_limit=1, priority=9, max_attempts=1)
    jobs.add_many("work", 20, max_attempts=1)
    with running(Worker(engine, handlers_for(), concurrency=5, poll_interval=60)):
        jobs.wait_all(timeout=20)
    assert observer.scalar("SELECT id FROM enlist_job ORDER BY started_at LIMIT 1") == first


def test_the_keys_behind_a_long_front_are_walked_however_many_jobs_are_asked_for(
    engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    jobs.add_many("work", 2500, concurrency_key="hot", concurrency_limit=1, due_in=-5)
    for number in range(30):
        jobs.add("work", concurrency_key=f"other {number}", concurrency_limit=1)
    with engine.connect() as connection:
        assert len(look(connection, STATEMENTS, {"default": 900})) == 31


def test_what_was_left_for_want_of_a_slot_is_claimed_when_one_is_free() -> None:
    woken: list[str] = []
    slots = Slots({"q": 1}, lambda run: None, lambda: woken.append("claim"))
    handler = SimpleNamespace(commit_every=1, flush="job")
    run: Any = SimpleNamespace(queue="q", handler=handler, careful=False, keyed=False, placed=0.0, started=0.0)
    assert slots.place([run], [Demand("q", 1, 2)]) == []
    slots.leave({"q"})
    assert woken == []
    slots.finished(run)
    assert woken == ["claim"]
    slots.leave({"q"})  # the slot became free before it was said
    assert woken == ["claim", "claim"]
