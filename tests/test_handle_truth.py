"""What a handle says is true: however the transaction was ended, and by whom."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
from typing import Any

import pytest
import sqlalchemy as sa
from psycopg import sql
from sqlalchemy import URL, Engine, event
from sqlalchemy.orm import Session

from enlist import JobHandle, JobRecord, JobRepository, JobState, SessionError, _transactions
from tests.jobs import Note, state_of, texts
from tests.shop import Order
from tests.support import Observer

repo = JobRepository()


@pytest.mark.parametrize("then", ["rollback", "close"])
@pytest.mark.parametrize("how", ["COMMIT as SQL", "connection().commit()"])
@pytest.mark.filterwarnings("ignore:transaction already deassociated")
def test_a_job_committed_behind_the_session_is_not_said_to_be_discarded(
    engine: Engine, observer: Observer, how: str, then: str
) -> None:
    session = Session(engine)
    handle = repo.enqueue(session, Note(text="a"))
    session.flush()
    if how == "COMMIT as SQL":
        session.execute(sa.text("COMMIT"))
    else:
        session.connection().commit()
    getattr(session, then)()
    session.close()
    assert texts(observer) == ["a"]
    assert handle.state is JobState.UNKNOWN


def test_a_job_committed_by_the_owner_of_the_connection_is_not_said_to_be_discarded(
    engine: Engine, observer: Observer
) -> None:
    with engine.connect() as connection:
        outer = connection.begin()
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            handle = repo.enqueue(session, Note(text="a"))
            session.flush()
            outer.commit()
    assert texts(observer) == ["a"]
    assert handle.state is JobState.UNKNOWN


@pytest.mark.slow
@pytest.mark.parametrize("flushed", [False, True])
def test_a_session_that_is_forgotten_discards_its_jobs(engine: Engine, observer: Observer, flushed: bool) -> None:
    session = Session(engine)
    handle = repo.enqueue(session, Note(text="a"))
    if flushed:
        session.flush()
    del session
    gc.collect()  # the session
    gc.collect()  # the connection, which the handle knew
    assert texts(observer) == []
    assert handle.state is JobState.DISCARDED


@pytest.mark.slow
def test_a_session_that_is_forgotten_does_not_decide_for_the_owner_of_its_connection(
    engine: Engine, observer: Observer
) -> None:
    with engine.connect() as connection:
        connection.begin()
        session = Session(connection)
        handle = repo.enqueue(session, Note(text="a"))
        session.flush()
        del session
        gc.collect()
        connection.commit()
    assert texts(observer) == ["a"]
    assert handle.state is JobState.UNKNOWN


def test_a_prepared_transaction_that_another_has_committed_is_not_said_to_be_discarded(
    engine: Engine, observer: Observer
) -> None:
    session = Session(engine, twophase=True)
    handle = repo.enqueue(session, Note(text="a"))
    session.prepare()
    gid = observer.scalar("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()")
    observer.connection.execute(sql.SQL("COMMIT PREPARED {}").format(sql.Literal(gid)))
    with pytest.raises(sa.exc.ProgrammingError):
        session.commit()
    session.rollback()
    session.close()
    assert texts(observer) == ["a"]
    assert handle.state is JobState.UNKNOWN


@pytest.mark.filterwarnings("ignore:transaction already deassociated")
@pytest.mark.parametrize("twophase", [False, True])
def test_a_commit_on_two_engines_of_which_one_fails(
    engine: Engine, database_url: URL, observer: Observer, twophase: bool
) -> None:
    """SQLAlchemy commits them one after the other, in no particular order."""
    seen = set()
    for number in range(12):
        other = sa.create_engine(database_url)

        @event.listens_for(other, "commit_twophase" if twophase else "commit")
        def end(connection: sa.Connection, xid: str = "", is_prepared: bool = False) -> None:
            if is_prepared:
                observer.connection.execute(sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(xid)))
            else:
                connection.exec_driver_sql("SELECT 1/0")

        with Session(binds={JobRecord: engine, Order: other}, twophase=twophase) as session:
            handle = repo.enqueue(session, Note(text=str(number)))
            session.add(Order(ref=str(number)))
            with pytest.raises(sa.exc.DBAPIError):
                session.commit()
            session.rollback()
        other.dispose()
        there = str(number) in texts(observer)
        assert handle.state is (JobState.UNKNOWN if there else JobState.DISCARDED)
        seen.add(there)
    assert seen == {True, False}


def test_a_failed_commit_on_one_connection_is_a_rollback(engine: Engine, observer: Observer) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "ALTER TABLE shop_receipt ALTER CONSTRAINT shop_receipt_order_id_fkey DEFERRABLE INITIALLY DEFERRED"
        )
    with Session(engine) as session:
        handle = repo.enqueue(session, Note(text="a"))
        session.execute(sa.text("INSERT INTO shop_receipt (order_id, note) VALUES (12345, '')"))
        with pytest.raises(sa.exc.IntegrityError):
            session.commit()
        session.rollback()
        assert handle.state is JobState.DISCARDED
        session.add(Order(ref="b"))
        repo.enqueue(session, Note(text="b"))
        session.commit()
    assert texts(observer) == ["b"]


def test_the_owner_of_a_connection_uses_it_again(engine: Engine, observer: Observer) -> None:
    """What one transaction's end has told is not told of the next."""
    with engine.connect() as connection:
        states: list[Any] = []
        for text, commit in [("a", True), ("b", False), ("c", True)]:
            with Session(connection, join_transaction_mode="control_fully") as session:
                handle = repo.enqueue(session, Note(text=text))
                session.flush()
                (session.commit if commit else session.rollback)()
                states.append(state_of(handle))
    assert states == [JobState.COMMITTED, JobState.DISCARDED, JobState.COMMITTED]
    assert texts(observer) == ["a", "c"]


