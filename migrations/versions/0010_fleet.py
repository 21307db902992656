"""Fair share between tenants, pools and kinds of hardware, pressure of deadlines; tags and models to look jobs up by."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

CLAIMABLE = sa.text("state = 'pending' AND queue IS NOT NULL")
CLAIM = ["turn", "rank", "deadline_key", "job_id", "shard_index"]
FAIR_CLAIM = ["queue", "needs", "tenant_id", "turn", "pressure", "rank", "fair_key", "job_id", "shard_index"]


def moment() -> sa.types.TypeEngine:
    return sa.DateTime().with_variant(sa.DateTime(timezone=True), "postgresql")


def partial_index(name: str, columns: list[str]) -> None:
    op.create_index(name, "shards", columns, sqlite_where=CLAIMABLE, postgresql_where=CLAIMABLE)


def upgrade() -> None:
    op.add_column("tenants", sa.Column("weight", sa.Double(), nullable=False, server_default="1"))
    op.create_table(
        "tenant_service",
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.Column("usage", sa.Double(), nullable=True),
        sa.Column("fair_key", sa.BigInteger(), nullable=False, server_default="0"),
        sa.PrimaryKeyConstraint("tenant_id", name="pk_tenant_service"),
    )
    op.add_column("workers", sa.Column("serves", sa.JSON(), nullable=True))
    op.add_column("shards", sa.Column("tenant_id", sa.String(40), nullable=False, server_default="default"))
    op.add_column("shards", sa.Column("needs", sa.Text(), nullable=False, server_default=sa.text("''")))
    op.add_column("shards", sa.Column("pressure", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("shards", sa.Column("fair_key", sa.BigInteger(), nullable=False, server_default="0"))
    op.execute(
        "UPDATE shards SET tenant_id = (SELECT jobs.tenant_id FROM jobs WHERE jobs.id = shards.job_id) "
        "WHERE state <> 'committed'"
    )
    op.drop_index("ix_shards_queue", "shards")
    op.drop_index("ix_shards_claim", "shards")
    op.drop_column("shards", "deadline_key")
    partial_index("ix_shards_claim", FAIR_CLAIM)
    partial_index("ix_shards_queue", ["queue", "needs", "model"])
    op.create_table(
        "job_tags",
        sa.Column("job_id", sa.String(30), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_job_tags_job_id"),
        sa.PrimaryKeyConstraint("job_id", "key", name="pk_job_tags"),
    )
    op.create_index("ix_job_tags_key", "job_tags", ["key", "value", "job_id"])
    op.create_index("ix_job_tags_tenant_id", "job_tags", ["tenant_id", "key", "value", "job_id"])
    _copy_tags()
    op.create_index("ix_jobs_model", "jobs", ["model", "id"])
    op.create_index("ix_jobs_name", "jobs", ["name", "id"])
    op.create_index("ix_jobs_tenant_id_model", "jobs", ["tenant_id", "model", "id"])
    op.create_index("ix_jobs_tenant_id_name", "jobs", ["tenant_id", "name", "id"])


def _copy_tags() -> None:
    """One row a tag of the jobs that are there."""
    connection = op.get_bind()
    if connection.dialect.name == "sqlite":
        each, key, value = "json_each(jobs.tags) AS tag", "tag.key", "tag.value"
    else:
        each, key, value = "json_each_text(jobs.tags) AS tag(key, value)", "tag.key", "tag.value"
    connection.execute(
        sa.text(
            f"INSERT INTO job_tags (job_id, key, value, tenant_id) "  # noqa: S608 -- constants
            f"SELECT jobs.id, {key}, {value}, jobs.tenant_id FROM jobs, {each}"
        )
    )


def downgrade() -> None:
    for name in ("ix_jobs_tenant_id_name", "ix_jobs_tenant_id_model", "ix_jobs_name", "ix_jobs_model"):
        op.drop_index(name, "jobs")
    op.drop_table("job_tags")
    op.drop_index("ix_shards_queue", "shards")
    op.drop_index("ix_shards_claim", "shards")
    for name in ("fair_key", "pressure", "needs", "tenant_id"):
        op.drop_column("shards", name)
    op.add_column("shards", sa.Column("deadline_key", moment(), nullable=False, server_default="9999-12-31 00:00:00"))
    partial_index("ix_shards_claim", CLAIM)
    partial_index("ix_shards_queue", ["queue", "model"])
    op.drop_column("workers", "serves")
    op.drop_table("tenant_service")
    op.drop_column("tenants", "weight")
