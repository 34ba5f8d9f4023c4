"""Many jobs at a time: what goes by COPY is what an INSERT would have made, with every driver."""

from __future__ import annotations

import asyncio
import datetime as dt
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import pytest
import sqlalchemy as sa
from sqlalchemy import URL, Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from enlist import JobHandle, JobPayload, JobRecordMixin, JobRepository, JobState, SchemaError
from tests.jobs import Note, SendReceipt, state_of
from tests.shop import Order
from tests.support import Observer, StatementRecorder
from tests.support.proxy import LossyProxy

repo = JobRepository(notify=None)
T = TypeVar("T")

AWKWARD = [
    "",
    "\\N",
    "\\",
    "\\\\.",
    "\\.",
    "a\tb",
    "a\nb\r\nc",
    'says "hello"',
    "it's",
    "\\t\\n",
    "caf\N{LATIN SMALL LETTER E WITH ACUTE} \N{PILE OF POO}",
    "\u2028\x01\x7f",
    "%s %(a)s :b {}",
]


class Plain(JobPayload, kind="pl\\ain\t\n\r", queue="qu\teue\\N", max_attempts=3, priority=-5):
    text: str


class Driver:
    """Runs a function with a Session, of one of the three drivers."""

    def __init__(self, url: URL, name: str) -> None:
        self.name = name
        self._engine = self._async_engine = None
        if name == "psycopg":
            self._engine = create_engine(url)
        else:
            driver = "asyncpg" if name == "asyncpg" else "psycopg"
            self._async_engine = create_async_engine(url.set(drivername=f"postgresql+{driver}"))

    @property
    def engine(self) -> Engine:
        if self._engine is not None:
            return self._engine
        assert self._async_engine is not None
        return self._async_engine.sync_engine

    async def run(self, function: Callable[[Session], T], **options: Any) -> T:
        if self._engine is not None:
            with Session(self._engine, **options) as session:
                return function(session)
        async with AsyncSession(self._async_engine, **options) as session:
            return await session.run_sync(function)

    async def close(self) -> None:
        if self._engine is not None:
            self._engine.dispose()
        if self._async_engine is not None:
            await self._async_engine.dispose()


@asynccontextmanager
async def _driver(url: URL, name: str) -> AsyncIterator[Driver]:
    driver = Driver(url, name)
    try:
        yield driver
    finally:
        await driver.close()


@pytest.fixture(params=["psycopg", "psycopg async", "asyncpg"])
async def driver(request: pytest.FixtureRequest, database_url: URL) -> AsyncIterator[Driver]:
    async with _driver(database_url, request.param) as driver:
        yield driver


def committed(number: int, make: Callable[[int], Any] = lambda number: SendReceipt(order_id=number)) -> Any:
    def enqueue(session: Session) -> list[JobHandle]:
        handles = repo.enqueue_many(session, [make(index) for index in range(number)])
        session.commit()
        return handles

    return enqueue


@pytest.mark.parametrize("number", [1001, 5000])
async def test_a_copied_row_is_the_row_of_an_insert(driver: Driver, number: int, observer: Observer) -> None:
    with StatementRecorder(driver.engine) as statements:
        handles = await driver.run(committed(number, lambda index: Plain(text=AWKWARD[index % len(AWKWARD)])))
        assert len(statements.matching("COPY")) == 1
        assert not statements.matching("INSERT")
        statements.clear()
        await driver.run(committed(len(AWKWARD), lambda index: Plain(text=AWKWARD[index])))
        assert not statements.matching("COPY")
    assert {handle.state for handle in handles} == {JobState.COMMITTED}
    found = observer.rows(
        "SELECT id, to_jsonb(job) - '{id,payload,run_at,created_at}'::text[], payload, run_at = created_at"
        " FROM enlist_job AS job ORDER BY id"
    )
    copied, inserted = found[:number], found[number:]
    assert [row[0] for row in copied] == [handle.id for handle in handles]
    assert [row[2] for row in copied] == [{"text": AWKWARD[index % len(AWKWARD)]} for index in range(number)]
    (others,) = {str(row[1]) for row in found}
    assert "'kind': 'pl\\\\ain\\t\\n\\r'" in others
    assert [row[2] for row in inserted] == [{"text": text} for text in AWKWARD]
    assert all(row[3] for row in found)


