"""``python -m tests.peers``: see :mod:`tests.peers.measures` for what is measured."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from enlist.demo.server import EmbeddedServer
from tests.peers.machine import SETTINGS, Meter, server_version
from tests.peers.measures import DEFAULT, MEASURES
from tests.peers.peer import NAMES
from tests.peers.place import Run
from tests.peers.report import as_dict, as_text
from tests.peers.run import measure


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the report, and return 1 if enlist failed, or lost or doubled a job."""
    parser = argparse.ArgumentParser(prog="python -m tests.peers", description="enlist beside other job queues.")
    parser.add_argument("--peers", default=",".join(NAMES), help="comma-separated; default all")
    parser.add_argument("--measures", default=",".join(DEFAULT), help=f"comma-separated; all: {','.join(MEASURES)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=20_000, help="of a drain; a quarter of it where they insert")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to it")
    parser.add_argument(
        "--set", action="append", default=[], metavar="PEER.NAME=VALUE", help="another setting, to try it out"
    )
    options = parser.parse_args(arguments)
    peers, measures = options.peers.split(","), options.measures.split(",")
    for unknown in [*set(peers) - set(NAMES), *set(measures) - set(MEASURES)]:
        parser.error(f"there is no {unknown!r}: peers are {', '.join(NAMES)}; measures are {', '.join(MEASURES)}")
    try:
        overrides = _overrides(options.set)
    except ValueError as error:
        parser.error(str(error))
    with EmbeddedServer(settings=SETTINGS) as server:
        run = Run(Meter(server.pid), options.jobs, progress, overrides)
        results = measure(server.url(), run, peers, measures, options.rounds)
        print(as_text(results, run, measures, options.rounds, server_version(server.url())))
    if options.json is not None:
        options.json.write_text(json.dumps(as_dict(results), indent=2) + "\n")
    return results.status


def _overrides(settings: Sequence[str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for setting in settings:
        match = re.fullmatch(r"([\w-]+)\.(\w+)=(.+)", setting)
        if match is None or match[1] not in NAMES:
            raise ValueError(f"a setting is PEER.NAME=VALUE, such as pgqueuer.batch_size=500, not {setting!r}")
        found.setdefault(match[1], {})[match[2]] = json.loads(match[3])
    return found


def progress(line: str) -> None:
    """Tell people at a terminal."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
