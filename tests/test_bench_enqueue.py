"""The measurement of what enqueueing costs: that it measures what it says. What it finds is the machine's affair."""

from __future__ import annotations

import json

import pytest
from sqlalchemy import URL

from enlist import ConfigurationError
from enlist.bench.enqueue import EnqueueFacts, Ratio, run_enqueue
from tests.support import Observer

FACTS = EnqueueFacts(
    one_job=Ratio(1, 1.25, plain=(1000.0, 900.0, 2000.0), enlist=(1100.0, 990.0, 1400.0)),
    ten_jobs=Ratio(10, 1.05, plain=(1000.0, 1000.0, 2000.0), enlist=(800.0, 900.0, 4000.0)),
    bulk_jobs=100_000,
    bulk_enqueue_seconds=(0.5, 0.4, 2.0),
    bulk_commit_seconds=(0.4, 0.4, 0.3),
    long_jobs=1_000_000,
    long_growth_bytes=1_500_000,
    server="18.6",
    fsync="on",
)


@pytest.mark.slow
def test_all_is_measured_and_nothing_is_left(database_url: URL, observer: Observer) -> None:
    facts = run_enqueue(url=database_url, repeat=2, transactions=3, bulk_jobs=1500, long_jobs=20_000)
    for ratio in (facts.one_job, facts.ten_jobs):
        assert len(ratio.plain) == len(ratio.enlist) == 2
        assert min(ratio.plain + ratio.enlist) > 0
    assert (len(facts.bulk_enqueue_seconds), len(facts.bulk_commit_seconds)) == (2, 2)
    assert facts.bulk_rate > 0
    assert facts.fsync == observer.scalar("SHOW fsync")
    assert not observer.scalar("SELECT count(*) FROM pg_namespace WHERE nspname = 'enlist_bench_enqueue'")
    assert not observer.scalar("SELECT count(*) FROM public.enlist_job")


@pytest.mark.slow
def test_memory_stays_flat_over_a_million_jobs_of_one_session(database_url: URL) -> None:
    facts = run_enqueue(url=database_url, repeat=1, transactions=1, bulk_jobs=1, long_jobs=1_000_000)
    # Something kept for each job, be it a byte string or an object, would be 30 MB or more.
    assert facts.long_growth_bytes < 10_000_000


def test_a_schema_that_is_there_is_left_alone(database_url: URL, observer: Observer) -> None:
    observer.execute("CREATE SCHEMA enlist_bench_enqueue")
    with pytest.raises(ConfigurationError, match="has a schema 'enlist_bench_enqueue' already"):
        run_enqueue(url=database_url)
    assert observer.scalar("SELECT to_regnamespace('enlist_bench_enqueue') IS NOT NULL")


def test_the_facts_as_text_and_json() -> None:
    assert FACTS.as_text().splitlines() == [
        "What jobs cost their producer: the median of 3.",
        "",
        "microseconds a transaction           enlist  rows by hand  ratio  at most",
        "1 job, a row of yours, the commit     1,100         1,000   1.10     1.25",
        "10 jobs, a row of yours, the commit     900         1,000   0.90     1.05",
        "",
        "in bulk                               jobs/s  us to enqueue  us to write  at least",
        "enqueue_many of 100,000, the commit  111,111            5.0          4.0   100,000",
        "",
        "While one session enqueued 1,000,000 jobs, memory grew by 1.5 MB.",
        "PostgreSQL 18.6, fsync on",
    ]
    found = json.loads(FACTS.as_json())
    assert found["one_job"]["ratio"] == 1.1
    assert found["ten_jobs"]["ratio"] == 0.9
    assert found["bulk"]["jobs_per_second"] == 111_111
    assert found["memory"] == {"jobs": 1_000_000, "growth_bytes": 1_500_000}