async def test_options_that_copy_can_write(driver: Driver, observer: Observer) -> None:
    def item(index: int) -> Any:
        text = AWKWARD[index % len(AWKWARD)]
        options = {"queue": f"q{text}"[:50], "priority": index % 7, "max_attempts": 1 + index % 5, "meta": {"m": text}}
        if index % 2 and text:
            options |= {"concurrency_key": text, "concurrency_limit": 1 + index % 3}
        return Note(text=text), options

    with StatementRecorder(driver.engine) as statements:
        handles = await driver.run(committed(1300, item))
        assert not statements.matching("INSERT")
    found = observer.rows(
        "SELECT id, queue, priority, max_attempts, meta, concurrency_key, concurrency_limit FROM enlist_job ORDER BY id"
    )
    for index, row in enumerate(found):
        options = item(index)[1]
        names = ("queue", "priority", "max_attempts", "meta", "concurrency_key", "concurrency_limit")
        assert row == (handles[index].id, *map(options.get, names))


async def test_late_payloads_are_copied_when_the_domain_rows_have_their_keys(
    driver: Driver, observer: Observer
) -> None:
    def enqueue(session: Session) -> list[JobHandle]:
        orders = [Order(ref=str(number)) for number in range(1200)]
        session.add_all(orders)
        handles = [repo.enqueue(session, lambda order: SendReceipt(order_id=order.id), of=order) for order in orders]
        session.commit()
        return handles

    handles = await driver.run(enqueue)
    found = observer.rows(
        "SELECT j.id, o.ref::int FROM enlist_job AS j JOIN shop_order AS o ON o.id = (payload->>'order_id')::int"
        " ORDER BY j.id"
    )
    assert found == [(handle.id, number) for number, handle in enumerate(handles)]


async def test_keyed_delayed_and_plain_jobs_are_mixed_and_duplicates_told(driver: Driver, observer: Observer) -> None:
    later = dt.datetime(2040, 1, 2, 3, 4, 5, 678901, tzinfo=dt.timezone(dt.timedelta(hours=5, minutes=30)))

    def item(index: int) -> Any:
        match index % 5:
            case 0:
                return SendReceipt(order_id=index), {"unique_key": f"key {index % 1500}"}
            case 1:
                return SendReceipt(order_id=index), {"delay": 3600}
            case 2:
                return SendReceipt(order_id=index), {"run_at": later}
        return SendReceipt(order_id=index)

    before = await driver.run(committed(20, item))
    handles = await driver.run(committed(5000, item))
    for index, handle in enumerate(handles):
        if index % 5:
            assert handle.inserted
        elif index < 1500:
            assert handle.state is (JobState.DUPLICATE if index < 20 else JobState.COMMITTED)
            assert handle.existing_id == (before[index].id if index < 20 else None)
        else:
            assert handle.state is JobState.DUPLICATE
            first = before if index % 1500 < 20 else handles
            assert handle.existing_id == first[index % 1500].id
    made = dict(
        observer.rows("SELECT (payload->>'order_id')::int AS n, id FROM enlist_job WHERE id > %s", before[-1].id)
    )
    assert made == {index: handle.id for index, handle in enumerate(handles) if handle.inserted}
    due = "SELECT bool_and({}) FROM enlist_job WHERE (payload->>'order_id')::int %% 5 = %s"
    hour = "run_at BETWEEN created_at + '3599 s' AND created_at + '3601 s'"
    assert observer.connection.execute(due.format(hour), [1]).fetchone() == (True,)
    assert observer.scalar(due.replace("{}", "run_at = %s"), later, 2)
    assert observer.connection.execute(due.format("run_at = created_at"), [3]).fetchone() == (True,)


async def test_a_rollback_takes_copied_jobs_along(driver: Driver, observer: Observer) -> None:
    def enqueue(session: Session) -> list[JobHandle]:
        kept = repo.enqueue_many(session, [Note(text="kept")] * 1100)
        with session.begin_nested() as savepoint:
            undone = repo.enqueue_many(session, [Note(text="undone")] * 1200)
            session.flush()
            assert undone[0].state is JobState.INSERTED
            savepoint.rollback()
        assert {handle.state for handle in undone} == {JobState.DISCARDED}
        session.commit()
        lost = repo.enqueue_many(session, [Note(text="lost")] * 1300)
        session.flush()
        session.rollback()
        assert {handle.state for handle in lost} == {JobState.DISCARDED}
        return kept

    kept = await driver.run(enqueue)
    assert {handle.state for handle in kept} == {JobState.COMMITTED}
    assert observer.rows("SELECT payload->>'text', count(*) FROM enlist_job GROUP BY 1") == [("kept", 1100)]


async def test_a_copy_that_fails_leaves_the_session_as_any_failed_flush(driver: Driver, observer: Observer) -> None:
    observer.execute("ALTER TABLE enlist_job ADD CHECK (payload->>'order_id' <> '1234')")

    def enqueue(session: Session) -> None:
        session.add(Order(ref="a"))
        handles = repo.enqueue_many(session, [SendReceipt(order_id=number) for number in range(2000)])
        with pytest.raises(sa.exc.IntegrityError) as caught:
            session.flush()
        assert not caught.value.connection_invalidated
        assert getattr(caught.value.orig, "sqlstate", None) == "23514"
        assert "COPY" in str(caught.value.statement)
        with pytest.raises(sa.exc.PendingRollbackError):
            session.commit()
        session.rollback()
        assert {handle.state for handle in handles} == {JobState.DISCARDED}
        session.add(Order(ref="b"))
        repo.enqueue_many(session, [SendReceipt(order_id=0)] * 1001)
        session.commit()

    await driver.run(enqueue)
    assert observer.rows("SELECT ref FROM shop_order") == [("b",)]
    assert observer.scalar("SELECT count(*) FROM enlist_job") == 1001


async def test_a_trigger_that_keeps_jobs_out_of_a_copy_is_named(driver: Driver, observer: Observer) -> None:
    observer.execute(
        "CREATE FUNCTION keep_out() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RETURN CASE WHEN NEW.payload->>'order_id' = '7' THEN NULL ELSE NEW END; END $$"
    )
    observer.execute("CREATE TRIGGER t BEFORE INSERT ON enlist_job FOR EACH ROW EXECUTE FUNCTION keep_out()")
    with pytest.raises(SchemaError, match="a trigger or a rule"):
        await driver.run(committed(1500))
    assert not observer.scalar("SELECT count(*) FROM enlist_job")


async def test_without_the_table_or_a_column_the_error_is_that_of_an_insert(driver: Driver, observer: Observer) -> None:
    observer.execute("ALTER TABLE enlist_job RENAME COLUMN meta TO other")
    with pytest.raises(SchemaError, match=r'column "meta".*enlist migrate'):
        await driver.run(committed(1500))
    observer.execute("ALTER TABLE enlist_job RENAME TO gone")
    with pytest.raises(SchemaError, match=r'relation "enlist_job" does not exist.*enlist migrate'):
        await driver.run(committed(1500))


async def test_where_copy_would_not_do_the_same_jobs_are_inserted(driver: Driver, observer: Observer) -> None:
    """COPY refuses row-level security, and passes rules by."""
    observer.execute("CREATE TABLE seen (id uuid)")
    observer.execute("CREATE RULE r AS ON INSERT TO enlist_job DO ALSO INSERT INTO seen VALUES (NEW.id)")
    with StatementRecorder(driver.engine) as statements:
        with pytest.raises(sa.exc.DBAPIError, match="ON CONFLICT"):  # PostgreSQL's own word on such a table
            await driver.run(committed(1500))
        assert not statements.matching("COPY")
    observer.execute("DROP RULE r ON enlist_job")
    observer.execute("CREATE ROLE tenant")
    try:
        observer.execute("GRANT ALL ON enlist_job TO tenant")
        observer.execute("ALTER TABLE enlist_job ENABLE ROW LEVEL SECURITY")
        observer.execute("CREATE POLICY p ON enlist_job TO tenant USING (true) WITH CHECK (queue = 'mail')")

        def enqueue(session: Session) -> None:
            session.execute(sa.text("SET LOCAL ROLE tenant"))
            repo.enqueue_many(session, [SendReceipt(order_id=number) for number in range(1500)])
            session.commit()

        await driver.run(enqueue)
        assert observer.scalar("SELECT count(*) FROM enlist_job") == 1500
    finally:
        observer.execute("DROP OWNED BY tenant")
        observer.execute("DROP ROLE tenant")


class Base(DeclarativeBase):
    pass


ODD_SCHEMA = 'Odd "schema"'


class OddJob(JobRecordMixin, Base):
    __tablename__ = 'My "jobs"'
    __table_args__ = {"schema": ODD_SCHEMA}

    tenant: Mapped[str] = mapped_column(server_default="none")


class TenantJob(JobRecordMixin, Base):
    __tablename__ = "tenant_job"

    tenant: Mapped[str] = mapped_column(default="by Python")