def test_a_commit_after_the_transaction_was_ended_is_refused(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session:
        handle = repo.enqueue(session, Note(text="a"))
        session.flush()
        session.execute(sa.text("ROLLBACK"))
        with pytest.raises(SessionError, match="behind its back"):
            session.commit()
        assert handle.state is JobState.UNKNOWN
    assert texts(observer) == []


@pytest.mark.parametrize("then", ["commit", "rollback", "close"])
@pytest.mark.parametrize("verb", ["ROLLBACK", "/* away */ rollback", "ROLLBACK AND CHAIN", "COMMIT", "  end"])
def test_a_transaction_that_was_ended_as_sql_and_goes_on_is_noticed(
    engine: Engine, observer: Observer, verb: str, then: str
) -> None:
    with Session(engine) as session:
        handle = repo.enqueue(session, Note(text="a"))
        session.flush()
        session.execute(sa.text(verb))
        session.execute(sa.text("SELECT 1"))  # the driver begins another
        if then == "commit":
            with pytest.raises(SessionError, match="behind its back"):
                session.commit()
        getattr(session, "close" if then == "close" else "rollback")()
        assert handle.state is JobState.UNKNOWN
        repo.enqueue(session, Note(text="b"))
        session.commit()
    assert texts(observer) == (["b"] if "roll" in verb.lower() else ["a", "b"])


@pytest.mark.parametrize("released", [False, True])
def test_a_savepoint_of_the_connection_itself_takes_its_jobs_with_it(
    engine: Engine, observer: Observer, released: bool
) -> None:
    with Session(engine) as session:
        outer = repo.enqueue(session, Note(text="outer"))
        session.flush()
        savepoint = session.connection().begin_nested()
        inner = repo.enqueue(session, Note(text="inner"), queue="inner")
        session.flush()
        deeper = session.connection().begin_nested()
        deepest = repo.enqueue(session, Note(text="deepest"))
        session.flush()
        deeper.commit()
        assert state_of(deepest) is JobState.INSERTED
        (savepoint.commit if released else savepoint.rollback)()
        expected = JobState.INSERTED if released else JobState.DISCARDED
        assert [state_of(handle) for handle in (outer, inner, deepest)] == [JobState.INSERTED, expected, expected]
        after = repo.enqueue(session, Note(text="after"))
        session.commit()
    expected = JobState.COMMITTED if released else JobState.DISCARDED
    assert [state_of(handle) for handle in (inner, deepest)] == [expected] * 2
    assert [state_of(handle) for handle in (outer, after)] == [JobState.COMMITTED] * 2
    assert texts(observer) == (["outer", "inner", "deepest", "after"] if released else ["outer", "after"])


def test_a_savepoint_of_the_connection_within_one_of_the_session(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session:
        with session.begin_nested():
            kept = repo.enqueue(session, Note(text="kept"))
            session.flush()
            savepoint = session.connection().begin_nested()
            gone = repo.enqueue(session, Note(text="gone"))
            session.flush()
            savepoint.rollback()
        session.commit()
    assert (kept.state, gone.state) == (JobState.COMMITTED, JobState.DISCARDED)
    assert texts(observer) == ["kept"]


@pytest.mark.parametrize("name", ["mine", "savepoint1", "sa_save"])
@pytest.mark.parametrize("verb", ["ROLLBACK TO SAVEPOINT", "ROLLBACK TO", "rollback transaction to  savepoint"])
def test_a_savepoint_that_is_rolled_back_as_sql_leaves_doubt(
    engine: Engine, observer: Observer, verb: str, name: str
) -> None:
    with Session(engine) as session:
        session.execute(sa.text(f"SAVEPOINT {name}"))
        handle = repo.enqueue(session, Note(text="a"))
        session.flush()
        session.execute(sa.text(f"{verb} {name}"))
        assert state_of(handle) is JobState.UNKNOWN
        after = repo.enqueue(session, Note(text="b"))
        session.commit()
    assert [state_of(each) for each in (handle, after)] == [JobState.UNKNOWN, JobState.COMMITTED]
    assert texts(observer) == ["b"]


def test_what_fails_before_anything_is_sent_is_discarded(engine: Engine, observer: Observer) -> None:
    def refuse(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "enlist_job" in statement:
            raise ValueError("not this one")

    with Session(engine) as session:
        handle = repo.enqueue(session, Note(text="a"))
        event.listen(engine, "before_cursor_execute", refuse)
        with pytest.raises(ValueError, match="not this one"):
            session.commit()
        event.remove(engine, "before_cursor_execute", refuse)
        session.rollback()
    assert handle.state is JobState.DISCARDED
    assert texts(observer) == []


def test_of_a_transaction_without_jobs_nothing_is_kept(engine: Engine) -> None:
    with Session(engine) as session:
        connection = session.connection()
        session.execute(sa.text("SELECT 1"))
        assert connection not in _transactions._open
        repo.enqueue(session, Note())
        session.flush()
        assert connection in _transactions._open
        session.commit()
        assert connection not in _transactions._open


def test_a_copy_of_a_handle_is_the_handle(engine: Engine) -> None:
    @dataclasses.dataclass
    class Answer:
        handle: JobHandle

    with Session(engine) as session:
        handle = repo.enqueue(session, Note())
        assert copy.copy(handle) is copy.deepcopy(handle) is handle
        assert dataclasses.asdict(Answer(handle)) == {"handle": handle}
        with pytest.raises(TypeError, match=r"handle\.id"):
            pickle.dumps(handle)


def test_an_interrupt_after_the_commit_leaves_doubt(engine: Engine, observer: Observer) -> None:
    """Between the answer to COMMIT and the session's own notice of it."""
    with Session(engine) as session:
        handle = repo.enqueue(session, Note(text="a"))
        session.flush()
        commit = engine.dialect.do_commit

        def interrupted(connection: Any) -> None:
            commit(connection)
            raise KeyboardInterrupt

        engine.dialect.do_commit = interrupted  # type: ignore[assignment, method-assign]
        with pytest.raises(KeyboardInterrupt):
            session.commit()
        engine.dialect.do_commit = commit  # type: ignore[method-assign]
        session.rollback()
    assert texts(observer) == ["a"]
    assert handle.state is JobState.UNKNOWN


def test_a_connection_lost_before_the_commit_was_sent_leaves_none(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session:
        handle = repo.enqueue(session, Note(text="a"))
        session.flush()
        pid = session.scalar(sa.text("SELECT pg_backend_pid()"))

        @event.listens_for(session, "before_commit")
        def lose(_session: Session) -> None:
            observer.execute("SELECT pg_terminate_backend(%s)", pid)
            session.scalar(sa.text("SELECT 1"))

        with pytest.raises(sa.exc.OperationalError):
            session.commit()
        session.rollback()
        assert handle.state is JobState.DISCARDED
    assert texts(observer) == []


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_joined_transaction_that_was_ended_and_goes_on_is_noticed(
    engine: Engine, observer: Observer, end: str
) -> None:
    with engine.connect() as connection:
        outer = connection.begin()
        with Session(connection) as session:
            handle = repo.enqueue(session, Note(text="a"))
            session.flush()
            getattr(outer, end)()
            session.execute(sa.text("SELECT 1"))  # the connection begins another
            with pytest.raises(SessionError, match="behind its back"):
                session.commit()
            assert handle.state is JobState.UNKNOWN
    assert texts(observer) == (["a"] if end == "commit" else [])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["close", "reset", "forget"])
def test_a_session_that_ends_leaves_a_joined_transaction_to_its_owner(
    engine: Engine, observer: Observer, how: str
) -> None:
    with engine.connect() as connection:
        connection.begin()
        session = Session(connection)
        handle = repo.enqueue(session, Note(text="a"))
        session.flush()
        if how == "forget":
            del session
            gc.collect()
        else:
            getattr(session, how)()
        connection.commit()
    assert texts(observer) == ["a"]
    assert handle.state is JobState.UNKNOWN


@pytest.mark.filterwarnings("ignore:transaction already deassociated")
def test_an_error_after_the_connections_own_commit_says_nothing_of_it(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session:
        handle = repo.enqueue(session, Note(text="a"))
        session.flush()
        session.connection().commit()
        with pytest.raises(sa.exc.DBAPIError):
            session.execute(sa.text("SELECT 1/0"))
        session.rollback()
        assert handle.state is JobState.UNKNOWN
    assert texts(observer) == ["a"]
