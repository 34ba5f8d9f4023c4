"""A network that swallows everything and closes nothing: no error ever comes, and the worker must not wait for one."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
import tenacity
from sqlalchemy import URL, Engine, create_engine
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from enlist import HandlerRegistry, Job, JobRecord, Worker
from enlist._database import Database
from enlist._engines import housekeeping_engine
from tests.shop import Effect
from tests.support import Observer, wait_until
from tests.support.jobs import Jobs, running
from tests.support.tcp_proxy import TcpProxy

LEASE = 4
"""So a statement may take 1 second, a search 2."""

STOP_SECONDS = 30
"""Bounds what else would last for ever."""


@pytest.fixture
def jobs(observer: Observer) -> Jobs:
    return Jobs(observer)


@pytest.fixture
def network(database_url: URL) -> Iterator[TcpProxy]:
    with TcpProxy(database_url) as network:
        yield network


@pytest.fixture
def distant(network: TcpProxy) -> Iterator[Engine]:
    """An engine behind the network."""
    engine = create_engine(network.url, pool_size=10, connect_args={"connect_timeout": 2})
    yield engine
    engine.dispose()


@pytest.fixture
def distant_database(distant: Engine) -> Iterator[Database]:
    database = Database(housekeeping_engine(distant, None), JobRecord, lease=LEASE)
    database.open()
    yield database
    database.close()


def handlers_for(runs: Counter[Any], *, timeout: float | None = None) -> HandlerRegistry:
    handlers = HandlerRegistry()
    options: dict[str, Any] = {"wait": tenacity.wait_fixed(0.1), "timeout": timeout}

    @handlers.handler("sync", **options)
    def write(session: Session, job: Job[Any]) -> None:
        runs[job.id] += 1
        session.add(Effect(job_id=job.id, attempt=job.attempt))

    @handlers.handler("grouped", commit_every=10, **options)
    def write_with_others(session: Session, job: Job[Any]) -> None:
        write(session, job)

    @handlers.handler("async", **options)
    async def write_async(session: AsyncSession, job: Job[Any]) -> None:
        runs[job.id] += 1
        session.add(Effect(job_id=job.id, attempt=job.attempt))

    @handlers.handler("away", **options)
    def away(session: Session, job: Job[Any]) -> None:
        """Nothing to commit: its end is written by the worker's own connections."""
        runs[job.id] += 1

    @handlers.handler("failing", **options)
    def failing(session: Session, job: Job[Any]) -> None:
        runs[job.id] += 1
        if job.attempt == 1:
            raise RuntimeError("the first time")

    return handlers


# -- one statement ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_statement_without_an_answer_ends(network: TcpProxy, distant_database: Database) -> None:
    """Its connection is cut; the next one is new, and works."""
    network.freeze_at(b"pg_sleep")
    with pytest.raises(OperationalError, match=r"no answer within 1 seconds; the connection is cut") as caught:
        distant_database.execute(sa.text("SELECT pg_sleep(0)"), {})
    assert caught.value.connection_invalidated
    assert distant_database.execute(sa.text("SELECT 1"), {}) == [(1,)]


@pytest.mark.slow
def test_a_statement_that_the_server_does_not_end_is_cancelled(distant_database: Database, observer: Observer) -> None:
    """It must not go on there without anybody who waits for it, with the locks that it has."""
    with pytest.raises(OperationalError, match=r"not done within 1 seconds; it was cancelled") as caught:
        distant_database.execute(sa.text("SELECT pg_sleep(60)"), {})
    assert caught.value.connection_invalidated
    observer.wait_for("SELECT count(*) = 0 FROM pg_stat_activity WHERE wait_event = 'PgSleep'")


@pytest.mark.slow
def test_a_transaction_whose_commit_gets_no_answer_ends(network: TcpProxy, distant_database: Database) -> None:
    network.freeze_at(b"COMMIT")
    with pytest.raises(OperationalError, match="no answer within 2 seconds"), distant_database.transaction() as made:
        made.execute(sa.text("SELECT 1"))


@pytest.mark.slow
def test_a_rollback_that_gets_no_answer_ends_too(network: TcpProxy, distant_database: Database) -> None:
    network.freeze_at(b"ROLLBACK")
    with pytest.raises(OperationalError), distant_database.transaction() as made:
        made.execute(sa.text("SELECT 1/0"))
    assert distant_database.execute(sa.text("SELECT 1"), {}) == [(1,)]


@pytest.mark.slow
def test_the_first_connection_is_no_exception(network: TcpProxy, distant: Engine) -> None:
    """SQLAlchemy asks the server some things before it gives that one out."""
    database = Database(housekeeping_engine(distant, None), JobRecord, lease=LEASE)
    network.freeze_at(b"pg_catalog.version()")
    with pytest.raises(OperationalError):
        database.open()
    assert network.frozen.is_set()
    database.open()
    database.close()


