"""The ways to run a handler: the same promises hold in each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
import tenacity
from sqlalchemy import URL, Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from enlist import HandlerRegistry, Job

Body = Callable[[Session, Job[Any]], None]


@dataclass(frozen=True)
class Way:
    """How a handler is registered, and what its worker is bound to."""

    options: dict[str, Any] = field(default_factory=dict)
    driver: str | None = None
    """Of an async handler."""
    isolation: str = "READ COMMITTED"

    @property
    def groups(self) -> bool:
        """Whether jobs share transactions; where the snapshot is the transaction's they do not."""
        return "commit_every" in self.options and self.isolation == "READ COMMITTED"

    def register(self, handlers: HandlerRegistry, kind: str, body: Body, **options: Any) -> None:
        """Register a handler that does the same in each way."""
        register = handlers.handler(kind, **{"wait": tenacity.wait_fixed(0.05), **self.options, **options})
        if self.driver is None:
            register(body)
            return

        async def asynchronous(session: AsyncSession, job: Job[Any]) -> None:
            await session.run_sync(body, job)

        register(asynchronous)

    def bind(self, url: URL) -> Engine | AsyncEngine:
        if self.driver is None:
            return sa.create_engine(url, isolation_level=self.isolation, pool_size=10)
        url = url.set(drivername=f"postgresql+{self.driver}")
        return create_async_engine(url, isolation_level=self.isolation, pool_size=10)


def dispose(bind: Engine | AsyncEngine) -> None:
    (bind.sync_engine if isinstance(bind, AsyncEngine) else bind).dispose()


GROUP: dict[str, Any] = {"commit_every": 50}
SAVEPOINT: dict[str, Any] = {"on_commit": "savepoint"}
LEVELS = ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")

WAYS: dict[str, Way] = {
    "lease": Way(),
    "lease, psycopg async": Way(driver="psycopg"),
    "lease, asyncpg": Way(driver="asyncpg"),
    "lease, REPEATABLE READ": Way(isolation="REPEATABLE READ"),
    "lease, SERIALIZABLE, asyncpg": Way(driver="asyncpg", isolation="SERIALIZABLE"),
    "hold_lock": Way({"hold_lock": True}),
    "hold_lock, asyncpg": Way({"hold_lock": True}, driver="asyncpg"),
    "commit_every": Way(GROUP),
    "commit_every, psycopg async": Way(GROUP, driver="psycopg"),
    "commit_every, asyncpg": Way(GROUP, driver="asyncpg"),
    "commit_every, SERIALIZABLE": Way(GROUP, isolation="SERIALIZABLE"),
    "savepoint": Way(SAVEPOINT),
    "savepoint, psycopg async": Way(SAVEPOINT, driver="psycopg"),
    "savepoint, asyncpg": Way(SAVEPOINT, driver="asyncpg"),
    "savepoint, hold_lock": Way({**SAVEPOINT, "hold_lock": True}),
    "savepoint, REPEATABLE READ": Way(SAVEPOINT, isolation="REPEATABLE READ"),
    "complete=commit": Way({"complete": "commit"}),
}
