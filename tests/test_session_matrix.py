"""One unit of work in every kind of session: the outcome is the one that docs/sessions.md states.

Every two settings meet (:func:`tests.support.matrix.pairwise`); the product of the main ones is marked slow.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import combinations
from pathlib import Path
from typing import Any, Final, NamedTuple

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Session

from enlist import JobHandle, SessionError
from tests.jobs import Note, SendReceipt, state_of
from tests.shop import Order, Receipt
from tests.support import StatementRecorder
from tests.support.databases import Databases
from tests.support.matrix import Cell, Exclusions, Setting, every_cell, label, pairs_of, pairwise
from tests.support.setups import LEVELS, Setup, World

MODES: Final = ("conditional_savepoint", "rollback_only", "control_fully", "create_savepoint")

DIMENSIONS: Final = {
    "driver": ("psycopg", "psycopg_async", "asyncpg"),
    "join": (
        "an engine",
        "a connection",
        *(f"{bound_to} with {mode}" for bound_to in ("a transaction", "a savepoint") for mode in MODES),
    ),
    "end": ("commit", "rollback", "outer rollback"),
    "phases": ("one phase", "two-phase"),
    "autoflush": ("autoflush", "autoflush=False", "no_autoflush"),
    "isolation": (
        LEVELS[0],
        *(
            f"{level} by {place}"
            for level in LEVELS[1:]
            for place in ("create_engine", "engine option", "connection option", "database")
        ),
    ),
    "schema": (
        "untranslated",
        *(f"{source} to tenant by {place}" for source in ("None", "jobs") for place in ("engine", "connection")),
    ),
    "session": ("plain", "scoped", "routing"),
    "binds": ("bind", "binds", "future"),
    "pool": ("QueuePool", "NullPool", "StaticPool", "AssertionPool"),
    "expiry": ("expire_on_commit", "expire_on_commit=False"),
    "begin": ("autobegin", "autobegin=False"),
    "notify": ("after_commit", "transaction"),
}

JOINED: Final = DIMENSIONS["join"][2:]
TWO_PHASE: Final[Setting] = ("phases", "two-phase")
OUTER_ROLLBACK: Final[Setting] = ("end", "outer rollback")

EXCLUDED: Final[dict[tuple[Setting, Setting], str]] = {
    **{(("join", joined), TWO_PHASE): "a two-phase session begins its transaction itself" for joined in JOINED},
    (OUTER_ROLLBACK, TWO_PHASE): "so a two-phase session has no outer transaction",
    **{(("join", alone), OUTER_ROLLBACK): "there is no outer transaction" for alone in ("an engine", "a connection")},
    (("session", "routing"), ("binds", "binds")): "the session's get_bind() decides, and looks at no binds",
}

MAIN: Final = ("driver", "join", "end", "phases", "session", "notify")
"""Those that the outcome depends on, and what could reach the wrong connection."""

USUAL: Final = {name: values[0] for name, values in DIMENSIONS.items()}

QUEUES: Final = ["default", "mail"]


@pytest.fixture(scope="module")
def world(server: Databases) -> Iterator[World]:
    world = World(server)
    yield world
    if leaks := world.close():
        pytest.fail("the tests left something behind:\n  " + "\n  ".join(leaks), pytrace=False)


# -- what the documentation says --------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """What a row of the documentation's table says."""

    commit: str
    undone: str


def table_of(page: str, *header: str) -> list[list[str]]:
    """The rows of the table that begins with these columns."""
    lines = (Path(__file__).parents[1] / "docs" / page).read_text().splitlines()
    rows = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]
    start = next(number for number, row in enumerate(rows) if row[: len(header)] == list(header)) + 2
    end = next(number for number, line in enumerate(lines) if number >= start and not line.startswith("|"))
    return rows[start:end]


OUTCOMES: Final = {
    f"{bound_to} with {mode}" if mode else bound_to: Outcome(commit, undone)
    for bound_to, mode, commit, undone in table_of("sessions.md", "bound to", "join_transaction_mode")
}
COMMITS: Final = "commits, workers are woken"
LEFT: Final = "is left to the outer transaction"


def test_the_documentation_has_an_outcome_for_each_way_to_bind_a_session() -> None:
    assert list(OUTCOMES) == list(DIMENSIONS["join"])
    assert {outcome.commit for outcome in OUTCOMES.values()} == {COMMITS, LEFT}


# -- the unit of work -------------------------------------------------------------------------------------------------


def check(world: World, cell: Cell) -> None:
    """Check one cell, from the first enqueue to the connection's next user."""
    setup = Setup(world, cell)
    world.run(setup.base, lambda: _check(setup, OUTCOMES[cell["join"]]))


