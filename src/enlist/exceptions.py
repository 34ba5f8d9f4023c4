"""Every error enlist raises on purpose. A class's docstring is its meaning.

All derive from :class:`EnlistError`. A message names the value that was refused, the limit it broke and what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy.exc import DontWrapMixin

if TYPE_CHECKING:
    import uuid

__all__ = [
    "CommitRefused",
    "ConfigurationError",
    "EnlistError",
    "HandlerError",
    "HandlerTimeout",
    "InvalidOption",
    "LeaseLost",
    "PayloadError",
    "PayloadMismatch",
    "SchemaError",
    "SessionError",
    "TransactionAborted",
    "UniqueKeyContended",
]


class EnlistError(DontWrapMixin, Exception):
    """Base of every error that enlist raises on purpose."""

    # DontWrapMixin: raised while SQLAlchemy executes a statement or flushes, it comes out as it is, not inside a
    # StatementError.


class ConfigurationError(EnlistError):
    """A worker, repository or command line was set up in a way that cannot work; found at the start."""


class InvalidOption(EnlistError, ValueError):
    """An option of a call (queue, priority, run_at, key, limit, status, ...) is outside of what it may be.

    Raised at the call, before any SQL: the caller's transaction stays usable. By the flush where only that can tell: a
    late payload is of an ordered class and has no key, or kinds that share a key do not agree on being ordered.
    """


class PayloadError(EnlistError, ValueError):
    """A payload cannot be stored or read back without loss; the message has the path, ``payload.items[3].name``.

    Raised by ``enqueue`` before any SQL. For a late payload it is raised by the flush and names the file and line
    of the ``enqueue`` call. On a worker it means that what is stored cannot be read, see :class:`PayloadMismatch`.
    """


class PayloadMismatch(PayloadError):
    """A stored payload does not fit its handler's class: another version of it wrote the job, or ``upgrade`` failed.

    The message names the fields and both versions, never a value. What becomes of the job: see ``on_mismatch`` of
    ``HandlerRegistry.handler``. One of a newer version is put back for a worker that knows it.
    """

    def __init__(self, message: str, version: int = 1, stored_version: int = 1) -> None:
        super().__init__(message)
        self.version = version
        """That of the handler's payload class."""
        self.stored_version = stored_version
        """That of the class which wrote the job."""


class SessionError(EnlistError):
    """The session cannot carry a job: it commits by itself (AUTOCOMMIT), or has no bind for enlist's table.

    Raised by ``commit()``: its transaction has failed or was ended behind its back, and jobs would be lost in silence.
    """


class UniqueKeyContended(EnlistError):
    """A unique key was held at each try to insert, and free at each look for its holder; retry the transaction.

    It takes other sessions that end and start jobs of this key within milliseconds. Raised by the flush.
    """


class SchemaError(EnlistError):
    """The database has no enlist tables, or not as this release needs them: another step, a trigger that eats rows."""


class HandlerError(EnlistError, TypeError):
    """A handler was registered twice for a kind, or its signature does not fit; raised by the decorator."""


class CommitRefused(EnlistError):
    """A handler called ``commit``, ``begin``, ``rollback`` or ``close`` on the session that enlist commits.

    The verb is in the message. The attempt fails: its effects and its status must be one commit.
    """


class TransactionAborted(EnlistError):
    """A handler returned though its transaction had already failed: an SQL error was swallowed.

    PostgreSQL would answer the COMMIT with a silent ROLLBACK, so the attempt is failed instead.
    """


class HandlerTimeout(EnlistError, TimeoutError):
    """A handler ran longer than its ``timeout``."""


class LeaseLost(EnlistError):
    """The job's lease ended and the job is no longer this worker's: nothing of this run is committed."""

    def __init__(self, job_id: uuid.UUID, token: int | None = None) -> None:
        super().__init__(f"job {job_id}: its lease was lost, the effects of this run are rolled back")
        self.job_id = job_id
        self.token = token
        """The lease token of this run, where several jobs share a transaction."""
