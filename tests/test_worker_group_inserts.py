"""``flush="group"``: the rows that jobs of a group add are inserted together."""

from __future__ import annotations

import threading
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal

import pytest
import sqlalchemy as sa
import tenacity
from sqlalchemy import Engine, ForeignKey, event
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship, sessionmaker

from enlist import HandlerRegistry, Job, JobPayload, JobRepository, Worker
from enlist.events import EventName, JobEvent
from enlist.exceptions import TransactionAborted
from tests.shop import Effect, Order, Receipt
from tests.support import Observer, wait_until
from tests.support.jobs import Jobs, running

LATER = tenacity.wait_fixed(600)

both = pytest.mark.parametrize("world", ["plain", "async"])
World = Literal["plain", "async"]
Flush = Literal["job", "group"]
Body = Callable[[Session, int, Job[Any]], None]


@pytest.fixture
def jobs(observer: Observer) -> Jobs:
    return Jobs(observer)


@pytest.fixture(autouse=True)
def they_wait_for_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have jobs wait from the first claim on: so they are in a group however slow the machine is."""
    monkeypatch.setattr("enlist._slots._Queue.allowance", lambda _self: 64)
    monkeypatch.setattr("enlist._groups.GROUP_SECONDS", 10.0)


class Inserts:
    """How many rows each INSERT into a table had."""

    def __init__(self, table: str) -> None:
        self.beginning = f"INSERT INTO {table} "
        self.rows: list[int] = []

    def look(self, _connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith(self.beginning):
            self.rows.append(cursor.rowcount)


@contextmanager
def inserts(table: str = "shop_effect") -> Iterator[Inserts]:
    looking = Inserts(table)
    event.listen(sa.Engine, "after_cursor_execute", looking.look)  # on the async one too
    yield looking
    event.remove(sa.Engine, "after_cursor_execute", looking.look)


def run(
    engine: Engine,
    jobs: Jobs,
    number: int,
    body: Body,
    *,
    world: World = "plain",
    bind: Any = None,
    flush: Flush = "group",
) -> list[dict[str, Any]]:
    """Run jobs in one group; return their rows."""
    handlers = HandlerRegistry()

    @handlers.handler("plain", commit_every=50, flush=flush, wait=LATER)
    def plain(session: Session, job: Job[Any]) -> None:
        body(session, job.payload["n"], job)

    @handlers.handler("async", commit_every=50, flush=flush, wait=LATER)
    async def asynchronous(session: AsyncSession, job: Job[Any]) -> None:
        await session.run_sync(body, job.payload["n"], job)

    ids = jobs.add_many(world, [{"n": n} for n in range(number)])
    with running(Worker(bind or engine, handlers, queues={"default": 1}, poll_interval=0.05, lease=10)):
        return [jobs.wait(job_id, timeout=15) for job_id in ids]


def all_done(rows: list[dict[str, Any]]) -> bool:
    return {(row["status"], row["attempt"], row["last_error"]) for row in rows} == {("done", 1, None)}


# -- what it is for ------------------------------------------------------------------------------------------


@both
def test_the_rows_of_a_group_are_inserted_together_in_the_order_of_its_jobs(
    world: World, engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    def body(session: Session, n: int, job: Job[Any]) -> None:
        assert not session.new
        session.add(Effect(job_id=job.id, worker=str(n)))

    with inserts() as seen:
        assert all_done(run(engine, jobs, 20, body, world=world))
    assert seen.rows == [1, 19]  # the first begins the transaction
    assert observer.rows("SELECT worker FROM shop_effect ORDER BY id") == [(str(n),) for n in range(20)]


class _Base(DeclarativeBase):
    pass


class Bill(_Base):
    __tablename__ = "group_bill"
    id: Mapped[int] = mapped_column(primary_key=True)
    n: Mapped[int]
    lines: Mapped[list[Line]] = relationship(back_populates="bill", cascade="all, delete-orphan")


class Line(_Base):
    __tablename__ = "group_line"
    id: Mapped[int] = mapped_column(primary_key=True)
    bill_id: Mapped[int] = mapped_column(ForeignKey(Bill.id))
    n: Mapped[int]
    bill: Mapped[Bill] = relationship(back_populates="lines")


def test_objects_that_refer_to_others_are_inserted_by_their_own_job(
    engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    _Base.metadata.create_all(engine)

    def body(session: Session, n: int, job: Job[Any]) -> None:
        bill = Bill(n=n)
        session.add(bill)
        bill.lines.extend([Line(n=n), Line(n=n)])

    with inserts("group_line") as seen:
        assert all_done(run(engine, jobs, 10, body))
    assert seen.rows == [2] * 10
    pairs = "SELECT count(*) FROM group_bill b JOIN group_line l ON l.bill_id = b.id AND l.n = b.n"
    assert observer.scalar(pairs) == 20


def test_rows_are_not_collected_without_end(engine: Engine, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("enlist._deferred.MOST_OBJECTS", 5)

    def body(session: Session, n: int, job: Job[Any]) -> None:
        session.add_all([Effect(job_id=job.id) for _ in range(7 if n == 6 else 2)])

    with inserts() as seen:
        assert all_done(run(engine, jobs, 10, body))
    assert seen.rows == [2, 6, 11, 6]  # at most five wait


# -- the next job finds what those before it have done -------------------------------------------------------


def by_orm(session: Session) -> int:
    return len(session.scalars(sa.select(Order)).all())


def by_text(session: Session) -> int:
    return int(session.execute(sa.text("SELECT count(*) FROM shop_order")).scalar_one())


def by_the_connection(session: Session) -> int:
    return int(session.connection().exec_driver_sql("SELECT count(*) FROM shop_order").scalar_one())


def by_the_driver(session: Session) -> int:
    cursor = session.connection().connection.cursor()
    cursor.execute("SELECT count(*) FROM shop_order")
    ((count,),) = cursor.fetchall()
    return int(count)


def without_autoflush(session: Session) -> int:
    with session.no_autoflush:
        return by_orm(session)


def in_a_savepoint(session: Session) -> int:
    with session.begin_nested():
        return by_text(session)


def in_a_savepoint_that_is_rolled_back(session: Session) -> int:
    savepoint = session.begin_nested()
    count = by_text(session)
    savepoint.rollback()
    return count


def after_a_flush(session: Session) -> int:
    session.flush()
    return by_text(session)


def after_an_add_of_its_own(session: Session) -> int:
    session.add(Effect(job_id=uuid.uuid4()))
    return by_orm(session)


def after_a_bulk_save(session: Session) -> int:
    session.bulk_save_objects([Effect(job_id=uuid.uuid4())])
    return by_text(session)


def after_a_bulk_insert(session: Session) -> int:
    session.bulk_insert_mappings(sa.inspect(Effect), [{"job_id": uuid.uuid4()}])
    return by_text(session)


def after_a_bulk_update(session: Session) -> int:
    session.bulk_update_mappings(sa.inspect(Order), [{"id": 1, "total": 7}])
    return by_text(session)


def after_forgetting_all(session: Session) -> int:
    session.expunge_all()
    return by_text(session)


LOOKS = [
    by_orm,
    by_text,
    by_the_connection,
    by_the_driver,
    without_autoflush,
    in_a_savepoint,
    in_a_savepoint_that_is_rolled_back,
    after_a_flush,
    after_an_add_of_its_own,
    after_a_bulk_save,
    after_a_bulk_insert,
    after_a_bulk_update,
    after_forgetting_all,
]


@pytest.mark.parametrize("look", LOOKS, ids=lambda look: look.__name__)
@both
def test_a_job_sees_the_rows_of_those_before_it(
    world: World, look: Callable[[Session], int], engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    found: list[int] = []

    def body(session: Session, n: int, job: Job[Any]) -> None:
        if n in {3, 7}:
            found.append(look(session))
        assert not session.new
        session.add(Order(ref=str(n)))

    with inserts("shop_order") as seen:
        assert all_done(run(engine, jobs, 10, body, world=world))
    assert found == [3, 7]
    assert seen.rows == [1, 2, 4, 3]
    assert observer.rows("SELECT ref FROM shop_order ORDER BY id") == [(str(n),) for n in range(10)]


def test_what_the_running_job_has_added_is_not_inserted_before_its_time(
    engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    seen: list[bool] = []

    def body(session: Session, n: int, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))
        if n % 2:
            with session.no_autoflush:
                order = Order()  # its ref, which must be there, follows
                session.add(order)
                session.connection()
                seen.append(session.scalar(sa.select(Effect.id).where(Effect.job_id == job.id)) is not None)
                order.ref = str(n)
            if n == 3:
                session.expunge(order)

    with inserts("shop_order") as inserted:
        assert all_done(run(engine, jobs, 6, body))
    assert seen == [False] * 3
    assert observer.rows("SELECT ref FROM shop_order ORDER BY id") == [("1",), ("5",)]
    assert sum(inserted.rows) == 2  # the group was whole
    assert sum(jobs.effects_by_job().values()) == 6


@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SAWarning")
def test_a_link_to_what_a_job_has_added_is_not_lost_when_others_rows_are_inserted(
    engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    _Base.metadata.create_all(engine)
    with Session(engine, expire_on_commit=False) as session, session.begin():
        bill = Bill(n=1, lines=[])
        session.add(bill)

    def body(session: Session, n: int, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))
        if n == 3:
            session.add(bill)
            bill.lines = [Line(n=3)]
            bill.n = -1  # is not to be sent yet
            session.connection()
            bill.n = 3

    assert all_done(run(engine, jobs, 6, body))
    assert observer.rows("SELECT b.n, l.n FROM group_bill b JOIN group_line l ON l.bill_id = b.id") == [(3, 3)]


def test_what_a_handler_has_taken_out_of_its_session_stays_out(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    _Base.metadata.create_all(engine)

    def body(session: Session, n: int, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))
        if n == 3:
            line = Line(n=3)
            session.add(Bill(n=3, lines=[Line(n=2), line]))
            session.expunge(line)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", sa.exc.SAWarning)  # that it belongs to what is flushed
                with suppress(TransactionAborted):
                    session.connection()
                session.flush()

    assert all_done(run(engine, jobs, 6, body))
    assert observer.rows("SELECT n FROM group_line") == [(2,)]


def test_a_connection_that_was_only_asked_for_is_no_transaction(engine: Engine, jobs: Jobs) -> None:
    runs: list[int] = []

    def body(session: Session, n: int, job: Job[Any]) -> None:
        runs.append(n)
        if n == 0:
            session.connection()
        elif n == 3:
            with session.no_autoflush:
                session.execute(sa.text("SELECT 1"))
        if n:
            session.add(Effect(job_id=job.id))

    assert all_done(run(engine, jobs, 6, body))
    assert runs == list(range(6))


def test_what_listeners_add_is_not_in_the_next_handlers_session(engine: Engine, jobs: Jobs) -> None:
    class Listened(Session):
        pass

    kept: list[Effect] = []
    found: list[int] = []

    @event.listens_for(Listened, "before_flush")
    def note(session: Session, *_: Any) -> None:
        for each in list(session.new):
            if isinstance(each, Order):
                kept.append(Effect(job_id=uuid.uuid4()))
                session.add(kept[-1])

    def body(session: Session, n: int, job: Job[Any]) -> None:
        if n == 3:
            session.connection()
            found.append(len(session.identity_map))
        session.add(Order(ref=str(n)))

    assert all_done(run(engine, jobs, 6, body, bind=sessionmaker(engine, class_=Listened)))
    assert found == [0]
    assert sum(jobs.effects_by_job().values()) == 6


def test_what_a_job_has_added_goes_after_what_those_before_it_have(
    engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    def body(session: Session, n: int, job: Job[Any]) -> None:
        order = Order(ref=f"{n}")
        session.add(order)
        if n == 5:
            session.flush()
            session.add(Receipt(order_id=order.id, note="5"))

    assert all_done(run(engine, jobs, 8, body))
    assert observer.rows("SELECT ref FROM shop_order ORDER BY id") == [(str(n),) for n in range(8)]
    assert observer.scalar("SELECT ref FROM shop_order o JOIN shop_receipt r ON r.order_id = o.id") == "5"


def test_objects_that_a_handler_keeps_are_in_no_later_jobs_session(engine: Engine, jobs: Jobs) -> None:
    kept: list[Order] = []
    found: list[int] = []

    def body(session: Session, n: int, job: Job[Any]) -> None:
        if n == 5:
            session.flush()
            found.append(len(session.identity_map))
        kept.append(Order(ref=str(n)))
        session.add(kept[-1])

    assert all_done(run(engine, jobs, 8, body))
    assert found == [0]
    assert [(order.id, order.ref) for order in kept] == [(n + 1, str(n)) for n in range(8)]  # nothing to load


def test_a_job_changes_a_row_that_one_before_it_has_added(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    def body(session: Session, n: int, job: Job[Any]) -> None:
        if n == 0:
            session.add(Effect(job_id=job.id))
        elif n == 1:
            session.add(Order(ref="the one"))
        else:
            session.scalars(sa.select(Order).with_for_update()).one().total += 1

    assert all_done(run(engine, jobs, 6, body))
    assert observer.scalar("SELECT total FROM shop_order") == 4


def test_a_changed_row_that_a_job_brings_along_is_updated_with_what_it_adds(
    engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    with Session(engine) as session, session.begin():
        session.add_all([Order(ref=str(n)) for n in range(6)])

    def body(session: Session, n: int, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))
        if n % 2:
            with Session(engine) as other:
                order = other.scalars(sa.select(Order).filter_by(ref=str(n))).one()
            order.total = n
            session.add(order)
            if n == 3:
                session.connection()

    assert all_done(run(engine, jobs, 6, body))
    assert observer.rows("SELECT total FROM shop_order ORDER BY ref") == [(0,), (1,), (0,), (3,), (0,), (5,)]
    assert sum(jobs.effects_by_job().values()) == 6


@pytest.mark.parametrize("looks", [False, True])
def test_jobs_of_the_group_that_enqueue_find_their_place(
    looks: bool, engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    class Next(JobPayload, kind="next"):
        order_id: int

    repo = JobRepository()

    def body(session: Session, n: int, job: Job[Any]) -> None:
        order = Order(ref=str(n))
        session.add(order)
        if n % 3 == 2:
            repo.enqueue(session, lambda o: Next(order_id=o.id), of=order)
            if looks:
                with session.no_autoflush:
                    session.execute(sa.text("SELECT 1"))

    with inserts("shop_order") as seen:
        assert all_done(run(engine, jobs, 10, body))
    assert seen.rows == [1, 2, 3, 3, 1]
    assert observer.rows("SELECT ref FROM shop_order ORDER BY id") == [(str(n),) for n in range(10)]
    joined = "SELECT ref FROM shop_order o JOIN enlist_job j ON (j.payload->>'order_id')::int = o.id"
    assert sorted(observer.rows(f"{joined} WHERE j.kind = 'next'")) == [("2",), ("5",), ("8",)]


# -- one that is refused takes nobody along ------------------------------------------------------------------


@both
def test_a_row_that_is_refused_fails_its_job_and_no_other(world: World, engine: Engine, jobs: Jobs) -> None:
    def body(session: Session, n: int, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))
        session.add(Order(ref="twice" if n in {2, 5} else str(n)))

    rows = run_until_failed(engine, jobs, 8, body, world, failing={5})
    assert "shop_order_ref_key" in rows[5]["last_error"]
    assert sum(jobs.effects_by_job().values()) == 7


@both
def test_an_error_of_one_that_the_next_swallows_is_no_loss(world: World, engine: Engine, jobs: Jobs) -> None:
    def body(session: Session, n: int, job: Job[Any]) -> None:
        session.add(Order(ref="twice" if n in {1, 2} else str(n)))
        if n == 3:
            try:
                session.flush()
            except sa.exc.IntegrityError:
                session.expunge_all()

    rows = run_until_failed(engine, jobs, 6, body, world, failing={2})
    assert "shop_order_ref_key" in rows[2]["last_error"]


def test_an_error_of_one_is_not_taken_for_that_of_the_nexts_savepoint(
    engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    def body(session: Session, n: int, job: Job[Any]) -> None:
        if n < 3:
            session.add(Order(ref="twice" if n else "0"))
            return
        try:
            with session.begin_nested():
                session.add(Order(ref=str(n)))
        except sa.exc.IntegrityError:  # it takes the error for its own
            session.add(Order(ref=f"instead of {n}"))

    run_until_failed(engine, jobs, 5, body, "plain", failing={2})
    refs = {ref for (ref,) in observer.rows("SELECT ref FROM shop_order")}
    assert refs == {"0", "twice", "3", "4"}


@both
def test_a_value_that_cannot_be_sent_fails_its_job_and_no_other(world: World, engine: Engine, jobs: Jobs) -> None:
    def body(session: Session, n: int, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id, attempt="many" if n == 4 else 1))

    run_until_failed(engine, jobs, 6, body, world, failing={4})
    assert sum(jobs.effects_by_job().values()) == 5


def run_until_failed(
    engine: Engine, jobs: Jobs, number: int, body: Body, world: World, *, failing: set[int]
) -> list[dict[str, Any]]:
    """Run jobs of which some fail; check that the others are done in their first attempt."""
    handlers = HandlerRegistry()

    @handlers.handler("plain", commit_every=50, flush="group", wait=LATER)
    def plain(session: Session, job: Job[Any]) -> None:
        body(session, job.payload["n"], job)

    @handlers.handler("async", commit_every=50, flush="group", wait=LATER)
    async def asynchronous(session: AsyncSession, job: Job[Any]) -> None:
        await session.run_sync(body, job.payload["n"], job)

    ids = jobs.add_many(world, [{"n": n} for n in range(number)])
    with running(Worker(engine, handlers, queues={"default": 1}, poll_interval=0.05, lease=10)):
        rows = [
            jobs.wait_failed(job_id, timeout=15) if n in failing else jobs.wait(job_id, timeout=15)
            for n, job_id in enumerate(ids)
        ]
    others = [row for n, row in enumerate(rows) if n not in failing]
    assert {(row["status"], row["attempt"], row["last_error"]) for row in others} == {("done", 1, None)}
    return rows


@pytest.mark.parametrize("look", [by_text, in_a_savepoint, after_a_flush], ids=lambda look: look.__name__)
def test_an_error_of_one_is_not_raised_as_what_the_next_one_handles(
    look: Callable[[Session], int], engine: Engine, jobs: Jobs
) -> None:
    handled: list[int] = []

    def body(session: Session, n: int, job: Job[Any]) -> None:
        if n == 3:
            try:
                look(session)
            except sa.exc.SQLAlchemyError:
                handled.append(n)
        session.add(Order(ref="twice" if n in {1, 2} else str(n)))

    rows = run_until_failed(engine, jobs, 6, body, "plain", failing={2})
    assert "shop_order_ref_key" in rows[2]["last_error"]
    assert not handled


def test_an_error_of_the_running_job_is_its_own(engine: Engine, jobs: Jobs) -> None:
    handled: list[int] = []

    def body(session: Session, n: int, job: Job[Any]) -> None:
        session.add(Order(ref="0" if n == 3 else str(n)))
        if n == 3:
            try:
                session.flush()
            except sa.exc.IntegrityError:
                handled.append(n)
                raise

    run_until_failed(engine, jobs, 6, body, "plain", failing={3})
    assert handled == [3, 3]  # in the group, and by itself


def test_an_error_of_what_the_running_job_changes_is_its_own(engine: Engine, jobs: Jobs) -> None:
    with Session(engine, expire_on_commit=False) as session, session.begin():
        one, other = Order(ref="one"), Order(ref="other")
        session.add_all([one, other])
    handled: list[int] = []

    def body(session: Session, n: int, job: Job[Any]) -> None:
        if n != 3:
            session.add(Effect(job_id=job.id))
            return
        other.ref = "one"
        session.add(other)
        try:
            session.flush()
        except sa.exc.IntegrityError:
            handled.append(n)
            raise

    run_until_failed(engine, jobs, 6, body, "plain", failing={3})
    assert handled == [3, 3]  # in the group, and by itself


def test_an_error_of_one_that_was_cancelled_is_not_the_next_ones(engine: Engine, jobs: Jobs) -> None:
    handlers = HandlerRegistry()
    told: list[JobEvent] = []
    runs: list[int] = []

    @handlers.handler("member", commit_every=50, flush="group", wait=LATER)
    def member(session: Session, job: Job[Any]) -> None:
        n = job.payload["n"]
        runs.append(n)
        if n < 3:
            session.add(Order(ref="twice" if n else "0"))
            return
        if runs.count(n) == 1:
            with Session(engine) as other, other.begin():
                for job_id in ids[:3]:
                    assert JobRepository(notify="transaction").cancel(other, job_id)
            wait_until(lambda: [event.name for event in told].count(EventName.CANCELLED) == 3)
        session.flush()

    ids = jobs.add_many("member", [{"n": n} for n in range(4)])
    options: dict[str, Any] = {"queues": {"default": 1}, "poll_interval": 0.05, "lease": 10, "events": [told.append]}
    with running(Worker(engine, handlers, **options)):
        row = jobs.wait(ids[3], timeout=15)
    assert (row["status"], row["attempt"], row["last_error"]) == ("done", 1, None)
    assert [jobs.status(job_id) for job_id in ids[:3]] == ["cancelled"] * 3


@pytest.mark.parametrize("swallows", [False, True])
def test_an_object_that_a_later_job_changes_is_inserted_as_its_own_job_left_it(
    swallows: bool, engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    kept: dict[int, Order] = {}

    def body(session: Session, n: int, job: Job[Any]) -> None:
        if n % 2:
            kept[n - 1].total = -1  # it is in nobody's session any more
            if swallows:
                with suppress(Exception):
                    session.flush()
        else:
            kept[n] = Order(ref=str(n), total=n)
            session.add(kept[n])

    assert all_done(run(engine, jobs, 6, body))
    assert observer.rows("SELECT ref, total FROM shop_order ORDER BY id") == [("0", 0), ("2", 2), ("4", 4)]


def test_a_later_job_gives_an_object_no_other_parent(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    _Base.metadata.create_all(engine)
    with Session(engine, expire_on_commit=False) as session, session.begin():
        bills = [Bill(n=n, lines=[]) for n in range(2)]
        session.add_all(bills)
    kept: list[Line] = []

    def body(session: Session, n: int, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))
        if n == 1:
            kept.append(Line(n=1, bill_id=bills[0].id))
            session.add(kept[-1])
        if n == 2:
            kept[-1].bill = bills[1]

    assert all_done(run(engine, jobs, 6, body))
    assert observer.scalar("SELECT b.n FROM group_bill b JOIN group_line l ON l.bill_id = b.id") == 0


def test_an_object_that_several_jobs_use_is_as_the_last_of_them_left_it(
    engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    the_one = Order(ref="the one")

    def body(session: Session, n: int, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))
        if n in {2, 4}:
            session.add(the_one)
        if n == 4:
            session.flush()
            the_one.total = 4

    assert all_done(run(engine, jobs, 6, body))
    assert observer.rows("SELECT ref, total FROM shop_order") == [("the one", 4)]
    assert sum(jobs.effects_by_job().values()) == 6


def test_what_a_job_adds_to_an_object_of_another_stays_its_own(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    _Base.metadata.create_all(engine)
    bills: list[Bill] = []

    def body(session: Session, n: int, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))
        if n == 1:
            bills[:] = [Bill(n=n)]
            session.add_all(bills)
        elif n == 2:
            line = Line(bill=bills[0], n=0)
            session.add(line)
            session.flush()
            line.n = n

    assert all_done(run(engine, jobs, 5, body))
    assert observer.rows("SELECT n FROM group_line ORDER BY n") == [(2,)]
    assert observer.scalar("SELECT count(*) FROM group_bill") == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_flush_of_some_objects_leaves_the_others(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    runs: list[int] = []

    def body(session: Session, n: int, job: Job[Any]) -> None:
        runs.append(n)
        one, other = Order(ref=str(n)), Order(ref=f"not {n}")
        session.add_all([one, other] if n == 3 else [one])
        if n == 3:
            session.flush([one])
            session.expunge(other)

    assert all_done(run(engine, jobs, 6, body))
    assert runs == list(range(6))
    assert observer.rows("SELECT ref FROM shop_order ORDER BY id") == [(str(n),) for n in range(6)]


def test_a_job_that_adds_nothing_is_no_reason_to_insert(engine: Engine, jobs: Jobs) -> None:
    def body(session: Session, n: int, job: Job[Any]) -> None:
        if n not in {2, 3}:
            session.add(Effect(job_id=job.id))

    with inserts() as seen:
        assert all_done(run(engine, jobs, 8, body))
    assert seen.rows == [1, 5]


# -- without it each job has a flush of its own ---------------------------------------------------------------


STATE = threading.local()
"""What a handler leaves for its flush, in the thread."""


class Stamp(sa.types.TypeDecorator[str]):
    """A type that looks at what the handler has left."""

    impl = sa.String
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str:
        return f"{value}{STATE.n}"


class Defaulted(_Base):
    __tablename__ = "group_defaulted"
    id: Mapped[int] = mapped_column(primary_key=True)
    job: Mapped[int]
    own: Mapped[str] = mapped_column(default=lambda: str(STATE.n))


class Typed(_Base):
    __tablename__ = "group_typed"
    id: Mapped[int] = mapped_column(primary_key=True)
    job: Mapped[int]
    own: Mapped[str] = mapped_column(Stamp, default="")


class Heard(_Base):
    __tablename__ = "group_heard"
    id: Mapped[int] = mapped_column(primary_key=True)
    job: Mapped[int]
    own: Mapped[str] = mapped_column(default="")


@event.listens_for(Heard, "before_insert")
def _stamp(_mapper: Any, _connection: Any, heard: Heard) -> None:
    heard.own = str(STATE.n)


class Versioned(_Base):
    __tablename__ = "group_versioned"
    id: Mapped[int] = mapped_column(primary_key=True)
    job: Mapped[int]
    own: Mapped[str] = mapped_column()
    __mapper_args__ = {"version_id_col": own, "version_id_generator": lambda _version: str(STATE.n)}


SHARED: dict[str, int] = {}


class Changing(_Base):
    __tablename__ = "group_changing"
    id: Mapped[int] = mapped_column(primary_key=True)
    job: Mapped[int]
    value: Mapped[dict[str, int]] = mapped_column(sa.JSON)


@pytest.mark.parametrize("flush", ["job", "group"])
def test_a_value_that_changes_is_inserted_as_its_own_job_left_it(
    flush: Flush, engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    _Base.metadata.create_all(engine)

    def body(session: Session, n: int, job: Job[Any]) -> None:
        SHARED["n"] = n
        session.add(Changing(job=n, value=SHARED))

    assert all_done(run(engine, jobs, 6, body, flush=flush))
    assert observer.rows("SELECT job, (value ->> 'n')::int FROM group_changing ORDER BY id") == [
        (n, n) for n in range(6)
    ]


@pytest.mark.parametrize("model", [Defaulted, Typed, Heard, Versioned], ids=lambda model: model.__name__)
def test_what_the_application_makes_of_a_row_at_its_flush_is_made_for_its_own_job(
    model: type[Any], engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    _Base.metadata.create_all(engine)

    def body(session: Session, n: int, job: Job[Any]) -> None:
        STATE.n = n
        session.add(model(job=n))

    assert all_done(run(engine, jobs, 6, body, flush="job"))
    found = observer.rows(f"SELECT job, own FROM {model.__tablename__} ORDER BY id")
    assert found == [(n, str(n)) for n in range(6)]


@pytest.mark.parametrize("flush", ["job", "group"])
def test_an_applications_flush_may_have_parameters_and_return_something(
    flush: Flush, engine: Engine, jobs: Jobs
) -> None:
    class Flushing(Session):
        def flush(self, objects: Any = None, *, check: bool = True) -> str:  # type: ignore[override]
            super().flush(objects)
            return f"checked: {check}"

    returned: list[Any] = []

    def body(session: Session, n: int, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))
        if n == 3:
            returned.extend([session.flush(check=False), session.flush()])  # type: ignore[call-arg, func-returns-value]

    assert all_done(run(engine, jobs, 6, body, bind=sessionmaker(engine, class_=Flushing), flush=flush))
    assert returned == ["checked: False", "checked: True"]
    assert sum(jobs.effects_by_job().values()) == 6


def test_rows_are_not_lost_with_a_flush_that_does_not_always_flush(engine: Engine, jobs: Jobs) -> None:
    class Pausing(Session):
        def flush(self, objects: Any = None) -> None:
            if "paused" not in self.info:
                super().flush(objects)

    def body(session: Session, n: int, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))
        if n == 3:
            session.flush()
            session.info["paused"] = True
            session.execute(sa.text("SELECT 1"))
            del session.info["paused"]
        if n == 5:
            session.info["paused"] = True
            session.execute(sa.text("SELECT 1"))
            del session.info["paused"]

    assert all_done(run(engine, jobs, 8, body, bind=sessionmaker(engine, class_=Pausing)))
    assert sum(jobs.effects_by_job().values()) == 8


@pytest.mark.parametrize("flush", ["job", "group"])
def test_an_applications_flush_is_called_as_sqlalchemy_calls_it(flush: Flush, engine: Engine, jobs: Jobs) -> None:
    class Flushing(Session):
        def flush(self) -> None:  # type: ignore[override]
            super().flush()

    def body(session: Session, n: int, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))
        if n == 3:
            session.flush()

    assert all_done(run(engine, jobs, 6, body, bind=sessionmaker(engine, class_=Flushing), flush=flush))
    assert sum(jobs.effects_by_job().values()) == 6


# -- a session that chooses its database ------------------------------------------------------------------------


def test_a_session_that_chooses_its_database_does_so_for_each_job(engine: Engine, jobs: Jobs) -> None:
    chosen: list[int] = []

    class Choosing(Session):
        def get_bind(self, *arguments: Any, **options: Any) -> Any:
            chosen.append(self.info.get("n", -1))
            return engine

    def body(session: Session, n: int, job: Job[Any]) -> None:
        session.info["n"] = n
        session.add(Effect(job_id=job.id))

    assert all_done(run(engine, jobs, 6, body, bind=sessionmaker(engine, class_=Choosing)))
    assert [n for n in range(6) if n in chosen] == list(range(6))


# -- an old snapshot ---------------------------------------------------------------------------------------------


def test_jobs_under_a_snapshot_still_share_no_transaction(engine: Engine, jobs: Jobs) -> None:
    strict = engine.execution_options(isolation_level="REPEATABLE READ")
    runs: list[int] = []
    commits: list[int] = []
    event.listen(strict, "commit", lambda _connection: commits.append(1))

    def body(session: Session, n: int, job: Job[Any]) -> None:
        runs.append(n)
        session.add(Effect(job_id=job.id))

    assert all_done(run(strict, jobs, 5, body))
    assert runs == list(range(5))
    assert sum(jobs.effects_by_job().values()) == 5
    assert len(commits) >= 5
