"""What the model of the unit of work is compared with: a session of each kind, in a database of its own."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import sqlalchemy as sa
from psycopg import sql
from sqlalchemy import URL, Engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session
from sqlalchemy.pool import QueuePool

from enlist import JobRecordMixin
from tests.support.observer import Observer

T = TypeVar("T")

LOCK_TIMEOUT = "20ms"


class AppBase(DeclarativeBase):
    pass


class AppJob(JobRecordMixin, AppBase):
    __tablename__ = "app_job"

    label: Mapped[str | None]


@dataclass
class World:
    """What the machine drives, and what it looks at."""

    begin: Callable[[], Any]
    """Make a Session or an AsyncSession."""
    wait: Callable[[Any], Any]
    """Return the result of a session's method, which for an AsyncSession is to be awaited."""
    engine: Engine
    other_engine: Engine
    observer: Observer

    def connections_in_use(self) -> int:
        """How many connections of the session's pool are not back in it."""
        assert isinstance(self.engine.pool, QueuePool)
        return self.engine.pool.checkedout()


@contextmanager
def made_world(driver: str, url: URL, observer: Observer) -> Iterator[World]:
    """A world whose session under test is a Session, or an AsyncSession with one of the drivers."""
    # Whoever meets a key of an open transaction waits for its end, in vain: all steps are taken by one thread.
    name = sql.Identifier(url.database or "")
    observer.connection.execute(sql.SQL("ALTER DATABASE {} SET lock_timeout = {}").format(name, LOCK_TIMEOUT))
    observer.execute("SET lock_timeout = '2s'")
    with ExitStack() as stack:
        other_engine = sa.create_engine(url)
        stack.callback(other_engine.dispose)
        AppBase.metadata.create_all(other_engine)
        if driver == "sync":
            engine = sa.create_engine(url)
            stack.callback(engine.dispose)
            yield World(lambda: Session(engine), lambda result: result, engine, other_engine, observer)
            return

        runner = stack.enter_context(asyncio.Runner())
        async_engine = create_async_engine(url.set(drivername=f"postgresql+{driver}"))
        stack.callback(lambda: wait(async_engine.dispose()))

        async def awaited(result: Awaitable[T]) -> T:
            return await result

        def wait(result: Any) -> Any:
            return runner.run(awaited(result)) if inspect.isawaitable(result) else result

        yield World(lambda: AsyncSession(async_engine), wait, async_engine.sync_engine, other_engine, observer)
