"""Bring the job queue's tables to step 4.

Revision ID: 0004
Revises: 0003
"""

from __future__ import annotations

from alembic import op

from enlist.migrations import migrate

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    migrate(op.get_bind(), to=4)


def downgrade() -> None:
    raise NotImplementedError("enlist's schema steps are not undone: drop its tables by hand if you mean it")
