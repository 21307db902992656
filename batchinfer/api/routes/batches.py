"""Batches, as OpenAI's API has them: create, look, list, cancel."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query
from pydantic import Field

from batchinfer.api.deps import Batches, IdempotencyKey, Limit, RawBody
from batchinfer.api.schemas import Body, ErrorBody
from batchinfer.errors import NotFoundError
from batchinfer.jobs.files import is_file_id
from batchinfer.jobs.openai_views import BatchList, BatchObject

_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "A field is wrong; `param` names it."},
    404: {"model": ErrorBody, "description": "No such batch or file."},
    409: {"model": ErrorBody, "description": "The batch's state forbids it."},
}

router = APIRouter(prefix="/v1/batches", tags=["openai"], responses=_ERRORS)

BatchId = Annotated[str, Path(description="Id of a batch.")]


class ExpiresAfter(Body):
    """When files are deleted."""

    anchor: Literal["created_at"]
    seconds: int


class BatchBody(Body):
    """A batch to make."""

    input_file_id: str
    """File of request lines."""
    endpoint: str
    """``/v1/chat/completions`` or ``/v1/completions``."""
    completion_window: Annotated[str, Field(max_length=20)]
    """``24h``, or any ``<n>h`` or ``<n>d``: requests not started by then expire."""
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = None
    """Up to 16 pairs; the tags of the job."""
    output_expires_after: ExpiresAfter | None = None
    """When the output and error files are deleted."""
    job: Annotated[dict[str, Any], Field(default_factory=dict)]
    """Fields of a job, such as ``priority``, ``budget_usd`` or ``max_tokens`` (ours; ``extra_body`` in the client)."""


@router.post("")
def create_batch(
    body: BatchBody, raw: RawBody, batches: Batches, idempotency_key: IdempotencyKey = None
) -> BatchObject:
    """Make a batch of an uploaded file. It is a job as well, `job_id` names it."""
    if not is_file_id(body.input_file_id):
        raise NotFoundError("no such file; GET /v1/files lists them", param="input_file_id")
    return batches.create(
        input_file_id=body.input_file_id,
        endpoint=body.endpoint,
        completion_window=body.completion_window,
        metadata=body.metadata,
        output_expires_s=None if body.output_expires_after is None else body.output_expires_after.seconds,
        options=body.job,
        idempotency_key=idempotency_key,
        body=raw,
    )


@router.get("")
def list_batches(
    batches: Batches,
    limit: Limit = 20,
    after: Annotated[str | None, Query(description="Last id of the page before.")] = None,
) -> BatchList:
    """List batches, newest first."""
    return batches.list(limit=limit, after=after)


@router.get("/{batch_id}")
def get_batch(batch_id: BatchId, batches: Batches) -> BatchObject:
    """Poll a batch."""
    return batches.get(batch_id)


@router.post("/{batch_id}/cancel")
def cancel_batch(batch_id: BatchId, batches: Batches) -> BatchObject:
    """Cancel a batch. Requests that ended are kept."""
    return batches.cancel(batch_id)
