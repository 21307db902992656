"""The initial schema."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

ROWS = [f"rows_{s}" for s in ("succeeded", "errored", "expired", "cancelled", "skipped", "deduplicated")]
WORK = ["prompt_tokens", "cached_tokens", "completion_tokens", "metered_nanos", "list_nanos"]


def big(*names: str, null: bool = False) -> list[sa.Column]:
    return [sa.Column(name, sa.BigInteger(), nullable=null) for name in names]


def text(*names: str, null: bool = False) -> list[sa.Column]:
    return [sa.Column(name, sa.Text(), nullable=null) for name in names]


def word(*names: str, null: bool = False) -> list[sa.Column]:
    """A state or kind, at most 20 characters."""
    return [sa.Column(name, sa.String(20), nullable=null) for name in names]


def time(*names: str, null: bool = False) -> list[sa.Column]:
    kind = sa.DateTime().with_variant(sa.DateTime(timezone=True), "postgresql")
    return [sa.Column(name, kind, nullable=null) for name in names]


def json(*names: str) -> list[sa.Column]:
    return [sa.Column(name, sa.JSON(), nullable=False) for name in names]


def identity(table: str) -> list[sa.schema.SchemaItem]:
    """A 64-bit id that counts up; SQLite does so only for INTEGER."""
    return [
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=f"pk_{table}"),
    ]


def reference(table: str, column: str, *, null: bool = False) -> list[sa.schema.SchemaItem]:
    """A foreign key: ``job_id`` to ``jobs.id``, and so on."""
    target = column.removesuffix("_id") + "s.id"
    kind = sa.String(30) if column == "job_id" else sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    return [
        sa.Column(column, kind, nullable=null),
        sa.ForeignKeyConstraint([column], [target], name=f"fk_{table}_{column}"),
    ]


def index(name: str, table: str, columns: list[str], where: str | None = None, *, unique: bool = False) -> None:
    condition = None if where is None else sa.text(where)
    op.create_index(name, table, columns, unique=unique, sqlite_where=condition, postgresql_where=condition)


def upgrade() -> None:
    create_jobs()
    create_shards()
    create_attempts_and_parts()
    create_records()
    create_indexes()


def create_jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(30), nullable=False),
        *text("name", null=True),
        *json("tags", "spec"),
        *text("spec_hash"),
        *text("idempotency_key", null=True),
        *text("body_hash", "model"),
        *word("state"),
        *word("outcome", "closing", null=True),
        *text("error_code", "error_message", null=True),
        *big("priority", "max_attempts"),
        *time("deadline_at", null=True),
        *big("budget_nanos", null=True),
        *text("step_token", "step_worker", null=True),
        *time("step_expires_at", null=True),
        *big("step_attempts"),
        *json("fingerprint", "warnings"),
        *text("output", "manifest_path", null=True),
        *big("num_shards", "open_shards"),
        *big("num_rows", null=True),
        *big("overhead_nanos", "retry_generation"),
        *time("created_at"),
        *time("planned_at", "started_at", "finished_at", null=True),
        *big(*ROWS, *WORK),
        sa.CheckConstraint("open_shards >= 0", name=op.f("ck_jobs_open_shards")),
        sa.PrimaryKeyConstraint("id", name="pk_jobs"),
        sa.UniqueConstraint("idempotency_key", name="uq_jobs_idempotency_key"),
    )


def create_shards() -> None:
    op.create_table(
        "shards",
        *identity("shards"),
        *reference("shards", "job_id"),
        *big("shard_index", "row_start", "row_end", "est_tokens"),
        *text("model"),
        *word("state"),
        *text("queue", null=True),
        *big("turn", "rank"),
        *time("deadline_key"),
        *big("generation"),
        *json("retry_statuses"),
        *big("todo_rows", "done_rows", "num_attempts", "num_failures", "num_faults"),
        *time("retry_at", null=True),
        *big("probe_rows", null=True),
        *json("poisoned_rows"),
        *text("result_path", null=True),
        *big("result_rows", "result_bytes", null=True),
        *text("result_sha256", null=True),
        *big(*ROWS),
        sa.CheckConstraint("row_start < row_end", name=op.f("ck_shards_rows")),
        sa.CheckConstraint("done_rows <= todo_rows", name=op.f("ck_shards_done")),
        sqlite_autoincrement=True,
    )


def create_attempts_and_parts() -> None:
    op.create_table(
        "attempts",
        *identity("attempts"),
        *reference("attempts", "job_id"),
        *reference("attempts", "shard_id"),
        *text("worker_id"),
        *word("mode", "state"),
        *big("generation"),
        *big("probe_rows", "probe_row", null=True),
        *big("done_rows", "metered_ns", "device_ns", "nanos_per_hour"),
        *time("started_at"),
        *time("ended_at", null=True),
        *time("lease_expires_at"),
        *text("result_path", "error", null=True),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "parts",
        *identity("parts"),
        *reference("parts", "job_id"),
        *reference("parts", "shard_id"),
        *reference("parts", "attempt_id"),
        *big("generation"),
        *text("path"),
        *big("num_rows", "num_bytes"),
        *text("sha256"),
        *big("device_ns"),
        *json("replaced"),
        *time("created_at"),
        *big(*ROWS, *WORK),
        sqlite_autoincrement=True,
    )


def create_records() -> None:
    op.create_table(
        "row_errors",
        *reference("row_errors", "job_id"),
        *big("row_index", "shard_id", "generation"),
        *word("status"),
        *text("code", "message"),
        sa.PrimaryKeyConstraint("job_id", "row_index", name="pk_row_errors"),
    )
    op.create_table(
        "ledger_entries",
        *identity("ledger_entries"),
        *text("source_id"),
        *reference("ledger_entries", "job_id", null=True),
        *text("worker_id", null=True),
        *word("kind"),
        *big("device_ns", "nanos", "list_nanos"),
        *time("created_at"),
        sa.UniqueConstraint("source_id", name="uq_ledger_entries_source_id"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "price_book",
        *text("model"),
        *time("valid_from"),
        *big("input_nanos", "cached_input_nanos", "output_nanos"),
        sa.PrimaryKeyConstraint("model", "valid_from", name="pk_price_book"),
    )
    op.create_table(
        "workers",
        *text("id", "hostname"),
        *big("pid"),
        *text("device", "version"),
        *big("nanos_per_hour"),
        *json("models", "stats"),
        *time("started_at", "last_seen_at"),
        sa.PrimaryKeyConstraint("id", name="pk_workers"),
    )
    op.create_table(
        "job_events",
        *identity("job_events"),
        *reference("job_events", "job_id"),
        *time("at"),
        *text("kind"),
        *json("data"),
        sqlite_autoincrement=True,
    )


def create_indexes() -> None:
    is_open_deadline = "deadline_at IS NOT NULL AND closing IS NULL AND finished_at IS NULL"
    index("ix_jobs_plan", "jobs", ["id"], "state = 'validating'")
    index("ix_jobs_finalize", "jobs", ["id"], "state = 'finalizing'")
    index("ix_jobs_deadline", "jobs", ["deadline_at"], is_open_deadline)
    index("ix_jobs_state", "jobs", ["state", "id"])

    is_claimable = "state = 'pending' AND queue IS NOT NULL"
    order = ["turn", "rank", "deadline_key", "job_id", "shard_index"]
    index("ix_shards_claim", "shards", order, is_claimable)
    index("ix_shards_queue", "shards", ["queue", "model"], is_claimable)
    index("uq_shards_job_id_shard_index", "shards", ["job_id", "shard_index"], unique=True)

    index("ix_attempts_expiry", "attempts", ["lease_expires_at"], "state = 'running'")
    index("uq_attempts_running", "attempts", ["shard_id"], "state = 'running'", unique=True)
    index("ix_attempts_job_id", "attempts", ["job_id"])

    index("ix_parts_shard_id", "parts", ["shard_id", "generation"])
    index("uq_parts_attempt_id_path", "parts", ["attempt_id", "path"], unique=True)
    index("ix_row_errors_shard_id", "row_errors", ["shard_id"])
    index("ix_ledger_entries_job_id", "ledger_entries", ["job_id"])
    index("ix_job_events_job_id", "job_events", ["job_id", "id"])


def downgrade() -> None:
    for table in ("job_events", "ledger_entries", "row_errors", "parts", "attempts", "shards", "jobs"):
        op.drop_table(table)
    op.drop_table("workers")
    op.drop_table("price_book")
