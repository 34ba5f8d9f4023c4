"""A network between a client and PostgreSQL that can stop: silently, with an error, or at a chosen moment."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from sqlalchemy import URL


class TcpProxy:
    """Listens on a TCP port of 127.0.0.1, and passes everything on to the server of ``url``.

    - :meth:`freeze` is a network that swallows: no byte passes, nothing is closed, connecting succeeds and says
      nothing. After :meth:`thaw` all that was held goes on its way.
    - :meth:`cut` closes what is open; :meth:`refuse` lets nobody in, as a server does that is down.
    - :meth:`freeze_at` and :meth:`lose_answer_to` do it to one connection, at a chosen statement.
    """

    def __init__(self, url: URL) -> None:
        self._family, self._target = _address(url)
        # Holds the port, also while nobody listens there: connecting is refused then.
        self._port = socket.socket()
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind(("127.0.0.1", 0))
        port: int = self._port.getsockname()[1]
        self.url = url.set(host="127.0.0.1", port=port).difference_update_query(["host", "port"])
        self.accepted = 0
        """How many connections were let in."""
        self.lost = threading.Event()
        """Set when an answer was lost."""
        self.frozen = threading.Event()
        """Set when a connection was frozen by :meth:`freeze_at`."""
        self._changed = threading.Condition()
        self._listener: socket.socket | None = None
        self._links: list[_Link] = []
        self._threads: list[threading.Thread] = []
        self._frozen = False
        self._losing: bytes | None = None
        self._freezing: bytes | None = None
        self._closed = False

    def __enter__(self) -> Self:
        self.accept()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.refuse()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.cut()
        for thread in self._threads:
            thread.join(5)
        for link in self._links:
            link.client.close()
            link.server.close()
        self._port.close()

    # -- all connections ----------------------------------------------------------------------------------------

    def freeze(self, *, new: bool = True) -> None:
        """Let no byte pass, in neither direction.

        :param new: also on connections that are made from now on; without, there is a new way to the server.
        """
        with self._changed:
            self._frozen = new
            for link in self._links:
                link.frozen = True

    def thaw(self) -> None:
        """Let everything pass, also what was held."""
        with self._changed:
            self._frozen = False
            for link in self._links:
                link.frozen = False
            self._changed.notify_all()

    def cut(self) -> None:
        """Close all connections that are open, at both ends."""
        with self._changed:
            for link in self._links:
                link.cut()
            self._changed.notify_all()

    def lead_to(self, url: URL) -> None:
        """Make new connections to another server; those that are open stay as they are."""
        self._family, self._target = _address(url)

    def refuse(self) -> None:
        """Let no new connection in: connecting fails at once."""
        if self._listener is not None:
            _shut(self._listener)
            self._accepting.join(5)
            self._listener.close()
            self._listener = None

    def accept(self) -> None:
        """Let new connections in."""
        if self._listener is None:
            self._listener = socket.socket()
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind(self._port.getsockname())
            self._listener.listen(100)
            self._accepting = threading.Thread(target=self._accept, args=(self._listener,), daemon=True)
            self._accepting.start()

    # -- one connection -----------------------------------------------------------------------------------------

    def lose_answer_to(self, marker: bytes) -> None:
        """Cut the next connection that sends ``marker``, once the answer has come."""
        self.lost.clear()
        self._losing = marker

    def freeze_at(self, marker: bytes) -> None:
        """Freeze the next connection that sends ``marker``: the server gets that, its answer never comes."""
        self.frozen.clear()
        self._freezing = marker

    # -- passing on ---------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            server = socket.socket(self._family)
            if server.connect_ex(self._target):
                client.close()
                server.close()
                continue
            for end in (client, server):
                if end.family == socket.AF_INET:
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._changed:
                link = _Link(client, server, frozen=self._frozen)
                self._links.append(link)
                self.accepted += 1
                self._start(self._to_server, link)
                self._start(self._to_client, link)

    def _start(self, function: Callable[[_Link], None], link: _Link) -> None:
        thread = threading.Thread(target=function, args=(link,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _to_server(self, link: _Link) -> None:
        while True:
            data = _read(link.client)
            self._wait_for_thaw(link)
            with self._changed:
                if self._losing is not None and self._losing in data:
                    self._losing = None
                    link.losing = True
                freezing = self._freezing is not None and self._freezing in data
                if freezing:
                    self._freezing = None
                    link.frozen = True
            if not _send(link.server, data):
                link.cut()
                return
            if freezing:
                self.frozen.set()

    def _to_client(self, link: _Link) -> None:
        while True:
            data = _read(link.server)
            self._wait_for_thaw(link)
            if link.losing:
                self.lost.set()
                data = b""
            if not _send(link.client, data):
                link.cut()
                return

    def _wait_for_thaw(self, link: _Link) -> None:
        """Hold what was read, the end of a connection too: the other side is not told while the network is frozen."""
        with self._changed:
            self._changed.wait_for(lambda: not link.frozen or link.is_cut or self._closed)


class _Link:
    """A client's connection and the one that was made for it."""

    def __init__(self, client: socket.socket, server: socket.socket, *, frozen: bool) -> None:
        self.client = client
        self.server = server
        self.frozen = frozen
        self.losing = False
        self.is_cut = False

    def cut(self) -> None:
        self.is_cut = True
        _shut(self.client)
        _shut(self.server)


def _read(one: socket.socket) -> bytes:
    try:
        return one.recv(65536)
    except OSError:
        return b""


def _send(one: socket.socket, data: bytes) -> bool:
    """Whether there was something to pass on, and it went."""
    try:
        one.sendall(data)
    except OSError:
        return False
    return bool(data)


def _shut(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)


def _address(url: URL) -> tuple[int, str | tuple[str, int]]:
    """The family and address of the server's socket."""
    host, port = url.query.get("host", url.host or "localhost"), url.query.get("port", url.port or 5432)
    assert isinstance(host, str)
    assert isinstance(port, (str, int))
    if host.startswith("/"):
        return socket.AF_UNIX, f"{host}/.s.PGSQL.{port}"
    return socket.AF_INET, (host, int(port))
