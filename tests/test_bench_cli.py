"""``enlist bench``: its commands take what they say, print facts for people and for programs, and exit by them."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer.main
from sqlalchemy import URL

from enlist._cli_bench import bench
from enlist.bench._progress import Progress
from tests.test_bench_claim import FACTS as CLAIM_FACTS
from tests.test_bench_drain import FACTS as DRAIN_FACTS
from tests.test_bench_enqueue import FACTS as ENQUEUE_FACTS
from tests.test_bench_latency import FACTS as LATENCY_FACTS
from tests.test_cli import Enlist, enlist
from tests.test_lab import RIGHT as LAB_FACTS

__all__ = ["enlist"]

PAGE = Path(__file__).parents[1] / "docs" / "bench.md"
FACTS: dict[str, Any] = {
    "drain": DRAIN_FACTS,
    "enqueue": ENQUEUE_FACTS,
    "latency": LATENCY_FACTS,
    "claim": CLAIM_FACTS,
    "lab": LAB_FACTS,
}


class Measurement:
    """In place of one that takes minutes: it shows a step, and finds what it is given."""

    def __init__(self, facts: Any) -> None:
        self.facts = facts
        self.options: dict[str, Any] = {}

    def __call__(self, *, progress: Progress, **options: Any) -> Any:
        self.options = options
        progress.begin(1)
        progress.step("the only one")
        return self.facts


def stand_in(monkeypatch: pytest.MonkeyPatch, command: str, facts: Any) -> Measurement:
    measurement = Measurement(facts)
    monkeypatch.setattr(importlib.import_module(f"enlist.bench.{command}"), f"run_{command}", measurement)
    return measurement


@pytest.mark.parametrize("command", list(FACTS))
def test_a_table_for_people_and_json_for_programs(
    enlist: Enlist, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    facts = FACTS[command]
    stand_in(monkeypatch, command, facts)
    text = enlist("bench", command)
    assert (text.status, text.out) == (0, f"{facts.as_text()}\n")
    assert "1 of 1: the only one" in text.err
    as_json = enlist("bench", command, "--json")
    assert (as_json.status, as_json.err) == (0, "")
    assert json.loads(as_json.out) == json.loads(facts.as_json())


@pytest.mark.parametrize(
    ("command", "facts"),
    [
        ("drain", dataclasses.replace(DRAIN_FACTS, rows=(dataclasses.replace(DRAIN_FACTS.rows[1], other=None),))),
        ("lab", LAB_FACTS),
    ],
)
def test_facts_that_are_off_are_printed_and_exit_with_1(
    enlist: Enlist, monkeypatch: pytest.MonkeyPatch, command: str, facts: Any
) -> None:
    if command == "drain":
        side = facts.rows[0].side
        wrong = dataclasses.replace(side, drains=(dataclasses.replace(side.drains[0], done=1499), *side.drains[1:]))
        facts = dataclasses.replace(facts, rows=(dataclasses.replace(facts.rows[0], side=wrong),))
    else:
        facts = dataclasses.replace(facts, attempt=1)
    stand_in(monkeypatch, command, facts)
    for arguments, printed in (([], facts.as_text()), (["--json"], facts.as_json())):
        result = enlist("bench", command, *arguments)
        assert (result.status, result.out) == (1, f"{printed}\n")
    assert "NOT as it should be" in facts.as_text()


def test_drain_takes_its_options(enlist: Enlist, monkeypatch: pytest.MonkeyPatch) -> None:
    measurement = stand_in(monkeypatch, "drain", DRAIN_FACTS)
    enlist("bench", "drain", ENLIST_DATABASE_URL="postgresql://h/production")
    assert measurement.options == {
        "url": None,  # a measurement is never made where an application works because of its environment
        "jobs": 20_000,
        "repeat": 5,
        "slots": 10,
        "processes": 1,
        "rows": (),
        "states": (),
        "scale": 1.0,
    }
    numbers = ["--jobs", "7", "--repeat", "2", "--slots", "3", "--processes", "4", "--scale", "0.5"]
    names = ["--row", "noop", "--row", "insert", "--state", "pinned"]
    enlist("bench", "drain", *numbers, *names, "--database-url", "postgresql://h/d")
    assert measurement.options == {
        "url": URL.create("postgresql+psycopg", host="h", database="d"),
        "jobs": 7,
        "repeat": 2,
        "slots": 3,
        "processes": 4,
        "rows": ["noop", "insert"],
        "states": ["pinned"],
        "scale": 0.5,
    }


def test_what_cannot_be_measured_is_one_line(enlist: Enlist) -> None:
    assert enlist("bench", "drain", "--row", "noops").error.startswith("there is no row 'noops' to measure: choose amo")
    assert enlist("bench", "drain", "--jobs", "0").status == 2


@pytest.mark.slow
def test_drain_on_a_database_of_ones_own(enlist: Enlist, database_url: URL) -> None:
    options = ["--row", "noop", "--jobs", "20", "--repeat", "1", "--json"]
    result = enlist("bench", "drain", *options, "--database-url", database_url)
    assert (result.status, result.err) == (0, "")
    found = json.loads(result.out)
    assert (found["right"], found["rows"]["noop"]["jobs"]) == (True, 20)


def test_the_page_has_every_command_and_only_options_that_there_are() -> None:
    commands: dict[str, Any] = typer.main.get_command(bench).commands  # type: ignore[attr-defined]
    lines = re.findall(r"^enlist bench (\w+)(.*)$", PAGE.read_text(), re.MULTILINE)
    assert {command for command, _ in lines} == set(commands)
    for command, rest in lines:
        known = {option for parameter in commands[command].params for option in parameter.opts}
        assert set(re.findall(r"--[\w-]+", rest)) <= known, command
