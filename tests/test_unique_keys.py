"""One job per kind and key: duplicates are told apart, racing twins wait, nothing deadlocks and nothing is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine, event
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from enlist import JobHandle, JobRepository, JobState, UniqueKeyContended
from enlist._driver import sqlstate
from tests.jobs import Note, SendReceipt, texts
from tests.support import Observer, StatementRecorder

repo = JobRepository()

WAITING = "SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"


def in_thread(function: Callable[[], Any]) -> Future[Any]:
    executor = ThreadPoolExecutor(1)
    future = executor.submit(function)
    executor.shutdown(wait=False)
    return future


def enqueue_and_commit(engine: Engine, text: str, key: str = "k") -> JobHandle:
    with Session(engine) as session:
        handle = repo.enqueue(session, Note(text=text), unique_key=key)
        session.commit()
    return handle


def test_the_second_of_one_session_is_a_duplicate(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session:
        first = repo.enqueue(session, Note(text="first"), unique_key="k")
        second = repo.enqueue(session, Note(text="second"), unique_key="k")
        session.flush()
        third = repo.enqueue(session, Note(text="third"), unique_key="k")
        session.commit()
    assert [first.inserted, second.inserted, third.inserted] == [True, False, False]
    assert first.id == second.existing_id == third.existing_id
    assert (first.existing_id, second.state) == (None, JobState.DUPLICATE)
    assert texts(observer) == ["first"]


def test_enqueue_many_is_aligned_with_its_items(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session:
        keys = ["z", "z", "m", None, None, "a", "m"]
        handles = repo.enqueue_many(session, [(Note(text=str(key)), {"unique_key": key}) for key in keys])
        session.commit()
    assert [handle.inserted for handle in handles] == [True, False, True, True, True, True, False]
    assert handles[1].existing_id == handles[0].id
    assert handles[6].existing_id == handles[2].id
    assert [repo_id for (repo_id,) in observer.rows("SELECT id FROM enlist_job ORDER BY id")] == [
        handle.id for handle in handles if handle.inserted
    ]


def test_keys_are_compared_exactly_and_within_their_kind(engine: Engine, observer: Observer) -> None:
    keys = ["A", "a", " a", "a ", "é", "e\u0301", "😀" * 500, "k" * 2000]
    with Session(engine) as session:
        notes = [repo.enqueue(session, Note(), unique_key=key) for key in keys]
        receipts = [repo.enqueue(session, SendReceipt(order_id=1), unique_key=key) for key in keys]
        session.commit()
    assert all(handle.inserted for handle in notes + receipts)


@pytest.mark.parametrize(
    ("status", "inserted"), [("done", False), ("dead", True), ("cancelled", True), ("queued", False)]
)
def test_a_key_is_held_as_long_as_the_row_says(engine: Engine, observer: Observer, status: str, inserted: bool) -> None:
    first = enqueue_and_commit(engine, "first")
    observer.execute("UPDATE enlist_job SET status = %s, unique_held = %s", status, not inserted)
    second = enqueue_and_commit(engine, "second")
    assert second.inserted is inserted
    assert second.existing_id == (None if inserted else first.id)


@pytest.mark.parametrize("outcome", ["rollback", "commit"])
def test_a_twin_waits_for_the_outcome_of_the_first(engine: Engine, observer: Observer, outcome: str) -> None:
    with Session(engine) as session:
        first = repo.enqueue(session, Note(text="first"), unique_key="k")
        session.flush()
        waiting = in_thread(lambda: enqueue_and_commit(engine, "second"))
        observer.wait_for(WAITING)
        getattr(session, outcome)()
    second = waiting.result(timeout=10)
    if outcome == "commit":
        assert (second.state, second.existing_id) == (JobState.DUPLICATE, first.id)
        assert texts(observer) == ["first"]
    else:
        assert second.state is JobState.COMMITTED
        assert texts(observer) == ["second"]


def test_a_lock_timeout_comes_out_as_it_is(engine: Engine, observer: Observer) -> None:
    with Session(engine) as first, Session(engine) as second:
        repo.enqueue(first, Note(), unique_key="k")
        first.flush()
        second.execute(sa.text("SET LOCAL lock_timeout = '20ms'"))
        handle = repo.enqueue(second, Note(), unique_key="k")
        with pytest.raises(OperationalError) as caught:
            second.commit()
        assert sqlstate(caught.value) == "55P03"
        second.rollback()
        assert (handle.state, handle.existing_id) == (JobState.DISCARDED, None)


def after_each_insert(engine: Engine, act: Callable[[], object]) -> None:
    def react(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if "ON CONFLICT" in statement:
            act()

    event.listen(engine, "after_cursor_execute", react)


def test_a_holder_that_vanishes_before_it_is_looked_up_is_replaced(
    engine: Engine, observer: Observer, statements: StatementRecorder
) -> None:
    enqueue_and_commit(engine, "first")
    statements.clear()
    after_each_insert(engine, lambda: observer.execute("DELETE FROM enlist_job"))
    with Session(engine) as session:
        second = repo.enqueue(session, Note(text="second"), unique_key="k")
        session.flush()
        assert second.inserted is True
        assert len(statements.texts) == 3


def test_a_key_that_is_always_held_and_never_found_ends_in_an_error(
    engine: Engine, observer: Observer, statements: StatementRecorder
) -> None:
    enqueue_and_commit(engine, "holder")
    statements.clear()
    # The look-up never sees the holder, the next insert always meets it.
    after_each_insert(engine, lambda: observer.execute("UPDATE enlist_job SET unique_held = false"))

    def hold_again(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if "ON CONFLICT" in statement:
            observer.execute("UPDATE enlist_job SET unique_held = true")

    event.listen(engine, "before_cursor_execute", hold_again)
    with Session(engine) as session:
        handle = repo.enqueue(session, Note(), unique_key="k")
        with pytest.raises(UniqueKeyContended, match="'k' of kind 'note'"):
            session.commit()
        assert handle.state is JobState.DISCARDED
    assert len(statements.texts) <= 6
    assert len(texts(observer)) == 1


def test_repeatable_read_says_that_it_cannot_see_the_twin(engine: Engine) -> None:
    with Session(engine.execution_options(isolation_level="REPEATABLE READ")) as session:
        session.execute(sa.text("SELECT 1 FROM enlist_job"))
        enqueue_and_commit(engine, "first")
        repo.enqueue(session, Note(), unique_key="k")
        with pytest.raises(OperationalError) as caught:
            session.commit()
        assert sqlstate(caught.value) == "40001"


@pytest.mark.slow
def test_keys_in_opposite_order_wait_and_never_deadlock(engine: Engine, observer: Observer) -> None:
    keys = [f"{letter}{number}" for letter in "abcdefghijklmnopqrst" for number in range(55)]  # two chunks
    barrier = threading.Barrier(2, timeout=30)

    def rounds(order: list[str]) -> int:
        inserted = 0
        for number in range(50):
            some = order if number < 3 else [key for key in order if key[1:] == "0"]
            barrier.wait()
            with Session(engine) as session:
                handles = repo.enqueue_many(session, [(Note(), {"unique_key": f"{number}:{key}"}) for key in some])
                session.commit()
            assert [handle.state in {JobState.COMMITTED, JobState.DUPLICATE} for handle in handles]
            inserted += sum(handle.inserted is True for handle in handles)
        return inserted

    first = in_thread(lambda: rounds(keys))
    second = in_thread(lambda: rounds(keys[::-1]))
    total = first.result(timeout=50) + second.result(timeout=50)
    assert total == observer.scalar("SELECT count(*) FROM enlist_job") == 3 * 1100 + 47 * 20


@pytest.mark.slow
def test_separate_flushes_in_opposite_order_deadlock_once_and_can_be_retried(
    engine: Engine, observer: Observer
) -> None:
    barrier = threading.Barrier(2, timeout=10)
    survived = threading.Event()

    def run(keys: str) -> str | None:
        for attempt in range(2):
            with Session(engine) as session:
                try:
                    repo.enqueue(session, Note(), unique_key=keys[0])
                    session.flush()
                    if attempt == 0:
                        barrier.wait()
                    repo.enqueue(session, Note(), unique_key=keys[1])
                    session.commit()
                except OperationalError as error:
                    state = sqlstate(error)
                    survived.wait(10)  # at once it could meet the other in the same place again
                else:
                    survived.set()
                    return None if attempt == 0 else state
        return "gave up"

    futures = [in_thread(lambda: run("ab")), in_thread(lambda: run("ba"))]
    assert sorted(str(future.result(timeout=20)) for future in futures) == ["40P01", "None"]
    assert observer.scalar("SELECT count(*) FROM enlist_job") == 2
