"""The `enlist` command: what it does, and that it says on one line, without a password, what it cannot do."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import URL, Engine, event
from sqlalchemy.orm import Session

from enlist import ConfigurationError, JobRepository, migrations
from enlist._cli_database import parse_url
from enlist._driver import shown_url
from enlist.cli import main
from tests.support import Observer

PASSWORD = "s3cret"


@dataclass(frozen=True)
class Result:
    status: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line of standard error, of a command that could not be done."""
        assert (self.status, self.out) == (1, "")
        assert PASSWORD not in self.err
        (line,) = self.err.splitlines()
        assert line.startswith("enlist: ")
        return line.removeprefix("enlist: ")


Enlist = Callable[..., Result]


@pytest.fixture
def enlist(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Enlist]:
    """Run the command in this process, in an empty directory: ``enlist("status", ..., ENLIST_DATABASE_URL=...)``."""
    for name in os.environ:
        if name.startswith("ENLIST_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    modules = set(sys.modules)

    def run(*arguments: str | URL, **environment: str) -> Result:
        texts = [a.render_as_string(hide_password=False) if isinstance(a, URL) else a for a in arguments]
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["enlist", *texts])
            for name, value in environment.items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as exited:
                main()
        captured = capsys.readouterr()
        status = exited.value.code
        assert status is None or isinstance(status, int)
        return Result(status or 0, captured.out, captured.err)

    yield run
    for name in set(sys.modules) - modules:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


def write_module(directory: Path, name: str, source: str) -> None:
    (directory / f"{name}.py").write_text(textwrap.dedent(source))


APPLICATION = """
import asyncio, contextlib, os, threading
import tenacity
from sqlalchemy import create_engine, text
from enlist import HandlerRegistry, Worker

engine = create_engine(os.environ["SHOP_DATABASE_URL"])
handlers = HandlerRegistry()

@handlers.handler("count")
def count(session, job):
    session.execute(text("INSERT INTO shop_counter (name, value) VALUES ('runs', 1)"))

@handlers.handler("forever")
def forever(session, job):
    session.execute(text("SELECT 1"))
    print("in hand", flush=True)
    threading.Event().wait()

@handlers.handler("forever_async")
async def forever_async(session, job):
    print("in hand", flush=True)
    await asyncio.to_thread(threading.Event().wait)

worker = Worker(engine, handlers, shutdown_timeout=0.1, poll_interval=0.05)

@contextlib.contextmanager
def blocks():
    print("in hand", flush=True)
    threading.Event().wait()
    yield

class shop:
    never_starts = Worker(engine, handlers, lifespan=blocks)

    @staticmethod
    def make_worker():
        return worker
"""


