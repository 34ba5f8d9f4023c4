"""The state of a job table while an old snapshot keeps VACUUM, and the index scans, from forgetting its dead rows."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from enlist.bench._claim_facts import History, PickUp
from enlist.bench._claim_table import insert_one
from enlist.exceptions import EnlistError

if TYPE_CHECKING:
    import uuid
    from collections.abc import Iterator

    from enlist.bench._claim_table import Table

__all__ = ["NotClaimed", "make_history", "pick_ups", "snapshot"]

BATCH: Final = 100
AT_A_TIME: Final = 3000
"""Jobs that are put in before the next are, so that never more wait."""

PATIENCE_SECONDS: Final = 60.0
PAUSE_SECONDS: Final = 0.02


class NotClaimed(EnlistError):
    """A job was not claimed within a minute."""


@contextmanager
def snapshot(table: Table) -> Iterator[None]:
    """An idle transaction, such as a long report or a forgotten session, with a snapshot of now."""
    with table.engine.connect().execution_options(isolation_level="REPEATABLE READ") as connection:
        connection.exec_driver_sql("SELECT 1")
        yield


def make_history(table: Table, jobs: int) -> History:
    """Have jobs claimed and completed by the table's worker."""
    milliseconds = []
    for start in range(0, jobs, AT_A_TIME):
        table.fill(min(AT_A_TIME, jobs - start))
        while table.ready > 0:
            seconds, _ = table.claim(BATCH)
            milliseconds.append(seconds * 1000)
    return History(BATCH, tuple(milliseconds))


def pick_ups(table: Table, repeat: int, held_seconds: float) -> tuple[PickUp, ...]:
    """How soon jobs are claimed that a worker which remembers where it was could pass by.

    :param repeat: how often to try each.
    :param held_seconds: how long the transaction stays open that makes one of them.
    """
    an_hour_ago = replace(table.supply, due="made - interval '1 hour'")

    def committed() -> uuid.UUID:
        return table.insert_one(table.supply)

    def held() -> uuid.UUID:
        with table.engine.connect().execution_options(isolation_level="READ COMMITTED") as connection:
            made = insert_one(connection, table.supply)
            end = time.monotonic() + held_seconds
            while time.monotonic() < end:  # others come and go meanwhile
                table.insert_one(table.supply)
                table.claim(BATCH)
                time.sleep(PAUSE_SECONDS)
            connection.commit()
        return made

    def late() -> uuid.UUID:
        return table.insert_one(an_hour_ago)

    found = []
    for title, make, level in (
        ("a job committed while the worker was idle", committed, 0),
        (f"a job whose transaction was open for {held_seconds:g} s", held, 0),
        ("a job that was due an hour ago", late, 0),
        ("the same while more jobs are ready than are claimed", late, 2 * BATCH),
    ):
        tries = []
        for _ in range(repeat):
            _drain(table)
            table.fill(level)
            tries.append(_pick_up(table, make(), level))
        found.append(PickUp(title, tuple(calls for calls, _ in tries), tuple(ms for _, ms in tries)))
    return tuple(found)


def _drain(table: Table) -> None:
    while table.claim(BATCH)[1]:
        pass
    table.ready = 0


def _pick_up(table: Table, job: uuid.UUID, level: int) -> tuple[int, float]:
    """Claim until a job that was committed just now is among those claimed; return how often, and the milliseconds."""
    began = time.perf_counter()
    for calls in range(1, 1_000_000):
        _, runs = table.claim(BATCH)
        seconds = time.perf_counter() - began
        if any(run.id == job for run in runs):
            return calls, seconds * 1000
        if seconds > PATIENCE_SECONDS:
            break
        table.fill(level)
    raise NotClaimed(f"the job {job} was not claimed in {PATIENCE_SECONDS:g} seconds")
