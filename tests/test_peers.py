"""The comparison with other queues counts right, says what went wrong, and works for enlist. The others aren't here."""

from __future__ import annotations

import json
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import URL, Engine

from tests.peers import measures, place
from tests.peers.__main__ import main
from tests.peers.board import Board
from tests.peers.domain import Base
from tests.peers.drain import Drained, Failed, Workers, drain
from tests.peers.machine import Meter
from tests.peers.peer import PLAIN
from tests.peers.place import Run
from tests.peers.report import as_text
from tests.peers.run import Results, measure
from tests.peers.table import ROWS, ratios, table
from tests.support import Observer

FIGURES = {
    "drain-1": {
        "enlist": {1: 900.0, 2: 3000.0, 3: 1500.0},
        "enlist-async": {1: 800.0, 2: 2000.0, 3: 1000.0},
        "pgqueuer": {1: 1000.0, 2: 1000.0, 3: 1250.0},
        "awa": {1: 600.0, 2: 2000.0},
    },
    "wal": {"enlist": {1: 500.0}, "pgqueuer": {1: 1000.0}, "awa": {1: 750.0}},
    "enqueue-ten": {"enlist": {1: 180.0}, "pgqueuer": {1: 90.0}, PLAIN: {1: 200.0}},
}


def results() -> Results:
    return Results(["enlist", "enlist-async", "pgqueuer", "awa", "chancy"], FIGURES)


# -- the table -------------------------------------------------------------------------------------------------


def test_a_ratio_is_the_median_of_those_to_the_best_peer_of_each_round() -> None:
    figures = FIGURES["drain-1"]
    peers = [figures["pgqueuer"], figures["awa"]]
    assert ratios(ROWS["drain-1"], figures["enlist"], peers) == 1.2  # of 0.9, 1.5 and 1.2
    assert ratios(ROWS["wal"], {1: 500.0}, [{1: 1000.0}, {1: 750.0}]) == 1.5  # less is better
    assert ratios(ROWS["drain-1"], figures["enlist"], []) is None
    assert ratios(ROWS["drain-1"], {1: 1.0}, [{2: 1.0}]) is None  # no round has both


def test_the_table_has_medians_with_the_best_in_bold() -> None:
    found = results()
    found.errors = {"drain-1": {"chancy": "died | of it"}}
    found.cannot = {"enqueue-ten": {"awa": "no way"}}
    assert table(found, ["drain-1", "enqueue-ten"]).splitlines() == [
        "| | enlist | enlist-async | pgqueuer | awa | chancy | plain rows | enlist to the best peer |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
        "| drain, 1 process, jobs/s | **1,500** | 1,000 | 1,000 | 1,300 | error: died / of it |  | 1.20 (enlist) |",
        "| enqueue 10 jobs and a row, transactions/s | **180** |  | 90 | cannot |  | 200 | 2.00; 0.90 of plain rows |",
        "| WAL, bytes a job | **500** |  | 1,000 | 750 | error: died / of it |  | 1.50 |",
        "| worker's CPU, us a job |  |  |  |  | error: died / of it |  |  |",
        "| worker's peak memory, MiB |  |  |  |  | error: died / of it |  |  |",
    ]


# -- what goes wrong -------------------------------------------------------------------------------------------


def drained(path: Path, url: URL, runs: list[int], effects: int) -> Drained:
    """A drain by no workers of jobs that have run so often, and left so many effects."""
    board = Board(path / "board")
    for number, times in enumerate(runs):
        for _ in range(times):
            board.ran(number)
    workers = Workers(path / "board", board, [], path / "log")
    with psycopg.connect(url.set(drivername="postgresql").render_as_string(), autocommit=True) as connection:
        connection.execute("INSERT INTO peers_effect (job) SELECT generate_series(1, %s::int)", (effects,))
        return drain(workers, connection, len(runs), "false", Meter(None), effects=True)


def test_a_job_that_ran_twice_and_a_lost_effect_are_found(database_url: URL, engine: Engine, tmp_path: Path) -> None:
    Base.metadata.create_all(engine)
    assert drained(tmp_path, database_url, [1, 2, 1], 2).wrong == "1 jobs ran more than once, 3 jobs left 2 effects"


