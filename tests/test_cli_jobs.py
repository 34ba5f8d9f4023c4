"""`enlist jobs`, `retry` and `cancel`: on-call sees what matters, changes what is meant, and nothing else."""

from __future__ import annotations

import datetime as dt
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, LiteralString

import pytest
import sqlalchemy as sa
import typer
from sqlalchemy import URL, Engine, event
from sqlalchemy.orm import Session

from enlist import HandlerRegistry, Job, Worker
from enlist._statements import statements_for
from enlist.models import JobRecord
from tests.shop import Effect
from tests.support import Observer
from tests.support.jobs import Jobs, running
from tests.support.plans import plan_of, scans
from tests.test_cli import Enlist, Result, enlist, write_module

__all__ = ["enlist"]

SECRET = "s3cret"
LOCKED: dict[str, Any] = {"status": "running", "attempt": 1, "lease_token": 1, "locked_by": "host:1:abc"}


@pytest.fixture
def jobs(observer: Observer) -> Jobs:
    return Jobs(observer)


@pytest.fixture(autouse=True)
def named_database(database_url: URL, monkeypatch: pytest.MonkeyPatch, enlist: Enlist) -> None:
    monkeypatch.setenv("ENLIST_DATABASE_URL", database_url.render_as_string(hide_password=False))