@pytest.mark.parametrize("given", [{}, {"connect_timeout": 2}])
@pytest.mark.slow
def test_connecting_ends(given: dict[str, Any], network: TcpProxy) -> None:
    """Whatever psycopg's default is: 130 seconds."""
    engine = create_engine(network.url, connect_args=given)
    database = Database(housekeeping_engine(engine, None), JobRecord, lease=LEASE)
    network.freeze()
    began = time.monotonic()
    with pytest.raises(OperationalError, match="timeout expired"):
        database.execute(sa.text("SELECT 1"), {})
    assert time.monotonic() - began < 15
    database.close()
    engine.dispose()


@pytest.mark.slow
def test_what_is_done_in_time_is_left_alone(distant_database: Database) -> None:
    """The connection is kept, and nothing is cancelled later."""
    pid = distant_database.execute(sa.text("SELECT pg_backend_pid()"), {})
    for _ in range(3):
        distant_database.execute(sa.text("SELECT pg_sleep(0.5)"), {})
    assert distant_database.execute(sa.text("SELECT pg_backend_pid()"), {}) == pid


# -- one loop ----------------------------------------------------------------------------------------------------

KEYED: dict[str, Any] = {"concurrency_key": "k", "concurrency_limit": 1}

STATEMENTS: dict[str, tuple[bytes, str, dict[str, Any]]] = {
    "claim": (b"WITH first_look AS", "away", {}),
    "look at keys": (b"WITH marks AS", "away", KEYED),
    "claim of keys": (b"WITH placed AS", "away", KEYED),
    "completion": (b"UPDATE enlist_job SET status='done'", "away", {}),
    "failure": (b"ordered.delay", "failing", {}),
    "look of the reaper": (b"FOR SHARE SKIP LOCKED", "away", {}),
    "reaper": (b"WITH expired AS", "away", {"status": "running", "attempt": 1, "locked_until": "2000-01-01 00:00+00"}),
    "start of a careful job": (b"SET started_at=", "away", {"lost": 1}),
}
"""By the loop: what its statement has in it, and a job that it comes to. (Where it is a claim of keys, the server holds
their locks until the transaction has idled for too long: it does not learn that its client is gone.)"""


@pytest.mark.slow
@pytest.mark.parametrize("name", STATEMENTS)
def test_a_loop_that_gets_no_answer_goes_on_with_a_new_connection(
    name: str, network: TcpProxy, distant: Engine, jobs: Jobs, observer: Observer
) -> None:
    """The one connection stays silent for good. The job is done, and so are others meanwhile."""
    marker, kind, columns = STATEMENTS[name]
    runs: Counter[Any] = Counter()
    worker = Worker(distant, handlers_for(runs), lease=LEASE, poll_interval=0.1, reaper_interval=0.3)
    with running(worker):
        network.freeze_at(marker)
        job_id = jobs.add(kind, **columns)
        assert network.frozen.wait(5)
        jobs.wait(job_id, timeout=15)
        others = jobs.add_many("sync", 5)
        jobs.wait_all()
    assert all(runs[other] == 1 for other in others)
    assert jobs.effects_by_job() == dict.fromkeys(others, 1)