@pytest.fixture
def application(tmp_path: Path, database_url: URL, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with a worker in the current directory."""
    write_module(tmp_path, "shop_application", APPLICATION)
    monkeypatch.setenv("SHOP_DATABASE_URL", database_url.render_as_string(hide_password=False))
    return "shop_application"


# -- the command itself ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_without_its_extra_it_names_it() -> None:
    script = "import sys; sys.modules['typer'] = None; from enlist.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr == "enlist: the command line needs typer: pip install 'enlist[cli]'\n"


@pytest.mark.slow
def test_it_runs_as_a_module_and_says_its_version() -> None:
    result = subprocess.run([sys.executable, "-m", "enlist", "--version"], capture_output=True, text=True, check=True)
    assert result.stdout == f"enlist 0.1.0, schema step {migrations.LATEST_STEP}\n"


@pytest.mark.parametrize("arguments", [["migrate"], ["status"], ["worker"], ["worker", "shop"], ["sing"]])
def test_a_wrong_call_exits_with_2(enlist: Enlist, arguments: list[str]) -> None:
    result = enlist(*arguments)
    assert (result.status, result.out) == (2, "")
    assert "Traceback" not in result.err


def test_a_traceback_is_shown_when_it_is_asked_for(enlist: Enlist) -> None:
    bad = ["status", "--database-url", "nonsense"]
    assert "database URL cannot be read" in enlist(*bad).error
    for arguments in (["--traceback", *bad], [*bad, "--traceback"]):
        with pytest.raises(ConfigurationError):
            enlist(*arguments)
    with pytest.raises(ConfigurationError):
        enlist(*bad, ENLIST_TRACEBACK="1")


# -- the database ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("postgres://u@h/d", "postgresql+psycopg://u@h/d"),
        ("postgresql://u@h:5433/d", "postgresql+psycopg://u@h:5433/d"),
        ("POSTGRESQL://u@h/d", "postgresql+psycopg://u@h/d"),
        ("postgresql+psycopg2://u@h/d", "postgresql+psycopg://u@h/d"),
        ("postgresql+asyncpg://u@h/d?ssl=require", "postgresql+psycopg://u@h/d?sslmode=require"),
        ("postgresql+asyncpg://h/d?prepared_statement_cache_size=0", "postgresql+psycopg://h/d"),
        (" postgresql:///d?host=/tmp/pg\n", "postgresql+psycopg:///d?host=/tmp/pg"),
    ],
)
def test_urls_are_taken_as_people_have_them(given: str, url: str) -> None:
    assert parse_url(given).render_as_string() == url.replace("/tmp/pg", "%2Ftmp%2Fpg")


def test_a_url_is_shown_without_its_password_wherever_it_is() -> None:
    url = parse_url(f"postgresql://u:{PASSWORD}@h/d?password={PASSWORD}&sslmode=require")
    assert PASSWORD not in shown_url(url)
    assert "sslmode=require" in shown_url(url)


@pytest.mark.parametrize("command", ["migrate", "status"])
@pytest.mark.parametrize(
    ("url", "message"),
    [
        (f"postgresql:/u:{PASSWORD}@h/d", "the database URL cannot be read"),
        (f"postgresql://u:{PASSWORD}@h:port/d", "the database URL cannot be read"),
        (f"postgresql://u:pass@{PASSWORD}@h/d", "in the user's name and the password @ is written %40"),
        (f"postgresql://us/er:{PASSWORD}@h/d", "in the user's name and the password @ is written %40"),
        (f"host=h password={PASSWORD}", "the database URL cannot be read"),
        (f"mysql://u:{PASSWORD}@h/d", "enlist works on PostgreSQL, not on 'mysql'"),
        (f"postgresql://u:{PASSWORD}@127.0.0.1:1/d", r"cannot connect to postgresql\S+//u:\*\*\*@127.0.0.1:1/d: "),
        (f"postgresql://127.0.0.1:1/d?user=u&password={PASSWORD}", "cannot connect to .*Connection refused"),
        (f"postgresql://127.0.0.1:1/d?passwrod={PASSWORD}", 'cannot connect to .*invalid connection option "passwrod"'),
    ],
)
def test_a_database_that_is_not_there_is_one_line_without_the_password(
    enlist: Enlist, command: str, url: str, message: str
) -> None:
    assert re.search(message, enlist(command, "--database-url", url).error)


def test_migrate_carries_out_the_steps_once(enlist: Enlist, empty_database_url: URL) -> None:
    first = enlist("migrate", "--database-url", empty_database_url)
    assert first.status == 0
    assert first.out.endswith("carried out step 1, step 2, step 3, step 4\n")
    again = enlist("migrate", ENLIST_DATABASE_URL=empty_database_url.render_as_string(hide_password=False))
    assert (again.status, again.err) == (0, "")
    assert again.out.endswith("nothing to do, it is at step 4\n")


def test_migrate_takes_a_schema_and_a_step(enlist: Enlist, empty_database_url: URL) -> None:
    url = ["--database-url", empty_database_url]
    assert "no schema 'jobs': create it first" in enlist("migrate", *url, "--schema", "jobs").error
    with Observer(empty_database_url) as observer:
        observer.execute("CREATE SCHEMA jobs")
        assert enlist("migrate", *url, "--schema", "jobs").status == 0
        assert observer.scalar("SELECT to_regclass('jobs.enlist_job') IS NOT NULL")
        assert observer.scalar("SELECT to_regclass('public.enlist_job') IS NULL")
    assert "no schema step 99" in enlist("migrate", *url, "--to", "99").error


def test_a_refusal_of_the_server_is_one_line(enlist: Enlist, empty_database_url: URL) -> None:
    url = empty_database_url.update_query_dict({"options": "-cdefault_transaction_read_only=on"})
    line = enlist("migrate", "--database-url", url).error
    assert line == "cannot execute CREATE TABLE in a read-only transaction"


# -- status ------------------------------------------------------------------------------------------------------


@pytest.fixture
def jobs(engine: Engine) -> None:
    """Jobs of two queues: three due, one of them of a kind without a handler, one delayed, one done."""
    repo = JobRepository(notify=None)
    with Session(engine) as session, session.begin():
        repo.enqueue(session, "count", {"secret": PASSWORD})
        repo.enqueue(session, "count", {}, queue="mail")
        repo.enqueue(session, "count", {}, queue="mail", delay=3600)
        repo.enqueue(session, "[red]un\x1bknown", {}, queue="mail")
        done = repo.enqueue(session, "count", {}, queue="mail")
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "UPDATE enlist_job SET run_at = run_at - interval '90 seconds' WHERE queue = 'default'"
        )
        connection.exec_driver_sql(f"UPDATE enlist_job SET status = 'done' WHERE id = '{done.id}'")


@pytest.mark.usefixtures("jobs")
def test_status_as_json(enlist: Enlist, database_url: URL) -> None:
    found = json.loads(enlist("status", "--json", "--database-url", database_url).out)
    assert found["queued"] == 4
    assert found["done"] == 1
    assert found["running"] == found["dead"] == found["cancelled"] == 0
    assert found["due"] == 3
    assert 90 <= found["oldest_due_seconds"] < 150
    assert list(found["queues"]) == ["default", "mail"]
    mail = found["queues"]["mail"]
    assert (mail["queued"], mail["due"], mail["done"]) == (3, 2, 1)
    assert 0 <= mail["oldest_due_seconds"] < 60
    assert {kind: count["queued"] for kind, count in found["queued_kinds"].items()} == {
        "count": 3,
        "[red]un\x1bknown": 1,
    }
    assert found["unhandled_kinds"] is None


@pytest.mark.usefixtures("jobs")
def test_status_as_tables(enlist: Enlist, database_url: URL) -> None:
    result = enlist("status", "--database-url", database_url)
    assert (result.status, result.err) == (0, "")
    rows = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in result.out.splitlines()]
    assert ["default", "1", "1", "0", "0", "0", "0", "0:01:30"] in rows
    assert ["mail", "3", "2", "0", "1", "0", "0", "0:00:00"] in rows
    assert ["all", "4", "3", "0", "1", "0", "0", "0:01:30"] in rows
    # Names are shown as they are, and harmless.
    assert [r"[red]un\x1bknown", "1", "1", "0:00:00"] in rows
    assert "enlist status module:object" in result.out


@pytest.mark.usefixtures("jobs")
@pytest.mark.parametrize("target", ["worker", "handlers", "shop.make_worker"])
def test_status_names_the_kinds_that_an_application_does_not_handle(
    enlist: Enlist, application: str, target: str, database_url: URL
) -> None:
    arguments = ["status", f"{application}:{target}", "--database-url", database_url]
    result = enlist(*arguments)
    assert "Queued, but no handler here: [red]un\\x1bknown" in result.out
    found = json.loads(enlist(*arguments, "--json").out)
    assert found["unhandled_kinds"] == ["[red]un\x1bknown"]
    # A registry serves no queues; the worker of this application serves only the default one.
    assert found["unserved_queues"] == (None if target == "handlers" else ["mail"])
    assert ("does not serve: mail" in result.out) == (target != "handlers")


@pytest.mark.usefixtures("jobs")
def test_status_of_a_worker_needs_no_url(enlist: Enlist, application: str) -> None:
    assert json.loads(enlist("status", f"{application}:worker", "--json").out)["queued"] == 4
    missing = enlist("status", f"{application}:handlers")
    assert missing.status == 2
    assert "--database-url" in missing.err


@pytest.mark.usefixtures("jobs")
def test_status_reads_no_payloads(enlist: Enlist, database_url: URL) -> None:
    statements: list[str] = []

    def record(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        statements.append(statement)

    event.listen(Engine, "before_cursor_execute", record)
    try:
        result = enlist("status", "--json", "--database-url", database_url)
    finally:
        event.remove(Engine, "before_cursor_execute", record)
    assert statements
    assert not any("payload" in statement or "*" in statement.replace("count(*)", "") for statement in statements)
    assert PASSWORD not in result.out


def test_status_without_tables_or_at_an_older_step(
    enlist: Enlist, empty_database_url: URL, database_url: URL, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = enlist("status", "--database-url", empty_database_url).error
    assert "has no table enlist_job: run `enlist migrate`" in line
    monkeypatch.setattr(migrations, "LATEST_STEP", migrations.LATEST_STEP + 1)
    line = enlist("status", "--database-url", database_url).error
    assert f"is at schema step {migrations.LATEST_STEP - 1}, this release needs {migrations.LATEST_STEP}" in line


# -- what a worker is loaded from --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("", "nowhere.jobs:worker", "there is no module 'nowhere.jobs': neither in the current directory, "),
        ("", "loaded:worker", "module 'loaded' has no attribute 'worker'"),
        ("class jobs: pass", "loaded:jobs.worker", "module 'loaded' has no attribute 'jobs.worker'"),
        ("", "loaded:", "'loaded:' should be module:object, such as shop.jobs:worker"),
        ("import no_such_package", "loaded:worker", "importing 'loaded' failed: ModuleNotFoundError: No module named "),
        ("\n1 / 0", "loaded:worker", "importing 'loaded' failed: ZeroDivisionError: division by zero "),
        ("raise SystemExit(3)", "loaded:worker", "importing 'loaded' failed: SystemExit: 3 "),
        ("class Stop(BaseException): ...\nraise Stop('x')", "loaded:worker", "importing 'loaded' failed: Stop: x "),
        ("def worker():\n    raise SystemExit", "loaded:worker", "calling loaded:worker failed: SystemExit: "),
        (
            "def __getattr__(name): return {}[name]",
            "loaded:worker",
            "getting loaded:worker failed: KeyError: 'worker' ",
        ),
        ("worker = {}", "loaded:worker", "loaded:worker is a dict, not a Worker, nor a function that returns one"),
        ("def worker(): return 42", "loaded:worker", "loaded:worker is an int, not a Worker"),
        ("def worker(url): ...", "loaded:worker", "loaded:worker is a function that cannot be called without argument"),
        ("async def worker(): ...", "loaded:worker", "loaded:worker is an async function"),
        ("def worker():\n    raise KeyError('x')", "loaded:worker", "calling loaded:worker failed: KeyError: 'x' "),
        (
            "from enlist import HandlerRegistry as R; worker = R()",
            "loaded:worker",
            "loaded:worker is a HandlerRegistry",
        ),
        (
            "from enlist import HandlerRegistry, Worker\nWorker(None, HandlerRegistry())",
            "loaded:worker",
            "a worker needs a HandlerRegistry with at least one handler",
        ),
    ],
)
def test_a_worker_that_cannot_be_had_is_one_line(
    enlist: Enlist, tmp_path: Path, source: str, target: str, message: str
) -> None:
    write_module(tmp_path, "loaded", source)
    assert enlist("worker", target).error.startswith(message)


def test_where_an_import_failed_is_said(enlist: Enlist, tmp_path: Path) -> None:
    write_module(tmp_path, "broken", "def divide():\n    1 / 0\ndivide()")
    line = enlist("worker", "broken:worker").error
    assert line.endswith(f"({tmp_path / 'broken.py'}, line 2); --traceback shows more")
    write_module(tmp_path, "unreadable", "\ndef f(:")
    line = enlist("worker", "unreadable:worker").error
    assert line.endswith(f"({tmp_path / 'unreadable.py'}, line 2); --traceback shows more")


def test_a_missing_worker_is_named_after_those_there_are(enlist: Enlist, application: str) -> None:
    line = enlist("worker", f"{application}:wroker").error
    assert line == f"module '{application}' has no attribute 'wroker'; its workers are: worker"


# -- running one -------------------------------------------------------------------------------------------------


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start ``enlist worker`` as a process, in the directory of ``application``."""
    processes = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "enlist", "worker", *arguments],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


