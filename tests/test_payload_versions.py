"""Versions of payload classes: stored with the job, upgraded by the worker, reported when they do not fit."""

from __future__ import annotations

import datetime as dt
import logging
import warnings
from typing import Any

import pytest
import sqlalchemy as sa
import tenacity
from pydantic import ConfigDict, Field
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session

from enlist import (
    EnlistError,
    HandlerRegistry,
    InvalidOption,
    Job,
    JobPayload,
    JobRecordMixin,
    JobRepository,
    PayloadError,
    PayloadMismatch,
    Worker,
)
from enlist.payload import decode, options_of
from enlist.testing import assert_enqueued, drain
from tests.support import Observer
from tests.support.jobs import Jobs, running

repo = JobRepository()


class OldReceipt(JobPayload, kind="send_receipt", version=1):
    order_id: int


class SendReceipt(JobPayload, kind="send_receipt", version=3):
    """Version 2 had a list of orders, version 3 says in which language."""

    orders: list[int] = Field(alias="order_ids")
    language: str

    @classmethod
    def upgrade(cls, version: int, data: dict[str, Any]) -> dict[str, Any]:
        if version < 2:
            data["order_ids"] = [data.pop("order_id")]
        data["language"] = f"en, was {version}"
        return data


class Plain(JobPayload, kind="plain", version=2):
    model_config = ConfigDict(extra="forbid")

    number: int


@pytest.fixture
def jobs(observer: Observer) -> Jobs:
    return Jobs(observer)


def versions(observer: Observer, table: str = "enlist_job") -> list[Any]:
    assert table.isidentifier()
    rows = observer.rows(f"SELECT payload_version FROM {table} ORDER BY id")
    return [version for (version,) in rows]


def reading(payload: type[JobPayload] | str, **options: Any) -> tuple[HandlerRegistry, list[Any]]:
    """A registry whose one handler keeps the payloads that it gets."""
    handlers = HandlerRegistry()
    seen: list[Any] = []

    def handle(session: Session, job: Job[Any]) -> None:
        seen.append(job.payload)

    handlers.handler(payload, wait=tenacity.wait_fixed(600), **options)(handle)
    return handlers, seen


# -- the definition of the class -------------------------------------------------------------------------------------


def test_a_version_is_inherited_and_leaves_the_name_to_fields() -> None:
    class Base(JobPayload, version=7):
        version: str = "mine"

    class Derived(Base, kind="derived"):
        pass

    class Newer(Derived, version=8):
        pass

    assert [options_of(payload).version for payload in (Derived, Newer, OldReceipt)] == [7, 8, 1]
    assert Derived(version="his").model_dump() == {"version": "his"}

    class Unsaid(JobPayload, kind="unsaid"):
        pass

    assert options_of(Unsaid).version == 1


@pytest.mark.parametrize("version", [0, 32768, -1, "2", True, 1.0])
def test_a_version_that_the_column_cannot_hold_is_refused(version: Any) -> None:
    with pytest.raises(InvalidOption, match="version must be"):
        type("Bad", (JobPayload,), {}, kind="bad", version=version)


def test_an_upgrade_that_could_not_be_called_is_refused_at_the_definition() -> None:
    def plain(cls: Any, version: int, data: Any) -> Any: ...
    def narrow(cls: Any, data: Any) -> Any: ...
    def wide(cls: Any, version: int, data: Any, *, more: Any) -> Any: ...
    async def slow(cls: Any, version: int, data: Any) -> Any: ...

    for upgrade, message in [
        (plain, r"Bad\.upgrade must be a class method: @classmethod def upgrade\(cls, version, data\)"),
        (staticmethod(plain), r"Bad\.upgrade must be a class method"),
        (classmethod(narrow), r"Bad\.upgrade must take \(cls, version, data\): too many positional arguments"),
        (classmethod(wide), r"Bad\.upgrade must take \(cls, version, data\): missing a required .*'more'"),
        (classmethod(slow), r"Bad\.upgrade is async, and it is not awaited"),
    ]:
        with pytest.raises(PayloadError, match=message):
            type("Bad", (JobPayload,), {"upgrade": upgrade}, kind="bad")


def test_an_upgrade_may_come_from_a_base_that_is_no_payload() -> None:
    class Doubling:
        @classmethod
        def upgrade(cls, version: int, data: dict[str, Any]) -> dict[str, Any]:
            return {"number": data["number"] * 2}

    class Mixed(Doubling, Plain, version=2):
        pass

    assert decode(Mixed, {"number": 4}, 1).number == 8

    class Wrong:
        def upgrade(self) -> None: ...

    with pytest.raises(PayloadError, match=r"Bad\.upgrade must be a class method"):
        type("Bad", (Wrong, JobPayload), {}, kind="bad")


