"""Every Python block of the README and of docs/ is run, against a real database; shell blocks name real commands.

The blocks of a page run in order, in one namespace, on a migrated database of their own whose address is ``url``.
Two kinds of HTML comments, which readers don't see, steer it:

- ``<!-- run: ... -->`` holds Python that is run at its place: what an example takes for granted, or a check of it;
- ``<!-- no-run: reason -->`` on the line above a block: it is compiled, but not run.

What a page calls ``shop.models`` is ``tests.shop``; the address of its own database is put in for ``SHOP_URL``.
"""

from __future__ import annotations

import asyncio
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from sqlalchemy import URL, Engine
from sqlalchemy.ext.asyncio import AsyncEngine

import tests.shop

ROOT = Path(__file__).parents[1]
SHOP_URL = "postgresql+psycopg://localhost/shop"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]

_BLOCK = re.compile(
    r"^<!-- run:(?P<hidden>.*?)-->$"
    r"|^(?:<!-- no-run: (?P<reason>\S.*?) -->\n)?```(?P<language>\w*)\n(?P<shown>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    language: str
    source: str  # padded, so that its line numbers are the page's
    runs: bool


def _blocks(text: str) -> Iterator[Block]:
    for match in _BLOCK.finditer(text):
        group = "shown" if match["hidden"] is None else "hidden"
        padding = "\n" * text.count("\n", 0, match.start(group))
        language = match["language"] if group == "shown" else "python"
        yield Block(language, padding + match[group], runs=match["reason"] is None)


@pytest.fixture
def namespace(database_url: URL) -> Iterator[dict[str, object]]:
    # A module, since pydantic and typing look names up in the module of a class.
    module = types.ModuleType("documentation")
    sys.modules[module.__name__] = module
    module.__dict__["url"] = database_url
    sys.modules["shop"], sys.modules["shop.models"] = types.ModuleType("shop"), tests.shop
    yield module.__dict__
    del sys.modules["shop"], sys.modules["shop.models"]
    for value in list(module.__dict__.values()):
        if isinstance(value, Engine):
            value.dispose()
        elif isinstance(value, AsyncEngine):
            asyncio.run(value.dispose())
    del sys.modules[module.__name__]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_examples_run(page: Path, namespace: dict[str, object], database_url: URL) -> None:
    for block in _blocks(page.read_text()):
        if block.language == "python":
            address = database_url.render_as_string(hide_password=False)
            code = compile(block.source.replace(SHOP_URL, address), page, "exec", dont_inherit=True)
            if block.runs:
                exec(code, namespace)


def test_the_readme_has_examples_that_run() -> None:
    assert any(block.runs for block in _blocks((ROOT / "README.md").read_text()) if block.language == "python")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_shell_lines_name_commands_that_exist(page: Path) -> None:
    import typer.main

    from enlist.cli import app

    command = typer.main.get_command(app)
    known = set(getattr(command, "commands", ()))
    text = "\n".join(block.source for block in _blocks(page.read_text()) if block.language in {"sh", "console"})
    named = set(re.findall(r"(?:^|[\s/])enlist ([a-z][\w-]*)", text, re.MULTILINE))
    assert named <= known


def test_the_readmes_first_shell_lines_run_the_demo_and_the_tests() -> None:
    shell = [block.source for block in _blocks((ROOT / "README.md").read_text()) if block.language == "sh"]
    lines = [line for source in shell for line in source.splitlines() if line]
    prefix = "python3 -m venv .venv && .venv/bin/pip install --quiet"
    assert lines[:2] == [
        f"{prefix} '.[demo]' && .venv/bin/enlist demo",
        f"{prefix} -e '.[test]' && .venv/bin/python -m pytest",
    ]


def test_blocks_are_found_with_their_lines_and_marks() -> None:
    page = "# Title\n\n<!-- run:\nx = 1\n-->\n\n```python\ny = x\n```\n<!-- no-run: waits -->\n```python\nz = y\n```\n"
    assert list(_blocks(page)) == [
        Block("python", "\n" * 3 + "x = 1\n", runs=True),
        Block("python", "\n" * 7 + "y = x\n", runs=True),
        Block("python", "\n" * 11 + "z = y\n", runs=False),
    ]
