"""What the demo checks at its end: the shop's tables against what the customers did, whatever enlist says."""

from __future__ import annotations

import uuid
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from rich.table import Table
from rich.text import Text

from enlist.demo.orders import PRODUCTS, STOCK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from enlist.demo.orders import Purchase

__all__ = ["Check", "Killed", "check", "table_of"]


@dataclass(frozen=True)
class Killed:
    """A worker that was killed, and the jobs that were running in it."""

    name: str
    pid: int
    jobs: frozenset[uuid.UUID]


@dataclass(frozen=True)
class Check:
    """A line of the table."""

    what: str
    found: int
    expected: int
    at_least: bool = False
    note: str = ""

    @property
    def right(self) -> bool:
        """Whether it is as it should be."""
        return self.found >= self.expected if self.at_least else self.found == self.expected


def check(
    connection: sa.Connection,
    purchases: Sequence[Purchase],
    *,
    refused: int,
    killed: Sequence[Killed],
    run_log: str,
) -> list[Check]:
    """Compare; return the lines of the table.

    :param refused: jobs that were refused as duplicates, as the customers saw it.
    :param run_log: a line for each handler that was started: its job, attempt and process.
    """
    found = _Tables(connection)
    bought = {p.cart.number: p.cart for p in purchases if not p.rolled_back}
    rolled_back = [p.cart.number for p in purchases if p.rolled_back]
    regretted = [p.regretted.number for p in purchases if p.regretted is not None]
    twice = len(purchases) - len(rolled_back) - len(bought)
    jobs = 2 * len(bought)
    held = [job for victim in killed for job in victim.jobs]
    runs = Counter(line.split()[0] for line in run_log.splitlines())
    repeated = sum(times - 1 for times in runs.values())
    lost, doubled = found.effects(list(bought))
    return [
        Check("committed orders", found.count("SELECT count(*) FROM demo_order"), len(bought)),
        Check("rolled-back orders left", found.orders(rolled_back), 0, note=f"{len(rolled_back):,} rolled back"),
        Check(
            "savepoint orders left",
            found.orders(regretted),
            0,
            note=f"{len(regretted):,} rolled back",
        ),
        Check("duplicates refused", refused, 2 * twice, note=f"{twice:,} orders placed twice"),
        Check("jobs", found.count("SELECT count(*) FROM enlist_job"), jobs, note="2 an order"),
        Check("jobs done", found.count("SELECT count(*) FROM enlist_job WHERE status = 'done'"), jobs),
        Check("runs of handlers", sum(runs.values()), jobs, at_least=True, note=f"{repeated:,} run again"),
        Check("receipts", found.count("SELECT count(*) FROM demo_receipt"), len(bought)),
        Check("stock moves", found.count("SELECT count(*) FROM demo_stock_move"), len(bought)),
        Check(
            "units taken from stock",
            PRODUCTS * STOCK - found.count("SELECT sum(stock) FROM demo_product"),
            sum(cart.quantity for cart in bought.values()),
            note="as ordered",
        ),
        Check("workers killed", len(killed), 1, note=", ".join(f"{v.name}, pid {v.pid}" for v in killed)),
        Check("jobs taken back", found.taken_back(held), len(held), note="held by the killed"),
        Check("effects lost", lost, 0),
        Check("effects doubled", doubled, 0),
    ]


def table_of(checks: Sequence[Check]) -> Table:
    """Make the table for people; a line that is off is marked."""
    table = Table("", title="What the tables say", title_justify="left")
    table.add_column("found", justify="right")
    table.add_column("expected", justify="right")
    table.add_column("")
    table.add_column("")
    for line in checks:
        expected = f"{'>= ' if line.at_least else ''}{line.expected:,}"
        verdict = Text("ok", style="green") if line.right else Text("OFF", style="bold red")
        style = "" if line.right else "bold red"
        table.add_row(line.what, f"{line.found:,}", expected, verdict, line.note, style=style)
    return table


class _Tables:
    """Reads the tables with SQL of its own."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection

    def count(self, statement: str, **parameters: Any) -> int:
        return int(self._connection.execute(sa.text(statement), parameters).scalar_one())

    def orders(self, carts: list[int]) -> int:
        """How many of the carts have an order."""
        return self.count("SELECT count(*) FROM demo_order WHERE cart = ANY(:carts)", carts=carts)

    def taken_back(self, jobs: list[uuid.UUID]) -> int:
        """How many of the jobs were lost by a worker, and are done all the same."""
        return self.count(
            "SELECT count(*) FROM enlist_job WHERE id = ANY(:ids) AND lost > 0 AND status = 'done'", ids=jobs
        )

    def effects(self, carts: list[int]) -> tuple[int, int]:
        """How many effects are missing and how many too many: an order has one receipt and one stock move."""
        lost, doubled = self._connection.execute(
            sa.text(
                "SELECT coalesce(sum(greatest(1 - receipts, 0) + greatest(1 - moves, 0)), 0),"
                " coalesce(sum(greatest(receipts - 1, 0) + greatest(moves - 1, 0)), 0) FROM ("
                "SELECT (SELECT count(*) FROM demo_receipt WHERE order_id = demo_order.id) AS receipts,"
                " (SELECT count(*) FROM demo_stock_move WHERE order_id = demo_order.id) AS moves"
                " FROM demo_order) AS effects"
            )
        ).one()
        return int(lost) + 2 * (len(carts) - self.orders(carts)), int(doubled)
