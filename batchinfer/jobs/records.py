"""Frozen records of what the database has. Money in nano-dollars, device time in ns, times aware and UTC."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self

from batchinfer.types import RowStatus, Usage

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime

    from batchinfer.jobs.serving import Serves
    from batchinfer.jobs.spec import JobSpec
    from batchinfer.jobs.status import AttemptState, JobState, LeaseMode, Outcome, ShardState


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Rows by how they ended. Field names are the values of :class:`~batchinfer.types.RowStatus`."""

    succeeded: int = 0
    errored: int = 0
    expired: int = 0
    cancelled: int = 0
    skipped: int = 0
    deduplicated: int = 0
    filtered: int = 0

    @classmethod
    def of(cls, statuses: Iterable[RowStatus | str]) -> Self:
        """Count statuses, one a row."""
        counts = dict.fromkeys((f.name for f in fields(cls)), 0)
        for status in statuses:
            counts[str(status)] += 1
        return cls(**counts)

    def __getitem__(self, status: RowStatus | str) -> int:
        return int(getattr(self, str(status)))

    def __add__(self, other: RowCounts) -> RowCounts:
        return RowCounts(*(self[f.name] + other[f.name] for f in fields(self)))

    def __sub__(self, other: RowCounts) -> RowCounts:
        return RowCounts(*(self[f.name] - other[f.name] for f in fields(self)))

    @property
    def total(self) -> int:
        """All rows that have ended."""
        return sum(self[f.name] for f in fields(self))

    def as_dict(self) -> dict[str, int]:
        """Status to count, for JSON."""
        return {f.name: self[f.name] for f in fields(self)}


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job as the database has it."""

    id: str
    tenant_id: str
    name: str | None
    tags: Mapping[str, str]
    spec: JobSpec
    spec_hash: str
    idempotency_key: str | None
    model: str
    state: JobState
    outcome: Outcome | None
    closing: RowStatus | None
    """``cancelled`` or ``expired`` once the remaining rows are to be written so, else None."""
    error_code: str | None
    error_message: str | None
    priority: int
    deadline_at: datetime | None
    budget_nanos: int | None
    fingerprint: Mapping[str, Any]
    """Of the input, as the planner saw it."""
    warnings: tuple[str, ...]
    engines: tuple[Mapping[str, Any], ...]
    """How the latest engines were used: ``id`` and the figures of ``EngineStats.report``."""
    output: str | None
    manifest_path: str | None
    num_shards: int
    num_rows: int | None
    """None until planned."""
    counts: RowCounts
    usage: Usage
    metered_nanos: int
    overhead_nanos: int
    list_nanos: int
    saved_nanos: int
    saved_list_nanos: int
    retry_generation: int
    model_revision: str | None
    """Of the model that the job's first rows ran on; None until they do, or where it is not known."""
    drift: Mapping[str, Any]
    """What the sentinel found; empty without one."""
    created_at: datetime
    planned_at: datetime | None
    started_at: datetime | None
    finished_at: datetime | None
    traceparent: str | None = None
    """Span of its submission, that its work goes on from; None where nothing was traced."""

    @property
    def cost_nanos(self) -> int:
        """Metered rows plus overhead: what the budget is held against."""
        return self.metered_nanos + self.overhead_nanos


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """A shard as the database has it."""

    id: int
    job_id: str
    index: int
    row_start: int
    row_end: int
    est_tokens: int
    state: ShardState
    generation: int
    num_attempts: int
    num_failures: int
    """Engine deaths and lost leases in this generation."""
    num_faults: int
    """Failures that no row explains, since the last committed row."""
    todo_rows: int
    """Rows to run in this generation."""
    done_rows: int
    """Rows committed in this generation."""
    counts: RowCounts
    """Over all generations: each row once, with its newest outcome."""
    probe_rows: int | None
    poisoned_rows: tuple[int, ...]
    retry_statuses: tuple[RowStatus, ...]
    result_path: str | None
    result_rows: int | None
    result_bytes: int | None
    result_sha256: str | None

    @property
    def num_rows(self) -> int:
        """Rows in the shard's range."""
        return self.row_end - self.row_start

    @property
    def remaining_rows(self) -> int:
        """Rows without an outcome in this generation."""
        return self.todo_rows - self.done_rows


@dataclass(frozen=True, slots=True)
class PartRecord:
    """A committed part."""

    id: int
    job_id: str
    shard_id: int
    attempt_id: int
    generation: int
    path: str
    num_rows: int
    num_bytes: int
    sha256: str
    counts: RowCounts
    replaced: RowCounts
    usage: Usage
    metered_nanos: int
    list_nanos: int
    device_ns: int


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """One lease of a shard, running or past."""

    id: int
    job_id: str
    shard_id: int
    worker_id: str
    mode: LeaseMode
    state: AttemptState
    generation: int
    probe_rows: int | None
    done_rows: int
    metered_ns: int
    device_ns: int
    nanos_per_hour: int
    started_at: datetime
    ended_at: datetime | None
    lease_expires_at: datetime
    error: str | None


@dataclass(frozen=True, slots=True)
class JobEvent:
    """Something that happened to a job: ``kind`` is a stable word, ``data`` has the details."""

    id: int
    job_id: str
    at: datetime
    kind: str
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker that registered and was not dropped."""

    id: str
    hostname: str
    pid: int
    device: str
    version: str
    nanos_per_hour: int
    models: tuple[str, ...]
    """Loaded ones."""
    serves: Serves
    stats: Mapping[str, Any]
    started_at: datetime
    last_seen_at: datetime


@dataclass(frozen=True, slots=True)
class CostReport:
    """What a job cost: ``rows`` + sum of ``overhead`` = ``total``, to the nano-dollar."""

    rows_nanos: int
    overhead_nanos: Mapping[str, int]
    """By kind: load, idle, lost."""
    list_nanos: int
    device_ns: int
    usage: Usage = field(default_factory=Usage)

    @property
    def total_nanos(self) -> int:
        """The meter."""
        return self.rows_nanos + sum(self.overhead_nanos.values())
