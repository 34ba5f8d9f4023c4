"""How ``enlist retry`` and ``enlist cancel`` change jobs: in batches, each a transaction, and what is told of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa
import typer
from sqlalchemy.orm import Session

from enlist.models import JobStatus
from enlist.repository import JobRepository

if TYPE_CHECKING:
    import uuid
    from collections.abc import Sequence

    from enlist._commands import Changes
    from enlist.models import JobRecordMixin

__all__ = ["DONE", "Change", "Tally", "print_tally", "tally_as_json"]

IDS_SHOWN: Final = 20
"""How many ids are listed of those that were not changed; JSON has all."""

DONE: Final = {"retry": "queued again", "cancel": "cancelled"}


@dataclass
class Tally:
    """What was done, over all batches."""

    changed: list[uuid.UUID] = field(default_factory=list)
    asked: list[uuid.UUID] = field(default_factory=list)
    superseded: list[uuid.UUID] = field(default_factory=list)
    unchanged: dict[uuid.UUID, JobStatus] = field(default_factory=dict)
    missing: list[uuid.UUID] = field(default_factory=list)

    def add(self, changes: Changes) -> list[uuid.UUID]:
        """Count a batch; return the jobs that it has dealt with."""
        dealt = [*changes.changed, *changes.asked, *changes.superseded]
        self.changed += changes.changed
        self.asked += [job for job in changes.asked if job not in self.asked]
        self.superseded += changes.superseded
        self.unchanged |= changes.unchanged
        self.missing += changes.missing
        return dealt

    @property
    def is_success(self) -> bool:
        """Whether something was done, and each id was of a job."""
        return bool(self.changed or self.asked) and not self.missing


class Change:
    """A command on jobs, ``retry`` or ``cancel``."""

    def __init__(self, verb: str, engine: sa.Engine, record: type[JobRecordMixin]) -> None:
        self._verb = verb
        # The command is done in a transaction, whatever the engine of a worker's own statements does.
        self._engine = engine.execution_options(isolation_level="READ COMMITTED")
        # The wakes are in the transaction: this process ends with its commit, and has nothing to send afterwards.
        self._repository: JobRepository[Any] = JobRepository(record, notify="transaction")
        self._run = getattr(self._repository, verb)
        self._table = sa.inspect(record).local_table

    def by_ids(self, ids: Sequence[uuid.UUID], batch: int, *, dry_run: bool) -> Tally:
        """Change jobs; in a dry run it is all undone again."""
        tally = Tally()
        for start in range(0, len(ids), batch):
            with Session(self._engine) as session:
                tally.add(self._run(session, ids[start : start + batch]))
                if dry_run:
                    session.rollback()
                else:
                    session.commit()
        return tally

    def count(self, conditions: Sequence[Any]) -> int:
        """How many jobs there are that meet conditions and that the command is for."""
        fits = getattr(self._repository._target.statements, self._verb).fits
        with Session(self._engine) as session:
            return sum(self._repository.counts(session, fits, *conditions).values())

    def by_conditions(self, conditions: Sequence[Any], batch: int) -> Tally:
        """Change the jobs that meet conditions, in the order of their ids, so that each is come to once."""
        tally = Tally()
        after: list[Any] = []
        try:
            while True:
                with Session(self._engine) as session:
                    changes = self._run(session, *conditions, *after, limit=batch)
                    session.commit()
                dealt = tally.add(changes)
                if len(dealt) < batch:
                    break
                after = [self._table.c.id > max(dealt)]
                typer.echo(f"{len(tally.changed):,} jobs {DONE[self._verb]} so far", err=True)
            if after and self._verb == "cancel":
                # Those that their handlers have locked come last in each batch, and may have been passed by.
                with Session(self._engine) as session:
                    tally.add(self._run(session, *conditions, self._table.c.status == JobStatus.RUNNING))
                    session.commit()
        except BaseException:
            if tally.changed:
                typer.echo(f"{len(tally.changed):,} jobs are {DONE[self._verb]}, the others not", err=True)
            raise
        return tally


def tally_as_json(tally: Tally, *, dry_run: bool) -> str:
    """Return the same as JSON, for programs: lists of ids."""
    lists = {name: list(map(str, getattr(tally, name))) for name in ("changed", "asked", "superseded", "missing")}
    unchanged = {str(job_id): status.value for job_id, status in tally.unchanged.items()}
    return json.dumps({**lists, "unchanged": unchanged, "dry_run": dry_run}, indent=2)


def print_tally(verb: str, tally: Tally, *, dry_run: bool) -> None:
    """Say what was done, and of which jobs it was not."""
    would = "would be " if dry_run else ""
    typer.echo(f"{would}{DONE[verb]}: {len(tally.changed):,}")
    if tally.asked:
        _list(f"{would}asked of their workers, since their handlers have locked them", tally.asked)
    if tally.superseded:
        _list("superseded, since another job has their unique key", tally.superseded)
    for status in sorted(set(tally.unchanged.values())):
        _list(f"left as they are, {status}", [job for job, found in tally.unchanged.items() if found is status])
    if tally.missing:
        _list("no such job", tally.missing)


def _list(what: str, ids: Sequence[uuid.UUID]) -> None:
    typer.echo(f"{what}: {len(ids):,}")
    for job_id in ids[:IDS_SHOWN]:
        typer.echo(f"  {job_id}")
    if len(ids) > IDS_SHOWN:
        typer.echo(f"  ... and {len(ids) - IDS_SHOWN:,} more, see --json")
