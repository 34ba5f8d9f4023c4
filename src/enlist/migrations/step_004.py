"""Step 4: the version of a payload's class."""

from __future__ import annotations

from typing import Final

STATEMENTS: Final = (
    # A constant default, and no check: neither is a row rewritten nor the table scanned, so the lock is held for a
    # moment. Workers and producers of releases before don't know the column; what they write is version 1.
    """
    ALTER TABLE {schema}enlist_job
        ADD COLUMN IF NOT EXISTS payload_version SMALLINT DEFAULT '1' NOT NULL
    """,
)
