"""When a worker begins its claims where it stopped: while looks at everything are dear, and never for longer."""

from __future__ import annotations

import datetime as dt
import math
import time
import uuid
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from enlist import HandlerRegistry, JobRecord
from enlist import _marks as module
from enlist._claimer import Claimer
from enlist._database import Database
from enlist._engines import housekeeping_engine
from enlist._leases import Leases
from enlist._marks import CHEAP_SECONDS, LOOKS, MOST, Marks
from enlist._slots import Demand, Slots
from enlist._statements import NO_MARKS
from tests.support import Observer
from tests.support.claims import claim_parameters
from tests.support.jobs import Jobs

DEAR = CHEAP_SECONDS * 100  # a claim that takes half of it is taken for a sign of a slow machine


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def job(number: int, *, queue: str = "q", priority: int = 0, due: float | None = None, key: str | None = None) -> Any:
    due = float(number) if due is None else due
    return SimpleNamespace(queue=queue, priority=priority, due=due, id=uuid.UUID(int=number), concurrency_key=key)


def in_use() -> Marks:
    marks = Marks()
    for _ in range(LOOKS):
        marks.end(whole=True, seconds=DEAR, jobs=0)
    return marks


def test_they_count_when_five_looks_in_a_row_were_dear(clock: Clock) -> None:
    marks = Marks()
    for _ in range(LOOKS - 1):
        marks.end(whole=True, seconds=DEAR, jobs=0)
        assert not marks.in_use
        assert marks.whole_next()
    marks.end(whole=True, seconds=DEAR, jobs=0)
    assert marks.in_use
    assert not marks.whole_next()


def test_one_cheap_look_ends_it(clock: Clock) -> None:
    marks = in_use()
    marks.end(whole=True, seconds=CHEAP_SECONDS / 2, jobs=0)
    assert not marks.in_use
    assert marks.parameters(whole=False) is NO_MARKS


def test_what_many_jobs_take_is_not_dear(clock: Clock) -> None:
    marks = Marks()
    for _ in range(LOOKS):
        marks.end(whole=True, seconds=CHEAP_SECONDS * 3, jobs=1000)
    assert not marks.in_use


def test_marks_that_save_nothing_are_given_up_for_a_second(clock: Clock) -> None:
    marks = in_use()
    marks.end(whole=False, seconds=DEAR * 0.6, jobs=0)
    assert not marks.in_use
    marks.end(whole=True, seconds=DEAR, jobs=0)
    assert not marks.in_use
    clock.now += module.SELDOM_SECONDS
    marks.end(whole=True, seconds=DEAR, jobs=0)
    assert marks.in_use


def test_marks_that_save_half_are_kept(clock: Clock) -> None:
    marks = in_use()
    marks.end(whole=False, seconds=DEAR * 0.4, jobs=0)
    assert marks.in_use


@pytest.mark.parametrize(("seconds", "pause"), [(0.01, 1.0), (0.1, 2.0), (5.0, 10.0)])
def test_busy_slots_leave_a_twentieth_of_the_time_for_looks(clock: Clock, seconds: float, pause: float) -> None:
    marks = Marks()
    for _ in range(LOOKS):
        marks.end(whole=True, seconds=seconds, jobs=0)
    clock.now += pause - 0.01
    assert not marks.whole_next()
    clock.now += 0.02
    assert marks.whole_next()


def test_a_wanted_look_comes_next(clock: Clock) -> None:
    marks = in_use()
    marks.want_whole()
    assert marks.whole_next()
    marks.begin_whole()
    assert not marks.whole_next()


def test_a_mark_never_goes_back(clock: Clock) -> None:
    marks = in_use()
    marks.note([job(5), job(9, priority=1)], keyed=False)
    marks.note([job(3)], keyed=False)
    marks.note([job(7)], keyed=True)
    given = marks.parameters(whole=False)
    places = zip(given["mark_queues"], given["mark_keyed"], given["mark_priorities"], given["mark_dues"], strict=True)
    assert sorted(places) == [("q", False, 0, 5.0), ("q", False, 1, 9.0), ("q", True, 0, 7.0)]
    assert len(given["mark_ids"]) == 3


def test_a_look_at_everything_knows_the_classes_alone(clock: Clock) -> None:
    marks = in_use()
    marks.note([job(5)], keyed=False)
    marks.hold([job(6, key="k")])
    given = marks.parameters(whole=True)
    assert given["mark_priorities"] == [0]
    assert given["mark_dues"] == [-math.inf]
    assert given["held_keys"] == []
    assert marks.parameters(whole=False)["held_keys"] == ["k"]


def test_only_the_latest_classes_and_keys_are_remembered(clock: Clock) -> None:
    marks = in_use()
    for number in range(MOST * 3):
        marks.note([job(number, priority=number)], keyed=False)
        marks.hold([job(number, key=str(number))])
    given = marks.parameters(whole=False)
    assert given["mark_priorities"] == list(range(MOST * 2, MOST * 3))
    assert given["held_keys"] == [str(number) for number in range(MOST * 2, MOST * 3)]


@pytest.mark.slow
def test_a_queue_with_nothing_to_do_does_not_make_a_busy_one_look_at_everything(
    engine: Engine, observer: Observer, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """The idle one is looked at whole in each claim, and that is cheap; the busy one is claimed from its mark on."""
    jobs = Jobs(observer)
    ids = jobs.add_many("work", 60, queue="busy")
    handlers = HandlerRegistry()

    @handlers.handler("work")
    def work(session: Session, job: Any) -> None: ...

    database = Database(housekeeping_engine(engine, None), JobRecord)
    database.open()
    statements = (database.statements.claim, database.statements.claim_among)
    for statement in statements:  # so that none is slow because it is the first
        database.execute(statement, claim_parameters({"none": 1}))
    asked: list[tuple[list[str], bool]] = []
    execute = Database.execute

    def recording(self: Database, statement: Any, parameters: Any) -> Any:
        if statement in statements:
            whole = not parameters["mark_dues"] or -math.inf in parameters["mark_dues"]
            asked.append((parameters["queues"], whole))
            if whole and "busy" in parameters["queues"]:
                began = time.monotonic()
                while time.monotonic() < began + DEAR:  # as if there were much to walk over
                    database.execute(sa.text("SELECT pg_sleep(:left)"), {"left": DEAR})
        return execute(self, statement, parameters)

    monkeypatch.setattr(Database, "execute", recording)
    claimer = Claimer(
        database,
        handlers,
        Leases(),
        worker="w",
        lease=dt.timedelta(seconds=60),
        poll_interval=1,
        give_back=lambda run: None,
    )
    claimer.slots = Slots({"busy": 1, "idle": 1}, lambda run: None, lambda: None)
    taken = []
    for _ in range(LOOKS + 20):
        taken += claimer.claim([Demand("busy", 1, 1), Demand("idle", 1, 1)])
    database.close()
    assert [run.id for run in taken] == ids[: len(taken)]
    assert len(taken) == LOOKS + 20
    later = asked[LOOKS + 1 :]
    assert not any(whole for queues, whole in later if "busy" in queues)  # by the clock no time has passed
    assert [queues for queues, whole in later if whole and "busy" not in queues] == [["idle"]] * 20
