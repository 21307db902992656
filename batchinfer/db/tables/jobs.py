"""Tables of jobs: the job, its shards, their attempts and parts, and what they cost. No rules live here.

A row of a data set has no row here: shards are row ranges, and counters say how their rows ended.
Columns named ``rows_*`` count rows by :class:`~batchinfer.types.RowStatus`.
"""

from datetime import datetime
from typing import Any

from sqlalchemy import CheckConstraint, ForeignKey, Index, String, text
from sqlalchemy.orm import Mapped, mapped_column

from batchinfer.db.tables.base import Base
from batchinfer.db.types import BigId, SafeText

# Partial indexes: a statement must repeat the condition word for word, with literals, for SQLite to use the index.
CLAIMABLE = text("state = 'pending' AND queue IS NOT NULL")
RUNNING = text("state = 'running'")
WAITS_FOR_PLAN = text("state = 'validating'")
WAITS_FOR_MANIFEST = text("state = 'finalizing'")
HAS_OPEN_DEADLINE = text("deadline_at IS NOT NULL AND closing IS NULL AND finished_at IS NULL")


class CountedRows:
    """Rows by outcome."""

    rows_succeeded: Mapped[int] = mapped_column(default=0)
    rows_errored: Mapped[int] = mapped_column(default=0)
    rows_expired: Mapped[int] = mapped_column(default=0)
    rows_cancelled: Mapped[int] = mapped_column(default=0)
    rows_skipped: Mapped[int] = mapped_column(default=0)
    rows_deduplicated: Mapped[int] = mapped_column(default=0)
    rows_filtered: Mapped[int] = mapped_column(default=0, server_default="0")


class CountedWork:
    """Tokens and money of rows."""

    prompt_tokens: Mapped[int] = mapped_column(default=0)
    cached_tokens: Mapped[int] = mapped_column(default=0)
    completion_tokens: Mapped[int] = mapped_column(default=0)
    metered_nanos: Mapped[int] = mapped_column(default=0)
    list_nanos: Mapped[int] = mapped_column(default=0)
    saved_nanos: Mapped[int] = mapped_column(default=0, server_default="0")
    saved_list_nanos: Mapped[int] = mapped_column(default=0, server_default="0")


class Job(CountedRows, CountedWork, Base):
    """A job: its spec, state and counters."""

    __tablename__ = "jobs"

    id: Mapped[str] = mapped_column(String(30), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(40), server_default="default")
    name: Mapped[str | None] = mapped_column(SafeText)
    tags: Mapped[dict[str, Any]]
    spec: Mapped[dict[str, Any]]
    spec_hash: Mapped[str]
    idempotency_key: Mapped[str | None] = mapped_column(unique=True)
    body_hash: Mapped[str]
    model: Mapped[str]
    state: Mapped[str] = mapped_column(String(20))
    outcome: Mapped[str | None] = mapped_column(String(20))
    closing: Mapped[str | None] = mapped_column(String(20))
    error_code: Mapped[str | None]
    error_message: Mapped[str | None] = mapped_column(SafeText)
    priority: Mapped[int]
    max_attempts: Mapped[int]
    deadline_at: Mapped[datetime | None]
    budget_nanos: Mapped[int | None]
    # the planner's or finalizer's lease
    step_token: Mapped[str | None]
    step_worker: Mapped[str | None]
    step_expires_at: Mapped[datetime | None]
    step_attempts: Mapped[int] = mapped_column(default=0)
    fingerprint: Mapped[dict[str, Any]] = mapped_column(default=dict)
    warnings: Mapped[list[Any]] = mapped_column(default=list)
    engines: Mapped[list[Any] | None]
    output: Mapped[str | None]
    manifest_path: Mapped[str | None]
    num_shards: Mapped[int] = mapped_column(default=0)
    open_shards: Mapped[int] = mapped_column(default=0)
    num_rows: Mapped[int | None]
    overhead_nanos: Mapped[int] = mapped_column(default=0)
    retry_generation: Mapped[int] = mapped_column(default=0)
    model_revision: Mapped[str | None] = mapped_column(String(64))
    drift: Mapped[dict[str, Any] | None]
    traceparent: Mapped[str | None] = mapped_column(String(64))
    created_at: Mapped[datetime]
    planned_at: Mapped[datetime | None]
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]

    __table_args__ = (
        Index("ix_jobs_plan", "id", sqlite_where=WAITS_FOR_PLAN, postgresql_where=WAITS_FOR_PLAN),
        Index("ix_jobs_finalize", "id", sqlite_where=WAITS_FOR_MANIFEST, postgresql_where=WAITS_FOR_MANIFEST),
        Index("ix_jobs_deadline", "deadline_at", sqlite_where=HAS_OPEN_DEADLINE, postgresql_where=HAS_OPEN_DEADLINE),
        Index("ix_jobs_state", "state", "id"),
        Index("ix_jobs_tenant_id", "tenant_id", "id"),
        Index("ix_jobs_tenant_id_state", "tenant_id", "state", "id"),
        Index("ix_jobs_model", "model", "id"),
        Index("ix_jobs_name", "name", "id"),
        Index("ix_jobs_tenant_id_model", "tenant_id", "model", "id"),
        Index("ix_jobs_tenant_id_name", "tenant_id", "name", "id"),
        CheckConstraint("open_shards >= 0", name="open_shards"),
    )


