"""Records of the ledger turned into the views that people and programs get."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from batchinfer.jobs.drift import Drift
from batchinfer.jobs.needs import DEFAULT_POOL
from batchinfer.jobs.views import (
    CostSoFar,
    CostView,
    DriftView,
    EngineUse,
    ErrorKind,
    ErrorPage,
    ErrorSample,
    EventView,
    JobFault,
    JobView,
    KeyView,
    Progress,
    Reuse,
    RowCounts,
    TenantView,
    TokenUsage,
    WorkerView,
)
from batchinfer.money import nanos_to_usd
from batchinfer.types import ERROR_CODES, ErrorCode, ErrorCodeInfo, Usage

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from decimal import Decimal

    from batchinfer.jobs.keys import KeyRecord
    from batchinfer.jobs.leases import RowErrorSample
    from batchinfer.jobs.queries import ErrorCount
    from batchinfer.jobs.records import CostReport, JobEvent, JobRecord, WorkerRecord
    from batchinfer.jobs.speed import Speed
    from batchinfer.jobs.tenants import TenantRecord


def job_view(job: JobRecord, speed: Speed, chance: float | None = None) -> JobView:
    """The view of one job."""
    return JobView(
        id=job.id,
        tenant=job.tenant_id,
        name=job.name,
        tags=dict(job.tags),
        model=job.model,
        state=job.state,
        outcome=job.outcome,
        error=None if job.error_code is None else JobFault(code=job.error_code, message=job.error_message or ""),
        inputs=list(job.spec.inputs),
        output=output_of(job),
        rows=_row_counts(job),
        usage=token_usage(job.usage),
        progress=_progress(job, speed, chance),
        cost=_cost_so_far(job),
        reuse=_reuse(job),
        drift=_drift(job),
        warnings=list(job.warnings),
        engines=[EngineUse.model_validate(dict(report)) for report in job.engines],
        pool=job.spec.pool or DEFAULT_POOL,
        device_kind=job.spec.device_kind,
        priority=job.priority,
        deadline=job.deadline_at,
        created_at=job.created_at,
        started_at=job.started_at,
        finished_at=job.finished_at,
    )


def _drift(job: JobRecord) -> DriftView | None:
    if not job.drift:
        return None
    drift, threshold = Drift.from_dict(job.drift), job.spec.sentinel_threshold
    return DriftView(**drift.figures(), threshold=threshold, is_above=drift.kl_mean > threshold)


def output_of(job: JobRecord) -> str:
    """Where the job's results go."""
    return job.output or job.spec.output or ""


def token_usage(usage: Usage) -> TokenUsage:
    """The view of token counts."""
    return TokenUsage(
        prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens, completion_tokens=usage.completion_tokens
    )


def _row_counts(job: JobRecord) -> RowCounts:
    remaining = None if job.num_rows is None else job.num_rows - job.counts.total
    return RowCounts(total=job.num_rows, remaining=remaining, **job.counts.as_dict())


