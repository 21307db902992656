"""Uploaded files, and the batches of the OpenAI door."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

TIME = sa.DateTime().with_variant(sa.DateTime(timezone=True), "postgresql")


def upgrade() -> None:
    op.create_table(
        "files",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("filename", sa.Text(), nullable=False),
        sa.Column("purpose", sa.String(20), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("location", sa.Text(), nullable=False),
        sa.Column("job_id", sa.String(30), nullable=True),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("expires_at", TIME, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_files"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_files_job_id"),
    )
    op.create_index("ix_files_tenant_id", "files", ["tenant_id", "id"])
    op.create_index("ix_files_sha256", "files", ["tenant_id", "sha256"])
    condition = sa.text("expires_at IS NOT NULL")
    op.create_index("ix_files_expires_at", "files", ["expires_at"], sqlite_where=condition, postgresql_where=condition)
    op.create_table(
        "file_uses",
        sa.Column("file_id", sa.String(40), nullable=False),
        sa.Column("job_id", sa.String(30), nullable=False),
        sa.PrimaryKeyConstraint("file_id", "job_id", name="pk_file_uses"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_file_uses_job_id"),
    )
    op.create_table(
        "batches",
        sa.Column("job_id", sa.String(30), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("endpoint", sa.String(40), nullable=False),
        sa.Column("input_file_id", sa.String(40), nullable=False),
        sa.Column("completion_window", sa.String(20), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("labels", sa.JSON(), nullable=False),
        sa.Column("output_expires_s", sa.BigInteger(), nullable=True),
        sa.Column("faults", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", name="pk_batches"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_batches_job_id"),
    )
    op.create_index("ix_batches_tenant_id", "batches", ["tenant_id", "job_id"])


def downgrade() -> None:
    for table in ("batches", "file_uses", "files"):
        op.drop_table(table)
