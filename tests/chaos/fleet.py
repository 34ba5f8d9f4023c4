"""The workers of a run: started, replaced when they end, each with a network of its own."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from sqlalchemy import URL

from tests.chaos.ways import WAYS
from tests.chaos.zygote import Zygote
from tests.support.tcp_proxy import TcpProxy

STOP_SECONDS = 30
"""Within which a worker has to end after it was asked to: its handlers' time, and some more to write what is left."""

NEVER = b"\0never sent\0"


class Member:
    """A worker process."""

    def __init__(self, zygote: Zygote, number: int, crew: str, proxy: TcpProxy, pid: int) -> None:
        self._zygote = zygote
        self.number = number
        self.crew = crew
        self.proxy = proxy
        self.pid = pid
        self.may_end = False
        """It was told to end, or killed."""
        self.stop_by: float | None = None
        self.frozen_until: float | None = None
        self.network_frozen_until: float | None = None
        self.refused_until: float | None = None

    def __str__(self) -> str:
        return f"worker {self.number} ({self.crew})"

    @property
    def name(self) -> str:
        return str(self.number)

    @property
    def held(self) -> bool:
        """Whether it or its network stands still."""
        return bool(self.frozen_until or self.network_frozen_until or self.refused_until)

    def send(self, number: signal.Signals) -> None:
        self._zygote.send(self.pid, number)

    def thaw(self, now: float) -> None:
        """Let go on what has stood still long enough."""
        if self.frozen_until is not None and self.frozen_until <= now:
            self.send(signal.SIGCONT)
            self.frozen_until = None
        if self.network_frozen_until is not None and self.network_frozen_until <= now:
            self.proxy.freeze_at(NEVER)  # no COMMIT has come meanwhile
            self.proxy.thaw()
            self.network_frozen_until = None
        if self.refused_until is not None and self.refused_until <= now:
            self.proxy.accept()
            self.refused_until = None


class Fleet:
    """Keeps a number of workers alive; which crew the next is of is the one that is most behind its share."""

    def __init__(
        self, zygote: Zygote, url: URL, directory: Path, random: Random, ways: Sequence[str], **settings: Any
    ) -> None:
        self._zygote = zygote
        self._url = url
        self._directory = directory
        self._random = random
        self._ways = list(ways)
        self._settings = settings
        self._shares = Counter(WAYS[name].crew for name in ways)
        self._number = 0
        self.members: list[Member] = []
        self.leaving: list[Member] = []
        """Dead, their connections not yet closed."""
        self.wrong: list[str] = []
        self.counts: Counter[str] = Counter()

    def start(self) -> Member:
        """Start a worker."""
        alive = Counter(member.crew for member in self.members)
        crew = min(self._shares, key=lambda name: ((alive[name] + 1) / self._shares[name], name))
        if missing := [name for name in self._shares if not alive[name]]:
            crew = missing[0]
        self._number += 1
        proxy = TcpProxy(self._url)
        proxy.accept()
        pid = self._zygote.start(
            {
                "name": str(self._number),
                "crew": crew,
                "ways": self._ways,
                "url": proxy.url.render_as_string(hide_password=False),
                "log": str(self._directory / f"{self._number}.log"),
                "raw": str(self._directory / f"{self._number}.raw"),
                **self._settings,
            }
        )
        self.counts["workers"] += 1
        member = Member(self._zygote, self._number, crew, proxy, pid)
        self.members.append(member)
        return member

    def look(self, now: float) -> None:
        """Take away what has ended, and thaw what has stood still long enough."""
        for member in list(self.members):
            status = self._zygote.ended.pop(member.pid, None)
            if status is not None:
                self.members.remove(member)
                self.leaving.append(member)
                self._judge(member, status)
                member.frozen_until = None
            elif member.stop_by is not None and now > member.stop_by and not member.held:
                self.wrong.append(f"{member} did not stop within {STOP_SECONDS} s")
                member.stop_by = None
                member.send(signal.SIGQUIT)
            member.thaw(now)
        for member in list(self.leaving):
            member.thaw(now)
            # What a frozen network holds of a dead worker arrives when it thaws.
            if member.network_frozen_until is None:
                self.leaving.remove(member)
                member.proxy.__exit__()

    def _judge(self, member: Member, status: int) -> None:
        if status == -signal.SIGKILL:
            self.counts["kills" if member.may_end else "kills at a commit"] += 1
        elif member.stop_by is not None and status in {0, -signal.SIGTERM}:  # before it took signals, or after
            self.counts["stops"] += 1
        else:
            self.wrong.append(f"{member} ended by itself, status {status}")

    def kill(self, member: Member) -> None:
        member.may_end = True
        member.send(signal.SIGKILL)

    def stop(self, member: Member) -> None:
        """Ask it to end, as a deployment does."""
        if member.stop_by is None:
            member.stop_by = time.monotonic() + STOP_SECONDS
            member.send(signal.SIGTERM)

    def freeze(self, member: Member, until: float) -> None:
        member.send(signal.SIGSTOP)
        member.frozen_until = until

    def calm(self) -> None:
        """Let everything go on."""
        for member in [*self.members, *self.leaving]:
            member.thaw(float("inf"))

    def close(self) -> None:
        for member in [*self.members, *self.leaving]:
            member.proxy.__exit__()
