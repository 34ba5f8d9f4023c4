"""What the jobs leave behind: rows in which an effect that is missing, or there twice, shows."""

from __future__ import annotations

import uuid

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

COUNTERS = 500
"""Rows that the counts of a kind are spread over; more than jobs that run at a time, so that few wait for others."""


class Base(DeclarativeBase):
    pass


class Effect(Base):
    """One for each job that is done; its number tells the order in which they were written."""

    __tablename__ = "chaos_effect"

    id: Mapped[int] = mapped_column(sa.BigInteger, sa.Identity(), primary_key=True)
    job_id: Mapped[uuid.UUID] = mapped_column(unique=True)
    kind: Mapped[str]
    worker: Mapped[str]
    attempt: Mapped[int]


class Count(Base):
    """Incremented by each job that is done, blindly: an effect that is there twice shows, whatever else it meets."""

    __tablename__ = "chaos_count"

    kind: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[int] = mapped_column(sa.BigInteger, default=0)


class Tally(Base):
    """Read and then written, by the jobs of a key of which one may run at a time: of two at once, one is lost."""

    __tablename__ = "chaos_tally"

    key: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[int] = mapped_column(sa.BigInteger, default=0)
