"""``python -m tests.chaos``: see :class:`tests.chaos.run.Settings` for what the options mean."""

from __future__ import annotations

import argparse
import json
import secrets
import sys

from tests.chaos.report import Settings
from tests.chaos.run import run
from tests.chaos.ways import WAYS


def main() -> int:
    default = Settings()
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Chaos for workers.")
    parser.add_argument("--seconds", type=float, default=default.seconds)
    parser.add_argument("--workers", type=int, default=default.workers)
    parser.add_argument("--ways", default=",".join(default.ways), help="comma-separated; default all")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10_000), help="default a new one, which is told")
    parser.add_argument("--jobs", type=int, default=default.jobs, help="the most that are enqueued")
    parser.add_argument("--depth", type=float, default=default.depth, help="share of the jobs that are kept ready")
    parser.add_argument("--pace", type=float, default=default.pace, help="faults a second")
    parser.add_argument("--restart-every", type=float, default=default.restart_every, help="seconds")
    parser.add_argument("--fatal", type=float, default=default.fatal, help="chance of a kill at a commit")
    parser.add_argument("--lease", type=float, default=default.lease, help="seconds")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    arguments = vars(parser.parse_args())
    as_json = arguments.pop("json")
    ways = arguments.pop("ways").split(",")
    if unknown := set(ways) - WAYS.keys():
        parser.error(f"unknown ways {', '.join(sorted(unknown))}: they are {', '.join(WAYS)}")
    settings = Settings(ways=ways, **arguments)
    print(f"seed {settings.seed}", file=sys.stderr, flush=True)
    report = run(settings, lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps(report.as_dict(), indent=2) if as_json else report)
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
