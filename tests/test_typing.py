"""The types of the public API, as users meet them: checked with mypy in strict mode."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TYPING = Path(__file__).parent / "typing"

_EXPECTED = re.compile(r"# E: (?P<part>.+)$")
_REPORTED = re.compile(r"^(?P<file>.+?):(?P<line>\d+): error: (?P<message>.+)$")

pytestmark = pytest.mark.timeout(300)  # 30 s with a cold cache


def test_the_package_and_its_tests_are_typed() -> None:
    result = _mypy()
    assert result.returncode == 0, result.stdout + result.stderr


def test_wrong_uses_are_errors() -> None:
    """Each line with ``# E: part`` of the message is an error; no other line is."""
    assert _differences(TYPING / "errors.py") == []


def test_this_check_sees_what_is_missing_and_what_is_too_much(tmp_path: Path) -> None:
    path = tmp_path / "example.py"
    path.write_text(
        "x: int = 'a'  # E: Incompatible types in assignment\n"
        "y: int = 1  # E: nothing of the kind\n"
        "z: int = 'a'\n"
        "w: int = 'a'  # E: another message\n"
    )
    found = _differences(path)
    assert [text.partition(":")[0] for text in found] == ["line 2", "line 3", "line 4"]


def _differences(path: Path) -> list[str]:
    expected = {
        number: match["part"].strip()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (match := _EXPECTED.search(line))
    }
    assert expected, f"no line of {path} is expected to be wrong"
    result = _mypy("--no-error-summary", "--hide-error-context", str(path))
    assert result.stderr == ""
    reported: dict[int, list[str]] = {}
    for line in result.stdout.splitlines():
        # By name alone: mypy's cache remembers messages with the directory of an earlier run.
        if (match := _REPORTED.match(line)) and Path(match["file"]).name == path.name:
            reported.setdefault(int(match["line"]), []).append(match["message"])
    differences = []
    for number in sorted(expected.keys() | reported.keys()):
        messages = " / ".join(reported.get(number, ["no error"]))
        part = expected.get(number)
        if part is None or part not in messages:
            differences.append(f"line {number}: expected {part or 'no error'!r}, mypy says {messages!r}")
    return differences


def _mypy(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
