"""The measurement of latencies: that it measures what it says. What it finds is the machine's affair."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from sqlalchemy import URL, create_engine

from enlist import ConfigurationError
from enlist.bench import producer
from enlist.bench.latency import Idle, Latency, LatencyFacts, Throughput, run_latency
from enlist.bench.producer import Base, Task
from tests.support import Observer

FACTS = LatencyFacts(
    latencies=(
        Latency("plain handler", tuple(float(number) for number in range(1, 101))),
        Latency("async handler", (2.0,)),
    ),
    due=Latency("from a job's time to the handler", (3.0, 1.0)),
    throughput=Throughput(
        {"after_commit": (90.0, 210.0, 95.0), "transaction": (50.0, 100.0, 50.0), None: (100.0, 200.0, 100.0)}
    ),
    idle=Idle(1.0, 10, 5.0),
    server="18.6",
    fsync="on",
)


@pytest.mark.slow
def test_all_is_measured_and_nothing_is_left(database_url: URL, observer: Observer) -> None:
    facts = run_latency(url=database_url, jobs=2, repeat=2, seconds=0.05, due_jobs=3, idle_seconds=0.1)
    assert [latency.title for latency in facts.latencies] == [
        "plain handler, producer in another process",
        "async handler, producer in another process",
        "plain handler, producer in the same process",
        "async handler, producer in the same process",
    ]
    for latency in facts.latencies:
        assert len(latency.milliseconds) == 2
        assert min(latency.milliseconds) > 0
        assert max(latency.milliseconds) < 10_000, "a poll found it, not a wake"
    assert len(facts.due.milliseconds) == 3
    assert max(facts.due.milliseconds) < 10_000
    assert list(facts.throughput.by_notify) == ["after_commit", "transaction", None]
    for rates in facts.throughput.by_notify.values():
        assert len(rates) == 2
        assert min(rates) > 0
    assert facts.fsync == observer.scalar("SHOW fsync")
    assert not observer.scalar("SELECT count(*) FROM pg_namespace WHERE nspname = 'enlist_bench_latency'")
    assert not observer.scalar("SELECT count(*) FROM public.enlist_job")


def test_a_schema_that_is_there_is_left_alone(database_url: URL, observer: Observer) -> None:
    observer.execute("CREATE SCHEMA enlist_bench_latency")
    with pytest.raises(ConfigurationError, match="has a schema 'enlist_bench_latency' already"):
        run_latency(url=database_url)
    assert observer.scalar("SELECT to_regnamespace('enlist_bench_latency') IS NOT NULL")


def test_a_producer_does_what_it_is_told(database_url: URL, observer: Observer) -> None:
    engine = create_engine(database_url)
    Base.metadata.create_all(engine)
    committed = producer.enqueued(engine, Task(kind="a", jobs=3, delays=(50.0, 60.0), notify=None))
    assert sorted(committed) == sorted(str(job_id) for (job_id,) in observer.rows("SELECT id FROM enlist_job"))
    assert observer.scalar("SELECT bool_and(run_at - created_at BETWEEN '50 s' AND '60 s') FROM enlist_job")
    number = producer.commits(engine, Task(seconds=0.05, notify=None))
    assert number == observer.scalar("SELECT count(*) FROM bench_note") > 0
    assert number == observer.scalar("SELECT count(*) FROM enlist_job WHERE queue = %s", producer.OTHER_QUEUE)
    engine.dispose()
    assert Task(**json.loads(json.dumps(asdict(Task(notify=None))))) == Task(notify=None)


def test_the_facts_as_text_and_json() -> None:
    assert FACTS.as_text().splitlines() == [
        "How soon an idle worker starts a job: milliseconds from the return of COMMIT, or from the job's time.",
        "",
        "                                    p50    p99     max  at most",
        "plain handler                     50.00  99.00  100.00  1.5 / 5",
        "async handler                      2.00   2.00    2.00  1.5 / 5",
        "from a job's time to the handler   1.00   3.00    3.00       50",
        "",
        "a row and a job a transaction, 8 processes  commits/s  ratio  at least",
        "notify=None                                       100",
        "notify='after_commit'                              95   0.95       0.9",
        "notify='transaction'                               50   0.50",
        "",
        "The worker polled every 60 s.",
        "An idle one that polls every 1 s sends 2.00 statements/s.",
        "PostgreSQL 18.6, fsync on",
    ]
    found = json.loads(FACTS.as_json())
    assert found["latency"]["plain handler"] == {"jobs": 100, "p50_ms": 50.0, "p99_ms": 99.0, "max_ms": 100.0}
    assert found["due"]["max_ms"] == 3.0
    assert found["commits"]["ratio"] == {"after_commit": 0.95, "transaction": 0.5}
    assert found["idle"]["statements_per_second"] == 2.0
