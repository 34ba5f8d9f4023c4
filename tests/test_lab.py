"""The lab: 1,000 short jobs, one that fails twice, one whose worker dies. The facts are checked, not the seconds."""

from __future__ import annotations

import dataclasses
import json

import pytest
from sqlalchemy import URL

from enlist import ConfigurationError
from enlist.bench.lab import Facts, Round, run_lab
from tests.support import Observer
from tests.support.pgbouncer import PgBouncer

RIGHT = Facts(
    rounds=(Round(1000, 1000, 1, 3, 0.5), Round(1000, 1000, 1, 3, 0.3), Round(1000, 1000, 1, 3, 0.4)),
    reaped_before=0,
    reaped_after=1,
    attempt=2,
    server="18.6",
    fsync="on",
)


@pytest.mark.slow
def test_the_facts_of_the_lab(database_url: URL, observer: Observer) -> None:
    facts = run_lab(url=database_url)
    (one,) = facts.rounds
    assert (one.done, one.distinct, one.more_than_once, one.most_runs) == (1000, 1000, 1, 3)
    assert (facts.reaped_before, facts.reaped_after, facts.attempt) == (0, 1, 2)
    assert facts.right
    assert not observer.scalar("SELECT count(*) FROM pg_namespace WHERE nspname = 'enlist_lab'")
    assert not observer.scalar("SELECT count(*) FROM public.enlist_job")


def test_a_schema_that_is_there_is_left_alone(database_url: URL, observer: Observer) -> None:
    observer.execute("CREATE SCHEMA enlist_lab")
    observer.execute("CREATE TABLE enlist_lab.mine ()")
    with pytest.raises(ConfigurationError, match="has a schema 'enlist_lab' already"):
        run_lab(url=database_url)
    assert observer.scalar("SELECT to_regclass('enlist_lab.mine') IS NOT NULL")


@pytest.mark.pgbouncer
def test_connections_that_are_in_another_schema_are_refused(database_url: URL, observer: Observer) -> None:
    with (
        PgBouncer(database_url, ignore_startup_parameters="options") as bouncer,
        pytest.raises(ConfigurationError, match="is in the schema 'public' instead of 'enlist_lab'; behind PgBouncer"),
    ):
        run_lab(url=bouncer.url)
    assert not observer.scalar("SELECT count(*) FROM pg_namespace WHERE nspname = 'enlist_lab'")


def test_the_facts_as_text_and_json() -> None:
    assert RIGHT.as_text().splitlines() == [
        "1,000 jobs of 2 ms on 8 slots, one fails 2 times.",
        "A worker is killed while it holds another job.",
        "",
        "                                            found  must be",
        "jobs done                                   1,000    1,000",
        "distinct jobs run                           1,000    1,000",
        "jobs run more than once                         1        1",
        "most runs of a job                              3        3",
        "reaped before the dead worker's lease ends      0        0",
        "reaped after that                               1        1",
        "run again as attempt                            2        2",
        "",
        "seconds for the 1,000: 0.400 (ideal 0.25)",
        "  the median of 3, 0.300 to 0.500",
        "PostgreSQL 18.6, fsync on",
        "done=1000, all as it should be",
    ]
    found = json.loads(RIGHT.as_json())
    assert (found["done"], found["seconds"], found["right"]) == (1000, 0.4, True)


@pytest.mark.parametrize(
    "facts",
    [
        dataclasses.replace(RIGHT, reaped_before=1),
        dataclasses.replace(RIGHT, reaped_after=0),
        dataclasses.replace(RIGHT, attempt=1),
        *(
            dataclasses.replace(RIGHT, rounds=(wrong, *RIGHT.rounds))
            for wrong in (
                Round(999, 1000, 1, 3, 0.3),
                Round(1000, 999, 1, 3, 0.3),
                Round(1000, 1000, 2, 3, 0.3),
                Round(1000, 1000, 1, 4, 0.3),
            )
        ),
    ],
)
def test_a_fact_that_is_off_is_said(facts: Facts) -> None:
    assert not facts.right
    assert facts.as_text().endswith("NOT as it should be")
