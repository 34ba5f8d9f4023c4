"""Step 3: ordered concurrency keys, the keys of a queue, and rate limits."""

from __future__ import annotations

from typing import Final

STATEMENTS: Final = (
    # A constant default: no row is rewritten. The check reads the table once.
    """
    ALTER TABLE {schema}enlist_job
        ADD COLUMN IF NOT EXISTS ordered BOOLEAN DEFAULT false NOT NULL,
        DROP CONSTRAINT IF EXISTS enlist_job_ordered_check,
        ADD CONSTRAINT enlist_job_ordered_check CHECK (
            NOT ordered OR (concurrency_key IS NOT NULL AND concurrency_limit = 1)
        )
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
