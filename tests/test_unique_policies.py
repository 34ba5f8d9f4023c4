"""How long a unique key is held, what a second job of it may do, and a handler that enqueues its own key."""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import pytest
import sqlalchemy as sa
from sqlalchemy import URL, Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from enlist import (
    EnqueueOptions,
    HandlerRegistry,
    InvalidOption,
    Job,
    JobHandle,
    JobRepository,
    JobState,
    Retry,
    Worker,
)
from tests.jobs import Note, state_of, texts
from tests.shop import Counter
from tests.support import Observer, StatementRecorder
from tests.support.jobs import Jobs, running
from tests.support.waiting import wait_until

repo = JobRepository()
Until = Literal["started", "finished", "pruned"]
UNTIL: list[Until] = ["started", "finished", "pruned"]


@pytest.fixture
def jobs(observer: Observer) -> Jobs:
    return Jobs(observer)


def enqueue(engine: Engine, text: str = "", **options: Any) -> JobHandle:
    with Session(engine) as session, session.begin():
        return repo.enqueue(session, Note(text=text), unique_key="k", **options)


def worker(engine: Engine, handle: Callable[..., None]) -> Worker:
    registry = HandlerRegistry()
    registry.handler(Note)(handle)
    return Worker(engine, registry)


def nothing(session: Session, job: Job[Note]) -> None:
    """A handler without effects: its job is set done with others'."""


def something(session: Session, job: Job[Note]) -> None:
    """A handler whose job is set done in its transaction."""
    session.execute(sa.select(1))


# -- how long it is held ----------------------------------------------------------------------------------------------

FREE_WHEN: dict[str, set[str]] = {
    "started": {"running", "done", "dead", "cancelled"},
    "finished": {"done", "dead", "cancelled"},
    "pruned": {"dead", "cancelled"},
}


@pytest.mark.parametrize("until", UNTIL)
def test_a_running_job_holds_its_key_unless_it_is_held_until_the_start(
    engine: Engine, until: Until, observer: Observer
) -> None:
    started, go_on = threading.Event(), threading.Event()

    def handle(session: Session, job: Job[Note]) -> None:
        started.set()
        go_on.wait(10)

    first = enqueue(engine, unique_until=until)
    with running(worker(engine, handle)):
        try:
            assert started.wait(10)
            row = "SELECT status, attempt, lease_token, run_at, payload FROM enlist_job WHERE id = %s"
            before = observer.rows(row, first.id)
            handles = [enqueue(engine, unique_until=until, delay=3600) for _ in range(5)]
            assert observer.rows(row, first.id) == before
        finally:
            go_on.set()
    expected = [until == "started"] + [False] * 4
    assert [handle.inserted for handle in handles] == expected
    holder = handles[0] if until == "started" else first
    assert {handle.existing_id for handle in handles if not handle.inserted} == {holder.id}


@pytest.mark.parametrize("handler", [nothing, something])
@pytest.mark.parametrize("until", UNTIL)
def test_a_done_job_holds_its_key_only_until_it_is_pruned(
    engine: Engine, until: Until, handler: Any, observer: Observer
) -> None:
    first = enqueue(engine, unique_until=until)
    worker(engine, handler).drain(timeout=20)
    second = enqueue(engine)
    assert second.inserted == (until != "pruned")
    observer.execute("DELETE FROM enlist_job WHERE status = 'done'")
    third = enqueue(engine)
    assert third.inserted == (until == "pruned")
    assert second.existing_id == (first.id if until == "pruned" else None)


@pytest.mark.parametrize("unique_for", [None, 3600])
@pytest.mark.parametrize("until", UNTIL)
def test_a_dead_job_frees_its_key_whatever_was_asked(engine: Engine, until: Until, unique_for: int | None) -> None:
    def fail(session: Session, job: Job[Note]) -> None:
        raise ValueError("no")

    enqueue(engine, unique_until=until, unique_for=unique_for, max_attempts=1)
    worker(engine, fail).drain(timeout=20)
    assert enqueue(engine).inserted


