"""The transactions that jobs were written in: whether they have failed, and how they ended, whoever ended them.

A session's transaction can be ended without the session: ``session.connection().commit()``, a COMMIT sent as SQL, the
owner of a connection that the session has joined. So can a savepoint, or be begun. The connection's own events tell.
Its listeners are on the ``Engine`` class, once: to listen to one connection costs 18 us, and as much to stop. So each
end of a transaction without jobs pays a dictionary look-up, and each statement a look at its first letter.
"""

from __future__ import annotations

import re
import weakref
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa
from sqlalchemy import event

from enlist._driver import is_transaction_failed, is_transaction_over, sqlstate
from enlist.handle import Batch, Ending, JobState, Write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from enlist._staged import Target

__all__ = ["ENDING_STATEMENT", "IN_FAILED_TRANSACTION", "has_failed", "note"]

IN_FAILED_TRANSACTION: Final = "25P02"

ENDING_STATEMENT: Final = re.compile(
    r"(?:\s|--[^\n]*\n|/\*.*?\*/)*"
    r"(COMMIT|END|ABORT|ROLLBACK(?!\s+(?:(?:WORK|TRANSACTION)\s+)?TO\b)|PREPARE\s+TRANSACTION)\b",
    re.IGNORECASE | re.DOTALL,
)
"""SQL text that ends a transaction; ROLLBACK TO a savepoint does not."""

_ROLLBACK_TO: Final = re.compile(
    r"(?:\s|--[^\n]*\n|/\*.*?\*/)*ROLLBACK\s+(?:(?:WORK|TRANSACTION)\s+)?TO\s+(?:SAVEPOINT\s+)?(?!SAVEPOINT\s|sa_savepoint_)",
    re.IGNORECASE | re.DOTALL,
)
"""SQL text that rolls back to a savepoint of the application's: SQLAlchemy's own have another name."""


_open: Final[weakref.WeakKeyDictionary[sa.Connection, list[weakref.ref[Write]]]] = weakref.WeakKeyDictionary()
"""What was written in the open transactions of connections, in order. Weakly: a write refers to its connection."""

_committing: Final[weakref.WeakKeyDictionary[sa.Connection, list[weakref.ref[Write]]]] = weakref.WeakKeyDictionary()
"""What the COMMIT was sent for that a connection waits for an answer to."""

_prepared: Final[weakref.WeakKeyDictionary[sa.Connection, list[weakref.ref[Write]]]] = weakref.WeakKeyDictionary()
"""What is in the prepared transaction that a connection has been told to end."""

_errors: Final[weakref.WeakSet[sa.Connection]] = weakref.WeakSet()
"""Connections that had an error, of drivers that do not tell whether the transaction has failed."""


def note(connection: sa.Connection, target: Target, batch: Batch, queues: Iterable[str] = ()) -> Write:
    """Note that jobs of a batch are written on a connection, in its transaction."""
    driver_connection = connection.connection.driver_connection
    write = Write(connection, driver_connection, target, set(queues), batch, connection.get_nested_transaction())
    batch.writes.append(write)
    _open.setdefault(connection, []).append(weakref.ref(write))
    return write


def has_failed(write: Write) -> bool:
    """Whether PostgreSQL would answer a COMMIT of the transaction with a rollback, since a statement has failed."""
    failed = is_transaction_failed(write.driver_connection)
    return _had_error(write.connection) if failed is None else failed


def _had_error(connection: sa.Connection) -> bool:
    """Whether the connection's transaction has failed; asks the server, if there ever was an error."""
    if connection not in _errors:
        return False
    try:
        connection.exec_driver_sql("SELECT 1")
    except sa.exc.DBAPIError as error:
        return sqlstate(error) == IN_FAILED_TRANSACTION
    _errors.discard(connection)
    return False


