"""A thread, process or connection that a test leaves behind fails it: shown with tests that do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.databases import Databases

ROOT = Path(__file__).parents[1]

LEAKY = """
import subprocess, sys, threading
from tests.support.observer import connect

kept = []

def test_thread():
    threading.Thread(target=threading.Event().wait, name="forgotten", daemon=True).start()

def test_process():
    kept.append(subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE))

def test_zombie():
    kept.append(subprocess.Popen([sys.executable, "-c", ""]))

def test_connection(database_url):
    kept.append(connect(database_url))
    kept[-1].execute("SELECT 'mine'")

def test_pooled_connection(engine):
    kept.append(engine.connect())

async def test_async_pooled_connection(asyncpg_engine):
    kept.append(await asyncpg_engine.connect())
"""

LEAKS = {
    "test_thread": "thread 'forgotten' is still running",
    "test_process": "import sys; sys.stdin.read()) was left behind",
    "test_zombie": "(ended, but nobody waited for it) was left behind",
    "test_connection": "is still open; its last statement: SELECT 'mine'",
    "test_pooled_connection": "left 1 connections checked out of its engine's pool",
    "test_async_pooled_connection": "left 1 connections checked out of its engine's pool",
}

TIDY = """
import subprocess, sys, threading

def test_tidy(engine, observer):
    threading.Thread(target=threading.Event().wait, args=(0.1,)).start()
    subprocess.run([sys.executable, "-c", ""], check=True)
    with engine.connect() as connection:
        connection.exec_driver_sql("SELECT 1")

async def test_async_tidy(any_async_engine):
    async with any_async_engine.connect() as connection:
        await connection.exec_driver_sql("SELECT 1")
"""


@pytest.mark.slow
def test_each_leak_fails_its_test(server: Databases, pytester: pytest.Pytester) -> None:
    result = _run(LEAKY, server, pytester)
    for name, message in LEAKS.items():
        _, found, rest = result.stdout.partition(f"ERROR at teardown of {name} ")
        assert found, result.stdout
        assert message in rest.partition("ERROR at teardown of")[0]
    assert f"{len(LEAKS)} passed" in result.stdout
    assert f"{len(LEAKS)} errors" in result.stdout
    assert result.returncode == 1


@pytest.mark.slow
def test_what_is_cleared_away_is_no_leak(server: Databases, pytester: pytest.Pytester) -> None:
    result = _run(TIDY, server, pytester)
    assert "3 passed" in result.stdout
    assert result.returncode == 0


def _run(source: str, server: Databases, pytester: pytest.Pytester) -> subprocess.CompletedProcess[str]:
    """Run a test file with this suite's fixtures, on this run's server."""
    path = pytester.makepyfile(source)
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "tests.conftest",
            "-c",
            ROOT / "pyproject.toml",
            "--rootdir",
            ROOT,
            path,
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "ENLIST_TEST_DATABASE_URL": server.url("postgres").render_as_string(hide_password=False),
            "ENLIST_TEST_GRACE_SECONDS": "0.3",
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        check=False,
    )
