"""Statements straight to the driver: they do what SQLAlchemy would do, and step aside where anybody looks on."""

from __future__ import annotations

import datetime as dt
import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from psycopg import errors
from sqlalchemy import event
from sqlalchemy.dialects import registry
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.orm import Session, sessionmaker

from enlist import EventName, HandlerRegistry, Job, JobEvent, JobRecord, JobRepository, Worker, notifier
from enlist._direct import Direct, direct
from enlist._engines import housekeeping_engine
from enlist._statements import Seconds, UuidsAsText, statements_for
from tests.jobs import Note
from tests.shop import Effect
from tests.support import Observer
from tests.support.jobs import Jobs, running

FINISH = "UPDATE /* g"
"""How the UPDATE begins that sets a handler's job done."""


@pytest.fixture
def jobs(observer: Observer) -> Jobs:
    return Jobs(observer)


@pytest.fixture
def straight(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The statements that went straight to the driver."""
    sent: list[str] = []

    class Recording(psycopg.RawCursor[Any]):
        def execute(self, query: Any, *arguments: Any, **options: Any) -> Any:
            sent.append(query)
            return super().execute(query, *arguments, **options)

    monkeypatch.setattr(psycopg, "RawCursor", Recording)
    return sent


def work_one(engine: sa.Engine, jobs: Jobs) -> None:
    """Run a job that uses its session."""
    handlers = HandlerRegistry()

    @handlers.handler("work")
    def work(session: Session, job: Job[Any]) -> None:
        session.execute(sa.text("SELECT 1"))

    jobs.add("work")
    Worker(engine, handlers).drain(20)
    assert jobs.counts() == {"done": 1}


Send = Callable[[sa.Executable, sa.Connection, dict[str, Any]], Any]


def by_sqlalchemy(statement: sa.Executable, connection: sa.Connection, parameters: dict[str, Any]) -> Any:
    return connection.execute(statement, parameters).all()


def straight_on(statement: sa.Executable, connection: sa.Connection, parameters: dict[str, Any]) -> Any:
    return Direct(statement).rows(connection, parameters)


# -- who gets what ---------------------------------------------------------------------------------------------


def test_what_each_job_waits_for_goes_straight(engine: sa.Engine, jobs: Jobs, straight: list[str]) -> None:
    work_one(engine, jobs)
    assert any(text.startswith(FINISH) for text in straight)
    assert any("locked_by" in text and "SKIP LOCKED" in text for text in straight)


def test_a_notification_goes_straight(engine: sa.Engine, observer: Observer, straight: list[str]) -> None:
    observer.listen(statements_for(JobRecord.__table__).channel)
    with Session(engine) as session:
        JobRepository().enqueue(session, Note())
        session.commit()
    assert observer.notified() == ["default"]
    notifier.close_all()
    assert any("pg_notify" in text for text in straight)


Way = Callable[[sa.Engine], AbstractContextManager[sa.Engine]]


def hear(*_arguments: Any) -> None:
    """Somebody else's listener."""


def hear_too(*_arguments: Any) -> None:
    """Another's, of a package whose name begins as ours does."""


hear_too.__module__ = "enlist_metrics"


def listening(name: str, *, everywhere: bool = False, listener: Callable[..., object] = hear) -> Way:
    @contextmanager
    def way(engine: sa.Engine) -> Iterator[sa.Engine]:
        target = sa.Engine if everywhere else engine
        event.listen(target, name, listener)
        try:
            yield engine
        finally:
            event.remove(target, name, listener)

    return way


@contextmanager
def logging_info(engine: sa.Engine) -> Iterator[sa.Engine]:
    logger = logging.getLogger("sqlalchemy.engine")
    logger.setLevel(logging.INFO)
    try:
        yield sa.create_engine(engine.url)  # SQLAlchemy asks when an engine is made, and when it connects
    finally:
        logger.setLevel(logging.NOTSET)


@contextmanager
def echoing(engine: sa.Engine) -> Iterator[sa.Engine]:
    yield sa.create_engine(engine.url, echo=True)


class Watched(psycopg.Connection[Any]):
    """What stands in the place of psycopg's."""


@contextmanager
def with_cursors_of_its_own(engine: sa.Engine) -> Iterator[sa.Engine]:
    yield sa.create_engine(engine.url, connect_args={"cursor_factory": psycopg.ClientCursor})


@contextmanager
def replaced(engine: sa.Engine) -> Iterator[sa.Engine]:
    url = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    yield sa.create_engine(engine.url, creator=lambda: Watched.connect(url))


class WatchingDialect(PGDialect_psycopg):
    """One that looks on."""

    supports_statement_cache = True

    def do_execute(self, *arguments: Any, **options: Any) -> None:
        super().do_execute(*arguments, **options)  # type: ignore[no-untyped-call]


@contextmanager
def with_a_dialect_of_its_own(engine: sa.Engine) -> Iterator[sa.Engine]:
    registry.register("postgresql.watching", __name__, "WatchingDialect")
    yield sa.create_engine(engine.url.set(drivername="postgresql+watching"))


@contextmanager
def translated(engine: sa.Engine) -> Iterator[sa.Engine]:
    yield engine.execution_options(schema_translate_map={"nowhere": "public"})


EVENTS = ["before_cursor_execute", "after_cursor_execute", "before_execute", "after_execute", "do_execute"]
OBSERVED: dict[str, Way] = {
    **{name: listening(name) for name in EVENTS},
    "every engine": listening("after_cursor_execute", everywhere=True),
    "of a package with a name like ours": listening("after_cursor_execute", listener=hear_too),
    "of a type in C": listening("after_cursor_execute", listener="{}".format),
    "log": logging_info,
    "echo": echoing,
    "replaced": replaced,
    "cursors": with_cursors_of_its_own,
    "dialect": with_a_dialect_of_its_own,
    "translated": translated,
}


@pytest.mark.parametrize("way", OBSERVED)
def test_where_somebody_looks_on_it_goes_through_sqlalchemy(
    way: str, engine: sa.Engine, jobs: Jobs, straight: list[str]
) -> None:
    with OBSERVED[way](engine) as observed:
        work_one(observed, jobs)
    observed.dispose()
    assert not [text for text in straight if text.startswith(FINISH)]


@pytest.mark.parametrize("of", ["engine", "connection"])
def test_a_listener_that_comes_later_hears_the_next(of: str, engine: sa.Engine, straight: list[str]) -> None:
    statement = Direct(sa.select(sa.literal(1)))
    heard: list[str] = []

    def note(_connection: Any, _cursor: Any, text: str, *_rest: Any) -> None:
        heard.append(text)

    with engine.begin() as connection:
        target = engine if of == "engine" else connection
        statement.rows(connection, {})
        event.listen(target, "before_cursor_execute", note)
        statement.rows(connection, {})
        event.remove(target, "before_cursor_execute", note)
    assert (len(straight), len(heard)) == (1, 1)


def test_where_no_transaction_is_begun_sqlalchemy_begins_it(engine: sa.Engine, straight: list[str]) -> None:
    with engine.connect() as connection:
        Direct(sa.select(sa.literal(1))).rows(connection, {})
        assert connection.in_transaction()
        assert not straight


# -- what is sent ----------------------------------------------------------------------------------------------

A, B = sa.bindparam("a", type_=sa.Integer), sa.bindparam("b", type_=sa.Integer)
ID = uuid.uuid4()
VALUES: dict[str, tuple[sa.Executable, dict[str, Any]]] = {
    "twice": (sa.select((A + B).label("x"), (A - B).label("y")), {"a": 5, "b": 3}),
    "percent": (sa.select((A % 4).label("x"), sa.literal_column("'100% of it'").label("y")), {"a": 7}),
    "constants": (sa.select(sa.literal("o'clock").label("x"), sa.literal(None, sa.Text).label("y")), {}),
    "null": (sa.select(A.label("x"), sa.func.coalesce(B, 9).label("y")), {"a": None, "b": None}),
    "types": (
        sa.select(
            sa.cast(sa.bindparam("a", type_=sa.Uuid), sa.Text).label("x"),
            sa.cast(sa.bindparam("b", type_=sa.ARRAY(sa.Text)), sa.Text).label("y"),
        ),
        {"a": ID, "b": ["", "ä", "%s", "$1", '"', "\\", None]},
    ),
    "converted": (
        sa.select(
            sa.cast(sa.bindparam("a", type_=Seconds), sa.Text).label("x"),
            sa.cast(sa.bindparam("b", type_=UuidsAsText), sa.Text).label("y"),
        ),
        {"a": dt.timedelta(minutes=1.5), "b": [ID, ID]},
    ),
    "no rows": (sa.select(A.label("x"), A.label("y")).where(sa.false()), {"a": 1}),
}


@pytest.mark.parametrize("paramstyle", ["pyformat", "format"])
@pytest.mark.parametrize("name", VALUES)
def test_it_sends_and_reads_what_sqlalchemy_would(
    name: str, paramstyle: str, database_url: sa.URL, straight: list[str]
) -> None:
    statement, parameters = VALUES[name]
    engine = sa.create_engine(database_url, paramstyle=paramstyle)
    with engine.begin() as connection:
        found = by_sqlalchemy(statement, connection, parameters)
        rows = straight_on(statement, connection, parameters)
        assert [tuple(row) for row in rows] == [tuple(row) for row in found]
        assert [(row.x, row.y) for row in rows] == [(row.x, row.y) for row in found]
    engine.dispose()
    assert len(straight) == 1


def test_a_parameter_that_is_missing_is_not_sent_as_null(engine: sa.Engine) -> None:
    with engine.begin() as connection, pytest.raises(KeyError):
        Direct(sa.select(A + B)).rows(connection, {"a": 1})


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_it_is_part_of_the_connections_transaction(
    end: str, engine: sa.Engine, observer: Observer, straight: list[str]
) -> None:
    with engine.connect() as connection, connection.begin() as transaction:
        direct(sa.text("INSERT INTO enlist_job (id, kind) VALUES (gen_random_uuid(), 'a') RETURNING id")).rows(
            connection, {}
        )
        getattr(transaction, end)()
    assert straight
    assert observer.scalar("SELECT count(*) FROM enlist_job") == (end == "commit")


# -- what is raised --------------------------------------------------------------------------------------------

ERRORS: dict[str, sa.Executable] = {
    "conflict": sa.text("DO $$ BEGIN RAISE EXCEPTION 'refused' USING ERRCODE = '40001'; END $$"),
    "arithmetic": sa.select(sa.literal_column("1/0")),
    "no table": sa.select(sa.literal_column("1")).select_from(sa.table("nowhere")),
    "read-only": sa.text("INSERT INTO enlist_job DEFAULT VALUES"),
    "unreadable": sa.select(sa.literal_column("'infinity'::timestamptz")),
    "terminated": sa.select(sa.func.pg_terminate_backend(sa.func.pg_backend_pid())),
}


def told(engine: sa.Engine, send: Send, name: str) -> dict[str, Any]:
    """What is to be seen of an error, and of the connection after it."""
    with engine.connect() as connection:
        connection.begin()
        if name == "read-only":  # the transaction, or where each statement is one of its own all of them
            connection.exec_driver_sql("SET default_transaction_read_only = on; SET TRANSACTION READ ONLY")
        with pytest.raises(sa.exc.DBAPIError) as caught:
            send(ERRORS[name], connection, {})
        error = caught.value
        assert error.__cause__ is error.orig
        return {
            "class": (type(error), type(error.orig)),
            "text": str(error).splitlines()[0],
            "lost": (error.connection_invalidated, connection.invalidated),
        }


@pytest.mark.parametrize("workers", [False, True], ids=["an application's engine", "the worker's"])
@pytest.mark.parametrize("name", ERRORS)
def test_its_errors_are_sqlalchemys(name: str, workers: bool, engine: sa.Engine, straight: list[str]) -> None:
    used = housekeeping_engine(engine, None) if workers else engine
    assert told(used, straight_on, name) == told(used, by_sqlalchemy, name)
    assert len(straight) == 1
    used.dispose()


def test_the_others_of_a_pool_are_dropped_with_one_that_is_lost(engine: sa.Engine) -> None:
    with engine.connect() as first, engine.connect() as second:
        first.begin()
        other = second.connection.driver_connection
        second.close()
        with pytest.raises(sa.exc.DBAPIError):
            direct(ERRORS["terminated"]).rows(first, {})
    with engine.connect() as connection:
        assert connection.connection.driver_connection is not other


def test_a_conflict_at_the_last_statement_runs_the_handler_again(
    engine: sa.Engine, jobs: Jobs, observer: Observer
) -> None:
    """As one that any other statement of its transaction meets."""
    observer.execute(
        """
        CREATE SEQUENCE tries;
        CREATE FUNCTION conflict() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF nextval('tries') < 3 THEN
                RAISE EXCEPTION 'try again' USING ERRCODE = '40001';
            END IF;
            RETURN NEW;
        END $$;
        CREATE TRIGGER conflict BEFORE UPDATE ON enlist_job FOR EACH ROW WHEN (NEW.status = 'done')
        EXECUTE FUNCTION conflict()
        """
    )
    work_one(engine, jobs)
    assert observer.scalar("SELECT attempt FROM enlist_job") == 1


def test_a_swallowed_error_is_still_told(
    engine: sa.Engine, jobs: Jobs, observer: Observer, straight: list[str]
) -> None:
    handlers = HandlerRegistry()

    @handlers.handler("work")
    def work(session: Session, job: Job[Any]) -> None:
        with pytest.raises(sa.exc.DBAPIError) as caught:
            session.execute(sa.text("SELECT 1/0"))
        assert isinstance(caught.value.orig, errors.DivisionByZero)

    jobs.add("work", max_attempts=1)
    Worker(engine, handlers).drain(20)
    assert any(text.startswith(FINISH) for text in straight)
    assert "swallowed" in str(observer.scalar("SELECT last_error FROM enlist_job"))


@pytest.mark.parametrize("heard", [False, True], ids=["straight", "heard"])
def test_a_commit_past_the_session_within_the_last_flush_is_refused(
    heard: bool, engine: sa.Engine, jobs: Jobs, observer: Observer
) -> None:
    """The last moment at which a handler's own code runs before the UPDATE."""

    class Committing(Session):
        """Its flush ends the transaction on the driver's connection."""

    @event.listens_for(Committing, "after_flush")
    def commit(session: Session, _context: Any) -> None:
        driver_connection: Any = session.connection().connection.driver_connection
        driver_connection.commit()

    handlers = HandlerRegistry()

    @handlers.handler("work")
    def work(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))

    jobs.add("work", max_attempts=1)
    with listening("before_cursor_execute")(engine) if heard else nullcontext():
        Worker(sessionmaker(engine, class_=Committing), handlers).drain(20)
    assert jobs.counts() == {"dead": 1}
    assert "COMMIT or ROLLBACK on the driver's connection" in str(observer.scalar("SELECT last_error FROM enlist_job"))


