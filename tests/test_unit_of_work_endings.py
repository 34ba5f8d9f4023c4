"""What an application does to its session, and what its handles say of it: true whenever they are read."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, cast

import pytest
import sqlalchemy as sa
from psycopg import sql
from sqlalchemy import URL, Engine, ForeignKey, event
from sqlalchemy.exc import DBAPIError, IntegrityError, InvalidRequestError, OperationalError, PendingRollbackError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, close_all_sessions, mapped_column, scoped_session
from sqlalchemy.orm import sessionmaker as make_sessionmaker

from enlist import JobHandle, JobRecord, JobRecordMixin, JobRepository, JobState, SessionError, notifier
from enlist._driver import constraint_name, sqlstate
from enlist._statements import statements_for
from tests.jobs import Note, SendReceipt, state_of, texts
from tests.shop import Order, Receipt
from tests.support import Observer, StatementRecorder
from tests.support.proxy import LossyProxy

repo = JobRepository()
CHANNEL = statements_for(sa.inspect(JobRecord).local_table).channel


class AppBase(DeclarativeBase):
    pass


class Parent(AppBase):
    __tablename__ = "parent"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    age: Mapped[int] = mapped_column(sa.CheckConstraint("age >= 0", name="age_is_positive"), default=0)


class ParentJob(JobRecordMixin, AppBase):
    __tablename__ = "parent_job"

    parent_id: Mapped[int | None] = mapped_column(ForeignKey(Parent.id, name="job_of_parent"))


parents = JobRepository(record=ParentJob)


@pytest.fixture
def app(engine: Engine) -> Engine:
    AppBase.metadata.create_all(engine)
    return engine


def truth(observer: Observer, *handles: JobHandle) -> None:
    """Fail unless the states fit what another connection sees."""
    for handle in handles:
        there = observer.scalar("SELECT count(*) FROM enlist_job WHERE id = %s", handle.id)
        if handle.state is not JobState.UNKNOWN:
            assert (handle.state is JobState.COMMITTED) == bool(there), handle
        assert handle.inserted == {
            JobState.STAGED: None,
            JobState.UNKNOWN: None,
            JobState.DISCARDED: False,
            JobState.DUPLICATE: False,
        }.get(handle.state, True)


def woken(observer: Observer) -> set[str]:
    """The queues whose workers were notified until now."""
    notifier.close_all()  # when it returns it has sent everything
    return set(observer.notified(timeout=0.1, at_least=1000))


# -- ways to end a session --------------------------------------------------------------------------------------------


class NoError(Exception):
    """What an application raises in the middle of its unit of work."""


def leave_a_with_block(session: Session) -> None:
    with contextlib.suppress(NoError), session:
        raise NoError


def leave_a_transaction(session: Session) -> None:
    transaction = session.get_transaction()
    assert transaction is not None
    with contextlib.suppress(NoError), transaction:
        raise NoError


def close_from_afar(session: Session) -> None:
    close_all_sessions()


def roll_back_the_transaction(session: Session) -> None:
    transaction = session.get_transaction()
    assert transaction is not None
    transaction.rollback()


def let_a_statement_fail(session: Session) -> None:
    with pytest.raises(DBAPIError):
        session.execute(sa.text("CREATE TABLE shop_order (id int)"))
    session.rollback()


def let_a_bulk_insert_fail(session: Session) -> None:
    with pytest.raises(IntegrityError, match="shop_order"):
        session.bulk_save_objects([Order(id=1, ref="x"), Order(id=1, ref="y")])
    session.rollback()


def let_a_partial_flush_fail(session: Session) -> None:
    broken = Receipt(order_id=0)
    session.add(broken)
    with pytest.raises(IntegrityError, match="shop_receipt"):
        session.flush([broken])
    session.rollback()


ENDS = [
    leave_a_with_block,
    leave_a_transaction,
    close_from_afar,
    roll_back_the_transaction,
    let_a_statement_fail,
    let_a_bulk_insert_fail,
    let_a_partial_flush_fail,
    Session.rollback,
    Session.close,
    Session.reset,
    Session.invalidate,
]


@pytest.mark.filterwarnings("ignore:.*`objects` parameter:DeprecationWarning")
@pytest.mark.parametrize("nested", [False, True])
def test_a_session_that_ends_without_a_commit_leaves_no_job_and_no_wake(
    engine: Engine, observer: Observer, nested: bool
) -> None:
    observer.listen(CHANNEL)
    for end in ENDS:
        session = Session(engine)
        handles = [repo.enqueue(session, Note(text="written"))]
        session.flush()
        if nested:
            session.begin_nested()
            handles.append(repo.enqueue(session, Note(text="in a savepoint")))
            session.flush()
        handles.append(repo.enqueue(session, Note(text="staged")))
        end(session)
        assert {handle.state for handle in handles} == {JobState.DISCARDED}, end
        assert (session.info, list(session.new), session.in_transaction()) == ({}, [], False), end
        kept = repo.enqueue(session, Note(text=end.__name__), queue=end.__name__)
        session.commit()
        session.close()
        truth(observer, kept, *handles)
    names = [end.__name__ for end in ENDS]
    assert texts(observer) == names
    assert woken(observer) == set(names)


def commit_the_transaction(session: Session) -> None:
    transaction = session.get_transaction()
    assert transaction is not None
    transaction.commit()


def commit_by_a_with_block(session: Session) -> None:
    transaction = session.get_transaction()
    assert transaction is not None
    with transaction:
        pass


def prepare_and_commit(session: Session) -> None:
    session.prepare()
    session.commit()


def dispose_of_the_engine(session: Session) -> None:
    assert isinstance(session.bind, Engine)
    pool = session.bind.pool
    session.bind.dispose()
    session.commit()
    pool.dispose()  # that the session's connection has gone back to


def fail_in_a_savepoint(session: Session) -> None:
    for statement in ["CREATE TABLE shop_order (id int)", "SELECT 1/0", "SELECT nothing", "NOTIFY"]:
        with pytest.raises(DBAPIError), session.begin_nested():
            session.execute(sa.text(statement))
    session.commit()


def fail_in_a_savepoint_of_the_application(session: Session) -> None:
    with contextlib.suppress(NoError), session.begin_nested():
        repo.enqueue(session, Note(text="undone"))
        session.add(Order(ref="undone"))
        raise NoError
    session.commit()


def save_in_bulk(session: Session) -> None:
    session.bulk_save_objects([Order(ref="a"), Order(ref="b")])
    session.bulk_insert_mappings(sa.inspect(Order), [{"ref": "c"}])
    session.commit()


def flush_parts(session: Session) -> None:
    order = Order(ref="a")
    session.add(order)
    session.flush([order])
    session.flush([])
    session.expunge_all()
    session.commit()


def flush_again_and_again(session: Session) -> None:
    for number in range(3):
        session.flush()
        session.add(Order(ref=str(number)))
    session.commit()


def create_a_table(session: Session) -> None:
    session.execute(sa.text("CREATE TABLE IF NOT EXISTS another (id int)"))
    session.execute(sa.text("LOCK TABLE enlist_job IN SHARE ROW EXCLUSIVE MODE"))
    session.commit()


def empty_and_expire(session: Session) -> None:
    session.expire_all()
    session.expunge_all()
    session.commit()


COMMITS = [
    commit_the_transaction,
    commit_by_a_with_block,
    dispose_of_the_engine,
    fail_in_a_savepoint,
    fail_in_a_savepoint_of_the_application,
    save_in_bulk,
    flush_parts,
    flush_again_and_again,
    create_a_table,
    empty_and_expire,
]


@pytest.mark.filterwarnings("ignore:.*`objects` parameter:DeprecationWarning")
@pytest.mark.parametrize("phases", [1, 2])
def test_a_session_that_commits_in_any_way_loses_no_job(database_url: URL, observer: Observer, phases: int) -> None:
    observer.listen(CHANNEL)
    engine = sa.create_engine(database_url)
    ends = COMMITS if phases == 1 else [*COMMITS, prepare_and_commit]
    for end in ends:
        with Session(engine, twophase=phases == 2) as session:
            handles = [repo.enqueue(session, Note(text="written"), queue=end.__name__)]
            session.flush()
            handles.append(repo.enqueue(session, lambda: Note(text="staged"), queue=end.__name__))
            end(session)
            assert {handle.state for handle in handles} == {JobState.COMMITTED}, end
        truth(observer, *handles)
        observer.execute("DELETE FROM shop_order")
    assert texts(observer) == ["written", "staged"] * len(ends)
    names = [end.__name__ for end in ends]
    assert woken(observer) == set(names)
    engine.dispose()


def test_jobs_leave_with_the_scope_of_a_scoped_session(engine: Engine, observer: Observer) -> None:
    scoped = scoped_session(make_sessionmaker(engine))
    handle = repo.enqueue(scoped, Note(text="a"))
    scoped.flush()
    scoped.remove()
    assert state_of(handle) is JobState.DISCARDED
    kept = repo.enqueue(scoped, Note(text="b"))
    scoped.commit()
    scoped.remove()
    truth(observer, handle, kept)


def test_nothing_is_accepted_after_the_commit_inside_of_a_with_block(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session:
        with session.begin():
            first = repo.enqueue(session, Note(text="first"))
            session.commit()
            with pytest.raises(InvalidRequestError, match="closed transaction inside context manager"):
                repo.enqueue(session, Note(text="refused"))
        with session.begin():
            second = repo.enqueue(session, Note(text="second"))
            session.rollback()
            with pytest.raises(InvalidRequestError, match="closed transaction inside context manager"):
                repo.enqueue(session, Note(text="refused"))
    truth(observer, first, second)
    assert texts(observer) == ["first"]


def test_a_session_that_is_closed_for_good_accepts_nothing(engine: Engine) -> None:
    session = Session(engine, close_resets_only=False)
    session.close()
    with pytest.raises(InvalidRequestError, match="permanently closed"):
        repo.enqueue(session, Note())
    assert not session.info


def test_ddl_and_jobs_are_undone_together(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session:
        session.execute(sa.text("CREATE TABLE another (id int)"))
        handle = repo.enqueue(session, Note(text="a"))
        session.execute(sa.text("ALTER TABLE enlist_job ADD COLUMN extra int"))
        session.rollback()
    truth(observer, handle)
    assert observer.scalar("SELECT to_regclass('another')") is None


@pytest.mark.parametrize("verb", ["commit", "rollback"])
@pytest.mark.filterwarnings("ignore:transaction already deassociated")
async def test_a_commit_of_a_transaction_that_is_over_is_refused(
    any_async_engine: AsyncEngine, observer: Observer, verb: str
) -> None:
    """Ended on the connection: by its method, or by SQL."""
    handles = []
    for end_on_the_connection in (True, False):
        async with AsyncSession(any_async_engine) as session:
            handle = repo.enqueue(session, Note(text="a"))
            await session.flush()
            if end_on_the_connection:
                await getattr(await session.connection(), verb)()
            else:
                await session.execute(sa.text(verb.upper()))
            with pytest.raises(SessionError, match="behind its back"):
                await session.commit()
            await session.rollback()
            handles.append(handle)
            assert (handle.state, handle.inserted) == (JobState.UNKNOWN, None)
    assert texts(observer) == (["a"] * 2 if verb == "commit" else [])


@pytest.mark.parametrize("verb", ["commit", "rollback"])
def test_two_sessions_of_one_connection_share_its_transaction(engine: Engine, observer: Observer, verb: str) -> None:
    """The one that began it decides; the other learns that it is over, and never takes a lost job for committed."""
    with engine.connect() as connection, Session(connection) as first, Session(connection) as second:
        a = repo.enqueue(first, Note(text="a"))
        first.flush()
        b = repo.enqueue(second, Note(text="b"))
        second.flush()
        getattr(first, verb)()
        truth(observer, a)
        with pytest.raises(SessionError, match="behind its back"):
            second.commit()
        assert state_of(b) is JobState.UNKNOWN
        with pytest.warns(sa.exc.SAWarning, match="already deassociated"):
            second.rollback()
        c = repo.enqueue(second, Note(text="c"))
        second.commit()
    truth(observer, a, c)
    assert texts(observer) == (["a", "b", "c"] if verb == "commit" else ["c"])


def test_two_sessions_with_savepoints_on_one_connection_each_decide(engine: Engine, observer: Observer) -> None:
    with engine.connect() as connection, connection.begin():
        with Session(connection, join_transaction_mode="create_savepoint") as first:
            kept = repo.enqueue(first, Note(text="kept"))
            first.commit()
        with Session(connection, join_transaction_mode="create_savepoint") as second:
            undone = repo.enqueue(second, Note(text="undone"))
            second.flush()
            second.rollback()
            with Session(connection, join_transaction_mode="create_savepoint") as third:
                late = repo.enqueue(third, Note(text="late"))
                third.commit()
    truth(observer, kept, undone, late)
    assert texts(observer) == ["kept", "late"]


def test_the_next_user_of_a_closed_sessions_connection_finds_no_transaction(database_url: URL) -> None:
    engine = sa.create_engine(database_url, pool_size=1, max_overflow=0)
    for end in (Session.close, Session.reset, Session.rollback):
        session = Session(engine)
        repo.enqueue(session, Note(), unique_key="k")
        session.flush()
        end(session)
        with engine.connect() as connection:
            driver: Any = connection.connection.driver_connection
            assert driver.info.transaction_status == 0
            assert connection.scalar(sa.text("SELECT count(*) FROM enlist_job")) == 0
        session.close()
    engine.dispose()


# -- savepoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", ["commit", "rollback"])
async def test_jobs_of_nested_savepoints_are_there_as_their_savepoints_are(
    any_async_engine: AsyncEngine, observer: Observer, outcome: str
) -> None:
    """Any of four levels rolled back, by a method, by an exception or by a failed flush."""
    observer.listen(CHANNEL)
    handles = {}
    async with AsyncSession(any_async_engine) as session:

        async def nest(broken: int, how: str, level: int) -> None:
            handles[broken, how, level] = repo.enqueue(session, Note(text=f"{broken} {how} {level}"))
            if level == 4:
                return
            with contextlib.suppress(NoError, IntegrityError):
                async with session.begin_nested() as savepoint:
                    await nest(broken, how, level + 1)
                    if level + 1 == broken and how == "rollback":
                        await savepoint.rollback()
                    elif level + 1 == broken and how == "exception":
                        raise NoError
                    elif level + 1 == broken:
                        session.add(Order(ref="taken"))
                        await session.flush()

        session.add(Order(ref="taken"))
        for broken in range(5):
            for how in ("rollback", "exception", "flush"):
                await nest(broken, how, 0)
        for (broken, _, level), handle in handles.items():
            lost = 0 < broken <= level
            assert handle.state is (JobState.DISCARDED if lost else JobState.INSERTED)
        assert observer.notified(timeout=0.2) == []
        await getattr(session, outcome)()
    truth(observer, *handles.values())
    count = observer.scalar("SELECT count(*) FROM enlist_job")
    assert count == (3 * (5 + 1 + 2 + 3 + 4) if outcome == "commit" else 0)
    assert woken(observer) == ({"default"} if count else set())


@pytest.mark.parametrize("verb", ["commit", "rollback"])
def test_a_connection_that_is_lost_at_the_end_of_a_savepoint_discards(
    engine: Engine, observer: Observer, verb: str
) -> None:
    with Session(engine) as session:
        outer = repo.enqueue(session, Note(text="outer"))
        savepoint = session.begin_nested()
        inner = repo.enqueue(session, Note(text="inner"))
        session.flush()
        terminate(observer, session.scalar(sa.text("SELECT pg_backend_pid()")))
        with pytest.raises(DBAPIError):
            getattr(savepoint, verb)()
        session.rollback()
        assert {outer.state, inner.state} == {JobState.DISCARDED}
        kept = repo.enqueue(session, Note(text="kept"))
        session.commit()
    truth(observer, outer, inner, kept)


# -- ids that do not exist yet ----------------------------------------------------------------------------------------

FLUSHERS: dict[str, Callable[[Session], object]] = {
    "commit": lambda session: None,
    "flush": lambda session: session.flush(),
    "an ORM query": lambda session: session.scalars(sa.select(Order)).all(),
    "a Core insert": lambda session: session.execute(
        sa.insert(cast("sa.Table", Order.__table__)).values(ref="core", total=0)
    ),
    "an ORM insert": lambda session: session.execute(sa.insert(Order).values(ref="orm", total=0)),
    "a savepoint": lambda session: session.begin_nested().commit(),
    "an expired attribute": lambda session: session.get(Parent, 1),
}


def _with_id(parent: Parent) -> dict[str, Any]:
    return {"id": parent.id}


@pytest.mark.parametrize("autoflush", ["on", "off", "no_autoflush"])
def test_a_parents_row_precedes_its_job_whatever_flushes_them(app: Engine, observer: Observer, autoflush: str) -> None:
    for flusher, flush in FLUSHERS.items():
        with Session(app, autoflush=autoflush != "off") as session:
            parent = Parent(name=flusher)
            session.add(parent)
            own = {"parent_id": functools.partial(getattr, parent, "id")}
            with session.no_autoflush if autoflush == "no_autoflush" else contextlib.nullcontext():
                parents.enqueue(session, "plain", {"id": parent.id}, values=own)
                parents.enqueue(session, "late", functools.partial(_with_id, parent), values=own)
                parents.enqueue(session, "of", _with_id, of=parent, values=own)
                flush(session)
            session.commit()
            id_ = parent.id
        # A plain value is taken at the call, when there was no id: stored as it was then.
        rows = "SELECT kind, payload->'id' FROM parent_job WHERE parent_id = %s ORDER BY id"
        assert observer.rows(rows, id_) == [("plain", None), ("late", id_), ("of", id_)], flusher


# -- errors of the application come out as they are -------------------------------------------------------------------


def duplicate_parent(session: Session) -> None:
    session.add(Parent(name="taken"))


def negative_age(session: Session) -> None:
    session.add(Parent(name="new", age=-1))


def no_name(session: Session) -> None:
    session.add(Parent(age=1))


def orphan(session: Session) -> None:
    session.add(Receipt(order_id=0))


def in_bulk(session: Session) -> None:
    session.flush()
    session.bulk_save_objects([Parent(name="taken")])


def by_core(session: Session) -> None:
    session.execute(sa.insert(cast("sa.Table", Parent.__table__)).values(name="taken", age=0))


def by_a_trigger(session: Session) -> None:
    session.add(Parent(name="refused by a trigger"))


FAILURES = [duplicate_parent, negative_age, no_name, orphan, in_bulk, by_core, by_a_trigger]

TRIGGER = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF to_jsonb(NEW)->>'name' = 'refused by a trigger' OR to_jsonb(NEW)->>'kind' = 'refused' THEN
        RAISE EXCEPTION 'not today' USING ERRCODE = '23T42', CONSTRAINT = 'my rule';
    END IF;
    RETURN NEW;
END $$
"""


