"""The audit of the indexes: that it finds who writes to which, and that no index is added without a reader."""

from __future__ import annotations

import json

import pytest
import sqlalchemy as sa
from sqlalchemy import URL

from enlist import ConfigurationError
from enlist.bench._index_facts import FILLFACTORS, PHASES, REST, SERVES, SORTS, IndexFacts, Life
from enlist.bench.indexes import run_indexes
from enlist.models import JobRecord
from tests.support import Observer

TABLE = "enlist_job"


@pytest.fixture(scope="module")
def facts() -> IndexFacts:
    """Of a server of its own."""
    return run_indexes(jobs=200)


@pytest.fixture
def lives(facts: IndexFacts) -> dict[str, Life]:
    return {life.sort: life for life in facts.lives}


def written(life: Life, phase: str) -> set[str]:
    """The indexes that jobs wrote to in a phase."""
    return {name.removeprefix(f"{TABLE}_") for name in SERVES if life.per_job(name, phase) > 0}


def test_of_every_index_it_is_said_what_reads_it(observer: Observer) -> None:
    table = JobRecord.__table__
    assert isinstance(table, sa.Table)
    mapped = {str(index.name) for index in table.indexes}
    assert mapped | {f"{TABLE}_pkey"} == SERVES.keys()
    migrated = observer.scalar(
        "SELECT array_agg(indexname::text) FROM pg_indexes WHERE tablename = 'enlist_job' AND schemaname = 'public'"
    )
    assert set(migrated) == SERVES.keys()


@pytest.mark.slow
def test_a_job_writes_only_to_the_indexes_of_its_sort(lives: dict[str, Life]) -> None:
    keyed = {"ready_key", "queue_key"}
    assert written(lives["plain"], "insert") == {"pkey", "ready"}
    assert written(lives["keyed"], "insert") == {"pkey", *keyed}
    assert written(lives["ordered"], "insert") == {"pkey", *keyed, "ordered"}
    assert written(lives["unique"], "insert") == {"pkey", "ready", "unique"}
    for phase in ("claim", "renew"):
        assert written(lives["plain"], phase) == {"pkey", "lease"}
        assert written(lives["keyed"], phase) == {"pkey", "lease", "slot"}
        assert written(lives["ordered"], phase) == {"pkey", "lease", "slot", "ordered"}
        assert written(lives["unique"], phase) == {"pkey", "lease", "unique"}
    assert written(lives["plain"], "complete") == {"pkey"}
    # Emptied of what the others left dead, but not written to by a job.
    assert not {*keyed, "ordered", "slot", "unique"} & written(lives["plain"], "vacuum")


def test_every_byte_is_accounted_for(facts: IndexFacts) -> None:
    for life in (*facts.lives, *facts.fillfactors):
        assert life.wal.keys() == {TABLE, *SERVES, REST}
        for phase in PHASES:
            assert life.wal[TABLE][phase] > 0
            assert life.wal[REST][phase] >= 0
        # Few bytes belong to no job's row: the commits are shared by many.
        assert sum(life.wal[REST].values()) < 0.05 * life.all_per_job() * life.jobs
    assert (facts.full_page_writes, sum(life.page_images for life in facts.lives)) == ("off", 0)


def test_the_reads_of_the_indexes_are_counted(lives: dict[str, Life]) -> None:
    for sort, names in {
        "plain": ("pkey", "ready", "lease"),
        "keyed": ("pkey", "ready_key", "slot"),
        "unique": ("pkey", "ready", "unique"),
    }.items():
        assert all(lives[sort].scans[f"{TABLE}_{name}"] > 0 for name in names), sort


def test_each_fillfactor_is_tried_and_room_on_the_pages_saves_wal(facts: IndexFacts) -> None:
    assert [life.fillfactor for life in facts.fillfactors] == list(FILLFACTORS)
    wal = [life.all_per_job("claim", "complete") for life in facts.fillfactors]
    sizes = [life.queued_bytes for life in facts.fillfactors]
    assert wal == sorted(wal, reverse=True)
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    assert {life.sort for life in facts.fillfactors} == {"plain"}


