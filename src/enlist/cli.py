"""The ``enlist`` command. It needs the extra ``enlist[cli]``; without it, it says so."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from enlist._cli_app import app

__all__ = ["app", "main"]

_EXTRA: Final = frozenset({"typer", "rich"})
"""What the extra installs: one of them missing means the extra is."""


def main() -> None:
    """Run the ``enlist`` command with the process's arguments, and exit with its status.

    0: done. 1: it could not be done; standard error says why, on a line. 2: it was called in a wrong way.
    """
    try:
        from enlist._cli_app import app  # noqa: PLC0415 - may be missing
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        sys.stderr.write(f"enlist: the command line needs {error.name}: pip install 'enlist[cli]'\n")
        raise SystemExit(2) from None
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show hides no other
    app(prog_name="enlist")


def __getattr__(name: str) -> Any:
    # Late, so that main() can be imported, and can say what is missing, without typer.
    if name == "app":
        from enlist._cli_app import app  # noqa: PLC0415

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
