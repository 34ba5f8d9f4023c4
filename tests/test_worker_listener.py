"""The connection that hears wakes: lost, frozen, never there or of no use, the worker goes on, and says how it is."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import URL, Engine
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from enlist import ConfigurationError, HandlerRegistry, Health, Job, JobRecord, JobRepository, Worker
from enlist import _listener as listener_module
from enlist._statements import statements_for
from tests.shop import Effect
from tests.support import Observer, wait_until
from tests.support.databases import Databases
from tests.support.jobs import Jobs, running
from tests.support.tcp_proxy import TcpProxy

STATEMENTS = statements_for(sa.inspect(JobRecord).local_table)

SOON = 3
"""Seconds; a tenth of the poll interval."""

NOT_EFFECTIVE = (
    "LISTEN is not effective (a transaction-mode pooler?): jobs are found by polling; give listen_bind= a direct"
    " connection"
)


@pytest.fixture
def jobs(observer: Observer) -> Jobs:
    return Jobs(observer)


@pytest.fixture
def network(database_url: URL) -> Iterator[TcpProxy]:
    with TcpProxy(database_url) as proxy:
        yield proxy


@pytest.fixture
def through(network: TcpProxy) -> Iterator[Engine]:
    """An engine whose connections go through the network."""
    engine = sa.create_engine(network.url)
    yield engine
    engine.dispose()


def effects() -> HandlerRegistry:
    handlers = HandlerRegistry()

    @handlers.handler("work")
    def work(session: Session, job: Job[Any]) -> None:
        session.add(Effect(job_id=job.id))

    return handlers


def worker(engine: Engine, **options: Any) -> Worker:
    return Worker(engine, effects(), **{"poll_interval": 30, **options})


def enqueued(jobs: Jobs) -> Any:
    """A job that another process has enqueued."""
    job_id = jobs.add("work")
    jobs._observer.execute("SELECT pg_notify(%s, 'default')", STATEMENTS.channel)
    return job_id


def listener_pid(observer: Observer) -> int:
    return int(
        observer.wait_for(
            "SELECT coalesce(max(pid), 0) FROM pg_stat_activity"
            " WHERE datname = current_database() AND starts_with(query, 'LISTEN ')"
        )
    )


# -- lost connections --------------------------------------------------------------------------------------------------


def test_a_killed_connection_is_replaced_and_what_was_missed_is_looked_for(
    engine: Engine, jobs: Jobs, observer: Observer, caplog: pytest.LogCaptureFixture
) -> None:
    with running(one := worker(engine)):
        wait_until(lambda: one.health().listening)
        seen: list[bool] = []
        watching = threading.Thread(target=_watch, args=(one, seen))
        watching.start()
        observer.execute("SELECT pg_terminate_backend(%s, 5000)", listener_pid(observer))
        in_the_gap = jobs.add("work")
        assert jobs.wait(in_the_gap, timeout=SOON)["status"] == "done"
        watching.join(10)
        assert seen == [True, False, True]
        assert jobs.wait(enqueued(jobs), timeout=SOON)["status"] == "done"
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("the worker's listener failed, trying again: ")


def _watch(worker: Worker, seen: list[bool]) -> None:
    end = time.monotonic() + 10
    while len(seen) < 3 and time.monotonic() < end:
        listening = worker.health().listening
        if not seen or seen[-1] != listening:
            seen.append(listening)
        time.sleep(0.0005)


def test_a_cancellation_that_was_missed_is_found_when_it_listens_again(
    engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    handlers = effects()
    inside = threading.Event()
    told: list[bool] = []

    @handlers.handler("slow")
    def slow(session: Session, job: Job[Any]) -> None:
        inside.set()
        wait_until(lambda: job.cancel_requested, 10)
        told.append(True)

    job_id = jobs.add("slow")
    with running(one := Worker(engine, handlers, poll_interval=30)):
        wait_until(lambda: one.health().listening)
        assert inside.wait(SOON)
        with Session(engine) as session, session.begin():
            JobRepository(notify=None).cancel(session, job_id)
        observer.execute("SELECT pg_terminate_backend(%s, 5000)", listener_pid(observer))
        wait_until(lambda: told, SOON)
    assert jobs.status(job_id) == "cancelled"


def test_a_frozen_connection_is_noticed_in_time_and_replaced(
    engine: Engine, through: Engine, network: TcpProxy, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    """No byte comes any more, and no error: two periods of the heartbeat are as long as that may last."""
    lease = 1.5
    with running(one := worker(engine, listen_bind=through, lease=lease)):
        wait_until(lambda: one.health().listening)
        network.freeze(new=False)
        frozen = time.monotonic()
        job_id = enqueued(jobs)
        assert jobs.wait(job_id, timeout=10)["status"] == "done"
        assert time.monotonic() - frozen < 2 * lease / 3 + SOON
        wait_until(lambda: one.health().listening, SOON)
        assert jobs.wait(enqueued(jobs), timeout=SOON)["status"] == "done"
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("the worker's listener failed, trying again: ")
    assert "no answer in 0.5 seconds: the network has lost the connection" in message


@pytest.mark.slow
def test_a_silent_connection_that_lives_is_kept(
    engine: Engine, through: Engine, network: TcpProxy, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    with running(one := worker(engine, listen_bind=through, lease=0.3)):
        wait_until(lambda: one.health().listening)
        threading.Event().wait(1.3)  # it is asked twice
        assert one.health().listening
        assert jobs.wait(enqueued(jobs), timeout=SOON)["status"] == "done"
    assert network.accepted == 1
    assert "failed" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("new", [False, True])
def test_a_frozen_network_does_not_keep_stop_waiting(
    engine: Engine, through: Engine, network: TcpProxy, new: bool
) -> None:
    one = worker(engine, listen_bind=through, lease=1.5)
    with running(one):
        wait_until(lambda: one.health().listening)
        network.freeze(new=new)
        if new:
            wait_until(lambda: not one.health().listening)  # it connects, in vain
        asked = time.monotonic()
        assert one.stop()
        assert time.monotonic() - asked < SOON
    network.cut()


@pytest.mark.slow
def test_a_worker_works_while_its_listener_cannot_connect(
    engine: Engine, through: Engine, network: TcpProxy, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    network.refuse()
    with running(one := worker(engine, listen_bind=through, poll_interval=0.1)):
        assert jobs.wait(jobs.add("work"), timeout=SOON)["status"] == "done"
        assert one.health() == Health(running=True, listening=False, jobs=0, stuck=0, slots=10, free=10)
        network.accept()
        wait_until(lambda: one.health().listening, 10)
    assert caplog.text.count("listener failed, trying again") == 1
    assert NOT_EFFECTIVE not in caplog.text


# -- of no use ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_listen_that_nobody_hears_is_said_once_and_jobs_are_found_by_polling(
    engine: Engine,
    empty_database_url: URL,
    jobs: Jobs,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here it is because NOTIFY reaches one database only; behind a pooler it is another connection that listens."""
    monkeypatch.setattr(listener_module, "TEST_SECONDS", 0.2)
    monkeypatch.setattr(listener_module, "RETEST_SOON_SECONDS", 0.1)
    elsewhere = sa.create_engine(empty_database_url)
    caplog.set_level(logging.INFO)
    with running(one := worker(engine, listen_bind=elsewhere, poll_interval=0.1)):
        listener = one._running.listener  # type: ignore[union-attr]
        wait_until(lambda: NOT_EFFECTIVE in caplog.text)
        first = listener._expected
        wait_until(lambda: listener._expected != first)  # it is tested again
        assert not one.health().listening
        assert jobs.wait(jobs.add("work"), timeout=SOON)["status"] == "done"
        # What would have been heard is heard: as if the pooler had been taken away.
        monkeypatch.setattr(one._running.database, "execute", _notifying(elsewhere))  # type: ignore[union-attr]
        wait_until(lambda: one.health().listening)
    assert caplog.text.count(NOT_EFFECTIVE) == 1
    assert "LISTEN is effective again" in caplog.text
    elsewhere.dispose()


