"""Schedules and their runs."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def time(name: str, *, null: bool = False) -> sa.Column:
    return sa.Column(name, sa.DateTime().with_variant(sa.DateTime(timezone=True), "postgresql"), nullable=null)


def index(name: str, table: str, columns: list[str], where: str | None = None, *, unique: bool = False) -> None:
    condition = None if where is None else sa.text(where)
    op.create_index(name, table, columns, unique=unique, sqlite_where=condition, postgresql_where=condition)


def upgrade() -> None:
    op.create_table(
        "schedules",
        sa.Column("id", sa.String(30), nullable=False),
        sa.Column("tenant_id", sa.String(40), nullable=False, server_default="default"),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("cron", sa.Text(), nullable=False),
        sa.Column("tz", sa.Text(), nullable=False),
        sa.Column("job", sa.JSON(), nullable=False),
        sa.Column("catch_up", sa.String(20), nullable=False),
        sa.Column("overlap", sa.String(20), nullable=False),
        sa.Column("max_active", sa.BigInteger(), nullable=False),
        sa.Column("jitter_seconds", sa.BigInteger(), nullable=False),
        sa.Column("missing_input", sa.String(20), nullable=False),
        sa.Column("wait_seconds", sa.BigInteger(), nullable=False),
        sa.Column("is_paused", sa.BigInteger(), nullable=False),
        time("next_at", null=True),
        time("due_at", null=True),
        time("created_at"),
        sa.PrimaryKeyConstraint("id", name="pk_schedules"),
    )
    op.create_table(
        "schedule_runs",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("schedule_id", sa.String(30), nullable=False),
        time("logical_date"),
        sa.Column("run_id", sa.String(30), nullable=False),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("backfill_id", sa.String(30), nullable=True),
        sa.Column("parallel", sa.BigInteger(), nullable=True),
        sa.Column("run_state", sa.String(20), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("job_id", sa.String(30), nullable=True),
        sa.Column("try_number", sa.BigInteger(), nullable=False),
        time("look_at"),
        time("created_at"),
        time("started_at", null=True),
        time("ended_at", null=True),
        sa.PrimaryKeyConstraint("id", name="pk_schedule_runs"),
        sa.ForeignKeyConstraint(["schedule_id"], ["schedules.id"], name="fk_schedule_runs_schedule_id"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_schedule_runs_job_id"),
        sa.UniqueConstraint("run_id", name="uq_schedule_runs_run_id"),
        sqlite_autoincrement=True,
    )
    index("uq_schedules_tenant_id_name", "schedules", ["tenant_id", "name"], unique=True)
    index("ix_schedules_due_at", "schedules", ["due_at"], "is_paused = 0 AND due_at IS NOT NULL")
    index("uq_schedule_runs_schedule_id_logical_date", "schedule_runs", ["schedule_id", "logical_date"], unique=True)
    index("ix_schedule_runs_look_at", "schedule_runs", ["look_at"], "run_state = 'waiting'")
    index("ix_schedule_runs_open", "schedule_runs", ["schedule_id", "run_state"], "run_state IN ('waiting', 'running')")


def downgrade() -> None:
    op.drop_table("schedule_runs")
    op.drop_table("schedules")
