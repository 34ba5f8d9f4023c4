"""Random sequences of what an application does with a session, against a model of what must come of each."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import pytest
import sqlalchemy as sa
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from sqlalchemy import URL
from sqlalchemy.exc import DBAPIError, PendingRollbackError
from sqlalchemy.orm import Session

from enlist import JobHandle, JobPayload, JobRecordMixin, JobRepository, PayloadError, SessionError
from enlist._driver import sqlstate
from tests.shop import Order
from tests.support import Observer
from tests.support.model import Call, Database, FailsError, Job, ModelOrder, UnitOfWork
from tests.support.world import AppJob, World, made_world

T = TypeVar("T")

DEEPEST = 4
"""How many savepoints may be open."""


class Parcel(JobPayload, kind="parcel"):
    number: int
    order_id: int | None = None


class Bill(JobPayload, kind="bill", queue="bills"):
    number: int
    order_id: int | None = None


PAYLOADS: dict[str, type[Parcel | Bill]] = {"parcel": Parcel, "bill": Bill}
REPOSITORIES: dict[str, JobRepository[Any]] = {
    "enlist_job": JobRepository(),
    "app_job": JobRepository(AppJob, notify="transaction"),
}


def often(**weights: int) -> st.SearchStrategy[str]:
    """One of the names, each as often as its number says."""
    return st.sampled_from([name.replace("_", " ") for name, weight in weights.items() for _ in range(weight)])


tables = st.sampled_from(list(REPOSITORIES))
kinds = st.sampled_from(list(PAYLOADS))
keys = st.sampled_from(["a", "a", "b", None])  # few, so that they clash
forms = often(early=4, late=2, late_of=3, late_in_savepoint=1, dict=2, late_dict=1, late_dict_of=2, failing=1)
choices = st.integers(0, 20)
on_conflict = often(ignore=2, replace=1)
job: dict[str, Any] = {"table": tables, "kind": kinds, "key": keys, "on_conflict": on_conflict}
items = st.lists(st.tuples(often(early=1, late=1), st.fixed_dictionaries(job)), min_size=1, max_size=4)


class UnitOfWorkMachine(RuleBasedStateMachine):
    """One session under test; another session with a transaction of its own; a worker that ends jobs."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.numbers = itertools.count(1)
        self.database = Database()
        self.session: Any = world.begin()
        self.unit = UnitOfWork(self.database)
        self.savepoints: list[Any] = []
        self.other = Session(world.other_engine)
        self.other_unit = UnitOfWork(self.database)
        self.handles: list[tuple[Call, JobHandle]] = []
        self.objects: dict[ModelOrder, Order | AppJob] = {}

    def teardown(self) -> None:
        try:
            self.world.wait(self.session.close())
            self.other.close()
            assert self.world.connections_in_use() == 0
        finally:
            self.world.observer.execute("TRUNCATE enlist_job, app_job, shop_order, shop_receipt")

    # -- how a step is taken ------------------------------------------------------------------------------------

    def is_usable(self) -> bool:
        return not self.unit.failed

    def is_sound(self) -> bool:
        return not self.unit.failed and not self.unit.aborted

    def both(self, model: Callable[[], T], real: Callable[[], Any]) -> Any:
        """Take a step in the model and in the session: both succeed, or fail in the same way."""
        expected = None
        try:
            model()
        except FailsError as error:
            expected = error.how
        del self.savepoints[len(self.unit.frames) - 1 :]
        if expected is None:
            return self.world.wait(real())
        with pytest.raises((DBAPIError, PayloadError, SessionError)) as caught:
            self.world.wait(real())
        assert (sqlstate(caught.value) or "late payload").startswith(expected)
        return None

    def arguments(self, form: str, kind: str, number: int, of: object) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of enqueue for one of the forms that a payload can have."""
        make = PAYLOADS[kind]
        match form:
            case "early":
                return [make(number=number)], {}
            case "late":
                return [lambda: make(number=number)], {}
            case "late of":
                return [lambda order: make(number=number, order_id=order.id)], {"of": of}
            case "late in savepoint":
                return [lambda: self.in_savepoint(lambda: make(number=number))], {}
            case "dict":
                return [kind, {"number": number}], {}
            case "late dict":
                return [kind, lambda: {"number": number}], {}
            case "late dict of":
                return [kind, lambda order: {"number": number, "order_id": order.id}], {"of": of}
            case _:
                return [lambda: make(number=number // 0)], {}

    def in_savepoint(self, make: Callable[[], T]) -> T:
        """Make a late payload with the help of a savepoint that is opened, and rolled back, within the flush."""
        session = self.session if isinstance(self.session, Session) else self.session.sync_session
        with session.begin_nested() as savepoint:
            session.execute(sa.text("SELECT 1"))
            savepoint.rollback()
        return make()

    def options(self, number: int, *, table: str, kind: str, key: str | None, on_conflict: str) -> dict[str, Any]:
        """The options of enqueue: every other job of the application's own class has a label."""
        options: dict[str, Any] = {} if key is None else {"unique_key": key, "on_conflict": on_conflict}
        if table == "app_job" and number % 2:
            options["values"] = {"label": lambda: str(number)}
        return options

    def staged(
        self,
        unit: UnitOfWork,
        handle: JobHandle,
        number: int,
        *,
        table: str,
        kind: str,
        key: str | None,
        on_conflict: str,
    ) -> Call:
        """Tell the model of a call of enqueue."""
        label = str(number) if table == "app_job" and number % 2 else None
        call = Call(handle.id, table, kind, key, number, label=label, replaces=on_conflict == "replace")
        unit.enqueue(call)
        self.handles.append((call, handle))
        return call

    # -- the session: what is staged -----------------------------------------------------------------------------

    @precondition(is_usable)
    @rule(what=often(order=12, order_with_taken_ref=1, order_without_ref=1, job=1), choice=choices)
    def add(self, what: str, choice: int) -> None:
        """Add a domain row; now and then one that fails the flush, as a job does that is added as an object."""
        taken = sorted(str(ref) for ref in self.database.refs.union(order.ref for order in self.unit.orders))
        order = ModelOrder(f"order {next(self.numbers)}", is_job=what == "job")
        if what == "order with taken ref" and taken:
            order.ref = taken[choice % len(taken)]
        elif what == "order without ref":
            order.ref = None
        self.unit.add(order)
        self.objects[order] = AppJob(kind="ghost") if order.is_job else Order(ref=order.ref)
        self.session.add(self.objects[order])

    @precondition(is_usable)
    @rule(form=forms, choice=choices, flushed=st.booleans(), **job)
    def enqueue(self, *, form: str, choice: int, flushed: bool, **job: Any) -> None:
        order = None
        if form.endswith(" of"):
            if not self.known_orders():
                self.add("order", 0)
            order = self.known_orders()[choice % len(self.known_orders())]
        number = next(self.numbers)
        of = None if order is None else self.objects[order]
        arguments, keywords = self.arguments(form, job["kind"], number, of)
        keywords |= self.options(number, **job)
        handle = REPOSITORIES[job["table"]].enqueue(self.session, *arguments, **keywords)
        call = self.staged(self.unit, handle, number, **job)
        call.order = order
        call.sends_sql = form == "late in savepoint"
        if form == "failing":
            call.number = None
        if flushed:
            self.flush("flush")

    def known_orders(self) -> list[ModelOrder]:
        return [order for order in self.unit.orders if not order.is_job]

    @precondition(is_usable)
    @rule(table=tables, items=items)
    def enqueue_many(self, table: str, items: list[tuple[str, dict[str, Any]]]) -> None:
        jobs = [(next(self.numbers), form, {**job, "table": table}) for form, job in items]
        payloads: list[Any] = [
            (self.arguments(form, job["kind"], number, None)[0][0], self.options(number, **job))
            for number, form, job in jobs
        ]
        handles = REPOSITORIES[table].enqueue_many(self.session, payloads)
        for handle, (number, _, job) in zip(handles, jobs, strict=True):
            self.staged(self.unit, handle, number, **job)

    @rule(table=tables)
    def enqueue_what_is_refused(self, table: str) -> None:
        """At the call, and it changes nothing."""
        with pytest.raises(PayloadError):
            REPOSITORIES[table].enqueue(self.session, "bad", {"text": "\x00"})
        with pytest.raises(PayloadError, match=r"^items\[1\]"):
            REPOSITORIES[table].enqueue_many(self.session, [Bill(number=0), None])  # type: ignore[list-item]
        if self.unit.failed:
            with pytest.raises(SessionError, match="rollback"):
                REPOSITORIES[table].enqueue(self.session, Bill(number=0))

    @rule(what=often(all=1, pending_object=1))
    def expunge(self, what: str) -> None:
        if what == "all":
            self.unit.expunge_all()
            self.session.expunge_all()
        else:
            for found in [found for found in self.session.new if isinstance(found, JobRecordMixin)]:
                self.session.expunge(found)
            self.unit.innermost.expunge_jobs()

    # -- the session: what is sent -------------------------------------------------------------------------------

    @precondition(is_usable)
    @rule(by=often(flush=1, query=1))
    def flush(self, by: str) -> None:
        if by == "flush" or self.unit.aborted:
            self.both(self.unit.flush, self.session.flush)
            return
        found = self.both(self.unit.flush, lambda: self.session.scalars(sa.select(AppJob.id)))
        if found is not None:
            visible = self.unit.visible()
            assert set(found) == {job_id for job_id, job in visible.items() if job.table == "app_job"}

    @precondition(lambda self: self.is_sound() or self.savepoints)
    @rule(how=often(begin=5, release=3, roll_back=2), choice=st.sampled_from([0, 0, 0, 1, 2, 3]))
    def savepoint(self, how: str, choice: int) -> None:
        """Begin one; or end the innermost, or an outer one with all those within it."""
        if not self.savepoints or (how == "begin" and self.is_sound() and len(self.savepoints) < DEEPEST):
            savepoint = self.both(self.unit.begin_nested, self.session.begin_nested)
            if savepoint is not None:
                self.savepoints.append(savepoint)
            return
        depth = len(self.savepoints) - choice % len(self.savepoints)
        savepoint = self.savepoints[depth - 1]
        if how == "release" and self.is_sound():
            self.both(lambda: self.unit.release(depth), savepoint.commit)
        else:
            self.both(lambda: self.unit.rollback_to(depth), savepoint.rollback)

    @precondition(lambda self: self.unit.calls or self.unit.orders or self.unit.failed or self.unit.aborted)
    @rule(how=often(commit=4, rollback=1, close=1))
    def end(self, how: str) -> None:
        if how != "commit":
            self.both(self.unit.rollback, self.session.rollback if how == "rollback" else self.session.close)
        elif self.unit.failed:
            with pytest.raises(PendingRollbackError):
                self.world.wait(self.session.commit())
            return
        elif self.unit.aborted:
            self.commit_what_is_aborted()
            return
        else:
            self.both(self.unit.commit, self.session.commit)
        if not self.unit.failed:
            assert self.world.connections_in_use() == 0
            self.check_database()

    @precondition(is_sound)
    @rule(where=often(savepoint=3, transaction=1))
    def swallow_an_error(self, where: str) -> None:
        if where == "savepoint":
            savepoint = self.both(self.unit.begin_nested, self.session.begin_nested)
            if savepoint is None:
                return
        with pytest.raises(DBAPIError), self.session.no_autoflush:
            self.world.wait(self.session.execute(sa.text("SELECT 1 / 0")))
        if where == "savepoint":
            self.both(lambda: self.unit.rollback_to(len(self.unit.frames) - 1), savepoint.rollback)
        else:
            self.unit.abort()

    def commit_what_is_aborted(self) -> None:
        """Refused, if it would lose jobs; of rows alone SQLAlchemy's commit returns normally, so that is not tried."""
        if self.savepoints:
            return
        if any(call.state != "staged" for call in self.unit.calls):
            with pytest.raises(SessionError, match="swallowed"):
                self.world.wait(self.session.commit())
        elif self.unit.calls or self.unit.innermost.pending:
            self.both(self.unit.flush, self.session.commit)
            assert self.unit.failed

    # -- others --------------------------------------------------------------------------------------------------

    # What a swallowed error has left locked is PostgreSQL's affair: nobody else looks for it.
    @precondition(lambda self: not self.unit.aborted)
    @rule(how=often(enqueue=3, commit=2, roll_back=1), **job)
    def other_session(self, *, how: str, **job: Any) -> None:
        """The other session enqueues and flushes, or ends its transaction."""
        if how == "enqueue":
            number = next(self.numbers)
            payload = PAYLOADS[job["kind"]](number=number)
            handle = REPOSITORIES[job["table"]].enqueue(self.other, payload, **self.options(number, **job))
            self.staged(self.other_unit, handle, number, **job)
            self.both(self.other_unit.flush, self.other.flush)
        if how == "commit":
            self.both(self.other_unit.commit, self.other.commit)
        elif how == "roll back" or self.other_unit.failed:
            self.both(self.other_unit.rollback, self.other.rollback)
        self.check_database()

    @precondition(lambda self: self.database.jobs and not self.unit.aborted)
    @rule(choice=choices, becomes=often(running=2, done=2, dead=1, pruned=1))
    def worker(self, choice: int, becomes: str) -> None:
        """Some status of a committed job changes, or it is deleted: dead and deleted ones have their key no more.

        All as with unique_until="pruned", also those that have replaced others: when keys lapse is not modelled.
        """
        locked = self.unit.jobs | self.other_unit.jobs
        ids = sorted(job_id for job_id in self.database.jobs if job_id not in locked)
        if not ids:
            return
        job_id = ids[choice % len(ids)]
        job = self.database.jobs[job_id]
        execute: Any = self.world.observer.execute
        if becomes == "pruned":
            del self.database.jobs[job_id]
            assert execute(f"DELETE FROM {job.table} WHERE id = %s", job_id) == 1
            return
        job = job._replace(status=becomes, held=job.held and becomes != "dead")
        self.database.jobs[job_id] = job
        changed = execute(
            f"UPDATE {job.table} SET status = %s, unique_held = %s, unique_until = 'pruned',"
            " locked_until = CASE WHEN %s = 'running' THEN now() + interval '1 h' END WHERE id = %s",
            becomes,
            job.held,
            becomes,
            job_id,
        )
        assert changed == 1

    # -- checks --------------------------------------------------------------------------------------------------

    @invariant()
    def all_is_as_the_model_says(self) -> None:
        for call, handle in self.handles:
            said = (handle.state, handle.inserted, handle.replaced)
            assert said == (call.state, call.inserted, call.replaced), handle
            assert handle.existing_id in call.existing, handle
        if not self.unit.has_enqueued and not any(order.is_job for order in self.unit.innermost.pending):
            assert self.session.info == {}
            assert not [found for found in self.session if isinstance(found, JobRecordMixin)]

    def check_database(self) -> None:
        rows: Any = self.world.observer.rows
        orders: dict[int | None, str | None] = dict(rows("SELECT id, ref FROM shop_order"))
        assert sorted(str(ref) for ref in orders.values()) == sorted(str(ref) for ref in self.database.refs)
        orders[None] = None
        found = {}
        for table, column in (("enlist_job", "NULL"), ("app_job", "label")):
            for job_id, kind, key, payload, label, status, held in rows(
                f"SELECT id, kind, unique_key, payload, {column}, status, unique_held FROM {table}"
            ):
                order = orders[payload.get("order_id")]
                found[job_id] = Job(table, kind, key, payload["number"], order, label, status, held)
        assert found == self.database.jobs


STEPS = 50
EXAMPLES = {"sync": 70, "psycopg": 30, "asyncpg": 30}


@pytest.mark.slow
@pytest.mark.timeout(600)  # a failure is made small before it is reported: minutes
@pytest.mark.parametrize("driver", EXAMPLES)
def test_a_session_and_its_handles_are_as_the_model_says(driver: str, database_url: URL, observer: Observer) -> None:
    run(driver, database_url, observer, EXAMPLES[driver])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("driver", EXAMPLES)
def test_they_are_in_many_more_examples(driver: str, database_url: URL, observer: Observer) -> None:
    run(driver, database_url, observer, 20 * EXAMPLES[driver])


def run(driver: str, url: URL, observer: Observer, examples: int) -> None:
    with made_world(driver, url, observer) as world:

        def machine() -> UnitOfWorkMachine:
            return UnitOfWorkMachine(world)

        run_state_machine_as_test(
            cast("type[UnitOfWorkMachine]", machine),  # any callable will do
            settings=settings(
                max_examples=examples,
                stateful_step_count=STEPS,
                deadline=None,
                print_blob=True,
                report_multiple_bugs=False,
            ),
        )
