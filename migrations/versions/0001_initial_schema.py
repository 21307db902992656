"""initial schema"""

import sqlalchemy as sa
from alembic import op

UTC_TIME = sa.DateTime().with_variant(sa.DateTime(timezone=True), "postgresql")

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:

    op.create_table(
        "jobs",
        sa.Column("id", sa.String(length=30), nullable=False),
        sa.Column("name", sa.Text(), nullable=True),
        sa.Column("tags", sa.JSON(), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("spec_hash", sa.Text(), nullable=False),
        sa.Column("idempotency_key", sa.Text(), nullable=True),
        sa.Column("body_hash", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=20), nullable=False),
        sa.Column("outcome", sa.String(length=20), nullable=True),
        sa.Column("closing", sa.String(length=20), nullable=True),
        sa.Column("error_code", sa.Text(), nullable=True),
        sa.Column("error_message", sa.Text(), nullable=True),
        sa.Column("priority", sa.BigInteger(), nullable=False),
        sa.Column("max_attempts", sa.BigInteger(), nullable=False),
        sa.Column("deadline_at", UTC_TIME, nullable=True),
        sa.Column("budget_nanos", sa.BigInteger(), nullable=True),
        sa.Column("step_token", sa.Text(), nullable=True),
        sa.Column("step_worker", sa.Text(), nullable=True),
        sa.Column("step_expires_at", UTC_TIME, nullable=True),
        sa.Column("step_attempts", sa.BigInteger(), nullable=False),
        sa.Column("fingerprint", sa.JSON(), nullable=False),
        sa.Column("warnings", sa.JSON(), nullable=False),
        sa.Column("output", sa.Text(), nullable=True),
        sa.Column("manifest_path", sa.Text(), nullable=True),
        sa.Column("num_shards", sa.BigInteger(), nullable=False),
        sa.Column("open_shards", sa.BigInteger(), nullable=False),
        sa.Column("num_rows", sa.BigInteger(), nullable=True),
        sa.Column("overhead_nanos", sa.BigInteger(), nullable=False),
        sa.Column("retry_generation", sa.BigInteger(), nullable=False),
        sa.Column("created_at", UTC_TIME, nullable=False),
        sa.Column("planned_at", UTC_TIME, nullable=True),
        sa.Column("started_at", UTC_TIME, nullable=True),
        sa.Column("finished_at", UTC_TIME, nullable=True),
        sa.Column("rows_succeeded", sa.BigInteger(), nullable=False),
        sa.Column("rows_errored", sa.BigInteger(), nullable=False),
        sa.Column("rows_expired", sa.BigInteger(), nullable=False),
        sa.Column("rows_cancelled", sa.BigInteger(), nullable=False),
        sa.Column("rows_skipped", sa.BigInteger(), nullable=False),
        sa.Column("rows_deduplicated", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("metered_nanos", sa.BigInteger(), nullable=False),
        sa.Column("list_nanos", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("open_shards >= 0", name=op.f("ck_jobs_open_shards")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
        sa.UniqueConstraint("idempotency_key", name=op.f("uq_jobs_idempotency_key")),
    )
    with op.batch_alter_table("jobs", schema=None) as batch_op:
        batch_op.create_index(
            "ix_jobs_deadline",
            ["deadline_at"],
            unique=False,
            sqlite_where=sa.text("deadline_at IS NOT NULL AND closing IS NULL AND finished_at IS NULL"),
            postgresql_where=sa.text("deadline_at IS NOT NULL AND closing IS NULL AND finished_at IS NULL"),
        )
        batch_op.create_index(
            "ix_jobs_finalize",
            ["id"],
            unique=False,
            sqlite_where=sa.text("state = 'finalizing'"),
            postgresql_where=sa.text("state = 'finalizing'"),
        )
        batch_op.create_index(
            "ix_jobs_plan",
            ["id"],
            unique=False,
            sqlite_where=sa.text("state = 'validating'"),
            postgresql_where=sa.text("state = 'validating'"),
        )
        batch_op.create_index("ix_jobs_state", ["state", "id"], unique=False)

    op.create_table(
        "price_book",
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("valid_from", UTC_TIME, nullable=False),
        sa.Column("input_nanos", sa.BigInteger(), nullable=False),
        sa.Column("cached_input_nanos", sa.BigInteger(), nullable=False),
        sa.Column("output_nanos", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("model", "valid_from", name=op.f("pk_price_book")),
    )
    op.create_table(
        "workers",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("hostname", sa.Text(), nullable=False),
        sa.Column("pid", sa.BigInteger(), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("nanos_per_hour", sa.BigInteger(), nullable=False),
        sa.Column("models", sa.JSON(), nullable=False),
        sa.Column("stats", sa.JSON(), nullable=False),
        sa.Column("started_at", UTC_TIME, nullable=False),
        sa.Column("last_seen_at", UTC_TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_workers")),
    )
    op.create_table(
        "job_events",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("job_id", sa.String(length=30), nullable=False),
        sa.Column("at", UTC_TIME, nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_job_events_job_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_job_events")),
        sqlite_autoincrement=True,
    )
    with op.batch_alter_table("job_events", schema=None) as batch_op:
        batch_op.create_index("ix_job_events_job_id", ["job_id", "id"], unique=False)

    op.create_table(
        "ledger_entries",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("source_id", sa.Text(), nullable=False),
        sa.Column("job_id", sa.String(length=30), nullable=True),
        sa.Column("worker_id", sa.Text(), nullable=True),
        sa.Column("kind", sa.String(length=20), nullable=False),
        sa.Column("device_ns", sa.BigInteger(), nullable=False),
        sa.Column("nanos", sa.BigInteger(), nullable=False),
        sa.Column("list_nanos", sa.BigInteger(), nullable=False),
        sa.Column("created_at", UTC_TIME, nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_ledger_entries_job_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_ledger_entries")),
        sa.UniqueConstraint("source_id", name=op.f("uq_ledger_entries_source_id")),
        sqlite_autoincrement=True,
    )
    with op.batch_alter_table("ledger_entries", schema=None) as batch_op:
        batch_op.create_index("ix_ledger_entries_job_id", ["job_id"], unique=False)

    op.create_table(
        "row_errors",
        sa.Column("job_id", sa.String(length=30), nullable=False),
        sa.Column("row_index", sa.BigInteger(), nullable=False),
        sa.Column("shard_id", sa.BigInteger(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.String(length=20), nullable=False),
        sa.Column("code", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_row_errors_job_id")),
        sa.PrimaryKeyConstraint("job_id", "row_index", name=op.f("pk_row_errors")),
    )
    with op.batch_alter_table("row_errors", schema=None) as batch_op:
        batch_op.create_index("ix_row_errors_shard_id", ["shard_id"], unique=False)

    op.create_table(
        "shards",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("job_id", sa.String(length=30), nullable=False),
        sa.Column("shard_index", sa.BigInteger(), nullable=False),
        sa.Column("row_start", sa.BigInteger(), nullable=False),
        sa.Column("row_end", sa.BigInteger(), nullable=False),
        sa.Column("est_tokens", sa.BigInteger(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=20), nullable=False),
        sa.Column("queue", sa.Text(), nullable=True),
        sa.Column("turn", sa.BigInteger(), nullable=False),
        sa.Column("rank", sa.BigInteger(), nullable=False),
        sa.Column("deadline_key", UTC_TIME, nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("retry_statuses", sa.JSON(), nullable=False),
        sa.Column("todo_rows", sa.BigInteger(), nullable=False),
        sa.Column("done_rows", sa.BigInteger(), nullable=False),
        sa.Column("num_attempts", sa.BigInteger(), nullable=False),
        sa.Column("num_failures", sa.BigInteger(), nullable=False),
        sa.Column("num_faults", sa.BigInteger(), nullable=False),
        sa.Column("retry_at", UTC_TIME, nullable=True),
        sa.Column("probe_rows", sa.BigInteger(), nullable=True),
        sa.Column("poisoned_rows", sa.JSON(), nullable=False),
        sa.Column("result_path", sa.Text(), nullable=True),
        sa.Column("result_rows", sa.BigInteger(), nullable=True),
        sa.Column("result_bytes", sa.BigInteger(), nullable=True),
        sa.Column("result_sha256", sa.Text(), nullable=True),
        sa.Column("rows_succeeded", sa.BigInteger(), nullable=False),
        sa.Column("rows_errored", sa.BigInteger(), nullable=False),
        sa.Column("rows_expired", sa.BigInteger(), nullable=False),
        sa.Column("rows_cancelled", sa.BigInteger(), nullable=False),
        sa.Column("rows_skipped", sa.BigInteger(), nullable=False),
        sa.Column("rows_deduplicated", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("done_rows <= todo_rows", name=op.f("ck_shards_done")),
        sa.CheckConstraint("row_start < row_end", name=op.f("ck_shards_rows")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_shards_job_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_shards")),
        sqlite_autoincrement=True,
    )
    with op.batch_alter_table("shards", schema=None) as batch_op:
        batch_op.create_index(
            "ix_shards_claim",
            ["turn", "rank", "deadline_key", "job_id", "shard_index"],
            unique=False,
            sqlite_where=sa.text("state = 'pending' AND queue IS NOT NULL"),
            postgresql_where=sa.text("state = 'pending' AND queue IS NOT NULL"),
        )
        batch_op.create_index(
            "ix_shards_queue",
            ["queue", "model"],
            unique=False,
            sqlite_where=sa.text("state = 'pending' AND queue IS NOT NULL"),
            postgresql_where=sa.text("state = 'pending' AND queue IS NOT NULL"),
        )
        batch_op.create_index("uq_shards_job_id_shard_index", ["job_id", "shard_index"], unique=True)

    op.create_table(
        "attempts",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("job_id", sa.String(length=30), nullable=False),
        sa.Column("shard_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("worker_id", sa.Text(), nullable=False),
        sa.Column("mode", sa.String(length=20), nullable=False),
        sa.Column("state", sa.String(length=20), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("probe_rows", sa.BigInteger(), nullable=True),
        sa.Column("probe_row", sa.BigInteger(), nullable=True),
        sa.Column("done_rows", sa.BigInteger(), nullable=False),
        sa.Column("metered_ns", sa.BigInteger(), nullable=False),
        sa.Column("device_ns", sa.BigInteger(), nullable=False),
        sa.Column("nanos_per_hour", sa.BigInteger(), nullable=False),
        sa.Column("started_at", UTC_TIME, nullable=False),
        sa.Column("ended_at", UTC_TIME, nullable=True),
        sa.Column("lease_expires_at", UTC_TIME, nullable=False),
        sa.Column("result_path", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_attempts_job_id")),
        sa.ForeignKeyConstraint(["shard_id"], ["shards.id"], name=op.f("fk_attempts_shard_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_attempts")),
        sqlite_autoincrement=True,
    )
    with op.batch_alter_table("attempts", schema=None) as batch_op:
        batch_op.create_index(
            "ix_attempts_expiry",
            ["lease_expires_at"],
            unique=False,
            sqlite_where=sa.text("state = 'running'"),
            postgresql_where=sa.text("state = 'running'"),
        )
        batch_op.create_index("ix_attempts_job_id", ["job_id"], unique=False)
        batch_op.create_index(
            "uq_attempts_running",
            ["shard_id"],
            unique=True,
            sqlite_where=sa.text("state = 'running'"),
            postgresql_where=sa.text("state = 'running'"),
        )

    op.create_table(
        "parts",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("job_id", sa.String(length=30), nullable=False),
        sa.Column("shard_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("attempt_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("num_rows", sa.BigInteger(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("device_ns", sa.BigInteger(), nullable=False),
        sa.Column("replaced", sa.JSON(), nullable=False),
        sa.Column("created_at", UTC_TIME, nullable=False),
        sa.Column("rows_succeeded", sa.BigInteger(), nullable=False),
        sa.Column("rows_errored", sa.BigInteger(), nullable=False),
        sa.Column("rows_expired", sa.BigInteger(), nullable=False),
        sa.Column("rows_cancelled", sa.BigInteger(), nullable=False),
        sa.Column("rows_skipped", sa.BigInteger(), nullable=False),
        sa.Column("rows_deduplicated", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("metered_nanos", sa.BigInteger(), nullable=False),
        sa.Column("list_nanos", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name=op.f("fk_parts_attempt_id")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_parts_job_id")),
        sa.ForeignKeyConstraint(["shard_id"], ["shards.id"], name=op.f("fk_parts_shard_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_parts")),
        sqlite_autoincrement=True,
    )
    with op.batch_alter_table("parts", schema=None) as batch_op:
        batch_op.create_index("ix_parts_shard_id", ["shard_id", "generation"], unique=False)
        batch_op.create_index("uq_parts_attempt_id_path", ["attempt_id", "path"], unique=True)


def downgrade() -> None:

    with op.batch_alter_table("parts", schema=None) as batch_op:
        batch_op.drop_index("uq_parts_attempt_id_path")
        batch_op.drop_index("ix_parts_shard_id")

    op.drop_table("parts")
    with op.batch_alter_table("attempts", schema=None) as batch_op:
        batch_op.drop_index(
            "uq_attempts_running",
            sqlite_where=sa.text("state = 'running'"),
            postgresql_where=sa.text("state = 'running'"),
        )
        batch_op.drop_index("ix_attempts_job_id")
        batch_op.drop_index(
            "ix_attempts_expiry",
            sqlite_where=sa.text("state = 'running'"),
            postgresql_where=sa.text("state = 'running'"),
        )

    op.drop_table("attempts")
    with op.batch_alter_table("shards", schema=None) as batch_op:
        batch_op.drop_index("uq_shards_job_id_shard_index")
        batch_op.drop_index(
            "ix_shards_queue",
            sqlite_where=sa.text("state = 'pending' AND queue IS NOT NULL"),
            postgresql_where=sa.text("state = 'pending' AND queue IS NOT NULL"),
        )
        batch_op.drop_index(
            "ix_shards_claim",
            sqlite_where=sa.text("state = 'pending' AND queue IS NOT NULL"),
            postgresql_where=sa.text("state = 'pending' AND queue IS NOT NULL"),
        )

    op.drop_table("shards")
    with op.batch_alter_table("row_errors", schema=None) as batch_op:
        batch_op.drop_index("ix_row_errors_shard_id")

    op.drop_table("row_errors")
    with op.batch_alter_table("ledger_entries", schema=None) as batch_op:
        batch_op.drop_index("ix_ledger_entries_job_id")

    op.drop_table("ledger_entries")
    with op.batch_alter_table("job_events", schema=None) as batch_op:
        batch_op.drop_index("ix_job_events_job_id")

    op.drop_table("job_events")
    op.drop_table("workers")
    op.drop_table("price_book")
    with op.batch_alter_table("jobs", schema=None) as batch_op:
        batch_op.drop_index("ix_jobs_state")
        batch_op.drop_index(
            "ix_jobs_plan",
            sqlite_where=sa.text("state = 'validating'"),
            postgresql_where=sa.text("state = 'validating'"),
        )
        batch_op.drop_index(
            "ix_jobs_finalize",
            sqlite_where=sa.text("state = 'finalizing'"),
            postgresql_where=sa.text("state = 'finalizing'"),
        )
        batch_op.drop_index(
            "ix_jobs_deadline",
            sqlite_where=sa.text("deadline_at IS NOT NULL AND closing IS NULL AND finished_at IS NULL"),
            postgresql_where=sa.text("deadline_at IS NOT NULL AND closing IS NULL AND finished_at IS NULL"),
        )

    op.drop_table("jobs")
