"""``enlist demo``: a shop, its customers, two workers, one of them killed; and at the end the accounts."""

from __future__ import annotations

import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import IO, TYPE_CHECKING, Final, Self

import sqlalchemy as sa

from enlist._cli_database import connecting, engine_for
from enlist.demo.checks import Check, Killed, check, table_of
from enlist.demo.display import Display
from enlist.demo.orders import Customers, fill_shop, plan
from enlist.demo.processes import WorkerProcess, content
from enlist.demo.scratch import scratch
from enlist.demo.shop import Base

if TYPE_CHECKING:
    from rich.console import Console

    from enlist.demo.scratch import Scratch

__all__ = ["run_demo"]

SCHEMA: Final = "enlist_demo"
WORKERS: Final = 2
KILL_AT: Final = 0.4
"""The share of the jobs that are done when a worker is killed."""

LOOK_SECONDS: Final = 0.02
STALLED_SECONDS: Final = 30.0
"""Without a job done for so long, the demo stops waiting and shows what is off."""

SETTLE_SECONDS: Final = 2.0
"""How long what a frozen worker has sent may still be under way in the server."""


def run_demo(*, orders: int, url: sa.URL | None, keep: bool, console: Console) -> bool:
    """Run the demo and print what happens; return whether all was right at the end.

    :param orders: how many to place, at least 40.
    :param url: the database, in which a schema ``enlist_demo`` is made; default a server of the demo's own.
    :param keep: don't remove the server or schema; say how to connect.
    :raises EnlistError: no server or schema could be had, or a worker ended by itself.
    """
    display = Display(console)
    with _cleaned_up_on_signals(), scratch(SCHEMA, url, keep=keep) as place:
        try:
            with (
                display,
                tempfile.TemporaryFile() as run_log,
                _Demo(place.url, orders, run_log, display) as demo,
            ):
                checks = demo.run()
            console.print(table_of(checks))
            off = sum(not line.right for line in checks)
            verdict = f"{off} of {len(checks)} lines are off" if off else "Nothing lost, nothing doubled"
            console.print(f"{verdict}, in {display.seconds:.1f} s.", highlight=False)
        finally:
            if keep:
                _say_how_to_connect(place, console)
    return not off


class _Demo:
    """One run. As a context manager it leaves no process behind."""

    def __init__(self, url: sa.URL, orders: int, run_log: IO[bytes], display: Display) -> None:
        self._url = url
        self._orders = orders
        self._run_log = run_log
        self._display = display
        self._purchases = plan(orders)
        self._jobs = 2 * len({p.cart.number for p in self._purchases if not p.rolled_back})
        self._workers: list[WorkerProcess] = []
        self._killed: list[Killed] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for worker in self._workers:
            worker.kill()
        self._stack.close()

    def run(self) -> list[Check]:
        """Do everything; return the lines of the table."""
        with connecting(engine_for(self._url)) as connection:
            server = connection.scalar(sa.text("SHOW server_version"))
            Base.metadata.create_all(connection)
            fill_shop(connection)
        observer = self._stack.enter_context(engine_for(self._url).connect())
        observer = observer.execution_options(isolation_level="AUTOCOMMIT")
        self._display.say(f"PostgreSQL {server} is up, the shop's tables are made")
        for number in range(1, WORKERS + 1):
            self._start_worker(f"worker {number}")
        with Customers(self._url, self._purchases) as customers:
            self._watch(observer, customers)
        self._stop_workers()
        return check(
            observer,
            self._purchases,
            refused=customers.jobs_refused,
            killed=self._killed,
            run_log=content(self._run_log),
        )

    def _watch(self, observer: sa.Connection, customers: Customers) -> None:
        """Show how far it is and kill a worker, until the customers are gone and no job is left."""
        done, since = 0, time.monotonic()
        while True:
            began = time.monotonic()
            finished = customers.finished  # read before the jobs: no further ones come if it is true
            before = done
            done, live = observer.execute(
                sa.text(
                    "SELECT count(*) FILTER (WHERE status = 'done'),"
                    " count(*) FILTER (WHERE status IN ('queued', 'running')) FROM enlist_job"
                )
            ).one()
            share = customers.purchases_made / len(self._purchases)
            self._display.update(int(share * self._orders), self._orders, done, self._jobs)
            if finished and not live:
                self._display.say(f"all orders are placed, all jobs done: {done:,}")
                return
            for worker in self._workers:
                worker.check()
            if not self._killed and done >= KILL_AT * self._jobs:
                self._kill_a_worker(observer, done)
            now = time.monotonic()
            if done != before:
                since = now
            elif now - since > STALLED_SECONDS:
                self._display.say(f"no job was done for {STALLED_SECONDS:.0f} s; {live:,} are left")
                return
            time.sleep(max(LOOK_SECONDS, 5 * (now - began)))  # counting many jobs must not be what takes the time

    def _start_worker(self, name: str) -> None:
        worker = WorkerProcess(name, self._url, self._run_log)
        self._workers.append(worker)
        self._display.say(f"{name} starts (pid {worker.pid})")

    def _kill_a_worker(self, observer: sa.Connection, done: int) -> None:
        """Kill a worker while it certainly holds jobs: it is frozen first, so that what it holds can be read."""
        victim = self._workers[0]
        victim.freeze()
        end = time.monotonic() + SETTLE_SECONDS
        active = sa.text("SELECT count(*) FROM pg_stat_activity WHERE application_name = :name AND state = 'active'")
        while True:
            time.sleep(0.02)
            if not observer.scalar(active, {"name": victim.name}) or time.monotonic() > end:
                break
        held = observer.scalars(
            sa.text("SELECT id FROM enlist_job WHERE status = 'running' AND locked_by LIKE :worker"),
            {"worker": f"%:{victim.pid}:%"},
        ).all()
        if not held:
            victim.thaw()
            return
        victim.kill()
        self._workers.remove(victim)
        self._killed.append(Killed(victim.name, victim.pid, frozenset(held)))
        self._display.say(f"{victim.name} is killed (SIGKILL) with {len(held)} jobs in hand, after {done:,} jobs")
        self._start_worker(victim.name)

    def _stop_workers(self) -> None:
        for worker in self._workers:
            worker.ask_to_stop()
        for worker in self._workers:
            if status := worker.stopped():
                self._display.say(f"{worker.name} did not stop as it should: status {status}")


def _say_how_to_connect(place: Scratch, console: Console) -> None:
    url = place.url.render_as_string(hide_password=True)
    plain = place.url.set(drivername="postgresql").render_as_string(hide_password=True)
    what = "The server is still up" if place.own_server else f"The schema {SCHEMA} is still there"
    lines = [
        f"{what}. To look at it:",
        f"  enlist status enlist.demo.shop:handlers --database-url '{url}'",
        f"  psql '{plain}'",
        "To remove it:",
        f"  {place.clean_up}",
    ]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _cleaned_up_on_signals() -> Iterator[None]:
    """Have SIGTERM and SIGHUP clean up as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    previous = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
