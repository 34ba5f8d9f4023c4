"""`enlist worker --processes N`: the processes live, die, are replaced, and end together."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import psutil
import pytest
from sqlalchemy import URL

from enlist import _supervisor
from enlist._orders import Order, Orders
from enlist._supervisor import Supervisor
from tests.support import Observer, wait_until
from tests.support.jobs import Jobs

APPLICATION = """
import os, signal, threading
from contextlib import contextmanager
from pathlib import Path

import tenacity
from sqlalchemy import create_engine, text

from enlist import HandlerRegistry, Worker
from tests.shop import Effect

here = Path(__file__).parent
(here / f"imported {os.getpid()}").touch()
engine = create_engine(os.environ["SHOP_DATABASE_URL"])
handlers = HandlerRegistry()
SOON = tenacity.wait_fixed(0.05)

def note(session, job):
    session.add(Effect(job_id=job.id, attempt=job.attempt, worker=str(os.getpid())))

@handlers.handler("work", wait=SOON)
def work(session, job):
    note(session, job)

@handlers.handler("hold", wait=SOON)
def hold(session, job):
    note(session, job)
    session.flush()
    (here / "inside").touch()
    while not (here / "go").exists():
        threading.Event().wait(0.01)

@handlers.handler("hold async", wait=SOON)
async def hold_async(session, job):
    note(session, job)
    await session.flush()
    (here / "inside").touch()
    await session.execute(text("SELECT pg_sleep(60)"))

@handlers.handler("die", wait=SOON)
def die(session, job):
    if job.attempt == 1:
        if "forks" in job.payload and os.fork() == 0:
            while not (here / "go").exists():  # with all that the worker process had open
                threading.Event().wait(0.01)
            os._exit(0)
        if "exit" in job.payload:
            os._exit(job.payload["exit"])
        os.kill(os.getpid(), job.payload["signal"])
    note(session, job)

worker = Worker(engine, handlers, queues={"default": 2}, lease=1, poll_interval=0.05)
"""


class Process:
    """``enlist worker app:worker --processes N``, in a process group of its own, with its log."""

    def __init__(self, directory: Path, *arguments: str, processes: int | None = 2) -> None:
        option = [] if processes is None else ["--processes", str(processes)]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "enlist", "worker", *(arguments or ["app:worker"]), *option],
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            process_group=0,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.process.poll() is None:
            children = self.children()
            self.process.kill()
            for child in children:
                child.kill()
            psutil.wait_procs(children, 5)
        self.process.wait()
        self._ended_log = self.log()
        self._log.close()

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def log(self) -> str:
        """What all of them have logged so far; also after the end."""
        if self._log.closed:
            return self._ended_log
        self._log.seek(0)
        return self._log.read().decode()

    def wait_for_log(self, pattern: str, times: int = 1) -> list[str]:
        def found() -> list[str]:
            matches = re.findall(pattern, self.log())
            return matches if len(matches) >= times else []

        try:
            return wait_until(found, 40)
        except pytest.fail.Exception:
            raise AssertionError(f"{pattern!r} is not {times} times in the log:\n{self.log()}") from None

    def wait_ready(self, processes: int = 2) -> Self:
        self.wait_for_log(r"worker \S+ starts: queues", processes)
        return self

    def wait(self) -> int:
        try:
            return self.process.wait(40)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end; its log:\n{self.log()}") from None


@pytest.fixture
def jobs(observer: Observer) -> Jobs:
    return Jobs(observer)


@pytest.fixture
def directory(tmp_path: Path, database_url: URL, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the application ``app`` is."""
    write(tmp_path, "app", APPLICATION)
    monkeypatch.setenv("SHOP_DATABASE_URL", database_url.render_as_string(hide_password=False))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
    for name in [name for name in os.environ if name.startswith("ENLIST_") and not name.startswith("ENLIST_TEST_")]:
        monkeypatch.delenv(name)
    return tmp_path


def write(directory: Path, name: str, source: str) -> None:
    (directory / f"{name}.py").write_text(textwrap.dedent(source))


def wait_inside(directory: Path) -> None:
    wait_until((directory / "inside").exists, 20)


def go(directory: Path) -> None:
    (directory / "go").touch()


# -- living ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_process_works_and_all_end_at_a_signal(directory: Path, jobs: Jobs) -> None:
    with Process(directory) as process:
        process.wait_ready()
        pids = {child.pid for child in process.children()}
        assert len(pids) == 2
        ids = jobs.add_many("work", 200)
        jobs.wait_all()
        process.process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    assert jobs.effects_by_job() == dict.fromkeys(ids, 1)
    # Imported in the children, each by itself, and not in the parent.
    assert {path.name for path in directory.glob("imported *")} == {f"imported {pid}" for pid in pids}


