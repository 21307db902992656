"""Indexes of finished jobs' rows, and what reusing them saved."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

SAVED = ("saved_nanos", "saved_list_nanos")


def upgrade() -> None:
    for table in ("jobs", "parts"):
        for column in SAVED:
            op.add_column(table, sa.Column(column, sa.BigInteger(), nullable=False, server_default="0"))
    op.create_table(
        "key_indexes",
        sa.Column("job_id", sa.String(30), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("scope", sa.String(64), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("num_rows", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime().with_variant(sa.DateTime(timezone=True), "postgresql"), nullable=False),
        sa.PrimaryKeyConstraint("job_id", name="pk_key_indexes"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_key_indexes_job_id"),
    )
    op.create_index("ix_key_indexes_scope", "key_indexes", ["tenant_id", "scope", "created_at"])


def downgrade() -> None:
    op.drop_table("key_indexes")
    for table in ("jobs", "parts"):
        for column in SAVED:
            op.drop_column(table, column)