def described(error: DBAPIError) -> tuple[object, ...]:
    return (type(error), type(error.orig), sqlstate(error), constraint_name(error), error.statement)


async def caught(
    engine: AsyncEngine, fail: Callable[[Session], None], before: Callable[[Session], object]
) -> DBAPIError:
    def work(session: Session) -> None:
        fail(session)
        session.commit()

    async with AsyncSession(engine) as session:
        before(session.sync_session)
        with pytest.raises(DBAPIError) as caught:
            await session.run_sync(work)
        await session.rollback()
    return caught.value


@pytest.fixture
async def failing_engine(any_async_engine: AsyncEngine, observer: Observer) -> AsyncEngine:
    async with any_async_engine.begin() as connection:
        await connection.run_sync(AppBase.metadata.create_all)
        await connection.execute(sa.insert(Parent).values(name="taken", age=0))
    observer.execute(TRIGGER)
    observer.execute("CREATE TRIGGER refuse BEFORE INSERT ON parent FOR EACH ROW EXECUTE FUNCTION refuse()")
    observer.execute("CREATE TRIGGER refuse BEFORE INSERT ON parent_job FOR EACH ROW EXECUTE FUNCTION refuse()")
    return any_async_engine


async def test_an_error_of_the_domain_rows_is_the_same_with_jobs_as_without(
    failing_engine: AsyncEngine, observer: Observer
) -> None:
    handles: list[JobHandle] = []

    def enqueue(session: Session) -> None:
        handles.append(repo.enqueue(session, Note(text="a"), unique_key="k"))

    for fail in FAILURES:
        alone = await caught(failing_engine, fail, lambda session: None)
        together = await caught(failing_engine, fail, enqueue)
        assert described(together) == described(alone)
        assert not getattr(together, "__notes__", [])
    assert {handle.state for handle in handles} == {JobState.DISCARDED}
    truth(observer, *handles)