def test_who_is_interrupted_in_it_gives_the_connection_up(engine: sa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(psycopg.RawCursor[Any]):
        def execute(self, *_arguments: Any, **_options: Any) -> Any:
            raise KeyboardInterrupt

    monkeypatch.setattr(psycopg, "RawCursor", Interrupted)
    with engine.connect() as connection:
        connection.begin()
        with pytest.raises(KeyboardInterrupt):
            Direct(sa.select(sa.literal(1))).rows(connection, {})
        assert connection.invalidated


# -- a lease that is lost --------------------------------------------------------------------------------------


@pytest.mark.parametrize("pipeline", [False, True], ids=["", "in a pipeline"])
@pytest.mark.parametrize("way", ["another token", "a trigger"])
def test_without_the_lease_nothing_is_committed(
    way: str, pipeline: bool, engine: sa.Engine, jobs: Jobs, observer: Observer
) -> None:
    handlers = HandlerRegistry()
    left_open = ExitStack()  # for as long as the connection lives

    @handlers.handler("work")
    def work(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))
        session.flush()
        if pipeline:
            driver_connection: Any = session.connection().connection.driver_connection
            left_open.enter_context(driver_connection.pipeline())
        if way == "another token":
            observer.execute("UPDATE enlist_job SET lease_token = lease_token + 5")

    if way == "a trigger":
        observer.execute(
            """
            CREATE FUNCTION suppress() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
            CREATE TRIGGER suppress BEFORE UPDATE ON enlist_job FOR EACH ROW WHEN (NEW.status = 'done')
            EXECUTE FUNCTION suppress()
            """
        )
    job_id = jobs.add("work")
    lost = threading.Event()

    def hear_of(event: JobEvent) -> None:
        if event.name is EventName.LEASE_LOST:
            lost.set()

    with running(Worker(engine, handlers, events=hear_of)):
        assert lost.wait(10)
    assert jobs.effects(job_id) == []
    assert observer.scalar("SELECT status FROM enlist_job") != "done"
    with suppress(psycopg.Error):
        left_open.close()
