"""The demo's shop: orders, receipts, stock; its jobs and its worker. Written as an application would be.

It knows little of the demo around it: its log of the runs, and that the worker is to end with it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import ForeignKey, create_engine, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from enlist import HandlerRegistry, Job, JobHandle, JobPayload, JobRepository, Worker

__all__ = ["Base", "Order", "Product", "Receipt", "SendReceipt", "StockMove", "TakeStock", "enqueue_jobs", "worker"]

SLOTS = 4
"""Jobs of a queue that a worker runs at once."""

LEASE_SECONDS = 2
"""Short, so that the jobs of the killed worker come back while one watches."""


class Base(DeclarativeBase):
    """The shop's tables."""


class Product(Base):
    """Something to buy, and how much of it there is."""

    __tablename__ = "demo_product"

    id: Mapped[int] = mapped_column(primary_key=True)
    stock: Mapped[int]


class Order(Base):
    """What was bought. A cart is ordered once."""

    __tablename__ = "demo_order"

    id: Mapped[int] = mapped_column(primary_key=True)
    cart: Mapped[int] = mapped_column(unique=True)
    product_id: Mapped[int] = mapped_column(ForeignKey(Product.id))
    quantity: Mapped[int]


class Receipt(Base):
    """Written by a job. Nothing in the schema forbids a second one for an order: the demo counts them."""

    __tablename__ = "demo_receipt"

    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(ForeignKey(Order.id), index=True)
    text: Mapped[str]


class StockMove(Base):
    """Written by a job, with the product's new stock. Nothing forbids a second one either."""

    __tablename__ = "demo_stock_move"

    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(ForeignKey(Order.id), index=True)
    quantity: Mapped[int]


class SendReceipt(JobPayload, kind="demo_send_receipt", queue="receipts"):
    """Write the receipt of an order."""

    order_id: int


class TakeStock(JobPayload, kind="demo_take_stock", queue="stock"):
    """Take what was ordered out of the stock."""

    order_id: int


repo = JobRepository()
handlers = HandlerRegistry()


def enqueue_jobs(session: Session, order: Order) -> list[JobHandle]:
    """Enlist an order's jobs in the transaction that places it, once per cart. The order need not have an id yet."""
    return [
        repo.enqueue(
            session, lambda o: SendReceipt(order_id=o.id), of=order, unique_key=f"receipt:{order.cart}", priority=5
        ),
        repo.enqueue(session, lambda o: TakeStock(order_id=o.id), of=order, unique_key=f"stock:{order.cart}"),
    ]


@handlers.handler(SendReceipt, timeout=30)
def send_receipt(session: Session, job: Job[SendReceipt]) -> None:
    """Write a receipt."""
    _log_run(job)
    order = session.get_one(Order, job.payload.order_id)
    session.add(Receipt(order_id=order.id, text=f"{order.quantity} of product {order.product_id}, thank you"))


@handlers.handler(TakeStock, timeout=30)
async def take_stock(session: AsyncSession, job: Job[TakeStock]) -> None:
    """Take an order's quantity out of the stock; twice would be too much, not at all too little."""
    _log_run(job)
    order = await session.get_one(Order, job.payload.order_id)
    taken = update(Product).where(Product.id == order.product_id).values(stock=Product.stock - order.quantity)
    await session.execute(taken.execution_options(synchronize_session=False))
    session.add(StockMove(order_id=order.id, quantity=order.quantity))


def worker() -> Worker:
    """Make the shop's worker, on the database of ``ENLIST_DATABASE_URL``; for ``enlist worker``."""
    if os.environ.get("ENLIST_DEMO_ENDS_WITH_INPUT"):
        threading.Thread(target=_end_with_input, name="demo-guard", daemon=True).start()
    engine = create_engine(os.environ["ENLIST_DATABASE_URL"], pool_size=SLOTS)
    queues = {"receipts": SLOTS, "stock": SLOTS}
    return Worker(engine, handlers, queues=queues, lease=LEASE_SECONDS, shutdown_timeout=5, lifespan=lifespan)


@contextmanager
def lifespan() -> Iterator[int | None]:
    """Give jobs what they need: the demo's log of the runs, as a file descriptor, if there is a demo."""
    inherited = os.environ.get("ENLIST_DEMO_RUN_LOG")
    yield None if inherited is None else int(inherited)


def _log_run(job: Job[SendReceipt] | Job[TakeStock]) -> None:
    """Note that a handler was started."""
    # In a file, since what is in the transaction goes with it; in one write, which is whole though the process be
    # killed in the next moment.
    if isinstance(job.resources, int):
        os.write(job.resources, f"{job.id} {job.attempt} {os.getpid()}\n".encode())


def _end_with_input() -> None:
    """End this process when the demo's has ended, however it did: then its end of the pipe is closed."""
    # Not sys.stdin, whose lock would be held at the interpreter's exit.
    while os.read(0, 1024):
        pass
    os._exit(1)
