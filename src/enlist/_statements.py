"""Every SQL statement of enlist, with the reason for its shape.

Built once per job table and kept (building one costs more than running it), but those with an operator's conditions,
and those of the application's engine, which are built each minute. Rules they all follow:

- Parameters go in as arrays through ``unnest`` (jobs to insert as one JSON text): one SQL text whatever their number,
  so it is prepared once; and PostgreSQL estimates ``unnest`` of a sub-select at ten rows whatever the table's
  statistics say, so the plan is the same on an empty table and on a full one.
- Rows are found and locked in a MATERIALIZED CTE and updated by ``id = ANY(ARRAY(SELECT id ...))``. A sub-select in
  ``IN`` may be run again for each outer row, and then locks more than its LIMIT; an array is computed once, and only
  the primary key can serve it.
- Locks are ``FOR NO KEY UPDATE``: an open insert that references the job holds ``KEY SHARE`` on it, which would hide
  the row from ``FOR UPDATE SKIP LOCKED``.
- Statements on several jobs lock them in the order of their ids, so that no two of them can deadlock; those that lock
  in another order (the claim, the reaper) pass by what is locked, as they do with keys and rates. Inserts, and the
  retries that take keys again, go in the order of the unique keys.
- ``statement_timestamp()``, never ``now()``: late in a long transaction ``now()`` is past.
- What statistics could mislead about is kept from the planner, or decides nothing: see :func:`_opaque`, and the
  predicates of the indexes, no two of which serve one statement.
- The running status is tested as ``coalesce(status, '')``: written plainly, the predicate of a partial index would
  match, and under stale statistics a plan may walk all running jobs instead of probing the primary key.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import time
import uuid
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, INTERVAL, JSONB, JSONPATH, insert

from enlist.models import JobRecordMixin, UTCDateTime, rate_table_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

T = TypeVar("T")

__all__ = [
    "CLAIM_LIMIT",
    "INSERT_LIMIT",
    "NO_MARKS",
    "OWN",
    "PLAIN",
    "WHILE_IT_RAN",
    "Statements",
    "ahead",
    "channel_of",
    "keys",
    "of_this_minute",
    "statements_for",
]

INSERT_LIMIT: Final = 1000
"""Most jobs of one INSERT."""

CLAIM_LIMIT: Final = 1000
"""Most jobs that one claim takes of a queue's class (its jobs of one priority), or of a key."""

KEYED_FRONT: Final = 200
"""How many jobs with a concurrency key a claim looks at in a queue's line, at least."""

KEYS_AT_ONCE: Final = 200
"""How many of a queue's concurrency keys one claim looks at by themselves."""

NO_MARKS: Final[dict[str, Any]] = {
    "mark_queues": [],
    "mark_keyed": [],
    "mark_priorities": [],
    "mark_dues": [],
    "mark_ids": [],
    "held_queues": [],
    "held_keys": [],
}
"""The marks of a claim that looks at everything."""

PLAIN: Final = {"stream_results": False, "yield_per": None}
"""Execution options, whatever the engine's say: there is no cursor on the server for an INSERT or an UPDATE."""

OWN: Final = "enlist: "
"""Beginning of a parameter's name that no column of an application has."""

PLAN_SECONDS: Final = 60
"""How long a plan may live that a driver of the application's has cached."""

WHILE_IT_RAN: Final = "cancelled while it ran"
"""The last error of a job that was cancelled so, whoever has written it."""

ERRORS_KEPT: Final = 10
"""How many errors of a job are kept, the latest."""

_NOW: Final = sa.func.statement_timestamp(type_=sa.DateTime(timezone=True))


def _set_local(name: str, parameter: str) -> sa.Select[Any]:
    """Set something for the transaction: to a parameter, such as "60ms"."""
    return sa.select(sa.func.set_config(name, sa.bindparam(parameter, type_=sa.Text), sa.true()))


def _limit_idling(limit: sa.ColumnElement[str]) -> sa.ColumnElement[str]:
    """Bound how long the transaction may idle, as a column of its first statement; never wider than it is set."""
    name: sa.ColumnElement[str] = sa.literal_column("'idle_in_transaction_session_timeout'")
    current = sa.func.current_setting(name, type_=sa.Text)
    shorter = sa.cast(current, INTERVAL).between(sa.literal_column("'1 ms'"), sa.cast(limit, INTERVAL))  # 0 is none
    return sa.func.set_config(name, sa.case((shorter, current), else_=limit), sa.true())


_IDLE_LIMIT: Final = _limit_idling(sa.literal_column("'10s'", sa.Text))
"""Ends the transaction of a worker that has stopped in it."""

FINISHED: Final = ("done", "dead", "cancelled")
"""The statuses of jobs that nobody works on any more."""


class Seconds(sa.types.TypeDecorator[dt.timedelta]):
    """A timedelta that is sent as a number of seconds.

    As an interval it would be days and seconds; and a day is of 23 or 25 hours when the clocks change in the session's
    time zone.
    """

    impl = sa.Double
    cache_ok = True

    def process_bind_param(self, value: dt.timedelta | None, _dialect: sa.Dialect) -> float | None:
        return None if value is None else value.total_seconds()


def _interval(seconds: Any) -> Any:
    """A number of seconds as an interval of just these."""
    return sa.func.make_interval(*[sa.literal_column("0")] * 6, seconds, type_=INTERVAL)


def _length(name: str) -> Any:
    """A parameter that is a length of time, a timedelta."""
    return _interval(sa.bindparam(name, type_=Seconds))


class UuidsAsText(sa.types.TypeDecorator[list[uuid.UUID]]):
    """An array of UUIDs that is sent as its text: psycopg takes 1.2 us for each UUID of a list, this takes 0.2."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: list[uuid.UUID] | None, _dialect: sa.Dialect) -> str | None:
        return None if value is None else "{" + ",".join([item.hex for item in value]) + "}"


def _array(name: str, item: Any) -> Any:
    """A parameter that is an array; in a sub-select, so that the planner never sees its length."""
    if item is sa.Uuid:
        return sa.select(sa.cast(sa.bindparam(name, type_=UuidsAsText), ARRAY(item))).scalar_subquery()
    return sa.select(sa.bindparam(name, type_=ARRAY(item))).scalar_subquery()


def _any_of(name: str, item: Any) -> Any:
    """``ANY`` of an array parameter. Without the cast, ANY of a sub-select would compare with its rows."""
    return sa.any_(sa.cast(_array(name, item), ARRAY(item)))


def _among(ids: Any) -> Any:
    """``ANY(ARRAY(SELECT ...))``: computed once, whatever the plan."""
    return sa.any_(sa.func.array(ids.scalar_subquery()))


def _status(alias: str, status: str) -> Any:
    """A status as literal SQL: a plan that knows no parameters can then still use the partial index."""
    return sa.literal_column(f"{alias}.status") == sa.literal_column(f"'{status}'")


def _careful(job: Any) -> Any:
    """Whether a queued job must run by itself: a worker died running it, or this is its last attempt."""
    return sa.or_(job.c.lost > sa.literal_column("0"), job.c.attempt >= job.c.max_attempts - sa.literal_column("1"))


def _readable(column: Any) -> Any:
    """A column as something that Python can read whatever it is."""
    if isinstance(column.type, sa.JSON):
        return sa.cast(column, sa.Text).label(column.name)
    if isinstance(column.type, UTCDateTime):
        # A day from the ends: they are shown in the session's time zone.
        first, last = (sa.cast(_word(day), sa.DateTime(timezone=True)) for day in ("0001-01-02", "9999-12-30"))
        within = sa.func.least(sa.func.greatest(column, first), last)
        return sa.type_coerce(sa.case((column.is_not(None), within)), column.type).label(column.name)
    return column


def _rows(alias: str, **columns: tuple[str, Any]) -> Any:
    """``unnest(array, ...) AS alias(column, ...)`` from ``column=(parameter, item type)``."""
    function = sa.func.unnest(*[_array(name, item) for name, item in columns.values()])
    typed = [sa.column(column, item) for column, (_, item) in columns.items()]
    return function.table_valued(*typed, name=alias).render_derived(name=alias)


def _opaque(condition: Any) -> Any:
    """A condition that no index serves, its selectivity unknown to the planner.

    From what statistics say of it the planner may expect to find so few jobs that it would rather fetch all and sort
    them than walk the index in its order until there are enough.
    """
    return sa.func.coalesce(condition, sa.false())


def _in_line(job: Any, keyed: bool) -> Any:
    """Whether a queued job stands in the line of those with a concurrency key: as the predicates of the indexes say."""
    return job.c.concurrency_limit.is_not(None) if keyed else job.c.concurrency_key.is_(None)


def _has_slot(job: Any) -> list[Any]:
    """Whether a job runs that has a concurrency key: as the predicate of the slots' index says."""
    return [_status(job.name, "running"), job.c.concurrency_slot.is_not(None)]


def _is_keyed(mark: Any, keyed: bool) -> Any:
    return mark.c.keyed if keyed else sa.not_(mark.c.keyed)


def _enough(asked: Any) -> Any:
    """How far to look along a line of jobs with a concurrency key."""
    enough = sa.func.greatest(asked.c.number * sa.literal_column("2"), sa.literal_column(str(KEYED_FRONT)))
    return sa.func.least(enough, sa.literal_column(str(CLAIM_LIMIT)))


def _line_of(job: Any) -> list[Any]:
    """What a job's place is told by."""
    return [job.c.queue, job.c.id, job.c.priority, job.c.run_at, _careful(job).label("careful")]


def _key_of(job: Any) -> list[Any]:
    return [job.c.concurrency_key, job.c.concurrency_limit, job.c.ordered]


def _time(seconds: Any) -> Any:
    return sa.func.to_timestamp(seconds, type_=sa.DateTime(timezone=True))


def _seconds(time: Any) -> Any:
    """A time, or a length of it, as a number of seconds."""
    return sa.cast(sa.extract("epoch", time), sa.Double)


def _seconds_until(time: Any) -> Any:
    """In how many seconds a time is; a difference of numbers, since one of infinite times may be an error."""
    return _seconds(time) - _seconds(_NOW)


def _rate_limits() -> Any:
    """The rate limits of queues, as a worker has them."""
    return _rows(
        "limit",
        queue=("rate_queues", sa.Text),
        interval=("rate_intervals", sa.Double),
        burst=("rate_bursts", sa.Integer),
    )


def _word(word: str) -> Any:
    """A word as literal SQL."""
    return sa.literal_column(f"'{word}'", sa.Text)


def _has_status(c: Any, *statuses: str) -> Any:
    return c.status.in_([_word(status) for status in statuses])


class Command(NamedTuple):
    """A change that operators make to jobs."""

    run: Any
    """The statement: parameter ``ids``; rows (id, verdict, status, woken), see :meth:`Statements._command`."""
    fits: Any
    """Which jobs of the table it changes: for those that are picked by a condition."""
    free: Any = None
    """Of these, those that nothing else keeps from it: with a limit the others are not picked."""


def channel_of(table: sa.Table) -> str:
    """The NOTIFY channel of a job table: 63 bytes is the limit of a name, so it is a digest of the table's."""
    name = f"{table.schema or ''}.{table.name}"
    return "enlist_" + hashlib.sha256(name.encode()).hexdigest()[:32]


@lru_cache(maxsize=64)
def _of_generation(build: Callable[[int], sa.Executable], generation: int) -> sa.Executable:
    return build(generation)


