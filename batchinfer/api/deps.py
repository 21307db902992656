"""What routes ask for."""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import Depends, Header, Path, Query, Request

from batchinfer.errors import NotFoundError
from batchinfer.jobs.service import MAX_KEY_LENGTH, MAX_PAGE, JobService

_JOB_ID = re.compile(r"[\w-]{1,64}", re.ASCII)


def get_service(request: Request) -> JobService:
    """The service that the app was made with."""
    service: JobService = request.app.state.service
    return service


def get_job_id(job_id: Annotated[str, Path(description="Id of a job.")]) -> str:
    """The job id of the path. Text that no id can be never reaches the database. Raises NotFoundError."""
    if not _JOB_ID.fullmatch(job_id):
        raise NotFoundError("no such job; GET /v1/jobs lists them", param="job_id")
    return job_id


async def get_raw_body(request: Request) -> Any:
    """The body's JSON as it was sent: what two requests under one idempotency key must share."""
    try:
        return await request.json()
    except ValueError:
        return None  # whoever reads the body as a JobSpec refuses it, and says why


Service = Annotated[JobService, Depends(get_service)]
RawBody = Annotated[Any, Depends(get_raw_body)]
JobId = Annotated[str, Depends(get_job_id)]
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE, description="Most items of the page.")]
IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=MAX_KEY_LENGTH,
        description="The same key with the same body gives the same job; with another body 409.",
    ),
]
