"""Jobs: submit, poll, steer, fetch."""

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Body, Header, Query, Request, Response

from batchinfer.api.deps import (
    Files,
    IdempotencyKey,
    IfMatch,
    JobId,
    Limit,
    RawBody,
    Service,
    plain_text,
)
from batchinfer.api.schemas import ErrorBody, ResumeBody, RetryBody, RetryView
from batchinfer.jobs.changes import JobChanges
from batchinfer.jobs.ids import new_job_id
from batchinfer.jobs.ledger_changes import version_of
from batchinfer.jobs.spec import JobSpec, parse_tag
from batchinfer.jobs.status import JobState
from batchinfer.jobs.views import CostView, ErrorPage, JobList, JobView, ResultsView, RowPage
from batchinfer.types import RowStatus

if TYPE_CHECKING:
    from batchinfer.api.polling import Answer

JOB_ERRORS: dict[int | str, dict[str, Any]] = {
    404: {"model": ErrorBody, "description": "No such job."},
    422: {"model": ErrorBody, "description": "A field is wrong; `param` names it."},
}
_CHANGED: dict[int | str, dict[str, Any]] = {
    412: {"model": ErrorBody, "description": "The job was changed since it was read."}
}
_UNCHANGED: dict[int | str, dict[str, Any]] = {
    304: {"description": "Nothing has changed since the answer with the ETag in `If-None-Match`."}
}
_CONFLICT: dict[int | str, dict[str, Any]] = {409: {"model": ErrorBody, "description": "The job's state forbids it."}}

router = APIRouter(prefix="/v1/jobs", tags=["jobs"], responses=JOB_ERRORS)


@router.post("", status_code=202, responses=_CONFLICT)
def submit_job(  # noqa: PLR0917 -- FastAPI passes by name
    spec: JobSpec,
    body: RawBody,
    response: Response,
    service: Service,
    files: Files,
    idempotency_key: IdempotencyKey = None,
) -> JobView:
    """Submit a job. Inputs are absolute paths, URIs or ids of uploaded files; `deadline` may be a duration such as `6h`.

    With an `Idempotency-Key`, a repeated request returns the job of the first one and the header
    `Idempotent-Replayed: true`.
    """
    job_id = new_job_id()
    spec, attach = files.use_inputs(service.caller, spec, job_id)
    view, is_new = service.submit(
        spec, base=None, idempotency_key=idempotency_key, body=body, job_id=job_id, attach=attach
    )
    _say_where(response, view, is_new)
    return view


def _say_where(response: Response, view: JobView, is_new: bool) -> None:
    response.headers["Location"] = f"/v1/jobs/{view.id}"
    if not is_new:
        response.headers["Idempotent-Replayed"] = "true"


@router.get("")
def list_jobs(  # noqa: PLR0917 -- FastAPI passes them by name
    service: Service,
    limit: Limit = 20,
    after: Annotated[str | None, Query(description="Last id of the page before.")] = None,
    state: Annotated[JobState | None, Query(description="Only jobs in this state.")] = None,
    model: Annotated[str | None, Query(max_length=1024, description="Only jobs of this model.")] = None,
    name: Annotated[str | None, Query(max_length=200, description="Only jobs of this name.")] = None,
    tag: Annotated[str | None, Query(max_length=600, description="Only jobs with this tag, as `key=value`.")] = None,
    tenant: Annotated[str | None, Query(max_length=40, description="Only this tenant's jobs.")] = None,
) -> JobList:
    """List jobs, newest first."""
    return service.list_jobs(
        state=state,
        model=plain_text(model),
        name=plain_text(name),
        tag=parse_tag(plain_text(tag)),
        tenant=plain_text(tenant),
        limit=limit,
        after=plain_text(after),
    )


# for the documentation, and for an app below another one: elsewhere PollMiddleware has answered before
@router.get("/{job_id}", response_model=JobView, responses=_UNCHANGED)
async def get_job(
    job_id: JobId,
    request: Request,
    service: Service,
    if_none_match: Annotated[str | None, Header(description="The `ETag` that the caller has read.")] = None,
) -> Response:
    """Poll a job: state, rows, speed, time left, cost.

    With `If-None-Match: ETAG` the answer is an empty 304 while nothing has changed. The `ETag` is good for PATCH's
    `If-Match`, too, which looks only at the part that names the version of what PATCH can change. Speed, time left and
    why a job waits may be a second old.
    """
    answer: Answer = await request.app.state.poller.answer(service, service.caller, job_id, if_none_match)
    return answer.response(if_none_match)


