"""Ordered concurrency keys, as jobs are written: kinds that share a key agree, and each job gets its place in the line.

The line of a key goes by ``created_at`` and then by ``id``. Ids ascend with the calls of ``enqueue``, and a flush may
write its jobs in another order and in several statements: so those of one flush are given one time.
"""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

from enlist._options import shown
from enlist._statements import PLAIN, of_this_minute
from enlist.exceptions import InvalidOption

if TYPE_CHECKING:
    import sqlalchemy as sa

    from enlist._staged import StagedJob
    from enlist._statements import Statements

__all__ = ["line_up"]


def line_up(connection: sa.Connection, statements: Statements, jobs: list[StagedJob]) -> dt.datetime | None:
    """Check jobs with a concurrency key that are about to be written, among themselves and against those there are.

    Another transaction that is still open is not seen. Should both be committed, the ordered jobs of the key still
    run in their order, and the limit holds.

    :return: when all jobs of the flush are to be made, by the server's clock, if some of them are ordered.
    :raises InvalidOption: a key has ordered jobs and others.
    """
    first: dict[str, StagedJob] = {}
    wanted: dict[tuple[str, str], bool] = {}
    for job in jobs:
        key = job.call.concurrency_key
        assert key is not None
        earlier = first.setdefault(key, job)
        if earlier.options.ordered is not job.options.ordered:
            raise _at_odds(key, job, f"kind {earlier.options.kind!r}, of the same flush,")
        wanted[job.options.queue, key] = job.options.ordered
    parameters = {
        "queues": [queue for queue, _ in wanted],
        "keys": [key for _, key in wanted],
        "ordered": list(wanted.values()),
    }
    statement = of_this_minute(statements.at_odds)
    found = connection.execute(statement, parameters, execution_options=PLAIN).one()
    if found.key is not None:
        raise _at_odds(found.key, first[found.key], f"kind {found.kind!r}, of which one is {found.status},")
    return found.now if any(wanted.values()) else None


def _at_odds(key: str, job: StagedJob, other: str) -> InvalidOption:
    these, those = ("is", "is not") if job.options.ordered else ("is not", "is")
    return InvalidOption(
        f"concurrency_key {shown(key)}: kind {job.options.kind!r} {these} ordered and {other} {those}; the jobs of a"
        " key must agree, so give those of one kind another key, or make both classes ordered=True"
    )