def of_this_minute(build: Callable[[int], sa.Executable]) -> sa.Executable:
    """A statement that runs on the application's engine, in the text of its generation: see ``Statements.finish``."""
    return _of_generation(build, int(time.monotonic()) // PLAN_SECONDS)


def ahead(seen: Iterable[sa.Row[Any]]) -> dict[str, list[Any]]:
    """The parameters of :attr:`Statements.claim` for what :attr:`Statements.look` has seen."""
    rows = list(seen)
    return {
        "ahead_queues": [row.queue for row in rows],
        "ahead_ids": [row.id for row in rows],
        "ahead_priorities": [row.priority for row in rows],
        "ahead_dues": [row.due for row in rows],
        "ahead_careful": [row.careful for row in rows],
    }


def keys(seen: Iterable[sa.Row[Any]]) -> dict[str, list[Any]]:
    """The parameters of :attr:`Statements.claim_keyed` for what :attr:`Statements.look` has seen."""
    rows = list({(row.queue, row.concurrency_key): row for row in seen}.values())
    return {
        "keys": [row.concurrency_key for row in rows],
        "key_queues": [row.queue for row in rows],
        "key_limits": [row.concurrency_limit for row in rows],
        "key_ordered": [row.ordered for row in rows],
    }


@lru_cache(maxsize=64)
def statements_for(table: sa.Table) -> Statements:
    """The statements of one job table, made once."""
    return Statements(table)


def _built(make: Callable[[Statements], T]) -> cached_property[T]:
    """A statement that is built when it is first used: all of them would take 70 ms of a process's start."""
    return cached_property(make)


class Statements:
    """The statements of one job table. Each attribute says what it is for and what parameters it takes."""

    backend = sa.select(sa.func.pg_backend_pid())
    isolation = sa.select(sa.func.current_setting(_word("default_transaction_isolation"), type_=sa.Text))
    pause = sa.select(sa.func.pg_sleep(sa.bindparam("seconds", type_=sa.Double)))

    def __init__(self, table: sa.Table) -> None:
        self.table = table
        # Without the application's columns: SQLAlchemy would set one that is named as a parameter of an UPDATE.
        columns = [sa.Column(name, table.c[name].type) for name in JobRecordMixin.__annotations__]
        self.own = sa.Table(table.name, sa.MetaData(), *columns, schema=table.schema)
        self.rates = rate_table_of(table)
        self.written = sa.update(table)
        """For sessions that look at the statement to choose an engine."""
        self.channel = channel_of(table)
        self.cancel_channel = f"{self.channel}_cancel"

    @staticmethod
    def forget(number: int) -> sa.TextClause:
        """Forget what a connection has prepared; with another ``number`` each time.

        psycopg notices that its prepared statements are gone only by a text that it has not seen before.
        """
        return sa.text(f"DEALLOCATE ALL /* {number} */")

    insert = _built(lambda self: self._unless_held(self._insert()))
    insert_returning = _built(lambda self: self.insert.returning(self.table.c.id))
    insert_replacing = _built(lambda self: self._replacing(self._insert()))
    insert_rows = _built(lambda self: self._unless_held(self._insert_rows()).returning(self.table.c.id))
    insert_rows_replacing = _built(lambda self: self._replacing(self._insert_rows()))
    insert_locking = _built(lambda self: self._locking(self._insert()))
    insert_rows_locking = _built(lambda self: self._locking(self._insert_rows()))
    copyable = _built(lambda self: self._copyable())
    holders = _built(lambda self: self._holders())
    release = _built(lambda self: self._release())
    look = _built(lambda self: self._look())
    claim = _built(lambda self: self._claim())
    claim_among = _built(lambda self: self._claim(among=True))
    claim_limited = _built(lambda self: self._claim(among=True, limited=True))
    lock_keys = _built(lambda self: self._lock_keys())
    claim_keyed = _built(lambda self: self._claim_keyed(limited=False))
    claim_keyed_limited = _built(lambda self: self._claim_keyed(limited=True))
    open_rates = _built(lambda self: self._open_rates())
    start = _built(lambda self: self._start())
    renew = _built(lambda self: self._renew())
    disown = _built(lambda self: self._disown())
    states = _built(lambda self: self._states())
    complete = _built(lambda self: self._complete())
    settle = _built(lambda self: self._settle())
    expired = _built(lambda self: self._expired())
    reap = _built(lambda self: self._reap())
    fate = _built(lambda self: self._fate())
    summary = _built(lambda self: self._summary())
    cancel = _built(lambda self: self._cancel(self._unheld()))
    cancel_again = _built(lambda self: self._cancel(self._unheld(waits=False)))
    cancel_waiting = _built(lambda self: self._cancel(self._found()))
    retry = _built(lambda self: self._retry())
    release_lapsed = _built(lambda self: self._release_lapsed())
    reschedule = _built(lambda self: self._reschedule())
    present = _built(lambda self: self._present())
    front = _built(lambda self: self._front())
    hasten = _built(lambda self: self._hasten())
    notify = _built(lambda self: self._notify())
    notify_of_keys = _built(lambda self: self._notify_of_keys())
    notify_cancelled = _built(lambda self: self._notify_cancelled())
    limit_lock = _built(lambda self: _set_local("lock_timeout", "limit"))

    # -- producer ----------------------------------------------------------------------------------------------

    def _insert(self) -> Any:
        """Insert jobs. Parameter: ``rows``, a JSON array of objects with the names below; what is left out is NULL.

        One text, since drivers take longer to write 14 arrays than the server takes to insert from them: 230 us for a
        job instead of 445, and 12 instead of 25 for each of 1,000. ``delay`` and ``hold`` count from the server's
        clock at the flush; ``delay`` serves where there is no ``run_at``. The caller puts keyed rows in the order of
        their keys: two transactions with the same keys then wait for each other instead of deadlocking. Besides
        ``created_at``, of all the jobs; NULL is now.
        """
        jsonb = self.table.c.payload.type
        columns: dict[str, Any] = {
            "id": sa.Uuid(),
            "kind": sa.Text(),
            "queue": sa.Text(),
            "max_attempts": sa.Integer(),
            "priority": sa.SmallInteger(),
            "payload": jsonb,
            "unique_key": sa.Text(),
            "unique_until": sa.Text(),
            "hold": INTERVAL(),
            "concurrency_key": sa.Text(),
            "concurrency_limit": sa.SmallInteger(),
            "ordered": sa.Boolean(),
            "payload_version": sa.SmallInteger(),
            "run_at": sa.DateTime(timezone=True),
            "delay": INTERVAL(),
            "meta": jsonb,
        }
        rows = sa.func.jsonb_to_recordset(sa.cast(sa.bindparam("rows", type_=sa.Text), JSONB))
        row = rows.table_valued(*[sa.column(name, type_) for name, type_ in columns.items()], name="row")
        row = row.render_derived(name="row", with_types=True)
        names = "id kind queue max_attempts priority payload unique_key unique_until concurrency_key concurrency_limit"
        values: dict[str, Any] = {name: row.c[name] for name in names.split()}
        values["unique_held"] = row.c.unique_key.is_not(None)
        values["ordered"] = sa.func.coalesce(row.c.ordered, sa.false())
        values["payload_version"] = sa.func.coalesce(row.c.payload_version, sa.literal_column("1"))
        values["meta"] = sa.func.coalesce(row.c.meta, sa.cast(sa.literal_column("'{}'"), JSONB))
        values |= self._times(row.c.run_at, row.c.delay, row.c.hold)
        return insert(self.table).from_select(list(values), sa.select(*values.values()), include_defaults=False)

    def _insert_rows(self) -> Any:
        """The same from one parameter set a job, for tables with columns of the application's own.

        Their types may be any: an array in an array would be flattened by ``unnest``, and some types wrap their
        parameters in SQL. SQLAlchemy puts the sets into one statement, with the defaults that Python makes.
        """
        text = {name: sa.bindparam(f"{OWN}{name}", type_=sa.Text) for name in ("payload", "meta", "delay", "hold")}
        jsonb = self.table.c.payload.type
        times = self._times(
            sa.bindparam(f"{OWN}run_at", type_=sa.DateTime(timezone=True)),
            sa.cast(text["delay"], INTERVAL),
            sa.cast(text["hold"], INTERVAL),
        )
        json = {"payload": sa.cast(text["payload"], jsonb), "meta": sa.cast(text["meta"], jsonb)}
        return insert(self.table).values(json | times)

    def _times(self, run_at: Any, delay: Any, hold: Any) -> dict[str, Any]:
        created_at = sa.bindparam(f"{OWN}created_at", type_=sa.DateTime(timezone=True))
        return {
            "created_at": sa.func.coalesce(created_at, _NOW),
            "run_at": sa.func.coalesce(run_at, _NOW + delay, _NOW),
            "unique_hold_until": _NOW + hold,
        }

    def _unless_held(self, statement: Any) -> Any:
        """Leave out the jobs whose unique key is held."""
        return statement.on_conflict_do_nothing(
            index_elements=[self.table.c.kind, self.table.c.unique_key],
            index_where=sa.text("unique_held"),
        )

    def _replacing(self, statement: Any) -> sa.Executable:
        """Give payload (with its version) and run_at to the queued job that holds the key; its attempts begin anew.

        Returns the rows made and those replaced. A holder in another status is locked all the same: the caller then
        takes its key, see :attr:`release`. No two jobs of one statement may have the same key.
        """
        c = self.table.c
        given = {name: statement.excluded[name] for name in ("payload", "payload_version", "run_at")}
        return statement.on_conflict_do_update(  # type: ignore[no-any-return]
            index_elements=[c.kind, c.unique_key],
            index_where=sa.text("unique_held"),
            set_={**given, "attempt": 0},
            where=c.status == sa.literal_column("'queued'"),
        ).returning(c.id, c.kind, c.unique_key, c.queue)

    def _locking(self, statement: Any) -> sa.Executable:
        """Leave out the jobs whose unique key is held, and lock the rows that hold them: it changes none.

        In the order of the keys, as the INSERT comes upon them; a look-up afterwards would lock a lower key's row when
        higher keys are inserted already, and two that do so deadlock. No two jobs of one statement may have one key.
        """
        c = self.table.c
        return statement.on_conflict_do_update(  # type: ignore[no-any-return]
            index_elements=[c.kind, c.unique_key],
            index_where=sa.text("unique_held"),
            set_={"priority": c.priority},
            where=sa.false(),
        ).returning(c.id)

    def _copyable(self) -> sa.Executable:
        """Whether a COPY into a table does what an INSERT does; ``table`` is its name as SQL. No row: no such table.

        Views, rules and row-level security are for INSERT alone.
        """
        names = ("oid", "relkind", "relhasrules")
        found = sa.table("pg_class", *map(sa.column, names), schema="pg_catalog")
        kinds: list[Any] = [sa.literal_column(f"'{kind}'") for kind in "rp"]  # table, partitioned table
        rules = sa.or_(found.c.relhasrules, sa.func.row_security_active(found.c.oid))
        return sa.select(sa.and_(found.c.relkind.in_(kinds), sa.not_(rules))).where(
            found.c.oid == sa.func.to_regclass(sa.bindparam("table", type_=sa.Text))
        )

    def _lapsed(self, c: Any) -> Any:
        """Whether a job still holds its key for ``unique_for`` alone, and that is over.

        Where nothing else releases it: a worker released the keys that were free to go when it took or ended the
        job. Attempts tell that a queued job was started before.
        """
        started = sa.and_(
            c.unique_until == sa.literal_column("'started'"),
            sa.or_(c.status == sa.literal_column("'running'"), c.attempt > sa.literal_column("0")),
        )
        done = sa.and_(
            c.unique_until.in_([sa.literal_column("'started'"), sa.literal_column("'finished'")]),
            c.status == sa.literal_column("'done'"),
        )
        # Without a time to hold it: of a worker of a release that knew no unique_until.
        return sa.and_(sa.or_(c.unique_hold_until.is_(None), c.unique_hold_until <= _NOW), sa.or_(started, done))

    def _holders(self) -> sa.Executable:
        """Find the jobs that hold unique keys: ``kinds`` and ``keys``, aligned."""
        job = self.table.alias("job")
        wanted = _rows("wanted", kind=("kinds", sa.Text), key=("keys", sa.Text))
        held = sa.and_(job.c.kind == wanted.c.kind, job.c.unique_key == wanted.c.key, job.c.unique_held)
        lapsed = sa.func.coalesce(self._lapsed(job.c), sa.false()).label("lapsed")
        columns = [job.c.kind, job.c.unique_key, job.c.id, job.c.status, job.c.queue, lapsed]
        holder = sa.select(*columns).where(held).limit(sa.literal_column("1")).correlate(wanted).lateral("holder")
        return sa.select(holder).select_from(wanted.join(holder, sa.true()))

    def _release(self) -> sa.Executable:
        """Take unique keys from the jobs that hold them: ``kinds``, ``keys`` and ``started``, aligned.

        With ``started`` from a job that is running or done, else only where ``unique_for`` is over. Looked at again
        under the row's lock: meanwhile it may be queued for a retry. Waits for a worker that ends the job just now.
        """
        c = self.own.c
        job = self.own.alias("job")
        wanted = _rows("wanted", kind=("kinds", sa.Text), key=("keys", sa.Text), started=("started", sa.Boolean))
        held = sa.and_(job.c.kind == wanted.c.kind, job.c.unique_key == wanted.c.key, job.c.unique_held)
        holding = sa.select(job.c.id).where(held).limit(sa.literal_column("1")).correlate(wanted).lateral("holding")
        found = sa.select(holding.c.id, wanted.c.started).select_from(wanted.join(holding, sa.true())).subquery("found")
        started = sa.select(found.c.id).where(found.c.started)
        locked = self.own.alias("locked")
        begun = sa.or_(*(locked.c.status == sa.literal_column(f"'{status}'") for status in ("running", "done")))
        holders = (
            sa.select(locked.c.id)
            .where(
                locked.c.id == _among(sa.select(found.c.id)),
                sa.func.coalesce(locked.c.unique_held, sa.false()),
                sa.or_(sa.and_(locked.c.id == _among(started), begun), self._lapsed(locked.c)),
            )
            .order_by(locked.c.id)
            .with_for_update(key_share=True, of=locked)
            .cte("holders")
            .prefix_with("MATERIALIZED")
        )
        return sa.update(self.own).where(c.id == _among(sa.select(holders.c.id))).values(unique_held=False)

    def at_odds(self, generation: int) -> sa.Executable:
        """Find a live job that does not agree with those to come of its concurrency key on whether they are ordered.

        Parameters: ``queues``, ``keys`` and ``ordered``, aligned. One row: the time, and the job's key, kind and
        status, NULL if there is none. The live jobs of a key agree, so one of them tells: each look is at one entry
        of an index, the latest, since dead entries lie before it. No index has the queued jobs of a key alone, but
        that of ordered ones: where an ordered job is to come, its own queue is looked at.

        It runs on the application's engine: ``generation`` is as in :meth:`finish`. (A plan of an empty table took
        15 ms a key when there were 30,000 jobs.)
        """
        job = self.own.alias("job")
        wanted = _rows("wanted", queue=("queues", sa.Text), key=("keys", sa.Text), ordered=("ordered", sa.Boolean))
        one: Any = sa.literal_column("1")
        key = job.c.concurrency_key
        live = sa.select(job.c.kind, job.c.status, job.c.ordered)
        in_order = (
            live.where(key == wanted.c.key, sa.not_(wanted.c.ordered))
            .where(job.c.ordered, _has_status(job.c, "queued", "running"))
            .order_by(job.c.created_at.desc(), job.c.id.desc())
            .limit(one)
        )
        running = (
            live.where(key == wanted.c.key, wanted.c.ordered, *_has_slot(job))
            .order_by(job.c.concurrency_slot)
            .limit(one)
        )
        queued = (
            live.where(job.c.queue == wanted.c.queue, key == wanted.c.key)
            .where(wanted.c.ordered, _status("job", "queued"))
            .order_by(job.c.priority, job.c.run_at.desc(), job.c.id.desc())
            .limit(one)
        )
        seen = sa.union_all(*[look.correlate(wanted) for look in (in_order, running, queued)]).lateral("seen")
        found = (
            sa.select(wanted.c.key, seen.c.kind, seen.c.status)
            .select_from(wanted.join(seen, seen.c.ordered != wanted.c.ordered))
            .limit(one)
            .subquery("found")
        )
        clock = sa.select(_NOW.label("now")).subquery("clock")
        row = sa.select(clock.c.now, *found.c).prefix_with(f"/* g{generation} */")
        return row.select_from(clock.outerjoin(found, sa.true()))

    def _held_after(self, *released_at: str) -> Any:
        """Whether a job goes on holding its unique key, when keys that are held until then are released."""
        c = self.own.c
        until = sa.func.coalesce(c.unique_until, sa.literal_column("''"))
        stays = [until != sa.literal_column(f"'{name}'") for name in released_at]
        to_hold = sa.func.coalesce(c.unique_hold_until > _NOW, sa.false())
        return sa.and_(c.unique_held, sa.or_(sa.and_(*stays), to_hold))

    # -- claim -------------------------------------------------------------------------------------------------

    def _claimable(self, job: Any) -> list[Any]:
        """What a claim asks of a job apart from its queue."""
        return [
            _status(job.name, "queued"),
            job.c.run_at <= _NOW,
            _opaque(job.c.kind == _any_of("kinds", sa.Text)),
            _opaque(sa.or_(sa.bindparam("careful", type_=sa.Boolean), sa.not_(_careful(job)))),
        ]

    def _returned(self, job: Any) -> list[Any]:
        """What a claim brings, in the order in which ``Run.of`` takes it.

        Nothing that Python may be unable to read: one such row would fail all others' claim.

        So JSON as text (a number of 5,000 digits, deep nesting) and times as seconds (``-infinity``, years before 1).
        ``age`` is since the job was made, by the server's clock; a difference of numbers, since one of infinite times
        is an error before PostgreSQL 17.
        """
        names = "id kind queue priority attempt max_attempts lost concurrency_key lease_token payload_version"
        texts = [sa.cast(job.c[name], sa.Text).label(name) for name in ("payload", "meta")]
        age = (_seconds(_NOW) - _seconds(job.c.created_at)).label("age")
        return [*(job.c[name] for name in names.split()), _seconds(job.c.run_at).label("due"), age, *texts]

    def _taken(self, condition: Any, **extra: Any) -> sa.Update:
        """The UPDATE that makes claimed jobs this worker's.

        A careful job stays without ``started_at`` until just before its handler: should the process die earlier,
        the reaper gives the attempt back.
        """
        c = self.own.c
        return (
            sa.update(self.own)
            .where(condition)
            .values(
                status="running",
                # One row at the end of the integers, written by hand, must not fail the claim of others.
                attempt=sa.func.least(c.attempt, sa.literal_column("2147483646")) + 1,
                lease_token=c.lease_token + 1,
                locked_by=sa.bindparam("worker", type_=sa.Text),
                locked_until=_NOW + _length("lease"),
                started_at=sa.case((_careful(self.own), sa.null()), else_=_NOW),
                unique_held=self._held_after("started"),
                **extra,
            )
        )

    def _asked(self) -> Any:
        """The queues, and how many jobs of each are asked for."""
        return _rows("asked", queue=("queues", sa.Text), number=("limits", sa.Integer))

    def _earned(self) -> Any:
        """What the queues with a rate limit owe, the rows of their rates locked; a CTE.

        Parameters, aligned: ``rate_queues``, ``rate_intervals`` (seconds that a job costs) and ``rate_bursts`` (how
        many may be owed). GCRA: ``free_at`` is when all that was spent will be earned again. Where it is further away
        than this limit lets it come it is cut: there was another limit, or the clock was set back. (By more than a
        minute: a claim that began a moment before another and got the lock after it counts from the earlier time.)
        The lock is held to the end of the claim, so no two count from the same; who finds it taken waits for nobody.
        """
        rate, limit = self.rates.alias("rate"), _rate_limits()
        most = _NOW + _interval(limit.c.burst * limit.c.interval)
        is_cut = rate.c.free_at > most + _interval(sa.literal_column("60"))
        free_at = sa.case((is_cut, most), else_=sa.func.greatest(rate.c.free_at, _NOW)).label("free_at")
        return (
            sa.select(rate.c.queue, free_at, is_cut.label("is_cut"), limit.c.interval, limit.c.burst)
            .select_from(limit.join(rate, rate.c.queue == limit.c.queue))
            .order_by(rate.c.queue)
            .with_for_update(key_share=True, skip_locked=True, of=rate)
            .cte("earned")
            .prefix_with("MATERIALIZED")
        )

    def _allowed(self, asked: Any, earned: Any) -> Any:
        """How many jobs of each queue may be taken; a CTE like ``asked``. Of a rate whose row is not ours, none."""
        owed = _seconds(earned.c.free_at - _NOW) / earned.c.interval
        # A millionth of a job for what sums of fractions of a second lack.
        left = sa.cast(sa.func.floor(earned.c.burst - owed + sa.literal_column("1e-6")), sa.Integer)
        is_limited = asked.c.queue == _any_of("rate_queues", sa.Text)
        number = sa.func.least(asked.c.number, sa.func.greatest(sa.func.coalesce(left, 0), 0))
        return (
            sa.select(asked.c.queue, sa.case((is_limited, number), else_=asked.c.number).label("number"))
            .select_from(asked.outerjoin(earned, earned.c.queue == asked.c.queue))
            .cte("allowed")
            .prefix_with("MATERIALIZED")
        )

    def _paid(self, earned: Any, taken: Any) -> Any:
        """The UPDATE that spends what was taken; a CTE. A debt that was cut down is written, too: or it never ends."""
        used = sa.select(taken.c.queue, sa.func.count().label("jobs")).group_by(taken.c.queue).subquery("used")
        jobs = sa.func.coalesce(used.c.jobs, sa.literal_column("0"))
        spent = (
            sa.select(earned.c.queue, (earned.c.free_at + _interval(jobs * earned.c.interval)).label("free_at"))
            .select_from(earned.outerjoin(used, used.c.queue == earned.c.queue))
            .where(sa.or_(earned.c.is_cut, jobs > sa.literal_column("0")))
            .subquery("spent")
        )
        rate = self.rates
        return sa.update(rate).where(rate.c.queue == spent.c.queue).values(free_at=spent.c.free_at).cte("paid")

    def _owed(self, earned: Any, like: Any) -> Any:
        """Beside the jobs of a claim a row for each rate that it had: ``queue``; ``due``, the seconds owed before."""
        told = {"queue": earned.c.queue, "due": _seconds(earned.c.free_at - _NOW)}
        return sa.select(*(sa.cast(told.get(column.name, sa.null()), column.type) for column in like.c))

    def _open_rates(self) -> sa.Executable:
        """Make the rows of the rates of ``rate_queues`` that are not there; return which were not."""
        queues = _rows("limit", queue=("rate_queues", sa.Text))
        made = insert(self.rates).from_select(["queue"], sa.select(queues.c.queue)).on_conflict_do_nothing()
        return made.returning(self.rates.c.queue)

    def _marks(self) -> Any:
        """Up to where a worker has taken jobs, class by class; a CTE. A class is the jobs of a queue with one priority.

        Parameters, aligned, mostly empty: ``mark_queues``, ``mark_keyed`` (with a concurrency key or without),
        ``mark_priorities``, and the last job's ``mark_dues`` (seconds) and ``mark_ids``. What lies before a mark is
        not looked at: while an old transaction is open somewhere, the index entries of the jobs that were taken stay,
        and a claim that walks over 300,000 of them takes 60 ms.
        """
        marks = _rows(
            "mark",
            queue=("mark_queues", sa.Text),
            keyed=("mark_keyed", sa.Boolean),
            priority=("mark_priorities", sa.Integer),
            due=("mark_dues", sa.Double),
            id=("mark_ids", sa.Uuid),
        )
        columns = [marks.c.queue, marks.c.keyed, marks.c.priority, marks.c.id]
        return sa.select(*columns, _time(marks.c.due).label("run_at")).cte("marks").prefix_with("MATERIALIZED")

    def _classes(self, asked: Any, marks: Any, *, keyed: bool) -> Any:
        """The priorities that a queue has jobs of, from the highest down; a recursive CTE, stepped through on demand.

        So jobs that are due later, of whatever priority, are not walked over: a class has those due now at its
        front. Each step is one probe of the index; it tells where the class begins as well, so that the entries of
        taken jobs before that are walked over once only. The classes that have a mark are known; looked for are
        others between them, where there are no entries of taken jobs to walk over.
        """
        job = self.own.alias("job")
        place = (job.c.run_at, job.c.id) if marks is None else ()
        number = sa.literal_column("32768", sa.Integer)  # above the highest
        first = sa.select(number.label("priority"), *(sa.cast(sa.null(), at.type).label(at.name) for at in place))
        above = first.cte("classes", recursive=True, nesting=True)
        probe = (
            sa.select(sa.cast(job.c.priority, sa.Integer).label("priority"), *place)
            .where(
                _status("job", "queued"),
                _in_line(job, keyed),
                job.c.queue == asked.c.queue,
                job.c.priority < above.c.priority,
            )
            .order_by(job.c.priority.desc(), *place)
            .limit(sa.literal_column("1"))
        )
        if marks is None:
            following = probe.correlate(asked, above).lateral("following")
            return above.union_all(sa.select(following).select_from(above.join(following, sa.true())).correlate(asked))
        is_one = above.c.priority.is_not(None)
        mark = marks.alias()
        known = (
            sa.select(sa.func.max(mark.c.priority).label("priority"))
            .where(mark.c.queue == asked.c.queue, _is_keyed(mark, keyed), mark.c.priority < above.c.priority)
            .correlate(asked, above)
            .lateral("known")
        )
        between = probe.where(job.c.priority > sa.func.coalesce(known.c.priority, sa.literal_column("-32769")))
        highest = between.correlate(asked, above, known).scalar_subquery()
        step = sa.select(sa.cast(sa.func.coalesce(highest, known.c.priority), sa.Integer))
        return above.union_all(step.select_from(above.join(known, sa.true())).where(is_one).correlate(asked))

    def _later(self, asked: Any, classes: Any, *, keyed: bool) -> Any:
        """When the first job of the classes is due that is not due yet; NULL if there is none. A probe of each class.

        Of whatever kind, and whether or not its key has a slot free by then: jobs of other kinds may be many, and
        they would be walked over.
        """
        job = self.own.alias("later")
        first = (
            sa.select(job.c.run_at)
            .where(
                _status("later", "queued"),
                _in_line(job, keyed),
                job.c.queue == asked.c.queue,
                job.c.priority == classes.c.priority,
                job.c.run_at > _NOW,
            )
            .order_by(job.c.run_at, job.c.id)
            .limit(sa.literal_column("1"))
            .correlate(asked, classes)
            .scalar_subquery()
        )
        return sa.func.min(first)

    def _walk(self, asked: Any, marks: Any, number: Any, classes: Any, *, keyed: bool) -> sa.Select[Any]:
        """The first ``number`` due jobs of a queue: those with a concurrency key, or those without one, locked.

        A scan of one class after the other that stops at the outer limit, so it locks only the rows that it returns.
        (A join would let the planner choose the order: so the mark is looked up.) A variable LIMIT counts as a tenth
        of the rows, so the index is walked in its order, whatever their estimated number; the constant one around it
        keeps the cost estimate independent of the table's size: else JIT would start. Jobs with a key have a line of
        their own, so that those that wait for their key's slot never stand before those without one.
        """
        job = self.own.alias("job")
        of_class = [_in_line(job, keyed), job.c.queue == asked.c.queue, job.c.priority == classes.c.priority]
        columns = [*_line_of(job), *_key_of(job)] if keyed else _line_of(job)
        due = sa.select(*columns).where(*of_class, *self._claimable(job))
        if marks is not None:
            mark = marks.alias()

            def marked(column: Any, start: str) -> Any:
                same = (mark.c.queue == asked.c.queue, _is_keyed(mark, keyed), mark.c.priority == classes.c.priority)
                found = sa.select(column).where(*same).correlate(asked, classes).scalar_subquery()
                return sa.func.coalesce(found, sa.cast(_word(start), column.type))

            since = sa.tuple_(marked(mark.c.run_at, "-infinity"), marked(mark.c.id, str(uuid.UUID(int=0))))
        else:
            since = sa.tuple_(classes.c.run_at, classes.c.id)
        due = due.where(sa.tuple_(job.c.run_at, job.c.id) >= since)
        due = due.order_by(job.c.run_at, job.c.id).limit(number).correlate(asked, classes)
        if not keyed:
            due = due.with_for_update(key_share=True, skip_locked=True)
        line = sa.select(due.subquery("due")).limit(sa.literal_column(str(CLAIM_LIMIT))).lateral("line")
        return sa.select(line).select_from(classes.join(line, sa.true())).limit(number).correlate(asked)

    def _front_line(self, asked: Any, marks: Any) -> Any:
        """The first due jobs in each queue's line of jobs with a concurrency key, with or without a slot free; a CTE.

        Enough of them to find what was asked for, unless many wait for the same few keys: then see :meth:`_keys`.
        """
        classes = self._classes(asked, marks, keyed=True)
        walked = self._walk(asked, marks, _enough(asked), classes, keyed=True).lateral("walked")
        order = (walked.c.priority.desc(), walked.c.run_at, walked.c.id)
        place = sa.func.row_number().over(partition_by=walked.c.concurrency_key, order_by=order).label("place")
        front = sa.select(walked, place).select_from(asked.join(walked, sa.true()))
        return front.cte("front").prefix_with("MATERIALIZED")

    def _keys(self, asked: Any, front: Any, near: Any) -> Any:
        """Keys of a queue that are looked at by themselves, a probe of the index each; a CTE.

        First those of ``held_queues`` and ``held_keys``, aligned: see :class:`~enlist._marks.Marks`. Then, where the
        front is not all of a queue's line and has too few jobs in turn, one key after the other, at most
        :data:`KEYS_AT_ONCE`: so that is found what stands behind thousands of jobs that wait for one key. Parameter
        ``after_keys``, aligned with ``queues``: the key where an earlier claim stopped, else NULL.
        """
        held = _rows("held", queue=("held_queues", sa.Text), concurrency_key=("held_keys", sa.Text))
        none = sa.literal_column("0", sa.Integer)
        again = self._first_of(held.c.queue, lambda key: key == held.c.concurrency_key, held).lateral("again")

        def number_of(rows: Any) -> Any:
            return sa.select(sa.func.count()).where(rows.c.queue == asked.c.queue).correlate(asked).scalar_subquery()

        first = sa.select(
            sa.func.coalesce(asked.c.after, _word("")).label("concurrency_key"),
            none.label("concurrency_limit"),
            sa.false().label("ordered"),
            none.label("place"),
        ).where(number_of(front) >= _enough(asked), number_of(near) < asked.c.number)
        last = first.correlate(asked).cte("keys", recursive=True, nesting=True)
        following = self._first_of(asked.c.queue, lambda key: key > last.c.concurrency_key, asked, last)
        next_key = following.lateral("following")
        place = last.c.place + sa.literal_column("1", sa.Integer)
        step = sa.select(next_key, place).select_from(last.join(next_key, sa.true()))
        keys = last.union_all(step.where(last.c.place < sa.literal_column(str(KEYS_AT_ONCE))).correlate(asked))
        found = sa.select(keys).where(keys.c.place > none).correlate(asked).lateral("found")
        return (
            sa.union_all(
                sa.select(held.c.queue, again, none.label("place")).select_from(held.join(again, sa.true())),
                sa.select(asked.c.queue, found).select_from(asked.join(found, sa.true())),
            )
            .cte("keys_found")
            .prefix_with("MATERIALIZED")
        )

    def _first_of(self, queue: Any, condition: Callable[[Any], Any], *owners: Any) -> sa.Select[Any]:
        """The first key of a queue that meets a condition, with the limit and the order of a job of it."""
        job = self.own.alias("job")
        key = job.c.concurrency_key
        return (
            sa.select(key, job.c.concurrency_limit, job.c.ordered)
            .where(_status("job", "queued"), job.c.queue == queue, condition(key))
            .order_by(key, job.c.priority.desc(), job.c.run_at, job.c.id)
            .limit(sa.literal_column("1"))
            .correlate(*owners)
        )

    def _earliest(self, key: Any, *owners: Any) -> Any:
        """The id of the earliest live job of an ordered key, whenever it is due: the others wait for its end."""
        head = self.own.alias("head")
        return (
            sa.select(head.c.id)
            .where(head.c.concurrency_key == key, head.c.ordered, _has_status(head.c, "queued", "running"))
            .order_by(head.c.created_at, head.c.id)
            .limit(sa.literal_column("1"))
            .correlate(*owners)
            .scalar_subquery()
        )

    def _running(self, key: Any, owner: Any) -> Any:
        """How many jobs of a concurrency key run."""
        holder = self.own.alias("holder")
        of_key = (*_has_slot(holder), holder.c.concurrency_key == key)
        return sa.select(sa.func.count()).select_from(holder).where(*of_key).correlate(owner).scalar_subquery()

    def _counts(self, front: Any) -> Any:
        """How many jobs of each key of a front run, as one JSON object: counted once a key, looked into for each job.

        Not of all keys at once: of those that have ended entries stay in the index while an old transaction is open.
        """
        keys = sa.select(front.c.concurrency_key).distinct().subquery("keys_of_front")
        jobs = sa.func.jsonb_object_agg(keys.c.concurrency_key, self._running(keys.c.concurrency_key, keys))
        return sa.select(jobs.label("jobs")).select_from(keys).cte("counts").prefix_with("MATERIALIZED")

    def _near(self, front: Any) -> Any:
        """Of a front those whose turn it is, as far as can be seen without a lock on the key; ids."""
        counts = self._counts(front)
        running = sa.select(counts.c.jobs).scalar_subquery().op("->>")(front.c.concurrency_key)
        room = front.c.concurrency_limit - sa.cast(running, sa.Integer)
        # Of a key that is looked at by itself there may be others before this front.
        others = front.c.concurrency_key != sa.all_(sa.cast(_array("held_keys", sa.Text), ARRAY(sa.Text)))
        first = sa.select(front.c.id).where(sa.not_(front.c.ordered), front.c.place <= room, others)
        has_room = room > sa.literal_column("0")
        ordered = sa.select(front.c.concurrency_key).where(front.c.ordered, has_room).distinct().subquery("ordered")
        head = self._earliest(ordered.c.concurrency_key, ordered).label("id")
        return sa.union_all(first, sa.select(head).select_from(ordered)).subquery("ids")

    def _far(self, keys: Any) -> Any:
        """The first jobs of each key, as many as it has slots free; ids."""
        free = keys.c.concurrency_limit - self._running(keys.c.concurrency_key, keys)
        head = self.own.alias("job")
        first = (
            sa.select(head.c.id)
            .where(
                head.c.queue == keys.c.queue,
                head.c.concurrency_key == keys.c.concurrency_key,
                _opaque(sa.not_(head.c.ordered)),
                *self._claimable(head),
            )
            .order_by(head.c.priority.desc(), head.c.run_at, head.c.id)
            .limit(sa.func.greatest(free, sa.literal_column("0")))
            .correlate(keys)
            .subquery("first")
        )
        bounded = sa.select(first).limit(sa.literal_column(str(CLAIM_LIMIT))).correlate(keys).lateral("bounded")
        earliest = self._earliest(keys.c.concurrency_key, keys).label("id")
        return sa.union_all(
            sa.select(bounded.c.id).select_from(keys.join(bounded, sa.not_(keys.c.ordered))),
            sa.select(earliest).where(keys.c.ordered, free > sa.literal_column("0")),
        ).subquery("ids")

    def _in_turn(self, ids: Any) -> sa.Select[Any]:
        job = self.own.alias("job")
        return sa.select(*_line_of(job), *_key_of(job)).where(
            job.c.id == _among(sa.select(ids.c.id)), *self._claimable(job)
        )

    def _look(self) -> sa.Executable:
        """See which jobs with a concurrency key are next in their queues: nothing is locked or taken.

        Parameters: ``queues``, ``limits`` and ``after_keys``, aligned, see :meth:`_keys`; ``kinds``; ``careful``,
        whether such a job may be taken; ``mark_*`` and ``held_*``, see :class:`~enlist._marks.Marks`.

        Rows, told apart by ``part``: "job", one whose turn it is, at most ``limits`` of a queue; "more", the last key
        that was looked at by itself, and there are others; "any", one row if any queue has jobs with a key at all,
        which a look that has marks does not ask; "later", in how many seconds, ``due``, the first job with a key is
        due of the queues that have fewer in turn than ``limits``.
        """
        asked = _rows("asked", queue=("queues", sa.Text), number=("limits", sa.Integer), after=("after_keys", sa.Text))
        marks = self._marks()
        front = self._front_line(asked, marks)
        near = self._in_turn(self._near(front)).cte("near").prefix_with("MATERIALIZED")
        keys = self._keys(asked, front, near)
        turn = sa.union(sa.select(near), self._in_turn(self._far(keys))).cte("turn").prefix_with("MATERIALIZED")
        order = (turn.c.priority.desc(), turn.c.run_at, turn.c.id)
        place = sa.func.row_number().over(partition_by=turn.c.queue, order_by=order).label("place")
        placed = sa.select(turn, place).subquery("placed")
        due = _seconds(placed.c.run_at).label("due")
        columns = [placed.c[name] for name in ("queue", "id", "priority", "careful")]
        first = (
            sa.select(_word("job").label("part"), *columns, due, *_key_of(placed))
            .select_from(placed.join(asked, asked.c.queue == placed.c.queue))
            .where(placed.c.place <= asked.c.number)
        )

        def also(part: str, **given: Any) -> Any:
            others = list(first.selected_columns)[1:]
            values = [sa.cast(given.get(column.name, sa.null()), column.type) for column in others]
            return sa.select(_word(part), *values)

        last = keys.c.place == sa.literal_column(str(KEYS_AT_ONCE))
        marked = sa.select(marks.alias().c.queue).exists()
        in_turn = sa.select(sa.func.count()).where(turn.c.queue == asked.c.queue).correlate(asked).scalar_subquery()
        classes = self._classes(asked, marks, keyed=True)
        of_queue = sa.select(self._later(asked, classes, keyed=True).label("run_at")).select_from(classes)
        later = of_queue.where(in_turn < asked.c.number).correlate(asked).lateral("later")
        soonest = _seconds_until(sa.func.min(later.c.run_at))
        return sa.union_all(
            first,
            also("more", queue=keys.c.queue, concurrency_key=keys.c.concurrency_key).where(last),
            also("any").where(sa.case((marked, sa.false()), else_=self._any_keyed())),
            also("later", due=soonest).select_from(asked.join(later, sa.true())).having(soonest.is_not(None)),
        )

    def _any_keyed(self) -> Any:
        """Whether the queues have jobs with a concurrency key, whenever they are due: a probe of the index each.

        In the index's order: EXISTS may be a scan of the table, since it expects to find one soon.
        """
        queue = _rows("named", queue=("queues", sa.Text))
        job = self.own.alias("job")
        highest = (
            sa.select(job.c.priority)
            .where(_status("job", "queued"), _in_line(job, True), job.c.queue == queue.c.queue)
            .order_by(job.c.priority.desc())
            .limit(sa.literal_column("1"))
            .correlate(queue)
            .scalar_subquery()
        )
        return sa.select(queue.c.queue).where(highest.is_not(None)).exists()

    def _claim(self, *, among: bool = False, limited: bool = False) -> sa.Executable:
        """Take due jobs without a concurrency key, each queue in its order.

        Parameters: ``queues`` and ``limits``, aligned; ``kinds``; ``careful``, whether such a job may be taken, at
        most one in all; ``worker``; ``lease``; where rates are limited those of :meth:`_earned`. With ``look_first``
        nothing is taken where any of the queues has jobs with a key.

        ``among``: there are ``mark_*``, see :meth:`_marks`, and ``ahead_*``, aligned, jobs that :attr:`look` has seen:
        they have their places, and what comes after the last place is not taken. Mostly there are neither, and the
        statement is planned each time, which takes longer than to run it: so the usual one is without.

        Rows without an ``id`` tell by their ``kind``: "keyed", there are jobs to be looked at first; "later", in how
        many seconds, ``due``, the first job is due of the queues that had fewer than were asked for. Where rates are
        limited there are those of :meth:`_owed` as well.
        """
        asked = self._asked()
        earned = self._earned() if limited else None
        allowed = asked if earned is None else self._allowed(asked, earned)
        marks = self._marks() if among else None
        any_keyed = sa.case((sa.bindparam("look_first", type_=sa.Boolean), self._any_keyed()), else_=sa.false())
        first_look = sa.select(any_keyed.label("is_due")).cte("first_look").prefix_with("MATERIALIZED")
        is_due = sa.select(first_look.c.is_due).scalar_subquery()
        number = sa.case((is_due, sa.literal_column("0")), else_=allowed.c.number).label("number")
        wanted = sa.select(allowed.c.queue, number).cte("wanted").prefix_with("MATERIALIZED")

        classes = self._classes(wanted, marks, keyed=False)
        walk = self._walk(wanted, marks, wanted.c.number, classes, keyed=False)
        found = walk.cte("found", nesting=True).prefix_with("MATERIALIZED")
        is_short = sa.select(sa.func.count()).select_from(found).scalar_subquery() < wanted.c.number
        told = {"run_at": self._later(wanted, classes, keyed=False)}
        later = sa.select(*(told.get(column.name, sa.null()) for column in found.c)).select_from(classes)
        both = sa.union_all(sa.select(found), later.where(is_short).correlate(wanted))
        walked = both.add_cte(classes, nest_here=True).lateral("walked")
        line = sa.select(walked).select_from(wanted.join(walked, sa.true())).cte("line").prefix_with("MATERIALIZED")

        c = self.own.c
        chosen = self._chosen_among(line, wanted) if among else self._chosen(line)
        taken = self._taken(c.id == _among(chosen)).returning(*self._returned(self.own)).cte("taken")

        def also(**given: Any) -> Any:
            return sa.select(*(sa.cast(given.get(column.name, sa.null()), column.type) for column in taken.c))

        soonest = _seconds_until(sa.func.min(line.c.run_at))
        answer = [
            sa.select(*taken.c),
            also(kind=_word("keyed")).where(is_due),
            also(kind=_word("later"), due=soonest).where(line.c.id.is_(None)).having(soonest.is_not(None)),
        ]
        if earned is None:
            return sa.union_all(*answer)
        return sa.union_all(*answer, self._owed(earned, taken)).add_cte(self._paid(earned, taken))

    def _chosen(self, line: Any) -> sa.Select[Any]:
        """The ids of a line, of careful jobs the first alone."""
        order = (line.c.priority.desc(), line.c.run_at, line.c.id)
        careful_place = sa.func.row_number().over(partition_by=line.c.careful, order_by=order).label("careful_place")
        placed = sa.select(line.c.id, line.c.careful, careful_place).where(line.c.id.is_not(None)).subquery("placed")
        is_first = placed.c.careful_place == sa.literal_column("1")
        return sa.select(placed.c.id).where(sa.or_(sa.not_(placed.c.careful), is_first))

    def _chosen_among(self, line: Any, wanted: Any) -> sa.Select[Any]:
        """The same, where jobs that were seen have their places."""
        seen = _rows(
            "ahead",
            queue=("ahead_queues", sa.Text),
            id=("ahead_ids", sa.Uuid),
            priority=("ahead_priorities", sa.Integer),
            due=("ahead_dues", sa.Double),
            careful=("ahead_careful", sa.Boolean),
        )
        line = sa.union_all(
            sa.select(*line.c, sa.false().label("ahead")).where(line.c.id.is_not(None)),
            sa.select(seen.c.queue, seen.c.id, seen.c.priority, _time(seen.c.due), seen.c.careful, sa.true()),
        ).subquery("among")
        order = (line.c.priority.desc(), line.c.run_at, line.c.id)
        row_number = sa.func.row_number()
        placed = sa.select(
            line,
            row_number.over(partition_by=line.c.queue, order_by=order).label("place"),
            row_number.over(partition_by=line.c.careful, order_by=order).label("careful_place"),
        ).subquery("placed")
        return (
            sa.select(placed.c.id)
            .select_from(placed.join(wanted, wanted.c.queue == placed.c.queue))
            .where(
                sa.not_(placed.c.ahead),
                placed.c.place <= wanted.c.number,
                sa.or_(sa.not_(placed.c.careful), placed.c.careful_place == sa.literal_column("1")),
            )
        )

    def _lock_keys(self) -> sa.Executable:
        """Take the transaction-scoped advisory locks of concurrency ``keys`` that are free; return those keys.

        Counting the running jobs of a key is only exact while nobody else can start one: two claims that overlap
        see neither's jobs. The count is made by the next statement, whose snapshot is newer than the lock.

        Bounds how long the transaction may idle, without a round trip more: a worker that is frozen or gone would
        hold the locks for as long as the server believes in its connection.
        """
        wanted = _rows("wanted", key=("keys", sa.Text))
        seed = int.from_bytes(hashlib.sha256(self.channel.encode()).digest()[:7], "big")
        digest = sa.func.hashtextextended(wanted.c.key, sa.literal_column(str(seed)))
        return sa.select(wanted.c.key, _IDLE_LIMIT).where(sa.func.pg_try_advisory_xact_lock(digest))

    def _claim_keyed(self, *, limited: bool) -> sa.Executable:
        """Take due jobs of locked concurrency keys.

        Parameters: ``keys``, with their ``key_queues``, ``key_limits`` and ``key_ordered``, aligned, as the rows
        of :attr:`look` have them; the others as for :attr:`claim`, but for the marks.

        Of each key the first jobs, as many as it has slots free under their own limit; each gets the lowest free
        slot. Of an ordered key the earliest job, if it is due. The unique index on (key, slot) and the CHECK on the
        slot hold the limit whatever happens here.
        """
        wanted = _rows(
            "wanted",
            key=("keys", sa.Text),
            queue=("key_queues", sa.Text),
            limit=("key_limits", sa.Integer),
            ordered=("key_ordered", sa.Boolean),
        )
        asked = self._asked()
        earned = self._earned() if limited else None
        allowed = asked if earned is None else self._allowed(asked, earned)
        job = self.own.alias("job")
        holder = self.own.alias("holder")
        running = (
            sa.select(sa.func.count().label("jobs"))
            .select_from(holder)
            .where(*_has_slot(holder), holder.c.concurrency_key == wanted.c.key)
            .correlate(wanted)
            .lateral("running")
        )
        columns = [*_line_of(job), *_key_of(job)]
        of_key = (job.c.concurrency_key == wanted.c.key, job.c.queue == wanted.c.queue)
        first = (
            sa.select(*columns)
            .where(sa.not_(wanted.c.ordered), _opaque(sa.not_(job.c.ordered)), *of_key, *self._claimable(job))
            .order_by(job.c.priority.desc(), job.c.run_at, job.c.id)
            .limit(sa.func.greatest(wanted.c.limit - running.c.jobs, sa.literal_column("0")))
            .with_for_update(key_share=True, skip_locked=True)
            .correlate(wanted, running)
            .subquery("first")
        )
        earliest = (
            sa.select(*columns)
            .where(wanted.c.ordered, job.c.id == self._earliest(wanted.c.key, wanted), *of_key, *self._claimable(job))
            .with_for_update(key_share=True, skip_locked=True)
            .correlate(wanted)
            .subquery("earliest")
        )
        heads = sa.union_all(sa.select(first).limit(sa.literal_column(str(CLAIM_LIMIT))), sa.select(earliest)).lateral(
            "heads"
        )
        order = (heads.c.priority.desc(), heads.c.run_at, heads.c.id)
        row_number = sa.func.row_number()
        placed = (
            sa.select(
                heads,
                running.c.jobs.label("running"),
                row_number.over(partition_by=heads.c.concurrency_key, order_by=order).label("rank"),
                row_number.over(partition_by=heads.c.queue, order_by=order).label("place"),
                row_number.over(partition_by=heads.c.careful, order_by=order).label("careful_place"),
            )
            .select_from(wanted.join(running, sa.true()).join(heads, sa.true()))
            .cte("placed")
            .prefix_with("MATERIALIZED")
        )
        numbers = sa.func.generate_series(sa.literal_column("1"), placed.c.running + placed.c.rank)
        slots = numbers.table_valued(sa.column("slot", sa.Integer), name="slots").render_derived(name="slots")
        slot = (
            sa.select(slots.c.slot)
            .where(
                ~sa.select(holder.c.id)
                .where(
                    *_has_slot(holder),
                    holder.c.concurrency_key == placed.c.concurrency_key,
                    holder.c.concurrency_slot == slots.c.slot,
                )
                .correlate(placed, slots)
                .exists()
            )
            .order_by(slots.c.slot)
            .offset(placed.c.rank - 1)
            .limit(1)
            .correlate(placed)
            .scalar_subquery()
        )
        picked = (
            sa.select(placed.c.id, slot.label("slot"))
            .select_from(placed.join(allowed, allowed.c.queue == placed.c.queue))
            .where(
                placed.c.place <= allowed.c.number,
                placed.c.running + placed.c.rank <= placed.c.concurrency_limit,
                sa.or_(sa.not_(placed.c.careful), placed.c.careful_place == 1),
            )
            .cte("picked")
            .prefix_with("MATERIALIZED")
        )
        c = self.own.c
        own = sa.select(picked.c.slot).where(picked.c.id == c.id).correlate(self.own).scalar_subquery()
        taken = self._taken(c.id == _among(sa.select(picked.c.id)), concurrency_slot=own).returning(
            *self._returned(self.own)
        )
        if earned is None:
            return taken
        of_taken = taken.cte("taken")
        answer = sa.union_all(sa.select(*of_taken.c), self._owed(earned, of_taken))
        return answer.add_cte(self._paid(earned, of_taken))

    def _notify(self) -> sa.Executable:
        """Wake the workers of ``queue``."""
        return sa.select(sa.func.pg_notify(self.channel, sa.bindparam("queue", type_=sa.Text)))

    def _notify_of_keys(self) -> sa.Executable:
        """Notify the queues that have jobs of concurrency ``keys``, of those keys that have a slot free.

        For a worker that has ended a job of a key and takes none of its others: they may be in queues or of kinds that
        are not its own. The queues are found one after the other, since no index has the jobs of a key alone.
        """
        one: Any = sa.literal_column("1")
        job = self.own.alias("job")
        last = sa.select(_word("").label("queue")).cte("queues", recursive=True)
        following = (
            sa.select(job.c.queue)
            .where(_status("job", "queued"), job.c.concurrency_key.is_not(None), job.c.queue > last.c.queue)
            .order_by(job.c.queue, job.c.concurrency_key)
            .limit(one)
            .correlate(last)
            .scalar_subquery()
        )
        queues = last.union_all(sa.select(following).where(last.c.queue.is_not(None)))
        wanted = _rows("wanted", key=("keys", sa.Text))
        waiting = self._first_of(queues.c.queue, lambda key: key == wanted.c.key, queues, wanted).lateral("waiting")
        found = (
            sa.select(queues.c.queue)
            .distinct()
            .select_from(queues.join(wanted, sa.true()).join(waiting, sa.true()))
            .where(waiting.c.concurrency_limit > self._running(wanted.c.key, wanted))
            .cte("found")
            .prefix_with("MATERIALIZED")
        )
        return sa.select(sa.func.pg_notify(self.channel, found.c.queue))

    # -- the lease ---------------------------------------------------------------------------------------------

    def _is_running(self, c: Any) -> Any:
        return sa.func.coalesce(c.status, sa.literal_column("''")) == sa.literal_column("'running'")

    def _lock(self, rows: Any, *, skip_locked: bool = False) -> Any:
        """Lock the running jobs named by ``rows`` (id, token, ...) that are still ours, in id order; a CTE."""
        ordered = sa.select(rows).order_by(rows.c.id).subquery("ordered")
        job = self.own.alias("job")
        probe = (
            sa.select(job.c.id)
            .where(job.c.id == ordered.c.id, job.c.lease_token == ordered.c.token, self._is_running(job.c))
            .with_for_update(key_share=True, skip_locked=skip_locked)
            .correlate(ordered)
            .lateral("probe")
        )
        return sa.select(ordered).select_from(ordered.join(probe, sa.true())).cte("mine").prefix_with("MATERIALIZED")

    def _held(self) -> Any:
        return _rows("held", id=("ids", sa.Uuid), token=("tokens", sa.BigInteger))

    def _start(self) -> sa.Executable:
        """Write that a careful job's handler starts now: ``id``, ``token``; returns the id while it is ours."""
        c = self.own.c
        return (
            sa.update(self.own)
            .where(
                c.id == sa.bindparam("job_id", type_=sa.Uuid),
                c.lease_token == sa.bindparam("token", type_=sa.BigInteger),
                self._is_running(c),
            )
            .values(started_at=_NOW)
            .returning(c.id)
        )

    def _renew(self) -> sa.Executable:
        """Renew leases for ``lease``: ``ids`` and ``tokens``, aligned. Returns the jobs with their tokens as they are.

        A row that somebody has locked is left as it is, and is ours while its token is: it is our own finish, or a
        reaper that looks at it or is about to change the token, which the fence will notice.
        """
        c = self.own.c
        mine = self._lock(self._held(), skip_locked=True)
        renewed = (
            sa.update(self.own)
            .where(c.id == _among(sa.select(mine.c.id)))
            .values(locked_until=_NOW + _length("lease"))
            .cte("renewed")
        )
        return sa.select(c.id, c.lease_token, c.status).where(c.id == _any_of("ids", sa.Uuid)).add_cte(renewed)

    def _states(self) -> sa.Executable:
        """Read what jobs are: ``ids``; rows (id, lease_token, status). Without a lock: it waits for nobody."""
        c = self.own.c
        return sa.select(c.id, c.lease_token, c.status).where(c.id == _any_of("ids", sa.Uuid))

    def _disown(self) -> sa.Executable:
        """Give back what ``worker`` has in the table but not in hand: all its running jobs but ``ids``.

        After a claim whose answer was lost. They never started, so their attempts are returned. The scan is of all
        running jobs; it is rare.
        """
        c = self.own.c
        job = self.own.alias("job")
        unheld = (
            sa.select(job.c.id)
            .where(
                _status("job", "running"),
                job.c.locked_until.is_not(None),
                job.c.locked_by == sa.bindparam("worker", type_=sa.Text),
                job.c.id != sa.all_(sa.cast(_array("ids", sa.Uuid), ARRAY(sa.Uuid))),
            )
            .with_for_update(key_share=True, skip_locked=True)
            .cte("unheld")
            .prefix_with("MATERIALIZED")
        )
        return (
            sa.update(self.own)
            .where(c.id == _among(sa.select(unheld.c.id)))
            .values(
                status="queued",
                attempt=sa.func.greatest(0, c.attempt - 1),
                lease_token=c.lease_token + 1,
                concurrency_slot=None,
                locked_by=None,
                locked_until=None,
                started_at=None,
            )
            .returning(c.id)
        )

    def _complete(self) -> sa.Executable:
        """Set jobs done: ``ids`` and ``tokens``, aligned; returns the ids of those that were still ours.

        A row that somebody has locked is passed by, not waited for: the others would wait as well.
        """
        c = self.own.c
        mine = self._lock(self._held(), skip_locked=True)
        return sa.update(self.own).where(c.id == _among(sa.select(mine.c.id))).values(self._done()).returning(c.id)

    def _done(self) -> dict[str, Any]:
        # The token stays: a worker whose COMMIT went unanswered knows its own work by it. Literals: three parameters
        # more would cost the client 35 us, for each job that is done in a transaction of its own.
        return {
            "status": _word("done"),
            "finished_at": _NOW,
            "locked_until": sa.null(),
            "concurrency_slot": sa.null(),
            "unique_held": self._held_after("started", "finished"),
        }

    def finish(self, generation: int) -> sa.Update:
        """Set one job done in its handler's transaction: ``job_id``, ``token``; one row, or it is no longer ours.

        It runs on the application's engine, whose driver may prepare it. A plan that was cached while the table
        was analyzed and empty is a sequential scan, and inserting does not invalidate it: so the text carries a
        number that changes every minute, and with it the plan.

        COMMIT follows at once. It is bounded how long the transaction may wait for it: where it does not come, from a
        worker that is gone or over a network that is, the row would stay locked.
        """
        c = self.own.c
        return (
            sa.update(self.own)
            .prefix_with(f"/* g{generation} */")
            .where(
                c.id == sa.bindparam("job_id", type_=sa.Uuid),
                c.lease_token == sa.bindparam("token", type_=sa.BigInteger),
                self._is_running(c),
            )
            .values(self._done())
            .returning(c.id, _IDLE_LIMIT)
        )

    def finish_group(self, generation: int) -> sa.Update:
        """Set several jobs done in their handlers' transaction: ``ids``, ``tokens``; rows (id, lease_token) of ours.

        Locked in the order of their ids, since other groups and commands lock several as well; waiting for whoever
        has one, as :meth:`finish` does. For the generation see there.
        """
        c = self.own.c
        mine = self._lock(self._held())
        done = sa.update(self.own).prefix_with(f"/* g{generation} */").where(c.id == _among(sa.select(mine.c.id)))
        return done.values(self._done()).returning(c.id, c.lease_token, _IDLE_LIMIT)

    def _latest_errors(self) -> Any:
        """The errors stored so far, less the oldest where there is no room for one more."""
        latest = sa.cast(sa.literal_column(f"'$[last - {ERRORS_KEPT - 2} to last]'"), JSONPATH)
        return sa.func.jsonb_path_query_array(self.own.c.errors, latest)

    def _settle(self) -> sa.Executable:
        """Write how an attempt ended other than well: arrays, aligned, see the columns below.

        ``status`` is what the job becomes (queued, dead, cancelled), due after ``delay``; ``returned`` attempts
        are given back (1 for a snooze and for a job that was never started). The token changes: whoever still
        runs the job is fenced off. The errors are bounded: the latest stay.
        """
        settled = _rows(
            "settled",
            id=("ids", sa.Uuid),
            token=("tokens", sa.BigInteger),
            status=("statuses", sa.Text),
            delay=("delays", Seconds),
            returned=("returned", sa.Integer),
            error=("errors", sa.Text),
            entry=("entries", sa.Text),
        )
        mine = self._lock(settled, skip_locked=True)
        c = self.own.c
        queued = mine.c.status == sa.literal_column("'queued'")
        return (
            sa.update(self.own)
            .where(
                c.id == _among(sa.select(mine.c.id)),
                c.id == mine.c.id,
            )
            .values(
                status=mine.c.status,
                attempt=sa.func.greatest(0, c.attempt - mine.c.returned),
                lease_token=c.lease_token + 1,
                unique_held=sa.and_(c.unique_held, queued),
                concurrency_slot=None,
                locked_by=None,
                locked_until=None,
                started_at=sa.case((queued, sa.null()), else_=c.started_at),
                run_at=sa.case((queued, sa.func.coalesce(_NOW + _interval(mine.c.delay), c.run_at)), else_=c.run_at),
                finished_at=sa.case((queued, sa.null()), else_=_NOW),
                last_error=sa.func.coalesce(mine.c.error, c.last_error),
                errors=sa.case(
                    (mine.c.entry.is_(None), c.errors),
                    else_=self._latest_errors().op("||")(sa.cast(mine.c.entry, c.errors.type)),
                ),
            )
            .returning(c.id)
        )

    def _expired(self) -> sa.Executable:
        """Find the jobs whose lease has ended and whose row nobody has locked: at most ``limit`` ids.

        To be looked at again a moment later, with ``reap``. A handler's transaction that has its row locked may last
        longer than the lease, which cannot be renewed meanwhile; when it is rolled back, its worker renews at once.
        The lock is the weakest that such a transaction's excludes.
        """
        job = self.own.alias("job")
        return (
            sa.select(job.c.id)
            .where(_status("job", "running"), job.c.locked_until < _NOW)
            .order_by(job.c.locked_until)
            .limit(sa.bindparam("limit", type_=sa.Integer))
            .with_for_update(read=True, skip_locked=True)
        )

    def _reap(self) -> sa.Executable:
        """Take back those of ``ids`` whose lease has ended.

        Judged and updated in one statement, under the row's lock: a job that finished, was renewed or claimed
        again in between is not touched, and two reapers never take the same one. A job whose handler never
        started gets its attempt back; another counts one worker lost, and is dead when that was its last attempt.
        """
        c = self.own.c
        job = self.own.alias("job")
        expired = (
            sa.select(job.c.id, job.c.locked_by)
            .where(
                job.c.id == _any_of("ids", sa.Uuid),
                _status("job", "running"),
                job.c.locked_until < _NOW,
            )
            .with_for_update(key_share=True, skip_locked=True)
            .cte("expired")
            .prefix_with("MATERIALIZED")
        )
        started = c.started_at.is_not(None)
        dead = sa.and_(started, c.attempt >= c.max_attempts)
        error = sa.func.concat(
            sa.literal_column("'worker lost: '"),
            c.locked_by,
            sa.literal_column("' let the lease run out at '"),
            c.locked_until,
        )
        entry = sa.func.jsonb_build_array(
            sa.func.jsonb_build_object(
                sa.literal_column("'attempt'"),
                c.attempt,
                sa.literal_column("'at'"),
                _NOW,
                sa.literal_column("'error'"),
                error,
            )
        )
        was = sa.select(expired.c.locked_by).where(expired.c.id == c.id).correlate(self.own).scalar_subquery()
        return (
            sa.update(self.own)
            .where(c.id == _among(sa.select(expired.c.id)))
            .values(
                status=sa.case((dead, sa.literal_column("'dead'")), else_=sa.literal_column("'queued'")),
                attempt=sa.case((started, c.attempt), else_=sa.func.greatest(0, c.attempt - 1)),
                lost=sa.case((started, c.lost + 1), else_=c.lost),
                lease_token=c.lease_token + 1,
                unique_held=sa.and_(c.unique_held, sa.not_(dead)),
                concurrency_slot=None,
                locked_by=None,
                locked_until=None,
                started_at=sa.case((dead, c.started_at), else_=sa.null()),
                run_at=sa.case((dead, c.run_at), else_=sa.func.greatest(c.run_at, _NOW)),
                finished_at=sa.case((dead, _NOW), else_=sa.null()),
                last_error=sa.case((started, error), else_=c.last_error),
                errors=sa.case((started, self._latest_errors().op("||")(entry)), else_=c.errors),
            )
            .returning(
                *(c.id, c.kind, c.queue, c.concurrency_key, c.status, c.attempt, c.max_attempts, c.lost),
                was.label("worker"),
            )
        )

    # -- the handler's transaction -----------------------------------------------------------------------------

    def lock_row(self, generation: int) -> sa.Executable:
        """Lock a running job that is ours for the handler's transaction: ``job_id``, ``token``; its id, or no row.

        ``idle_limit``, such as "60s", bounds how long the transaction may idle: a frozen worker would hold the lock
        for ever. Where the snapshot is the transaction's (REPEATABLE READ, SERIALIZABLE) one heartbeat would make the
        final UPDATE fail. While this lock is held heartbeat and reaper pass the row by: the lock is the lease. For the
        generation see :meth:`finish`.
        """
        limit = sa.bindparam("idle_limit", type_=sa.Text)
        c = self.own.c
        return (
            sa.select(c.id, _limit_idling(limit))
            .prefix_with(f"/* g{generation} */")
            .where(
                c.id == sa.bindparam("job_id", type_=sa.Uuid),
                c.lease_token == sa.bindparam("token", type_=sa.BigInteger),
                self._is_running(c),
            )
            .with_for_update(key_share=True)
        )

    def _fate(self) -> sa.Executable:
        """Read what became of a job whose COMMIT went unanswered: ``job_id``; (status, lease_token).

        With a lock: while the COMMIT is still under way a plain read would see the old row. It is not kept by a worker
        that is frozen or gone.
        """
        c = self.own.c
        return (
            sa.select(c.status, c.lease_token, _IDLE_LIMIT)
            .where(c.id == sa.bindparam("job_id", type_=sa.Uuid))
            .with_for_update(key_share=True)
        )

    # -- one process alone, in one transaction: tests ------------------------------------------------------------

    def _wanted(self, job: Any) -> list[Any]:
        """Queued jobs of ``kinds``, in ``queues``, or in any if that is NULL."""
        every = _array("queues", sa.Text).is_(None)
        queue = sa.or_(every, job.c.queue == _any_of("queues", sa.Text))
        return [_status(job.name, "queued"), job.c.kind == _any_of("kinds", sa.Text), queue]

    def _front(self) -> sa.Executable:
        """Read which queues have due jobs, in the order of their first ones: ``kinds``, ``queues`` or NULL."""
        job = self.own.alias("job")
        order = (job.c.priority.desc(), job.c.run_at, job.c.id)
        place = sa.func.row_number().over(partition_by=job.c.queue, order_by=order).label("place")
        due = (
            sa.select(job.c.queue, job.c.priority, job.c.run_at, job.c.id, place)
            .where(*self._wanted(job), job.c.run_at <= _NOW)
            .subquery("due")
        )
        first = sa.select(due.c.queue).where(due.c.place == sa.literal_column("1"))
        return first.order_by(due.c.priority.desc(), due.c.run_at, due.c.id)

    def _hasten(self) -> sa.Executable:
        """Make those queued jobs due that will be next: ``kinds``, ``queues`` or NULL; returns their ids.

        One moment at a time, so that jobs run in the order in which time would have brought them.
        """
        c = self.own.c
        job = self.own.alias("job")
        later = self.own.alias("later")
        moment = (
            sa.select(sa.func.min(later.c.run_at)).where(*self._wanted(later), later.c.run_at > _NOW).scalar_subquery()
        )
        coming = (
            sa.select(job.c.id)
            .where(*self._wanted(job), job.c.run_at == moment)
            .order_by(job.c.id)
            .with_for_update(key_share=True, skip_locked=True)
            .cte("coming")
            .prefix_with("MATERIALIZED")
        )
        due = sa.update(self.own).where(c.id == _among(sa.select(coming.c.id))).values(run_at=_NOW)
        return due.returning(c.id)

    # -- what the system looks like ----------------------------------------------------------------------------

    def _summary(self) -> sa.Executable:
        """Count jobs by queue, kind and status, with the oldest due time of those queued: one scan."""
        c = self.table.c
        due = sa.and_(c.status == sa.literal_column("'queued'"), c.run_at <= _NOW)
        return sa.select(
            c.queue,
            c.kind,
            c.status,
            sa.func.count().label("jobs"),
            sa.func.count().filter(due).label("due"),
            (_NOW - sa.func.min(c.run_at).filter(due)).label("oldest_due_age"),
            sa.func.count().filter(c.locked_until < _NOW).label("overdue"),
        ).group_by(c.queue, c.kind, c.status)

    # -- what operators ask ------------------------------------------------------------------------------------

    def picked(self, fits: Any, conditions: Any, limit: int | None) -> sa.Select[Any]:
        """Lock the jobs that a command fits and that meet conditions; their ids, in order.

        The lock comes with another look at the conditions: a job that has changed while it was waited for, and does
        not meet them any more, is left out. With LIMIT the next one is taken instead.
        """
        c = self.table.c
        found = sa.select(c.id).where(fits, *conditions).order_by(c.id).limit(limit)
        return found.with_for_update(key_share=True, of=self.table)

    def _found(self) -> Any:
        """Lock the jobs of ``ids`` in the order of their ids; a CTE. It waits for whoever works on one."""
        job = self.own.alias("job")
        return self._locked_of(job).with_for_update(key_share=True).cte("found").prefix_with("MATERIALIZED")

    def _unheld(self, *, waits: bool = True) -> Any:
        """The same, but running jobs that somebody has locked are passed by: it may be for as long as a handler works.

        First come those that don't run, in the order of all commands: whoever waits for one of them holds no lock
        that another may wait for. So only the first statement of a transaction may wait (``waits``).
        """
        parts = []
        for name, runs in (("idle", False), ("running", True)):
            job = self.own.alias("job")
            is_running = self._is_running(job.c)
            locked = self._locked_of(job).where(is_running if runs else sa.not_(is_running))
            locked = locked.with_for_update(key_share=True, skip_locked=runs or not waits)
            parts.append(sa.select(locked.cte(name).prefix_with("MATERIALIZED")))
        return sa.union_all(*parts).cte("found").prefix_with("MATERIALIZED")

    def _locked_of(self, job: Any) -> Any:
        names = ("id", "status", "lease_token", "run_at", "kind", "unique_key", "unique_held")
        columns = [job.c[name] for name in names]
        return sa.select(*columns).where(job.c.id == _any_of("ids", sa.Uuid)).order_by(job.c.id)

    def _judged(self, found: Any, verdict: Any) -> Any:
        columns = [found.c[name] for name in ("id", "status", "lease_token", "kind", "unique_key")]
        return sa.select(*columns, verdict.label("verdict")).cte("judged").prefix_with("MATERIALIZED")

    def _fitting(self, found: Any, fits: Any) -> Any:
        """The jobs that were found with the verdict: changed if the command fits, else unchanged; a CTE."""
        return self._judged(found, sa.case((fits(found.c), _word("changed")), else_=_word("unchanged")))

    def _command(self, judged: Any, values: dict[str, Any], *, by_key: bool = False) -> Any:
        """Change the jobs whose verdict is "changed", and tell of each what became of it.

        With ``by_key`` one after the other in the order of their unique keys, as jobs are inserted: who takes the
        same keys waits instead of deadlocking. (For the ten ids that are expected of any array a join is a loop
        that probes the primary key in that order.)

        Rows (id, verdict, status, woken): of the others the status; of those that are queued the queue, whose
        workers are to be woken: what is due later may be due earlier than it was. One statement: between the look and
        the change nobody can come.
        """
        c = self.own.c
        is_changed = judged.c.verdict == _word("changed")
        ids = sa.select(judged.c.id).where(is_changed)
        in_order = ids.order_by(judged.c.kind, judged.c.unique_key).subquery("in_order")
        changed = (
            sa.update(self.own)
            .where(c.id == (in_order.c.id if by_key else _among(ids)))
            .values(values)
            .returning(c.id, sa.case((_has_status(c, "queued"), c.queue)).label("woken"))
            .cte("changed")
        )
        nothing = sa.cast(sa.null(), c.status.type).label("status")
        others = sa.select(judged.c.id, judged.c.verdict, judged.c.status, sa.cast(sa.null(), sa.Text))
        return sa.select(changed.c.id, _word("changed").label("verdict"), nothing, changed.c.woken).union_all(
            others.where(sa.not_(is_changed))
        )

    def _cancel(self, found: Any) -> Command:
        """Cancel jobs. The token of a running one changes with its status: its worker's COMMIT finds no row.

        Rows (id, verdict, status, token, woken): the status is the one before, and the token that of a job that was
        running, whose worker is to be told.
        """

        def fits(c: Any) -> Any:
            return _has_status(c, "queued", "running")

        c = self.own.c
        values = {
            "status": "cancelled",
            "lease_token": c.lease_token + 1,
            "unique_held": False,
            "concurrency_slot": None,
            "locked_by": None,
            "locked_until": None,
            "finished_at": _NOW,
            "last_error": sa.case((self._is_running(c), _word(WHILE_IT_RAN)), else_=c.last_error),
        }
        judged = self._fitting(found, fits)
        is_changed = judged.c.verdict == _word("changed")
        changed = sa.update(self.own).where(c.id == _among(sa.select(judged.c.id).where(is_changed))).values(values)
        token = sa.case((sa.and_(is_changed, self._is_running(judged.c)), judged.c.lease_token)).label("token")
        # Not joined with what the UPDATE returns: for the ten rows that are expected that is a loop in a loop.
        told = sa.select(judged.c.id, judged.c.verdict, judged.c.status, token, sa.null().label("woken"))
        return Command(told.add_cte(changed.cte("changed")), fits(self.table.c))

    def unheld(self, conditions: Any, limit: int | None, *, waits: bool) -> sa.Executable:
        """Lock the queued jobs that meet conditions, and the running ones that nobody has locked; their ids, in order.

        With LIMIT up to as many of each are locked. See :meth:`picked` and :meth:`_unheld`.
        """
        c = self.table.c
        parts = []
        for status, skips in (("queued", not waits), ("running", True)):
            found = sa.select(c.id).where(_has_status(c, status), *conditions).order_by(c.id).limit(limit)
            locked = found.with_for_update(key_share=True, skip_locked=skips, of=self.table)
            parts.append(sa.select(locked.cte(status).prefix_with("MATERIALIZED").c.id))
        return sa.union_all(*parts).order_by("id").limit(limit)

    def running(self, conditions: Any, limit: int | None) -> sa.Select[Any]:
        """Read the running jobs that meet conditions, whoever has locked them: (id, lease_token), in order."""
        c = self.table.c
        found = sa.select(c.id, c.lease_token).where(_has_status(c, "running"), *conditions)
        return found.order_by(c.id).limit(limit)

    def _notify_cancelled(self) -> sa.Executable:
        """Tell workers of jobs that were cancelled while they ran, or are to be: ``messages``."""
        message = _rows("message", text=("messages", sa.Text))
        return sa.select(sa.func.pg_notify(self.cancel_channel, message.c.text))

    def _retry(self) -> Command:
        """Queue jobs again, due now; those that have given up their unique key take it again.

        If somebody holds it, or an earlier job of the statement takes it, the verdict is "superseded"; "lapsed" if
        the holder has it for nothing but ``unique_for``, which is over: see :attr:`release_lapsed`. The look-up sees
        what was there when the statement began; for what came since there is the unique index. It is a scalar
        sub-select, not EXISTS: that could be hashed, with a scan of the whole table.
        """

        def fits(c: Any) -> Any:
            return sa.or_(_has_status(c, *FINISHED), sa.and_(_has_status(c, "queued"), c.run_at > _NOW))

        def takes_key(c: Any) -> Any:
            return sa.and_(_has_status(c, *FINISHED), c.unique_key.is_not(None), sa.not_(c.unique_held))

        holder = self.own.alias("holder")

        def held(c: Any) -> Any:
            found = sa.select(sa.case((self._lapsed(holder.c), _word("lapsed")), else_=_word("superseded")))
            same = (holder.c.kind == c.kind, holder.c.unique_key == c.unique_key, holder.c.unique_held)
            return found.where(*same).scalar_subquery()

        found = self._found()
        # As the statement saw it before it waited for the row: a job that ran then and is done now is not to run twice.
        seen = self.own.alias("seen")
        ran = sa.select(seen.c.status).where(seen.c.id == found.c.id).scalar_subquery() == _word("running")
        key = (found.c.kind, found.c.unique_key, takes_key(found.c))
        place = sa.func.row_number().over(partition_by=key, order_by=found.c.id)
        verdict = sa.case(
            (sa.or_(sa.not_(fits(found.c)), ran), _word("unchanged")),
            (sa.not_(takes_key(found.c)), _word("changed")),
            (place > sa.literal_column("1"), _word("superseded")),
            else_=sa.func.coalesce(held(found.c), _word("changed")),
        )
        c = self.own.c
        values = {
            "status": "queued",
            "attempt": sa.case((_has_status(c, *FINISHED), sa.literal_column("0")), else_=c.attempt),
            "lease_token": c.lease_token + 1,
            "unique_held": sa.or_(c.unique_held, takes_key(c)),
            # Of a job that runs no more: the checks are made on the row as the statement saw it first, too.
            "concurrency_slot": None,
            "locked_by": None,
            "locked_until": None,
            "run_at": _NOW,
            "started_at": None,
            "finished_at": None,
        }
        picked = self.table.c
        is_free = sa.func.coalesce(held(picked), _word("lapsed")) == _word("lapsed")
        free = sa.or_(sa.not_(takes_key(picked)), is_free)
        return Command(self._command(self._judged(found, verdict), values, by_key=True), fits(picked), free)

    def _release_lapsed(self) -> sa.Executable:
        """Take the unique keys of ``ids`` from the jobs that hold them for ``unique_for`` alone, if that is over."""
        c = self.own.c
        job = self.own.alias("job")
        holder = self.own.alias("holder")
        same = sa.and_(holder.c.kind == job.c.kind, holder.c.unique_key == job.c.unique_key, holder.c.unique_held)
        holding = sa.select(holder.c.id).where(same).limit(sa.literal_column("1")).correlate(job).lateral("holding")
        found = (
            sa.select(holding.c.id).select_from(job.join(holding, sa.true())).where(job.c.id == _any_of("ids", sa.Uuid))
        )
        locked = self.own.alias("locked")
        holders = (
            sa.select(locked.c.id)
            .where(
                locked.c.id == _among(found),
                sa.func.coalesce(locked.c.unique_held, sa.false()),
                self._lapsed(locked.c),
            )
            .order_by(locked.c.id)
            .with_for_update(key_share=True, of=locked)
            .cte("holders")
            .prefix_with("MATERIALIZED")
        )
        return sa.update(self.own).where(c.id == _among(sa.select(holders.c.id))).values(unique_held=False)

    def _reschedule(self) -> Command:
        """Set when queued jobs are due: ``run_at``, or where that is None ``delay`` from now."""

        def fits(c: Any) -> Any:
            return _has_status(c, "queued")

        at = sa.bindparam("run_at", type_=sa.DateTime(timezone=True))
        run_at = sa.func.coalesce(at, _NOW + _length("delay"))
        return Command(self._command(self._fitting(self._found(), fits), {"run_at": run_at}), fits(self.table.c))

    def _present(self) -> sa.Executable:
        """Read what the commands above write: ``ids``. For objects that a session has loaded."""
        c = self.table.c
        names = "status attempt lease_token unique_held concurrency_slot locked_by locked_until run_at"
        columns = [c[name] for name in [*names.split(), "started_at", "finished_at"]]
        return sa.select(c.id, *columns).where(c.id == _any_of("ids", sa.Uuid))

    def listed(self, conditions: Any, statuses: Iterable[str], names: Iterable[str], limit: int) -> sa.Select[Any]:
        """Read some columns of jobs of some statuses, or of all; ``now`` is the server's time, ``error`` an end of it.

        In the order that tells most: running jobs by the end of their leases, which has an index; queued ones by when
        they are due, and finished ones by when they ended, both of which is a scan that keeps the first few; all
        others the latest first, by the primary key. The payload is not read unless it is among the names.

        Nothing that Python may be unable to read, or one odd row would hide all others: JSON as text, and times within
        the years that it has, ``infinity`` as the last of them.
        """
        c = self.table.c
        wanted = set(statuses)
        order: list[Any]
        where = [_has_status(c, *sorted(wanted))] if wanted else []
        if wanted == {"running"}:
            where.append(c.locked_until.is_not(None))  # as all of them have; it is in the index's predicate
            order = [c.locked_until]
        elif wanted == {"queued"}:
            order = [c.run_at, c.id]
        elif wanted and wanted <= set(FINISHED):
            order = [c.finished_at.desc().nulls_last(), c.id.desc()]
        else:
            order = [c.id.desc()]
        error = sa.func.right(c.last_error, sa.literal_column("2000")).label("error")
        columns = [*(_readable(c[name]) for name in names), error, _NOW.label("now")]
        return sa.select(*columns).where(*where, *conditions).order_by(*order).limit(limit)

    def counts(self, conditions: Any) -> sa.Select[Any]:
        """Count the jobs that meet conditions: (status, jobs)."""
        c = self.table.c
        return sa.select(c.status, sa.func.count().label("jobs")).where(*conditions).group_by(c.status)

    def oldest_queued_age(self, conditions: Any) -> sa.Select[Any]:
        """Read how long the oldest due job has been due; NULL if none is. ``-infinity`` counts as the year 1.

        Of each of the two lines by itself, which has an index; together they would be a scan of the table.
        """
        c = self.table.c
        year_one = sa.cast(_word("0001-01-01"), sa.DateTime(timezone=True))
        due = (_has_status(c, "queued"), c.run_at <= _NOW, *conditions)
        oldest = [
            sa.select(sa.func.min(c.run_at)).where(in_line, *due).scalar_subquery()
            for in_line in (_in_line(self.table, keyed=False), _in_line(self.table, keyed=True))
        ]
        first = sa.func.least(*oldest)
        return sa.select(sa.case((first.is_not(None), _NOW - sa.func.greatest(first, year_one))))

    def prune(self, conditions: Any) -> sa.Executable:
        """Delete jobs that finished ``older_than`` ago and meet conditions, at most ``limit``; return their ids.

        FOR UPDATE here, unlike anywhere else: a DELETE would wait for an insert that references the job, which
        FOR NO KEY UPDATE does not pass by. What another pruner has locked is passed by as well.
        """
        c = self.table.c
        holds = sa.and_(c.unique_held, sa.func.coalesce(c.unique_hold_until > _NOW, sa.false()))
        old = (
            sa.select(c.id)
            .where(
                _has_status(c, *FINISHED),
                c.finished_at <= _NOW - _length("older_than"),
                sa.not_(holds),
                *conditions,
            )
            .order_by(c.id)
            .limit(sa.bindparam("limit", type_=sa.Integer))
            .with_for_update(skip_locked=True, of=self.table)
            .cte("old")
            .prefix_with("MATERIALIZED")
        )
        return sa.delete(self.table).where(c.id == _among(sa.select(old.c.id))).returning(c.id)
