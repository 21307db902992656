"""A job in the words of OpenAI's batches."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from batchinfer.jobs.openai_views import BatchFault, BatchFaults, BatchObject, BatchUsage, RequestCounts
from batchinfer.jobs.status import JobState
from batchinfer.types import RowStatus

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from batchinfer.jobs.ledger_files import BatchRecord
    from batchinfer.jobs.records import JobRecord

_BATCH_ID = re.compile(r"batch_(\w{1,26})", re.ASCII)
STATUSES: Mapping[JobState, str] = {
    JobState.VALIDATING: "validating",
    JobState.QUEUED: "in_progress",
    JobState.IN_PROGRESS: "in_progress",
    JobState.PAUSED: "in_progress",
    JobState.BUDGET_EXHAUSTED: "in_progress",
    JobState.FINALIZING: "finalizing",
    JobState.COMPLETED: "completed",
    JobState.CANCELLING: "cancelling",
    JobState.CANCELLED: "cancelled",
    JobState.FAILED: "failed",
    JobState.EXPIRED: "expired",
}
"""What each state is called at the OpenAI door; a cancelled job that is finalizing is still ``cancelling``."""
_WITH_FILES = frozenset({JobState.COMPLETED, JobState.CANCELLED, JobState.EXPIRED})


def batch_id_of(job_id: str) -> str:
    """``job_x`` is ``batch_x``."""
    return "batch_" + job_id.removeprefix("job_")


def job_id_of(batch_id: str) -> str | None:
    """The job of a batch id; None if it can be no batch's."""
    match = _BATCH_ID.fullmatch(batch_id)
    return None if match is None else "job_" + match[1]


def output_file_id(job_id: str) -> str:
    """Id of the file with the answers. It follows from the job's, so that writing it twice makes one file."""
    return f"file-{job_id.removeprefix('job_')}-out"


def error_file_id(job_id: str) -> str:
    """Id of the file with the errors."""
    return f"file-{job_id.removeprefix('job_')}-err"


def batch_object(batch: BatchRecord) -> BatchObject:
    """A batch as its clients see it."""
    job, terms = batch.job, batch.terms
    counts = job.counts
    completed = counts.succeeded + counts.deduplicated
    failed = counts.total - completed
    has_files = job.state in _WITH_FILES
    status = _status(job)

    def ended_at(name: str) -> int | None:
        return _unix(job.finished_at) if status == name else None

    return BatchObject(
        id=batch_id_of(job.id),
        endpoint=terms.endpoint,
        model=terms.model,
        errors=_faults(batch) if job.state is JobState.FAILED else None,
        input_file_id=terms.input_file_id,
        completion_window=terms.completion_window,
        status=status,
        output_file_id=output_file_id(job.id) if has_files and completed else None,
        error_file_id=error_file_id(job.id) if has_files and failed else None,
        created_at=int(job.created_at.timestamp()),
        in_progress_at=_unix(job.planned_at),
        expires_at=_unix(job.deadline_at),
        finalizing_at=_unix(batch.state_times.get(JobState.FINALIZING)),
        completed_at=ended_at("completed"),
        failed_at=ended_at("failed"),
        expired_at=ended_at("expired"),
        cancelling_at=_cancelling_at(batch),
        cancelled_at=ended_at("cancelled"),
        request_counts=RequestCounts(total=job.num_rows or 0, completed=completed, failed=failed),
        usage=_usage(job),
        metadata=dict(terms.labels) or None,
        job_id=job.id,
        job_state=job.state,
    )


def _status(job: JobRecord) -> str:
    if job.state is JobState.FINALIZING and job.closing is RowStatus.CANCELLED:
        return "cancelling"
    return STATUSES[job.state]


def _cancelling_at(batch: BatchRecord) -> int | None:
    """A batch that is cancelled before it is planned has nothing to wind up: both moments are one."""
    times = batch.state_times
    return _unix(times.get(JobState.CANCELLING) or times.get(JobState.CANCELLED))


def _unix(moment: datetime | None) -> int | None:
    return None if moment is None else int(moment.timestamp())


def _faults(batch: BatchRecord) -> BatchFaults:
    if batch.terms.faults:
        return BatchFaults(data=[BatchFault(**fault) for fault in batch.terms.faults])
    job = batch.job
    fault = BatchFault(code=job.error_code or "failed", line=None, message=job.error_message or "", param=None)
    return BatchFaults(data=[fault])


def _usage(job: JobRecord) -> BatchUsage:
    usage = job.usage
    return BatchUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details={"cached_tokens": usage.cached_tokens},
        output_tokens=usage.completion_tokens,
        output_tokens_details={"reasoning_tokens": 0},
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )
