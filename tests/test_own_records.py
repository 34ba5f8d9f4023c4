"""Jobs as ordinary rows of the application: its own class, table and schema, further columns, foreign keys."""

from __future__ import annotations

import datetime as dt
import enum
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine, ForeignKey
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, configure_mappers, mapped_column, relationship

from enlist import (
    ConfigurationError,
    HandlerRegistry,
    InvalidOption,
    Job,
    JobRecord,
    JobRecordMixin,
    JobRepository,
    JobState,
    JobStatus,
    PayloadError,
    Retry,
    SessionError,
    Worker,
)
from enlist.migrations import verify_schema
from tests.jobs import Note, state_of
from tests.support import StatementRecorder


class Base(DeclarativeBase):
    pass


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Money(sa.types.TypeDecorator[int]):
    """A type whose parameters are wrapped in SQL."""

    impl = sa.Integer
    cache_ok = True

    def bind_expression(self, bindvalue: Any) -> Any:
        return sa.func.abs(bindvalue, type_=self)


class Customer(Base):
    __tablename__ = "customer"
    __table_args__ = {"schema": "crm"}

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    # A job is written after the domain rows: the constraint must wait for the end of the transaction.
    welcome_job_id: Mapped[uuid.UUID | None] = mapped_column(
        ForeignKey("crm.Background Job.id", deferrable=True, initially="DEFERRED", use_alter=True, name="welcome")
    )
    jobs: Mapped[list[AppJob]] = relationship(
        primaryjoin="Customer.id == AppJob.customer_id", viewonly=True, order_by="AppJob.id"
    )


class AppJob(JobRecordMixin, Base):
    __tablename__ = "Background Job"
    __table_args__ = (sa.Index("app_job_customer", "customer_id"), {"schema": "crm"})

    customer_id: Mapped[int | None] = mapped_column(ForeignKey(Customer.id))
    tags: Mapped[list[str] | None] = mapped_column(ARRAY(sa.Text))
    colour: Mapped[Colour | None]
    details: Mapped[dict[str, Any] | None] = mapped_column(JSONB)
    cents: Mapped[int | None] = mapped_column(Money)
    trace: Mapped[uuid.UUID] = mapped_column(default=uuid.uuid4)
    source: Mapped[str] = mapped_column("source_name", default="web")
    noted_at: Mapped[dt.datetime] = mapped_column(sa.DateTime(timezone=True), server_default=sa.func.now())

    customer: Mapped[Customer | None] = relationship(
        primaryjoin="Customer.id == AppJob.customer_id", viewonly=True, foreign_keys="AppJob.customer_id"
    )


class OtherJob(JobRecordMixin, Base):
    """A second queue, with a column that every job must have."""

    __tablename__ = "other_job"

    tenant: Mapped[str]


class PlainJob(JobRecordMixin, Base):
    """A third, with nothing of its own that needs care."""

    __tablename__ = "plain_job"

    remark: Mapped[str | None]


repo = JobRepository(record=AppJob)


@pytest.fixture
def tables(engine: Engine) -> Engine:
    with engine.begin() as connection:
        connection.execute(sa.schema.CreateSchema("crm"))
        Base.metadata.create_all(connection)
    return engine


def one(engine: Engine, record: type[Any] = AppJob) -> Any:
    with Session(engine) as session:
        return session.scalars(sa.select(record)).one()


def test_a_job_refers_to_a_row_of_its_own_transaction(tables: Engine) -> None:
    with Session(tables) as session:
        customer = Customer(name="Ada")
        session.add(customer)
        handle = repo.enqueue(session, Note(text="hello"), values={"customer_id": lambda: customer.id})
        session.commit()
        assert handle.inserted
        assert [job.id for job in customer.jobs] == [handle.id]
        job = repo.get(session, handle.id)
        assert job is not None
        assert job.customer is customer


def test_a_domain_row_keeps_the_id_of_its_job(tables: Engine) -> None:
    with Session(tables) as session:
        customer = Customer(name="Ada")
        session.add(customer)
        handle = repo.enqueue(session, lambda c: Note(text=str(c.id)), of=customer)
        customer.welcome_job_id = handle.id
        session.commit()
        assert customer.welcome_job_id == one(tables).id
        assert one(tables).payload == {"text": str(customer.id)}


def test_a_domain_row_cannot_keep_the_id_of_a_job_that_was_not_made(tables: Engine) -> None:
    with Session(tables) as session:
        repo.enqueue(session, Note(), unique_key="k")
        session.commit()
        second = repo.enqueue(session, Note(), unique_key="k")
        session.add(Customer(name="Ada", welcome_job_id=second.id))
        with pytest.raises(sa.exc.IntegrityError, match="welcome"):
            session.commit()
        session.rollback()
        assert second.state is JobState.DISCARDED


VALUES = {
    "tags": ["a", 'with "quotes", commas {} and \\', ""],
    "colour": Colour.BLUE,
    "details": {"a": [1, None]},
    "cents": -7,
    "source": "api",
}


@pytest.mark.parametrize("count", [1, 3])
def test_values_of_any_type_arrive(tables: Engine, count: int) -> None:
    with Session(tables) as session:
        repo.enqueue_many(session, [(Note(), {"values": VALUES})] * count)
        session.commit()
        jobs = session.scalars(sa.select(AppJob)).all()
    assert len(jobs) == count
    for job in jobs:
        assert (job.tags, job.colour, job.details) == (VALUES["tags"], VALUES["colour"], VALUES["details"])
        assert (job.cents, job.source) == (7, "api")
        assert job.noted_at.tzinfo is not None
    assert len({job.trace for job in jobs}) == count


async def test_values_of_any_type_arrive_by_each_driver(tables: Engine, any_async_engine: AsyncEngine) -> None:
    async with AsyncSession(any_async_engine) as session:
        repo.enqueue(session, Note(), values=VALUES, delay=60)
        repo.enqueue(session, Note(), values={"colour": Colour.RED}, unique_key="k")
        repo.enqueue(session, Note(), values={"colour": Colour.RED}, unique_key="k")
        await session.commit()
        jobs = (await session.scalars(sa.select(AppJob).order_by(AppJob.id))).all()
        assert [job.colour for job in jobs] == [Colour.BLUE, Colour.RED]
        assert jobs[0].tags == VALUES["tags"]
        assert jobs[0].run_at - jobs[0].created_at == dt.timedelta(seconds=60)


def test_columns_that_are_not_given_have_their_defaults(tables: Engine) -> None:
    with Session(tables) as session:
        repo.enqueue_many(session, [Note(), (Note(), {"values": {"source": "api"}}), Note()])
        session.commit()
        jobs = session.scalars(sa.select(AppJob).order_by(AppJob.id)).all()
    assert [job.source for job in jobs] == ["web", "api", "web"]
    assert len({job.trace for job in jobs}) == 3
    assert all(job.tags is None for job in jobs)


def test_jobs_of_a_kind_are_one_statement(tables: Engine, statements: StatementRecorder) -> None:
    with Session(tables) as session:
        for number in range(300):
            repo.enqueue(session, Note(text=str(number)), values={"cents": number}, unique_key=f"{number:03}")
        session.flush()
        assert len(statements.matching("INSERT INTO")) == 1
        handles = repo.enqueue_many(session, [(Note(), {"unique_key": f"{n:03}", "values": {}}) for n in range(300)])
        session.commit()
        assert {handle.state for handle in handles} == {JobState.DUPLICATE}
        found = session.execute(sa.select(AppJob.cents, AppJob.payload["text"].astext)).all()
    assert sorted((cents, text) for cents, text in found) == sorted((n, str(n)) for n in range(300))


def test_a_queued_twin_is_replaced_by_jobs_with_values(tables: Engine) -> None:
    with Session(tables) as session:
        first = repo.enqueue(session, Note(text="a"), values={"cents": 1}, unique_key="k", on_conflict="replace")
        session.flush()
        second = repo.enqueue(session, Note(text="b"), values={"cents": 2}, unique_key="k", on_conflict="replace")
        session.commit()
        assert (first.replaced, second.replaced, second.existing_id) == (False, True, first.id)
    assert (one(tables).payload, one(tables).cents) == ({"text": "b"}, 1)


@pytest.mark.slow
def test_a_table_without_defaults_in_python_takes_one_parameter(tables: Engine, statements: StatementRecorder) -> None:
    plain = JobRepository(record=PlainJob)
    with Session(tables) as session:
        plain.enqueue_many(session, [Note()] * 3)
        session.commit()
    (insert,) = statements.matching("INSERT INTO")
    assert "jsonb_to_recordset" in insert
    with Session(tables) as session:
        plain.enqueue(session, Note(), values={"remark": "x"})
        session.commit()
        assert session.scalars(sa.select(PlainJob.remark)).all() == [None, None, None, "x"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"colour_": Colour.RED}, "'colour_', which is no column of AppJob's own: those are customer_id, tags"),
        ({"source_name": "x"}, "'source_name', which is no column"),
        ({"priority": 3}, "'priority', which is no column of AppJob's own"),
        ({"id": uuid.uuid4()}, "'id', which is no column of AppJob's own"),
        ({"customer": None}, "'customer', which is no column"),
        ({1: 2}, "has 1, which is no column"),
        ([("cents", 1)], "must be a dict of AppJob's own columns"),
        ("cents", "must be a dict of AppJob's own columns"),
        ("", "must be a dict of AppJob's own columns"),
        (0, "must be a dict of AppJob's own columns"),
    ],
)
def test_wrong_values_are_refused_at_the_call(tables: Engine, values: Any, message: str) -> None:
    with Session(tables) as session:
        kept = repo.enqueue(session, Note(text="kept"))
        with pytest.raises(InvalidOption, match=message):
            repo.enqueue(session, Note(), values=values)
        session.commit()
        assert kept.state is JobState.COMMITTED


def test_a_column_that_must_be_given_is_asked_for_at_the_call(tables: Engine) -> None:
    other = JobRepository(record=OtherJob)
    with Session(tables) as session:
        with pytest.raises(InvalidOption, match=r"OtherJob.tenant can be neither NULL nor defaulted.*'tenant'"):
            other.enqueue(session, Note())
        with pytest.raises(InvalidOption, match=r"items\[1\]: OtherJob.tenant"):
            other.enqueue_many(session, [(Note(), {"values": {"tenant": "a"}}), Note()])
        assert other.enqueue(session, Note(), values={"tenant": "a"}).state is JobState.STAGED
        session.commit()
    assert one(tables, OtherJob).tenant == "a"


def test_values_are_refused_where_there_are_no_columns(tables: Engine) -> None:
    with Session(tables) as session, pytest.raises(InvalidOption, match="JobRecord's own: those are none"):
        JobRepository().enqueue(session, Note(), values={"order_id": 1})


def test_a_value_that_cannot_be_made_fails_the_flush_and_names_its_call(tables: Engine) -> None:
    with Session(tables) as session:
        handle = repo.enqueue(session, Note(), values={"cents": lambda: 1 // 0})
        with pytest.raises(
            PayloadError, match=r"value of 'cents' of the enqueue at .*test_own_records.py:\d+ could not"
        ):
            session.commit()
        session.rollback()
        assert handle.state is JobState.DISCARDED
        repo.enqueue(session, Note())
        session.commit()
    assert one(tables).source == "web"


def test_a_value_that_the_database_refuses_comes_out_unchanged(tables: Engine) -> None:
    with Session(tables) as session:
        handle = repo.enqueue(session, Note(), values={"customer_id": 12345})
        with pytest.raises(sa.exc.IntegrityError, match="customer_id"):
            session.commit()
        session.rollback()
        assert handle.state is JobState.DISCARDED


def test_two_queues_share_a_transaction_and_no_keys(tables: Engine) -> None:
    default = JobRepository()
    with Session(tables) as session:
        a = repo.enqueue(session, Note(), unique_key="k")
        b = default.enqueue(session, Note(), unique_key="k")
        c = repo.enqueue(session, Note(), unique_key="k")
        session.commit()
        assert (a.inserted, b.inserted, c.existing_id) == (True, True, a.id)
        assert session.get(AppJob, a.id) is not None
        assert session.get(JobRecord, b.id) is not None


def test_flushes_to_two_tables_in_opposite_orders_do_not_deadlock(tables: Engine) -> None:
    repositories: list[JobRepository[Any]] = [repo, JobRepository()]

    def write(order: int) -> None:
        for round_ in range(30):
            with Session(tables) as session, session.begin():
                for each in repositories[::order]:
                    each.enqueue_many(session, [(Note(), {"unique_key": f"{round_}-{key}"}) for key in range(5)])

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(write, order) for order in (1, -1)]:
            future.result(30)
    with Session(tables) as session:
        for record in (AppJob, JobRecord):
            assert session.scalar(sa.select(sa.func.count()).select_from(record)) == 150


def test_workers_of_two_queues_keep_apart(tables: Engine) -> None:
    seen: list[tuple[str, str]] = []
    handlers = {record: HandlerRegistry() for record in (AppJob, JobRecord)}
    for record, registry in handlers.items():

        @registry.handler(Note)
        def note(session: Session, job: Job[Note], record: type = record) -> None:
            session.execute(sa.select(1))
            seen.append((record.__name__, job.payload.text))

    with Session(tables) as session:
        repo.enqueue(session, Note(text="a"), values={"cents": 3})
        JobRepository().enqueue(session, Note(text="b"))
        session.commit()
    for record, registry in handlers.items():
        Worker(tables, registry, record=record).drain(timeout=20)
    assert seen == [("AppJob", "a"), ("JobRecord", "b")]
    with Session(tables) as session:
        assert session.scalars(sa.select(AppJob).where(AppJob.status == JobStatus.DONE)).one().cents == 3


def test_jobs_are_queried_and_changed_as_other_rows(tables: Engine) -> None:
    with Session(tables) as session:
        customer = Customer(name="Ada")
        session.add(customer)
        repo.enqueue(session, Note(text="a"), values={"customer_id": lambda: customer.id}, meta={"by": "me"})
        repo.enqueue(session, Note(text="b"))
        session.commit()
        session.execute(sa.update(AppJob).where(AppJob.payload["text"].astext == "b").values(status=JobStatus.DEAD))
        session.commit()
        assert session.scalars(sa.select(AppJob).where(AppJob.status == JobStatus.DEAD)).one().payload["text"] == "b"
        job = session.scalars(sa.select(AppJob).join(AppJob.customer).where(Customer.name == "Ada")).one()
        assert (job.status, job.meta) == (JobStatus.QUEUED, {"by": "me"})
        job.priority = 7
        session.commit()
        assert session.scalars(sa.select(AppJob.priority).where(AppJob.id == job.id)).one() == 7
        session.delete(job)
        session.commit()
        assert session.scalars(sa.select(sa.func.count()).select_from(AppJob)).one() == 1


@pytest.mark.parametrize("how", ["add", "merge"])
def test_a_job_that_is_added_as_an_object_is_refused_at_the_flush(tables: Engine, how: str) -> None:
    with Session(tables) as session:
        session.add(Customer(name="Ada"))
        job = AppJob(id=uuid.uuid4(), kind="note", payload={}, trace=uuid.uuid4())
        if how == "add":
            session.add(job)
        else:
            session.merge(job)
        kept = repo.enqueue(session, Note())
        with pytest.raises(
            SessionError, match=r"a job \(AppJob\) was added to the session as an object.*repo\.enqueue"
        ):
            session.commit()
        session.rollback()
        assert state_of(kept) is JobState.DISCARDED
        session.add(Customer(name="Bob"))
        repo.enqueue(session, Note())
        session.commit()
        assert session.scalars(sa.select(Customer.name)).all() == ["Bob"]
        assert len(session.scalars(sa.select(AppJob)).all()) == 1


def _relationships(kind: str) -> type[DeclarativeBase]:
    class Own(DeclarativeBase):
        pass

    class Order(Own):
        __tablename__ = "own_order"
        id: Mapped[int] = mapped_column(primary_key=True)

    class OwnJob(JobRecordMixin, Own):
        __tablename__ = "own_job"
        order_id: Mapped[int | None] = mapped_column(ForeignKey(Order.id))
        parent_id: Mapped[uuid.UUID | None] = mapped_column(ForeignKey("own_job.id"))

    if kind == "to jobs":
        Order.jobs = relationship(OwnJob)
    elif kind == "from a job":
        OwnJob.order = relationship(Order)
    elif kind == "both, one of them for reading":
        Order.jobs = relationship(OwnJob, viewonly=True)
        OwnJob.order = relationship(Order)
    elif kind == "by a backref":
        Order.jobs = relationship(OwnJob, backref="order")
    elif kind == "through a table":
        sa.Table(
            "link",
            Own.metadata,
            sa.Column("order_id", ForeignKey(Order.id), primary_key=True),
            sa.Column("job_id", ForeignKey(OwnJob.id), primary_key=True),
        )
        Order.jobs = relationship(OwnJob, secondary="link")
    elif kind == "to a job's successor":
        OwnJob.parent = relationship(OwnJob, remote_side=[OwnJob.id], foreign_keys=[OwnJob.parent_id])
    else:
        assert kind == "all for reading"
        Order.jobs = relationship(OwnJob, viewonly=True)
        OwnJob.order = relationship(Order, viewonly=True)
    return Own


@pytest.mark.parametrize(
    "kind",
    [
        "to jobs",
        "from a job",
        "both, one of them for reading",
        "by a backref",
        "through a table",
        "to a job's successor",
    ],
)
def test_a_relationship_that_could_write_is_refused_when_mappers_are_configured(kind: str) -> None:
    base = _relationships(kind)
    try:
        with pytest.raises(ConfigurationError, match=r"(Order\.jobs|OwnJob\.\w+) could write.*viewonly=True"):
            base.registry.configure()
    finally:
        base.registry.dispose()
    configure_mappers()  # those of the others are as they were


def test_relationships_for_reading_are_taken() -> None:
    base = _relationships("all for reading")
    base.registry.configure()
    base.registry.dispose()


ODD = 'a%"b c'


@pytest.mark.slow
def test_names_may_be_odd(engine: Engine) -> None:
    """Of the schema, the table and the application's columns: for the flush, COPY and a worker."""

    class Own(DeclarativeBase):
        pass

    class OddJob(JobRecordMixin, Own):
        __tablename__ = "100% jobs"
        __table_args__ = {"schema": ODD}

        note: Mapped[str | None] = mapped_column('n%o"te')
        at: Mapped[int | None]  # as a word that the statements use themselves
        delay: Mapped[int | None]
        hold: Mapped[int | None]

    with engine.begin() as connection:
        connection.execute(sa.schema.CreateSchema(ODD))
        Own.metadata.create_all(connection)
        verify_schema(connection, record=OddJob)
        assert connection.scalar(sa.text("SELECT reloptions FROM pg_class WHERE relname = '100% jobs'")) is not None
    odd = JobRepository(record=OddJob)
    with Session(engine) as session:
        odd.enqueue(session, Note(text="a"), values={"note": "x", "at": 1, "delay": 2, "hold": 3})
        odd.enqueue(session, Note(text="b"), unique_key="k", on_conflict="replace")
        odd.enqueue_many(session, [Note(text="c")] * 1500)
        session.commit()
        assert odd.cancel(session, OddJob.payload["text"].astext == "b")
        session.commit()
    handlers = HandlerRegistry()

    @handlers.handler(Note)
    def note(session: Session, job: Job[Note]) -> None: ...

    Worker(engine, handlers, record=OddJob).drain(timeout=30)
    with Session(engine) as session:
        assert odd.counts(session)[JobStatus.DONE] == 1501
        assert session.scalars(sa.select(OddJob.note).where(OddJob.note.is_not(None))).all() == ["x"]


@pytest.mark.parametrize("how", ["single table", "joined", "concrete", "a discriminator", "a renamed column"])
def test_a_job_class_that_has_no_table_for_itself_is_refused(how: str) -> None:
    class Own(DeclarativeBase):
        pass

    def define() -> None:
        if how == "a discriminator":

            class Typed(JobRecordMixin, Own):
                __tablename__ = "typed"
                type: Mapped[str]
                __mapper_args__ = {"polymorphic_on": "type"}

        elif how == "a renamed column":

            class Renamed(JobRecordMixin, Own):
                __tablename__ = "renamed"
                meta: Mapped[dict[str, Any]] = mapped_column("job_meta", JSONB)

        else:

            class First(JobRecordMixin, Own):
                __tablename__ = "base"

            if how == "single table":

                class Single(First):
                    pass

            else:

                class Sub(First):
                    __tablename__ = "sub"
                    id: Mapped[uuid.UUID] = mapped_column(ForeignKey("base.id"), primary_key=True)
                    __mapper_args__ = {"concrete": how == "concrete"}

    with pytest.raises(ConfigurationError, match=r"(mapped with inheritance|has no column 'meta')"):
        define()
    Own.registry.dispose()


class OddNames(DeclarativeBase):
    """Of an application that calls its columns as enlist calls the parameters of its statements."""


class OddJob(JobRecordMixin, OddNames):
    __tablename__ = "odd_job"

    worker: Mapped[str | None]
    lease: Mapped[int | None]
    limits: Mapped[int | None]
    keys: Mapped[str | None]
    ids: Mapped[int | None]
    tokens: Mapped[str | None]
    delay: Mapped[float | None]
    statuses: Mapped[str | None]


def test_columns_may_be_called_as_parameters_of_statements_are(empty_database_url: sa.URL) -> None:
    engine = sa.create_engine(empty_database_url)
    repo = JobRepository(record=OddJob)
    handlers = HandlerRegistry()

    @handlers.handler("work")
    def work(session: Session, job: Job[Any]) -> None:
        if job.attempt == 1:
            raise Retry(0)

    try:
        OddNames.metadata.create_all(engine)
        with Session(engine) as session, session.begin():
            plain = repo.enqueue(session, "work", {}, values={"worker": "Ada", "delay": 1.5})
            repo.enqueue(session, "work", {}, concurrency_key="k", values={"keys": "brass"})
            late = repo.enqueue(session, "work", {}, delay=3600)
        with Session(engine) as session, session.begin():
            assert repo.reschedule(session, late.id, delay=0)
        Worker(engine, handlers, record=OddJob).drain(timeout=10)
        with Session(engine) as session, session.begin():
            assert {job.status for job in session.scalars(sa.select(OddJob))} == {JobStatus.DONE}
            assert repo.retry(session, plain.id)
            assert repo.cancel(session, plain.id)
            job = session.get_one(OddJob, plain.id)
            assert (job.worker, job.delay, job.ids) == ("Ada", 1.5, None)
    finally:
        engine.dispose()