async def test_a_table_with_an_odd_name_in_an_odd_schema(driver: Driver, engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(sa.schema.CreateSchema(ODD_SCHEMA))
        Base.metadata.create_all(connection)
    odd = JobRepository(OddJob, notify=None)

    def enqueue(session: Session) -> list[JobHandle]:
        handles = odd.enqueue_many(session, [Note(text="a")] * 1500)
        session.commit()
        return handles

    with StatementRecorder(driver.engine) as statements:
        await driver.run(enqueue)
        assert len(statements.matching("COPY")) == 1
    with Session(engine) as session:
        assert session.scalars(sa.select(OddJob.tenant).distinct()).all() == ["none"]
        assert session.scalar(sa.select(sa.func.count()).select_from(OddJob)) == 1500


async def test_a_schema_translate_map_is_followed(driver: Driver, engine: Engine, observer: Observer) -> None:
    observer.execute("CREATE SCHEMA tenant")
    with engine.connect() as connection:
        mapped = connection.execution_options(schema_translate_map={None: "tenant"})
        JobRepository(notify=None).record.metadata.create_all(mapped)
        connection.commit()

    def enqueue(session: Session) -> None:
        session.connection(execution_options={"schema_translate_map": {None: "tenant"}})
        repo.enqueue_many(session, [Note(text="a")] * 1500)
        session.commit()

    await driver.run(enqueue)
    assert observer.row("SELECT (SELECT count(*) FROM tenant.enlist_job), (SELECT count(*) FROM enlist_job)") == (
        1500,
        0,
    )


@pytest.mark.slow
@pytest.mark.parametrize("record", [OddJob, TenantJob])
def test_columns_of_the_applications_own_get_their_values(engine: Engine, record: type[OddJob | TenantJob]) -> None:
    with engine.begin() as connection:
        connection.execute(sa.schema.CreateSchema(ODD_SCHEMA))
        Base.metadata.create_all(connection)
    own = JobRepository(record, notify=None)
    with Session(engine) as session:
        own.enqueue_many(session, [Note()] * 1100)
        own.enqueue_many(session, [(Note(), {"values": {"tenant": "given"}})] * 1200)
        session.commit()
        found = session.execute(sa.select(record.tenant, sa.func.count()).group_by(record.tenant))
        default = "none" if record is OddJob else "by Python"
        assert {(tenant, number) for tenant, number in found} == {(default, 1100), ("given", 1200)}


@pytest.mark.slow
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
async def test_a_copy_works_at_the_levels_that_keep_a_snapshot(driver: Driver, level: Any, observer: Observer) -> None:
    def enqueue(session: Session) -> None:
        session.connection(execution_options={"isolation_level": level})
        committed(1500)(session)

    await driver.run(enqueue)
    assert observer.scalar("SELECT count(*) FROM enlist_job") == 1500


def test_a_copy_is_prepared_and_committed_in_two_phases(engine: Engine, observer: Observer) -> None:
    with Session(engine, twophase=True) as session:
        handles = repo.enqueue_many(session, [Note(text="a")] * 1500)
        session.prepare()
        assert not observer.scalar("SELECT count(*) FROM enlist_job")
        session.commit()
    assert handles[0].state is JobState.COMMITTED
    assert observer.scalar("SELECT count(*) FROM enlist_job") == 1500


@pytest.mark.slow
def test_a_copy_ends_after_a_while_for_the_sake_of_a_statement_timeout(
    engine: Engine, statements: StatementRecorder, observer: Observer
) -> None:
    with Session(engine) as session:
        committed(45_000)(session)
        assert len(statements.matching("COPY")) == 3
        committed(1010, lambda _: Note(text="\\" * 20_000))(session)
        assert len(statements.matching("COPY")) == 3 + 5  # of 250, of 80,000 characters each
    found = observer.row("SELECT count(*), count(DISTINCT (payload->>'order_id')::int) FROM enlist_job")
    assert found == (46_010, 45_000)


def test_options_of_the_engine_do_not_change_what_a_copy_is(engine: Engine, observer: Observer) -> None:
    with Session(engine.execution_options(stream_results=True, yield_per=10, no_parameters=True)) as session:
        committed(1500)(session)
    assert observer.scalar("SELECT count(*) FROM enlist_job") == 1500


def test_a_copy_is_logged_like_any_statement(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    engine.echo = True
    with Session(engine) as session:
        committed(1001)(session)
    assert 'COPY "enlist_job"' in caplog.text


def test_large_payloads_are_copied(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session:
        committed(1100, lambda index: Note(text="\\x\t" * (200_000 if index % 400 == 0 else 1)))(session)
    lengths = observer.rows("SELECT length(payload->>'text'), count(*) FROM enlist_job GROUP BY 1 ORDER BY 1")
    assert lengths == [(3, 1097), (600_000, 3)]


# -- in the middle of a COPY ------------------------------------------------------------------------------------------

BLOCKED = "SELECT pid FROM pg_stat_activity WHERE query LIKE 'COPY %%' AND wait_event = 'advisory' AND pid <> %s"


@pytest.fixture
def gate(observer: Observer) -> Iterator[Callable[[], int]]:
    """A COPY stops at its 1,200th row; what is yielded waits for that, and returns the pid of its backend."""
    observer.execute(
        "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " IF NEW.payload->>'order_id' = '1200' THEN PERFORM pg_advisory_xact_lock(1); END IF; RETURN NEW; END $$"
    )
    observer.execute("CREATE TRIGGER t BEFORE INSERT ON enlist_job FOR EACH ROW EXECUTE FUNCTION wait()")
    observer.rows("SELECT pg_advisory_lock(1)")

    def waiting() -> int:
        mine = observer.connection.info.backend_pid
        observer.wait_until(lambda: observer.rows(BLOCKED, mine))
        (pid,) = observer.row(BLOCKED, mine)
        return int(pid)

    yield waiting
    observer.rows("SELECT pg_advisory_unlock_all()")


@contextmanager
def meanwhile(function: Callable[[], object]) -> Iterator[None]:
    thread = threading.Thread(target=function)
    thread.start()
    try:
        yield
    finally:
        thread.join()


async def test_a_backend_that_ends_in_a_copy(driver: Driver, gate: Callable[[], int], observer: Observer) -> None:
    def enqueue(session: Session) -> list[JobHandle]:
        handles = repo.enqueue_many(session, [SendReceipt(order_id=number) for number in range(3000)])
        with pytest.raises(sa.exc.DBAPIError) as caught:
            session.commit()
        assert caught.value.connection_invalidated
        session.rollback()
        repo.enqueue_many(session, [Note(text="next")] * 1500)
        session.commit()
        return handles

    def terminate() -> None:
        observer.rows("SELECT pg_terminate_backend(%s)", gate())

    with meanwhile(terminate):
        handles = await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(driver.run(enqueue))), 30)
    assert {handle.state for handle in handles} == {JobState.DISCARDED}
    assert observer.scalar("SELECT count(*) FROM enlist_job") == 1500


@pytest.mark.parametrize("name", ["psycopg", "psycopg async", "asyncpg"])
async def test_a_network_that_dies_in_a_copy(name: str, database_url: URL, observer: Observer) -> None:
    with LossyProxy(database_url) as proxy:
        async with _driver(proxy.url, name) as driver:

            def enqueue(session: Session) -> list[JobHandle]:
                handles = repo.enqueue_many(session, [SendReceipt(order_id=number) for number in range(3000)])
                with pytest.raises(sa.exc.DBAPIError) as caught:
                    session.commit()
                assert caught.value.connection_invalidated
                session.rollback()
                return handles

            proxy.lose_answer_to(b"COPY ")
            handles = await driver.run(enqueue)
            assert proxy.lost.is_set()
    assert {handle.state for handle in handles} == {JobState.DISCARDED}
    assert not observer.scalar("SELECT count(*) FROM enlist_job")


def test_an_interrupt_in_a_copy_gives_the_connection_up(
    engine: Engine, gate: Callable[[], int], observer: Observer
) -> None:
    # A shell that starts the tests in the background has them ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt() -> None:
        gate()
        os.kill(os.getpid(), signal.SIGINT)

    with Session(engine) as session:
        handles = repo.enqueue_many(session, [SendReceipt(order_id=number) for number in range(3000)])
        with meanwhile(interrupt), pytest.raises(KeyboardInterrupt):
            session.commit()
        signal.signal(signal.SIGINT, before)
        session.rollback()
        assert {handle.state for handle in handles} == {JobState.DISCARDED}
        committed(1100)(session)
    assert observer.scalar("SELECT count(*) FROM enlist_job") == 1100


async def test_a_cancellation_in_a_copy_gives_the_connection_up(
    any_async_engine: AsyncEngine, gate: Callable[[], int], observer: Observer
) -> None:
    async with AsyncSession(any_async_engine) as session:
        handles = repo.enqueue_many(session, [SendReceipt(order_id=number) for number in range(3000)])
        commit = asyncio.create_task(session.commit())
        await asyncio.to_thread(gate)
        commit.cancel()
        with pytest.raises(asyncio.CancelledError):
            await commit
        await session.rollback()
        assert {handle.state for handle in handles} == {JobState.DISCARDED}
        await session.run_sync(committed(1100))
    assert observer.scalar("SELECT count(*) FROM enlist_job") == 1100


def test_a_commit_whose_answer_is_lost_leaves_copied_jobs_unknown(database_url: URL, observer: Observer) -> None:
    with LossyProxy(database_url) as proxy:
        engine = create_engine(proxy.url)
        with Session(engine) as session:
            handles = repo.enqueue_many(session, [Note(text="a")] * 1500)
            session.flush()
            proxy.lose_answer_to(b"COMMIT")
            with pytest.raises(sa.exc.DBAPIError):
                session.commit()
        engine.dispose()
    assert {state_of(handle) for handle in handles} == {JobState.UNKNOWN}
    assert observer.scalar("SELECT count(*) FROM enlist_job") == 1500
