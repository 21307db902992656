"""Rows that a filter between the stages of a job left out."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("jobs", "shards", "parts"):
        op.add_column(table, sa.Column("rows_filtered", sa.BigInteger(), nullable=False, server_default="0"))


def downgrade() -> None:
    for table in ("jobs", "shards", "parts"):
        op.drop_column(table, "rows_filtered")
