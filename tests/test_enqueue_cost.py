"""What a job costs: statements, memory, and ids that sort."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import uuid
import weakref
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from enlist import JobRepository, JobState
from enlist._uuid7 import uuid7
from tests.jobs import Note, SendReceipt
from tests.shop import Order
from tests.support import Observer, StatementRecorder

repo = JobRepository()


@pytest.mark.parametrize(("jobs", "inserts"), [(1, 1), (1000, 1), (1001, 2), (2500, 3)])
def test_a_flush_of_a_thousand_jobs_is_one_statement(
    engine: Engine, statements: StatementRecorder, observer: Observer, jobs: int, inserts: int
) -> None:
    with Session(engine) as session:
        for number in range(jobs):
            repo.enqueue(session, SendReceipt(order_id=number), unique_key=None if number % 2 else str(number))
        session.commit()
    assert len(statements.texts) - len(statements.matching("pg_catalog")) <= inserts + 3
    assert len(statements.matching("INSERT INTO enlist_job")) == inserts
    assert observer.scalar("SELECT count(DISTINCT (payload->>'order_id')::int) FROM enlist_job") == jobs


def test_a_duplicate_costs_one_look_up_however_many_there_are(engine: Engine, statements: StatementRecorder) -> None:
    with Session(engine) as session:
        for _ in range(2):
            handles = repo.enqueue_many(session, [(Note(), {"unique_key": str(number)}) for number in range(1000)])
            session.flush()
            statements.clear()
        repo.enqueue_many(session, [(Note(), {"unique_key": str(number)}) for number in range(1000)])
        session.commit()
    assert {handle.state for handle in handles} == {JobState.DUPLICATE}
    assert len(statements.texts) == 2


def test_memory_is_flat_over_the_commits_of_one_session(engine: Engine) -> None:
    repo = JobRepository(notify=None)
    with Session(engine) as session:

        def commits(number: int) -> None:
            for count in range(number):
                repo.enqueue(session, Note(text="x" * 100), unique_key=str(count % 5))
                if count % 10 == 0:
                    with session.begin_nested() as savepoint:
                        repo.enqueue(session, lambda: Note(text="y" * 100))
                        session.flush()
                        savepoint.rollback()
                session.commit()

        commits(100)
        gc.collect()
        objects, blocks = len(gc.get_objects()), sys.getallocatedblocks()
        commits(1000)
        gc.collect()
        assert session.info == {}
        # Something kept for each commit would be 1,000.
        assert len(gc.get_objects()) - objects < 500
        assert sys.getallocatedblocks() - blocks < 800


def test_a_session_and_its_payloads_can_be_collected_while_handles_live(engine: Engine) -> None:
    session = Session(engine)
    payload = Note(text="a")
    order = Order(ref="a")
    handles = [repo.enqueue(session, payload), repo.enqueue(session, lambda o: Note(text=o.ref), of=order)]
    references: list[weakref.ref[Any]] = [weakref.ref(session), weakref.ref(payload), weakref.ref(order)]
    references.append(weakref.ref(session.connection()))
    session.commit()
    session.close()
    del session, payload, order
    gc.collect()
    assert [reference() for reference in references] == [None] * 4
    assert handles[1].state is JobState.COMMITTED


def test_sessions_without_jobs_keep_nothing_of_enlist(engine: Engine) -> None:
    with Session(engine) as session:
        session.add(Order(ref="a"))
        session.flush()
        session.commit()
        assert session.info == {}


def test_ids_ascend_and_never_repeat() -> None:
    made: list[list[uuid.UUID]] = [[] for _ in range(4)]

    def make(into: list[uuid.UUID]) -> None:
        into.extend(uuid7() for _ in range(20_000))

    threads = [threading.Thread(target=make, args=(into,)) for into in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(ids == sorted(ids) for ids in made)
    everything = {one for ids in made for one in ids}
    assert len(everything) == 80_000
    assert {(one.version, one.variant) for one in everything} == {(7, uuid.RFC_4122)}


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="the standard library's")
def test_a_forked_child_makes_other_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: 2_000_000_000_000_000_000)  # parent and child in one millisecond
    uuid7()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, b"".join(uuid7().bytes for _ in range(200)))
        finally:
            os._exit(0)
    ours = {uuid7() for _ in range(200)}
    os.waitpid(pid, 0)
    os.close(writing)
    data = os.read(reading, 16 * 200)
    os.close(reading)
    theirs = {uuid.UUID(bytes=data[start : start + 16]) for start in range(0, len(data), 16)}
    assert len(theirs) == 200
    assert not ours & theirs
    # Ids made in the same millisecond differ in more than their last 32 bits.
    assert not {one.int >> 32 for one in ours} & {one.int >> 32 for one in theirs}


def test_large_payloads_are_spread_over_statements(engine: Engine, statements: StatementRecorder) -> None:
    """The server's time for one array of them grows with its square, and at 1 GB it ends."""
    with Session(engine) as session:
        handles = repo.enqueue_many(session, [Note(text="x" * size) for size in (400_000, 500_000, 200_000, 1_000_000)])
        session.commit()
    assert len(statements.matching("INSERT")) == 3
    assert all(handle.inserted for handle in handles)
