"""Step 2: how long a job holds its unique key."""

from __future__ import annotations

from typing import Final

STATEMENTS: Final = (
    # Columns without a default: no row is rewritten. NULL is what rows made before mean, "pruned".
    """
    ALTER TABLE {schema}enlist_job
        ADD COLUMN IF NOT EXISTS unique_until TEXT
            CONSTRAINT enlist_job_until_check CHECK (unique_until IN ('started', 'finished', 'pruned')),
        ADD COLUMN IF NOT EXISTS unique_hold_until TIMESTAMP WITH TIME ZONE
    """,
)