def _handle_error(context: sa.ExceptionContext) -> None:
    connection = context.connection
    if connection is None:
        return
    if context.dialect.driver == "asyncpg":
        _errors.add(connection)
    for write in _writes(_prepared.pop(connection, ())):  # it is prepared still
        write.ending = Ending.PAST_US
    committing = _committing.pop(connection, ())
    error = context.sqlalchemy_exception
    # A COMMIT is no statement; an error of a statement is of the next transaction.
    is_answer = error is not None and context.statement is None and not context.is_disconnect
    if is_answer and error is not None and sqlstate(error) is not None:
        for write in _writes(committing):  # the server's own word: it has rolled back instead
            write.ending = Ending.ROLLBACK_SENT


def _before_cursor_execute(
    connection: sa.Connection, _cursor: Any, statement: str, parameters: Any, _context: Any, _many: bool
) -> tuple[str, Any]:
    if statement[:1] not in "SIUDWsiudw":  # most are ruled out by their first character
        _look_for_ending(connection, statement)
    return statement, parameters


def _look_for_ending(connection: sa.Connection, statement: str) -> None:
    ending = ENDING_STATEMENT.match(statement)
    # PREPARE TRANSACTION is how SQLAlchemy prepares one; its end is told by an event.
    if ending is not None and not ending[1].upper().startswith("PREPARE"):
        references = _open.get(connection, [])
        for write in _writes(references):
            write.ending = Ending.PAST_US
        references.clear()
    elif _ROLLBACK_TO.match(statement):  # nobody knows to where
        for write in _writes(_open.get(connection, ())):
            if write.batch.state is JobState.INSERTED:
                write.batch.end(JobState.UNKNOWN)


def _rollback_savepoint(connection: sa.Connection, name: str, _context: None) -> None:
    references = _open.get(connection, [])
    while references:
        write = references[-1]()
        if write is not None:
            if not _is_within(write.savepoint, name):
                return  # nor is what was written before
            # One of the session tells it too, in a moment. Staged are those that wait for their handler's job.
            if write.batch.state in {JobState.INSERTED, JobState.STAGED}:
                write.batch.end(JobState.DISCARDED)
        references.pop()


def _writes(references: Iterable[weakref.ref[Write]]) -> list[Write]:
    return [write for reference in references if (write := reference()) is not None]


def _is_within(savepoint: sa.NestedTransaction | None, name: str) -> bool:
    """Whether a savepoint is the one of a name, or was set in it. Its name and parent are not documented."""
    while savepoint is not None and savepoint._savepoint != name:
        savepoint = savepoint._previous_nested
    return savepoint is not None


def _commit(connection: sa.Connection, _xid: Any = None, is_prepared: bool = False) -> None:
    _end(connection, Ending.COMMIT_SENT, is_prepared)


def _rollback(connection: sa.Connection, _xid: Any = None, is_prepared: bool = False) -> None:
    _end(connection, Ending.ROLLBACK_SENT, is_prepared)


def _end(connection: sa.Connection, ending: Ending, is_prepared: bool = False) -> None:
    references = _open.pop(connection, None)
    if references is None:
        return
    if is_prepared:
        _prepared[connection] = references
    elif ending is Ending.COMMIT_SENT:
        _committing[connection] = references
    for write in _writes(references):
        # Before it is sent. If the server has none open then, somebody has ended it past SQLAlchemy.
        past_us = write.is_sent and not is_prepared and is_transaction_over(write.driver_connection)
        write.ending = Ending.PAST_US if past_us else ending


_LISTENERS: Final[dict[str, Callable[..., None]]] = {
    "commit": _commit,
    "commit_twophase": _commit,
    "handle_error": _handle_error,
    "rollback": _rollback,
    "rollback_savepoint": _rollback_savepoint,
    "rollback_twophase": _rollback,
}
for _name, _listener in _LISTENERS.items():
    event.listen(sa.Engine, _name, _listener)
# With retval, or SQLAlchemy wraps it in a function of its own: one more call, and nobody's, see enlist._direct.
event.listen(sa.Engine, "before_cursor_execute", _before_cursor_execute, retval=True)
