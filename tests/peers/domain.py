"""The application whose jobs these are: its tables, what a handler writes, and a job table as made by hand."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker

__all__ = [
    "CONNECTIONS",
    "INSERT",
    "INSERT_SQL",
    "Base",
    "Effect",
    "Insert",
    "Order",
    "PlainJob",
    "insert_with_asyncpg",
    "insert_with_plain_session",
    "insert_with_psycopg",
    "insert_with_session",
]

Insert = Callable[[int], Awaitable[None]]
"""Writes the effect of a job, in a transaction of its own."""

CONNECTIONS: Final = 10
"""In the pools that handlers of the peers write with."""


class Base(DeclarativeBase):
    """The application's tables."""


class Effect(Base):
    """What a handler writes. A second one for the same job is refused."""

    __tablename__ = "peers_effect"

    id: Mapped[int] = mapped_column(sa.BigInteger, primary_key=True)
    job: Mapped[int] = mapped_column(unique=True)
    made_at: Mapped[dt.datetime] = mapped_column(sa.DateTime(timezone=True), server_default=sa.func.now())


class Order(Base):
    """The domain row that is committed with jobs."""

    __tablename__ = "peers_order"

    id: Mapped[int] = mapped_column(sa.BigInteger, primary_key=True)
    note: Mapped[str]


class PlainJob(Base):
    """A job table as one makes it by hand: no leases, no keys, no checks."""

    __tablename__ = "peers_plain_job"
    __table_args__ = (sa.Index(None, "queue", "run_at", "id", postgresql_where=sa.text("status = 'queued'")),)

    id: Mapped[uuid.UUID] = mapped_column(primary_key=True, default=uuid.uuid4)
    kind: Mapped[str]
    queue: Mapped[str] = mapped_column(default="default")
    status: Mapped[str] = mapped_column(default="queued")
    payload: Mapped[dict[str, Any]] = mapped_column(JSONB)
    run_at: Mapped[dt.datetime] = mapped_column(sa.DateTime(timezone=True), server_default=sa.func.now())
    created_at: Mapped[dt.datetime] = mapped_column(sa.DateTime(timezone=True), server_default=sa.func.now())


INSERT: Final = sa.insert(sa.table(Effect.__tablename__, sa.column("job", sa.Integer)))
INSERT_SQL: Final = "INSERT INTO peers_effect (job) VALUES (%s)"


def insert_with_session(url: sa.URL, driver: str) -> Insert:
    """An insert through an AsyncSession of the application's, on ``driver``."""
    engine = create_async_engine(url.set(drivername=f"postgresql+{driver}"), pool_size=CONNECTIONS, max_overflow=0)
    sessions = async_sessionmaker(engine, expire_on_commit=False)

    async def insert(number: int) -> None:
        async with sessions() as session:
            await session.execute(INSERT, {"job": number})
            await session.commit()

    return insert


def insert_with_plain_session(url: sa.URL, size: int) -> Callable[[int], None]:
    """The same through a Session, for queues that call plain functions."""
    sessions = sessionmaker(sa.create_engine(url, pool_size=size), expire_on_commit=False)

    def insert(number: int) -> None:
        with sessions() as session:
            session.execute(INSERT, {"job": number})
            session.commit()

    return insert


def insert_with_psycopg(pool: Any) -> Insert:
    """An insert through a pool of psycopg's."""

    async def insert(number: int) -> None:
        async with pool.connection() as connection:
            await connection.execute(INSERT_SQL, (number,))

    return insert


def insert_with_asyncpg(pool: Any) -> Insert:
    """An insert through a pool of asyncpg's."""
    statement = INSERT_SQL.replace("%s", "$1")

    async def insert(number: int) -> None:
        await pool.execute(statement, number)

    return insert
