"""Bring the job queue's tables to step 2.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

from alembic import op

from enlist.migrations import migrate

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    migrate(op.get_bind(), to=2)


def downgrade() -> None:
    raise NotImplementedError("enlist's schema steps are not undone: drop its tables by hand if you mean it")
