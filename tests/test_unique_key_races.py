"""One job of a key: in savepoints, races, other isolation levels, and with any text for a key."""

from __future__ import annotations

import asyncio
import random
import secrets
import threading
import unicodedata
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Literal, LiteralString

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from enlist import (
    EnqueueOptions,
    HandlerRegistry,
    InvalidOption,
    Job,
    JobHandle,
    JobRecord,
    JobRepository,
    JobState,
    Retry,
    SchemaError,
    UniqueKeyContended,
    Worker,
)
from enlist._driver import constraint_name, sqlstate
from enlist.testing import drain
from tests.jobs import Note, SendReceipt, state_of, texts
from tests.support import Observer, StatementRecorder
from tests.support.jobs import Jobs, running

repo = JobRepository(notify=None)
WAITING = "SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
LIVE_KEYS = "SELECT count(*) FROM enlist_job WHERE status IN ('queued', 'running')"


@pytest.fixture
def jobs(observer: Observer) -> Jobs:
    return Jobs(observer)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def enqueue(engine: Engine, text: str = "", key: str = "k", **options: Any) -> JobHandle:
    """Commit a job that holds its key until it has finished."""
    options = {"unique_until": "finished", **options}
    with Session(engine) as session, session.begin():
        return repo.enqueue(session, Note(text=text), unique_key=key, **options)


