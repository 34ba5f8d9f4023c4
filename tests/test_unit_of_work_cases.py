"""What the model of the unit of work, or thinking about it, has found: each as a test of its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Engine, event
from sqlalchemy.orm import Session

from enlist import JobRepository, JobState
from tests.jobs import Note, state_of, texts
from tests.shop import Order
from tests.support import Observer, StatementRecorder

repo = JobRepository()


@pytest.mark.parametrize("status", ["running", "done"])
def test_a_duplicate_names_the_job_that_has_taken_the_key_in_the_same_flush(
    engine: Engine, observer: Observer, status: str
) -> None:
    with Session(engine) as session:
        old = repo.enqueue(session, Note(text="old"), unique_key="k")
        session.commit()
        observer.execute(
            "UPDATE enlist_job SET status = %s, locked_until = CASE WHEN %s = 'running' THEN now() END", status, status
        )
        new = repo.enqueue(session, Note(text="new"), unique_key="k", on_conflict="replace")
        refused = repo.enqueue(session, Note(text="refused"), unique_key="k")
        session.commit()
    assert (state_of(new), state_of(refused)) == (JobState.COMMITTED, JobState.DUPLICATE)
    # The old one has lost the key to the new one: whoever wants to follow the job that will run needs that.
    assert refused.existing_id == new.id
    assert observer.rows("SELECT id, unique_held FROM enlist_job ORDER BY id") == [(old.id, False), (new.id, True)]


def test_a_flush_that_a_listener_stops_loses_no_job(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session:

        def refuse(*_: Any) -> None:
            raise ValueError("not now")

        first = repo.enqueue(session, Note(text="a"))
        event.listen(session, "before_flush", refuse)
        with pytest.raises(ValueError, match="not now"):
            session.flush()
        event.remove(session, "before_flush", refuse)
        session.expunge_all()
        second = repo.enqueue(session, Note(text="b"))
        session.expunge_all()
        third = repo.enqueue(session, Note(text="c"))
        session.commit()
    assert {state_of(handle) for handle in (first, second, third)} == {JobState.COMMITTED}
    assert texts(observer) == ["a", "b", "c"]


def test_a_flush_without_work_loses_no_job(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session:

        def drop(session: Session, *_: Any) -> None:
            for each in list(session.new):
                if isinstance(each, Order):
                    session.expunge(each)

        event.listen(session, "before_flush", drop)
        session.add(Order(ref="dropped"))
        session.flush()
        first = repo.enqueue(session, Note(text="a"))
        session.expunge_all()
        second = repo.enqueue(session, Note(text="b"))
        session.commit()
    assert {state_of(first), state_of(second)} == {JobState.COMMITTED}
    assert texts(observer) == ["a", "b"]


def test_repositories_of_one_table_keep_the_order_of_calls_and_keys(
    engine: Engine, observer: Observer, statements: StatementRecorder
) -> None:
    with Session(engine) as session:
        for number in range(5):
            here = JobRepository(notify=None if number % 2 else "after_commit")
            here.enqueue(session, Note(text=str(number)), unique_key="k", on_conflict="replace")
            here.enqueue(session, Note(), unique_key=f"other {number}")
        session.commit()
    assert len(statements.matching("INSERT INTO enlist_job")) == 2  # those that replace, and the others
    assert observer.scalar("SELECT payload->>'text' FROM enlist_job WHERE unique_key = 'k'") == "4"


def test_repositories_of_one_table_do_not_deadlock(engine: Engine) -> None:
    repositories = [JobRepository(), JobRepository()]

    def write(order: int) -> None:
        for round_ in range(20):
            with Session(engine) as session, session.begin():
                for number in range(20)[::order]:
                    repositories[(number + round_) % 2].enqueue(session, Note(), unique_key=f"{round_}-{number}")

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(write, order) for order in (1, -1)]:
            future.result(30)
