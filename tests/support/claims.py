"""A claim as the worker makes it, on a connection of the test's."""

from __future__ import annotations

import datetime as dt
from typing import Any

from sqlalchemy import Connection

from enlist._statements import NO_MARKS, Statements, ahead, keys


def claim_parameters(
    queues: dict[str, int],
    *,
    kinds: list[str] | None = None,
    careful: bool = True,
    lease: float = 60,
    worker: str = "test",
) -> dict[str, Any]:
    """What the statements of the claim are given by a worker that has no marks."""
    return {
        **NO_MARKS,
        **ahead(()),
        "look_first": False,
        "queues": list(queues),
        "limits": list(queues.values()),
        "after_keys": [None] * len(queues),
        "kinds": kinds or ["work"],
        "careful": careful,
        "worker": worker,
        "lease": dt.timedelta(seconds=lease),
    }


def claim(connection: Connection, statements: Statements, queues: dict[str, int], **given: Any) -> list[Any]:
    """Claim jobs without a concurrency key; the rows that were taken."""
    rows = connection.execute(statements.claim, claim_parameters(queues, **given)).all()
    return [row for row in rows if row.id is not None]


def look(connection: Connection, statements: Statements, queues: dict[str, int], **given: Any) -> list[Any]:
    """Look at the jobs with a concurrency key; the rows of those whose turn it is."""
    rows = connection.execute(statements.look, claim_parameters(queues, **given)).all()
    return [row for row in rows if row.part == "job"]


def claim_keyed(connection: Connection, statements: Statements, queues: dict[str, int], **given: Any) -> list[Any]:
    """Look, lock the keys and claim, in the connection's transaction; the rows that were taken."""
    seen = look(connection, statements, queues, **given)
    wanted = sorted({row.concurrency_key for row in seen})
    locked = set(connection.execute(statements.lock_keys, {"keys": wanted}).scalars())
    of_locked = keys(row for row in seen if row.concurrency_key in locked)
    return list(connection.execute(statements.claim_keyed, {**claim_parameters(queues, **given), **of_locked}).all())