Start = Callable[..., "subprocess.Popen[str]"]


def enqueue(engine: Engine, kind: str) -> None:
    with Session(engine) as session, session.begin():
        JobRepository(notify=None).enqueue(session, kind, {})


@pytest.mark.parametrize("target", ["worker", pytest.param("shop.make_worker", marks=pytest.mark.slow)])
def test_a_worker_runs_jobs_until_sigterm(
    application: str, start: Start, engine: Engine, observer: Observer, target: str
) -> None:
    enqueue(engine, "count")
    process = start(f"{application}:{target}")
    observer.wait_for("SELECT count(*) = 1 FROM enlist_job WHERE status = 'done'", timeout=20)
    assert observer.scalar("SELECT value FROM shop_counter WHERE name = 'runs'") == 1
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "starts: queues default (10), kinds count, forever, forever_async" in errors
    assert "has stopped" in errors


# Of the async one only the thread goes on that it waits for; itself it is cancelled, and its job given back.
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "status"), [("forever", 1), pytest.param("forever_async", 0, marks=pytest.mark.slow)])
def test_a_process_ends_though_a_handler_never_returns(
    application: str, start: Start, engine: Engine, kind: str, status: int
) -> None:
    enqueue(engine, kind)
    process = start(f"{application}:worker")
    assert process.stdout is not None
    assert process.stdout.readline() == "in hand\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == status


