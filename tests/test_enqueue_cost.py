"""What a job costs: statements, memory, and ids that sort."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import tracemalloc
import uuid
import weakref
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from enlist import JobRepository, JobState, PayloadError
from enlist._uuid7 import uuid7s
from tests.jobs import Note, SendReceipt
from tests.shop import Order
from tests.support import Observer, StatementRecorder

repo = JobRepository()


@pytest.mark.parametrize(("jobs", "inserts"), [(1, 1), (1000, 1), (1001, 2), (1999, 2)])
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


@pytest.mark.slow
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


@pytest.mark.parametrize("ending", ["rollback", "close", "failed flush"])
def test_what_is_discarded_can_be_collected_while_handles_live(engine: Engine, ending: str) -> None:
    order = Order(ref="a")
    reference = weakref.ref(order)
    with Session(engine) as session:
        handle = repo.enqueue(session, lambda o: Note(text=o.ref), of=order)
        if ending == "failed flush":
            repo.enqueue(session, lambda: 1 / 0)  # type: ignore[arg-type, return-value]
            with pytest.raises(PayloadError):
                session.flush()
        if ending != "close":
            session.rollback()
    del order
    gc.collect()
    assert reference() is None
    assert handle.state is JobState.DISCARDED


def test_handles_keep_no_payload_of_what_is_written(engine: Engine) -> None:
    with Session(engine) as session:
        tracemalloc.start()
        try:
            handles = [repo.enqueue(session, Note(text="x" * 900_000), meta={"text": "y" * 900_000}) for _ in range(10)]
            session.commit()
            kept, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert kept < 900_000
    assert {handle.state for handle in handles} == {JobState.COMMITTED}


def test_sessions_without_jobs_keep_nothing_of_enlist(engine: Engine) -> None:
    with Session(engine) as session:
        session.add(Order(ref="a"))
        session.flush()
        session.commit()
        assert session.info == {}


def test_ids_ascend_and_never_repeat() -> None:
    made: list[list[int]] = [[] for _ in range(4)]

    def make(into: list[int]) -> None:
        for count in range(200):
            into += uuid7s(count)

    threads = [threading.Thread(target=make, args=(into,)) for into in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(ids == sorted(ids) for ids in made)
    everything = {uuid.UUID(int=one) for ids in made for one in ids}
    assert len(everything) == 4 * sum(range(200))
    assert {(one.version, one.variant) for one in everything} == {(7, uuid.RFC_4122)}


def test_an_id_tells_when_it_was_made() -> None:
    before = time.time_ns() // 1_000_000
    (number,) = uuid7s(1)
    assert before <= number >> 80 <= time.time_ns() // 1_000_000 + 1


def test_a_forked_child_makes_other_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: 2_000_000_000_000_000_000)  # parent and child in one millisecond
    uuid7s(1)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, b"".join(one.to_bytes(16) for one in uuid7s(200)))
        finally:
            os._exit(0)
    ours = set(uuid7s(200))
    os.waitpid(pid, 0)
    os.close(writing)
    data = os.read(reading, 16 * 200)
    os.close(reading)
    theirs = {int.from_bytes(data[start : start + 16]) for start in range(0, len(data), 16)}
    assert len(theirs) == 200
    assert not ours & theirs
    # Ids made in the same millisecond differ in more than their last 32 bits.
    assert not {one >> 32 for one in ours} & {one >> 32 for one in theirs}


def test_large_payloads_are_spread_over_statements(engine: Engine, statements: StatementRecorder) -> None:
    """The server's time for one array of them grows with its square, and at 1 GB it ends."""
    with Session(engine) as session:
        handles = repo.enqueue_many(session, [Note(text="x" * size) for size in (400_000, 500_000, 200_000, 1_000_000)])
        session.commit()
    assert len(statements.matching("INSERT")) == 3
    assert all(handle.inserted for handle in handles)
