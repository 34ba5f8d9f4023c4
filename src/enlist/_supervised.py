"""A worker process of ``enlist worker --processes N``: ``python -m enlist._supervised``, started by its supervisor."""

from __future__ import annotations

import json
import multiprocessing
import signal
import socket
import sys
import threading
import traceback
from typing import Any, Final

import sqlalchemy as sa

from enlist._cli_common import LogLevel, configure_logging, end_soon
from enlist._cli_database import one_line
from enlist._cli_load import load_worker
from enlist._log import Log
from enlist._orders import SIGNALS, Order, Orders
from enlist._supervisor import NOW, STOP
from enlist.exceptions import EnlistError

__all__ = ["main"]

logger = Log("enlist.supervisor")

LOG_FORMAT: Final = "%(asctime)s %(levelname)-7s %(processName)s[%(process)d] %(name)s: %(message)s"

ORDERS: Final = {STOP: Order.STOP, NOW: Order.STOP_NOW}


class _Link:
    """The socket to the supervisor."""

    def __init__(self, descriptor: int, orders: Orders) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)
        self._orders = orders
        threading.Thread(target=self._listen, name="enlist-supervisor", daemon=True).start()

    def say(self, **facts: Any) -> None:
        """Tell the supervisor something, if it is there."""
        try:
            self._socket.sendall(json.dumps(facts).encode() + b"\n")
        except OSError:
            logger.debug("the supervisor cannot be told", exc_info=True)

    def _listen(self) -> None:
        try:
            while order := self._socket.recv(1):
                self._orders.give(ORDERS[order])
        except OSError:
            logger.debug("the supervisor cannot be heard", exc_info=True)
        # Whatever has ended it: nobody would start this process again, and nobody may know of it.
        logger.warning("the supervisor is gone: this worker stops")
        self._orders.give(Order.STOP)


def main() -> None:
    """Run the worker of ``NUMBER DESCRIPTOR LEVEL TRACEBACK MODULE:OBJECT`` until the supervisor says to stop."""
    number, descriptor, level, show_traceback, target = sys.argv[1:]
    multiprocessing.current_process().name = f"worker-{number}"  # what %(processName)s shows, in any log format
    orders = Orders()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it is for the supervisor, though all of a service may get it
    for signal_number in SIGNALS:  # they may come before the worker heeds them; it will know
        signal.signal(signal_number, lambda *_: orders.give(Order.SIGNAL))
    link = _Link(int(descriptor), orders)
    status = 0
    try:
        worker = load_worker(target)
        configure_logging(LogLevel(level), LOG_FORMAT)
        link.say(shutdown_seconds=worker._shutdown_seconds)
        worker._run(orders, lambda: link.say(started=True))
    except SystemExit as exit_:
        status = exit_.code if isinstance(exit_.code, int) else 1
    except (EnlistError, sa.exc.SQLAlchemyError, OSError) as error:
        if show_traceback == "1":
            traceback.print_exc()
        link.say(failure=one_line(error))
        status = 1
    end_soon(status)
    raise SystemExit(status)


if __name__ == "__main__":
    main()