def _check(setup: Setup, expected: Outcome) -> None:
    rolled_back = setup.cell["end"] == "rollback"
    with (
        StatementRecorder(setup.base) as written,
        StatementRecorder(setup.reader) as read,
        setup.bound() as (bind, outer, savepoint),
    ):
        with setup.session(bind) as (session, given):
            setup.begin(session, bind)
            jobs, others = _enqueue(setup, session, given, written)
            connection = session.connection(bind_arguments={"bind": bind})
            assert connection.scalar(sa.text("SHOW transaction_isolation")) == setup.level.lower()
            if session.twophase:
                session.prepare()
            assert states(jobs) == ["inserted"] * 4
            assert setup.jobs(jobs) == []
            assert setup.heard() == []
            if rolled_back:
                session.rollback()
            else:
                session.commit()
            ended = ["discarded"] * 6 if rolled_back else [*["committed"] * 4, "duplicate", "discarded"]
            before = list(written.events)
            assert states([*jobs, *others]) == ended
            assert written.events == before
            assert session.info == {}
        # Neither the INSERT, nor the look for the duplicate.
        assert read.matching("enlist_job") == []

        there = not rolled_back and expected.commit == COMMITS
        assert setup.jobs([*jobs, *others]) == (jobs if there else [])
        assert setup.heard() == (QUEUES if there else [])
        if outer is not None:
            _end(outer, savepoint, expected, setup.cell["end"])
            late = setup.cell["end"] == "commit" and expected.commit == LEFT
            there = there or late
            assert setup.jobs([*jobs, *others]) == (jobs if there else [])
            # The session's commit was not the real one, and that has only the NOTIFY of the transaction's own.
            assert setup.heard() == (QUEUES if late and setup.cell["notify"] == "transaction" else [])
    assert states([*jobs, *others]) == ended
    assert setup.orders() == _orders(setup, expected)
    written_by = setup.transactions(jobs[:3])  # a savepoint's rows have a number of their own
    assert (len(written_by), len(set(written_by))) == ((4, 1) if there else (0, 0))
    assert_as_new(setup)


def _enqueue(
    setup: Setup, session: Session, given: Any, written: StatementRecorder
) -> tuple[list[JobHandle], list[JobHandle]]:
    """Write an order, three jobs with it and one in a savepoint; the others are a duplicate and one undone."""
    order = Order(ref=setup.ref)
    session.add(order)
    before = list(written.events)
    late = setup.repo.enqueue(given, lambda o: SendReceipt(order_id=o.id), of=order)
    plain = setup.repo.enqueue(given, Note(text="plain"))
    twin = setup.repo.enqueue(given, Note(text="twin"), unique_key=setup.ref)
    duplicate = setup.repo.enqueue(given, Note(text="duplicate"), unique_key=setup.ref)
    assert written.events == before
    handles = [late, plain, twin, duplicate]
    assert states(handles) == ["staged"] * 4

    autoflush = setup.cell["autoflush"]
    with session.no_autoflush if autoflush == "no_autoflush" else nullcontext():
        session.scalars(sa.select(Receipt)).all()
    inserted = ["inserted", "inserted", "inserted", "duplicate"]
    assert states(handles) == (inserted if autoflush == "autoflush" else ["staged"] * 4)
    session.flush()
    assert states(handles) == inserted
    # It was looked for where it can be seen: in the transaction that has not committed it yet.
    assert duplicate.existing_id == twin.id

    with session.begin_nested():
        kept = setup.repo.enqueue(given, Note(text="kept"))
    savepoint = session.begin_nested()
    undone = setup.repo.enqueue(given, Note(text="undone"), queue="undone")
    session.flush()
    savepoint.rollback()
    assert states([*handles, kept, undone]) == [*inserted, "inserted", "discarded"]
    return [late, plain, twin, kept], [duplicate, undone]


def _end(outer: sa.Transaction, savepoint: sa.Transaction | None, expected: Outcome, end: str) -> None:
    """Commit or roll back what the session was in, after a look at what it has left open."""
    if end == "rollback":
        assert outer.is_active is (expected.undone != "the outer transaction")
    else:
        assert outer.is_active is (expected.commit == LEFT)
    if savepoint is not None and savepoint.is_active:
        assert end != "rollback" or expected.undone == "its own work"
        savepoint.commit()
    if outer.is_active:
        if end == "outer rollback":
            outer.rollback()
        else:
            outer.commit()


def _orders(setup: Setup, expected: Outcome) -> set[str]:
    """The orders that are committed in the end: the session's own, and those of what it was in."""
    around = {"a transaction": {"outer"}, "a savepoint": {"outer", "savepoint"}}.get(setup.bound_to, set())
    end = setup.cell["end"]
    if end == "commit" or (end == "outer rollback" and expected.commit == COMMITS):
        return around | {""}
    if end == "outer rollback" or expected.undone == "the outer transaction":
        return set()
    return around - {"savepoint"} if expected.undone == "the outer savepoint" else around


