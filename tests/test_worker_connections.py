"""Lost connections: the worker comes back by itself, and each job is done once."""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
import tenacity
from sqlalchemy import URL, Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from enlist import HandlerRegistry, Job, Worker
from enlist.demo.server import EmbeddedServer
from enlist.migrations import migrate
from tests.shop import Base, Effect
from tests.support import Observer, wait_until
from tests.support.jobs import Jobs, running
from tests.support.tcp_proxy import TcpProxy


@pytest.fixture
def jobs(observer: Observer) -> Jobs:
    return Jobs(observer)


@pytest.fixture
def network(database_url: URL) -> Iterator[TcpProxy]:
    with TcpProxy(database_url) as network:
        yield network


def prepare(url: URL) -> None:
    engine = create_engine(url, poolclass=NullPool)
    with engine.begin() as connection:
        migrate(connection)
        Base.metadata.create_all(connection)


def effects(runs: Counter[Any] | None = None) -> HandlerRegistry:
    handlers = HandlerRegistry()

    @handlers.handler("work", wait=tenacity.wait_fixed(0.1))
    def work(session: Session, job: Job[Any]) -> None:
        if runs is not None:
            runs[job.id] += 1
        session.add(Effect(job_id=job.id, attempt=job.attempt))

    @handlers.handler("async", wait=tenacity.wait_fixed(0.1))
    async def asynchronous(session: AsyncSession, job: Job[Any]) -> None:
        if runs is not None:
            runs[job.id] += 1
        session.add(Effect(job_id=job.id, attempt=job.attempt))

    return handlers


# -- at the start --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_waits_for_a_server_that_is_not_there_yet(
    private_server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Tried again with growing pauses, said once; then it works as if nothing had been."""
    caplog.set_level(logging.INFO, "enlist")
    url = private_server.url()
    prepare(url)
    with Observer(url) as observer:
        job_id = Jobs(observer).add("work")
    private_server.stop()
    engine = create_engine(url)
    attempts: list[int] = []
    sa.event.listen(engine, "do_connect", lambda *args: attempts.append(1))
    worker = Worker(engine, _plain_only(), poll_interval=0.05)
    starting = threading.Thread(target=worker.start)
    starting.start()
    try:
        wait_until(lambda: "failed, trying again" in caplog.text)
        wait_until(lambda: len(attempts) >= 4)
        private_server.start()
        starting.join(10)
        assert not starting.is_alive()
        with Observer(url) as observer:
            assert Jobs(observer).wait(job_id)["status"] == "done"
    finally:
        worker.stop()
        starting.join()
        engine.dispose()
    assert len(re.findall(r"the worker.s connection to .* failed, trying again", caplog.text)) == 1
    assert "works again after" in caplog.text


def _plain_only() -> HandlerRegistry:
    handlers = HandlerRegistry()
    handlers.handler("work", wait=tenacity.wait_fixed(0.1))(effects()["work"].function)
    return handlers


@pytest.mark.slow
def test_a_closed_port_is_waited_for(network: TcpProxy, jobs: Jobs, caplog: pytest.LogCaptureFixture) -> None:
    job_id = jobs.add("async")
    network.refuse()
    engine = create_engine(network.url)
    worker = Worker(engine, effects(), poll_interval=0.05)
    starting = threading.Thread(target=worker.start)
    starting.start()
    try:
        wait_until(lambda: "failed, trying again" in caplog.text)
        network.accept()
        starting.join(10)
        assert jobs.wait(job_id)["status"] == "done"
    finally:
        worker.stop()
        starting.join()
        engine.dispose()


# -- in the middle -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_it_survives_a_restart_of_the_server(mode: Any, private_server: EmbeddedServer) -> None:
    """With jobs running: afterwards all are done, each once."""
    url = private_server.url()
    prepare(url)
    engine = create_engine(url, pool_size=10)
    with Observer(url) as observer:
        ids = Jobs(observer).add_many("work", 150) + Jobs(observer).add_many("async", 150)
    with running(Worker(engine, effects(), queues={"default": 6}, lease=1, poll_interval=0.1)):
        with Observer(url) as observer:
            observer.wait_for("SELECT count(*) > 50 FROM enlist_job WHERE status = 'done'")
        private_server.restart(mode)
        with Observer(url) as observer:
            jobs = Jobs(observer)
            more = jobs.add_many("work", 20)
            jobs.wait_all(timeout=15)
            assert jobs.effects_by_job() == dict.fromkeys([*ids, *more], 1)
    engine.dispose()


@pytest.mark.slow
def test_it_survives_a_network_that_comes_and_goes(network: TcpProxy, jobs: Jobs, observer: Observer) -> None:
    ids = jobs.add_many("work", 200) + jobs.add_many("async", 100)
    engine = create_engine(network.url, pool_size=10)
    with running(Worker(engine, effects(), queues={"default": 6}, lease=1, poll_interval=0.1)):
        for done in (50, 100, 150):
            observer.wait_for("SELECT count(*) >= %s FROM enlist_job WHERE status = 'done'", done, timeout=15)
            network.refuse()
            network.cut()
            network.accept()
        jobs.wait_all(timeout=15)
    engine.dispose()
    assert jobs.effects_by_job() == dict.fromkeys(ids, 1)


@pytest.mark.slow
def test_every_housekeeping_connection_may_be_killed(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    ids = jobs.add_many("work", 50)
    with running(Worker(engine, effects(), lease=1, poll_interval=0.05)):
        jobs.wait_all()
        for _ in range(3):
            observer.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            ids += jobs.add_many("work", 50)
            jobs.wait_all()
    assert jobs.effects_by_job() == dict.fromkeys(ids, 1)
    assert observer.scalar("SELECT max(attempt) FROM enlist_job") <= 2


# -- COMMIT --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["work", "async"])
def test_a_commit_that_never_arrives_is_no_success(kind: str, engine: Engine, jobs: Jobs, observer: Observer) -> None:
    """The server's process is killed within the COMMIT: nothing is there, so the job runs again."""
    observer.execute(
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN IF NEW.attempt = 1 AND NOT EXISTS (SELECT FROM killed) THEN PERFORM pg_sleep(30); END IF;"
        " RETURN NULL; END $$"
    )
    observer.execute("CREATE TABLE killed (pid integer)")
    observer.execute(
        "CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON shop_effect DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW EXECUTE FUNCTION slow()"
    )
    runs: Counter[Any] = Counter()
    job_id = jobs.add(kind)
    with running(Worker(engine, effects(runs), lease=5, poll_interval=0.05)):
        pid = observer.wait_for(
            "SELECT coalesce(max(pid), 0) FROM pg_stat_activity WHERE datname = current_database()"
            " AND wait_event = 'PgSleep'"
        )
        observer.execute("INSERT INTO killed VALUES (%s)", pid)
        assert jobs.effects(job_id) == []
        observer.execute("SELECT pg_terminate_backend(%s, 5000)", pid)
        row = jobs.wait(job_id)
    assert row["status"] == "done"
    assert len(jobs.effects(job_id)) == 1
    assert runs[job_id] == 2