@pytest.mark.parametrize("until", UNTIL)
def test_a_retry_does_not_take_a_released_key_again(engine: Engine, until: Until, jobs: Jobs) -> None:
    def fail(session: Session, job: Job[Note]) -> None:
        raise Retry(3600)

    first = enqueue(engine, unique_until=until)
    with running(worker(engine, fail)):
        jobs.wait_failed(first.id)
    second = enqueue(engine, delay=3600)
    assert second.inserted == (until == "started")
    # Nor does the twin keep it from running again.
    jobs.set_due()
    worker(engine, nothing).drain(timeout=20)
    assert jobs.counts() == {"done": 2 if until == "started" else 1}


@pytest.mark.parametrize("until", UNTIL)
def test_a_reaper_does_not_stumble_over_a_twin(engine: Engine, until: Until, jobs: Jobs, observer: Observer) -> None:
    first = enqueue(engine, unique_until=until)
    observer.execute(  # as a worker that died left it
        "UPDATE enlist_job SET status = 'running', attempt = 1, lease_token = 1, started_at = now(),"
        " locked_until = now() - interval '1 s', unique_held = unique_held AND unique_until <> 'started'"
    )
    second = enqueue(engine)
    assert second.inserted == (until == "started")
    with running(worker(engine, nothing)):
        assert jobs.wait(first.id)["status"] == "done"
        jobs.wait_all("done")


# -- for a time -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("handler", [nothing, something])
@pytest.mark.parametrize("until", UNTIL)
def test_a_key_is_held_for_a_time_at_least(engine: Engine, until: Until, handler: Any, observer: Observer) -> None:
    first = enqueue(engine, unique_until=until, unique_for=3600)
    worker(engine, handler).drain(timeout=20)
    assert enqueue(engine).existing_id == first.id
    observer.execute("UPDATE enlist_job SET unique_hold_until = unique_hold_until - interval '1 h'")
    second = enqueue(engine)
    assert second.inserted == (until != "pruned")
    assert observer.scalar("SELECT count(*) FROM enlist_job WHERE unique_held") == 1


def test_the_time_counts_from_the_servers_clock_at_the_flush(engine: Engine, observer: Observer) -> None:
    enqueue(engine, unique_for=dt.timedelta(minutes=1.5))
    (held,) = observer.rows("SELECT unique_hold_until - created_at, unique_until FROM enlist_job")
    assert held == (dt.timedelta(seconds=90), "pruned")


def test_a_time_that_is_over_releases_nothing_before_its_event(engine: Engine, observer: Observer) -> None:
    first = enqueue(engine, unique_until="started", unique_for=0)
    assert enqueue(engine).existing_id == first.id
    worker(engine, nothing).drain(timeout=20)
    assert enqueue(engine).inserted


def test_a_key_that_lapsed_while_its_job_waits_for_a_retry_is_free(
    engine: Engine, observer: Observer, jobs: Jobs
) -> None:
    def fail(session: Session, job: Job[Note]) -> None:
        raise Retry(3600)

    first = enqueue(engine, unique_until="started", unique_for=3600)
    with running(worker(engine, fail)):
        jobs.wait_failed(first.id)
    assert enqueue(engine).existing_id == first.id
    observer.execute("UPDATE enlist_job SET unique_hold_until = now()")
    assert enqueue(engine).inserted


def test_a_lapsed_key_is_freed_with_its_transaction_only(engine: Engine, observer: Observer) -> None:
    enqueue(engine, unique_until="finished", unique_for=3600)
    worker(engine, nothing).drain(timeout=20)
    observer.execute("UPDATE enlist_job SET unique_hold_until = now()")
    with Session(engine) as session:
        handle = repo.enqueue(session, Note(), unique_key="k")
        session.flush()
        assert handle.inserted
        session.rollback()
    assert observer.rows("SELECT status, unique_held FROM enlist_job") == [("done", True)]


