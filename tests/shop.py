"""The domain that the tests enlist jobs with: a small shop, on a metadata of its own."""

from __future__ import annotations

import uuid

from sqlalchemy import ForeignKey
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "shop_order"

    id: Mapped[int] = mapped_column(primary_key=True)
    ref: Mapped[str] = mapped_column(unique=True)
    total: Mapped[int] = mapped_column(default=0)


class Receipt(Base):
    __tablename__ = "shop_receipt"

    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(ForeignKey(Order.id))
    note: Mapped[str] = mapped_column(default="")


class Counter(Base):
    __tablename__ = "shop_counter"

    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[int] = mapped_column(default=0)


class Effect(Base):
    """One row for each time that a handler's effects were committed."""

    __tablename__ = "shop_effect"

    id: Mapped[int] = mapped_column(primary_key=True)
    job_id: Mapped[uuid.UUID] = mapped_column(index=True)  # no foreign key: it outlives the job
    attempt: Mapped[int] = mapped_column(default=1)
    worker: Mapped[str] = mapped_column(default="")