@pytest.mark.slow
def test_in_a_given_database_nothing_is_left(database_url: URL, observer: Observer) -> None:
    facts = run_indexes(url=database_url, jobs=100)
    assert [life.sort for life in facts.lives] == list(SORTS)
    assert facts.full_page_writes == observer.scalar("SHOW full_page_writes")
    assert not observer.scalar("SELECT count(*) FROM pg_namespace WHERE nspname = 'enlist_bench_indexes'")
    assert not observer.scalar("SELECT count(*) FROM pg_extension WHERE extname = 'pg_walinspect'")
    assert not observer.scalar("SELECT count(*) FROM public.enlist_job")


@pytest.mark.slow
def test_an_extension_that_is_there_is_used_and_left(database_url: URL, observer: Observer) -> None:
    observer.execute('CREATE SCHEMA "an extension\'s"')
    observer.execute('CREATE EXTENSION pg_walinspect SCHEMA "an extension\'s"')
    assert run_indexes(url=database_url, jobs=100).lives[0].all_per_job() > 0
    assert observer.scalar("SELECT count(*) FROM pg_extension WHERE extname = 'pg_walinspect'") == 1


def test_who_may_not_read_the_wal_is_told_what_it_takes(database_url: URL, observer: Observer) -> None:
    observer.execute(f'GRANT CREATE ON DATABASE "{database_url.database}" TO pg_monitor')
    url = database_url.update_query_dict({"options": "-crole=pg_monitor"})
    with pytest.raises(ConfigurationError, match=r"pg_walinspect cannot be installed .*a superuser installs it"):
        run_indexes(url=url)
    assert not observer.scalar("SELECT count(*) FROM pg_namespace WHERE nspname = 'enlist_bench_indexes'")


def made(sort: str, fillfactor: int) -> Life:
    """Of ten jobs: the table has 1,000 bytes in each phase, the primary key 100, the rest 10."""
    nothing = dict.fromkeys(PHASES, 0)
    wal = {TABLE: dict.fromkeys(PHASES, 10_000), **dict.fromkeys(SERVES, nothing), REST: dict.fromkeys(PHASES, 100)}
    wal["enlist_job_pkey"] = dict.fromkeys(PHASES, 1_000)
    scans = dict.fromkeys(SERVES, 0) | {"enlist_job_pkey": 2_000, "enlist_job_lease": 3}
    return Life(sort, 10, fillfactor, wal, 8192, scans, queued_bytes=3_000, done_bytes=6_004)


def test_the_facts_as_text_and_json() -> None:
    facts = IndexFacts((made("plain", 70),), (made("plain", 70),), "18.6", "on", "on")
    text = facts.as_text()
    assert text.splitlines()[1:8] == [
        "PostgreSQL 18.6, fsync on, full_page_writes on",
        "16,384 bytes of it all are copies of whole pages",
        "",
        "plain jobs                insert     claim     renew  complete    vacuum      life     scans",
        "  enlist_job               1,000     1,000     1,000     1,000     1,000     5,000",
        "  enlist_job_pkey            100       100       100       100       100       500     2,000",
        "  everything else             10        10        10        10        10        50",
    ]
    assert "  table and indexes        1,100     1,100     1,100     1,100     1,100     5,500\n" in text
    assert "  not written: enlist_job_ready (0 scans)," in text
    assert "enlist_job_lease (3 scans)" in text
    for name, what in SERVES.items():
        assert f"{name}  " in text
        assert what in text
    assert text.splitlines()[-2:] == [
        "fillfactor                 claim  complete      life    queued      done",
        "  70                       1,100     1,100     5,500       300       600",
    ]
    found = json.loads(facts.as_json())
    assert found["jobs"] == 10
    assert found["sorts"]["plain"]["wal_bytes_per_job"]["enlist_job_pkey"] == dict.fromkeys(PHASES, 100.0)
    assert found["sorts"]["plain"]["scans"]["enlist_job_lease"] == 3
    assert found["serves"] == SERVES
    assert found["fillfactors"]["70"] == {
        "claim_and_complete_wal_bytes_per_job": 2200.0,
        "wal_bytes_per_job": 5500.0,
        "queued_table_bytes_per_job": 300.0,
        "done_table_bytes_per_job": 600.4,
    }
