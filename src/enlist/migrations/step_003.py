"""Step 3: ordered concurrency keys, the keys of a queue, rate limits; indexes that are told apart."""

from __future__ import annotations

from typing import Final

STATEMENTS: Final = (
    # A constant default: no row is rewritten. The checks read the table once.
    """
    ALTER TABLE {schema}enlist_job
        ADD COLUMN IF NOT EXISTS ordered BOOLEAN DEFAULT false NOT NULL,
        DROP CONSTRAINT IF EXISTS enlist_job_ordered_check,
        ADD CONSTRAINT enlist_job_ordered_check CHECK (
            NOT ordered OR (concurrency_key IS NOT NULL AND concurrency_limit = 1)
        ),
        DROP CONSTRAINT IF EXISTS enlist_job_slot_check,
        ADD CONSTRAINT enlist_job_slot_check CHECK (
            (status = 'running' AND concurrency_key IS NOT NULL) = (concurrency_slot IS NOT NULL)
            AND concurrency_slot BETWEEN 1 AND concurrency_limit
        )
    """,
    # Predicates that tell the indexes apart, whatever the planner knows of the table.
    "DROP INDEX IF EXISTS {schema}enlist_job_ready_key",
    """
    CREATE INDEX enlist_job_ready_key
    ON {schema}enlist_job (queue, priority DESC, run_at, id)
    WHERE status = 'queued' AND concurrency_limit IS NOT NULL
    """,
    "DROP INDEX IF EXISTS {schema}enlist_job_lease",
    """
    CREATE INDEX enlist_job_lease
    ON {schema}enlist_job (locked_until)
    WHERE status = 'running' AND locked_until IS NOT NULL
    """,
    "DROP INDEX IF EXISTS {schema}enlist_job_slot",
    """
    CREATE UNIQUE INDEX enlist_job_slot
    ON {schema}enlist_job (concurrency_key, concurrency_slot)
    WHERE status = 'running' AND concurrency_slot IS NOT NULL
    """,
    """
    CREATE INDEX IF NOT EXISTS enlist_job_queue_key
    ON {schema}enlist_job (queue, concurrency_key, priority DESC, run_at, id)
    WHERE status = 'queued' AND concurrency_key IS NOT NULL
    """,
    "DROP INDEX IF EXISTS {schema}enlist_job_key",
    """
    CREATE INDEX IF NOT EXISTS enlist_job_ordered
    ON {schema}enlist_job (concurrency_key, created_at, id)
    WHERE ordered AND status IN ('queued', 'running')
    """,
    """
    CREATE TABLE IF NOT EXISTS {schema}enlist_job_rate (
        queue TEXT NOT NULL,
        free_at TIMESTAMP WITH TIME ZONE DEFAULT '-infinity' NOT NULL,
        PRIMARY KEY (queue)
    )
    """,
)
