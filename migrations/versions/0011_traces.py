"""The trace that a job's work belongs to."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("traceparent", sa.String(64), nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "traceparent")
