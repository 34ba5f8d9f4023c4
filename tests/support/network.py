"""A network between worker and server that can be cut."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from typing import Self

from sqlalchemy import URL


class Network:
    """Forwards TCP connections to the server, while its gate is open.

    To lose a single answer at a chosen moment there is :class:`tests.support.proxy.LossyProxy`.
    """

    def __init__(self, url: URL) -> None:
        self._family, self._target = _address(url)
        self._listener = socket.create_server(("127.0.0.1", 0))
        port: int = self._listener.getsockname()[1]
        self.url = url.set(host="127.0.0.1", port=port).difference_update_query(["host", "port"])
        self._open = True
        self._peers: dict[socket.socket, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._ours, self._theirs = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="network", daemon=True)

    def __enter__(self) -> Self:
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._theirs, selectors.EVENT_READ)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ours.send(b"x")
        self._thread.join()
        self._selector.close()
        for one in (self._listener, self._ours, self._theirs):
            one.close()

    def close_gate(self) -> None:
        """Cut all connections, and let no new one pass."""
        self._open = False
        self._ours.send(b"c")

    def open_gate(self) -> None:
        self._open = True

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                one = key.fileobj
                assert isinstance(one, socket.socket)
                if one is self._listener:
                    self._accept()
                elif one is self._theirs:
                    for other in list(self._peers):
                        self._cut(other)
                    if one.recv(1) == b"x":
                        return
                elif one in self._peers:
                    self._forward(one)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        server = socket.socket(self._family)
        if not self._open or server.connect_ex(self._target):
            client.close()
            server.close()
            return
        self._peers[client], self._peers[server] = server, client
        self._selector.register(client, selectors.EVENT_READ)
        self._selector.register(server, selectors.EVENT_READ)

    def _forward(self, one: socket.socket) -> None:
        try:
            data = one.recv(65536)
            if data:
                self._peers[one].sendall(data)
        except OSError:
            data = b""
        if not data:
            self._cut(one)

    def _cut(self, one: socket.socket) -> None:
        for end in (one, self._peers.pop(one, one)):
            self._peers.pop(end, None)
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(end)
            end.close()


def _address(url: URL) -> tuple[int, str | tuple[str, int]]:
    """The family and address of the server's socket."""
    host, port = url.query.get("host", url.host or "localhost"), url.query.get("port", url.port or 5432)
    assert isinstance(host, str)
    assert isinstance(port, (str, int))
    if host.startswith("/"):
        return socket.AF_UNIX, f"{host}/.s.PGSQL.{port}"
    return socket.AF_INET, (host, int(port))
