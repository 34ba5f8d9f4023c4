"""Ordered concurrency keys, as jobs are enqueued: what a class needs, what is stored, and who may share a key."""

from __future__ import annotations

import re
import uuid
from typing import Any, Generic, TypeVar

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import PendingRollbackError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from enlist import InvalidOption, JobPayload, JobRecord, JobRecordMixin, JobRepository, JobState
from enlist._statements import statements_for
from enlist.payload import options_of
from enlist.testing import assert_enqueued, refute_enqueued
from tests.jobs import Note, state_of
from tests.shop import Order
from tests.support import Observer, StatementRecorder
from tests.support.plans import Mode, plan_of, scans

repo = JobRepository(notify=None)
T = TypeVar("T")


class Sync(JobPayload, kind="sync", ordered=True):
    number: int = 0


class Export(JobPayload, kind="export", ordered=True):
    number: int = 0


class Base(DeclarativeBase):
    pass


class TenantJob(JobRecordMixin, Base):
    __tablename__ = "tenant_job"

    tenant: Mapped[str]
    trace: Mapped[uuid.UUID] = mapped_column(default=uuid.uuid4)


def put(engine: Engine, payload: JobPayload, key: str = "k", **options: Any) -> None:
    with Session(engine) as session, session.begin():
        repo.enqueue(session, payload, concurrency_key=key, **options)


def in_line(observer: Observer) -> list[int]:
    """The numbers of the ordered jobs, in the order of their line."""
    rows = observer.rows("SELECT payload->>'number' FROM enlist_job WHERE ordered ORDER BY created_at, id")
    return [int(number) for (number,) in rows]


def run(observer: Observer) -> None:
    """Have the jobs running, as if a worker had claimed them."""
    assert observer.execute(
        "UPDATE enlist_job SET status = 'running', attempt = 1, locked_until = 'infinity', concurrency_slot = 1"
    )


def refused(session: Session, kinds: str) -> None:
    """Flush: it fails since two kinds do not agree, as a flush fails."""
    with pytest.raises(InvalidOption, match=rf"^concurrency_key 'k': {kinds}.*must agree"):
        session.flush()
    with pytest.raises(PendingRollbackError):
        session.commit()
    session.rollback()


# -- the class keyword --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1, 0, "yes", [], object()])
def test_the_class_keyword_is_true_or_false(value: Any) -> None:
    with pytest.raises(InvalidOption, match=rf"ordered must be True or False, not {re.escape(repr(value))}"):
        type("Bad", (JobPayload,), {}, kind="bad", ordered=value)


def test_a_class_is_not_ordered_unless_it_says_so() -> None:
    class Unsaid(JobPayload, kind="unsaid", ordered=None):
        pass

    assert not options_of(Unsaid).ordered
    assert not options_of(Note).ordered


def test_subclasses_and_generics_inherit_it() -> None:
    class Later(Sync):
        pass

    class Free(Sync, kind="free", ordered=False):
        pass

    class Of(JobPayload, Generic[T], kind="of", ordered=True):
        value: T

    assert options_of(Later).ordered
    assert not options_of(Free).ordered
    assert options_of(Of[int]).ordered


def test_a_field_may_have_the_same_name(engine: Engine, observer: Observer) -> None:
    class Box(JobPayload, kind="box", ordered=True):
        ordered: int

    class Loose(JobPayload, kind="loose"):
        ordered: bool = True

    put(engine, Box(ordered=7))
    put(engine, Loose(), "another")
    found = observer.rows("SELECT payload, ordered FROM enlist_job ORDER BY id")
    assert found == [({"ordered": 7}, True), ({"ordered": True}, False)]


# -- what an ordered class needs ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"Sync is ordered: give a concurrency_key="),
        ({"unique_key": "u"}, r"Sync is ordered: give a concurrency_key="),
        ({"concurrency_key": "k", "concurrency_limit": 2}, r"Sync is ordered.*concurrency_limit must be 1, not 2"),
    ],
)
def test_what_it_needs_is_asked_for_at_the_call(
    engine: Engine, statements: StatementRecorder, observer: Observer, options: dict[str, Any], message: str
) -> None:
    with Session(engine) as session:
        session.add(Order(ref="a"))
        with pytest.raises(InvalidOption, match=f"^{message}"):
            repo.enqueue(session, Sync(), **options)
        with pytest.raises(InvalidOption, match=rf"^items\[1\]: {message}"):
            repo.enqueue_many(session, [Note(), (Sync(), options)])  # type: ignore[list-item]
        assert statements.events == []
        session.commit()
    assert observer.scalar("SELECT count(*) FROM shop_order") == 1
    assert observer.scalar("SELECT count(*) FROM enlist_job") == 0


