"""Step 1: the job table."""

from __future__ import annotations

from typing import Final

STATEMENTS: Final = (
    """
    CREATE TABLE IF NOT EXISTS {schema}enlist_job (
        id UUID NOT NULL,
        kind TEXT NOT NULL,
        queue TEXT DEFAULT 'default' NOT NULL,
        status TEXT DEFAULT 'queued' NOT NULL,
        attempt INTEGER DEFAULT '0' NOT NULL,
        max_attempts INTEGER DEFAULT '20' NOT NULL,
        lost INTEGER DEFAULT '0' NOT NULL,
        priority SMALLINT DEFAULT '0' NOT NULL,
        payload JSONB DEFAULT '{}' NOT NULL,
        unique_key TEXT,
        unique_held BOOLEAN DEFAULT false NOT NULL,
        concurrency_key TEXT,
        concurrency_limit SMALLINT,
        concurrency_slot SMALLINT,
        lease_token BIGINT DEFAULT '0' NOT NULL,
        locked_by TEXT,
        locked_until TIMESTAMP WITH TIME ZONE,
        run_at TIMESTAMP WITH TIME ZONE DEFAULT statement_timestamp() NOT NULL,
        created_at TIMESTAMP WITH TIME ZONE DEFAULT statement_timestamp() NOT NULL,
        started_at TIMESTAMP WITH TIME ZONE,
        finished_at TIMESTAMP WITH TIME ZONE,
        last_error TEXT,
        errors JSONB DEFAULT '[]' NOT NULL,
        meta JSONB DEFAULT '{}' NOT NULL,
        PRIMARY KEY (id),
        CONSTRAINT enlist_job_status_check CHECK (status IN ('queued', 'running', 'done', 'dead', 'cancelled')),
        CONSTRAINT enlist_job_attempt_check CHECK (attempt >= 0 AND max_attempts >= 1 AND lost >= 0),
        CONSTRAINT enlist_job_lease_check CHECK ((status = 'running') = (locked_until IS NOT NULL)),
        CONSTRAINT enlist_job_unique_check CHECK (NOT unique_held OR unique_key IS NOT NULL),
        CONSTRAINT enlist_job_limit_check CHECK (
            concurrency_limit >= 1 AND (concurrency_key IS NULL) = (concurrency_limit IS NULL)
        ),
        CONSTRAINT enlist_job_slot_check CHECK (
            status <> 'running' OR concurrency_key IS NULL
            OR (concurrency_slot IS NOT NULL AND concurrency_slot BETWEEN 1 AND concurrency_limit)
        )
    ) WITH (
        fillfactor = 70,
        autovacuum_vacuum_scale_factor = 0,
        autovacuum_vacuum_threshold = 10000,
        autovacuum_vacuum_insert_scale_factor = 0,
        autovacuum_vacuum_insert_threshold = 50000,
        autovacuum_analyze_scale_factor = 0,
        autovacuum_analyze_threshold = 10000,
        autovacuum_vacuum_cost_delay = 0
    )
    """,
    """
    CREATE INDEX IF NOT EXISTS enlist_job_ready
    ON {schema}enlist_job (queue, priority DESC, run_at, id)
    WHERE status = 'queued' AND concurrency_key IS NULL
    """,
    """
    CREATE INDEX IF NOT EXISTS enlist_job_ready_key
    ON {schema}enlist_job (queue, priority DESC, run_at, id)
    WHERE status = 'queued' AND concurrency_key IS NOT NULL
    """,
    """
    CREATE INDEX IF NOT EXISTS enlist_job_key
    ON {schema}enlist_job (concurrency_key, queue, priority DESC, run_at, id)
    WHERE status = 'queued' AND concurrency_key IS NOT NULL
    """,
    """
    CREATE UNIQUE INDEX IF NOT EXISTS enlist_job_slot
    ON {schema}enlist_job (concurrency_key, concurrency_slot)
    WHERE status = 'running' AND concurrency_key IS NOT NULL
    """,
    """
    CREATE INDEX IF NOT EXISTS enlist_job_lease
    ON {schema}enlist_job (locked_until)
    WHERE status = 'running'
    """,
    """
    CREATE UNIQUE INDEX IF NOT EXISTS enlist_job_unique
    ON {schema}enlist_job (kind, unique_key)
    WHERE unique_held
    """,
)
