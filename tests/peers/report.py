"""The whole report: the machine, the table, the settings, and what went wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from tests.peers.machine import QUIET_CORES, SETTINGS, machine, versions
from tests.peers.peer import Load, load_peer
from tests.peers.place import Run
from tests.peers.run import Results
from tests.peers.table import table

__all__ = ["as_dict", "as_text"]

LOADS = (Load(), Load("insert"), Load("insert-grouped"), Load("latency"), Load("sleep", 0.002, 8))


def as_text(results: Results, run: Run, measures: Sequence[str], rounds: int, server: str) -> str:
    """Markdown.

    :param server: its version.
    """
    server_settings = ", ".join(f"{name} {value}" for name, value in SETTINGS.items())
    packages: dict[str, None] = {}
    settings = []
    for name in results.peers:
        if name in results.errors.get("install", {}):
            continue
        peer = load_peer(name)
        packages.update(dict.fromkeys(peer.packages))
        settings.append(f"- {name}: {_settings(name, run)}. An effect: {peer.promise}.")
    return "\n".join(
        [
            f"{machine(server)}; {versions(list(packages))}.",
            f"Medians over rounds: {rounds}, {results.seconds / 60:.0f} minutes.",
            "",
            table(results, measures),
            "",
            "Settings:",
            "",
            f"- the server: {server_settings}; all connect over its Unix socket",
            *settings,
            *_troubles(results),
        ]
    )


def _settings(name: str, run: Run) -> str:
    """Of a drain, and how those of other measures differ."""
    peer = load_peer(name)
    changed = run.overrides.get(name, {})
    usual = {**peer.settings(Load()), **changed}
    text = ", ".join(f"{key} {value}" for key, value in usual.items()) or "its defaults"
    for load in LOADS[1:]:
        own = {**peer.settings(load), **changed}
        if differing := {key: value for key, value in own.items() if usual.get(key) != value}:
            text += f"; {load.name}: {', '.join(f'{key} {value}' for key, value in differing.items())}"
    if peer.most_jobs < run.jobs:
        text += f"; {peer.most_jobs:,} jobs a drain"
    return text


def _troubles(results: Results) -> Iterator[str]:
    for what, errors in results.errors.items():
        for name, error in errors.items():
            yield f"- {name} failed in {what}: {error}"
    for what, reasons in results.cannot.items():
        for name, reason in reasons.items():
            yield f"- {name} cannot do {what}: {reason}"
    for name, found in results.wrong.items():
        yield f"- **{name} was wrong**: {'; '.join(found)}"
    disturbed = sum(cores > QUIET_CORES for cores in results.foreign_cores)
    if disturbed:
        yield (
            f"- Other programs used more than {QUIET_CORES} cores during {disturbed} of"
            f" {len(results.foreign_cores)} drains."
        )
    if not results.wrong:
        yield "- Each job of each drain that has a figure ran exactly once, and left its one effect."


def as_dict(results: Results) -> dict[str, Any]:
    """For programs."""
    return asdict(results)