def test_an_item_without_options_needs_a_key_as_well(engine: Engine) -> None:
    with Session(engine) as session, pytest.raises(InvalidOption, match=r"^items\[0\]: Sync is ordered"):
        repo.enqueue_many(session, [Sync()])


@pytest.mark.parametrize(
    ("options", "message"),
    [({}, "give a concurrency_key="), ({"concurrency_key": "k", "concurrency_limit": 5}, "must be 1, not 5")],
)
async def test_a_late_payload_is_asked_by_the_flush(
    any_async_engine: AsyncEngine, observer: Observer, options: dict[str, Any], message: str
) -> None:
    async with AsyncSession(any_async_engine) as session:
        handle = repo.enqueue(session, lambda: Sync(number=1), **options)
        line = re.escape(f"late payload of the enqueue at {__file__}:")
        with pytest.raises(InvalidOption, match=rf"^{line}\d+: Sync is ordered.*{message}"):
            await session.flush()
        with pytest.raises(PendingRollbackError):
            await session.commit()
        await session.rollback()
        assert state_of(handle) is JobState.DISCARDED
        repo.enqueue(session, lambda: Sync(number=1), concurrency_key="k")
        await session.commit()
    assert in_line(observer) == [1]


# -- what is stored -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [2, 2000], ids=["insert", "copy"])
async def test_it_is_stored_by_every_way(any_async_engine: AsyncEngine, observer: Observer, number: int) -> None:
    with StatementRecorder(any_async_engine) as statements:
        async with AsyncSession(any_async_engine) as session, session.begin():
            items = [(Sync(number=index), {"concurrency_key": f"k{index % 7}"}) for index in range(number)]
            repo.enqueue_many(session, items)  # type: ignore[arg-type]
            repo.enqueue_many(session, [Note() for _ in range(number)])
    assert len(statements.matching("COPY")) == (number > 1000)
    assert in_line(observer) == list(range(number))
    assert observer.rows("SELECT DISTINCT kind, ordered, concurrency_limit FROM enlist_job ORDER BY kind") == [
        ("note", False, None),
        ("sync", True, 1),
    ]


def test_it_is_stored_in_a_table_with_columns_of_its_own(engine: Engine, observer: Observer) -> None:
    Base.metadata.create_all(engine)
    own = JobRepository(TenantJob, notify=None)
    with Session(engine) as session, session.begin():
        for index in range(3):
            own.enqueue(session, Sync(number=index), concurrency_key="k", values={"tenant": "a"})
        own.enqueue(session, Note(), values={"tenant": "b"})
    rows = observer.rows("SELECT tenant, ordered, payload->>'number' FROM tenant_job ORDER BY created_at, id")
    assert rows == [("a", True, "0"), ("a", True, "1"), ("a", True, "2"), ("b", False, None)]
    with Session(engine) as session:
        own.enqueue(session, Note(), concurrency_key="k", values={"tenant": "b"})
        refused(session, "kind 'note'")


def test_a_replaced_job_keeps_its_place_in_the_line(engine: Engine, observer: Observer) -> None:
    put(engine, Sync(number=0), unique_key="u", on_conflict="replace")
    put(engine, Sync(number=1))
    put(engine, Sync(number=2), unique_key="u", on_conflict="replace")
    assert in_line(observer) == [2, 1]


def test_jobs_of_one_flush_stand_in_the_order_of_the_calls(engine: Engine, observer: Observer) -> None:
    """Whatever the statements that they are written by: by COPY, and for unique keys in the order of these."""
    unique: list[dict[str, Any]] = [
        {"unique_key": "z", "unique_until": "started"},
        {"unique_key": "y", "on_conflict": "replace"},
        {"unique_key": "x"},
    ]
    with Session(engine) as session, session.begin():
        for index, options in enumerate([{"delay": 5}, *unique, {}, {"priority": 9}]):
            repo.enqueue(session, Sync(number=index), concurrency_key="k", **options)
        rest: list[Any] = [(Sync(number=index), {"concurrency_key": "k"}) for index in range(6, 1200)]
        repo.enqueue_many(session, rest)
    assert in_line(observer) == list(range(1200))