def test_of_two_that_find_a_lapsed_key_one_gets_it(engine: Engine, observer: Observer) -> None:
    enqueue(engine, unique_until="finished", unique_for=3600)
    worker(engine, nothing).drain(timeout=20)
    observer.execute("UPDATE enlist_job SET unique_hold_until = now()")
    with Session(engine) as session:
        first = repo.enqueue(session, Note(), unique_key="k")
        session.flush()
        second: list[JobHandle] = []
        thread = threading.Thread(target=lambda: second.append(enqueue(engine)))
        thread.start()
        wait_until(lambda: observer.scalar("SELECT count(*) FROM pg_locks WHERE NOT granted") == 1)
        session.commit()
        thread.join(10)
    assert first.inserted
    assert second[0].existing_id == first.id


# -- until the start --------------------------------------------------------------------------------------------------


def test_a_job_that_was_refused_for_one_that_starts_before_the_commit_is_made(
    engine: Engine, observer: Observer
) -> None:
    """That one has not seen what the transaction is about: nobody would do it."""
    first = enqueue(engine, "first", unique_until="started")
    with Session(engine) as session:
        session.add(Counter(name="c", value=1))
        refused = [repo.enqueue(session, Note(text="again"), unique_key="k", unique_until="started") for _ in range(2)]
        session.flush()
        assert [(handle.state, handle.existing_id) for handle in refused] == [(JobState.DUPLICATE, first.id)] * 2
        worker(engine, something).drain(timeout=20)
        session.commit()
    assert [state_of(handle) for handle in refused] == [JobState.COMMITTED, JobState.DUPLICATE]
    assert [handle.existing_id for handle in refused] == [None, refused[0].id]
    assert texts(observer) == ["first", "again"]


def test_a_job_does_not_start_between_that_look_and_the_commit(engine: Engine, database_url: URL, jobs: Jobs) -> None:
    first = enqueue(engine, unique_until="started")
    mine = sa.create_engine(database_url)
    seen: list[str] = []

    @sa.event.listens_for(mine, "commit")
    def work(_connection: object) -> None:
        worker(engine, something).drain(timeout=20)
        seen.append(jobs.status(first.id))

    with Session(mine) as session, Session(engine) as other:
        for each in (session, other):  # several may wait for the same job
            refused = repo.enqueue(each, Note(), unique_key="k", unique_until="started")
            each.flush()
        other.commit()
        session.commit()
    mine.dispose()
    assert seen == ["queued"]
    assert refused.existing_id == first.id
    worker(engine, something).drain(timeout=20)
    assert jobs.counts() == {"done": 1}


def test_a_job_that_was_refused_in_a_savepoint_goes_with_it(engine: Engine, observer: Observer) -> None:
    enqueue(engine, "first", unique_until="started")
    with Session(engine) as session:
        savepoint = session.begin_nested()
        refused = repo.enqueue(session, Note(), unique_key="k", unique_until="started")
        session.flush()
        savepoint.rollback()
        worker(engine, something).drain(timeout=20)
        session.commit()
    assert refused.state is JobState.DISCARDED
    assert texts(observer) == ["first"]


@pytest.mark.parametrize("started", [False, True])
def test_a_commit_that_a_listener_has_stopped_can_be_called_again(
    engine: Engine, observer: Observer, started: bool
) -> None:
    first = enqueue(engine, "first", unique_until="started")
    with Session(engine) as session:
        refused = repo.enqueue(session, Note(text="again"), unique_key="k", unique_until="started")
        session.flush()
        if started:
            worker(engine, something).drain(timeout=20)

        def stop(_session: Session) -> None:
            raise ValueError("not now")

        sa.event.listen(session, "before_commit", stop)
        for _ in range(2):
            with pytest.raises(ValueError, match="not now"):
                session.commit()
        sa.event.remove(session, "before_commit", stop)
        session.commit()
    assert (refused.inserted, refused.existing_id) == (started, None if started else first.id)
    assert texts(observer) == (["first", "again"] if started else ["first"])