@pytest.mark.slow
def test_a_second_signal_ends_it_whatever_it_waits_for(application: str, start: Start) -> None:
    process = start(f"{application}:shop.never_starts")
    assert process.stdout is not None
    assert process.stdout.readline() == "in hand\n"
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 1


@pytest.mark.slow
def test_how_much_a_worker_logs_can_be_said(application: str, start: Start, engine: Engine, observer: Observer) -> None:
    enqueue(engine, "count")
    process = start(f"{application}:worker", "--log-level", "WARNING")
    observer.wait_for("SELECT count(*) = 1 FROM enlist_job WHERE status = 'done'", timeout=20)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20) == ("", "")
    assert process.returncode == 0


WRONG_WORKER = """
from sqlalchemy import create_engine
from enlist import HandlerRegistry, Worker

handlers = HandlerRegistry()

@handlers.handler("count")
def count(session, job): ...

worker = Worker(create_engine({url!r}, **{options!r}), handlers)
"""


def write_wrong_worker(directory: Path, url: URL, **options: object) -> None:
    source = WRONG_WORKER.format(url=url.render_as_string(hide_password=False), options=options)
    (directory / "wrong.py").write_text(source)


@pytest.mark.slow
def test_a_worker_on_a_database_without_tables_ends_with_one_line(
    start: Start, tmp_path: Path, empty_database_url: URL
) -> None:
    write_wrong_worker(tmp_path, empty_database_url)
    line = finished(start("wrong:worker", "--log-level", "warning")).error
    assert line.startswith(f"the database {empty_database_url.database!r} has no table enlist_job: run `enlist migr")