def _progress(job: JobRecord, speed: Speed, chance: float | None) -> Progress:
    return Progress(
        fraction=None if not job.num_rows else job.counts.total / job.num_rows,
        rows_per_second=_rounded(speed.rows_per_second),
        tokens_per_second=_rounded(speed.tokens_per_second),
        eta_seconds=_rounded(speed.eta_seconds),
        deadline_probability=_rounded(chance),
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _optional_usd(nanos: int | None) -> Decimal | None:
    return None if nanos is None else nanos_to_usd(nanos)


def _cost_so_far(job: JobRecord) -> CostSoFar:
    return CostSoFar(
        metered_usd=nanos_to_usd(job.metered_nanos),
        overhead_usd=nanos_to_usd(job.overhead_nanos),
        list_usd=_optional_usd(job.list_nanos or None),
        budget_usd=_optional_usd(job.budget_nanos),
    )


def _reuse(job: JobRecord) -> Reuse | None:
    if not job.spec.reuse_results:
        return None
    copied, answered = job.counts.deduplicated, job.counts.deduplicated + job.counts.succeeded
    return Reuse(
        rows=copied,
        hit_rate=round(copied / answered, 6) if answered else None,
        saved_usd=nanos_to_usd(job.saved_nanos),
        saved_list_usd=_optional_usd(job.saved_list_nanos or None),
    )


def error_page(
    job: JobRecord, counts: Iterable[ErrorCount], samples: Sequence[RowErrorSample], *, has_more: bool
) -> ErrorPage:
    """A page of rows that did not succeed."""
    return ErrorPage(
        job_id=job.id,
        failed_rows=job.counts.errored + job.counts.expired + job.counts.cancelled,
        kinds=[_error_kind(found.code, found.num_samples) for found in counts],
        data=[_error_sample(sample) for sample in samples],
        has_more=has_more,
    )


def _code_info(code: str) -> ErrorCodeInfo:
    """What is known of a code; a database may hold those of a newer program."""
    known = set(ErrorCode)
    unknown = ErrorCodeInfo("server_error", False, "This program does not know the code.", "Upgrade batchinfer.")
    return ERROR_CODES[ErrorCode(code)] if code in known else unknown


def _error_kind(code: str, num_samples: int) -> ErrorKind:
    info = _code_info(code)
    return ErrorKind(
        code=code, meaning=info.meaning, advice=info.advice, retryable=info.retryable, num_samples=num_samples
    )


def _error_sample(sample: RowErrorSample) -> ErrorSample:
    info = _code_info(sample.code)
    return ErrorSample(
        row_index=sample.row_index,
        status=sample.status,
        code=sample.code,
        type=info.type,
        message=sample.message,
        retryable=info.retryable,
    )


def event_view(event: JobEvent) -> EventView:
    """The view of an event."""
    return EventView(id=event.id, job_id=event.job_id, at=event.at, kind=event.kind, data=dict(event.data))


def worker_view(worker: WorkerRecord, *, is_alive: bool) -> WorkerView:
    """The view of a worker."""
    return WorkerView(
        id=worker.id,
        hostname=worker.hostname,
        pid=worker.pid,
        device=worker.device,
        version=worker.version,
        models=list(worker.models),
        pools=list(worker.serves.pools),
        device_kinds=list(worker.serves.device_kinds),
        only_models=None if worker.serves.models is None else list(worker.serves.models),
        usd_per_hour=nanos_to_usd(worker.nanos_per_hour),
        is_alive=is_alive,
        is_healthy=not worker.stats.get("device_fault"),
        fault=(worker.stats.get("device_fault") or {}).get("reason"),
        started_at=worker.started_at,
        last_seen_at=worker.last_seen_at,
        stats=dict(worker.stats),
    )


def key_view(key: KeyRecord) -> KeyView:
    """The view of a key."""
    return KeyView.model_validate(asdict(key))


def tenant_view(tenant: TenantRecord) -> TenantView:
    """The view of a tenant."""
    return TenantView.model_validate(asdict(tenant))


def cost_view(job: JobRecord, report: CostReport, *, in_flight_nanos: int) -> CostView:
    """The cost of a job out of the ledger's entries."""
    tokens = report.usage.prompt_tokens + report.usage.completion_tokens
    return CostView(
        job_id=job.id,
        rows_usd=nanos_to_usd(report.rows_nanos),
        overhead_usd={kind: nanos_to_usd(nanos) for kind, nanos in report.overhead_nanos.items()},
        metered_total_usd=nanos_to_usd(report.total_nanos),
        list_usd=_optional_usd(report.list_nanos or None),
        budget_usd=_optional_usd(job.budget_nanos),
        in_flight_usd=nanos_to_usd(in_flight_nanos),
        overrun_usd=None if job.budget_nanos is None else nanos_to_usd(max(0, report.total_nanos - job.budget_nanos)),
        device_seconds=report.device_ns / 10**9,
        usage=token_usage(report.usage),
        usd_per_million_tokens=_optional_usd(report.total_nanos * 10**6 // tokens if tokens else None),
    )
