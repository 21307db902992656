"""Database rows to records."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING, Any

from batchinfer.jobs.leases import RowErrorSample
from batchinfer.jobs.records import (
    AttemptRecord,
    JobEvent,
    JobRecord,
    PartRecord,
    RowCounts,
    ShardRecord,
    WorkerRecord,
)
from batchinfer.jobs.serving import Serves
from batchinfer.jobs.spec import JobSpec
from batchinfer.jobs.status import AttemptState, JobState, LeaseMode, Outcome, ShardState
from batchinfer.types import RowStatus, Usage

if TYPE_CHECKING:
    from sqlalchemy import Row

MAX_SPECS = 128
"""Specs kept in memory; most are of a kilobyte, a few may have a template of a megabyte."""
STATUS_COLUMNS = {status: f"rows_{status}" for status in RowStatus}
"""Status to the name of the column that counts it."""


def row_counts(row: Row[Any]) -> RowCounts:
    """The six counters of a job, shard or part."""
    return RowCounts(**{str(status): getattr(row, column) for status, column in STATUS_COLUMNS.items()})


def count_columns(counts: RowCounts) -> dict[str, int]:
    """Counters as column values."""
    return {column: counts[status] for status, column in STATUS_COLUMNS.items()}


def usage(row: Row[Any]) -> Usage:
    """Tokens of a job or part."""
    return Usage(row.prompt_tokens, row.cached_tokens, row.completion_tokens)


_specs: OrderedDict[str, JobSpec] = OrderedDict()
_specs_lock = Lock()


def spec_of(row: Row[Any]) -> JobSpec:
    """A job's spec. Reading one takes longer than most queries; its hash says which are equal, and none ever changes."""
    with _specs_lock:
        found = _specs.get(row.spec_hash)
        if found is not None:
            _specs.move_to_end(row.spec_hash)
            return found
    found = JobSpec.model_validate(row.spec)
    with _specs_lock:
        _specs[row.spec_hash] = found
        while len(_specs) > MAX_SPECS:
            _specs.popitem(last=False)
    return found


def job_record(row: Row[Any]) -> JobRecord:
    """A row of ``jobs``."""
    return JobRecord(
        id=row.id,
        tenant_id=row.tenant_id,
        name=row.name,
        tags=row.tags,
        spec=spec_of(row),
        spec_hash=row.spec_hash,
        idempotency_key=row.idempotency_key,
        model=row.model,
        state=JobState(row.state),
        outcome=Outcome(row.outcome) if row.outcome else None,
        closing=RowStatus(row.closing) if row.closing else None,
        error_code=row.error_code,
        error_message=row.error_message,
        priority=row.priority,
        deadline_at=row.deadline_at,
        budget_nanos=row.budget_nanos,
        fingerprint=row.fingerprint,
        warnings=tuple(row.warnings),
        engines=tuple(row.engines or ()),
        output=row.output,
        manifest_path=row.manifest_path,
        num_shards=row.num_shards,
        num_rows=row.num_rows,
        counts=row_counts(row),
        usage=usage(row),
        metered_nanos=row.metered_nanos,
        overhead_nanos=row.overhead_nanos,
        list_nanos=row.list_nanos,
        saved_nanos=row.saved_nanos,
        saved_list_nanos=row.saved_list_nanos,
        retry_generation=row.retry_generation,
        model_revision=row.model_revision,
        drift=row.drift or {},
        created_at=row.created_at,
        planned_at=row.planned_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
        traceparent=row.traceparent,
    )


def shard_record(row: Row[Any]) -> ShardRecord:
    """A row of ``shards``."""
    return ShardRecord(
        id=row.id,
        job_id=row.job_id,
        index=row.shard_index,
        row_start=row.row_start,
        row_end=row.row_end,
        est_tokens=row.est_tokens,
        state=ShardState(row.state),
        generation=row.generation,
        num_attempts=row.num_attempts,
        num_failures=row.num_failures,
        num_faults=row.num_faults,
        todo_rows=row.todo_rows,
        done_rows=row.done_rows,
        counts=row_counts(row),
        probe_rows=row.probe_rows,
        poisoned_rows=tuple(row.poisoned_rows),
        retry_statuses=tuple(RowStatus(status) for status in row.retry_statuses),
        result_path=row.result_path,
        result_rows=row.result_rows,
        result_bytes=row.result_bytes,
        result_sha256=row.result_sha256,
    )


def part_record(row: Row[Any]) -> PartRecord:
    """A row of ``parts``."""
    return PartRecord(
        id=row.id,
        job_id=row.job_id,
        shard_id=row.shard_id,
        attempt_id=row.attempt_id,
        generation=row.generation,
        path=row.path,
        num_rows=row.num_rows,
        num_bytes=row.num_bytes,
        sha256=row.sha256,
        counts=row_counts(row),
        replaced=RowCounts(**row.replaced),
        usage=usage(row),
        metered_nanos=row.metered_nanos,
        list_nanos=row.list_nanos,
        device_ns=row.device_ns,
    )


def attempt_record(row: Row[Any]) -> AttemptRecord:
    """A row of ``attempts``."""
    return AttemptRecord(
        id=row.id,
        job_id=row.job_id,
        shard_id=row.shard_id,
        worker_id=row.worker_id,
        mode=LeaseMode(row.mode),
        state=AttemptState(row.state),
        generation=row.generation,
        probe_rows=row.probe_rows,
        done_rows=row.done_rows,
        metered_ns=row.metered_ns,
        device_ns=row.device_ns,
        nanos_per_hour=row.nanos_per_hour,
        started_at=row.started_at,
        ended_at=row.ended_at,
        lease_expires_at=row.lease_expires_at,
        error=row.error,
    )


def error_sample(row: Row[Any]) -> RowErrorSample:
    """A row of ``row_errors``."""
    return RowErrorSample(row.row_index, row.code, row.message, RowStatus(row.status))


def job_event(row: Row[Any]) -> JobEvent:
    """A row of ``job_events``."""
    return JobEvent(row.id, row.job_id, row.at, row.kind, row.data)


def worker_record(row: Row[Any]) -> WorkerRecord:
    """A row of ``workers``."""
    return WorkerRecord(
        id=row.id,
        hostname=row.hostname,
        pid=row.pid,
        device=row.device,
        version=row.version,
        nanos_per_hour=row.nanos_per_hour,
        models=tuple(row.models),
        serves=Serves.from_json(row.serves),
        stats=row.stats,
        started_at=row.started_at,
        last_seen_at=row.last_seen_at,
    )
