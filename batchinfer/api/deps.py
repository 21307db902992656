"""What routes ask for.

All are coroutines, though none waits: FastAPI runs a plain function in a thread, and each hop costs more than the function.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import Depends, Header, Path, Query, Request, Security
from fastapi.security import HTTPBearer

from batchinfer.errors import NotFoundError
from batchinfer.jobs.batches import BatchService
from batchinfer.jobs.caller import Caller, Role
from batchinfer.jobs.files import FileStore
from batchinfer.jobs.service import MAX_KEY_LENGTH, MAX_PAGE, JobService

_JOB_ID = re.compile(r"[\w-]{1,64}", re.ASCII)


# The middleware has checked the key; this one tells the documentation of it.
_bearer = HTTPBearer(auto_error=False, description="An API key; `batchinfer keys create` makes one.")


async def get_caller(request: Request, _key: Annotated[Any, Security(_bearer)] = None) -> Caller:
    """Whose request this is."""
    caller: Caller = request.state.caller
    return caller


async def get_service(request: Request, caller: Annotated[Caller, Depends(get_caller)]) -> JobService:
    """The service that the app was made with, acting for the caller: other tenants' things are not there."""
    service: JobService = request.app.state.service
    return service.acting_for(caller)


async def get_admin_service(service: Annotated[JobService, Depends(get_service)]) -> JobService:
    """The same, for admins alone. Raises ForbiddenError."""
    service.caller.check_role(Role.ADMIN)
    return service


async def get_platform_service(service: Annotated[JobService, Depends(get_service)]) -> JobService:
    """The same, for callers that see every tenant. Raises ForbiddenError."""
    service.caller.check_platform()
    return service


async def get_public_service(request: Request) -> JobService:
    """The service, for routes that need no key: they show nothing of any tenant."""
    service: JobService = request.app.state.service
    return service


async def get_files(request: Request) -> FileStore:
    """The stored files."""
    files: FileStore = request.app.state.files
    return files


async def get_batches(service: Annotated[JobService, Depends(get_service)], request: Request) -> BatchService:
    """What the OpenAI door does with batches."""
    return BatchService(service, request.app.state.files, request.app.state.settings.models)


async def get_job_id(job_id: Annotated[str, Path(description="Id of a job.")]) -> str:
    """The job id of the path. Text that no id can be never reaches the database. Raises NotFoundError."""
    if not _JOB_ID.fullmatch(job_id):
        raise NotFoundError("no such job; GET /v1/jobs lists them", param="job_id")
    return job_id


def plain_text(text: str | None) -> str | None:
    """Text to look for in the database, without what no column holds: a NUL makes PostgreSQL fail."""
    return None if text is None else text.replace("\0", "\ufffd")


async def get_if_match(
    if_match: Annotated[
        str | None, Header(alias="If-Match", description="The `ETag` that the caller has read; `*` is any.")
    ] = None,
) -> str | None:
    """The version of an If-Match header, or None where any will do."""
    if if_match is None or if_match.strip() == "*":
        return None
    # an ETag is the version of what can be changed, then that of the rest: progress is nobody's edit
    return if_match.strip().removeprefix("W/").strip('"').partition(".")[0]


async def get_raw_body(request: Request) -> Any:
    """The body's JSON as it was sent: what two requests under one idempotency key must share."""
    try:
        return await request.json()
    except ValueError:
        return None  # whoever reads the body as a JobSpec refuses it, and says why


Service = Annotated[JobService, Depends(get_service)]
AdminService = Annotated[JobService, Depends(get_admin_service)]
PlatformService = Annotated[JobService, Depends(get_platform_service)]
PublicService = Annotated[JobService, Depends(get_public_service)]
Who = Annotated[Caller, Depends(get_caller)]
Files = Annotated[FileStore, Depends(get_files)]
Batches = Annotated[BatchService, Depends(get_batches)]
RawBody = Annotated[Any, Depends(get_raw_body)]
JobId = Annotated[str, Depends(get_job_id)]
IfMatch = Annotated[str | None, Depends(get_if_match)]
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
