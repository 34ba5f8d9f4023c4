"""Jobs in the unit of work: staged by ``enqueue``, written by the flush, gone with a rollback.

A session with staged jobs has one pending object, the *marker*: an empty instance of the mapped job class. So it is
"not clean", and SQLAlchemy itself decides when jobs are written (autoflush, ``begin_nested()``, ``prepare()``,
``commit()``) and forgets them on rollback and close. One marker serves all jobs, since whatever is pending belongs to
the innermost savepoint: ``begin_nested()`` flushes before it begins. (A pending object for each job works too; it
costs 15 us a job.)

The unit of work cannot INSERT ... ON CONFLICT, and what is written outside of the flush's own transaction can fail
unnoticed: ``commit()`` would return normally with everything lost. So the marker is listed in the flush, which gives
the flush work, and in ``after_flush``, when the domain rows have their keys, the jobs are written instead of it.

The listeners are on the ``Session`` class, once: a session that has no jobs pays a dictionary look-up.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, NoReturn

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Session

from enlist import notifier
from enlist._driver import is_autocommit, is_known_autocommit, is_transaction_over
from enlist._inserting import Insertion
from enlist._staged import StagedJob, Target
from enlist._transactions import has_failed, note
from enlist._writing import autocommit_error, connection_for, unbound_error, write
from enlist.exceptions import SessionError
from enlist.handle import Batch, Ending, JobState, Write
from enlist.models import JobRecordMixin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sqlalchemy.orm import InstanceState, SessionTransaction, UOWTransaction

__all__ = ["RUNNING", "Stage", "flush_staged", "has_waiting", "note_write", "stage_of", "write_waiting"]

logger = logging.getLogger("enlist")

_STAGE: Final = "enlist.stage"
_FLUSH: Final = "enlist.flush"
_PARTIAL: Final = "enlist.partial"
RUNNING: Final = "enlist.running"
"""In ``session.info``: the id of the job whose handler's session this is, until it is done."""

MAX_ROUNDS: Final = 100
"""How often in one flush late payloads may enqueue further jobs."""


class Stage:
    """What enlist knows of a session; in ``session.info`` from the first job until the end of the transaction."""

    __slots__ = ("batch", "batches", "committing", "home", "jobs", "marker", "targets", "writing")

    def __init__(self) -> None:
        self.jobs: list[StagedJob] = []
        self.targets: set[Target] = set()  # of this transaction
        self.batch = Batch()  # of the jobs that are staged now
        self.home: SessionTransaction | None = None  # the innermost savepoint or transaction: where they are staged
        self.marker: object | None = None
        self.writing = False
        self.committing = False
        # What was written, by the savepoint or transaction that decides over it.
        self.batches: dict[SessionTransaction, list[Batch]] = {}

    def __del__(self) -> None:
        """End what a session leaves that is forgotten without being closed: its connection is rolled back by the pool.

        Not one that the session has joined: what becomes of that nobody here will see.
        """
        self.batch.end(JobState.DISCARDED)
        for transaction, batches in self.batches.items():
            in_doubt = _is_in_doubt(transaction, batches)
            for batch in batches:
                batch.end(JobState.UNKNOWN if in_doubt else JobState.DISCARDED)


def stage_of(session: Session, target: Target) -> Stage:
    """Return the session's stage, ready for jobs. No IO.

    :raises SessionError: the session can carry no jobs.
    """
    stage: Stage | None = session.info.get(_STAGE)
    if stage is None:
        stage = Stage()
    if stage.marker is None and not stage.writing:
        _check(session, target)
        known = _STAGE in session.info
        session.info[_STAGE] = stage  # before the marker: a listener that sees it added may enqueue
        try:
            _mark(session, stage, target)
        except BaseException:
            if not known:
                del session.info[_STAGE]
            raise
        if stage.home is None:
            stage.home = _boundary(session)
    stage.targets.add(target)
    return stage


def _check(session: Session, target: Target) -> None:
    if not session.is_active:
        raise SessionError(
            "the session's transaction has failed or is being ended: call session.rollback() before the next enqueue"
        )
    if type(session).get_bind is not Session.get_bind:
        return  # it may route by statement; the flush will tell
    try:
        bind = session.get_bind(target.mapper)
    except sa.exc.UnboundExecutionError as error:
        raise unbound_error(target) from error
    begun = _connection_begun(session, bind)
    # What the engine says, the session may say otherwise for its own connection (since SQLAlchemy 2.1).
    own_level = getattr(session, "execution_options", {}).get("isolation_level")
    if begun is not None:
        commits_itself = is_autocommit(begun)
    elif own_level is not None:
        commits_itself = own_level == "AUTOCOMMIT"
    else:
        commits_itself = is_known_autocommit(bind)
    if commits_itself:
        raise autocommit_error()


def _mark(session: Session, stage: Stage, target: Target) -> None:
    """Make the session "not clean", unless its running flush is going to write the jobs anyway."""
    flush = _running_flush(session)
    if flush is not None and flush.has_work:
        return
    _ = target.mapper.attrs  # configures the mapper, as the first instance made by __init__ would
    marker = target.mapper.class_manager.new_instance()  # without the application's __init__
    stage.marker = marker
    try:
        session.add(marker)
    except BaseException:
        stage.marker = None
        raise
    if flush is not None:
        _list_in_flush(flush, marker)


def flush_staged(session: Session) -> None:
    """Flush what is staged, whatever the session's autoflush says; without staged jobs do as autoflush would."""
    stage: Stage | None = session.info.get(_STAGE)
    if not session._flushing and (session.autoflush or (stage is not None and stage.jobs)):
        session.flush()


def note_write(
    session: Session, target: Target, connection: sa.Connection, queues: set[str], messages: Iterable[str] = ()
) -> None:
    """Have the workers of queues woken once the session has committed: jobs were made due in its transaction.

    And those told that run jobs which were cancelled in it, by ``messages``.
    A savepoint or transaction that is rolled back takes the note with it, as it does with jobs that were inserted.
    """
    stage: Stage | None = session.info.get(_STAGE)
    if stage is None:
        stage = session.info[_STAGE] = Stage()
    batch = Batch(JobState.INSERTED)
    write_ = note(connection, target, batch, queues)
    write_.is_sent = True
    write_.messages.update(messages)
    stage.batches.setdefault(_boundary(session), []).append(batch)


# -- what SQLAlchemy does not document, tested with each version ----------------------------------------------------


def _running_flush(session: Session) -> UOWTransaction | None:
    """The flush that is under way. Of one that found no work, or that a listener stopped, no end is reported."""
    flush: UOWTransaction | None = session.info.get(_FLUSH)
    return flush if session._flushing else None


def _list_in_flush(flush: UOWTransaction, marker: object) -> None:
    """Give the flush work without an INSERT: a state that is only listed."""
    flush.register_object(sa.inspect(marker), listonly=True)


def _take_out_of_flush(session: Session, flush: UOWTransaction, marker: object) -> None:
    """Let the flush not take the marker for an object that it has made persistent."""
    state: InstanceState[Any] = sa.inspect(marker)
    session.expunge(marker)
    flush.states.pop(state, None)


def _connection_begun(session: Session, bind: sa.Engine | sa.Connection) -> sa.Connection | None:
    """The connection that the session's transaction has begun on for a bind, if it has."""
    transaction = session.get_transaction()
    begun = None if transaction is None else transaction._connections.get(bind)
    return None if begun is None else begun[0]


def _is_joined(transaction: SessionTransaction) -> bool:
    """Whether a session's transaction is on a connection that it was given."""
    return any(not autoclose for *_, autoclose in transaction._connections.values())


# -- listeners --------------------------------------------------------------------------------------------------------


def _before_flush(session: Session, flush: UOWTransaction, instances: object) -> None:
    stage: Stage | None = session.info.get(_STAGE)
    if stage is not None and stage.jobs and not instances:
        # Before the domain rows are sent: on a connection that commits by itself they would stay, without their jobs.
        for target in stage.targets:
            connection_for(session, target)
    session.info[_FLUSH] = flush
    if instances:
        # flush([objects]), deprecated: late payloads might need others.
        flush.attributes[_PARTIAL] = True
        return
    if stage is not None and stage.marker is not None:
        _list_in_flush(flush, stage.marker)


def _after_flush(session: Session, flush: UOWTransaction) -> None:
    stage: Stage | None = session.info.get(_STAGE)
    if stage is not None:
        if _PARTIAL in flush.attributes:
            session.info.pop(_FLUSH, None)
            if stage.jobs and stage.marker is None:
                _mark(session, stage, stage.jobs[0].target)
            return
        marker, stage.marker = stage.marker, None
        if marker is not None:
            _take_out_of_flush(session, flush, marker)
        _write(session, stage)
    session.info.pop(_FLUSH, None)


def _write(session: Session, stage: Stage) -> None:
    """Write what is staged. On an error the stage stays as it is: the rollback, which follows, clears it."""
    stage.writing = True
    rounds = 0
    while stage.jobs:
        rounds += 1
        if rounds > MAX_ROUNDS:
            raise SessionError(f"late payloads enqueue ever more jobs: stopped after {MAX_ROUNDS} rounds in one flush")
        written = stage.batches.setdefault(_boundary(session), [])
        written.append(stage.batch)  # first: an interrupt from here on finds it there
        batch, stage.batch = stage.batch, Batch()
        jobs, stage.jobs = stage.jobs, []
        insertion = Insertion(session.info.get(RUNNING), stage.committing)
        try:
            write(session, jobs, batch, insertion)
        except BaseException:
            _release(jobs)
            raise
        batch.state = JobState.INSERTED
        batch.refused = insertion.refused
        if insertion.own:
            # Their key is held by the very job whose handler has enqueued them.
            waiting = Batch(waiting=insertion.own)
            for job in insertion.own:
                job.move_to(waiting)
            for target in {job.target for job in insertion.own}:
                note(connection_for(session, target), target, waiting)  # a savepoint may end before they are written
            written.append(waiting)
        kept = {*insertion.own, *insertion.refused}
        _release(job for job in jobs if job not in kept)
    stage.writing = False
    stage.home = None


def has_waiting(session: Session) -> bool:
    """Whether jobs wait for their handler's job to be done."""
    stage: Stage | None = session.info.get(_STAGE)
    return stage is not None and any(batch.waiting for batches in stage.batches.values() for batch in batches)


def write_waiting(session: Session) -> None:
    """Write the jobs that waited for their handler's job to be done, in its transaction. To be called then."""
    session.info.pop(RUNNING, None)
    stage: Stage | None = session.info.get(_STAGE)
    if stage is None:
        return
    for batch in [batch for batches in stage.batches.values() for batch in batches if batch.waiting]:
        jobs, batch.waiting = batch.waiting, []
        write(session, jobs, batch, Insertion(None, at_commit=True))
        batch.state = JobState.INSERTED
        _release(jobs)


def _write_refused(session: Session, stage: Stage) -> None:
    """Look again at jobs that were refused for a queued one which holds their key until it starts.

    Now, when that one is kept from starting before the commit. Had it started meanwhile, it would not have seen what
    this transaction is about, and nobody would do it.
    """
    written = [batch for batches in stage.batches.values() for batch in batches if batch.state is JobState.INSERTED]
    refused = [(job, batch, job.existing_id) for batch in written for job in batch.refused]
    if not refused:
        return
    again = Batch()
    stage.batches.setdefault(_boundary(session), []).append(again)
    jobs = [job for job, *_ in refused]
    for job in jobs:
        job.stage_again(again)
    try:
        write(session, jobs, again, Insertion(session.info.get(RUNNING), at_commit=True))
    except BaseException:
        for job, batch, holder in refused:  # as they were: commit() may be called again
            job.move_to(batch)
            job.refused_by(holder)
        raise
    again.state = JobState.INSERTED
    for batch in written:
        batch.refused = []
    _release(jobs)


def _release(jobs: Iterable[StagedJob]) -> None:
    for job in jobs:
        job.release()


def _pending_to_transient(session: Session, instance: object) -> None:
    stage: Stage | None = session.info.get(_STAGE)
    if stage is None or stage.marker is not instance:
        return
    stage.marker = None
    # Active: the application emptied its session, expunge() or expunge_all(). An accepted job stays.
    if stage.jobs and session.is_active:
        _mark(session, stage, stage.jobs[0].target)


def _before_commit(session: Session) -> None:
    stage: Stage | None = session.info.get(_STAGE)
    if stage is not None and session.get_nested_transaction() is None:
        if stage.jobs and stage.marker is None and not session._flushing:
            raise SessionError("jobs are staged and the session would not flush them: this is a fault of enlist's")
        _refuse_lost_transaction(stage)
        stage.committing = True
        _write_refused(session, stage)


def _refuse_lost_transaction(stage: Stage) -> None:
    """Refuse a commit that would do nothing, without an error: the jobs written before are not there any more."""
    written = [batch for batches in stage.batches.values() for batch in batches]
    for write_ in [write_ for batch in written for write_ in batch.writes]:
        if write_.ending is not None or is_transaction_over(write_.driver_connection):
            for batch in written:
                batch.end(JobState.UNKNOWN)
            stage.batches.clear()
            raise SessionError(
                "the session's transaction has been ended behind its back (a COMMIT or ROLLBACK that was sent as SQL,"
                " or through the driver's connection): jobs that were enqueued in it may be lost; use session.commit()"
                " and session.rollback()"
            )
        if has_failed(write_):
            raise SessionError(
                "the session's transaction has failed, by an SQL error that was swallowed: PostgreSQL would answer the"
                " COMMIT with a silent rollback, and the jobs enqueued in it would be lost; call session.rollback(),"
                " and put a statement that may fail into a savepoint (session.begin_nested())"
            )


def _after_commit(session: Session) -> None:
    # Also called when a savepoint is released.
    stage: Stage | None = session.info.get(_STAGE)
    if stage is None:
        return
    transaction = _boundary(session)
    batches = stage.batches.pop(transaction, [])
    parent = transaction.parent
    if parent is not None:
        stage.batches.setdefault(_boundary_of(parent), []).extend(batches)
        return
    writes: dict[tuple[sa.Connection, Target], Write] = {}
    for batch in batches:
        if batch.state is not JobState.INSERTED:
            if batch.state is JobState.STAGED:  # its flush has failed, and the application committed all the same
                batch.end(JobState.DISCARDED)
            continue
        for write_ in batch.writes:
            first = writes.setdefault((write_.connection, write_.target), write_)
            first.queues.update(write_.queues)
            first.messages.update(write_.messages)
        batch.end(JobState.COMMITTED)
    for write_ in writes.values():
        _wake_workers(session, write_)


def _wake_workers(session: Session, write_: Write) -> None:
    # In a transaction still: it is another's, which the session has joined. Its commit is not seen here.
    if write_.target.notify is not None and not write_.connection.in_transaction():
        notifier.committed(
            write_.connection.engine,
            write_.target.statements,
            write_.queues,
            messages=write_.messages,
            used=write_.driver_connection,
            notified=write_.target.notify == "transaction" and not session.twophase,
        )


def _after_rollback(session: Session) -> None:
    # Before the transaction's end is reported: after a failed flush that is only when the application rolls back.
    stage: Stage | None = session.info.get(_STAGE)
    if stage is not None:
        _discard(session, stage, _boundary(session))


def _after_transaction_end(session: Session, transaction: SessionTransaction) -> None:
    # However it ended; of close() nothing else is reported.
    info = session.info
    stage: Stage | None = info.get(_STAGE)
    parent = transaction.parent
    if parent is not None and not transaction.nested:
        # A flush ends, well or not.
        flush: UOWTransaction | None = info.get(_FLUSH)
        if flush is not None and flush.transaction is transaction:
            del info[_FLUSH]
            if stage is not None:
                stage.writing = False
        return
    if parent is None:
        info.pop(_FLUSH, None)
    if stage is None:
        return
    _discard(session, stage, transaction)
    if stage.home is not None:
        return
    if parent is None:
        del info[_STAGE]  # before the marker: what a listener enqueues now belongs to the next transaction
    marker, stage.marker = stage.marker, None
    if marker is not None and marker in session:
        session.expunge(marker)


def _discard(session: Session, stage: Stage, transaction: SessionTransaction) -> None:
    """End what was written or is staged in a savepoint or transaction."""
    batches = stage.batches.pop(transaction, [])
    state = JobState.UNKNOWN if _is_in_doubt(transaction, batches) else JobState.DISCARDED
    for batch in batches:
        batch.end(state)
    # Not so when a savepoint ends that a listener or a late payload has opened within the flush.
    if stage.home is transaction or transaction.parent is None:
        stage.batch.end(JobState.DISCARDED)
        stage.batch = Batch()
        for job in stage.jobs:
            job.release()
        stage.jobs.clear()
        stage.home = None
        stage.writing = stage.committing = False
        session.info.pop(_FLUSH, None)


def _is_in_doubt(transaction: SessionTransaction, batches: list[Batch]) -> bool:
    """Whether the transaction was committed, perhaps: its COMMIT got no answer, or it was ended without the session."""
    endings = {write_.ending for batch in batches for write_ in batch.writes}
    if transaction.parent is not None:
        return False
    # One that the session has joined may go on when the session ends: close() does not roll it back in each mode.
    goes_on = None in endings and _is_joined(transaction)
    return goes_on or not endings.isdisjoint({Ending.COMMIT_SENT, Ending.PAST_US})


def _boundary(session: Session) -> SessionTransaction:
    """The innermost savepoint, or else the transaction."""
    transaction = session.get_nested_transaction() or session.get_transaction()
    assert transaction is not None
    return transaction


def _boundary_of(transaction: SessionTransaction) -> SessionTransaction:
    while transaction.parent is not None and not transaction.nested:
        transaction = transaction.parent
    return transaction


def _refuse_insert(mapper: object, connection: object, record: object) -> NoReturn:
    raise SessionError(
        f"a job ({type(record).__name__}) was added to the session as an object; jobs are added by"
        " repo.enqueue(session, payload), which deduplicates them"
    )


_LISTENERS: Final[dict[str, Callable[..., None]]] = {
    "before_flush": _before_flush,
    "after_flush": _after_flush,
    "pending_to_transient": _pending_to_transient,
    "before_commit": _before_commit,
    "after_commit": _after_commit,
    "after_rollback": _after_rollback,
    "after_transaction_end": _after_transaction_end,
}
# What has happened is noted first: a listener of the application that raises must not hide it.
_FIRST: Final = frozenset({"after_commit", "after_rollback", "after_transaction_end"})
for _name, _listener in _LISTENERS.items():
    event.listen(Session, _name, _listener, insert=_name in _FIRST)
event.listen(JobRecordMixin, "before_insert", _refuse_insert, propagate=True)
