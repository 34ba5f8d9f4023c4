"""A job belongs to the savepoint that it was enqueued in, and its handle says so."""

from __future__ import annotations

import uuid
from typing import Literal

import pytest
import sqlalchemy as sa
from sqlalchemy import URL, Engine
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from enlist import JobRecord, JobRepository, JobState, SessionError, notifier
from enlist._statements import statements_for
from tests.jobs import Note, state_of, texts
from tests.shop import Order
from tests.support import Observer

repo = JobRepository()
CHANNEL = statements_for(sa.inspect(JobRecord).local_table).channel

JoinMode = Literal["conditional_savepoint", "rollback_only", "control_fully", "create_savepoint"]


@pytest.mark.slow
@pytest.mark.parametrize("outcome", ["commit", "rollback"])
def test_only_what_is_left_at_the_commit_exists_and_wakes(engine: Engine, observer: Observer, outcome: str) -> None:
    observer.listen(CHANNEL)
    with Session(engine) as session:
        a = repo.enqueue(session, Note(text="a"))
        savepoint = session.begin_nested()
        assert state_of(a) is JobState.INSERTED
        b = repo.enqueue(session, Note(text="b"))
        session.flush()
        staged = repo.enqueue(session, Note(text="staged"))
        savepoint.rollback()
        assert [state_of(handle) for handle in (a, b, staged)] == ["inserted", "discarded", "discarded"]
        c = repo.enqueue(session, Note(text="c"))
        with session.begin_nested():
            d = repo.enqueue(session, Note(text="d"))
        assert state_of(d) is JobState.INSERTED
        assert observer.notified(timeout=0.5) == []
        getattr(session, outcome)()
        expected = JobState.COMMITTED if outcome == "commit" else JobState.DISCARDED
        assert {a.state, c.state, d.state} == {expected}
        assert b.inserted is False
    assert session.info == {}
    if outcome == "commit":
        assert observer.notified() == ["default"]
        assert texts(observer) == ["a", "c", "d"]
    else:
        assert observer.notified(timeout=0.3) == []
        assert texts(observer) == []


