"""What a worker is given wrong is found at once, with the value, the limit and the remedy."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import URL, Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Session, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool, SingletonThreadPool, StaticPool

from enlist import (
    ConfigurationError,
    EnlistError,
    HandlerRegistry,
    InvalidOption,
    Job,
    JobPayload,
    JobRecord,
    JobRecordMixin,
    JobStatus,
    SchemaError,
    Worker,
)
from enlist.migrations import LATEST_STEP, migrate
from tests.support.jobs import running


@pytest.fixture
def handlers() -> HandlerRegistry:
    made = HandlerRegistry()

    @made.handler("work")
    def work(session: Session, job: Job[Any]) -> None: ...

    return made


@pytest.fixture
def async_handlers() -> HandlerRegistry:
    made = HandlerRegistry()

    @made.handler("work")
    async def work(session: AsyncSession, job: Job[Any]) -> None: ...

    return made


# -- options -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"queues": {}}, "at least one queue"),
        ({"queues": []}, "at least one queue"),
        ({"queues": "mail"}, "queues must be a mapping or a list of names, not 'mail'"),
        ({"queues": {"mail": 0}}, "slots of queue 'mail' must be an integer from 1 to 1000, not 0"),
        ({"queues": {"mail": -1}}, "slots of queue 'mail' must be an integer from 1 to 1000, not -1"),
        ({"queues": {"mail": 1001}}, "from 1 to 1000, not 1001"),
        ({"queues": {"mail": "10"}}, "from 1 to 1000, not '10'"),
        ({"queues": {"mail": True}}, "from 1 to 1000, not True"),
        ({"queues": {"mail": None}}, "from 1 to 1000, not None"),
        ({"queues": {"": 1}}, "queue must not be empty"),
        ({"queues": {"x" * 201: 1}}, "queue has 201 bytes, at most 200 are allowed"),
        ({"queues": {"a\x00b": 1}}, "queue has a NUL character"),
        ({"queues": {3: 1}}, "queue must be a string, not 3"),
        ({"queues": [None]}, "queue must be a string, not None"),
        ({"queues": 5}, "queues must be a mapping or a list of names, not 5"),
        ({"queues": b"mail"}, "queues must be a mapping or a list of names"),
        ({"concurrency": 0}, "concurrency must be an integer from 1 to 1000, not 0"),
        ({"concurrency": 2.5}, "concurrency must be an integer from 1 to 1000, not 2.5"),
        ({"lease": 0}, "lease must be at least 0.1 seconds, not 0"),
        ({"lease": 0.01}, "lease must be at least 0.1 seconds, not 0.01"),
        ({"lease": -1}, "lease must be .*not -1"),
        ({"lease": "60"}, r"lease must be seconds \(int or float\) or a timedelta, not '60'"),
        ({"lease": None}, r"lease must be seconds \(int or float\) or a timedelta, not None"),
        ({"lease": float("nan")}, "lease must be .*not nan"),
        ({"lease": float("inf")}, "lease must be .*not inf"),
        ({"poll_interval": 0}, "poll_interval must be at least 0.01 seconds, not 0"),
        ({"poll_interval": True}, "poll_interval must be seconds"),
        ({"shutdown_timeout": -1}, "shutdown_timeout must be .*not -1"),
        ({"reaper_interval": 0}, "reaper_interval must be at least 0.01 seconds, not 0"),
        ({"lease": 86_401}, "lease must be at most a day, 86400 seconds, not 86401"),
        ({"poll_interval": 1e10}, "poll_interval must be at most a day, 86400 seconds, not 10000000000.0"),
        ({"reaper_interval": 10**6}, "reaper_interval must be at most a day, 86400 seconds, not 1000000"),
        ({"record": dict}, "record must be a mapped class with JobRecordMixin"),
        ({"record": JobRecordMixin}, "record must be a mapped class with JobRecordMixin"),
        ({"lifespan": 5}, "lifespan must be a function"),
    ],
)
def test_an_option_outside_of_what_it_may_be(
    options: dict[str, Any], message: str, handlers: HandlerRegistry, engine: Engine
) -> None:
    with pytest.raises(EnlistError, match=message):
        Worker(engine, handlers, **options)


@pytest.mark.parametrize("wrong", [None, {}, [], HandlerRegistry(), lambda session, job: None, "shop.jobs:handlers"])
def test_a_worker_needs_handlers(wrong: Any, engine: Engine) -> None:
    with pytest.raises(ConfigurationError, match="needs a HandlerRegistry with at least one handler"):
        Worker(engine, wrong)


def test_queues_by_name_get_the_default_slots(handlers: HandlerRegistry, engine: Engine) -> None:
    assert Worker(engine, handlers).queues == {"default": 10}
    assert Worker(engine, handlers, queues=["a", "b"], concurrency=3).queues == {"a": 3, "b": 3}
    assert Worker(engine, handlers, queues=("a",)).queues == {"a": 10}


# -- binds ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bind", [None, "postgresql://", sa.make_url("postgresql+psycopg://"), Session, object()])
def test_a_bind_of_the_wrong_type(bind: Any, handlers: HandlerRegistry) -> None:
    with pytest.raises(ConfigurationError, match="bound to an Engine, AsyncEngine, sessionmaker"):
        Worker(bind, handlers)


def test_a_session_is_no_bind(engine: Engine, handlers: HandlerRegistry) -> None:
    bind: Any
    with Session(engine) as bind, pytest.raises(ConfigurationError, match="bound to an Engine"):
        Worker(bind, handlers)


@pytest.mark.parametrize("bind", [sessionmaker(), scoped_session(sessionmaker()), async_sessionmaker()])
def test_a_sessionmaker_without_an_engine(bind: Any, handlers: HandlerRegistry) -> None:
    with pytest.raises(ConfigurationError, match=r"is bound to None; .*sessionmaker\(engine\)"):
        Worker(bind, handlers)


def test_a_scoped_session_of_something_else(engine: Engine, handlers: HandlerRegistry) -> None:
    scoped: Any = scoped_session(lambda: Session(engine))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="must be made from a sessionmaker"):
        Worker(scoped, handlers)


def test_a_sessionmaker_bound_to_a_connection(engine: Engine, handlers: HandlerRegistry) -> None:
    with engine.connect() as connection, pytest.raises(ConfigurationError, match="bound to an engine"):
        Worker(sessionmaker(connection), handlers)


def test_a_wrong_bind_keyword(engine: Engine, handlers: HandlerRegistry) -> None:
    wrong: Any = "postgresql://"
    with pytest.raises(ConfigurationError, match="sync_bind"):
        Worker(engine, handlers, sync_bind=wrong)
    with pytest.raises(ConfigurationError, match="async_bind"):
        Worker(engine, handlers, async_bind=wrong)


def test_another_database_than_postgresql(handlers: HandlerRegistry) -> None:
    with pytest.raises(ConfigurationError, match=r"works on PostgreSQL only; the engine of sqlite:// is for another"):
        Worker(create_engine("sqlite://"), handlers)


def test_asyncpg_arguments_cannot_be_carried_over(database_url: URL, handlers: HandlerRegistry) -> None:
    engine = create_async_engine(
        database_url.set(drivername="postgresql+asyncpg"), connect_args={"server_settings": {"search_path": "app"}}
    )
    with pytest.raises(
        ConfigurationError, match=r"connect_args\['server_settings'\].*give the worker one as sync_bind="
    ):
        Worker(engine, handlers)


def test_an_engine_with_a_creator_cannot_be_derived_from(database_url: URL, async_handlers: HandlerRegistry) -> None:
    def creator() -> Any: ...

    engine = create_engine("postgresql+psycopg://", creator=creator)
    with pytest.raises(ConfigurationError, match=r"its creator.*give the worker one as async_bind="):
        Worker(engine, async_handlers)


def test_housekeeping_that_cannot_be_derived_is_found_before_the_start(
    database_url: URL, async_handlers: HandlerRegistry
) -> None:
    engine = create_async_engine(
        database_url.set(drivername="postgresql+asyncpg"), connect_args={"server_settings": {"search_path": "app"}}
    )
    with pytest.raises(ConfigurationError, match="sync_bind="):
        Worker(engine, async_handlers).start()


@pytest.mark.parametrize("pool", [StaticPool, SingletonThreadPool])
def test_a_pool_that_gives_a_connection_to_several_handlers(
    pool: Any, database_url: URL, handlers: HandlerRegistry, async_handlers: HandlerRegistry
) -> None:
    with pytest.raises(ConfigurationError, match="does not give each handler a connection of its own"):
        Worker(create_engine(database_url, poolclass=pool), handlers)
    if pool is StaticPool:
        with pytest.raises(ConfigurationError, match="StaticPool"):
            Worker(create_async_engine(database_url, poolclass=pool), async_handlers)


# -- the database at the start -------------------------------------------------------------------------------


def test_an_autocommit_engine(database_url: URL, handlers: HandlerRegistry) -> None:
    engine = create_engine(database_url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with pytest.raises(ConfigurationError, match=r"in AUTOCOMMIT mode.*without isolation_level='AUTOCOMMIT'"):
        Worker(engine, handlers).start()


def test_an_autocommit_async_engine(any_async_engine: AsyncEngine, async_handlers: HandlerRegistry) -> None:
    engine = any_async_engine.execution_options(isolation_level="AUTOCOMMIT")
    with pytest.raises(ConfigurationError, match="in AUTOCOMMIT mode"):
        Worker(engine, async_handlers).start()


def test_a_database_without_the_tables(empty_database_url: URL, handlers: HandlerRegistry) -> None:
    engine = create_engine(empty_database_url)
    worker = Worker(engine, handlers)
    with pytest.raises(SchemaError, match=r"has no table enlist_job: run `enlist migrate`"):
        worker.start()
    with engine.begin() as connection:
        migrate(connection)
    with running(worker):  # no harm was done: the same worker starts now
        pass
    engine.dispose()


def test_a_database_at_an_older_step(
    engine: Engine, handlers: HandlerRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("enlist.migrations.LATEST_STEP", LATEST_STEP + 1)
    with pytest.raises(SchemaError, match=f"at schema step {LATEST_STEP}, this release needs {LATEST_STEP + 1}"):
        Worker(engine, handlers).start()


def test_a_record_of_ones_own_whose_table_is_missing(engine: Engine, handlers: HandlerRegistry) -> None:
    class Base(DeclarativeBase):
        pass

    class AppJob(JobRecordMixin, Base):
        __tablename__ = "app_job"

    with pytest.raises(SchemaError, match="has no table app_job: the table of AppJob is yours"):
        Worker(engine, handlers, record=AppJob).start()


def test_a_pool_smaller_than_the_slots_is_told(
    database_url: URL, handlers: HandlerRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    engine = create_engine(database_url, pool_size=2, max_overflow=1)
    with running(Worker(engine, handlers, queues={"default": 8})):
        pass
    engine.dispose()
    assert "8 slots, the engine's pool at most 3 connections" in caplog.text
    assert "create_engine(..., pool_size=8)" in caplog.text


def test_the_start_is_logged_with_queues_and_kinds(
    engine: Engine, handlers: HandlerRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "enlist")
    with running(Worker(engine, handlers, queues={"mail": 3})):
        pass
    assert "queues mail (3), kinds work" in caplog.text


# -- statuses ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["x", "QUEUED", "", None, 3])
def test_an_unknown_status_is_refused_with_those_that_there_are(value: Any) -> None:
    with pytest.raises(InvalidOption, match=f"unknown job status {value!r}: .*queued, running, done, dead, cancelled"):
        JobStatus(value)


@pytest.mark.parametrize("value", ["x", 3])
def test_an_unknown_status_in_a_query_never_reaches_the_database(engine: Engine, value: Any) -> None:
    with Session(engine) as session:
        with pytest.raises(InvalidOption, match=f"unknown job status {value!r}"):
            session.scalars(sa.select(JobRecord).where(JobRecord.status == value)).all()
        assert session.scalar(sa.select(sa.func.count()).where(JobRecord.status == "done")) == 0


def test_a_handler_whose_jobs_go_to_a_queue_that_is_not_served_is_named(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    class Mail(JobPayload, kind="mail", queue="outgoing"):
        pass

    handlers = HandlerRegistry()

    @handlers.handler(Mail)
    def mail(session: Session, job: Job[Mail]) -> None: ...

    Worker(engine, handlers).drain(timeout=10)
    assert "handlers for mail, whose jobs go to the queue 'outgoing'" in caplog.text
    caplog.clear()
    Worker(engine, handlers, queues=["outgoing"]).drain(timeout=10)
    assert "outgoing' by default" not in caplog.text


def test_drain_gives_up_in_time_while_the_database_is_away() -> None:
    handlers = HandlerRegistry()

    @handlers.handler("any")
    def handle(session: Session, job: Job[Any]) -> None: ...

    engine = sa.create_engine("postgresql+psycopg://postgres@/none?host=/nowhere")
    with pytest.raises(TimeoutError, match=r"could not be reached in 0\.5 seconds"):
        Worker(engine, handlers).drain(timeout=0.5)