@contextmanager
def hooked(engine: Engine, name: str, react: Callable[[str], object]) -> Iterator[None]:
    """Call a function with each statement, before or after it is executed."""

    def listener(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        react(statement)

    event.listen(engine, name, listener)
    try:
        yield
    finally:
        event.remove(engine, name, listener)


# -- one session ------------------------------------------------------------------------------------------------------


async def test_a_key_is_judged_by_what_its_transaction_has_now(
    any_async_engine: AsyncEngine, observer: Observer
) -> None:
    """Not by what an undone savepoint, a deleted row or a call before has said."""
    async with AsyncSession(any_async_engine) as session:
        first = repo.enqueue(session, Note(text="first"), unique_key="k")
        second = repo.enqueue(session, Note(text="second"), unique_key="k")
        await session.flush()
        assert (first.inserted, second.inserted, second.existing_id) == (True, False, first.id)
        async with session.begin_nested() as savepoint:
            inner = repo.enqueue(session, Note(text="inner"), unique_key="m")
            async with session.begin_nested():
                twin = repo.enqueue(session, Note(text="twin"), unique_key="m")
            await savepoint.rollback()
        again = repo.enqueue(session, Note(text="again"), unique_key="m")
        await session.flush()
        assert (inner.state, twin.state, again.inserted) == (JobState.DISCARDED, JobState.DISCARDED, True)
        await session.execute(sa.delete(JobRecord).where(JobRecord.id == first.id))
        third = repo.enqueue(session, Note(text="third"), unique_key="k")
        await session.commit()
    assert (third.inserted, twin.existing_id) == (True, inner.id)
    assert texts(observer) == ["again", "third"]


def test_a_duplicate_in_a_savepoint_that_is_rolled_back_was_never_one(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session:
        first = repo.enqueue(session, Note(text="first"), unique_key="k")
        savepoint = session.begin_nested()
        second = repo.enqueue(session, Note(text="second"), unique_key="k")
        session.flush()
        assert (state_of(second), second.existing_id) == (JobState.DUPLICATE, first.id)
        savepoint.rollback()
        assert (state_of(second), second.inserted) == (JobState.DISCARDED, False)
        session.rollback()
        assert state_of(first) is JobState.DISCARDED
        third = repo.enqueue(session, Note(text="third"), unique_key="k")
        session.commit()
    assert third.inserted
    assert texts(observer) == ["third"]


@pytest.mark.parametrize("late", [False, True])
async def test_many_items_are_told_apart_whatever_their_order(
    any_async_engine: AsyncEngine, observer: Observer, late: bool
) -> None:
    """More than one INSERT takes, most of them with a twin."""
    chance = random.Random(7)
    keys = [chance.choice([None, *map(str, range(600))]) for _ in range(1300)]

    def payload(key: str | None) -> Any:
        return (lambda: Note(text=str(key))) if late else Note(text=str(key))

    async with AsyncSession(any_async_engine) as session:
        handles = repo.enqueue_many(session, [(payload(key), {"unique_key": key}) for key in keys])
        await session.commit()
    first: dict[str, JobHandle] = {}
    for key, handle in zip(keys, handles, strict=True):
        holder = None if key is None else first.setdefault(key, handle)
        assert handle.inserted is (holder is None or holder is handle)
        assert handle.existing_id == (None if handle.inserted else holder and holder.id)
    assert texts(observer) == [str(key) for key, handle in zip(keys, handles, strict=True) if handle.inserted]


# -- races ------------------------------------------------------------------------------------------------------------


def vanish(observer: Observer) -> None:
    observer.execute("DELETE FROM enlist_job WHERE unique_held")


def finish(observer: Observer) -> None:
    observer.execute("UPDATE enlist_job SET status = 'done', unique_held = false, finished_at = now()")


def die(observer: Observer) -> None:
    observer.execute("UPDATE enlist_job SET status = 'dead', unique_held = false, finished_at = now()")


@pytest.mark.parametrize("end", [vanish, finish, die])
async def test_a_holder_that_ends_between_the_insert_and_the_look_up_is_replaced(
    engine: Engine, any_async_engine: AsyncEngine, observer: Observer, end: Callable[[Observer], None]
) -> None:
    first = enqueue(engine, "first")

    def react(statement: str) -> None:
        if statement.lstrip().startswith("SELECT"):  # the look-up, about to be sent
            end(observer)

    with (
        hooked(any_async_engine.sync_engine, "before_cursor_execute", react),
        StatementRecorder(any_async_engine) as statements,
    ):
        async with AsyncSession(any_async_engine) as session:
            second = repo.enqueue(session, Note(text="second"), unique_key="k", unique_until="finished")
            await session.commit()
        assert len(statements.texts) <= 6
    assert (second.inserted, second.existing_id) == (True, None)
    assert observer.scalar(LIVE_KEYS) == 1
    assert observer.scalar("SELECT count(*) FROM enlist_job") == (1 if end is vanish else 2)
    assert second.id != first.id


@pytest.mark.parametrize("times", [1, 2, 3])
def test_holders_that_come_and_go_are_met_three_times_and_never_for_ever(
    engine: Engine, observer: Observer, times: int
) -> None:
    """A new holder appears before each INSERT, and is gone before each look-up."""
    comings = 0

    def react(statement: str) -> None:
        nonlocal comings
        if statement.startswith("INSERT") and comings < times:
            comings += 1
            enqueue(other, f"holder {comings}")
        elif statement.lstrip().startswith("SELECT"):
            vanish(observer)

    other = sa.create_engine(engine.url)
    with hooked(engine, "before_cursor_execute", react), StatementRecorder(engine) as statements:
        with Session(engine) as session:
            handle = repo.enqueue(session, Note(text="mine"), unique_key="k", unique_until="finished")
            if times < 3:
                session.commit()
            else:
                with pytest.raises(UniqueKeyContended, match=r"'k' of kind 'note'.*retry the transaction"):
                    session.commit()
                session.rollback()
        assert len(statements.texts) <= 6
    other.dispose()
    assert state_of(handle) is (JobState.COMMITTED if times < 3 else JobState.DISCARDED)
    assert texts(observer) == (["mine"] if times < 3 else [])


def test_holders_that_come_and_go_do_not_confuse_the_rest_of_a_batch(engine: Engine, observer: Observer) -> None:
    held = {key: enqueue(engine, f"holder {key}", key) for key in "bdf"}

    def react(statement: str) -> None:
        if statement.lstrip().startswith("SELECT"):
            observer.execute("DELETE FROM enlist_job WHERE unique_key = 'd'")

    with hooked(engine, "before_cursor_execute", react), Session(engine) as session:
        keys = ["f", "e", "d", "d", "c", "b", "a", None]
        items = [(Note(text=str(key)), {"unique_key": key}) for key in keys]
        handles = repo.enqueue_many(session, items)  # type: ignore[arg-type]
        session.commit()
    assert [handle.inserted for handle in handles] == [False, True, True, False, True, False, True, True]
    assert [handles[0].existing_id, handles[3].existing_id, handles[5].existing_id] == [
        held["f"].id,
        handles[2].id,
        held["b"].id,
    ]


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("outcome", ["commit", "rollback"])
async def test_at_any_level_a_race_has_one_winner_and_the_loser_may_try_again(
    any_async_engine: AsyncEngine, engine: Engine, observer: Observer, level: str, outcome: str
) -> None:
    """A serialization failure comes out as the driver's; the same unit of work, run again, finds the twin."""
    used = any_async_engine.execution_options(isolation_level=level)
    with Session(engine) as rival:
        first = repo.enqueue(rival, Note(text="rival"), unique_key="k")
        rival.flush()
        failures = []
        async with AsyncSession(used) as session:
            for attempt in range(2):
                await session.execute(sa.select(sa.func.count()).select_from(JobRecord))  # its snapshot
                handle = repo.enqueue(session, Note(text="mine"), unique_key="k")
                if attempt == 0:
                    ending = threading.Thread(target=lambda: (observer.wait_for(WAITING), getattr(rival, outcome)()))
                    ending.start()
                try:
                    await session.commit()
                    break
                except DBAPIError as error:
                    failures.append(sqlstate(error))
                    await session.rollback()
                    assert handle.state is JobState.DISCARDED
                finally:
                    if attempt == 0:
                        ending.join()
    snapshot = level != "READ COMMITTED"
    assert failures == (["40001"] if snapshot and outcome == "commit" else [])
    if outcome == "commit":
        assert (handle.state, handle.existing_id) == (JobState.DUPLICATE, first.id)
        assert texts(observer) == ["rival"]
    else:
        assert handle.inserted
        assert texts(observer) == ["mine"]


def test_of_many_that_race_for_a_key_one_wins_whatever_the_outcomes(
    engine: Engine, observer: Observer, pool: ThreadPoolExecutor
) -> None:
    """Some roll back: whoever comes next gets the key, so it is never lost and never held twice."""
    barrier = threading.Barrier(4, timeout=20)

    def run(number: int, key: str) -> tuple[bool, JobHandle]:
        chance = random.Random(number)
        barrier.wait()
        with Session(engine) as session:
            handle = repo.enqueue(session, Note(text=str(number)), unique_key=key)
            session.flush()
            keep = number == 3 or chance.random() < 0.5
            (session.commit if keep else session.rollback)()
        return keep, handle

    for key in map(str, range(15)):
        results = list(pool.map(run, range(4), [key] * 4))
        winners = [handle for keep, handle in results if keep and handle.inserted]
        assert len(winners) == 1
        assert {handle.existing_id for keep, handle in results if keep and not handle.inserted} <= {winners[0].id}
    assert observer.scalar("SELECT count(*) FROM enlist_job") == 15


@pytest.mark.parametrize("on_conflict", ["ignore", "replace"])
def test_batches_in_opposite_orders_of_several_kinds_never_deadlock(
    engine: Engine, observer: Observer, pool: ThreadPoolExecutor, on_conflict: Literal["ignore", "replace"]
) -> None:
    letters = "abcdefghijklmnopqrst"
    barrier = threading.Barrier(2, timeout=20)

    def rounds(step: int) -> None:
        for number in range(40):
            barrier.wait()
            with Session(engine) as session:
                for letter in letters[::step]:
                    key = f"{number} {letter}"
                    payloads = [Note(), SendReceipt(order_id=1)][::step]
                    repo.enqueue_many(
                        session,
                        [(payload, {"unique_key": key, "on_conflict": on_conflict}) for payload in payloads],
                    )
                session.commit()

    for future in [pool.submit(rounds, 1), pool.submit(rounds, -1)]:
        future.result(timeout=40)
    assert observer.scalar("SELECT count(*) FROM enlist_job") == 40 * 20 * 2


async def test_a_deadlock_of_separate_flushes_comes_out_as_it_is_and_can_be_replayed(
    any_async_engine: AsyncEngine, observer: Observer
) -> None:
    async with AsyncSession(any_async_engine) as first, AsyncSession(any_async_engine) as second:
        for session, key in ((first, "a"), (second, "b")):
            await session.execute(sa.text("SET LOCAL deadlock_timeout = '50ms'"))
            repo.enqueue(session, Note(text=key), unique_key=key)
            await session.flush()
        repo.enqueue(first, Note(text="first"), unique_key="b")
        repo.enqueue(second, Note(text="second"), unique_key="a")

        async def commit(session: AsyncSession) -> str | None:
            try:
                await session.commit()
            except DBAPIError as error:
                await session.rollback()
                return sqlstate(error)
            return None

        states = await asyncio.gather(commit(first), commit(second))
        # Now, and not at once: the other may have been told of nothing yet, and would meet it again.
        victim = second if states[0] is None else first
        for key in "ba":
            repo.enqueue(victim, Note(text=key), unique_key=key)
        await victim.commit()
    assert sorted(map(str, states)) == ["40P01", "None"]
    assert observer.scalar("SELECT count(*) FROM enlist_job") == 2


# -- a twin that has ended --------------------------------------------------------------------------------------------


class Ended(Exception):
    """How a handler fails for good."""


def worker(engine: Engine, handle: Callable[..., None]) -> Worker:
    registry = HandlerRegistry()
    registry.handler(Note)(handle)
    return Worker(engine, registry)


@pytest.mark.slow
@pytest.mark.parametrize("pruning", ["never", "between", "all the time"])
def test_a_key_is_free_when_its_job_has_ended_with_and_without_pruning(
    engine: Engine, observer: Observer, pruning: str, pool: ThreadPoolExecutor
) -> None:
    endings = ["done", "dead", "cancelled"]

    def handle(session: Session, job: Job[Note]) -> None:
        session.execute(sa.select(1))
        if job.payload.text == "dead":
            raise Ended

    def prune() -> None:
        with Session(engine) as session, session.begin():
            repo.prune(session, older_than=0)

    def prune_until_stopped() -> int:
        held_twice = 0
        while not stop.is_set():
            prune()
            held_twice += observer.scalar(
                "SELECT count(*) FROM (SELECT 1 FROM enlist_job WHERE status IN ('queued', 'running')"
                " GROUP BY kind, unique_key HAVING count(*) > 1) AS twice"
            )
        return held_twice

    stop = threading.Event()
    loop: Future[int] | None = pool.submit(prune_until_stopped) if pruning == "all the time" else None
    made = []
    try:
        for ending in endings:
            for _ in range(3):
                handle_ = enqueue(engine, ending, ending, max_attempts=1)
                made.append(handle_.inserted)
                made.append(enqueue(engine, ending, ending, max_attempts=1).inserted)
                if ending == "cancelled":
                    with Session(engine) as session, session.begin():
                        repo.cancel(session, handle_.id)
                else:
                    worker(engine, handle).drain(timeout=20)
                if pruning == "between":
                    prune()
    finally:
        stop.set()
    assert made == [True, False] * 9
    assert loop is None or loop.result(timeout=10) == 0


@pytest.mark.parametrize("until", ["started", "finished", "pruned"])
def test_a_batch_meets_twins_of_every_state(engine: Engine, observer: Observer, jobs: Jobs, until: Any) -> None:
    """Each key is decided by itself, though one statement tries them all."""
    states = ["queued", "running", "done", "dead", "cancelled"]
    free = {
        "started": {"running", "done", "dead", "cancelled"},
        "finished": {"done", "dead", "cancelled"},
        "pruned": {"dead", "cancelled"},
    }[until]
    first = {state: enqueue(engine, state, state, unique_until=until) for state in states}
    for state in states:
        observer.execute(
            "UPDATE enlist_job SET status = %s, unique_held = %s,"
            " locked_until = CASE %s WHEN 'running' THEN now() + interval '60 s' END WHERE unique_key = %s",
            state,
            state not in free,
            state,
            state,
        )
    with Session(engine) as session:
        handles = repo.enqueue_many(session, [(Note(), {"unique_key": state}) for state in [*states, "new"]])
        session.commit()
    for state, handle in zip(states, handles, strict=False):
        assert handle.inserted is (state in free), state
        assert handle.existing_id == (None if state in free else first[state].id)
    assert handles[-1].inserted


# -- a twin that is running -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", ["returns", "raises"])
@pytest.mark.parametrize("until", ["started", "finished", "pruned"])
def test_a_running_job_is_not_touched_by_its_twins_and_never_runs_twice_at_once(
    engine: Engine, jobs: Jobs, outcome: str, until: Any
) -> None:
    """Whatever the twins say of the key, and whatever becomes of their transactions."""
    started, go_on = threading.Event(), threading.Event()
    inside = 0
    most = 0

    def handle(session: Session, job: Job[Note]) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        session.execute(sa.select(1))
        started.set()
        go_on.wait(10)
        inside -= 1
        if outcome == "raises":
            raise Retry(3600)

    first = enqueue(engine, "first", unique_until=until)
    with running(worker(engine, handle)):
        assert started.wait(10)
        before = jobs.row(first.id)
        twins = [
            enqueue(engine, twin, unique_until=twin, delay=delay)
            for twin in ("started", "finished", "pruned")
            for delay in (3600, 7200)
        ]
        with Session(engine) as session:
            undone = repo.enqueue(session, Note(text="undone"), unique_key="k", unique_for=60)
            session.rollback()
        assert jobs.row(first.id) | {"locked_until": None} == before | {"locked_until": None}  # it may be renewed
        go_on.set()
        if outcome == "returns":
            jobs.wait(first.id)
        else:
            jobs.wait_failed(first.id)
    expected = [until == "started"] + [False] * 5
    assert [handle.inserted for handle in twins] == expected
    holder = twins[0] if until == "started" else first
    assert {handle.existing_id for handle in twins if not handle.inserted} == {holder.id}
    assert undone.inserted is False
    assert most == 1
    assert jobs.status(first.id) == ("done" if outcome == "returns" else "queued")


# -- odd keys ---------------------------------------------------------------------------------------------------------

RANDOM_HEX = secrets.token_hex(1000)
KEYS = {
    "a letter": "a",
    "a capital": "A",
    "a space after": "a ",
    "a space before": " a",
    "a tab": "a\t",
    "a line end": "a\n",
    "another line end": "a\r\n",
    "composed": "é",
    "decomposed": unicodedata.normalize("NFD", "é"),
    "dotless i": "\u0131",
    "i": "i",
    "I": "I",
    "sharp s": "ß",
    "two s": "ss",
    "a ligature": "\ufb01",
    "two letters": "fi",
    "full width": "\uff21",
    "Cyrillic": "\u0410",
    "zero width": "a\u200b",
    "a soft hyphen": "a\u00ad",
    "right to left": "\u202ea",
    "a byte order mark": "\ufeffa",
    "only a space": " ",
    "only a no-break space": "\u00a0",
    "None": "None",
    "NULL": "NULL",
    "an escape": "\\u0000",
    "a backslash": "\\",
    "a quote": "'",
    "two quotes": "''",
    "a double quote": '"',
    "a percent sign": "%s",
    "a named parameter": "%(key)s :key $1",
    "an array": "{a,b}",
    "an empty array": "{}",
    "a comma": ",",
    "SQL": "'; DROP TABLE enlist_job; --",
    "a number": "1",
    "another number": "1.0",
    "a padded number": "01",
    "the delete character": "\x7f",
    "control characters": "".join(map(chr, range(1, 32))),
    "a non-character": "\uffff",
    "the last character": "\U0010ffff",
    "emoji": "\N{PILE OF POO}" * 300,
    "a family": "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "random": RANDOM_HEX,
    "random but for the last": RANDOM_HEX[:-1] + ("0" if RANDOM_HEX[-1] != "0" else "1"),
    "random but for the first": ("0" if RANDOM_HEX[0] != "0" else "1") + RANDOM_HEX[1:],
    "the longest": "k" * 2000,
    "one less": "k" * 1999,
    "the longest of two bytes": "é" * 1000,
    "the longest of random text": "".join(chr(0x1F300 + byte) for byte in secrets.token_bytes(500)),
}


async def test_keys_that_differ_in_anything_are_different_and_the_same_are_the_same(
    any_async_engine: AsyncEngine, observer: Observer
) -> None:
    async with AsyncSession(any_async_engine) as session:
        first = {name: repo.enqueue(session, Note(text=name), unique_key=key) for name, key in KEYS.items()}
        await session.flush()
        assert [name for name, handle in first.items() if not handle.inserted] == []
        second = {name: repo.enqueue(session, Note(text=name), unique_key=key) for name, key in KEYS.items()}
        await session.commit()
    for name, handle in second.items():
        assert handle.existing_id == first[name].id, name
    stored = dict(observer.rows("SELECT payload->>'text', unique_key FROM enlist_job"))
    assert stored == KEYS


def test_of_no_key_there_are_no_duplicates(engine: Engine, observer: Observer) -> None:
    with Session(engine) as session:
        handles = repo.enqueue_many(session, [(Note(), EnqueueOptions(unique_key=None)), Note(), Note(), Note()])
        session.commit()
    assert all(handle.inserted for handle in handles)
    assert observer.scalar("SELECT count(*) FROM enlist_job WHERE unique_key IS NULL AND NOT unique_held") == 4


@pytest.mark.parametrize("name", ["unique_key", "concurrency_key"])
def test_keys_that_cannot_be_stored_are_refused_at_the_call(
    engine: Engine, observer: Observer, statements: StatementRecorder, name: str
) -> None:
    refused: list[tuple[Any, str]] = [
        ("", "must not be empty"),
        ("a\x00", "NUL"),
        ("\x00" * 3000, "NUL"),
        ("\ud83d", "lone surrogate"),
        (secrets.token_hex(3000), "6000 bytes, at most 2000"),
        ("k" * 9000, "9000 bytes, at most 2000"),
        ("k" * 2001, "2001 bytes"),
        ("é" * 1001, "2002 bytes"),
        ("\N{PILE OF POO}" * 501, "2004 bytes"),
        (b"k", "must be a string"),
        (0, "must be a string"),
        (False, "must be a string"),
        (("note", 1), "must be a string"),
        (uuid.uuid4(), "must be a string"),
        (["k"], "must be a string"),
    ]
    with Session(engine) as session:
        for key, message in refused:
            options: dict[str, Any] = {name: key}
            with pytest.raises(InvalidOption, match=f"{name}.*{message}") as caught:
                repo.enqueue(session, Note(), **options)
            assert isinstance(caught.value, ValueError)
            assert len(str(caught.value)) < 300
            with pytest.raises(InvalidOption, match=rf"items\[1\]: {name}"):
                repo.enqueue_many(session, [Note(), (Note(), options)])  # type: ignore[list-item]
        assert statements.events == []
        repo.enqueue(session, Note(text="kept"))
        session.commit()
    assert texts(observer) == ["kept"]


def test_the_key_of_a_kind_with_the_longest_name_fits(engine: Engine, observer: Observer) -> None:
    """Also where nothing can be compressed: an index entry has 2,704 bytes at most."""
    kind = secrets.token_hex(100)
    key = "".join(chr(0x10000 + int.from_bytes(secrets.token_bytes(2), "big")) for _ in range(500))
    with Session(engine) as session:
        first = repo.enqueue(session, kind, {}, unique_key=key, concurrency_key=key)
        second = repo.enqueue(session, kind, {}, unique_key=key, concurrency_key=key)
        session.commit()
    assert (first.inserted, second.existing_id) == (True, first.id)


def test_a_test_without_a_worker_answers_as_the_worker_does(engine: Engine, observer: Observer) -> None:
    """Jobs that are drained inside of a session's transaction free their keys as those of a worker do."""
    registry = HandlerRegistry()

    @registry.handler(Note)
    def note(session: Session, job: Job[Note]) -> None:
        session.execute(sa.select(1))

    for until in ("started", "finished", "pruned"):
        inserted = []
        with Session(engine) as session:
            for _ in range(2):
                repo.enqueue(session, Note(), unique_key="k", unique_until=until)
                duplicate = repo.enqueue(session, Note(), unique_key="k", unique_until=until)
                session.flush()
                inserted.append(duplicate.inserted)
                drain(session, registry)
                last = repo.enqueue(session, Note(), unique_key="k", unique_until=until)
                session.flush()
                inserted.append(last.inserted)
            session.rollback()
        assert inserted == ([False, until != "pruned"] * 2)


# -- a conflict target that is not there ------------------------------------------------------------------------------


UNIQUE: LiteralString = "CREATE UNIQUE INDEX enlist_job_unique ON enlist_job"
BROKEN: dict[str, LiteralString] = {
    "none": "",
    "not unique": "CREATE INDEX enlist_job_unique ON enlist_job (kind, unique_key) WHERE unique_held",
    "another predicate": f"{UNIQUE} (kind, unique_key) WHERE unique_held AND status = 'queued'",
    "other columns": f"{UNIQUE} (unique_key) WHERE unique_held",
    # As an interrupted CREATE INDEX CONCURRENTLY leaves it.
    "invalid": f"{UNIQUE} (kind, unique_key) WHERE unique_held; UPDATE pg_index SET indisvalid = false"
    " WHERE indexrelid = 'enlist_job_unique'::regclass",
}


@pytest.mark.parametrize("index", BROKEN)
def test_without_the_right_index_a_key_is_an_error_and_never_ignored(
    engine: Engine, observer: Observer, index: str
) -> None:
    observer.execute("DROP INDEX enlist_job_unique")
    if index != "none":
        observer.connection.execute(BROKEN[index])
    with Session(engine) as session:
        several = [
            EnqueueOptions(unique_key="k"),
            EnqueueOptions(unique_key="k", on_conflict="replace"),
            EnqueueOptions(),
        ]
        for options in several:
            handle = repo.enqueue(session, Note(), **options)
            with pytest.raises(SchemaError, match="enlist migrate"):
                session.commit()
            session.rollback()
            assert state_of(handle) is JobState.DISCARDED
    assert texts(observer) == []


async def test_an_id_that_exists_already_is_an_error_and_no_duplicate(
    any_async_engine: AsyncEngine, observer: Observer
) -> None:
    for key in (None, "k"):
        async with AsyncSession(any_async_engine) as session:
            handle = repo.enqueue(session, Note(text="mine"), unique_key=key)
            observer.execute(
                "INSERT INTO enlist_job (id, kind, payload, run_at) VALUES (%s, 'note', '{}', now())", handle.id
            )
            with pytest.raises(sa.exc.IntegrityError) as caught:
                await session.commit()
            assert (sqlstate(caught.value), constraint_name(caught.value)) == ("23505", "enlist_job_pkey")
            await session.rollback()
            assert (handle.state, handle.existing_id) == (JobState.DISCARDED, None)
    assert texts(observer) == [None, None]


@pytest.mark.parametrize("patience", ["lock_timeout", "statement_timeout", "cancel"])
async def test_a_wait_for_a_twin_that_is_cut_short_is_an_error_and_no_duplicate(
    any_async_engine: AsyncEngine, engine: Engine, observer: Observer, patience: str
) -> None:
    codes = {"lock_timeout": "55P03", "statement_timeout": "57014", "cancel": "57014"}
    with Session(engine) as holder:
        repo.enqueue(holder, Note(text="first"), unique_key="k")
        holder.flush()
        async with AsyncSession(any_async_engine) as session:
            pid = await session.scalar(sa.text("SELECT pg_backend_pid()"))
            cancelling = threading.Thread(
                target=lambda: (observer.wait_for(WAITING), observer.execute("SELECT pg_cancel_backend(%s)", pid))
            )
            if patience == "cancel":
                cancelling.start()
            else:
                await session.execute(sa.text(f"SET LOCAL {patience} = '30ms'"))
            handle = repo.enqueue(session, Note(text="second"), unique_key="k")
            with pytest.raises(DBAPIError) as caught:
                await session.commit()
            assert sqlstate(caught.value) == codes[patience]
            await session.rollback()
            assert (handle.state, handle.existing_id, handle.inserted) == (JobState.DISCARDED, None, False)
            if patience == "cancel":
                cancelling.join()
            holder.rollback()
            again = repo.enqueue(session, Note(text="again"), unique_key="k")
            await session.commit()
            assert again.inserted
    assert texts(observer) == ["again"]