async def test_an_error_of_the_job_tables_foreign_key_is_an_integrity_error(failing_engine: AsyncEngine) -> None:
    def fail(session: Session) -> None:
        session.add(Parent(name="fine"))
        handles.append(parents.enqueue(session, "k", {}, values={"parent_id": 12345}))

    handles: list[JobHandle] = []
    error = await caught(failing_engine, fail, lambda session: None)
    assert type(error) is IntegrityError
    assert (sqlstate(error), constraint_name(error)) == ("23503", "job_of_parent")
    assert state_of(handles[0]) is JobState.DISCARDED


async def test_an_error_of_a_trigger_of_the_job_table_keeps_its_state(failing_engine: AsyncEngine) -> None:
    def fail(session: Session) -> None:
        handles.append(parents.enqueue(session, "refused", {}))

    handles: list[JobHandle] = []
    error = await caught(failing_engine, fail, lambda session: None)
    assert (sqlstate(error), constraint_name(error)) == ("23T42", "my rule")
    assert "not today" in str(error)
    assert state_of(handles[0]) is JobState.DISCARDED


async def test_of_two_errors_in_one_flush_that_of_the_domain_comes_first(failing_engine: AsyncEngine) -> None:
    def fail(session: Session) -> None:
        parents.enqueue(session, "refused", lambda: {"id": 1 // 0})
        session.add(Parent(name="taken"))

    error = await caught(failing_engine, fail, lambda session: None)
    assert constraint_name(error) == "parent_name_key"


# -- a commit that fails, or whose answer is lost ---------------------------------------------------------------------


def terminate(observer: Observer, pid: int | None) -> None:
    assert observer.scalar("SELECT pg_terminate_backend(%s, 5000)", pid)


@pytest.fixture(params=["psycopg", "psycopg_async", "asyncpg"])
def driver(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@contextlib.asynccontextmanager
async def engine_for(url: URL, driver: str, **options: Any) -> AsyncIterator[AsyncEngine | Engine]:
    """An engine of a driver: for psycopg a plain one."""
    if driver == "psycopg":
        plain = sa.create_engine(url, **options)
        yield plain
        plain.dispose()
    else:
        engine = create_async_engine(url.set(drivername=f"postgresql+{driver.removesuffix('_async')}"), **options)
        yield engine
        await engine.dispose()


async def in_session(engine: AsyncEngine | Engine, work: Callable[[Session], None]) -> None:
    """Call a function with a Session, where its driver can wait."""
    if isinstance(engine, AsyncEngine):
        async with AsyncSession(engine) as session:
            await session.run_sync(work)
    else:
        with Session(engine) as plain:
            work(plain)


async def test_a_commit_that_the_server_refuses_discards(database_url: URL, observer: Observer, driver: str) -> None:
    observer.execute(
        "ALTER TABLE shop_receipt ALTER CONSTRAINT shop_receipt_order_id_fkey DEFERRABLE INITIALLY DEFERRED"
    )

    def work(session: Session) -> None:
        for end in (session.rollback, session.close, session.reset):
            handles.append(repo.enqueue(session, Note(text="a")))
            session.add(Receipt(order_id=0))
            with pytest.raises(IntegrityError) as caught:
                session.commit()
            assert (sqlstate(caught.value), constraint_name(caught.value)) == ("23503", "shop_receipt_order_id_fkey")
            end()

    handles: list[JobHandle] = []
    async with engine_for(database_url, driver) as engine:
        await in_session(engine, work)
    assert {handle.state for handle in handles} == {JobState.DISCARDED}
    truth(observer, *handles)


async def test_a_commit_that_cannot_be_serialized_discards_and_can_be_replayed(
    database_url: URL, engine: Engine, observer: Observer, driver: str
) -> None:
    """Each reads what the other writes: the second COMMIT is refused."""
    observer.execute("INSERT INTO shop_counter VALUES ('x', 0), ('y', 0)")
    rival = Session(engine.execution_options(isolation_level="SERIALIZABLE"))

    def read_and_write(session: Session, read: str, write: str) -> None:
        session.execute(sa.text("SELECT value FROM shop_counter WHERE name = :name"), {"name": read}).all()
        session.execute(sa.text("UPDATE shop_counter SET value = value + 1 WHERE name = :name"), {"name": write})

    def work(session: Session) -> None:
        handles.append(repo.enqueue(session, Note(text="first"), unique_key="k"))
        read_and_write(session, "x", "y")
        session.flush()
        read_and_write(rival, "y", "x")
        rival.commit()
        with pytest.raises(DBAPIError) as caught:
            session.commit()
        assert (type(caught.value), sqlstate(caught.value)) == (
            OperationalError if "psy" in driver else DBAPIError,
            "40001",
        )
        assert caught.value.statement is None  # it was the COMMIT
        session.rollback()
        assert state_of(handles[0]) is JobState.DISCARDED
        handles.append(repo.enqueue(session, Note(text="again"), unique_key="k"))
        read_and_write(session, "x", "y")
        session.commit()

    handles: list[JobHandle] = []
    async with engine_for(database_url, driver, isolation_level="SERIALIZABLE") as used:
        await in_session(used, work)
    rival.close()
    truth(observer, *handles)
    assert texts(observer) == ["again"]


async def test_a_commit_that_never_arrives_leaves_the_outcome_unknown(
    database_url: URL, observer: Observer, driver: str
) -> None:
    def work(session: Session) -> None:
        for end in (session.rollback, session.close, session.invalidate):
            handle = repo.enqueue(session, Note(text="a"))
            session.flush()
            pid = session.scalar(sa.text("SELECT pg_backend_pid()"))
            event.listen(session.get_bind(), "commit", lambda _, pid=pid: terminate(observer, pid), once=True)
            with pytest.raises(DBAPIError):
                session.commit()
            end()
            assert (handle.state, handle.inserted) == (JobState.UNKNOWN, None)
        again = repo.enqueue(session, Note(text="again"))
        session.commit()
        truth(observer, handle, again)

    async with engine_for(database_url, driver) as engine:
        await in_session(engine, work)
    assert texts(observer) == ["again"]


@pytest.mark.parametrize("end", [Session.rollback, Session.close])
async def test_a_commit_whose_answer_is_lost_leaves_the_outcome_unknown(
    database_url: URL, observer: Observer, driver: str, end: Callable[[Session], None]
) -> None:
    def work(session: Session) -> None:
        session.add(Order(ref="a"))
        handle = repo.enqueue(session, Note(text="a"), unique_key="k")
        with contextlib.suppress(NoError), session.begin_nested():
            undone = repo.enqueue(session, Note(text="undone"))
            raise NoError
        session.flush()
        proxy.lose_answer_to(b"COMMIT")
        with pytest.raises(DBAPIError):
            session.commit()
        assert proxy.lost.is_set()
        end(session)
        assert (handle.state, handle.inserted) == (JobState.UNKNOWN, None)
        assert state_of(undone) is JobState.DISCARDED
        # What the application does then: the same again, and the key says that it was done.
        again = repo.enqueue(session, Note(text="again"), unique_key="k")
        session.commit()
        assert (again.state, again.existing_id) == (JobState.DUPLICATE, handle.id)

    with LossyProxy(database_url) as proxy:
        async with engine_for(proxy.url, driver) as engine:
            await in_session(engine, work)
    assert texts(observer) == ["a"]


async def test_an_insert_whose_answer_is_lost_is_a_rollback(database_url: URL, observer: Observer, driver: str) -> None:
    def work(session: Session) -> None:
        handle = repo.enqueue(session, Note(text="a"), unique_key="k")
        proxy.lose_answer_to(b"INSERT INTO enlist_job")
        with pytest.raises(DBAPIError):
            session.commit()
        session.rollback()
        assert state_of(handle) is JobState.DISCARDED
        again = repo.enqueue(session, Note(text="again"), unique_key="k")
        session.commit()
        truth(observer, handle, again)

    with LossyProxy(database_url) as proxy:
        async with engine_for(proxy.url, driver) as engine:
            await in_session(engine, work)
    assert texts(observer) == ["again"]


# -- two-phase commit -------------------------------------------------------------------------------------------------


def prepared(observer: Observer) -> list[str]:
    found = observer.rows("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()")
    return [gid for (gid,) in found]


def end_prepared(observer: Observer, verb: str) -> None:
    for gid in prepared(observer):
        statement = sql.SQL("COMMIT PREPARED {}") if verb == "commit" else sql.SQL("ROLLBACK PREPARED {}")
        observer.connection.execute(statement.format(sql.Literal(gid)))


@pytest.fixture
def nothing_prepared(observer: Observer) -> Iterator[None]:
    yield
    end_prepared(observer, "rollback")  # else the database could not be dropped


@pytest.mark.usefixtures("nothing_prepared")
@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("by_hand", ["commit", "rollback"])
def test_a_prepared_transaction_outlives_its_connection_and_its_key_is_waited_for(
    engine: Engine, observer: Observer, end: str, by_hand: str
) -> None:
    with Session(engine, twophase=True) as session:
        handle = repo.enqueue(session, Note(text="prepared"), unique_key="k")
        pid = session.scalar(sa.text("SELECT pg_backend_pid()"))
        session.prepare()
        assert state_of(handle) is JobState.INSERTED
        terminate(observer, pid)
        with pytest.raises(OperationalError):
            getattr(session, end)()
        session.rollback()
        assert (handle.state, handle.inserted) == (JobState.UNKNOWN, None)
    with Session(engine) as twin:
        twin.execute(sa.text("SET LOCAL lock_timeout = '20ms'"))
        waiting = repo.enqueue(twin, Note(text="twin"), unique_key="k")
        with pytest.raises(OperationalError) as caught:
            twin.commit()
        assert sqlstate(caught.value) == "55P03"
        twin.rollback()
        assert (waiting.state, waiting.existing_id) == (JobState.DISCARDED, None)
        end_prepared(observer, by_hand)
        after = repo.enqueue(twin, Note(text="twin"), unique_key="k")
        twin.commit()
    assert after.existing_id == (handle.id if by_hand == "commit" else None)
    assert texts(observer) == (["prepared"] if by_hand == "commit" else ["twin"])


@pytest.mark.usefixtures("nothing_prepared")
@pytest.mark.parametrize("outcome", ["commit", "rollback"])
def test_a_two_phase_session_of_two_engines_has_all_or_nothing(
    engine: Engine, database_url: URL, observer: Observer, outcome: str
) -> None:
    observer.listen(CHANNEL)
    other = sa.create_engine(database_url)
    with Session(binds={JobRecord: engine, Order: other}, twophase=True) as session:
        order = Order(ref="a")
        session.add(order)
        first = repo.enqueue(session, lambda: SendReceipt(order_id=order.id))
        session.prepare()
        assert len(prepared(observer)) == 2
        assert observer.notified(timeout=0.1) == []
        getattr(session, outcome)()
        truth(observer, first)
        second = repo.enqueue(session, Note(text="next"))
        session.add(Order(ref="b"))
        session.commit()
        truth(observer, first, second)
    assert prepared(observer) == []
    assert woken(observer) == ({"default", "mail"} if outcome == "commit" else {"default"})
    for pool in (engine, other):
        with pool.connect() as connection:
            assert connection.scalar(sa.text("SELECT 1")) == 1
    other.dispose()


# -- tasks that share a session ---------------------------------------------------------------------------------------


async def until_blocked(observer: Observer) -> None:
    """Wait until a connection to the database waits for a lock."""
    await asyncio.to_thread(
        observer.wait_for,
        "SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()",
    )


async def test_enqueues_gathered_on_one_session_are_all_kept(any_async_engine: AsyncEngine, observer: Observer) -> None:
    async with AsyncSession(any_async_engine) as session:

        async def enqueue(number: int) -> JobHandle:
            await asyncio.sleep(0)
            handle = repo.enqueue(session, lambda: Note(text=str(number)), unique_key=str(number // 2))
            await asyncio.sleep(0)
            return handle

        handles = await asyncio.gather(*[enqueue(number) for number in range(10)])
        await session.commit()
    assert sum(handle.inserted is True for handle in handles) == 5
    assert observer.scalar("SELECT count(*) FROM enlist_job") == 5


@pytest.mark.parametrize("phase", ["domain", "jobs"])
async def test_a_job_enqueued_while_another_task_flushes_is_not_lost(
    any_async_engine: AsyncEngine, observer: Observer, phase: str
) -> None:
    async with AsyncSession(any_async_engine) as session, AsyncSession(any_async_engine) as rival:
        if phase == "domain":
            rival.add(Order(ref="x"))
        else:
            repo.enqueue(rival, Note(text="rival"), unique_key="k")
        await rival.flush()
        first = repo.enqueue(session, Note(text="first"), unique_key="k")
        session.add(Order(ref="x"))
        flush = asyncio.create_task(session.flush())
        await until_blocked(observer)
        meanwhile = repo.enqueue(session, Note(text="meanwhile"))
        assert state_of(meanwhile) is JobState.STAGED
        await rival.rollback()
        await flush
        last = repo.enqueue(session, Note(text="last"))
        await session.commit()
        assert {first.state, meanwhile.state, last.state} == {JobState.COMMITTED}
    truth(observer, first, meanwhile, last)
    assert sorted(texts(observer)) == ["first", "last", "meanwhile"]


async def test_a_job_enqueued_while_a_flush_fails_goes_with_it(
    any_async_engine: AsyncEngine, observer: Observer
) -> None:
    async with AsyncSession(any_async_engine) as session, AsyncSession(any_async_engine) as rival:
        rival.add(Order(ref="x"))
        await rival.flush()
        session.add(Order(ref="x"))
        flush = asyncio.create_task(session.flush())
        await until_blocked(observer)
        handle = repo.enqueue(session, Note(text="a"))
        await rival.commit()
        with pytest.raises(IntegrityError):
            await flush
        assert state_of(handle) is JobState.DISCARDED
        with pytest.raises(PendingRollbackError):
            await session.commit()
        await session.rollback()
    truth(observer, handle)


async def test_a_job_enqueued_while_another_task_commits_is_refused(
    any_async_engine: AsyncEngine, observer: Observer
) -> None:
    observer.execute(
        "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS"
        " 'BEGIN PERFORM pg_advisory_xact_lock(7); RETURN NULL; END'"
    )
    observer.execute(
        "CREATE CONSTRAINT TRIGGER wait AFTER INSERT ON shop_order DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW EXECUTE FUNCTION wait()"
    )
    observer.execute("SELECT pg_advisory_lock(7)")
    async with AsyncSession(any_async_engine) as session:
        session.add(Order(ref="x"))
        first = repo.enqueue(session, Note(text="first"))
        commit = asyncio.create_task(session.commit())
        await until_blocked(observer)
        assert state_of(first) is JobState.INSERTED  # the COMMIT is under way
        with pytest.raises(SessionError, match="is being ended"):
            repo.enqueue(session, Note(text="refused"))
        observer.execute("SELECT pg_advisory_unlock(7)")
        await commit
        assert state_of(first) is JobState.COMMITTED
        second = repo.enqueue(session, Note(text="second"))
        await session.commit()
    truth(observer, first, second)
    assert texts(observer) == ["first", "second"]


# -- reads that go elsewhere ------------------------------------------------------------------------------------------


def by_statement(writer: Engine, reader: Engine) -> type[Session]:
    class Routing(Session):
        def get_bind(self, mapper: Any = None, *, clause: Any = None, **rest: Any) -> Engine:
            writes = self._flushing or isinstance(clause, (sa.Insert, sa.Update, sa.Delete))
            return writer if writes else reader

    return Routing


def by_mapper(writer: Engine, reader: Engine) -> type[Session]:
    class Routing(Session):
        def get_bind(self, mapper: Any = None, **rest: Any) -> Engine:
            written = mapper is not None and sa.inspect(mapper).class_ in {Order, JobRecord}
            return writer if written else reader

    return Routing


def by_a_switch(writer: Engine, reader: Engine) -> type[Session]:
    """Once something was written, what follows is read there too."""

    class Routing(Session):
        def get_bind(self, *arguments: Any, **rest: Any) -> Engine:
            if self._flushing:
                self.info["writes"] = True
            return writer if self.info.get("writes") else reader

    return Routing


@pytest.mark.parametrize("route", [by_statement, by_mapper, by_a_switch])
def test_every_statement_of_an_enqueue_goes_to_the_writer(
    engine: Engine, database_url: URL, observer: Observer, route: Callable[[Engine, Engine], type[Session]]
) -> None:
    reader = sa.create_engine(database_url, connect_args={"options": "-c default_transaction_read_only=on"})
    with StatementRecorder(reader) as read, route(engine, reader)() as session:
        session.add(Order(ref="a"))
        first = repo.enqueue(session, lambda: Note(text="first"), unique_key="k")
        session.flush()
        # The twin is not committed: on any other connection the look-up would wait for it, or not find it.
        second = repo.enqueue(session, Note(text="second"), unique_key="k")
        third = repo.enqueue(session, Note(text="third"), unique_key="k", on_conflict="replace")
        session.commit()
        assert read.events == []
    reader.dispose()
    assert second.existing_id == third.existing_id == first.id
    assert observer.scalar(
        "SELECT count(DISTINCT xmin::text) = 1"
        " FROM (SELECT xmin FROM shop_order UNION ALL SELECT xmin FROM enlist_job) AS written"
    )