def test_a_released_savepoint_hands_its_jobs_to_the_one_around_it(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session:
        with session.begin_nested() as middle:
            with session.begin_nested(), session.begin_nested():
                job = repo.enqueue(session, Note())
            assert state_of(job) is JobState.INSERTED
            middle.rollback()
            assert state_of(job) is JobState.DISCARDED
        session.commit()
        assert state_of(job) is JobState.DISCARDED
    assert texts(observer) == []


def test_rolling_back_an_outer_savepoint_discards_the_inner_ones(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session:
        outer = session.begin_nested()
        first = repo.enqueue(session, Note())
        session.begin_nested()
        second = repo.enqueue(session, Note())
        session.flush()
        third = repo.enqueue(session, Note())
        outer.rollback()
        assert {first.state, second.state, third.state} == {JobState.DISCARDED}
        repo.enqueue(session, Note(text="after"))
        session.commit()
    assert texts(observer) == ["after"]


def test_a_flush_that_fails_in_a_savepoint_costs_only_the_savepoint(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session:
        session.add(Order(ref="dup"))
        session.commit()
        before = repo.enqueue(session, Note(text="before"))
        session.begin_nested()
        inside = repo.enqueue(session, Note(text="inside"))
        session.add(Order(ref="dup"))
        with pytest.raises(IntegrityError):
            session.flush()
        assert (before.state, inside.state) == (JobState.INSERTED, JobState.DISCARDED)
        savepoint = session.get_nested_transaction()
        assert savepoint is not None
        savepoint.rollback()
        assert (before.state, inside.state) == (JobState.INSERTED, JobState.DISCARDED)
        repo.enqueue(session, Note(text="after"))
        session.commit()
    assert texts(observer) == ["before", "after"]


def test_a_job_enqueued_after_a_savepoint_with_a_failed_flush_is_not_lost(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session:
        session.add(Order(ref="dup"))
        session.commit()
        repo.enqueue(session, Note(text="before"))
        savepoint = session.begin_nested()
        session.add(Order(ref="dup"))
        with pytest.raises(IntegrityError):
            session.flush()
        savepoint.rollback()
        after = repo.enqueue(session, Note(text="after"))
        with session.begin_nested() as another:
            assert after.state is JobState.INSERTED
            another.rollback()
        session.commit()
    assert texts(observer) == ["before", "after"]


def test_a_key_whose_savepoint_was_rolled_back_is_free_again(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session:
        with session.begin_nested() as savepoint:
            first = repo.enqueue(session, Note(text="first"), unique_key="k")
            session.flush()
            duplicate = repo.enqueue(session, Note(), unique_key="k")
            session.flush()
            assert state_of(duplicate) is JobState.DUPLICATE
            assert duplicate.existing_id == first.id
            savepoint.rollback()
        assert state_of(duplicate) is JobState.DISCARDED
        again = repo.enqueue(session, Note(text="again"), unique_key="k")
        session.commit()
    assert (first.inserted, again.inserted) == (False, True)
    assert texts(observer) == ["again"]


@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("mode", ["conditional_savepoint", "rollback_only", "control_fully", "create_savepoint"])
def test_a_session_in_an_outer_transaction(engine: Engine, observer: Observer, mode: JoinMode, end: str) -> None:
    observer.listen(CHANNEL)
    with engine.connect() as connection:
        outer = connection.begin()
        with Session(connection, join_transaction_mode=mode) as session:
            handle = repo.enqueue(session, Note(text="a"))
            getattr(session, end)()
            assert state_of(handle) is (JobState.COMMITTED if end == "commit" else JobState.DISCARDED)
        if mode != "control_fully":
            # The commit that counts is the outer one: nobody is woken for a job that is not there.
            assert observer.notified(timeout=0.2) == []
            assert texts(observer) == []
        if outer.is_active:
            outer.commit()
    assert texts(observer) == (["a"] if end == "commit" else [])


@pytest.mark.parametrize("notify", ["after_commit", "transaction"])
def test_two_phase_commit(engine: Engine, observer: Observer, notify: Literal["after_commit", "transaction"]) -> None:
    observer.listen(CHANNEL)
    here = JobRepository(notify=notify)
    with Session(engine, twophase=True) as session:
        first = here.enqueue(session, Note(text="first"))
        session.prepare()
        assert state_of(first) is JobState.INSERTED
        session.commit()
        assert state_of(first) is JobState.COMMITTED
        second = here.enqueue(session, Note(text="second"))
        session.prepare()
        session.rollback()
        assert state_of(second) is JobState.DISCARDED
    assert observer.notified() == ["default"]
    assert texts(observer) == ["first"]


def test_a_commit_whose_connection_is_lost_leaves_the_outcome_unknown(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session:
        lost = repo.enqueue(session, Note())
        session.flush()
        pid = session.scalar(sa.text("SELECT pg_backend_pid()"))
        observer.execute("SELECT pg_terminate_backend(%s)", pid)
        with pytest.raises(sa.exc.DBAPIError):
            session.commit()
        session.rollback()
        assert state_of(lost) is JobState.UNKNOWN
        assert lost.inserted is None


@pytest.mark.parametrize("commit", [False, True])
def test_a_connection_lost_before_the_commit_is_a_rollback(engine: Engine, observer: Observer, commit: bool) -> None:
    with Session(engine) as session:
        first = repo.enqueue(session, Note())
        session.flush()
        pid = session.scalar(sa.text("SELECT pg_backend_pid()"))
        second = repo.enqueue(session, Note())
        observer.execute("SELECT pg_terminate_backend(%s)", pid)
        end = session.commit if commit else session.flush
        with pytest.raises(sa.exc.DBAPIError):
            end()
        session.rollback()
        assert {first.state, second.state} == {JobState.DISCARDED}
    assert texts(observer) == []


def test_a_commit_that_the_server_refuses_is_a_rollback(engine: Engine, observer: Observer) -> None:
    observer.execute(
        "ALTER TABLE shop_receipt ALTER CONSTRAINT shop_receipt_order_id_fkey DEFERRABLE INITIALLY DEFERRED"
    )
    with Session(engine) as session:
        handle = repo.enqueue(session, Note())
        session.execute(sa.text("INSERT INTO shop_receipt (order_id, note) VALUES (0, '')"))
        with pytest.raises(IntegrityError):
            session.commit()
        session.rollback()
        assert state_of(handle) is JobState.DISCARDED
    assert texts(observer) == []


def test_a_committed_handle_says_so_within_the_hooks_of_the_commit(engine: Engine) -> None:
    seen = []
    with Session(engine) as session:
        handle = repo.enqueue(session, Note(), unique_key=str(uuid.uuid4()))
        unsubscribe = notifier.local.subscribe(CHANNEL, lambda queue: seen.append((queue, handle.state)))
        session.commit()
        unsubscribe()
    assert seen == [("default", JobState.COMMITTED)]


def test_schema_translate_map(engine: Engine, database_url: URL, observer: Observer) -> None:
    observer.execute("CREATE SCHEMA other")
    observer.execute("CREATE TABLE other.enlist_job (LIKE enlist_job INCLUDING ALL)")
    with Session(engine.execution_options(schema_translate_map={None: "other"})) as session:
        repo.enqueue(session, Note())
        session.commit()
    assert texts(observer) == []
    assert observer.scalar("SELECT count(*) FROM other.enlist_job") == 1


def test_a_commit_after_a_swallowed_error_is_refused(engine: Engine, observer: Observer) -> None:
    """PostgreSQL answers the COMMIT of a failed transaction with a rollback, and no driver tells."""
    with Session(engine) as session:
        lost = repo.enqueue(session, Note(text="lost"))
        session.flush()
        with pytest.raises(sa.exc.DBAPIError):
            session.execute(sa.text("SELECT 1/0"))
        with pytest.raises(SessionError, match="swallowed"):
            session.commit()
        session.rollback()
        assert state_of(lost) is JobState.DISCARDED
        kept = repo.enqueue(session, Note(text="kept"))
        session.flush()
        with pytest.raises(sa.exc.DBAPIError), session.begin_nested():
            session.execute(sa.text("SELECT 1/0"))
        session.commit()
        assert state_of(kept) is JobState.COMMITTED
    assert texts(observer) == ["kept"]


@pytest.mark.parametrize("verb", ["COMMIT", "ROLLBACK"])
def test_a_transaction_that_is_ended_behind_the_session_leaves_the_outcome_unknown(engine: Engine, verb: str) -> None:
    with Session(engine) as session:
        handle = repo.enqueue(session, Note())
        session.flush()
        session.execute(sa.text(verb))
        with pytest.raises(SessionError, match="behind its back"):
            session.commit()
        session.rollback()
        assert state_of(handle) is JobState.UNKNOWN
