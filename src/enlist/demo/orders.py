"""The demo's customers: they place orders from several sessions at once, and change their minds in every way."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from enlist import notifier
from enlist.demo.shop import Order, Product, enqueue_jobs
from enlist.handle import JobState

if TYPE_CHECKING:
    from collections.abc import Callable

    from enlist.handle import JobHandle

__all__ = ["STOCK", "Cart", "Customers", "Purchase", "fill_shop", "plan"]

PRODUCTS: Final = 20
STOCK: Final = 1_000_000
"""Of each product at the beginning."""

THREADS: Final = 4
"""Threads with a Session each."""

TASKS: Final = 4
"""Tasks of one event loop, in a further thread, with an AsyncSession each."""

SHARE: Final = 20
"""One cart in so many is rolled back; as many are placed in a savepoint that is rolled back; as many twice."""


@dataclass(frozen=True)
class Cart:
    """What a customer wants."""

    number: int
    product: int
    quantity: int

    def order(self) -> Order:
        """Make its order, not yet placed."""
        return Order(cart=self.number, product_id=self.product, quantity=self.quantity)


@dataclass(frozen=True)
class Purchase:
    """One transaction."""

    cart: Cart
    regretted: Cart | None = None
    """Placed in a savepoint of the same transaction, which is rolled back."""
    rolled_back: bool = False


def plan(orders: int, seed: int = 0) -> list[Purchase]:
    """Make the transactions that place so many orders; those placed twice are there twice, one after the other."""
    chance = random.Random(seed)  # noqa: S311 - the same demo each time
    carts = [Cart(n, chance.randint(1, PRODUCTS), chance.randint(1, 5)) for n in range(1, orders + 1)]
    few = orders // SHARE
    regretted, unwanted, rest = carts[:few], carts[few : 2 * few], carts[2 * few :]
    purchases = [Purchase(cart, rolled_back=True) for cart in unwanted]
    purchases += [Purchase(cart, regretted=other) for cart, other in zip(rest, regretted, strict=False)]
    purchases += [Purchase(cart) for cart in rest[few:]]
    chance.shuffle(purchases)
    twice = set(chance.sample([p for p in purchases if not p.rolled_back and p.regretted is None], few))
    return [same for purchase in purchases for same in [purchase] * (2 if purchase in twice else 1)]


def fill_shop(connection: sa.Connection) -> None:
    """Put products on the shelves."""
    connection.execute(sa.insert(Product), [{"id": n, "stock": STOCK} for n in range(1, PRODUCTS + 1)])


class Customers:
    """Make the purchases of a plan, from :data:`THREADS` threads and :data:`TASKS` tasks."""

    def __init__(self, url: sa.URL, purchases: list[Purchase]) -> None:
        self.purchases_made = 0
        self.jobs_refused = 0
        """As duplicates, as their handles say."""
        self._engine = sa.create_engine(url, pool_size=THREADS)
        self._url = url
        self._waiting = deque(purchases)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._errors: list[BaseException] = []
        targets: list[Callable[[], None]] = [self._shop] * THREADS + [lambda: asyncio.run(self._shop_async())]
        self._threads = [
            threading.Thread(target=self._guarded, args=(target,), name=f"demo-customer-{n}", daemon=True)
            for n, target in enumerate(targets, 1)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(10)
        self._engine.dispose()
        notifier.close_all()  # its connections too

    @property
    def finished(self) -> bool:
        """Whether all have gone home. Raises what went wrong, if something did."""
        if self._errors:
            raise self._errors[0]
        return not any(thread.is_alive() for thread in self._threads)

    def _guarded(self, target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as error:
            self._errors.append(error)
            self._stop.set()

    def _next(self) -> Purchase | None:
        try:
            return None if self._stop.is_set() else self._waiting.popleft()
        except IndexError:
            return None

    def _shop(self) -> None:
        sessions = sessionmaker(self._engine)
        while (purchase := self._next()) is not None:
            try:
                with sessions() as session:
                    handles = place(session, purchase)
                    session.rollback() if purchase.rolled_back else session.commit()
            except IntegrityError:  # the cart has been ordered already
                with sessions.begin() as session:
                    handles = place_again(session, purchase.cart)
            self._note(handles)

    async def _shop_async(self) -> None:
        engine = create_async_engine(self._url, pool_size=TASKS)
        try:
            await asyncio.gather(*(self._shop_in_task(async_sessionmaker(engine)) for _ in range(TASKS)))
        finally:
            await engine.dispose()

    async def _shop_in_task(self, sessions: async_sessionmaker[AsyncSession]) -> None:
        while (purchase := self._next()) is not None:
            try:
                async with sessions() as session:
                    handles = await session.run_sync(place, purchase)
                    await (session.rollback() if purchase.rolled_back else session.commit())
            except IntegrityError:
                async with sessions.begin() as session:
                    handles = await session.run_sync(place_again, purchase.cart)
            self._note(handles)

    def _note(self, handles: list[JobHandle]) -> None:
        refused = sum(handle.state is JobState.DUPLICATE for handle in handles)
        with self._lock:
            self.purchases_made += 1
            self.jobs_refused += refused


def place(session: Session, purchase: Purchase) -> list[JobHandle]:
    """Place a cart's order and enlist its jobs; all but the end of the transaction."""
    order = purchase.cart.order()
    session.add(order)
    handles = enqueue_jobs(session, order)
    if purchase.regretted is not None:
        savepoint = session.begin_nested()
        regretted = purchase.regretted.order()
        session.add(regretted)
        enqueue_jobs(session, regretted)
        session.flush()
        savepoint.rollback()
    if purchase.rolled_back:
        session.flush()  # so that there is something in the database to be rolled back
    return handles


def place_again(session: Session, cart: Cart) -> list[JobHandle]:
    """The customer has clicked twice: enlist the jobs of the order that is there, which has them already."""
    order = session.scalars(sa.select(Order).where(Order.cart == cart.number)).one()
    return enqueue_jobs(session, order)