class JobTag(Base):
    """One tag of a job, to look jobs up by; ``jobs.tags`` has the same."""

    __tablename__ = "job_tags"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[str]
    tenant_id: Mapped[str] = mapped_column(String(40))

    __table_args__ = (
        Index("ix_job_tags_key", "key", "value", "job_id"),
        Index("ix_job_tags_tenant_id", "tenant_id", "key", "value", "job_id"),
    )


class Shard(CountedRows, Base):
    """A row range ``[row_start, row_end)`` of a job, leased and committed as one.

    ``queue`` says who may lease it: a model's name, the empty string for everyone (only closing is left), NULL for no
    one (the job is held); after a fault nobody before ``retry_at``. ``needs`` is the pool and the kind of hardware that the
    job asks for. ``turn``, ``pressure`` (of its deadline), ``rank`` (minus the priority) and ``fair_key`` (where it stands
    among its tenant's jobs) are the order of leasing; lower is earlier.
    """

    __tablename__ = "shards"

    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    tenant_id: Mapped[str] = mapped_column(String(40), server_default="default")
    shard_index: Mapped[int]
    row_start: Mapped[int]
    row_end: Mapped[int]
    est_tokens: Mapped[int]
    model: Mapped[str]
    state: Mapped[str] = mapped_column(String(20))
    queue: Mapped[str | None]
    needs: Mapped[str] = mapped_column(default="", server_default=text("''"))
    turn: Mapped[int] = mapped_column(default=1)
    pressure: Mapped[int] = mapped_column(default=0, server_default="0")
    rank: Mapped[int]
    fair_key: Mapped[int] = mapped_column(default=0, server_default="0")
    generation: Mapped[int] = mapped_column(default=0)
    retry_statuses: Mapped[list[Any]] = mapped_column(default=list)
    todo_rows: Mapped[int]
    done_rows: Mapped[int] = mapped_column(default=0)
    num_attempts: Mapped[int] = mapped_column(default=0)
    num_failures: Mapped[int] = mapped_column(default=0)
    num_faults: Mapped[int] = mapped_column(default=0)
    retry_at: Mapped[datetime | None]
    probe_rows: Mapped[int | None]
    poisoned_rows: Mapped[list[Any]] = mapped_column(default=list)
    result_path: Mapped[str | None]
    result_rows: Mapped[int | None]
    result_bytes: Mapped[int | None]
    result_sha256: Mapped[str | None]

    __table_args__ = (
        Index(
            "ix_shards_claim",
            "queue", "needs", "tenant_id", "turn", "pressure", "rank", "fair_key", "job_id", "shard_index",
            sqlite_where=CLAIMABLE, postgresql_where=CLAIMABLE,
        ),
        Index("ix_shards_queue", "queue", "needs", "model", sqlite_where=CLAIMABLE, postgresql_where=CLAIMABLE),
        Index("uq_shards_job_id_shard_index", "job_id", "shard_index", unique=True),
        CheckConstraint("row_start < row_end", name="rows"),
        CheckConstraint("done_rows <= todo_rows", name="done"),
        {"sqlite_autoincrement": True},
    )  # fmt: skip


