"""Workers are woken once jobs are committed; the producer is never delayed by it, and never fails."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import asyncpg  # type: ignore[import-untyped]
import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy import URL, Engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from enlist import JobRecord, JobRepository, notifier
from enlist._statements import statements_for
from enlist.demo.server import EmbeddedServer
from tests.jobs import Note, texts
from tests.support import Observer, StatementRecorder, wait_until

repo = JobRepository()
CHANNEL = statements_for(sa.inspect(JobRecord).local_table).channel

NOTIFIERS = (
    "SELECT count(*) FROM pg_stat_activity"
    " WHERE datname = current_database() AND query LIKE '%pg_notify%' AND pid <> pg_backend_pid()"
)


def commit(engine: Engine, *queues: str, repo: JobRepository = repo) -> None:
    with Session(engine) as session, session.begin():
        for queue in queues:
            repo.enqueue(session, Note(), queue=queue)


def test_a_commit_notifies_each_of_its_queues_once(engine: Engine, observer: Observer) -> None:
    observer.listen(CHANNEL)
    names = ["MyQueue", "queue with space", 'a"b', "%s", "'; --", "q" * 70, "😀" * 40]
    commit(engine, *names, *names)
    assert sorted(observer.notified(at_least=len(names))) == sorted(names)
    assert observer.notified(timeout=0.2) == []


def test_the_flushes_of_a_transaction_notify_once(engine: Engine, observer: Observer) -> None:
    observer.listen(CHANNEL)
    with Session(engine) as session:
        for _ in range(3):
            repo.enqueue(session, Note(), queue="a")
            session.flush()
        session.commit()
    notifier.close_all()
    assert observer.notified(timeout=0.2) == ["a"]


def test_nothing_is_sent_for_duplicates_and_rollbacks(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session:
        repo.enqueue(session, Note(), unique_key="k")
        session.commit()
        notifier.close_all()
        observer.listen(CHANNEL)
        repo.enqueue(session, Note(), unique_key="k", queue="duplicate")
        session.commit()
        repo.enqueue(session, Note(), queue="rolled back")
        session.flush()
        session.rollback()
    notifier.close_all()
    assert observer.notified(timeout=0.2) == []


@pytest.mark.slow
def test_many_commits_are_coalesced_with_the_first_at_once(
    engine: Engine, observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "INTERVAL_SECONDS", 0.5)
    monkeypatch.setattr(notifier, "FEW", 0)  # many are any, however slow the machine is
    observer.listen(CHANNEL)
    commit(engine, "warm")
    assert observer.notified() == ["warm"]
    begun = time.monotonic()
    commit(engine, "q")
    assert observer.notified() == ["q"]
    first = time.monotonic() - begun
    commits = 0
    while time.monotonic() - begun < 1.2:
        commit(engine, "q")
        commits += 1
    notifier.close_all()
    elapsed = time.monotonic() - begun
    later = observer.notified(timeout=0.3, at_least=1000)
    assert first < notifier.INTERVAL_SECONDS
    assert commits > 10
    assert 1 <= len(later) <= elapsed / notifier.INTERVAL_SECONDS + 7, "twice as long each time, up to the interval"


def test_commits_that_come_one_by_one_are_told_one_by_one(
    engine: Engine, observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "INTERVAL_SECONDS", 60)
    observer.listen(CHANNEL)
    for _ in range(20):
        commit(engine, "q")
        assert observer.notified(timeout=5, at_least=1) == ["q"]


def test_after_many_commits_it_becomes_quick_again(
    engine: Engine, observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "INTERVAL_SECONDS", 0.3)
    observer.listen(CHANNEL)
    for _ in range(3):
        for _ in range(20):
            commit(engine, "q")
        observer.notified(timeout=0.35, at_least=20)
        for _ in range(6):  # each is waited for, so none stands for many
            commit(engine, "q")
            assert observer.notified(timeout=5, at_least=1) == ["q"]
    monkeypatch.setattr(notifier, "INTERVAL_SECONDS", 60)
    for _ in range(5):
        commit(engine, "q")
        assert observer.notified(timeout=5, at_least=1) == ["q"]


def test_the_last_of_a_burst_is_sent(engine: Engine, observer: Observer) -> None:
    observer.listen(CHANNEL)
    commit(engine, "q")
    assert observer.notified(timeout=5, at_least=1) == ["q"]
    for _ in range(2):
        commit(engine, "q")
    assert observer.notified(timeout=5, at_least=1) == ["q"]


def test_notify_in_the_transaction(engine: Engine, observer: Observer, statements: StatementRecorder) -> None:
    observer.listen(CHANNEL)
    inside = JobRepository(notify="transaction")
    with Session(engine) as session:
        inside.enqueue(session, Note(), queue="a")
        inside.enqueue(session, Note(), queue="a")
        inside.enqueue(session, Note(), queue="b")
        session.flush()
        assert len(statements.matching("pg_notify")) == 2
        with session.begin_nested() as savepoint:
            inside.enqueue(session, Note(), queue="undone")
            session.flush()
            savepoint.rollback()
        assert observer.notified(timeout=0.1) == []
        session.commit()
    assert sorted(observer.notified(at_least=2)) == ["a", "b"]
    assert observer.notified(timeout=0.1) == []
    assert not any(thread.name == "enlist-notify" for thread in threading.enumerate())


def test_no_notify(engine: Engine, observer: Observer) -> None:
    observer.listen(CHANNEL)
    seen: list[str] = []
    unsubscribe = notifier.local.subscribe(CHANNEL, seen.append)
    commit(engine, "q", repo=JobRepository(notify=None))
    unsubscribe()
    assert observer.notified(timeout=0.2) == []
    assert seen == []


@pytest.mark.parametrize("notify", ["after_commit", "transaction"])
def test_workers_of_the_same_process_are_woken_directly(
    engine: Engine, notify: Literal["after_commit", "transaction"], caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[str] = []

    def fail(queue: str) -> None:
        raise RuntimeError(queue)

    unsubscribe: list[Callable[[], None]] = [
        notifier.local.subscribe(CHANNEL, fail),
        notifier.local.subscribe(CHANNEL, seen.append),
        notifier.local.subscribe(CHANNEL, seen.append),
        notifier.local.subscribe("another", seen.append),
    ]
    commit(engine, "q", repo=JobRepository(notify=notify))
    assert seen == ["q", "q"]
    unsubscribe[1]()
    unsubscribe[1]()
    commit(engine, "q", repo=JobRepository(notify=notify))
    assert seen == ["q", "q", "q"]
    for end in unsubscribe:
        end()
    commit(engine, "q")
    assert len(seen) == 3
    assert caplog.messages.count("a worker could not be woken for queue 'q'; it polls") == 2


def test_the_connection_is_apart_from_the_applications_pool(database_url: URL, observer: Observer) -> None:
    engine = sa.create_engine(database_url, pool_size=1, max_overflow=0, connect_args={"application_name": "shop"})
    observer.listen(CHANNEL)
    with Session(engine) as session:
        repo.enqueue(session, Note(), queue="q")
        session.commit()
        session.execute(sa.text("SELECT 1"))  # the pool is exhausted
        assert observer.notified() == ["q"]
    engine.dispose()
    assert observer.scalar("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'shop' AND state = 'idle'")


def test_an_idle_notifier_ends_and_starts_again(
    engine: Engine, observer: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "IDLE_SECONDS", 0.1)
    observer.listen(CHANNEL)
    for _ in range(2):
        commit(engine, "q")
        assert observer.notified() == ["q"]
        wait_until(lambda: not any(thread.name == "enlist-notify" for thread in threading.enumerate()))
        assert observer.wait_for(f"SELECT ({NOTIFIERS}) = 0")


def test_a_killed_connection_is_replaced(engine: Engine, observer: Observer) -> None:
    observer.listen(CHANNEL)
    commit(engine, "first")
    assert observer.notified() == ["first"]
    observer.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND query LIKE '%pg_notify%' AND pid <> pg_backend_pid()"
    )
    commit(engine, "second")
    assert observer.notified() == ["second"]


@pytest.mark.slow
def test_a_server_that_is_away_delays_no_producer_and_is_said_once(
    private_server: EmbeddedServer, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "enlist")
    away = sa.create_engine(private_server.url())
    statements = statements_for(sa.inspect(JobRecord).local_table)
    notifier.committed(away, statements, {"q"}, used=away, notified=False)
    with Observer(private_server.url()) as observer:
        observer.listen(CHANNEL)
        notifier.close_all()
    private_server.stop()
    begun = time.monotonic()
    for _ in range(100):
        notifier.committed(away, statements, {"q"}, used=away, notified=False)
    assert time.monotonic() - begun < 1  # for all of them: none waits for the server
    wait_until(lambda: any("failed, trying again" in message for message in caplog.messages))
    private_server.start()
    wait_until(lambda: any("works again after" in message for message in caplog.messages), timeout=20)  # it is sent
    assert sum("failed, trying again" in message for message in caplog.messages) == 1
    with Observer(private_server.url()) as observer:
        observer.listen(CHANNEL)
        notifier.committed(away, statements, {"next"}, used=away, notified=False)
        assert observer.notified(timeout=20) == ["next"]
    notifier.close_all()
    away.dispose()
    assert sum("failed, trying again" in message for message in caplog.messages) == 1


async def test_an_engine_that_no_connection_can_be_derived_from_says_so_once(
    database_url: URL, observer: Observer, caplog: pytest.LogCaptureFixture
) -> None:
    async def connect() -> Any:
        return await asyncpg.connect(database_url.set(drivername="postgresql").render_as_string())

    engine = create_async_engine("postgresql+asyncpg://", async_creator=connect)
    for _ in range(2):
        async with AsyncSession(engine) as session:
            repo.enqueue(session, Note(text="a"))
            await session.commit()
    await engine.dispose()
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "creator" in warnings[0].getMessage()
    assert texts(observer) == ["a", "a"]


SCRIPT = """
import os, sys
import sqlalchemy as sa
from sqlalchemy.orm import Session
from enlist import JobPayload, JobRepository