def test_refusing_and_replacing_the_same_keys_does_not_deadlock(engine: Engine, database_url: URL) -> None:
    """Who is refused waits for the row of a lower key before it inserts a higher one, not after."""
    enqueue(engine, unique_until="started")  # of key k
    inserted, go_on = threading.Event(), threading.Event()
    slow = sa.create_engine(database_url)

    @sa.event.listens_for(slow, "after_cursor_execute")
    def wait(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("INSERT"):
            inserted.set()
            go_on.wait(10)

    def refused() -> None:
        with Session(slow) as session, session.begin():
            for key in "kz":
                repo.enqueue(session, Note(), unique_key=key, unique_until="started")

    def replacing() -> None:
        with Session(engine) as session, session.begin():
            for key in "kz":
                repo.enqueue(session, Note(), unique_key=key, on_conflict="replace")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(refused)
        assert inserted.wait(10)
        second = pool.submit(replacing)
        with engine.connect() as connection:
            wait_until(lambda: connection.scalar(sa.text("SELECT count(*) FROM pg_locks WHERE NOT granted")))
        go_on.set()
        first.result(10)
        second.result(10)
    slow.dispose()


def test_a_twin_that_a_worker_takes_just_now_is_no_twin(engine: Engine, observer: Observer) -> None:
    first = enqueue(engine, unique_until="started")
    with engine.connect() as claim:
        claim.execute(
            sa.text(
                "UPDATE enlist_job SET status = 'running', locked_until = now() + interval '60 s', unique_held = false"
            )
        )
        second: list[JobHandle] = []
        thread = threading.Thread(target=lambda: second.append(enqueue(engine, unique_until="started")))
        thread.start()
        wait_until(lambda: observer.scalar("SELECT count(*) FROM pg_locks WHERE NOT granted") == 1)
        claim.commit()
        thread.join(10)
    assert second[0].inserted
    assert observer.scalar("SELECT id FROM enlist_job WHERE unique_held") == second[0].id != first.id


def test_a_key_that_an_older_release_left_with_a_done_job_is_free(engine: Engine, observer: Observer) -> None:
    """In a rolling deployment a worker that knows no unique_until ends the job."""
    enqueue(engine, unique_until="finished")
    observer.execute("UPDATE enlist_job SET status = 'done', finished_at = now()")  # and nothing else
    assert enqueue(engine).inserted


# -- replace ----------------------------------------------------------------------------------------------------------


def test_a_queued_twin_gets_payload_and_run_at(engine: Engine, observer: Observer) -> None:
    first = enqueue(engine, "a", on_conflict="replace", priority=1, meta={"from": "a"}, delay=3600)
    second = enqueue(engine, "b", on_conflict="replace", priority=2, meta={"from": "b"})
    assert (first.state, first.replaced) == (JobState.COMMITTED, False)
    assert (second.state, second.inserted, second.replaced) == (JobState.DUPLICATE, False, True)
    assert second.existing_id == first.id
    assert observer.rows("SELECT id, payload->>'text', priority, meta->>'from' FROM enlist_job") == [
        (first.id, "b", 1, "a")
    ]
    assert observer.scalar("SELECT run_at <= now() FROM enlist_job")


def test_a_burst_becomes_one_job_that_runs_after_the_last(engine: Engine, observer: Observer) -> None:
    for number in range(5):
        enqueue(engine, str(number), on_conflict="replace", delay=3600 + number)
    assert texts(observer) == ["4"]
    assert observer.scalar("SELECT round(extract(epoch FROM run_at - created_at)) >= 3604 FROM enlist_job")


@pytest.mark.slow
def test_a_running_twin_is_left_alone_and_a_new_job_made(engine: Engine, observer: Observer) -> None:
    """Also one that was to hold its key: it loses it, and nothing else."""
    started, go_on = threading.Event(), threading.Event()
    runs: list[str] = []

    def handle(session: Session, job: Job[Note]) -> None:
        session.execute(sa.select(1))
        runs.append(job.payload.text)
        started.set()
        if job.payload.text == "a":
            go_on.wait(10)

    first = enqueue(engine, "a", concurrency_key="one at a time")
    with running(worker(engine, handle)):
        try:
            assert started.wait(10)
            options: dict[str, Any] = {"on_conflict": "replace", "concurrency_key": "one at a time"}
            second, third = enqueue(engine, "b", **options), enqueue(engine, "c", **options)
        finally:
            go_on.set()
        wait_until(lambda: len(runs) == 2)
    assert (second.inserted, third.existing_id, third.replaced) == (True, second.id, True)
    assert runs == ["a", "c"]
    assert observer.rows("SELECT id, status FROM enlist_job ORDER BY id") == [(first.id, "done"), (second.id, "done")]


def test_a_done_twin_gives_up_its_key(engine: Engine, observer: Observer) -> None:
    first = enqueue(engine, "a")
    worker(engine, something).drain(timeout=20)
    second = enqueue(engine, "b", on_conflict="replace")
    assert second.inserted
    assert second.existing_id is None
    held = "SELECT id FROM enlist_job WHERE unique_held"
    assert observer.scalar(held) == second.id != first.id


def test_a_job_that_replaces_holds_its_key_until_it_starts(engine: Engine, observer: Observer) -> None:
    enqueue(engine, on_conflict="replace")
    assert observer.scalar("SELECT unique_until FROM enlist_job") == "started"
    worker(engine, nothing).drain(timeout=20)
    assert observer.scalar("SELECT unique_held FROM enlist_job") is False


MODES: dict[str, Literal["ignore", "replace"]] = {"i": "ignore", "r": "replace"}
IN_ONE_FLUSH: list[tuple[str, list[str], list[bool]]] = [
    # The calls (i: ignore, r: replace), the text of the row, then whether each has replaced another's.
    ("rr", ["b"], [False, True]),
    ("rrrr", ["d"], [False, True, True, True]),
    ("ir", ["b"], [False, True]),
    ("ri", ["a"], [False, False]),
    ("irir", ["d"], [False, True, False, True]),
    ("rrirr", ["e"], [False, True, False, True, True]),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", IN_ONE_FLUSH, ids=[case[0] for case in IN_ONE_FLUSH])
@pytest.mark.parametrize("one_flush", [True, False])
@pytest.mark.parametrize("twin", [False, True])
def test_calls_of_one_key_count_in_their_order(
    engine: Engine, observer: Observer, case: tuple[str, list[str], list[bool]], one_flush: bool, twin: bool
) -> None:
    """Whether they meet in one flush, and whether somebody had queued the key before."""
    calls, rows, replacing = case
    before = enqueue(engine, "before") if twin else None
    with Session(engine) as session:
        handles = []
        for text, call in zip("abcde", calls, strict=False):
            handles.append(repo.enqueue(session, Note(text=text), unique_key="k", on_conflict=MODES[call]))
            if not one_flush:
                session.flush()
        session.commit()
    first = before or handles[0]
    for handle, call, replaced in zip(handles, calls, replacing, strict=True):
        if handle is first:
            assert (handle.inserted, handle.existing_id, handle.replaced) == (True, None, False)
        else:
            assert (handle.inserted, handle.existing_id) == (False, first.id)
            assert handle.replaced == (replaced or (call == "r" and twin))
    last = max((index for index, call in enumerate(calls) if call == "r"), default=None)
    expected = rows if not twin else (["before"] if last is None else ["abcde"[last]])
    assert texts(observer) == expected


def test_a_twin_that_waits_for_its_retry_begins_anew(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    """What it failed with was another payload."""
    first = enqueue(engine, "a", max_attempts=3)
    observer.execute("UPDATE enlist_job SET attempt = 2, run_at = now() + interval '1 h', last_error = 'of a'")
    second = enqueue(engine, "b", on_conflict="replace")
    row = jobs.row(first.id)
    assert second.replaced
    assert (row["attempt"], row["payload"], row["last_error"]) == (0, {"text": "b"}, "of a")


def test_replacing_is_undone_with_its_savepoint(engine: Engine, observer: Observer) -> None:
    first = enqueue(engine, "a")
    with Session(engine) as session:
        savepoint = session.begin_nested()
        second = repo.enqueue(session, Note(text="b"), unique_key="k", on_conflict="replace")
        session.flush()
        assert second.replaced is True
        savepoint.rollback()
        assert (state_of(second), second.replaced) == (JobState.DISCARDED, False)
        session.commit()
    assert texts(observer) == ["a"]
    assert first.replaced is False


def test_replacing_costs_one_statement(engine: Engine, statements: StatementRecorder) -> None:
    def many(text: str) -> None:
        with Session(engine) as session, session.begin():
            options = [EnqueueOptions(unique_key=str(number), on_conflict="replace") for number in range(500)]
            handles.extend(repo.enqueue_many(session, [(Note(text=text), each) for each in options]))

    handles: list[JobHandle] = []
    many("a")
    statements.clear()
    many("b")
    assert len(statements.texts) == 1
    assert [handle.replaced for handle in handles] == [False] * 500 + [True] * 500


def test_a_burst_in_one_flush_is_one_statement(
    engine: Engine, statements: StatementRecorder, observer: Observer
) -> None:
    with Session(engine) as session, session.begin():
        for number in range(200):
            repo.enqueue(session, Note(text=str(number)), unique_key="k", on_conflict="replace")
        session.flush()
        assert len(statements.matching("INSERT")) == 1
    assert texts(observer) == ["199"]


def test_a_job_that_is_run_again_when_its_lapsed_key_is_to_be_taken_keeps_it(
    engine: Engine, observer: Observer
) -> None:
    """It was done when looked at; between the look and the taking of its key somebody has it run again."""
    first = enqueue(engine, unique_until="finished", unique_for=3600)
    worker(engine, nothing).drain(timeout=20)
    observer.execute("UPDATE enlist_job SET unique_hold_until = now()")
    again: list[str] = []

    @sa.event.listens_for(engine, "before_cursor_execute")
    def run_again(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("WITH holders"):
            observer.execute("UPDATE enlist_job SET status = 'queued', attempt = 0, finished_at = NULL")
            again.append(statement)

    assert enqueue(engine).existing_id == first.id
    assert len(again) == 1


@pytest.mark.slow
def test_two_that_replace_many_keys_in_other_orders_do_not_deadlock(engine: Engine, observer: Observer) -> None:
    errors: list[BaseException] = []

    def write(order: int) -> None:
        try:
            for round_ in range(30):
                with Session(engine) as session, session.begin():
                    for number in range(20)[::order]:
                        mode = MODES["ir"[(number + round_ + order) % 2]]
                        repo.enqueue(session, Note(), unique_key=f"{round_}-{number}", on_conflict=mode)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(order,)) for order in (1, -1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert observer.scalar("SELECT count(*) FROM enlist_job") == 600


def test_a_twin_that_a_worker_takes_meanwhile_is_not_changed(engine: Engine, observer: Observer, jobs: Jobs) -> None:
    """The replacement waits for the claim that has the row's lock, and then finds it running."""
    first = enqueue(engine, "a", unique_until="started")
    with engine.connect() as claim:
        claim.execute(
            sa.text(
                "UPDATE enlist_job SET status = 'running', locked_until = now() + interval '60 s', unique_held = false"
            )
        )
        second: list[JobHandle] = []
        thread = threading.Thread(target=lambda: second.append(enqueue(engine, "b", on_conflict="replace")))
        thread.start()
        wait_until(lambda: observer.scalar("SELECT count(*) FROM pg_locks WHERE NOT granted") == 1)
        claim.commit()
        thread.join(10)
    assert second[0].inserted
    assert jobs.row(first.id)["payload"] == {"text": "a"}
    assert texts(observer) == ["a", "b"]


async def test_keys_are_replaced_by_each_driver(any_async_engine: AsyncEngine, observer: Observer) -> None:
    async with AsyncSession(any_async_engine) as session:
        first = repo.enqueue(session, Note(text="a"), unique_key="k", on_conflict="replace", unique_for=5)
        await session.flush()
        second = repo.enqueue(session, Note(text="b"), unique_key="k", on_conflict="replace", delay=7)
        await session.commit()
    assert (second.replaced, second.existing_id) == (True, first.id)
    assert texts(observer) == ["b"]


# -- a handler and its own key ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_a_handler_enqueues_its_own_key_for_later(engine: Engine, jobs: Jobs, flushed: bool, late: bool) -> None:
    made: list[tuple[JobHandle, JobState]] = []
    calls: list[int] = []

    def handle(session: Session, job: Job[Note]) -> None:
        def payload() -> Note:
            calls.append(1)
            return Note(text="next")

        successor = repo.enqueue(
            session, payload if late else Note(text="next"), unique_key="k", unique_until="finished", delay=3600
        )
        if flushed:
            session.flush()
            session.execute(sa.select(1))
        made.append((successor, successor.state))

    first = enqueue(engine, unique_until="finished")
    worker(engine, handle).drain(timeout=20)
    ((successor, state),) = made
    assert state is JobState.STAGED
    assert (successor.state, successor.inserted) == (JobState.COMMITTED, True)
    assert jobs.status(first.id) == "done"
    assert jobs.status(successor.id) == "queued"
    assert jobs.row(successor.id)["payload"] == {"text": "next"}
    assert jobs.counts() == {"done": 1, "queued": 1}
    assert len(calls) == late


def test_the_successor_of_a_handler_that_fails_is_not_made(engine: Engine, jobs: Jobs) -> None:
    made: list[JobHandle] = []

    def handle(session: Session, job: Job[Note]) -> None:
        made.append(repo.enqueue(session, Note(text="next"), unique_key="k", unique_until="finished", delay=3600))
        session.flush()
        raise Retry(3600)

    first = enqueue(engine, unique_until="finished")
    with running(worker(engine, handle)):
        jobs.wait_failed(first.id)
    assert [handle.state for handle in made] == [JobState.DISCARDED]
    assert jobs.counts() == {"queued": 1}
    assert jobs.row(first.id)["unique_held"] is True


def test_a_successor_in_a_savepoint_goes_with_it(engine: Engine, observer: Observer) -> None:
    made: list[JobHandle] = []

    def handle(session: Session, job: Job[Note]) -> None:
        for text, keep in [("a", False), ("b", True)]:
            savepoint = session.begin_nested()
            made.append(repo.enqueue(session, Note(text=text), unique_key="k", unique_until="finished", delay=3600))
            session.flush()
            (savepoint.commit if keep else savepoint.rollback)()

    enqueue(engine, "first", unique_until="finished")
    worker(engine, handle).drain(timeout=20)
    assert [handle.state for handle in made] == [JobState.DISCARDED, JobState.COMMITTED]
    assert texts(observer) == ["first", "b"]


def test_a_successor_in_a_savepoint_of_the_connection_goes_with_it(engine: Engine, observer: Observer) -> None:
    made: list[JobHandle] = []

    def handle(session: Session, job: Job[Note]) -> None:
        savepoint = session.connection().begin_nested()
        made.append(repo.enqueue(session, Note(text="a"), unique_key="k", unique_until="finished", delay=3600))
        session.flush()
        savepoint.rollback()

    enqueue(engine, "first", unique_until="finished")
    worker(engine, handle).drain(timeout=20)
    assert [handle.state for handle in made] == [JobState.DISCARDED]
    assert texts(observer) == ["first"]


def test_a_second_successor_is_a_duplicate_of_the_first(engine: Engine) -> None:
    made: list[JobHandle] = []

    def handle(session: Session, job: Job[Note]) -> None:
        for _ in range(2):
            made.append(repo.enqueue(session, Note(), unique_key="k", unique_until="finished", delay=3600))
            session.flush()

    enqueue(engine, unique_until="finished")
    worker(engine, handle).drain(timeout=20)
    assert [handle.inserted for handle in made] == [True, False]
    assert made[1].existing_id == made[0].id


def test_a_job_that_holds_its_key_when_done_has_no_successor(
    engine: Engine, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "enlist")
    made: list[JobHandle] = []

    def handle(session: Session, job: Job[Note]) -> None:
        made.append(repo.enqueue(session, Note(), unique_key="k"))

    first = enqueue(engine)
    worker(engine, handle).drain(timeout=20)
    assert (made[0].state, made[0].existing_id) == (JobState.DUPLICATE, first.id)
    assert jobs.counts() == {"done": 1}
    assert "1 of a flush's jobs not made: a done job holds the unique key" in caplog.text


def test_a_handler_that_replaces_its_own_key_has_a_successor_at_once(engine: Engine, jobs: Jobs) -> None:
    made: list[JobHandle] = []

    def handle(session: Session, job: Job[Note]) -> None:
        for text in "ab":
            options: dict[str, Any] = {"on_conflict": "replace", "delay": 3600}
            made.append(repo.enqueue(session, Note(text=text), unique_key="k", **options))
            session.flush()

    enqueue(engine)
    worker(engine, handle).drain(timeout=20)
    assert [handle.state for handle in made] == [JobState.COMMITTED, JobState.DUPLICATE]
    assert jobs.counts() == {"done": 1, "queued": 1}
    assert jobs.row(made[0].id)["payload"] == {"text": "b"}


async def test_an_async_handler_enqueues_its_own_key(engine: Engine, any_async_engine: AsyncEngine, jobs: Jobs) -> None:
    registry = HandlerRegistry()
    made: list[JobHandle] = []

    @registry.handler(Note)
    async def handle(session: AsyncSession, job: Job[Note]) -> None:
        made.append(repo.enqueue(session, Note(text="next"), unique_key="k", unique_until="finished", delay=3600))
        await session.flush()

    first = enqueue(engine, unique_until="finished")
    await asyncio.to_thread(Worker(any_async_engine, registry).drain, timeout=20)
    assert jobs.status(first.id) == "done"
    assert jobs.status(made[0].id) == "queued"


def test_another_session_of_a_handler_meets_its_key(engine: Engine, jobs: Jobs) -> None:
    made: list[JobHandle] = []

    def handle(session: Session, job: Job[Note]) -> None:
        session.add(Counter(name="c"))
        session.flush()
        made.append(enqueue(engine, unique_until="finished"))

    first = enqueue(engine, unique_until="finished")
    worker(engine, handle).drain(timeout=20)
    assert made[0].existing_id == first.id
    assert jobs.counts() == {"done": 1}


# -- the call ---------------------------------------------------------------------------------------------------------


def test_a_duplicate_of_a_done_job_is_told_in_the_log(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "enlist")
    first = enqueue(engine)
    enqueue(engine)
    assert "unique key" not in caplog.text  # of a queued job it is not: that is what keys are for
    worker(engine, nothing).drain(timeout=20)
    enqueue(engine)
    (message,) = [record.getMessage() for record in caplog.records if "unique key" in record.getMessage()]
    assert str(first.id) in message
    assert "'note'" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"unique_until": "done", "unique_key": "k"},
            "unique_until must be one of started, finished, pruned, not 'done'",
        ),
        ({"unique_until": True, "unique_key": "k"}, "unique_until must be one of"),
        ({"unique_until": ["started"], "unique_key": "k"}, "unique_until must be one of"),
        ({"on_conflict": "raise", "unique_key": "k"}, "on_conflict must be one of ignore, replace, not 'raise'"),
        ({"on_conflict": {}, "unique_key": "k"}, "on_conflict must be one of"),
        ({"unique_for": -1, "unique_key": "k"}, "unique_for must be between 0 and"),
        ({"unique_for": "1h", "unique_key": "k"}, "unique_for must be seconds"),
        ({"unique_for": dt.timedelta(days=10**6), "unique_key": "k"}, "unique_for must be between"),
        ({"unique_until": "finished"}, "unique_until is given without a unique_key"),
        ({"unique_for": 60}, "unique_for is given without a unique_key"),
        ({"on_conflict": "replace"}, "on_conflict is given without a unique_key"),
    ],
)
def test_wrong_options_are_refused_at_the_call(engine: Engine, options: dict[str, Any], message: str) -> None:
    with Session(engine) as session:
        kept = repo.enqueue(session, Note(text="kept"))
        with pytest.raises(InvalidOption, match=message):
            repo.enqueue(session, Note(), **options)
        session.commit()
        assert kept.state is JobState.COMMITTED


def test_ignoring_conflicts_needs_no_key(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session:
        repo.enqueue(session, Note(), on_conflict="ignore")
        session.commit()
    assert observer.rows("SELECT unique_held, unique_until, unique_hold_until FROM enlist_job") == [(False, None, None)]
