"""Step 2: how long a job holds its unique key."""

from __future__ import annotations

from typing import Final

STATEMENTS: Final = (
    # Columns without a default, and no check: neither is a row rewritten nor the table scanned. NULL is what rows
    # made before mean, "pruned".
    """
    ALTER TABLE {schema}enlist_job
        ADD COLUMN IF NOT EXISTS unique_until TEXT,
        ADD COLUMN IF NOT EXISTS unique_hold_until TIMESTAMP WITH TIME ZONE
    """,
)
