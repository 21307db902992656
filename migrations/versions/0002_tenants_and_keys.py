"""Tenants, API keys, and the tenant of each job."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def time(name: str, *, null: bool = False) -> sa.Column:
    return sa.Column(name, sa.DateTime().with_variant(sa.DateTime(timezone=True), "postgresql"), nullable=null)


def upgrade() -> None:
    op.create_table(
        "tenants",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("name", sa.Text(), nullable=True),
        sa.Column("input_roots", sa.JSON(), nullable=False),
        sa.Column("output_roots", sa.JSON(), nullable=False),
        time("created_at"),
        time("disabled_at", null=True),
        sa.PrimaryKeyConstraint("id", name="pk_tenants"),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(16), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=True),
        sa.Column("name", sa.Text(), nullable=True),
        sa.Column("secret_sha256", sa.String(64), nullable=False),
        sa.Column("role", sa.String(20), nullable=False),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("rate_per_minute", sa.BigInteger(), nullable=True),
        time("created_at"),
        time("expires_at", null=True),
        time("revoked_at", null=True),
        time("last_used_at", null=True),
        sa.Column("replaced_by", sa.String(16), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
    )
    op.create_index("ix_api_keys_tenant_id", "api_keys", ["tenant_id", "created_at"])
    # no foreign key: SQLite adds none to a table that has rows, unless the column may be NULL
    op.add_column("jobs", sa.Column("tenant_id", sa.String(40), nullable=False, server_default="default"))
    op.create_index("ix_jobs_tenant_id", "jobs", ["tenant_id", "id"])
    op.create_index("ix_jobs_tenant_id_state", "jobs", ["tenant_id", "state", "id"])


def downgrade() -> None:
    op.drop_index("ix_jobs_tenant_id_state", "jobs")
    op.drop_index("ix_jobs_tenant_id", "jobs")
    op.drop_column("jobs", "tenant_id")
    op.drop_table("api_keys")
    op.drop_table("tenants")
