"""Bring the job queue's tables to step 3.

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

from alembic import op

from enlist.migrations import migrate

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    migrate(op.get_bind(), to=3)


def downgrade() -> None:
    raise NotImplementedError("enlist's schema steps are not undone: drop its tables by hand if you mean it")
