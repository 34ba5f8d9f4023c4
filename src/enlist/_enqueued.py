"""What an assertion looks for among the jobs, and how it says what is there instead."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from enlist._options import check_name, shown
from enlist.exceptions import InvalidOption, PayloadError
from enlist.models import JobRecordMixin, JobStatus
from enlist.payload import JobPayload, decode, options_of

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["Wanted"]

SHOWN_JOBS: Final = 10
SHOWN_CHARACTERS: Final = 200
"""How much a failed assertion shows: jobs, and characters of each payload."""

_MISSING: Final = object()


class Wanted:
    """Jobs of a kind, with equal columns and equal fields of the payload."""

    def __init__(
        self,
        payload: type[JobPayload] | str,
        where: Mapping[str, Any],
        record: type[JobRecordMixin],
        fields: dict[str, Any],
    ) -> None:
        self._record = record
        self._type: type[JobPayload] | None = None
        if isinstance(payload, str):
            self._kind = check_name("kind", payload)
        elif isinstance(payload, type) and issubclass(payload, JobPayload):
            self._kind, self._type = options_of(payload).kind, payload
            if payload.model_config.get("extra") != "allow":
                _check_known(payload, "field", fields, payload.model_fields)
        else:
            raise InvalidOption(f"give a JobPayload class or a kind's name, not {shown(payload)}")
        if not isinstance(where, Mapping):
            raise InvalidOption(f"where must be a dict of the job's columns, not {shown(where)}")
        _check_known(record, "column", where, sa.inspect(record).column_attrs.keys())
        self._status = JobStatus(where.get("status", JobStatus.QUEUED))
        self._where = where
        self._fields = fields

    def found_in(self, session: Session) -> list[Any]:
        """Return the jobs; fail if there is none."""
        __tracebackhide__ = True
        if found := self._search(session):
            return found
        raise AssertionError(f"there is no {self}; {self._instead(session)}")

    def absent_from(self, session: Session) -> None:
        """Fail if there are any."""
        __tracebackhide__ = True
        if found := self._search(session):
            raise AssertionError(f"there should be no {self}; the session sees {len(found)}:{_listed(found)}")

    def _search(self, session: Session) -> list[Any]:
        session.flush()
        record = self._record
        # Only kind and status are compared by the server: a value that does not fit its column's type would abort
        # the transaction.
        statement = sa.select(record).where(record.kind == self._kind, record.status == self._status)
        jobs = session.scalars(statement.order_by(record.id), execution_options={"populate_existing": True})
        return [job for job in jobs if self._fits(job)]

    def _fits(self, job: JobRecordMixin) -> bool:
        if any(getattr(job, name) != value for name, value in self._where.items()):
            return False
        if self._type is None:
            return all(job.payload.get(name, _MISSING) == value for name, value in self._fields.items())
        try:
            payload = decode(self._type, job.payload, job.payload_version)
        except PayloadError:
            return False
        return all(getattr(payload, name, _MISSING) == value for name, value in self._fields.items())

    def _instead(self, session: Session) -> str:
        """The jobs that there are, of this kind first and the newest first."""
        record = self._record
        count = session.scalar(sa.select(sa.func.count()).select_from(record)) or 0
        if not count:
            return "the session sees no jobs at all"
        order = ((record.kind == self._kind).desc(), record.id.desc())
        jobs = session.scalars(sa.select(record).order_by(*order).limit(SHOWN_JOBS)).all()
        more = "" if count == len(jobs) else f"\n  and {count - len(jobs)} more"
        return f"the session sees:{_listed(jobs)}{more}"

    def __str__(self) -> str:
        columns = [f"{name}={value!r}" for name, value in self._where.items() if name != "status"]
        fields = [f"payload.{name}={value!r}" for name, value in self._fields.items()]
        conditions = ", ".join(columns + fields)
        return f"{self._status} job of kind {self._kind!r}" + (f" with {conditions}" if conditions else "")


def _check_known(owner: type[Any], what: str, given: Iterable[str], known: Iterable[str]) -> None:
    if unknown := sorted(set(given) - set(known)):
        raise InvalidOption(f"{owner.__name__} has no {what} {unknown[0]!r}: its {what}s are {', '.join(known)}")


def _listed(jobs: Sequence[JobRecordMixin]) -> str:
    lines = []
    for job in jobs[:SHOWN_JOBS]:
        payload = json.dumps(job.payload, ensure_ascii=False)
        if len(payload) > SHOWN_CHARACTERS:
            payload = f"{payload[:SHOWN_CHARACTERS]}..."
        lines.append(f"\n  {job.kind} {payload} {job.status} in queue {job.queue!r}")
    return "".join(lines)