class Attempt(Base):
    """One lease of a shard. While ``running`` its id is the fencing token; ids are never used again."""

    __tablename__ = "attempts"

    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    shard_id: Mapped[int] = mapped_column(ForeignKey("shards.id"))
    worker_id: Mapped[str]
    mode: Mapped[str] = mapped_column(String(20))
    state: Mapped[str] = mapped_column(String(20))
    generation: Mapped[int]
    probe_rows: Mapped[int | None]
    probe_row: Mapped[int | None]
    done_rows: Mapped[int] = mapped_column(default=0)
    metered_ns: Mapped[int] = mapped_column(default=0)
    device_ns: Mapped[int] = mapped_column(default=0)
    nanos_per_hour: Mapped[int]
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]
    lease_expires_at: Mapped[datetime]
    result_path: Mapped[str | None]
    progress_path: Mapped[str | None]
    error: Mapped[str | None] = mapped_column(SafeText)

    __table_args__ = (
        Index("ix_attempts_expiry", "lease_expires_at", sqlite_where=RUNNING, postgresql_where=RUNNING),
        Index("uq_attempts_running", "shard_id", unique=True, sqlite_where=RUNNING, postgresql_where=RUNNING),
        Index("ix_attempts_job_id", "job_id"),
        {"sqlite_autoincrement": True},
    )


class Part(CountedRows, CountedWork, Base):
    """A checkpointed part file of a shard. In a retry ``replaced`` counts the old outcomes of its rows."""

    __tablename__ = "parts"

    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    shard_id: Mapped[int] = mapped_column(ForeignKey("shards.id"))
    attempt_id: Mapped[int] = mapped_column(ForeignKey("attempts.id"))
    generation: Mapped[int]
    path: Mapped[str]
    num_rows: Mapped[int]
    num_bytes: Mapped[int]
    sha256: Mapped[str]
    device_ns: Mapped[int]
    replaced: Mapped[dict[str, Any]]
    created_at: Mapped[datetime]

    __table_args__ = (
        Index("ix_parts_shard_id", "shard_id", "generation"),
        Index("uq_parts_attempt_id_path", "attempt_id", "path", unique=True),
        {"sqlite_autoincrement": True},
    )


class RowErrorRow(Base):
    """A bounded sample of rows that did not succeed."""

    __tablename__ = "row_errors"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    row_index: Mapped[int] = mapped_column(primary_key=True)
    shard_id: Mapped[int]
    generation: Mapped[int]
    status: Mapped[str] = mapped_column(String(20))
    code: Mapped[str]
    message: Mapped[str] = mapped_column(SafeText)

    __table_args__ = (Index("ix_row_errors_shard_id", "shard_id"),)


class LedgerEntry(Base):
    """Money spent, once a source. Append-only."""

    __tablename__ = "ledger_entries"

    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    source_id: Mapped[str] = mapped_column(unique=True)
    job_id: Mapped[str | None] = mapped_column(ForeignKey("jobs.id"))
    worker_id: Mapped[str | None]
    kind: Mapped[str] = mapped_column(String(20))
    device_ns: Mapped[int]
    nanos: Mapped[int]
    list_nanos: Mapped[int] = mapped_column(default=0)
    created_at: Mapped[datetime]

    __table_args__ = (Index("ix_ledger_entries_job_id", "job_id"), {"sqlite_autoincrement": True})


class PriceRow(Base):
    """A model's list price from a moment on, in nano-dollars per million tokens."""

    __tablename__ = "price_book"

    model: Mapped[str] = mapped_column(primary_key=True)
    valid_from: Mapped[datetime] = mapped_column(primary_key=True)
    input_nanos: Mapped[int]
    cached_input_nanos: Mapped[int]
    output_nanos: Mapped[int]


class Worker(Base):
    """A registered worker."""

    __tablename__ = "workers"

    id: Mapped[str] = mapped_column(primary_key=True)
    hostname: Mapped[str]
    pid: Mapped[int]
    device: Mapped[str]
    version: Mapped[str]
    nanos_per_hour: Mapped[int]
    models: Mapped[list[Any]]
    serves: Mapped[dict[str, Any] | None]
    stats: Mapped[dict[str, Any]]
    started_at: Mapped[datetime]
    last_seen_at: Mapped[datetime]


class JobEventRow(Base):
    """Something that happened to a job."""

    __tablename__ = "job_events"

    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    at: Mapped[datetime]
    kind: Mapped[str]
    data: Mapped[dict[str, Any]]

    __table_args__ = (Index("ix_job_events_job_id", "job_id", "id"), {"sqlite_autoincrement": True})
