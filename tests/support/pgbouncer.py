"""PgBouncer in transaction mode in front of a server: each transaction may get another of its few connections."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Self

import pytest
from sqlalchemy import URL

from enlist.demo.server import _server_user
from tests.support.waiting import wait_until

PROGRAMS = ("pgbouncer", "/usr/sbin/pgbouncer")
POOL_SIZE = 2


class PgBouncer:
    """Started from its program, without its service, for one test; :attr:`url` is the way through it."""

    def __init__(self, url: URL, **settings: str) -> None:
        self._program = next((found for name in PROGRAMS if (found := shutil.which(name))), None)
        if self._program is None:
            pytest.fail("these tests need PgBouncer, and there is none here: apt-get install pgbouncer", pytrace=False)
        self._server = url
        self._settings = settings
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port: int = free.getsockname()[1]
        self.url = url.set(host="127.0.0.1", port=self._port).difference_update_query(["host", "port"])

    def __enter__(self) -> Self:
        user = _server_user()  # it does not run as root either
        self._directory = Path(tempfile.mkdtemp(prefix="enlist-bouncer-", dir="/tmp"))
        self._write_settings()
        if user is not None:
            for path in (self._directory, *self._directory.iterdir()):
                shutil.chown(path, user)
        options: dict[str, Any] = {} if user is None else {"user": user, "extra_groups": []}
        assert self._program is not None
        self._process = subprocess.Popen(
            [self._program, "-q", "pgbouncer.ini"],
            cwd=self._directory,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            **options,
        )
        wait_until(self._answers, message="a PgBouncer that can be connected to")
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._directory)

    @property
    def log(self) -> str:
        return (self._directory / "pgbouncer.log").read_text()

    def _write_settings(self) -> None:
        _, target = self._server.get_dialect()().create_connect_args(self._server)
        database = self._server.database
        settings = {
            "listen_addr": "127.0.0.1",
            "listen_port": str(self._port),
            "unix_socket_dir": "",
            "auth_type": "trust",
            "auth_file": "users.txt",
            "pool_mode": "transaction",
            "default_pool_size": str(POOL_SIZE),
            "max_client_conn": "500",
            "logfile": "pgbouncer.log",
            **self._settings,
        }
        lines = ["[databases]", f"{database} = host={target['host']} port={target.get('port', 5432)}", "[pgbouncer]"]
        lines += [f"{name} = {value}" for name, value in settings.items()]
        (self._directory / "pgbouncer.ini").write_text("\n".join(lines) + "\n")
        (self._directory / "users.txt").write_text(f'"{self._server.username}" ""\n')

    def _answers(self) -> bool:
        if self._process.poll() is not None:
            pytest.fail(f"PgBouncer has ended at once:\n{self.log}", pytrace=False)
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", self._port)) == 0