@router.patch("/{job_id}", responses=_CONFLICT | _CHANGED)
def change_job(
    job_id: JobId, service: Service, body: JobChanges, response: Response, if_match: IfMatch = None
) -> JobView:
    """Change name, tags, priority, deadline or budget; null takes a name, deadline or budget away.

    With `If-Match: ETAG` only if nobody changed the job since it was read.
    """
    service.change(job_id, body, version=if_match)
    job, view = service.get_with_record(job_id)
    response.headers["ETag"] = f'"{version_of(job)}"'
    return view


@router.post("/{job_id}/clone", status_code=202, responses=_CONFLICT)
def clone_job(  # noqa: PLR0917 -- FastAPI passes them by name
    job_id: JobId,
    service: Service,
    response: Response,
    files: Files,
    body: Annotated[dict[str, Any] | None, Body(description="Fields of the job's spec to change.")] = None,
    idempotency_key: IdempotencyKey = None,
) -> JobView:
    """Submit a job like this one, with the fields of the body changed. Output and deadline are not taken over."""
    view, is_new = service.clone(
        job_id,
        body or {},
        base=None,
        idempotency_key=idempotency_key,
        use_inputs=partial(files.use_inputs, service.caller),
    )
    _say_where(response, view, is_new)
    return view


@router.get("/{job_id}/rows")
def get_rows(
    job_id: JobId,
    service: Service,
    limit: Limit = 20,
    after: Annotated[int, Query(ge=-1, lt=2**63, description="`next_after` of the page before.")] = -1,
    status: Annotated[RowStatus | None, Query(description="Only rows with this status.")] = None,
) -> RowPage:
    """Result rows in input order, of those that are published so far."""
    return service.rows(job_id, after=after, status=status, limit=limit)


@router.get("/{job_id}/errors")
def get_errors(
    job_id: JobId,
    service: Service,
    limit: Limit = 20,
    offset: Annotated[int, Query(ge=0, le=1_000_000, description="Samples to skip.")] = 0,
    code: Annotated[str | None, Query(max_length=64, description="Only rows with this code.")] = None,
) -> ErrorPage:
    """Rows that did not succeed: what kinds there are, what to do, and samples."""
    return service.errors(job_id, limit=limit, offset=offset, code=plain_text(code))


@router.get("/{job_id}/results")
def get_results(job_id: JobId, service: Service) -> ResultsView:
    """Where the result files are, with rows, sizes and hashes."""
    return service.results(job_id)


@router.get("/{job_id}/cost")
def get_cost(job_id: JobId, service: Service) -> CostView:
    """What the job has cost: rows, overhead, list price."""
    return service.cost(job_id)


@router.post("/{job_id}/cancel", responses=_CONFLICT)
def cancel_job(job_id: JobId, service: Service) -> JobView:
    """Cancel a job. Rows that ended are kept."""
    return service.cancel(job_id)


@router.post("/{job_id}/pause", responses=_CONFLICT)
def pause_job(job_id: JobId, service: Service) -> JobView:
    """Hold a job. Rows that ended are kept."""
    return service.pause(job_id)


@router.post("/{job_id}/resume", responses=_CONFLICT)
def resume_job(job_id: JobId, service: Service, body: Annotated[ResumeBody | None, Body()] = None) -> JobView:
    """Go on with a paused, failed or budget-exhausted job."""
    return service.resume(job_id, budget_usd=None if body is None else body.budget_usd)


@router.post("/{job_id}/retry", responses=_CONFLICT)
def retry_job(job_id: JobId, service: Service, body: Annotated[RetryBody | None, Body()] = None) -> RetryView:
    """Run the rows of an ended job again that did not succeed; the others are not touched."""
    statuses = [RowStatus(status) for status in (body or RetryBody()).statuses]
    view, num_rows = service.retry(job_id, statuses)
    return RetryView(retried_rows=num_rows, job=view)
