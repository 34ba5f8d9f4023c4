"""A claim as the worker makes it, on a connection of the test's."""

from __future__ import annotations

import datetime as dt
from typing import Any

from sqlalchemy import Connection

from enlist._statements import Statements


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
        "queues": list(queues),
        "limits": list(queues.values()),
        "kinds": kinds or ["work"],
        "careful": careful,
        "worker": worker,
        "lease": dt.timedelta(seconds=lease),
    }


def claim(connection: Connection, statements: Statements, queues: dict[str, int], **given: Any) -> list[Any]:
    """Run the first statement of a claim; the rows that it took and those that it only saw."""
    return list(connection.execute(statements.claim, claim_parameters(queues, **given)).all())