@pytest.mark.slow
def test_a_heartbeat_that_gets_no_answer_is_sent_again_before_the_lease_ends(
    network: TcpProxy, distant: Engine, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    """The lease is kept, and claims and completions go on."""
    release = threading.Event()
    runs: Counter[Any] = Counter()
    handlers = handlers_for(runs)

    @handlers.handler("long")
    def long(session: Session, job: Job[Any]) -> None:
        runs[job.id] += 1
        assert release.wait(30)
        session.add(Effect(job_id=job.id, attempt=job.attempt))

    with running(Worker(distant, handlers, lease=8, poll_interval=0.1)):
        job_id = jobs.add("long")
        wait_until(lambda: runs[job_id])
        network.freeze_at(b"SET locked_until=(statement_timestamp()")
        first = jobs.row(job_id)["locked_until"]
        assert network.frozen.wait(5)
        meanwhile = jobs.add("sync")
        jobs.wait(meanwhile)
        second = jobs.row(job_id)["locked_until"]  # the frozen one was carried out
        wait_until(lambda: jobs.row(job_id)["locked_until"] > max(first, second), 8)
        release.set()
        assert jobs.wait(job_id)["attempt"] == 1
    assert runs == {job_id: 1, meanwhile: 1}
    assert "heartbeat failed, trying again: OperationalError / NoAnswer: no answer within 2 seconds" in caplog.text


# -- a handler's session -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("marker", [b"INSERT INTO shop_effect", b"COMMIT"])
@pytest.mark.parametrize("driver", ["sync", "grouped", "psycopg", "asyncpg"])
def test_a_handlers_session_that_gets_no_answer(
    driver: str, marker: bytes, network: TcpProxy, distant: Engine, jobs: Jobs
) -> None:
    """Its timeout ends the attempt; the job is done by another, or was by the COMMIT that had no answer."""
    runs: Counter[Any] = Counter()
    kind = driver if driver in {"sync", "grouped"} else "async"
    bind: Any = create_async_engine(network.url.set(drivername=f"postgresql+{driver}")) if kind == "async" else distant
    handlers = handlers_for(runs, timeout=1.0)
    worker = Worker(bind, handlers, sync_bind=distant, lease=LEASE, poll_interval=0.1, shutdown_timeout=1)
    with running(worker):
        network.freeze_at(marker)
        job_id = jobs.add(kind)
        assert network.frozen.wait(5)
        assert jobs.wait(job_id, timeout=20)["status"] == "done"
        meanwhile = jobs.add(kind)
        jobs.wait(meanwhile)
        network.thaw()  # what was given up comes back, and may do no harm
    assert jobs.effects_by_job() == {job_id: 1, meanwhile: 1}
    assert runs[job_id] <= 2


# -- the whole network -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("how", ["thaw", "new path"])
def test_a_network_that_stands_still_for_longer_than_the_lease(
    how: str, network: TcpProxy, distant: Engine, jobs: Jobs, observer: Observer
) -> None:
    """No job is lost or doubled, and the worker goes on, when the network does or when there is another way."""
    runs: Counter[Any] = Counter()
    ids = jobs.add_many("sync", 200)
    worker = Worker(distant, handlers_for(runs, timeout=2), queues={"default": 4}, lease=LEASE, poll_interval=0.1)
    with running(worker):
        observer.wait_for("SELECT count(*) > 20 FROM enlist_job WHERE status = 'done'")
        network.freeze(new=how == "thaw")
        if how == "thaw":
            # The leases are over: nobody else is there to take the jobs but this worker, when it is back.
            observer.wait_for(
                "SELECT count(*) = 0 FROM enlist_job WHERE locked_until > statement_timestamp()", timeout=15
            )
            network.thaw()
        jobs.wait_all(timeout=25)
        network.thaw()
    assert jobs.effects_by_job() == dict.fromkeys(ids, 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sync", "asyncpg"])
def test_a_start_over_a_network_that_stands_still(
    kind: str, network: TcpProxy, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said what is wrong; a stop is heeded; and when the network is back the worker starts."""
    caplog.set_level(logging.INFO, "enlist")
    network.freeze()
    url = network.url
    engine: Any = (
        create_engine(url, connect_args={"connect_timeout": 2})
        if kind == "sync"
        else create_async_engine(url.set(drivername=f"postgresql+{kind}"))
    )
    worker = Worker(engine, handlers_for(Counter()), lease=LEASE, poll_interval=0.1)
    for thaw in (False, True):
        starting = threading.Thread(target=worker.start)
        starting.start()
        wait_until(lambda: "failed, trying again" in caplog.text, 15)
        if thaw:
            network.thaw()
        else:
            worker.stop()
            caplog.clear()
        starting.join(20)
        assert not starting.is_alive()
    jobs.wait(jobs.add("sync"))
    worker.stop()
    if kind == "sync":
        engine.dispose()


@pytest.mark.slow
@pytest.mark.parametrize(("driver", "busy"), [("sync", False), ("sync", True), ("psycopg", True), ("asyncpg", True)])
def test_a_stop_over_a_network_that_stands_still(
    driver: str, busy: bool, network: TcpProxy, engine: Engine, jobs: Jobs
) -> None:
    """It returns, whatever hangs. The jobs are another worker's when their leases have ended."""
    runs: Counter[Any] = Counter()
    kind = "sync" if driver == "sync" else "async"
    url = network.url.set(drivername=f"postgresql+{driver}")
    distant = create_engine(network.url, pool_size=10, connect_args={"connect_timeout": 2})
    bind: Any = distant if driver == "sync" else create_async_engine(url)
    ids = jobs.add_many(kind, 600 if busy else 3)
    worker = Worker(bind, handlers_for(runs), sync_bind=distant, lease=LEASE, poll_interval=0.1, shutdown_timeout=1)
    worker.start()
    if busy:
        wait_until(lambda: jobs.counts().get("done", 0) > 20)
    else:
        jobs.wait_all()
    network.freeze()
    began = time.monotonic()
    worker.stop()
    assert time.monotonic() - began < STOP_SECONDS
    network.thaw()
    network.cut()
    with running(Worker(engine, handlers_for(runs), queues={"default": 10}, lease=LEASE, reaper_interval=0.5)):
        jobs.wait_all(timeout=30)
    assert jobs.effects_by_job() == dict.fromkeys(ids, 1)
    distant.dispose()