@pytest.mark.slow
def test_a_worker_on_an_autocommit_engine_ends_with_one_line(start: Start, tmp_path: Path, database_url: URL) -> None:
    write_wrong_worker(tmp_path, database_url, isolation_level="AUTOCOMMIT")
    assert "is in AUTOCOMMIT mode" in finished(start("wrong:worker", "--log-level", "warning")).error


def finished(process: subprocess.Popen[str]) -> Result:
    out, errors = process.communicate(timeout=20)
    return Result(process.returncode, out, errors)


@pytest.mark.slow
def test_a_worker_waits_for_a_database_says_so_once_and_can_be_stopped(start: Start, tmp_path: Path) -> None:
    write_wrong_worker(tmp_path, parse_url(f"postgresql://u:{PASSWORD}@127.0.0.1:1/d"))
    process = start("wrong:worker")
    assert process.stderr is not None
    said = [process.stderr.readline()]
    assert "trying again" in said[0]
    process.send_signal(signal.SIGTERM)
    _, rest = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "trying again" not in rest
    assert PASSWORD not in said[0] + rest


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_what_cannot_be_written_is_one_line(database_url: URL) -> None:
    url = database_url.render_as_string(hide_password=False)
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "enlist", "status", "--database-url", url],
            check=False,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1
    assert re.fullmatch(r"enlist: .*No space left on device\n", done.stderr)