@pytest.mark.slow
def test_the_log_says_which_process_it_is_of(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENLIST_PROCESSES", "2")
    with Process(directory, processes=None) as process:
        process.wait_ready()
        pids = sorted(child.pid for child in process.children())
        process.process.send_signal(signal.SIGINT)
        assert process.wait() == 0
    found = re.findall(r"worker-(\d)\[(\d+)\] enlist.worker: worker \S+:(\d+):\w+ starts", process.log())
    assert sorted(number for number, _, _ in found) == ["1", "2"], process.log()
    assert sorted(int(pid) for _, pid, _ in found) == pids
    assert all(pid == named for _, pid, named in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("payload", "told"),
    [
        ({"signal": int(signal.SIGKILL)}, "was killed by SIGKILL"),
        ({"exit": 3, "forks": True}, "has ended with exit status 3"),
    ],
)
def test_a_process_that_dies_is_replaced_and_it_is_said_how_it_died(
    payload: dict[str, Any], told: str, directory: Path, jobs: Jobs
) -> None:
    with Process(directory) as process:
        process.wait_ready()
        before = {child.pid for child in process.children()}
        job_id = jobs.add("die", payload)
        (pid,) = process.wait_for_log(rf"worker process \d \(pid (\d+)\) {told}; the next is started in \d\.\d s")
        process.wait_ready(3)
        after = {child.pid for child in process.children()}
        assert jobs.wait(job_id, timeout=10)["status"] == "done"
        process.process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
        go(directory)
    assert before - after == {int(pid)}
    assert len(after) == 2
    assert process.log().count(told) == 1
    assert jobs.row(job_id)["attempt"] == 2


def test_a_process_that_dies_again_and_again_is_replaced_more_and_more_slowly() -> None:
    place = _supervisor._Place(1)
    waits = [place.wait_after(lived=0.1) for _ in range(10)]
    for wait, least in zip(waits, [0.5, 1, 2, 4, 8, 16, 30, 30, 30, 30], strict=True):
        assert least <= wait <= least + 0.5
    assert place.wait_after(lived=_supervisor.LIVED_SECONDS + 1) <= 1
    assert len({place.wait_after(lived=0.1) % 1 for _ in range(10)}) > 1, "all would come back in the same moment"


# -- not starting ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_no_process_can_import_ends_it_with_one_line(directory: Path) -> None:
    write(directory, "broken", "1 / 0")
    with Process(directory, "broken:worker", "--log-level", "error", processes=3) as process:
        assert process.wait() == 1
    assert process.log().startswith("enlist: importing 'broken' failed: ZeroDivisionError: division by zero")
    assert process.log().count("\n") == 1


@pytest.mark.slow
def test_a_database_without_tables_ends_it_with_one_line(
    directory: Path, empty_database_url: URL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_DATABASE_URL", empty_database_url.render_as_string(hide_password=False))
    with Process(directory, "app:worker", "--log-level", "error") as process:
        assert process.wait() == 1
    assert re.fullmatch(r"enlist: the database \S+ has no table enlist_job: run `enlist migrate`.*\n", process.log())


@pytest.mark.slow
def test_one_that_cannot_start_beside_others_that_can_is_tried_again(directory: Path, jobs: Jobs) -> None:
    """Say the port that it binds when it is imported is still another's."""
    lines = ["from pathlib import Path", "Path('first').touch(exist_ok=False)", "from app import worker"]
    write(directory, "once", "\n".join(lines))
    with Process(directory, "once:worker") as process:
        process.wait_for_log(
            r"has ended with exit status 1: importing 'once' failed: FileExistsError.*; the next is started"
        )
        process.wait_ready(1)
        job_id = jobs.add("work")
        assert jobs.wait(job_id)["status"] == "done"
        (directory / "first").unlink()
        process.wait_ready(2)
        process.process.send_signal(signal.SIGTERM)
        assert process.wait() == 0


# -- orders ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("orders", "now"),
    [
        ([Order.SIGNAL], False),
        ([Order.STOP], False),
        ([Order.SIGNAL, Order.STOP], False),
        ([Order.STOP, Order.STOP, Order.SIGNAL], False),
        ([Order.SIGNAL, Order.SIGNAL], True),
        ([Order.SIGNAL, Order.STOP, Order.SIGNAL], True),
        ([Order.STOP_NOW], True),
    ],
)
def test_only_a_second_signal_means_now(orders: list[Order], now: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("enlist._orders.ONE_SIGNAL_SECONDS", -1)
    stop, stop_now = threading.Event(), threading.Event()
    given = Orders()
    for order in orders:
        given.give(order)  # before anybody heeds them
    with given.heeded(stop, stop_now):
        pass
    assert stop.is_set()
    assert stop_now.is_set() is now


# -- ending ------------------------------------------------------------------------------------------------------


def _to_the_supervisor(process: Process, number: signal.Signals) -> None:
    process.process.send_signal(number)


def _to_the_terminals_group(process: Process, number: signal.Signals) -> None:
    os.killpg(process.process.pid, number)


def _to_each_process(process: Process, number: signal.Signals) -> None:
    """As a service manager does."""
    processes = [psutil.Process(process.process.pid), *process.children()]
    for one in processes:
        one.send_signal(number)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("send", "number"),
    [
        (_to_the_supervisor, signal.SIGTERM),
        (_to_the_terminals_group, signal.SIGINT),
        (_to_each_process, signal.SIGTERM),
    ],
)
def test_the_first_signal_lets_handlers_end_whoever_gets_it(
    send: Callable[[Process, signal.Signals], None], number: signal.Signals, directory: Path, jobs: Jobs
) -> None:
    with Process(directory) as process:
        process.wait_ready()
        job_id = jobs.add("hold")
        wait_inside(directory)
        waiting = jobs.add("work", due_in=3600)
        send(process, number)
        process.wait_for_log("no more claims", 2)
        wait_until(lambda: len(process.children()) == 1, 10)  # the idle one goes
        jobs.set_due()
        assert jobs.status(job_id) == "running"
        go(directory)
        assert process.wait() == 0
    assert (jobs.status(job_id), jobs.status(waiting)) == ("done", "queued")
    assert len(jobs.effects(job_id)) == 1


@pytest.mark.slow
def test_the_second_signal_ends_it_now(directory: Path, jobs: Jobs) -> None:
    with Process(directory) as process:
        process.wait_ready()
        job_id = jobs.add("hold async")
        wait_inside(directory)
        process.process.send_signal(signal.SIGTERM)
        process.wait_for_log("no more claims", 2)
        process.process.send_signal(signal.SIGTERM)
        assert process.wait() == 1
    row = jobs.row(job_id)
    assert (row["status"], row["attempt"], row["locked_until"]) == ("queued", 0, None)
    assert jobs.effects(job_id) == []


@pytest.mark.slow
def test_processes_whose_supervisor_was_killed_let_their_handlers_end_and_go(directory: Path, jobs: Jobs) -> None:
    with Process(directory) as process:
        process.wait_ready()
        children = process.children()
        job_id = jobs.add("hold")
        wait_inside(directory)
        process.process.kill()
        process.wait_for_log("the supervisor is gone: this worker stops", 2)
        assert jobs.status(job_id) == "running"
        go(directory)
        _, alive = psutil.wait_procs(children, 10)
        assert not alive
    assert jobs.status(job_id) == "done"


@pytest.mark.slow
def test_a_signal_while_the_application_is_still_imported(directory: Path, jobs: Jobs) -> None:
    lines = ["import time", "from pathlib import Path", "Path('importing').touch()"]
    lines += ["while not Path('go').exists(): time.sleep(0.01)", "from app import worker"]
    write(directory, "late", "\n".join(lines))
    with Process(directory, "late:worker") as process:
        wait_until((directory / "importing").exists, 20)
        process.process.send_signal(signal.SIGTERM)
        process.wait_for_log("SIGTERM: 2 worker processes stop")
        go(directory)
        assert process.wait() == 0
    assert "starts: queues" not in process.log()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_process_that_does_not_end_in_time_is_killed(
    number: signal.Signals, directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SIGHUP is a signal to stop where it comes from a terminal that was closed."""
    monkeypatch.setattr(os, "isatty", lambda descriptor: descriptor == 0)
    monkeypatch.setattr(_supervisor, "KILL_SECONDS", 0.3)
    monkeypatch.chdir(directory)
    caplog.set_level("INFO", "enlist.supervisor")
    write(directory, "late", "from pathlib import Path; Path('importing').touch(); import time; time.sleep(60)")
    supervisor = Supervisor(2, ["info", "0", "late:worker"])

    def stop() -> None:
        wait_until((directory / "importing").exists, 20)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=stop)
    thread.start()
    assert not supervisor.run()
    thread.join()
    assert caplog.text.count("has not ended in time and is killed") == 2
    assert caplog.text.count("was killed by SIGKILL") == 2


# -- replacing ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sighup_replaces_one_process_after_the_other(directory: Path, jobs: Jobs) -> None:
    with Process(directory) as process:
        process.wait_ready()
        before = {child.pid for child in process.children()}
        process.process.send_signal(signal.SIGHUP)
        process.wait_ready(4)
        wait_until(lambda: len(process.children()) == 2)
        after = {child.pid for child in process.children()}
        process.process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    assert not before & after
    # The second was asked to stop when the first new one had begun to work.
    order = re.findall(r"(starts: queues|no more claims)", process.log())
    assert order[:6] == ["starts: queues"] * 2 + ["no more claims", "starts: queues"] * 2


@pytest.mark.slow
def test_a_replacement_that_cannot_start_leaves_the_others_alone(directory: Path) -> None:
    with Process(directory) as process:
        process.wait_ready()
        before = {child.pid for child in process.children()}
        write(directory, "app", "1 / 0")
        process.process.send_signal(signal.SIGHUP)
        process.wait_for_log("the rolling restart ends here: the new process could not start; the others stay")
        assert len(before & {child.pid for child in process.children()}) == 1
        write(directory, "app", APPLICATION)
        process.wait_ready(3)
        process.process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