@pytest.fixture
def sent() -> Iterator[list[str]]:
    """What all engines are asked to run."""
    statements: list[str] = []

    def record(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        statements.append(statement)

    event.listen(Engine, "before_cursor_execute", record)
    yield statements
    event.remove(Engine, "before_cursor_execute", record)


def ago(**length: float) -> dt.datetime:
    return dt.datetime.now(dt.UTC) - dt.timedelta(**length)


def listed(result: Result) -> list[str]:
    """The ids that were shown, in their order."""
    assert result.status == 0, result.err
    return [job["id"] for job in json.loads(result.out)]


# -- jobs --------------------------------------------------------------------------------------------------------


def test_running_jobs_come_by_the_end_of_their_leases_and_say_when_it_is_over(enlist: Enlist, jobs: Jobs) -> None:
    later = jobs.add("work", locked_until=ago(seconds=-3600), **LOCKED)
    overdue = jobs.add("work", locked_until=ago(seconds=90), **LOCKED)
    jobs.add("work")
    result = enlist("jobs", "--status", "running", "--json")
    assert listed(result) == [str(overdue), str(later)]
    assert [job["overdue"] for job in json.loads(result.out)] == [True, False]
    table = enlist("jobs", "--status", "running").out
    assert "overdue for 0:01:3" in table
    assert "lease for 0:59:" in table


def test_queued_jobs_come_by_when_they_are_due(enlist: Enlist, jobs: Jobs) -> None:
    later, first, second = (jobs.add("work", due_in=seconds) for seconds in (3600.5, -7200, -10))
    assert listed(enlist("jobs", "--status", "queued", "--json")) == [str(first), str(second), str(later)]
    table = enlist("jobs", "--status", "queued").out
    assert "due for 2:00:0" in table
    assert "due in 1:00:0" in table


def test_finished_jobs_come_by_when_they_ended_the_latest_first(enlist: Enlist, jobs: Jobs) -> None:
    old = jobs.add("work", status="dead", finished_at=ago(hours=30))
    new = jobs.add("work", status="dead", finished_at=ago(hours=1))
    cancelled = jobs.add("work", status="cancelled", finished_at=ago(hours=2))
    unknown = jobs.add("work", status="dead")
    dead = enlist("jobs", "--status", "dead", "--json")
    assert listed(dead) == [str(new), str(old), str(unknown)]
    both = enlist("jobs", "--status", "dead", "--status", "cancelled", "--json")
    assert listed(both) == [str(new), str(cancelled), str(old), str(unknown)]
    assert "1 day, 6:00:0" in enlist("jobs", "--status", "dead").out


def test_all_jobs_come_the_latest_first_and_no_more_than_asked_for(enlist: Enlist, jobs: Jobs) -> None:
    ids = jobs.add_many("work", 7)
    result = enlist("jobs", "--limit", "3", "--json")
    assert listed(result) == [str(job_id) for job_id in ids[:3:-1]]
    shown = enlist("jobs", "--limit", "3")
    assert shown.out.count("work") == 3
    assert "These are the first 3" in shown.err
    assert enlist("jobs", "--limit", "8").err == ""


def test_jobs_are_picked_by_what_they_have(enlist: Enlist, jobs: Jobs) -> None:
    plain = jobs.add("work")
    mail = jobs.add("mail", queue="mail")
    unique = jobs.add("work", unique_key="the key", unique_held=True)
    keyed = jobs.add("work", queue="mail", concurrency_key="the key", concurrency_limit=1)

    def of(*options: str) -> set[str]:
        return set(listed(enlist("jobs", *options, "--json")))

    assert of("--kind", "mail") == {str(mail)}
    assert of("--queue", "mail") == {str(mail), str(keyed)}
    assert of("--key", "the key") == {str(unique), str(keyed)}
    assert of("--key", "the key", "--queue", "mail") == {str(keyed)}
    assert of("--id", str(plain), "--id", str(mail), "--id", str(uuid.uuid4())) == {str(plain), str(mail)}
    assert of("--kind", "nothing") == set()
    assert "There are no such jobs" in enlist("jobs", "--kind", "nothing").out


def test_payloads_are_read_only_when_they_are_asked_for(enlist: Enlist, jobs: Jobs, sent: list[str]) -> None:
    jobs.add("work", {"password": SECRET}, status="dead", last_error="ValueError: x", errors='[{"error": "x"}]')
    for options in ([], ["--json"], ["--errors"], ["--status", "dead", "--errors", "--json"]):
        assert SECRET not in enlist("jobs", *options).out
    assert sent
    assert not any("payload" in statement or "*" in statement for statement in sent)
    assert f'payload: {{"password": "{SECRET}"}}' in enlist("jobs", "--payload").out
    (job,) = json.loads(enlist("jobs", "--payload", "--json").out)
    assert job["payload"] == {"password": SECRET}


def test_an_error_is_shown_by_its_last_line_or_whole(enlist: Enlist, jobs: Jobs) -> None:
    error = "Traceback (most recent call last):\n  File x, line 1\n" + "  deep\n" * 1000 + "ValueError: no such order\n"
    entry = {"attempt": 3, "at": "2026-01-01T00:00:00+00:00", "error": "OSError: before"}
    jobs.add("work", status="dead", attempt=4, last_error=error, errors=json.dumps([entry]))
    table = enlist("jobs").out
    assert "ValueError: no such order" in table
    assert "Traceback" not in table
    assert "4/20" in table
    (job,) = json.loads(enlist("jobs", "--json").out)
    assert job["last_error"] == "ValueError: no such order"
    assert "errors" not in job
    full = enlist("jobs", "--errors").out
    assert "| Traceback (most recent call last):" in full
    assert full.count("deep") == 1000
    assert "OSError: before" in full
    (job,) = json.loads(enlist("jobs", "--errors", "--json").out)
    assert (job["last_error"], job["errors"]) == (error, [entry])


def test_nothing_that_a_job_says_acts_on_the_terminal(enlist: Enlist, jobs: Jobs) -> None:
    evil = "[red]\x1b]0;owned\x07\u202e"
    jobs.add(
        evil,
        {evil: evil},
        queue=evil,
        last_error=f"{evil}\r\n{evil}",
        errors=json.dumps([{"error": evil}]),
        unique_key=evil,
        concurrency_key=evil,
        concurrency_limit=1,
    )
    for options in ([], ["--payload", "--errors"], ["--json", "--payload", "--errors"]):
        out = enlist("jobs", *options).out
        assert not set(out) & {"\x1b", "\x07", "\r", "\u202e"}
        assert "[red]" in out


def test_what_is_no_id_is_a_wrong_call(enlist: Enlist) -> None:
    for arguments in (["jobs", "--id", "17"], ["retry", "17"], ["cancel", "17"], ["jobs", "--status", "sleeping"]):
        result = enlist(*arguments)
        assert (result.status, result.out) == (2, "")
        assert "Traceback" not in result.err


def _listing(conditions: list[Any], statuses: list[str], limit: int = 50) -> Any:
    return statements_for(JobRecord.__table__).listed(conditions, statuses, ["id", "kind"], limit)


def test_what_is_looked_at_most_is_found_by_an_index(engine: Engine, jobs: Jobs, observer: Observer) -> None:
    observer.execute(
        "INSERT INTO enlist_job (id, kind, status, finished_at)"
        " SELECT gen_random_uuid(), 'work', 'done', statement_timestamp() FROM generate_series(1, 20000)"
    )
    for _ in range(20):
        jobs.add("work", locked_until=ago(seconds=1), **LOCKED)
    observer.execute("ANALYZE enlist_job")

    def index_of(statement: Any) -> str | None:
        (scan,) = scans(plan_of(engine, statement, {}, "custom"), "enlist_job")
        return scan.index_name

    c = JobRecord.__table__.c
    assert index_of(_listing([], ["running"])) == "enlist_job_lease"
    assert index_of(_listing([], [])) == "enlist_job_pkey"
    assert index_of(_listing([c.id == uuid.uuid4()], [])) == "enlist_job_pkey"


# -- retry -------------------------------------------------------------------------------------------------------


def test_retry_of_ids_says_what_became_of_each(enlist: Enlist, jobs: Jobs) -> None:
    dead, done = jobs.add("work", status="dead", attempt=20), jobs.add("work", status="done")
    busy = jobs.add("work", locked_until=ago(seconds=-60), **LOCKED)
    jobs.add("work", unique_key="k", unique_held=True)
    superseded = jobs.add("work", status="dead", unique_key="k")
    missing = uuid.uuid4()
    result = enlist("retry", *map(str, [dead, done, busy, superseded, missing]))
    assert result.status == 1, "an id was missing"
    assert result.out.splitlines() == [
        "queued again: 2",
        "superseded, since another job has their unique key: 1",
        f"  {superseded}",
        "left as they are, running: 1",
        f"  {busy}",
        "no such job: 1",
        f"  {missing}",
    ]
    row = jobs.row(dead)
    assert (row["status"], row["attempt"]) == ("queued", 0)
    again = json.loads(enlist("retry", str(busy), "--json").out)
    assert again["unchanged"] == {str(busy): "running"}


def test_retry_exits_with_1_when_nothing_was_changed(enlist: Enlist, jobs: Jobs) -> None:
    busy = jobs.add("work", locked_until=ago(seconds=-60), **LOCKED)
    assert enlist("retry", str(busy)).status == 1
    dead = jobs.add("work", status="dead")
    assert enlist("retry", str(busy), str(dead)).status == 0
    assert enlist("retry", "--kind", "nothing", "--yes").status == 1


def test_retry_by_options_means_dead_jobs(enlist: Enlist, jobs: Jobs) -> None:
    dead, other = jobs.add("work", status="dead"), jobs.add("mail", status="dead")
    done, cancelled = jobs.add("work", status="done"), jobs.add("work", status="cancelled")
    result = enlist("retry", "--kind", "work", "--yes")
    assert (result.status, result.out) == (0, "queued again: 1\n")
    assert jobs.status(dead) == "queued"
    assert [jobs.status(job) for job in (other, done, cancelled)] == ["dead", "done", "cancelled"]
    assert enlist("retry", "--kind", "work", "--status", "cancelled", "--yes").status == 0
    assert (jobs.status(cancelled), jobs.status(done)) == ("queued", "done")


@pytest.mark.parametrize("verb", ["retry", "cancel"])
def test_options_change_all_in_batches_each_a_transaction(
    enlist: Enlist, jobs: Jobs, verb: str, observer: Observer
) -> None:
    status = {"retry": "dead", "cancel": "queued"}[verb]
    ids = jobs.add_many("work", 25, status=status)
    jobs.add("mail", status=status)
    result = enlist(verb, "--kind", "work", "--status", status, "--limit", "10", "--yes", "--json")
    assert result.status == 0
    assert json.loads(result.out)["changed"] == [str(job_id) for job_id in ids]
    assert observer.scalar("SELECT count(DISTINCT xmin::text) FROM enlist_job WHERE kind = 'work'") == 3
    assert result.err.splitlines() == [
        f"{number} jobs {'queued again' if verb == 'retry' else 'cancelled'} so far" for number in (10, 20)
    ]


def test_retry_wakes_the_workers_though_the_process_ends_at_once(
    enlist: Enlist, engine: Engine, jobs: Jobs, observer: Observer
) -> None:
    dead = jobs.add("work", status="dead", attempt=20, queue="mail")
    observer.listen(statements_for(JobRecord.__table__).channel)
    assert enlist("retry", str(dead)).status == 0
    assert observer.notified(1) == ["mail"]


# -- cancel ------------------------------------------------------------------------------------------------------


def test_cancel_by_options(enlist: Enlist, jobs: Jobs) -> None:
    queued = jobs.add("work", queue="mail")
    busy = jobs.add("work", queue="mail", locked_until=ago(seconds=-60), **LOCKED)
    done, other = jobs.add("work", queue="mail", status="done"), jobs.add("work")
    result = enlist("cancel", "--queue", "mail", "--yes")
    assert (result.status, result.out) == (0, "cancelled: 2\n")
    assert [jobs.status(job) for job in (queued, busy, done, other)] == ["cancelled", "cancelled", "done", "queued"]


def test_cancel_says_which_jobs_their_handlers_have_locked(enlist: Enlist, jobs: Jobs, engine: Engine) -> None:
    busy = jobs.add("work", locked_until=ago(seconds=-60), **LOCKED)
    with engine.begin() as connection:
        connection.execute(sa.select(JobRecord.id).where(JobRecord.id == busy).with_for_update(key_share=True))
        result = enlist("cancel", str(busy), "--json")
        assert json.loads(result.out)["asked"] == [str(busy)]
        assert result.status == 0
        assert f"have locked them: 1\n  {busy}\n" in enlist("cancel", "--kind", "work", "--yes").out


def test_cancel_in_batches_comes_to_those_that_are_locked_too(enlist: Enlist, jobs: Jobs, engine: Engine) -> None:
    """They come last in a batch, and a full one goes on behind them."""
    busy = uuid.UUID(int=1)
    jobs.add("work", locked_until=ago(seconds=-60), **LOCKED)
    with engine.begin() as connection:
        connection.execute(sa.update(JobRecord).values(id=busy))
    jobs.add_many("work", 5)
    with engine.begin() as connection:
        connection.execute(sa.select(JobRecord.id).where(JobRecord.id == busy).with_for_update(key_share=True))
        result = enlist("cancel", "--kind", "work", "--limit", "2", "--yes")
        assert "cancelled: 5\n" in result.out
        assert f"have locked them: 1\n  {busy}\n" in result.out


# -- nothing by mistake ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["retry", "cancel"])
def test_a_dry_run_changes_nothing(enlist: Enlist, jobs: Jobs, verb: str) -> None:
    status = {"retry": "dead", "cancel": "queued"}[verb]
    done = {"retry": "queued again", "cancel": "cancelled"}[verb]
    ids = jobs.add_many("work", 3, status=status)
    rows = [jobs.row(job_id) for job_id in ids]
    assert enlist(verb, "--status", status, "--dry-run").out == f"would be {done}: 3\n"
    assert json.loads(enlist(verb, "--status", status, "--dry-run", "--json").out) == {"jobs": 3, "dry_run": True}
    assert enlist(verb, str(ids[0]), "--dry-run").out == f"would be {done}: 1\n"
    assert enlist(verb, "--kind", "nothing", "--dry-run").status == 1
    assert [jobs.row(job_id) for job_id in ids] == rows


def test_options_need_a_yes(enlist: Enlist, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = jobs.add_many("work", 3)
    refused = enlist("cancel", "--kind", "work")
    assert refused.status == 2
    assert "cancel 3 jobs?" in refused.err
    assert "--yes" in refused.err
    answers = iter([False, True])

    def confirm(question: str, **_: Any) -> bool:
        assert question == "cancel 3 jobs?"
        if not next(answers):
            raise SystemExit(1)
        return True

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(typer, "confirm", confirm)
    assert enlist("cancel", "--kind", "work").status == 1
    assert {jobs.status(job_id) for job_id in ids} == {"queued"}
    assert enlist("cancel", "--kind", "work").out == "cancelled: 3\n"


@pytest.mark.parametrize("verb", ["retry", "cancel"])
def test_which_jobs_has_to_be_said_in_one_way(enlist: Enlist, jobs: Jobs, verb: str) -> None:
    job_id = jobs.add("work")
    for arguments in ([], ["--yes"], [str(job_id), "--kind", "work"]):
        result = enlist(verb, *arguments)
        assert result.status == 2
        assert "Give either their ids or options" in result.err.replace("\n", " ").replace("│ ", "")
    assert jobs.status(job_id) == "queued"


# -- an application's own ----------------------------------------------------------------------------------------


APPLICATION = """
import os
from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase
from enlist import HandlerRegistry, JobRecordMixin, Worker

class Base(DeclarativeBase): ...

class AppJob(JobRecordMixin, Base):
    __tablename__ = "app_job"

engine = create_engine(os.environ["SHOP_DATABASE_URL"])
handlers = HandlerRegistry()

@handlers.handler("work")
def work(session, job): ...

worker = Worker(engine, handlers, record=AppJob)
Base.metadata.create_all(engine)
engine.dispose()
"""


def test_an_application_has_its_own_jobs_and_database(
    enlist: Enlist, tmp_path: Path, database_url: URL, monkeypatch: pytest.MonkeyPatch, observer: Observer
) -> None:
    write_module(tmp_path, "own_application", APPLICATION)
    monkeypatch.setenv("SHOP_DATABASE_URL", database_url.render_as_string(hide_password=False))
    monkeypatch.delenv("ENLIST_DATABASE_URL")
    target = "own_application:worker"
    assert enlist("jobs", target, "--json").out == "[]\n"
    observer.execute("INSERT INTO app_job (id, kind, status) SELECT gen_random_uuid(), 'work', 'dead'")
    ((job_id,),) = observer.rows("SELECT id FROM app_job")
    assert listed(enlist("jobs", target, "--json")) == [str(job_id)]
    assert enlist("retry", target, str(job_id)).out == "queued again: 1\n"
    assert enlist("cancel", "--kind", "work", "--yes", ENLIST_APP=target).out == "cancelled: 1\n"
    assert observer.scalar("SELECT status FROM app_job") == "cancelled"
    assert enlist("retry", str(job_id)).status == 2, "no database was named"


@pytest.mark.parametrize("command", [["jobs"], ["retry", "--status", "dead"], ["cancel", "--kind", "x", "--yes"]])
def test_a_database_without_tables_is_one_line(enlist: Enlist, command: list[str], empty_database_url: URL) -> None:
    line = enlist(*command, "--database-url", empty_database_url).error
    assert "has no table enlist_job: run `enlist migrate`" in line


def test_status_says_which_jobs_run_past_their_lease(enlist: Enlist, jobs: Jobs) -> None:
    jobs.add("work", locked_until=ago(seconds=-60), **LOCKED)
    assert "past the end of their lease" not in enlist("status").out
    jobs.add("work", locked_until=ago(seconds=1), **LOCKED)
    assert "Running past the end of their lease, so no worker has them: 1" in enlist("status").out
    found = json.loads(enlist("status", "--json").out)
    assert found["overdue"] == found["queues"]["default"]["overdue"] == 1


# -- from one end to the other -----------------------------------------------------------------------------------


def test_on_call_finds_the_dead_and_has_them_run(enlist: Enlist, engine: Engine, jobs: Jobs) -> None:
    handlers = HandlerRegistry()
    broken = [True]

    @handlers.handler("work")
    def work(session: Session, job: Job[Any]) -> None:
        if broken:
            raise ValueError("the provider is down")
        session.add(Effect(job_id=job.id))

    ids = jobs.add_many("work", 5, max_attempts=1)
    with running(Worker(engine, handlers, poll_interval=30)):
        for job_id in ids:
            jobs.wait(job_id, "dead")
        assert set(listed(enlist("jobs", "--status", "dead", "--json"))) == set(map(str, ids))
        assert enlist("jobs", "--status", "dead").out.count("ValueError: the provider is down") == 5
        broken.clear()
        assert enlist("retry", "--status", "dead", "--kind", "work", "--yes").status == 0
        jobs.wait_all()
    assert jobs.effects_by_job() == dict.fromkeys(ids, 1)


@pytest.mark.parametrize(
    "odd",
    [
        "run_at = 'infinity'",
        "run_at = '-infinity'",
        "created_at = '0044-03-15 12:00+00 BC'",
        "status = 'done', finished_at = 'infinity'",
        "status = 'running', lease_token = 1, locked_by = 'a', locked_until = '294276-12-31 00:00+00'",
        """payload = ('{"n": 1' || repeat('0', 5000) || '}')::jsonb""",
        "payload = (repeat('[', 6000) || repeat(']', 6000))::jsonb",
        """payload = '{"n": 1e400}'""",
        """errors = ('{"a": ' || repeat('[', 900) || repeat(']', 900) || '}')::jsonb""",
        """errors = '"text"'""",
    ],
)
def test_one_odd_row_hides_no_other(
    odd: LiteralString, enlist: Enlist, jobs: Jobs, observer: Observer, database_url: URL
) -> None:
    ids = [jobs.add("good"), jobs.add("odd")]
    observer.execute("UPDATE enlist_job SET " + odd + " WHERE id = %s", ids[1])
    for zone in ("Pacific/Kiritimati", "America/Adak"):  # the farthest from each other
        url = database_url.update_query_dict({"options": f"-c TimeZone={zone}"}).render_as_string(hide_password=False)
        for options in ([], ["--payload"], ["--errors"], ["--status", "queued", "--status", "running"]):
            shown = enlist("jobs", "--database-url", url, *options).out
            assert str(ids[0]) in shown
            assert str(ids[1]) in shown or "done" in odd
            found = json.loads(enlist("jobs", "--database-url", url, "--json", *options).out)
            assert {job["id"] for job in found} >= {str(ids[0])}


def test_a_terminal_that_cannot_show_a_name_shows_the_others(jobs: Jobs) -> None:
    ids = [jobs.add("größe"), jobs.add("plain")]
    for encoding in ("ascii", "latin-1:strict"):
        ran = subprocess.run(
            [sys.executable, "-m", "enlist", "jobs"],
            env={**os.environ, "PYTHONIOENCODING": encoding},
            capture_output=True,
            check=True,
        )
        assert all(str(job_id).encode() in ran.stdout for job_id in ids)
        assert (b"gr\\xf6" if encoding == "ascii" else b"gr\xf6") in ran.stdout
        assert not ran.stderr


@pytest.mark.parametrize("command", ["jobs", "retry", "cancel"])
def test_an_argument_that_is_no_text_is_a_wrong_call(command: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "enlist", command, "--kind", b"\xff\xfe"], capture_output=True, check=False
    )
    assert ran.returncode == 2
    assert b"is no text in this locale's encoding" in ran.stderr
    assert b"Traceback" not in ran.stderr
