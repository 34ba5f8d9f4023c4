"""How measurements say how far they are, and their tables."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from enlist.bench import _progress
from enlist.bench._progress import Progress, progress_of_command
from enlist.bench._text import table


def steps(progress: Progress) -> None:
    with progress:
        progress.begin(4)
        progress.step("first [of all]")
        progress.within(0.5)
        assert list(progress.rounds(2, "rounds")) == [0, 1]
        assert list(progress.each("a", "letters")) == ["a"]


def test_elsewhere_than_on_a_terminal_steps_are_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_progress, "LINE_SECONDS", 0.0)
    out = io.StringIO()
    steps(Progress(Console(file=out)))
    assert [line.partition(" s  ")[2] for line in out.getvalue().splitlines()] == [
        "1 of 4: first [of all]",
        "2 of 4: rounds",
        "3 of 4: rounds",
        "4 of 4: letters",
    ]


def test_of_steps_that_come_fast_not_each_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_progress, "LINE_SECONDS", 3600.0)
    out = io.StringIO()
    steps(Progress(Console(file=out)))
    assert len(out.getvalue().splitlines()) == 1


def test_on_a_terminal_there_is_a_bar_which_is_gone_at_the_end() -> None:
    out = io.StringIO()
    steps(Progress(Console(file=out, force_terminal=True, width=100)))
    shown = out.getvalue()
    assert "1 of 4: first [of all]" in shown
    assert "4 of 4: letters" in shown
    assert "━" in shown
    assert shown.endswith("\x1b[1A\x1b[2K")  # up a line, and clear it


def test_progress_is_on_standard_error_and_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    steps(progress_of_command(as_json=False))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "1 of 4: first [of all]" in captured.err
    steps(progress_of_command(as_json=True))
    steps(Progress())
    assert capsys.readouterr() == ("", "")


def test_with_json_it_is_shown_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes standard error for a terminal then
    steps(progress_of_command(as_json=True))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "4 of 4: letters" in captured.err


def test_the_columns_of_a_table_are_as_wide_as_they_must_be() -> None:
    assert table(["", "jobs/s"], [["short", "1"], ["a long title", "12,345"], ["none", ""]]) == [
        "              jobs/s",
        "short              1",
        "a long title  12,345",
        "none",
    ]