def test_nothing_is_wrong_with_what_is_right(database_url: URL, engine: Engine, tmp_path: Path) -> None:
    Base.metadata.create_all(engine)
    assert drained(tmp_path, database_url, [1, 1, 1], 3).wrong == ""


@pytest.mark.parametrize("unrun", [True, False])
def test_a_job_that_is_never_run_or_recorded_as_done_fails_the_drain(
    unrun: bool, observer: Observer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.peers.drain.PATIENCE_SECONDS", 0.05)
    board = Board(tmp_path / "board")
    if not unrun:
        board.ran(0)
    workers = Workers(tmp_path / "board", board, [], tmp_path / "log")
    with pytest.raises(Failed, match="1 of 1 jobs were not run" if unrun else "not all jobs were recorded as done"):
        drain(workers, observer.connection, 1, "true", Meter(None), effects=False)


def test_only_enlists_faults_give_a_status() -> None:
    assert results().status == 0
    for ours, peers in ({"enlist": "x"}, 1), ({"enlist-async": "x"}, 1), ({"pgqueuer": "x"}, 0):
        failed, wrong = results(), results()
        failed.errors = {"drain-1": ours}
        wrong.wrong = {name: ["1 jobs ran more than once"] for name in ours}
        assert (failed.status, wrong.status) == (peers, peers)


def test_a_peer_that_is_not_there_does_not_stop_the_others(database_url: URL) -> None:
    said: list[str] = []
    found = measure(database_url, Run(Meter(None), report=said.append), ["no-such"], ["drain-1"], 1)
    assert "ModuleNotFoundError" in found.error("drain-1", "no-such")
    assert said == [f"no-such: error: {found.error('drain-1', 'no-such')}"]
    assert "no-such failed in install" in as_text(found, Run(Meter(None)), ["drain-1"], 1, "18")
    assert found.status == 0


@pytest.mark.parametrize("option", ["--peers=no-such", "--measures=no-such", "--set=rubbish"])
def test_what_is_not_there_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([option])
    assert caught.value.code == 2
    assert option.partition("=")[2] in capsys.readouterr().err


# -- enlist's own adapter --------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Measures that take no longer than their processes."""
    for module, name, value in (
        (measures, "ENQUEUE_SECONDS", 0.05),
        (measures, "IDLE_SECONDS", 0.2),
        (measures, "LATENCY_JOBS", 5),
        (measures, "FINISHED", 50),
        (place, "PAUSE_SECONDS", 0.0),
    ):
        monkeypatch.setattr(module, name, value)
    return Run(Meter(None), jobs=40, patience=0)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_enlist_is_measured(small: Run, database_url: URL, observer: Observer) -> None:
    wanted = ["drain-1", "insert-grouped", "enqueue-ten", "latency", "finished"]  # one of each sort
    found = measure(database_url, small, ["enlist", "enlist-async"], wanted, 1)
    assert (found.errors, found.wrong, found.status) == ({}, {}, 0)
    assert found.figures.keys() == {name for name, row in ROWS.items() if row.measure in wanted}
    for row, figures in found.figures.items():
        assert figures.keys() == {"enlist", "enlist-async"} | ({PLAIN} if row in measures.FLOORED else set())
        assert all(of_peer[1] > 0 for of_peer in figures.values())
    assert len(found.foreign_cores) == 8
    assert not observer.scalar("SELECT count(*) FROM pg_database WHERE datname LIKE 'peers%%'")


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    options = [
        "--peers=enlist",
        "--measures=drain-1",
        "--rounds=1",
        "--jobs=40",
        "--set=enlist.slots=3",
        f"--json={file}",
    ]
    assert main(options) == 0
    out = capsys.readouterr().out
    assert "| drain, 1 process, jobs/s | **" in out
    assert "- enlist: slots 3, commit_every 1" in out
    assert "Each job of each drain that has a figure ran exactly once" in out
    assert json.loads(file.read_text())["figures"]["drain-1"]["enlist"]["1"] > 0
