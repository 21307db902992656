"""Documents of the OpenAI door, field for field those of OpenAI's Files, Batches and Models.

Times are Unix seconds. Spec: https://platform.openai.com/docs/api-reference/batch
"""

from __future__ import annotations

from typing import Any, Literal

from batchinfer.jobs.views import View


class FileObject(View):
    """A stored file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    """``batch`` (request lines), ``input`` (prompts, ours) or ``batch_output``."""
    status: Literal["processed"] = "processed"
    sha256: str
    """SHA-256 of the bytes in hex (ours)."""


class FileList(View):
    """A page of files."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(View):
    """A file that is no more."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class BatchFault(View):
    """Why a batch failed; ``line`` counts from 1."""

    code: str
    line: int | None
    message: str
    param: str | None


class BatchFaults(View):
    """Why a batch failed."""

    object: Literal["list"] = "list"
    data: list[BatchFault]


class RequestCounts(View):
    """Requests by outcome: ``failed`` errored, expired or were cancelled."""

    total: int
    completed: int
    failed: int


class BatchUsage(View):
    """Tokens of a batch."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class BatchObject(View):
    """A batch: a job, seen through the OpenAI door."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str
    errors: BatchFaults | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None
    job_id: str
    """The same batch behind our own door (ours)."""
    job_state: str
    """The job's state, which has more words: ``paused`` and ``budget_exhausted`` are ``in_progress`` above (ours)."""


class BatchList(View):
    """A page of batches, newest first."""

    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ModelObject(View):
    """A model that requests may name."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str


class ModelList(View):
    """All models."""

    object: Literal["list"] = "list"
    data: list[ModelObject]


def page(items: list[Any], *, has_more: bool) -> dict[str, Any]:
    """The fields of a list that follow from its items."""
    return {
        "data": items,
        "first_id": items[0].id if items else None,
        "last_id": items[-1].id if items else None,
        "has_more": has_more,
    }
