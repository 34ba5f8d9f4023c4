"""A job enlists in the transaction: written with the session's rows, gone with them."""

from __future__ import annotations

import datetime as dt
import subprocess
import sys
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import URL, Engine, event
from sqlalchemy.exc import IntegrityError, InvalidRequestError, PendingRollbackError
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from enlist import (
    InvalidOption,
    JobHandle,
    JobRecord,
    JobRepository,
    JobState,
    JobStatus,
    PayloadError,
    SchemaError,
    SessionError,
)
from tests.jobs import Note, SendReceipt, state_of, texts
from tests.shop import Order, Receipt
from tests.support import Observer, StatementRecorder

repo = JobRepository()


def test_enqueue_does_no_io_and_commit_writes_after_the_domain_rows(
    engine: Engine, observer: Observer, statements: StatementRecorder
) -> None:
    with Session(engine) as session:
        order = Order(ref="a")
        handle = repo.enqueue(session, lambda o: SendReceipt(order_id=o.id), of=order)
        session.add(order)
        assert statements.events == []
        assert state_of(handle) is JobState.STAGED
        assert handle.inserted is None
        session.commit()
        assert state_of(handle) is JobState.COMMITTED
        assert handle.inserted is True
        order_id = order.id
    inserts = [text for text in statements.texts if text.startswith("INSERT")]
    assert "shop_order" in inserts[0]
    assert "enlist_job" in inserts[1]
    row = observer.row("SELECT id, kind, queue, status, max_attempts, priority, payload, meta FROM enlist_job")
    assert row == (handle.id, "send_receipt", "mail", "queued", 8, 0, {"order_id": order_id}, {})


def test_the_row_has_what_the_call_says(engine: Engine, observer: Observer) -> None:
    at = dt.datetime(2031, 1, 1, 12, tzinfo=dt.timezone(dt.timedelta(hours=5, minutes=30)))
    with Session(engine) as session, session.begin():
        repo.enqueue(
            session,
            SendReceipt(order_id=1),
            queue="other",
            priority=-32768,
            run_at=at,
            unique_key="k",
            concurrency_key="c",
            concurrency_limit=3,
            max_attempts=1,
            meta={"trace": "é"},
        )
    assert observer.row(
        "SELECT queue, priority, run_at, unique_key, unique_held, concurrency_key, concurrency_limit, max_attempts,"
        " meta FROM enlist_job"
    ) == ("other", -32768, at, "k", True, "c", 3, 1, {"trace": "é"})


