"""``enlist worker``: runs an application's worker, in this process or in several that it looks after."""

from __future__ import annotations

import os
from typing import Annotated, Final

import typer

from enlist._cli_common import LogLevel, configure_logging, end_soon, target_argument
from enlist._cli_load import load_worker
from enlist.exceptions import ConfigurationError

__all__ = ["worker"]

MOST_PROCESSES: Final = 256


def worker(
    target: Annotated[str, target_argument("A Worker, or a function that returns one, such as shop.jobs:worker.")],
    context: typer.Context,
    log_level: Annotated[
        LogLevel, typer.Option(envvar="ENLIST_LOG_LEVEL", case_sensitive=False, help="How much to log.")
    ] = LogLevel.INFO,
    processes: Annotated[
        int,
        typer.Option(
            min=1,
            max=MOST_PROCESSES,
            envvar="ENLIST_PROCESSES",
            help="How many processes run the worker, each with all its slots. One that dies is started again.",
        ),
    ] = 1,
) -> None:
    """Run an application's worker until SIGTERM or SIGINT. A second signal ends it at once.

    With several processes SIGHUP replaces them by new ones, one after the other.
    """
    if processes > 1:
        _supervise(processes, [log_level.value, str(int(context.find_root().params["traceback"])), target], log_level)
        return
    found = load_worker(target)
    configure_logging(log_level)
    status = 0
    end_soon(1, after=found._stop_now)
    try:
        found.run()
    except SystemExit as exit_:
        status = exit_.code if isinstance(exit_.code, int) else 1
    end_soon(status)
    raise typer.Exit(status)


def _supervise(processes: int, arguments: list[str], log_level: LogLevel) -> None:
    if os.name != "posix":
        raise ConfigurationError("--processes is for POSIX systems: start several `enlist worker` here instead")
    from enlist._supervisor import Supervisor  # noqa: PLC0415 - there are no such signals elsewhere

    configure_logging(log_level)
    if not Supervisor(processes, arguments).run():
        raise typer.Exit(1)