@pytest.mark.parametrize("namespace", [{}, {"upgrade": False}, {"upgrade": Field(default=False)}])
def test_a_field_cannot_be_called_upgrade_and_the_error_says_what_to_do(namespace: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # pydantic warns of a field that hides a method
        with pytest.raises(PayloadError, match=r"Bad\.upgrade is the method .* Field\(alias='upgrade'\)"):
            type("Bad", (JobPayload,), {"__annotations__": {"upgrade": bool}, **namespace}, kind="bad")

    class Good(JobPayload, kind="good"):
        wants_upgrade: bool = Field(alias="upgrade")

    assert decode(Good, {"upgrade": True}).wants_upgrade


# -- what is stored --------------------------------------------------------------------------------------------------


def receipt(number: int = 1) -> SendReceipt:
    return SendReceipt(order_ids=[number], language="de")


def test_the_version_is_stored_with_each_job(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session, session.begin():
        handle = repo.enqueue(session, receipt())
        repo.enqueue(session, receipt, priority=4)  # late, and with an option of the call
        repo.enqueue(session, OldReceipt(order_id=1))
        repo.enqueue(session, "send_receipt", {"order_id": 1})
        repo.enqueue(session, receipt(), unique_key="a")
        repo.enqueue_many(session, [receipt(), OldReceipt(order_id=2)])
    assert versions(observer) == [3, 3, 1, 1, 3, 3, 1]
    with Session(engine) as session:
        job = repo.get(session, handle.id)
        assert job is not None
        assert job.payload_version == 3


def test_the_version_is_stored_by_a_copy(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session, session.begin():
        repo.enqueue_many(session, [receipt(n) if n % 2 else OldReceipt(order_id=n) for n in range(2000)])
    assert versions(observer) == [1, 3] * 1000


def test_the_version_is_stored_with_columns_of_the_applications_own(engine: Engine, observer: Observer) -> None:
    class Base(DeclarativeBase):
        pass

    class AppJob(JobRecordMixin, Base):
        __tablename__ = "app_job"

        label: Mapped[str | None]

    Base.metadata.create_all(engine)
    own = JobRepository(record=AppJob)
    with Session(engine) as session, session.begin():
        own.enqueue(session, receipt(), values={"label": "x"})
        own.enqueue(session, OldReceipt(order_id=1), unique_key="a", on_conflict="replace", values={"label": "x"})
        own.enqueue(session, receipt())
    with Session(engine) as session, session.begin():
        for payload in (OldReceipt(order_id=1), receipt()):
            own.enqueue(session, payload, unique_key="a", on_conflict="replace", values={"label": "y"})
    assert versions(observer, "app_job") == [3, 3, 3]


def test_a_queued_twin_is_replaced_with_its_version(engine: Engine, observer: Observer) -> None:
    def put(*payloads: JobPayload) -> None:
        with Session(engine) as session, session.begin():
            for payload in payloads:
                repo.enqueue(session, payload, unique_key="a", on_conflict="replace")

    put(OldReceipt(order_id=1))
    put(receipt(2))
    assert observer.rows("SELECT payload_version, payload ? 'order_ids' FROM enlist_job") == [(3, True)]
    put(OldReceipt(order_id=3))
    assert observer.rows("SELECT payload_version, payload ? 'order_ids' FROM enlist_job") == [(1, False)]
    put(OldReceipt(order_id=4), receipt(5))  # the later of one flush
    assert observer.rows("SELECT payload_version, payload ? 'order_ids' FROM enlist_job") == [(3, True)]
    observer.execute("DELETE FROM enlist_job")
    put(receipt(6), OldReceipt(order_id=7))
    assert observer.rows("SELECT payload_version, payload ? 'order_ids' FROM enlist_job") == [(1, False)]


# -- upgrades --------------------------------------------------------------------------------------------------------


def test_older_payloads_are_upgraded_and_those_of_the_class_are_not(engine: Engine, jobs: Jobs) -> None:
    handlers, seen = reading(SendReceipt)
    jobs.add("send_receipt", {"order_id": 1})  # version 1 is the column's default
    jobs.add("send_receipt", {"order_ids": [2, 3]}, payload_version=2)
    jobs.add("send_receipt", {"order_ids": [4], "language": "de"}, payload_version=3)
    with running(Worker(engine, handlers, poll_interval=0.05)):
        jobs.wait_all()
    assert sorted((payload.orders, payload.language) for payload in seen) == [
        ([1], "en, was 1"),
        ([2, 3], "en, was 2"),
        ([4], "de"),
    ]


async def test_async_handlers_get_them_upgraded_too(async_engine: AsyncEngine, jobs: Jobs) -> None:
    handlers = HandlerRegistry()
    seen: list[str] = []

    @handlers.handler(SendReceipt)
    async def handle(session: AsyncSession, job: Job[SendReceipt]) -> None:
        seen.append(job.payload.language)

    jobs.add("send_receipt", {"order_id": 1})
    with running(Worker(async_engine, handlers, poll_interval=0.05)):
        jobs.wait_all()
    assert seen == ["en, was 1"]


def test_an_older_payload_that_fits_needs_no_upgrade(engine: Engine, jobs: Jobs) -> None:
    handlers, seen = reading(Plain)
    jobs.add("plain", {"number": 1})
    with running(Worker(engine, handlers, poll_interval=0.05)):
        jobs.wait_all()
    assert seen == [Plain(number=1)]


def test_a_handler_of_a_kinds_name_gets_what_is_stored_whatever_its_version(engine: Engine, jobs: Jobs) -> None:
    handlers, seen = reading("send_receipt")
    jobs.add("send_receipt", {"order_id": 1})
    jobs.add("send_receipt", {"order_id": 1}, payload_version=99)
    with running(Worker(engine, handlers, poll_interval=0.05)):
        jobs.wait_all()
    assert seen == [{"order_id": 1}] * 2


def test_tests_see_older_payloads_upgraded(engine: Engine) -> None:
    handlers, seen = reading(SendReceipt)
    with Session(engine) as session:
        repo.enqueue(session, OldReceipt(order_id=1))
        (job,) = assert_enqueued(session, SendReceipt, orders=[1])
        assert job.payload == {"order_id": 1}  # as it is stored
        drain(session, handlers)
        assert [payload.language for payload in seen] == ["en, was 1"]
        session.rollback()


# -- what does not fit -----------------------------------------------------------------------------------------------


class Failing(JobPayload, kind="failing", version=4):
    number: int

    @classmethod
    def upgrade(cls, version: int, data: dict[str, Any]) -> dict[str, Any]:
        if data.get("how") == "raise":
            raise LookupError("secret")
        if data.get("how") == "none":
            return None  # type: ignore[return-value]
        if data.get("how") == "object":
            return {"number": object()}
        return {**data, "number": "secret"}


@pytest.mark.parametrize(
    ("stored", "version", "reason"),
    [
        ({"how": "raise"}, 1, "upgrade() raised LookupError"),
        ({"how": "none"}, 2, "upgrade() returned NoneType, not a dict"),
        ({"how": "object"}, 2, "upgrade() returned what is not JSON: TypeError"),
        ({"how": "wrong"}, 3, "payload.number: Input should be a valid integer"),
        ({"number": "secret"}, 4, "payload.number: Input should be a valid integer"),
        ({}, 5, "payload.number: Field required"),
        ([], 1, "Input should be an object"),
    ],
)
def test_a_mismatch_names_both_versions_and_the_reason_and_no_value(stored: Any, version: int, reason: str) -> None:
    with pytest.raises(PayloadMismatch) as caught:
        decode(Failing, stored, version)
    message = str(caught.value)
    assert message.startswith(f"the payload does not fit Failing version 4: stored as version {version}; ")
    assert reason in message
    assert "secret" not in message
    assert isinstance(caught.value, (PayloadError, EnlistError))
    assert (caught.value.version, caught.value.stored_version) == (4, version)


def test_what_an_upgrade_raised_is_the_cause() -> None:
    with pytest.raises(PayloadMismatch) as caught:
        decode(Failing, {"how": "raise"}, 1)
    assert isinstance(caught.value.__cause__, LookupError)


def test_a_mismatch_is_a_failed_attempt_by_default(engine: Engine, jobs: Jobs) -> None:
    handlers, seen = reading(Failing)
    job_id = jobs.add("failing", {"how": "raise"}, payload_version=3)
    with running(Worker(engine, handlers, poll_interval=0.05)):
        row = jobs.wait_failed(job_id)
    assert (row["status"], row["attempt"], seen) == ("queued", 1, [])
    assert row["run_at"] > row["created_at"] + dt.timedelta(seconds=590)  # the handler's wait
    message = f"the payload of job {job_id} does not fit Failing version 4: stored as version 3; upgrade() raised Look"
    assert message in row["last_error"]
    assert message in row["errors"][0]["error"]


def test_a_mismatch_is_the_end_where_the_handler_says_so(engine: Engine, jobs: Jobs) -> None:
    handlers, seen = reading(Failing, on_mismatch="dead")
    job_id = jobs.add("failing", {"how": "raise"}, payload_version=3)
    with running(Worker(engine, handlers, poll_interval=0.05)):
        row = jobs.wait(job_id)
    assert (row["status"], row["attempt"], row["max_attempts"], seen) == ("dead", 1, 20, [])
    assert f"the payload of job {job_id} does not fit Failing version 4" in row["last_error"]


def test_other_failures_are_none_of_on_mismatch(engine: Engine, jobs: Jobs) -> None:
    handlers = HandlerRegistry()

    @handlers.handler(Plain, wait=tenacity.wait_fixed(600), on_mismatch="dead")
    def handle(session: Session, job: Job[Plain]) -> None:
        raise PayloadError("of the handler")

    job_id = jobs.add("plain", {"number": 1}, payload_version=2)
    with running(Worker(engine, handlers, poll_interval=0.05)):
        row = jobs.wait_failed(job_id)
    assert (row["status"], row["attempt"]) == ("queued", 1)


# -- what a newer release has written --------------------------------------------------------------------------------


def test_a_newer_payload_that_fits_is_run(engine: Engine, jobs: Jobs) -> None:
    handlers, seen = reading(OldReceipt)
    jobs.add("send_receipt", {"order_id": 1, "language": "de"}, payload_version=2)
    with running(Worker(engine, handlers, poll_interval=0.05)):
        jobs.wait_all()
    assert seen == [OldReceipt(order_id=1)]


@pytest.mark.parametrize(
    ("age", "wait"),
    [(0, 10), (300, 30), (3600, 60), (86_000, 60)],
    ids=["new", "five minutes", "an hour", "nearly a day"],
)
def test_a_newer_payload_that_does_not_fit_is_left_to_a_newer_worker(
    age: int, wait: int, engine: Engine, jobs: Jobs, *, observer: Observer, caplog: pytest.LogCaptureFixture
) -> None:
    """Its attempts are not used up, the last one neither, and it is not looked at again soon."""
    caplog.set_level(logging.INFO, "enlist")
    handlers, seen = reading(OldReceipt, on_mismatch="dead")
    created_at = observer.scalar("SELECT now() - %s * interval '1 s'", age)
    payload = {"order_ids": [1], "language": "secret"}
    job_id = jobs.add("send_receipt", payload, payload_version=3, max_attempts=1, created_at=created_at)
    with running(Worker(engine, handlers, poll_interval=0.05)):
        row = jobs.wait_failed(job_id, attempt=0)
        due_in = observer.scalar("SELECT extract(epoch FROM run_at - now())::float FROM enlist_job")
    assert wait - 5 < due_in <= wait + 5
    assert (row["status"], row["attempt"], row["lost"], row["lease_token"], seen) == ("queued", 0, 0, 2, [])
    assert row["last_error"] == (
        f"PayloadMismatch: the payload of job {job_id} does not fit OldReceipt version 1: stored as version 3;"
        " payload.order_id: Field required; left to a worker that knows version 3"
    )
    assert row["errors"] == []  # that list is of the attempts
    assert row["last_error"] in caplog.text
    assert "secret" not in caplog.text


def test_a_day_after_it_was_made_it_fails_like_any_other_and_in_the_end_is_dead(
    engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    handlers, seen = reading(OldReceipt, on_mismatch="dead")  # what it may do to what it knows
    job_id = jobs.add("send_receipt", {"order_ids": [1]}, payload_version=3, max_attempts=2)
    observer.execute("UPDATE enlist_job SET created_at = now() - interval '25 hours'")
    with running(Worker(engine, handlers, poll_interval=0.05)):
        row = jobs.wait_failed(job_id)
        assert (row["status"], row["attempt"]) == ("queued", 1)
        jobs.set_due()
        row = jobs.wait(job_id)
    assert (row["status"], row["attempt"], seen) == ("dead", 2, [])
    assert [entry["attempt"] for entry in row["errors"]] == [1, 2]
    assert "does not fit OldReceipt version 1: stored as version 3" in row["last_error"]


@pytest.mark.parametrize("created_at", ["-infinity", "infinity", "0044-03-15 BC"])
def test_a_job_of_no_known_age_is_no_harm_to_others(
    created_at: str, engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    """PostgreSQL before 17 cannot subtract such times, and all of a claim's jobs are in one statement."""
    handlers, seen = reading(OldReceipt)
    jobs.add_many("send_receipt", [{"order_id": 1}, {"order_id": 2}])
    observer.execute("UPDATE enlist_job SET created_at = %s WHERE payload @> '{\"order_id\": 1}'", created_at)
    with running(Worker(engine, handlers, poll_interval=0.05)):
        jobs.wait_all()
    assert sorted(payload.order_id for payload in seen) == [1, 2]


def test_a_drain_puts_it_back_as_a_worker_does(engine: Engine) -> None:
    handlers, seen = reading(OldReceipt)
    with Session(engine) as session:
        handle = repo.enqueue(session, receipt())
        drain(session, handlers)
        job = repo.get(session, handle.id)
        assert job is not None
        assert (job.status, job.attempt, seen) == ("queued", 0, [])
        now = session.execute(sa.select(sa.func.statement_timestamp())).scalar_one()
        assert job.run_at > now + dt.timedelta(seconds=8)
        session.rollback()