def assert_as_new(setup: Setup) -> None:
    """Every connection is back in its pool, with nothing of the session's left on it."""
    assert [setup.world.held(engine) for engine in (setup.base, setup.reader)] == [0, 0]
    level = LEVELS[0] if setup.level_by == "connection option" else setup.level
    with setup.engine.connect() as connection:
        assert connection.scalar(sa.text("SHOW transaction_isolation")) == level.lower()
        assert connection.scalar(sa.text("SHOW transaction_read_only")) == "off"


def states(handles: Sequence[JobHandle]) -> list[str]:
    return [str(handle.state) for handle in handles]


@pytest.mark.parametrize("cell", pairwise(DIMENSIONS, EXCLUDED), ids=lambda cell: label(cell, DIMENSIONS))
def test_a_unit_of_work_has_its_documented_outcome(world: World, cell: Cell) -> None:
    check(world, cell)


@pytest.mark.slow
@pytest.mark.parametrize("join", DIMENSIONS["join"])
@pytest.mark.parametrize("driver", DIMENSIONS["driver"])
def test_a_unit_of_work_has_its_documented_outcome_whatever_else_is_set(world: World, driver: str, join: str) -> None:
    main = {name: DIMENSIONS[name] for name in MAIN} | {"driver": (driver,), "join": (join,)}
    for cell in every_cell(main, EXCLUDED):
        try:
            check(world, USUAL | cell)
        except BaseException as error:
            error.add_note(f"in the cell {label(cell, DIMENSIONS)}")
            raise


# SQLAlchemy's own warning, by the session's rollback.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*transaction already deassociated from connection")
@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("driver", DIMENSIONS["driver"])
def test_a_session_that_outlives_the_transaction_it_joined_cannot_commit(
    world: World, driver: str, mode: str, end: str
) -> None:
    setup = Setup(world, USUAL | {"driver": driver, "join": f"a transaction with {mode}"})

    def outlive() -> None:
        with setup.bound() as (bind, outer, _), setup.session(bind) as (session, given):
            handle = setup.repo.enqueue(given, Note())
            session.flush()
            assert outer is not None
            getattr(outer, end)()
            with pytest.raises(SessionError, match="behind its back"):
                session.commit()
            session.rollback()
            assert state_of(handle) == "unknown"
            assert setup.jobs([handle]) == ([handle] if end == "commit" else [])
        assert_as_new(setup)

    world.run(setup.base, outlive)


# -- what cannot be ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("driver", DIMENSIONS["driver"])
@pytest.mark.parametrize("join", JOINED)
def test_a_two_phase_session_joins_no_transaction_and_loses_nothing_of_it(world: World, driver: str, join: str) -> None:
    setup = Setup(world, USUAL | {"driver": driver, "join": join, "phases": "two-phase"})

    def refused() -> None:
        with setup.bound() as (bind, outer, _):
            with setup.session(bind) as (session, given):
                handle = setup.repo.enqueue(given, Note())
                with pytest.raises(sa.exc.InvalidRequestError, match="two phase"):
                    session.flush()
            assert state_of(handle) == "discarded"
            assert outer is not None
            outer.commit()
        assert setup.jobs([handle]) == []
        assert "outer" in setup.orders()
        assert_as_new(setup)

    world.run(setup.base, refused)


# -- AUTOCOMMIT -------------------------------------------------------------------------------------------------------

AUTOCOMMIT: Final[dict[str, Any]] = {"isolation_level": "AUTOCOMMIT"}

REFUSED_BY: Final = {place: by for place, by, *_ in table_of("sessions.md", "AUTOCOMMIT set by")}

PLACES: Final = {
    "driver": DIMENSIONS["driver"],
    "session": DIMENSIONS["session"],
    "set by": tuple(
        place
        for place in REFUSED_BY
        # SQLAlchemy 2.1 has it, 2.0 has not.
        if place != "Session(execution_options=)" or "execution_options" in inspect.signature(Session).parameters
    ),
}

NOT_A_PLACE: Final[Exclusions] = {
    (("driver", "asyncpg"), ("set by", "connect_args")): "asyncpg has no such argument",
    (("driver", "asyncpg"), ("set by", "creator")): "asyncpg has no such flag",
}


def _autocommit_engine(world: World, driver: str, place: str) -> sa.Engine:
    """An engine that has AUTOCOMMIT from its making, if this is such a place."""
    given: dict[str, Any] = {}
    if place == "create_engine()":
        given = AUTOCOMMIT
    elif place == "connect_args":
        given = {"connect_args": {"autocommit": True}}
    elif place == "creator":
        url = world.url(driver, LEVELS[0])
        _, arguments = url.get_dialect()().create_connect_args(url)
        given = (
            {"creator": lambda: psycopg.connect(**arguments, autocommit=True)}
            if driver == "psycopg"
            else {"async_creator": lambda: psycopg.AsyncConnection.connect(**arguments, autocommit=True)}
        )
    engine = world.engine(driver, LEVELS[0], use=place, **given)
    if place == "a connect listener":
        event.listen(engine, "connect", _set_autocommit)
    return engine