class Note(JobPayload, kind="note"):
    text: str = ""

engine = sa.create_engine(sys.argv[1])
repo = JobRepository()

def commit(queue):
    with Session(engine) as session, session.begin():
        repo.enqueue(session, Note(), queue=queue)

{body}
"""


def run(database_url: URL, body: str) -> None:
    subprocess.run(
        [sys.executable, "-c", SCRIPT.format(body=body), database_url.render_as_string(hide_password=False)],
        check=True,
        timeout=30,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.mark.slow
def test_what_is_to_be_sent_is_sent_at_the_interpreters_exit(database_url: URL, observer: Observer) -> None:
    observer.listen(CHANNEL)
    run(database_url, "for number in range(5): commit(f'q{number % 2}')")
    assert set(observer.notified(at_least=2, timeout=2)) == {"q0", "q1"}


@pytest.mark.slow
def test_an_exit_does_not_wait_for_a_server_that_is_away(database_url: URL) -> None:
    begun = time.monotonic()
    run(
        database_url,
        "from enlist import notifier\n"
        "from enlist._statements import statements_for\n"
        "away = sa.create_engine('postgresql+psycopg://nobody@192.0.2.1/none')\n"
        "statements = statements_for(sa.inspect(__import__('enlist').JobRecord).local_table)\n"
        "notifier.committed(away, statements, {'q'}, used=away, notified=False)",
    )
    assert time.monotonic() - begun < 10


@pytest.mark.slow
def test_a_forked_child_notifies_by_itself(database_url: URL, observer: Observer) -> None:
    observer.listen(CHANNEL)
    run(
        database_url,
        """
commit("before")
engine.dispose(close=False)
pid = os.fork()
if pid == 0:
    from enlist import notifier
    commit("child")
    notifier.close_all()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
commit("parent")
""",
    )
    assert sorted(observer.notified(at_least=3, timeout=2)) == ["before", "child", "parent"]


def test_a_connection_that_the_application_uses_is_left_alone(
    database_url: URL, observer: Observer, caplog: pytest.LogCaptureFixture
) -> None:
    _, arguments = database_url.get_dialect()().create_connect_args(database_url)
    only = psycopg.connect(**arguments)
    engine = sa.create_engine("postgresql+psycopg://", creator=lambda: only, poolclass=sa.StaticPool)
    for text in ("a", "b", "c"):
        with Session(engine) as session:
            repo.enqueue(session, Note(text=text))
            session.flush()
            time.sleep(0.1)  # for the notifier to get in the way
            session.commit()
    notifier.close_all()
    assert not only.closed
    assert texts(observer) == ["a", "b", "c"]
    assert "one connection again and again" in caplog.text
    engine.dispose()
    only.close()
