"""A proxy between a client and PostgreSQL that loses answers: what a dying network does, at a chosen moment."""

from __future__ import annotations

import socket
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Self

from sqlalchemy import URL

LISTEN_NAME = ".s.PGSQL.5432"


class LossyProxy:
    """Listens on a socket of its own and passes everything on to the server of ``url``.

    After :meth:`lose_answer_to`, the first connection that sends the given bytes is cut when the server has
    answered: the server has done what was asked, and the client never learns it.
    """

    def __init__(self, url: URL) -> None:
        _, arguments = url.get_dialect()().create_connect_args(url)
        host = arguments["host"]
        port = arguments.get("port", 5432)
        self._target = f"{host}/.s.PGSQL.{port}" if host.startswith("/") else (host, port)
        self._directory = tempfile.TemporaryDirectory(prefix="enlist-")
        self.url = url.set(host=None, port=None).update_query_dict({"host": self._directory.name})
        self._marker: bytes | None = None
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.lost = threading.Event()
        """Set when an answer was lost."""

    def __enter__(self) -> Self:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(Path(self._directory.name) / LISTEN_NAME))
        self._listener.listen()
        self._start(self._accept)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(5)  # the one that accepts: it may be about to add a connection
        with self._lock:
            for one in self._sockets:
                _cut(one)
        for thread in self._threads:
            thread.join(5)
        self._listener.close()
        for one in self._sockets:
            one.close()
        self._directory.cleanup()

    def lose_answer_to(self, marker: bytes) -> None:
        """Cut the next connection that sends ``marker``, once the answer has come."""
        self.lost.clear()
        self._marker = marker

    def _start(self, function: object, *arguments: object) -> None:
        assert callable(function)
        thread = threading.Thread(target=function, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX if isinstance(self._target, str) else socket.AF_INET)
            server.connect(self._target)
            with self._lock:
                self._sockets += [client, server]
            losing = threading.Event()
            self._start(self._to_server, client, server, losing)
            self._start(self._to_client, client, server, losing)

    def _to_server(self, client: socket.socket, server: socket.socket, losing: threading.Event) -> None:
        while data := _read(client):
            with self._lock:
                if self._marker is not None and self._marker in data:
                    self._marker = None
                    losing.set()
            _send(server, data)
        _cut(server)

    def _to_client(self, client: socket.socket, server: socket.socket, losing: threading.Event) -> None:
        while data := _read(server):
            if losing.is_set():
                self.lost.set()
                break
            _send(client, data)
        _cut(client)
        _cut(server)


def _read(one: socket.socket) -> bytes:
    try:
        return one.recv(65536)
    except OSError:
        return b""


def _send(one: socket.socket, data: bytes) -> None:
    try:
        one.sendall(data)
    except OSError:
        _cut(one)


def _cut(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