def test_a_later_flush_stands_behind_an_earlier_one(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session, session.begin():
        early, late = (Sync(number=number) for number in (0, 1))
        for payload in (early, late):
            repo.enqueue(session, payload, concurrency_key="k")
            session.flush()
        # Not by the time at which the transaction began, though its id may be the lower one.
        put(engine, Sync(number=2), "another")
    assert in_line(observer) == [0, 1, 2]
    assert observer.scalar("SELECT count(DISTINCT created_at) FROM enlist_job") == 3


def test_tests_can_assert_it(engine: Engine) -> None:
    with Session(engine) as session:
        repo.enqueue(session, Sync(), concurrency_key="k")
        assert_enqueued(session, Sync, {"ordered": True, "concurrency_key": "k"})
        refute_enqueued(session, Sync, {"ordered": False})


# -- who may share a key ------------------------------------------------------------------------------------------


def test_ordered_kinds_share_a_key(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session, session.begin():
        repo.enqueue(session, Sync(number=0), concurrency_key="k")
        repo.enqueue(session, Export(number=1), concurrency_key="k", queue="exports", priority=5)
    put(engine, Sync(number=2), queue="exports")
    assert in_line(observer) == [0, 1, 2]


@pytest.mark.parametrize("first", [Sync(), Note()], ids=["ordered first", "ordered second"])
def test_an_ordered_kind_and_another_in_one_flush(engine: Engine, observer: Observer, first: JobPayload) -> None:
    second = Note() if isinstance(first, Sync) else Sync()
    with Session(engine) as session:
        repo.enqueue(session, first, concurrency_key="k")
        handle = repo.enqueue(session, second, concurrency_key="k")
        names = ("note", "sync") if isinstance(first, Sync) else ("sync", "note")
        word = "is not" if isinstance(first, Sync) else "is"
        refused(session, f"kind '{names[0]}' {word} ordered and kind '{names[1]}', of the same flush,")
        assert handle.state is JobState.DISCARDED
    assert observer.scalar("SELECT count(*) FROM enlist_job") == 0


@pytest.mark.parametrize("status", ["queued", "running"])
@pytest.mark.parametrize("first", [Sync(), Note()], ids=["ordered first", "ordered second"])
def test_an_ordered_kind_and_another_that_is_there(
    engine: Engine, observer: Observer, first: JobPayload, status: str
) -> None:
    second = Note() if isinstance(first, Sync) else Sync()
    put(engine, first)
    if status == "running":
        run(observer)
    with Session(engine) as session:
        repo.enqueue(session, second, concurrency_key="k")
        refused(
            session, f"kind '{options_of(second).kind}' .* kind '{options_of(first).kind}', of which one is {status},"
        )
        repo.enqueue(session, second, concurrency_key="another")
        session.commit()
    assert observer.scalar("SELECT count(*) FROM enlist_job") == 2


@pytest.mark.parametrize("first", [Sync(), Note()], ids=["ordered first", "ordered second"])
@pytest.mark.parametrize("status", ["done", "dead", "cancelled"])
def test_a_key_is_free_for_others_when_its_jobs_have_ended(
    engine: Engine, observer: Observer, first: JobPayload, status: str
) -> None:
    put(engine, first)
    observer.execute("UPDATE enlist_job SET status = %s", status)
    put(engine, Note() if isinstance(first, Sync) else Sync())
    assert observer.scalar("SELECT count(*) FROM enlist_job") == 2


def test_an_ordered_job_is_found_in_every_queue(engine: Engine) -> None:
    put(engine, Sync(), queue="far away")
    with Session(engine) as session:
        repo.enqueue(session, Note(), concurrency_key="k", concurrency_limit=5)
        refused(session, "kind 'note'")


def test_a_job_enqueued_by_its_kinds_name_is_not_ordered(engine: Engine) -> None:
    put(engine, Sync())
    with Session(engine) as session:
        repo.enqueue(session, "sync", {"number": 1}, concurrency_key="k")
        refused(session, "kind 'sync' is not ordered and kind 'sync', of which one is queued, is")


def test_jobs_of_a_savepoint_that_was_rolled_back_are_no_hindrance(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session, session.begin():
        savepoint = session.begin_nested()
        repo.enqueue(session, Note(), concurrency_key="k")
        session.flush()
        savepoint.rollback()
        repo.enqueue(session, Sync(number=1), concurrency_key="k")
    assert in_line(observer) == [1]


def test_a_refused_flush_in_a_savepoint_leaves_the_rest(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session, session.begin():
        repo.enqueue(session, Sync(number=1), concurrency_key="k")
        savepoint = session.begin_nested()
        repo.enqueue(session, Note(), concurrency_key="k")
        with pytest.raises(InvalidOption, match="must agree"):
            session.flush()
        savepoint.rollback()
        repo.enqueue(session, Sync(number=2), concurrency_key="k")
    assert in_line(observer) == [1, 2]


async def test_an_async_session_is_refused_alike(any_async_engine: AsyncEngine, observer: Observer) -> None:
    async with AsyncSession(any_async_engine) as session:
        repo.enqueue(session, Sync(number=1), concurrency_key="k")
        await session.commit()
        late = repo.enqueue(session, lambda: Note(text="a"), concurrency_key="k")
        with pytest.raises(InvalidOption, match="kind 'note' is not ordered and kind 'sync', of which one is queued"):
            await session.commit()
        await session.rollback()
        assert late.state is JobState.DISCARDED
    assert in_line(observer) == [1]


def test_two_transactions_that_pass_each_other_do_not_wait(engine: Engine, observer: Observer) -> None:
    with Session(engine) as one, Session(engine) as other:
        repo.enqueue(one, Sync(number=1), concurrency_key="k")
        repo.enqueue(other, Note(), concurrency_key="k")
        one.flush()
        other.commit()
        one.commit()
    assert observer.scalar("SELECT count(*) FROM enlist_job") == 2


# -- what it costs ------------------------------------------------------------------------------------------------


def test_one_look_for_all_keys_and_none_without_keys(engine: Engine, statements: StatementRecorder) -> None:
    with Session(engine) as session:
        repo.enqueue_many(session, [Note() for _ in range(50)])
        session.commit()
        assert len(statements.texts) == 1
        statements.clear()
        for index in range(50):
            repo.enqueue(session, Note(), concurrency_key=f"n{index}")
            repo.enqueue(session, Sync(), concurrency_key=f"s{index}", queue=f"q{index % 3}")
        session.commit()
        assert len(statements.texts) == 2


FILL = """
    INSERT INTO {} (id, kind, queue, concurrency_key, concurrency_limit, ordered)
    SELECT gen_random_uuid(), 'a', 'default', CASE WHEN mod(n, 2) = 0 THEN 'o' ELSE 'k' END || mod(n, 100), 1,
        mod(n, 2) = 0
    FROM generate_series(1, 10000) AS n
"""


class MadeJob(JobRecordMixin, Base):
    """Its indexes are made by ``create_all()``, in another order: of two that cost the same the planner takes one."""

    __tablename__ = "made_job"


@pytest.mark.parametrize("record", [JobRecord, MadeJob], ids=["migrated", "made by metadata"])
@pytest.mark.parametrize("mode", ["custom", "generic"])
@pytest.mark.parametrize("steps", [["FILL"], ["ANALYZE", "FILL"], ["FILL", "ANALYZE"]], ids="-".join)
def test_each_look_is_at_one_entry_of_an_index(engine: Engine, mode: Mode, steps: list[str], record: Any) -> None:
    table = record.metadata.tables[record.__tablename__]
    table.create(engine, checkfirst=True)
    statement = statements_for(table).at_odds(1)
    with engine.begin() as connection:
        connection.exec_driver_sql(f"ALTER TABLE {table.name} SET (autovacuum_enabled = off)")
        for step in steps:
            connection.exec_driver_sql(FILL.format(table.name) if step == "FILL" else f"ANALYZE {table.name}")
    parameters = {"queues": ["default"] * 2, "keys": ["o2", "k1"], "ordered": [True, False]}
    looks = {
        scan.index_name: scan.condition or ""
        for scan in scans(plan_of(engine, statement, parameters, mode), table.name)
    }
    assert set(looks) == {f"{table.name}_{index}" for index in ("ordered", "slot", "queue_key")}
    assert all("concurrency_key" in condition for condition in looks.values())
    with engine.connect() as connection:
        assert connection.execute(statement, parameters).one().key is None
        at_odds = {**parameters, "ordered": [False, True]}
        assert connection.execute(statement, at_odds).one().key in {"o2", "k1"}
