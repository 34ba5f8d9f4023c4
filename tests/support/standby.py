"""A hot standby: a server that follows another, and is read-only until it is promoted."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from enlist.demo.server import EmbeddedServer
from tests.support.databases import SETTINGS


@contextmanager
def standby_of(primary: EmbeddedServer) -> Iterator[EmbeddedServer]:
    """A started standby of a running server (1.5 s). It streams what the primary commits."""
    with tempfile.TemporaryDirectory(prefix="enlist-standby-", dir=primary.socket_directory.parent) as name:
        directory = Path(name)
        directory.chmod(0o755)
        _copy(primary, directory / "data")
        owner = primary.data_directory.stat()
        for path in (directory, *directory.rglob("*")):
            shutil.chown(path, owner.st_uid, owner.st_gid)
        with EmbeddedServer(directory, settings=SETTINGS, binaries=primary.binary_directory) as standby:
            yield standby


def _copy(primary: EmbeddedServer, target: Path) -> None:
    """Make the copy, and write into it whom to follow."""
    program = primary.binary_directory / "pg_basebackup"
    source = ["--host", str(primary.socket_directory), "--port", "5432", "--username", "postgres"]
    options = [
        "--pgdata",
        str(target),
        "--write-recovery-conf",
        "--wal-method",
        "stream",
        "--checkpoint",
        "fast",
        "--no-sync",
    ]
    subprocess.run([program, *source, *options], check=True, capture_output=True)
