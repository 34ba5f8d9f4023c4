"""What is known of a handler's session while its attempt lasts, and what its connections refuse meanwhile."""

from __future__ import annotations

import re
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeVar

import sqlalchemy as sa
from sqlalchemy import event

from enlist._driver import is_transaction_over
from enlist._staging import RUNNING
from enlist._transactions import ENDING_STATEMENT
from enlist.exceptions import CommitRefused, TransactionAborted

if TYPE_CHECKING:
    import datetime as dt
    import uuid
    from collections.abc import Callable, Mapping

    from sqlalchemy.orm import Session, SessionTransaction

    from enlist._deferred import Deferred
    from enlist._slots import Run
    from enlist._statements import Statements
    from enlist.models import JobRecordMixin

__all__ = ["GUARDS", "Guard"]

T = TypeVar("T")

LASTING: Final = re.compile(
    r"\bset_config\b|(?:^|;)\s*(?:/\*.*?\*/\s*|--[^\n]*\n\s*)*"
    r"(?:set\b|savepoint\s+(?!sa_savepoint_)|create\s+(?:(?:local|global)\s+)?temp)",
    re.IGNORECASE | re.DOTALL,
)
"""What lasts as long as the transaction and is for the job alone that sends it: ``SET LOCAL``, a savepoint by its name,
a temporary table."""

REMEMBERED_CHARACTERS: Final = 2000
"""Of statements up to this length it is remembered what they are: most come again and again."""


def _remembering(read: Callable[[str], T]) -> Callable[[str], T]:
    known = lru_cache(maxsize=200)(read)

    def reading(statement: str) -> T:
        return known(statement) if len(statement) <= REMEMBERED_CHARACTERS else read(statement)

    return reading


@_remembering
def _ending(statement: str) -> str | None:
    """The word by which a statement ends the transaction, if it does."""
    found = ENDING_STATEMENT.match(statement)
    return None if found is None else found[1]


@_remembering
def _lasts(statement: str) -> bool:
    return LASTING.search(statement) is not None


SNAPSHOT_LEVELS: Final = frozenset({"REPEATABLE READ", "SERIALIZABLE"})


class Guard:
    """What is known of a handler's session during one attempt, or one after the other of a group."""

    # The class's, since few attempts change any of them, and each makes a guard.
    locked = False
    """The row's lock is held until the transaction ends."""
    base: SessionTransaction | None = None
    """With savepoints: the one that the handler takes for its transaction."""
    alone = False
    """None may follow: what the last has done to the transaction is not for the next."""
    ours = False
    """enlist itself is ending the transaction now."""
    over = False
    """The attempt has ended without a transaction, and the session may not begin one any more."""
    committing = False
    """The COMMIT with the job's status was begun: whatever is raised then, it may have landed."""
    used = False
    """A transaction was begun at some time: the attempt's effects may be in it."""
    begun_with: Mapping[str, Any] = MappingProxyType({})
    """What a handler may set in the session of a group, as it was."""
    deferred: Deferred | None = None
    """What earlier jobs of the group have added and is not inserted yet."""
    broken: str | None = None
    """How the handler ended the transaction, if it did."""
    spoken: frozenset[sa.Connection] = frozenset()
    """The connections that statements were sent on: only then the server has begun a transaction."""
    roots: tuple[tuple[sa.Connection, sa.RootTransaction | None], ...] = ()

    def __init__(
        self,
        statements: Statements,
        record: type[JobRecordMixin],
        run: Run,
        *,
        lease: dt.timedelta,
        isolation: str | None = None,
    ) -> None:
        """:param isolation: the level that the session's transactions have if nothing else says so."""
        self.statements = statements
        self.record = record
        self.job_id = run.id
        self.token = run.token
        self.isolation = isolation
        self._lease = lease
        self._hold_lock = run.handler.hold_lock
        self.savepoints = run.handler.on_commit == "savepoint"
        """A commit of the handler's is a savepoint."""
        self.grouped = run.handler.commit_every > 1
        """Other jobs may follow in the transaction."""
        self.flushes_together = run.handler.flush == "group"
        """What they add is inserted together."""
        self.always = run.handler.complete == "commit"
        """To be committed even if the handler has not used it."""

    @property
    def idle_limit(self) -> str:
        """How long the transaction may idle where it holds the row's lock, as PostgreSQL takes it."""
        return f"{max(1, int(self._lease.total_seconds() * 1000))}ms"

    def refuse(self, verb: str) -> CommitRefused:
        self.broken = self.broken or verb
        return CommitRefused(
            f"the handler called {verb} on its session, which enlist commits together with the job's status;"
            " leave it to enlist: return to commit, raise to roll back, use begin_nested() for a savepoint"
        )

    def refuse_ending_statement(self, connection: sa.Connection, statement: str) -> None:
        """Refuse SQL text that would end the transaction behind SQLAlchemy's back.

        What could not be seen beforehand (several statements in one text, the driver's own commit) is noticed now:
        the driver would begin another transaction with this statement.
        """
        if self.ours:
            return
        if connection in self.spoken and is_transaction_over(connection.connection.driver_connection):
            raise self.refuse("COMMIT or ROLLBACK on the driver's connection")
        if connection not in self.spoken:
            self.spoken |= {connection}
        if (ending := _ending(statement)) is not None:
            raise self.refuse(ending)
        if self.grouped and _lasts(statement):
            self.alone = True

    def insert_deferred(self) -> None:
        """Insert what earlier jobs of the group have added, before anybody looks.

        :raises TransactionAborted: it cannot be done: each job is to run by itself.
        """
        if self.deferred is None:
            return
        try:
            self.deferred.insert()
        except TransactionAborted as error:
            self.broken = self.broken or str(error)
            raise

    def follow(self, session: Session, job_id: uuid.UUID, token: int) -> None:
        """Go on to another job of a group, in the same transaction."""
        self.job_id, self.token = job_id, token
        session.info[RUNNING] = job_id

    def check_roots(self) -> None:
        """Notice a transaction that was ended by SQL, or on the driver's connection.

        Before anything else is sent: the driver would begin another with it.

        :raises CommitRefused: it was.
        """
        for used, root in self.roots:
            open_here = root is not None and root.is_active and used.get_transaction() is root
            if open_here and used in self.spoken and is_transaction_over(used.connection.driver_connection):
                raise self.refuse("COMMIT or ROLLBACK on the driver's connection")

    def check_connections(self) -> None:
        """Notice a transaction that was ended by a method of the connection.

        :raises CommitRefused: it was.
        """
        for used, root in self.roots:
            if root is None or not root.is_active or used.get_transaction() is not root:
                raise self.refuse("commit() or rollback() of the connection")

    def forget(self) -> None:
        """Let go of the connections, when the attempt is over."""
        for connection, _ in self.roots:
            GUARDS.pop(connection, None)

    def holds_lock(self, connection: sa.Connection) -> bool:
        """Whether the row must be locked for the whole transaction."""
        level = connection.get_execution_options().get("isolation_level", self.isolation) or ""
        return self._hold_lock or level.replace("_", " ").upper() in SNAPSHOT_LEVELS