def test_a_delay_counts_from_the_servers_time_at_the_flush(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session, session.begin():
        repo.enqueue(session, Note(), delay=90)
        repo.enqueue(session, Note(), delay=dt.timedelta(seconds=1.5))
        repo.enqueue(session, Note())
    waits = observer.rows("SELECT run_at - created_at FROM enlist_job ORDER BY run_at DESC")
    assert waits == [(dt.timedelta(seconds=90),), (dt.timedelta(seconds=1.5),), (dt.timedelta(0),)]


def test_a_kind_and_a_dict_for_handlers_elsewhere(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session:
        order = Order(ref="a")
        session.add(order)
        repo.enqueue(session, "elsewhere", {"a": [1, 2.5, None, {"b": True}]}, queue="q")
        repo.enqueue(session, "elsewhere", lambda o: {"order": o.id}, of=order)
        session.commit()
        order_id = order.id
    assert observer.rows("SELECT queue, payload FROM enlist_job ORDER BY id") == [
        ("q", {"a": [1, 2.5, None, {"b": True}]}),
        ("default", {"order": order_id}),
    ]


def test_rollback_and_close_leave_nothing(engine: Engine, observer: Observer) -> None:
    session = Session(engine)
    flushed = repo.enqueue(session, Note(text="flushed"))
    session.flush()
    assert state_of(flushed) is JobState.INSERTED
    staged = repo.enqueue(session, Note(text="staged"))
    session.rollback()
    assert {flushed.state, staged.state} == {JobState.DISCARDED}
    assert staged.inserted is False
    for flush in (False, True):
        closed = repo.enqueue(session, Note(text="closed"))
        if flush:
            session.flush()
        session.close()
        assert state_of(closed) is JobState.DISCARDED
        assert not session.new
        assert session.info == {}
    kept = repo.enqueue(session, Note(text="kept"))
    session.commit()
    session.close()
    assert state_of(kept) is JobState.COMMITTED
    assert texts(observer) == ["kept"]


@pytest.mark.parametrize("how", ["reset", "invalidate", "close"])
def test_each_way_to_end_a_session_discards(engine: Engine, observer: Observer, how: str) -> None:
    session = Session(engine)
    session.execute(sa.text("SELECT 1"))
    with session.begin_nested():
        inner = repo.enqueue(session, Note())
        session.flush()
        staged = repo.enqueue(session, Note())
        getattr(session, how)()
        assert {inner.state, staged.state} == {JobState.DISCARDED}
    assert not session.new
    session.close()
    assert texts(observer) == []


def expunge_all(session: Session) -> None:
    session.expunge_all()


def expunge_jobs(session: Session) -> None:
    for found in [found for found in session.new if isinstance(found, JobRecord)]:
        session.expunge(found)


def expunge_each(session: Session) -> None:
    for found in list(session):
        session.expunge(found)


@pytest.mark.parametrize("empty", [expunge_all, expunge_jobs, expunge_each])
def test_an_emptied_session_keeps_its_accepted_jobs(
    engine: Engine, observer: Observer, empty: Callable[[Session], None]
) -> None:
    with Session(engine) as session:
        first = repo.enqueue(session, Note(text="first"))
        empty(session)
        assert state_of(first) is JobState.STAGED
        repo.enqueue(session, Note(text="second"))
        empty(session)
        with session.begin_nested() as savepoint:
            assert state_of(first) is JobState.INSERTED
            repo.enqueue(session, Note(text="undone"))
            empty(session)
            savepoint.rollback()
        session.commit()
    assert texts(observer) == ["first", "second"]


def test_jobs_survive_a_session_emptied_again_and_again(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session:
        for number in range(1000):
            session.add(Order(ref=str(number)))
            repo.enqueue(session, Note())
            if number % 100 == 99:
                session.expunge_all()
        session.commit()
    assert observer.scalar("SELECT count(*) FROM enlist_job") == 1000
    assert observer.scalar("SELECT count(*) FROM shop_order") == 0


@pytest.mark.parametrize("mode", ["autoflush", "autoflush=False", "no_autoflush"])
def test_the_parents_row_comes_first_whatever_the_autoflush(engine: Engine, observer: Observer, mode: str) -> None:
    with Session(engine, autoflush=mode != "autoflush=False") as session:
        order = Order(ref="a")
        session.add(order)
        early = {"order_id": order.id}
        if mode == "no_autoflush":
            with session.no_autoflush:
                repo.enqueue(session, "early", early)
                repo.enqueue(session, lambda: SendReceipt(order_id=order.id))
                session.scalars(sa.select(Receipt)).all()
        else:
            repo.enqueue(session, "early", early)
            repo.enqueue(session, lambda: SendReceipt(order_id=order.id))
            session.scalars(sa.select(Receipt)).all()
        session.commit()
        order_id = order.id
    assert observer.rows("SELECT payload FROM enlist_job ORDER BY id") == [
        ({"order_id": None},),
        ({"order_id": order_id},),
    ]


def test_autoflush_writes_staged_jobs_before_a_query(engine: Engine) -> None:
    with Session(engine) as session:
        handle = repo.enqueue(session, Note())
        assert session.scalar(sa.select(sa.func.count()).select_from(JobRecord)) == 1
        assert state_of(handle) is JobState.INSERTED
        found = repo.get(session, handle.id)
        assert found is not None
        assert found.status is JobStatus.QUEUED
        assert repo.get(session, uuid.uuid4()) is None


def test_a_loop_of_late_payloads_has_each_its_object(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session:
        for number in range(3):
            order = Order(ref=str(number))
            session.add(order)
            repo.enqueue(session, lambda o: Note(text=f"{o.ref}:{o.id}"), of=order)
        session.commit()
        expected = [f"{o.ref}:{o.id}" for o in session.scalars(sa.select(Order).order_by(Order.id))]
    assert texts(observer) == expected


# -- failures ---------------------------------------------------------------------------------------------------------


def test_a_swallowed_failure_of_a_flush_of_jobs_alone_makes_commit_raise(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session:
        session.add(Order(ref="lost"))
        session.flush()
        first = repo.enqueue(session, Note(text="first"))
        session.flush()
        second = repo.enqueue(session, Note(text="second"), unique_key="k")
        session.connection().exec_driver_sql("SET LOCAL lock_timeout = '1ms'")
        with Session(engine) as twin:
            repo.enqueue(twin, Note(text="twin"), unique_key="k")
            twin.flush()
            with pytest.raises(sa.exc.OperationalError, match="lock timeout"):
                session.flush()
        assert {first.state, second.state} == {JobState.DISCARDED}
        with pytest.raises(PendingRollbackError):
            session.commit()
        with pytest.raises(SessionError, match="rollback"):
            repo.enqueue(session, Note(text="third"))
        session.rollback()
        assert state_of(first) is JobState.DISCARDED
        repo.enqueue(session, Note(text="fourth"))
        session.commit()
    assert texts(observer) == ["fourth"]
    assert observer.scalar("SELECT count(*) FROM shop_order") == 0


@pytest.mark.parametrize("with_rows", [False, True])
def test_a_late_payload_that_fails_fails_the_flush_and_names_the_line(
    engine: Engine, observer: Observer, with_rows: bool
) -> None:
    with Session(engine) as session:
        if with_rows:
            session.add(Order(ref="a"))
        other = repo.enqueue(session, Note(text="other"))
        handle = repo.enqueue(session, lambda: SendReceipt(order_id=int("x")))
        with pytest.raises(PayloadError, match=rf"{__file__}:\d+ could not be made: ValueError") as caught:
            session.flush()
        assert isinstance(caught.value.__cause__, ValueError)
        assert {handle.state, other.state} == {JobState.DISCARDED}
        with pytest.raises(PendingRollbackError):
            session.commit()
    assert texts(observer) == []
    assert observer.scalar("SELECT count(*) FROM shop_order") == 0


async def _coroutine() -> Note:
    return Note()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SendReceipt(order_id=None), "order_id"),  # type: ignore[arg-type]
        (lambda: {"a": 1}, "dict without a kind"),
        (lambda: None, "NoneType"),
        (lambda: SendReceipt, "class SendReceipt"),
        (lambda: Note(text="a\x00b"), r"payload\.text has a NUL"),
        (lambda: _coroutine(), "coroutine"),  # noqa: PLW0108 - not itself an async function
    ],
)
def test_what_a_late_payload_returns_is_checked(engine: Engine, make: Any, message: str) -> None:
    with Session(engine) as session:
        repo.enqueue(session, make)
        with pytest.raises(PayloadError, match=rf"{__file__}:\d+.*{message}"):
            session.commit()


def test_a_database_error_in_a_late_payload_stays_one(engine: Engine) -> None:
    with Session(engine) as session:

        def make() -> Note:
            session.execute(sa.text("SELECT 1/0"))
            return Note()

        repo.enqueue(session, make)
        with pytest.raises(sa.exc.DataError) as caught:
            session.commit()
        assert __file__ in caught.value.__notes__[0]


def test_an_integrity_error_of_the_application_comes_out_unchanged(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session:
        session.add(Order(ref="dup"))
        session.commit()
        handle = repo.enqueue(session, Note(text="x"), unique_key="k")
        session.add(Order(ref="dup"))
        with pytest.raises(IntegrityError, match="shop_order"):
            session.flush()
        assert state_of(handle) is JobState.DISCARDED
        session.rollback()
        repo.enqueue(session, Note(text="y"), unique_key="k")
        session.commit()
    assert texts(observer) == ["y"]


def test_a_refused_enqueue_leaves_the_transaction_usable(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session:
        session.add(Order(ref="a"))
        with pytest.raises(PayloadError):
            repo.enqueue(session, Note(text="\x00"))
        with pytest.raises(PayloadError, match=r"^items\[1\]: "):
            repo.enqueue_many(session, [Note(text="none of them"), Note(text="\x00")])
        repo.enqueue(session, Note(text="kept"))
        session.commit()
    assert texts(observer) == ["kept"]
    assert observer.scalar("SELECT count(*) FROM shop_order") == 1


def test_a_database_without_the_tables_says_so(empty_database_url: URL) -> None:
    engine = sa.create_engine(empty_database_url)
    with Session(engine) as session:
        repo.enqueue(session, Note())
        with pytest.raises(SchemaError, match="enlist migrate"):
            session.commit()
    engine.dispose()


def test_without_the_unique_index_there_are_no_duplicates_but_an_error(engine: Engine, observer: Observer) -> None:
    observer.execute("DROP INDEX enlist_job_unique")
    with Session(engine) as session:
        repo.enqueue(session, Note(), unique_key="k")
        with pytest.raises(SchemaError):
            session.commit()
    assert texts(observer) == []


def test_a_record_added_as_an_object_is_refused(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session:
        repo.enqueue(session, Note())
        session.add(JobRecord(id=uuid.uuid4(), kind="ghost"))
        with pytest.raises(SessionError, match=r"repo\.enqueue"):
            session.commit()
    assert texts(observer) == []


# -- sessions ---------------------------------------------------------------------------------------------------------


class ShopSession(Session):
    pass


@pytest.mark.parametrize(
    "make",
    [
        ShopSession,
        lambda engine: sessionmaker(engine, class_=ShopSession, info={"mine": 1})(),
        lambda engine: scoped_session(sessionmaker(engine)),
        lambda engine: Session(binds={JobRecord: engine, Order: engine}),
    ],
)
def test_kinds_of_sessions(engine: Engine, observer: Observer, make: Callable[[Engine], Session]) -> None:
    session = make(engine)
    session.add(Order(ref="a"))
    handle = repo.enqueue(session, Note(text="a"))
    session.commit()
    assert state_of(handle) is JobState.COMMITTED
    assert session.info in ({}, {"mine": 1})
    session.close()
    assert texts(observer) == ["a"]


def test_autobegin_false(engine: Engine, observer: Observer) -> None:
    with Session(engine, autobegin=False) as session:
        with pytest.raises(InvalidRequestError, match="begin"):
            repo.enqueue(session, Note(text="refused"))
        with session.begin():
            repo.enqueue(session, Note(text="kept"))
    assert texts(observer) == ["kept"]


@pytest.mark.parametrize("session", [None, "session", sessionmaker(), Session, object()])
def test_what_is_no_session_is_refused(session: Any) -> None:
    with pytest.raises(SessionError, match="AsyncSession"):
        repo.enqueue(session, Note())


def test_what_else_holds_the_pending_object_does_not_matter(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session:
        repo.enqueue(session, Note(text="a"))
        seen = list(session.new)
        session.commit()
        repo.enqueue(session, Note(text="b"))
        session.commit()
        assert list(session) == []
    assert len(seen) == 1
    assert texts(observer) == ["a", "b"]


def test_there_is_no_enqueue_after_the_commit(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session:
        refused = []

        def enqueue(session: Session) -> None:
            with pytest.raises(SessionError, match="being ended"):
                repo.enqueue(session, Note(text="too late"))
            refused.append(True)

        event.listen(session, "after_commit", enqueue)
        repo.enqueue(session, Note(text="a"))
        session.commit()
        assert refused == [True]
        assert session.info == {}
    assert texts(observer) == ["a"]


def test_a_session_without_a_bind_for_the_jobs_is_refused(engine: Engine) -> None:
    for session in (Session(), Session(binds={Order: engine})):
        with pytest.raises(SessionError, match="JobRecord"):
            repo.enqueue(session, Note())
        assert not session.new
        session.close()


def test_autocommit_is_refused_at_the_call(engine: Engine, database_url: URL, observer: Observer) -> None:
    option = engine.execution_options(isolation_level="AUTOCOMMIT")
    created = sa.create_engine(database_url, isolation_level="AUTOCOMMIT")
    with option.connect() as connection, engine.connect() as flagged:
        driver: Any = flagged.connection.dbapi_connection
        driver.autocommit = True
        for bind in (option, created, connection, flagged):
            with Session(bind) as session:
                session.add(Order(ref="a"))
                with pytest.raises(SessionError, match="AUTOCOMMIT"):
                    repo.enqueue(session, Note())
        driver.autocommit = False
    created.dispose()


def test_autocommit_that_only_the_driver_knows_fails_the_flush(database_url: URL, observer: Observer) -> None:
    """Before a row of the domain is sent, which would be committed by itself, without its job."""
    engine = sa.create_engine(database_url, connect_args={"autocommit": True})
    with Session(engine) as session:
        session.add(Order(ref="a"))
        handle = repo.enqueue(session, Note())
        for _ in range(2):  # an error that is swallowed comes again
            with pytest.raises(SessionError, match="AUTOCOMMIT"):
                session.commit()
        assert handle.state is JobState.STAGED
        session.rollback()
        assert state_of(handle) is JobState.DISCARDED
        session.add(Order(ref="b"))  # without jobs the session is as it was
        session.commit()
    engine.dispose()
    assert texts(observer) == []
    assert observer.rows("SELECT ref FROM shop_order") == [("b",)]


def test_a_transaction_that_is_one_takes_jobs_whatever_its_engine_says(database_url: URL, observer: Observer) -> None:
    engine = sa.create_engine(database_url, isolation_level="AUTOCOMMIT")
    with Session(engine) as session:
        session.connection(execution_options={"isolation_level": "READ COMMITTED"})
        repo.enqueue(session, Note(text="a"))
        session.rollback()
        session.connection(execution_options={"isolation_level": "READ COMMITTED"})
        repo.enqueue(session, Note(text="b"))
        session.commit()
    engine.dispose()
    assert texts(observer) == ["b"]


def test_a_transaction_that_commits_by_itself_takes_none_whatever_its_engine_says(engine: Engine) -> None:
    with Session(engine) as session:
        session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
        with pytest.raises(SessionError, match="AUTOCOMMIT"):
            repo.enqueue(session, Note())


def test_a_routing_session_writes_jobs_where_it_writes_rows(
    engine: Engine, database_url: URL, observer: Observer
) -> None:
    reader = sa.create_engine(database_url, isolation_level="AUTOCOMMIT")

    class RoutingSession(Session):
        def get_bind(self, mapper: Any = None, *, clause: Any = None, **rest: Any) -> Engine:
            return engine if self._flushing else reader

    with StatementRecorder(reader) as read, RoutingSession() as session:
        session.add(Order(ref="a"))
        first = repo.enqueue(session, Note(), unique_key="k")
        second = repo.enqueue(session, Note(), unique_key="k")
        session.commit()
        assert read.texts == []
    assert second.existing_id == first.id
    reader.dispose()
    assert (
        observer.scalar(
            "SELECT count(DISTINCT xmin::text)"
            " FROM (SELECT xmin FROM shop_order UNION ALL SELECT xmin FROM enlist_job) AS written"
        )
        == 1
    )


# -- within a flush ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_jobs", [False, True])
@pytest.mark.parametrize("with_rows", [False, True])
@pytest.mark.parametrize("hook", ["before_flush", "after_flush", "after_flush_postexec", "before_commit"])
def test_a_job_enqueued_by_a_session_listener_is_not_lost(
    engine: Engine, observer: Observer, hook: str, with_rows: bool, with_jobs: bool
) -> None:
    with Session(engine) as session:
        handles: list[JobHandle] = []

        def enqueue(*arguments: object) -> None:
            if not handles:
                handles.append(repo.enqueue(session, Note(text=hook)))

        event.listen(session, hook, enqueue)
        if with_rows:
            session.add(Order(ref="a"))
        if with_jobs:
            repo.enqueue(session, Note(text="a"))
        if hook != "before_commit" and not (with_rows or with_jobs):
            session.flush()
            assert handles == []
            return
        session.commit()
        assert state_of(handles[0]) is JobState.COMMITTED
        assert session.info == {}
    assert texts(observer) == (["a", hook] if with_jobs and hook != "before_commit" else texts(observer))
    assert hook in texts(observer)


def test_a_job_enqueued_by_a_mapper_listener_is_not_lost(engine: Engine, observer: Observer) -> None:
    def enqueue(mapper: object, connection: object, order: Order) -> None:
        session = sa.orm.object_session(order)
        assert session is not None
        repo.enqueue(session, lambda o: SendReceipt(order_id=o.id), of=order)

    event.listen(Order, "after_insert", enqueue)
    try:
        with Session(engine) as session:
            session.add(Order(ref="a"))
            session.flush()
            session.add(Order(ref="b"))
            repo.enqueue(session, SendReceipt(order_id=0))
            session.commit()
    finally:
        event.remove(Order, "after_insert", enqueue)
    assert (
        observer.scalar("SELECT count(*) FROM enlist_job JOIN shop_order o ON o.id = (payload->>'order_id')::int") == 2
    )
    assert observer.scalar("SELECT count(*) FROM enlist_job") == 3


def test_a_job_enqueued_by_a_late_payload_is_not_lost(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session:

        def make() -> Note:
            with session.begin_nested():
                session.execute(sa.text("SELECT 1"))
            repo.enqueue(session, lambda: Note(text="inner"))
            return Note(text="outer")

        repo.enqueue(session, make)
        repo.enqueue(session, Note(text="last"))
        session.flush()
        assert not session.new
        session.commit()
    assert sorted(texts(observer)) == ["inner", "last", "outer"]


def test_late_payloads_that_enqueue_for_ever_are_stopped(engine: Engine) -> None:
    with Session(engine) as session:

        def make() -> Note:
            repo.enqueue(session, make)
            return Note()

        repo.enqueue(session, make)
        with pytest.raises(SessionError, match="ever more"):
            session.commit()


def test_a_listener_that_fails_before_the_flush_loses_no_job(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session:
        failures = [RuntimeError("not now")]

        def fail(*arguments: object) -> None:
            if failures:
                raise failures.pop()

        event.listen(session, "before_flush", fail)
        repo.enqueue(session, Note(text="a"))
        with pytest.raises(RuntimeError):
            session.flush()
        repo.enqueue(session, Note(text="b"))
        session.commit()
    assert texts(observer) == ["a", "b"]


@pytest.mark.filterwarnings("ignore:.*`objects` parameter:DeprecationWarning")
def test_a_partial_flush_leaves_jobs_staged(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session:
        first, second = Order(ref="a"), Order(ref="b")
        session.add_all([first, second])
        handle = repo.enqueue(session, lambda: SendReceipt(order_id=second.id))
        session.flush([first])
        assert state_of(handle) is JobState.STAGED
        session.commit()
        assert state_of(handle) is JobState.COMMITTED


def test_handles_are_readable_after_close_without_sql(engine: Engine, statements: StatementRecorder) -> None:
    with Session(engine) as session:
        handle = repo.enqueue(session, Note())
        session.commit()
    statements.clear()
    assert (handle.state, handle.inserted, handle.existing_id) == (JobState.COMMITTED, True, None)
    assert str(handle.id) in repr(handle)
    assert statements.events == []


RAISING_LISTENER = """
import sys
from sqlalchemy import create_engine, event
from sqlalchemy.orm import Session

def fail(session):
    raise RuntimeError("a listener")

event.listen(Session, "after_commit", fail)  # before enlist is there
from enlist import JobRepository

session = Session(create_engine(sys.argv[1]))
handle = JobRepository().enqueue(session, "note", {"text": "a"})
try:
    session.commit()
except RuntimeError:
    session.close()
    print(handle.state)
"""


@pytest.mark.slow
def test_a_listener_that_fails_after_the_commit_does_not_hide_it(database_url: URL, observer: Observer) -> None:
    url = database_url.render_as_string(hide_password=False)
    done = subprocess.run([sys.executable, "-c", RAISING_LISTENER, url], capture_output=True, text=True, check=True)
    assert done.stdout == "committed\n"
    assert texts(observer) == ["a"]


@pytest.mark.parametrize("hook", ["before_attach", "after_attach", "transient_to_pending"])
def test_a_listener_may_enqueue_for_whatever_is_added(engine: Engine, observer: Observer, hook: str) -> None:
    with Session(engine) as session:
        handles: list[JobHandle] = []

        def enqueue(*arguments: object) -> None:
            if len(handles) < 3:
                handles.append(repo.enqueue(session, Note(text=hook)))

        event.listen(session, hook, enqueue)
        repo.enqueue(session, Note(text="a"))
        session.commit()
        assert {handle.state for handle in handles} == {JobState.COMMITTED}
    assert sorted(texts(observer)) == sorted(["a", *[hook] * len(handles)])


def test_a_late_payload_that_closes_its_session_fails_the_flush(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session:
        session.add(Order(ref="a"))

        def make() -> Note:
            session.close()
            return Note()

        handle = repo.enqueue(session, make)
        with pytest.raises((sa.exc.SQLAlchemyError, SessionError, PayloadError)):
            session.commit()
        session.commit()
        assert state_of(handle) is JobState.DISCARDED
    assert texts(observer) == []


def test_a_trigger_that_keeps_jobs_out_is_named(engine: Engine, observer: Observer) -> None:
    observer.execute("CREATE FUNCTION keep_out() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'")
    observer.execute("CREATE TRIGGER t BEFORE INSERT ON enlist_job FOR EACH ROW EXECUTE FUNCTION keep_out()")
    with Session(engine) as session:
        repo.enqueue(session, Note())
        with pytest.raises(SchemaError, match="a trigger or a rule"):
            session.commit()


@pytest.mark.parametrize("items", [Note(), "text", {"a": 1}, None, 7])
def test_many_items_are_an_iterable_of_payloads(engine: Engine, items: Any) -> None:
    with Session(engine) as session, pytest.raises(InvalidOption, match="iterable of payloads"):
        repo.enqueue_many(session, items)


def test_an_engine_that_streams_results(engine: Engine, observer: Observer) -> None:
    with Session(engine.execution_options(stream_results=True, yield_per=10)) as session:
        repo.enqueue(session, Note(text="a"), unique_key="a")
        duplicate = repo.enqueue(session, Note(text="b"), unique_key="a")
        session.commit()
        assert state_of(duplicate) is JobState.DUPLICATE
    assert texts(observer) == ["a"]