def _set_autocommit(dbapi_connection: Any, _record: object) -> None:
    dbapi_connection.autocommit = True


@contextmanager
def _session_with(setup: Setup, engine: sa.Engine, place: str, level: dict[str, Any]) -> Iterator[tuple[Session, Any]]:
    """A Session whose isolation level is set at this place, if it is one behind the engine's making."""
    bind: sa.Engine | sa.Connection = engine
    with ExitStack() as stack:
        if place == "engine.execution_options()":
            bind = engine.execution_options(**level)
        elif place == "connection.execution_options()":
            bind = stack.enter_context(engine.connect()).execution_options(**level)
        more = {"execution_options": level} if place == "Session(execution_options=)" else {}
        session, given = stack.enter_context(setup.session(bind, **more))
        if place == "session.connection()":
            session.connection(bind_arguments={"bind": bind}, execution_options=level)
        yield session, given


@pytest.mark.parametrize("cell", pairwise(PLACES, NOT_A_PLACE), ids=lambda cell: "-".join(cell.values()))
def test_autocommit_is_refused_and_nothing_is_written(world: World, cell: Cell) -> None:
    setup = Setup(world, USUAL | {"driver": cell["driver"], "session": cell["session"]})
    engine = _autocommit_engine(world, cell["driver"], cell["set by"])
    # A session that chooses its bind by the statement is asked for it by the flush.
    at_the_call = REFUSED_BY[cell["set by"]] == "enqueue()" and cell["session"] != "routing"
    handles: list[JobHandle] = []

    def enqueue_and_commit(session: Session, given: Any) -> None:
        handles.append(setup.repo.enqueue(given, Note()))
        session.commit()

    def refused() -> None:
        with _session_with(setup, engine, cell["set by"], AUTOCOMMIT) as (session, given):
            session.add(Order(ref=setup.ref))
            with pytest.raises(SessionError, match=r"AUTOCOMMIT mode.*; use an engine without"):
                enqueue_and_commit(session, given)
            session.rollback()

    world.run(engine, refused)
    assert states(handles) == ([] if at_the_call else ["discarded"])
    assert setup.jobs(handles) == []
    assert setup.orders() == set()
    assert world.held(engine) == 0


@pytest.mark.parametrize("place", PLACES["set by"][1:-3])
@pytest.mark.parametrize("driver", DIMENSIONS["driver"])
def test_autocommit_of_an_engine_can_be_taken_back(world: World, driver: str, place: str) -> None:
    setup = Setup(world, USUAL | {"driver": driver})
    engine = _autocommit_engine(world, driver, "create_engine()")
    handles: list[JobHandle] = []

    def commit() -> None:
        with _session_with(setup, engine, place, {"isolation_level": LEVELS[0]}) as (session, given):
            handles.append(setup.repo.enqueue(given, Note()))
            session.flush()
            assert setup.jobs(handles) == []
            session.commit()

    world.run(engine, commit)
    assert setup.jobs(handles) == handles
    assert setup.heard() == ["default"]
    assert world.held(engine) == 0


# -- the matrix itself ------------------------------------------------------------------------------------------------


def test_every_pair_of_settings_is_tried_or_excluded_for_a_reason() -> None:
    cells = pairwise(DIMENSIONS, EXCLUDED)
    met = {frozenset(pair) for cell in cells for pair in combinations(cell.items(), 2)}
    excluded = {frozenset(pair) for pair in EXCLUDED}
    assert met | excluded == {frozenset(pair) for pair in pairs_of(DIMENSIONS)}
    assert not met & excluded
    assert all(EXCLUDED.values())
    assert all(cell.keys() == DIMENSIONS.keys() for cell in cells)
    assert len({label(cell, DIMENSIONS) for cell in cells}) == len(cells)
    # The two longest dimensions need as many.
    assert 90 <= len(cells) <= 120


def test_a_pair_that_fits_in_no_cell_is_an_error_and_so_is_an_unknown_one() -> None:
    dimensions = {"a": ("1", "2"), "b": ("1", "2"), "c": ("1", "2")}
    excluded = {(("a", "2"), ("c", value)): "why" for value in ("1", "2")}
    with pytest.raises(ValueError, match="fits in no cell"):
        pairwise(dimensions, excluded)
    with pytest.raises(ValueError, match="no pairs of these"):
        pairwise(dimensions, {(("a", "3"), ("c", "1")): "why"})
    assert len(every_cell(dimensions, {(("a", "2"), ("c", "1")): "why"})) == 6
