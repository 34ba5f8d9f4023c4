"""`enlist demo`: it finds what is off, and it leaves nothing behind however it ends."""

from __future__ import annotations

import dataclasses
import io
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest
from rich.console import Console
from sqlalchemy import URL, Engine, text
from sqlalchemy.orm import Session

from enlist import ConfigurationError, JobState
from enlist.demo.checks import Check, Killed, check, table_of
from enlist.demo.orders import Cart, Purchase, fill_shop, place, place_again, plan
from enlist.demo.processes import WorkerDied, WorkerProcess
from enlist.demo.run import run_demo
from enlist.demo.shop import Base, Order, Receipt, StockMove
from tests.support import Observer, wait_until

ORDERS = 300


@pytest.mark.slow
def test_the_demo_from_beginning_to_end() -> None:
    # As a user has it: a process, a server of its own.
    result = subprocess.run(
        [sys.executable, "-m", "enlist", "demo", "--orders", str(ORDERS)],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert (result.returncode, result.stderr) == (0, ""), result.stdout
    rows = {
        cells[0]: cells[1:]
        for line in result.stdout.splitlines()
        if len(cells := [cell.strip() for cell in line.strip("│").split("│")]) == 5
    }
    assert rows["committed orders"][:3] == ["270", "270", "ok"]
    assert rows["duplicates refused"][:3] == ["30", "30", "ok"]
    assert rows["jobs done"][:3] == ["540", "540", "ok"]
    assert rows["receipts"][:3] == rows["stock moves"][:3] == ["270", "270", "ok"]
    assert rows["workers killed"][:3] == ["1", "1", "ok"]
    assert rows["effects lost"][:3] == rows["effects doubled"][:3] == ["0", "0", "ok"]
    taken_back, held, verdict, _ = rows["jobs taken back"]
    assert (taken_back, verdict) == (held, "ok")
    assert int(held) >= 1
    assert all(cells[2] == "ok" for cells in rows.values())
    assert not [pid for pid in pids_of(result.stdout) if is_running(pid)]


@pytest.mark.slow
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_a_demo_that_is_ended_cleans_up(
    running_demo: subprocess.Popen[str], observer: Observer, signal_number: signal.Signals
) -> None:
    workers = wait_for_jobs(running_demo, observer)
    running_demo.send_signal(signal_number)
    running_demo.communicate(timeout=20)
    assert running_demo.returncode == 128 + signal_number
    assert not [pid for pid in workers if is_running(pid)]
    assert not observer.scalar("SELECT count(*) FROM pg_namespace WHERE nspname = 'enlist_demo'")


@pytest.mark.slow
def test_the_workers_of_a_demo_that_is_killed_end(
    running_demo: subprocess.Popen[str], observer: Observer, database_url: URL
) -> None:
    workers = wait_for_jobs(running_demo, observer)
    running_demo.kill()
    running_demo.communicate()
    wait_until(lambda: not any(is_running(pid) for pid in workers), 10)
    # Its schema is there still: the next demo says so, and how to remove it.
    with pytest.raises(ConfigurationError, match="DROP SCHEMA enlist_demo CASCADE"):
        run_demo(orders=40, url=database_url, keep=False, console=Console(quiet=True))


@pytest.fixture
def running_demo(database_url: URL) -> Iterator[subprocess.Popen[str]]:
    """A demo with more orders than it gets to."""
    command = [sys.executable, "-m", "enlist", "demo", "--orders", "100000", "--database-url"]
    with subprocess.Popen(
        [*command, database_url.render_as_string(hide_password=False)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        yield process
        process.kill()


def wait_for_jobs(demo: subprocess.Popen[str], observer: Observer) -> list[int]:
    """Wait until both workers hold jobs; return their process ids."""
    assert demo.stdout is not None
    said = ""
    while len(found := pids_of(said)) < 2:
        line = demo.stdout.readline()
        assert line, said
        said += line
    for pid in found:
        held = "SELECT count(*) > 0 FROM enlist_demo.enlist_job WHERE locked_by LIKE %s"
        observer.wait_for(held, f"%:{pid}:%", timeout=20)
    return found


def pids_of(output: str) -> list[int]:
    return [int(pid) for pid in re.findall(r"starts \(pid (\d+)\)", output)]


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# -- the parts ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_worker_that_ends_by_itself_is_told_with_its_last_words(empty_database_url: URL) -> None:
    with tempfile.TemporaryFile() as run_log:
        worker = WorkerProcess("worker 1", empty_database_url, run_log)

    def died() -> str:
        try:
            worker.check()
        except WorkerDied as error:
            return str(error)
        return ""

    try:
        first, *lines = wait_until(died, 20).splitlines()
    finally:
        worker.kill()
    assert first == f"worker 1 (pid {worker.pid}) ended with status 1:"
    assert "no table enlist_job" in lines[-1]


def test_a_plan_has_all_that_can_happen() -> None:
    purchases = plan(2000)
    carts = Counter(p.cart.number for p in purchases)
    regretted = [p.regretted.number for p in purchases if p.regretted is not None]
    assert sum(p.rolled_back for p in purchases) == 100
    assert len(regretted) == 100
    assert sum(times == 2 for times in carts.values()) == 100
    assert len(carts) + len(regretted) == 2000
    assert not set(regretted) & carts.keys()
    assert plan(2000) == purchases


@pytest.fixture
def shop(engine: Engine) -> Engine:
    with engine.begin() as connection:
        Base.metadata.create_all(connection)
        fill_shop(connection)
    return engine


def test_an_order_that_is_placed_again_has_its_jobs_already(shop: Engine) -> None:
    cart = Cart(number=1, product=1, quantity=2)
    with Session(shop) as session:
        first = place(session, Purchase(cart, regretted=Cart(number=2, product=1, quantity=1)))
        session.commit()
        again = place_again(session, cart)
        session.commit()
    assert [handle.state for handle in first] == [JobState.COMMITTED] * 2
    assert [handle.state for handle in again] == [JobState.DUPLICATE] * 2
    assert [handle.existing_id for handle in again] == [handle.id for handle in first]


PURCHASES = [
    Purchase(Cart(number=1, product=1, quantity=2)),
    Purchase(Cart(number=2, product=2, quantity=3), regretted=Cart(number=3, product=1, quantity=1)),
    Purchase(Cart(number=4, product=1, quantity=1), rolled_back=True),
    Purchase(Cart(number=1, product=1, quantity=2)),
]


@dataclass(frozen=True)
class Outcome:
    session: Session
    killed: Killed
    run_log: str

    def off(self) -> dict[str, int]:
        """The lines that are off, with what they found."""
        checks = check(self.session.connection(), PURCHASES, refused=2, killed=[self.killed], run_log=self.run_log)
        return {line.what: line.found for line in checks if not line.right}


@pytest.fixture
def right(shop: Engine) -> Iterator[Outcome]:
    """A shop with all that PURCHASES lead to; what a worker would have done is done by hand."""
    with Session(shop) as session:
        yield right_outcome(session)


def right_outcome(session: Session) -> Outcome:
    jobs = []
    for purchase in PURCHASES[:2]:
        jobs += [handle.id for handle in place(session, purchase)]
    session.flush()
    for order in session.query(Order):
        session.add_all([Receipt(order_id=order.id, text=""), StockMove(order_id=order.id, quantity=order.quantity)])
        session.execute(
            text("UPDATE demo_product SET stock = stock - :quantity WHERE id = :product"),
            {"quantity": order.quantity, "product": order.product_id},
        )
    session.execute(text("UPDATE enlist_job SET status = 'done'"))
    session.execute(text("UPDATE enlist_job SET lost = 1, attempt = 2 WHERE id = :id"), {"id": jobs[0]})
    session.flush()
    runs = [f"{job} 1 42" for job in jobs] + [f"{jobs[0]} 2 43"]
    return Outcome(session, Killed("worker 1", 42, frozenset([jobs[0]])), "\n".join(runs) + "\n")


def test_when_all_is_right_no_line_is_off(right: Outcome) -> None:
    assert right.off() == {}


@pytest.mark.parametrize(
    ("damage", "lines"),
    [
        ("DELETE FROM demo_receipt WHERE order_id = {order}", {"receipts": 1, "effects lost": 1}),
        ("DELETE FROM demo_stock_move WHERE order_id = {order}", {"stock moves": 1, "effects lost": 1}),
        (
            "INSERT INTO demo_receipt (order_id, text) SELECT order_id, text FROM demo_receipt LIMIT 1",
            {"receipts": 3, "effects doubled": 1},
        ),
        ("UPDATE demo_product SET stock = stock - 2 WHERE id = 1", {"units taken from stock": 7}),
        (
            "UPDATE enlist_job SET status = 'dead' WHERE lost = 0 AND kind LIKE '%stock' AND unique_key LIKE '%:1'",
            {"jobs done": 3},
        ),
        ("UPDATE enlist_job SET lost = 0", {"jobs taken back": 0}),
        ("UPDATE demo_order SET cart = 3 WHERE cart = 2", {"savepoint orders left": 1, "effects lost": 2}),
        ("UPDATE demo_order SET cart = 4 WHERE cart = 2", {"rolled-back orders left": 1, "effects lost": 2}),
        ("DELETE FROM enlist_job WHERE lost = 1", {"jobs": 3, "jobs done": 3, "jobs taken back": 0}),
    ],
    ids=lambda value: value.partition(" WHERE")[0] if isinstance(value, str) else "",
)
def test_each_damage_is_found(right: Outcome, damage: str, lines: dict[str, int]) -> None:
    order = right.session.query(Order).filter_by(cart=1).one().id
    right.session.execute(text(damage.replace("{order}", str(order)).replace(":1", r"\:1")))
    assert right.off() == lines


def test_a_run_that_was_not_logged_is_found(right: Outcome) -> None:
    short = dataclasses.replace(right, run_log="".join(right.run_log.splitlines(keepends=True)[:3]))
    assert short.off() == {"runs of handlers": 3}


def test_a_line_that_is_off_is_marked() -> None:
    console = Console(record=True, width=80, file=io.StringIO())
    console.print(table_of([Check("receipts", 1, 2), Check("jobs", 2, 2), Check("runs", 3, 2, at_least=True)]))
    shown = console.export_text()
    assert re.search(r"receipts +│ +1 │ +2 │ OFF", shown)
    assert re.search(r"jobs +│ +2 │ +2 │ ok", shown)
    assert re.search(r"runs +│ +3 │ +>= 2 │ ok", shown)