def _notifying(engine: Engine) -> Any:
    def execute(statement: Any, parameters: Any) -> Any:
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            return connection.execute(statement, parameters).all() if "pg_notify" in str(statement) else []

    return execute


def test_the_self_test_wakes_nobody(
    engine: Engine, jobs: Jobs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a hundred workers each tests its own connection."""
    monkeypatch.setattr(listener_module, "RETEST_SECONDS", 0.05)
    with running(first := worker(engine), second := worker(engine)):
        wait_until(lambda: first.health().listening and second.health().listening)
        woken: list[int] = []
        for one in (first, second):
            monkeypatch.setattr(one._running.claimer, "wake", lambda: woken.append(1))  # type: ignore[union-attr]
        expected = {one: one._running.listener._expected for one in (first, second)}  # type: ignore[union-attr]
        for one, before in expected.items():
            wait_until(lambda one=one, before=before: one._running.listener._expected != before)  # type: ignore[misc]
        assert woken == []
        assert first.health().listening
    assert caplog.text == ""


# -- listen_bind= ------------------------------------------------------------------------------------------------------


def test_listen_bind_carries_the_listening_and_nothing_else(engine: Engine, database_url: URL, jobs: Jobs) -> None:
    direct = sa.create_engine(database_url, connect_args={"application_name": "direct"})
    with running(one := worker(engine, listen_bind=direct)):
        wait_until(lambda: one.health().listening)
        assert jobs.wait(enqueued(jobs), timeout=SOON)["status"] == "done"
        queries = jobs._observer.rows("SELECT query FROM pg_stat_activity WHERE application_name = 'direct'")
        assert len(queries) == 1
        assert queries[0][0].startswith("LISTEN ")
    direct.dispose()


def test_listen_bind_may_be_for_another_driver(engine: Engine, database_url: URL, jobs: Jobs) -> None:
    other = create_async_engine(database_url.set(drivername="postgresql+asyncpg"))
    with running(one := worker(engine, listen_bind=other.sync_engine)):
        wait_until(lambda: one.health().listening)
        assert jobs.wait(enqueued(jobs), timeout=SOON)["status"] == "done"


@pytest.mark.parametrize("of", ["url", "async engine", "sqlite", "sessionmaker"])
def test_listen_bind_that_is_no_engine_is_refused(engine: Engine, database_url: URL, of: str) -> None:
    given: Any = {
        "url": database_url,
        "async engine": create_async_engine(database_url),
        "sqlite": sa.create_engine("sqlite://"),
        "sessionmaker": sa.orm.sessionmaker(engine),
    }[of]
    match = "PostgreSQL only" if of == "sqlite" else "listen_bind= takes an Engine, not"
    with pytest.raises(ConfigurationError, match=match):
        worker(engine, listen_bind=given)


def test_connections_of_a_creator_are_given_back_as_they_were(
    engine: Engine, server: Databases, database_url: URL, jobs: Jobs
) -> None:
    """A ``creator`` may hand out connections of a pool: what is set up for listening is undone."""
    lent = sa.create_engine(database_url)
    made: list[Any] = []

    def create() -> Any:
        connection = lent.raw_connection()
        made.append(connection)
        return connection.driver_connection

    listening = sa.create_engine("postgresql+psycopg://", creator=create)
    with running(one := worker(engine, listen_bind=listening)):
        wait_until(lambda: one.health().listening)
    assert len(made) == 1
    assert made[0].driver_connection.closed
    lent.dispose()


# -- health ------------------------------------------------------------------------------------------------------------


def test_health_tells_how_the_worker_is(engine: Engine, jobs: Jobs) -> None:
    handlers = effects()
    inside, go = threading.Semaphore(0), threading.Event()

    @handlers.handler("slow")
    def slow(session: Session, job: Job[Any]) -> None:
        inside.release()
        go.wait(20)

    @handlers.handler("stuck", timeout=0.1)
    def stuck(session: Session, job: Job[Any]) -> None:
        inside.release()
        go.wait(20)

    one = Worker(engine, handlers, queues={"default": 3, "other": 1}, poll_interval=0.05, shutdown_timeout=20)
    idle = Health(running=False, listening=False, jobs=0, stuck=0, slots=4, free=0)
    assert one.health() == idle
    try:
        with running(one):
            wait_until(lambda: one.health() == Health(True, True, 0, 0, 4, 4))
            jobs.add("slow")
            assert inside.acquire(timeout=SOON)
            wait_until(lambda: one.health() == Health(True, True, 1, 0, 4, 3))
            jobs.add("stuck", max_attempts=1)
            assert inside.acquire(timeout=SOON)
            wait_until(lambda: one.health() == Health(True, True, 1, 1, 4, 2))
            stopping = threading.Thread(target=one.stop)
            stopping.start()
            wait_until(lambda: one._running.slots._closed)  # type: ignore[union-attr]
            assert one.health().running
            go.set()
            stopping.join(10)
            assert one.health() == idle
    finally:
        go.set()