GUARDS: Final[dict[sa.Connection, Guard]] = {}
"""Of the connections that handlers' sessions have; until :meth:`Guard.forget`."""


def _refusing(connection: sa.Connection) -> Guard | None:
    """The guard that refuses what ends the transaction of a connection now."""
    guard = GUARDS.get(connection)
    return None if guard is None or guard.ours else guard


# Each of these is on the class, once: a listener for each connection takes 18 us. What refuses a commit rolls back
# first: SQLAlchemy takes the transaction to be over then, and would give the connection back in it.


# With retval, or SQLAlchemy wraps it in a function of its own: one more call, and nobody's, see enlist._direct.
@event.listens_for(sa.Engine, "before_cursor_execute", retval=True)
def _refuse_ending_statement(
    connection: sa.Connection, _cursor: Any, statement: str, parameters: Any, _context: Any, _many: bool
) -> tuple[str, Any]:
    """Refuse ``session.execute(text("COMMIT"))``."""
    if (guard := GUARDS.get(connection)) is not None and not guard.ours:
        guard.insert_deferred()
        guard.refuse_ending_statement(connection, statement)
    return statement, parameters


@event.listens_for(sa.Engine, "commit")
def _refuse_commit(connection: sa.Connection) -> None:
    """Refuse ``session.connection().commit()``."""
    if (guard := _refusing(connection)) is not None:
        connection.dialect.do_rollback(connection.connection)
        raise guard.refuse("commit() of the connection")


@event.listens_for(sa.Engine, "commit_twophase")
def _refuse_commit_in_two_phases(connection: sa.Connection, xid: object, is_prepared: bool) -> None:
    """Refuse the same of a session in two phases."""
    if (guard := _refusing(connection)) is not None:
        connection.dialect.do_rollback_twophase(connection, xid, is_prepared)
        raise guard.refuse("commit() of the connection")


@event.listens_for(sa.Engine, "prepare_twophase")
def _refuse_prepare(connection: sa.Connection, _xid: object) -> None:
    """Refuse the first of the two phases."""
    if (guard := _refusing(connection)) is not None:
        raise guard.refuse("prepare() of the connection")
