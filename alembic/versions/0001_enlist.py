"""Add the job queue's tables, at step 1.

Revision ID: 0001
Revises:
"""

from __future__ import annotations

from alembic import op

from enlist.migrations import migrate

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    migrate(op.get_bind(), to=1)


def downgrade() -> None:
    raise NotImplementedError("enlist's schema steps are not undone: drop its tables by hand if you mean it")
