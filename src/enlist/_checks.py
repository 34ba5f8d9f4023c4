"""What a worker looks at before it starts: whether handlers' sessions will do, and what it had better say at once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import sqlalchemy as sa

from enlist._driver import is_autocommit, shown_url
from enlist._log import Log
from enlist.exceptions import ConfigurationError
from enlist.payload import options_of

if TYPE_CHECKING:
    from enlist._engines import AsyncSessions
    from enlist.worker import Worker

__all__ = ["async_isolation", "check_pool", "isolation_of", "warn_of_unserved_queues"]

logger = Log("enlist.worker")


def isolation_of(connection: sa.Connection) -> str:
    """The isolation level that handlers' sessions will have.

    :raises ConfigurationError: each statement would commit by itself.
    """
    if is_autocommit(connection):
        raise ConfigurationError(
            f"the engine of {shown_url(connection.engine.url)} is in AUTOCOMMIT mode: a handler's effects could not"
            " commit together with its job's status; give the worker an engine without isolation_level='AUTOCOMMIT'"
        )
    return connection.get_isolation_level()


async def async_isolation(sessions: AsyncSessions, seconds: float) -> str:
    """The same for async handlers' sessions; on their event loop, in so many seconds at most."""
    async with asyncio.timeout(seconds), sessions.engine.connect() as connection:
        return await connection.run_sync(isolation_of)


def check_pool(engine: sa.Engine, worker: Worker) -> None:
    """Say so if handlers will have to wait for each other's connections."""
    pool = engine.pool
    if not isinstance(pool, sa.QueuePool):
        return
    most = pool.size() + pool._max_overflow if pool._max_overflow >= 0 else None
    slots = sum(worker.queues.values())
    if most is not None and most < slots:
        logger.warning(
            "worker %s has %d slots, the engine's pool at most %d connections: handlers may wait for one;"
            " create_engine(..., pool_size=%d) gives each its own",
            worker.name,
            slots,
            most,
            slots,
        )


def warn_of_unserved_queues(worker: Worker) -> None:
    """Say which handlers will have nothing to do: their jobs go to queues that are not looked at here."""
    queues: dict[str, list[str]] = {}
    for handler in worker.handlers:
        if handler.payload_type is not None:
            queues.setdefault(options_of(handler.payload_type).queue, []).append(handler.kind)
    for queue in queues.keys() - worker.queues.keys():
        logger.warning(
            "worker %s has handlers for %s, whose jobs go to the queue %r by default: it does not serve that queue",
            worker.name,
            ", ".join(sorted(queues[queue])),
            queue,
        )
