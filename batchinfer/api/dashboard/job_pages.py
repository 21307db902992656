"""Pages of jobs: the list, one job, what may be done to it, and the form that submits one."""

from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Form, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from starlette.concurrency import run_in_threadpool

from batchinfer.api.dashboard.rendering import PageRoute, render
from batchinfer.api.deps import Files, JobId, Service, plain_text
from batchinfer.api.errors import status_of
from batchinfer.errors import InputError, InvalidSpecError, NotFoundError, UserError
from batchinfer.jobs.history import Bucket, committed_over_time, latest_spans
from batchinfer.jobs.ids import new_job_id
from batchinfer.jobs.money_views import ForecastReport
from batchinfer.jobs.records import JobRecord
from batchinfer.jobs.service import JobService
from batchinfer.jobs.spec import Quantization, parse_spec
from batchinfer.jobs.status import HELD, JobState
from batchinfer.jobs.views import JobView, PreviewRow

if TYPE_CHECKING:
    from batchinfer.api.dashboard.kept_series import KeptSeries

PAGE = 25
FIRST_ROWS = 8
SAMPLES = 12
SEE_OTHER = 303
ACTIVE = frozenset(
    {JobState.VALIDATING, JobState.QUEUED, JobState.IN_PROGRESS, JobState.FINALIZING, JobState.CANCELLING}
)
_LISTS = ("inputs", "stop")

router = APIRouter(route_class=PageRoute, include_in_schema=False, default_response_class=HTMLResponse)


@router.get("/")
def jobs_page(
    request: Request,
    service: Service,
    after: Annotated[str | None, Query(max_length=64)] = None,
    state: Annotated[str, Query(max_length=20)] = "",
    name: Annotated[str, Query(max_length=200)] = "",
) -> HTMLResponse:
    """Jobs, newest first."""
    chosen = JobState(state) if state in set(JobState) else None
    jobs = service.list_jobs(state=chosen, name=plain_text(name) or None, limit=PAGE, after=plain_text(after))
    return render(request, "jobs.html", jobs=jobs, states=list(JobState), state=state, name=name, after=after)


@router.get("/submit")
def submit_page(request: Request, service: Service) -> HTMLResponse:
    """The form that submits a job."""
    return _form(request, service, {})


@router.post("/submit")
async def submit_from_page(request: Request, service: Service, files: Files) -> Response:
    """Submit a job; a field that is wrong is named beside the field."""
    form = {name: str(value) for name, value in (await request.form()).items()}

    def submit() -> Response:
        job_id = new_job_id()
        try:
            spec, attach = files.use_inputs(service.caller, parse_spec(_fields(form)), job_id)
            view, _ = service.submit(spec, base=None, job_id=job_id, attach=attach)
        except UserError as error:
            return _form(request, service, form, error)
        return RedirectResponse(f"/jobs/{view.id}", SEE_OTHER)

    return await run_in_threadpool(submit)


def _form(request: Request, service: JobService, form: dict[str, str], error: UserError | None = None) -> HTMLResponse:
    models = [model.id for model in service.models(request.app.state.settings.models).data]
    status = 200 if error is None else status_of(error)
    return render(
        request, "submit.html", status=status, form=form, error=error, models=models, quantizations=list(Quantization)
    )


def _fields(form: dict[str, str]) -> dict[str, Any]:
    """A form's fields as those of a spec: empty ones are not given, lists have a line an item."""
    given = {name: text.strip() for name, text in form.items() if text.strip()}
    fields: dict[str, Any] = {name: text for name, text in given.items() if name not in _LISTS}
    for name in _LISTS:
        if lines := [line.strip() for line in given.get(name, "").splitlines() if line.strip()]:
            fields[name] = lines
    if "reuse_results" in fields:
        fields["reuse_results"] = True
    return fields


@router.get("/jobs/{job_id}")
def job_page(request: Request, job_id: JobId, service: Service) -> HTMLResponse:
    """One job: how it stands, what it did when, what went wrong, its first rows."""
    job = service.job(job_id)
    view = service.view(job)
    now = datetime.now(UTC)
    spans = latest_spans(service.engine, job.id)
    rows, rows_fault = _first_rows(service, job)
    return render(
        request,
        "job.html",
        job=view,
        is_live=job.state in ACTIVE,
        can=_possible(job),
        spans=spans,
        series=_series(request, service, job, now),
        forecast=_forecast(service, job.id),
        errors=service.errors(job.id, limit=SAMPLES),
        rows=rows,
        rows_fault=rows_fault,
        events=service.ledger.events(job.id, limit=50),
        num_shards=job.num_shards,
        failed_rows=_failed(view),
    )


def _possible(job: JobRecord) -> dict[str, bool]:
    """Which actions make sense now; the ledger has the last word."""
    failed = job.counts.errored + job.counts.expired + job.counts.cancelled
    return {
        "cancel": not job.state.is_terminal and job.state not in (JobState.CANCELLING, JobState.FINALIZING),
        "pause": job.state in (JobState.VALIDATING, JobState.QUEUED, JobState.IN_PROGRESS) and job.closing is None,
        "resume": job.state in HELD or job.state is JobState.FAILED,
        "retry": job.state.is_terminal and job.state is not JobState.FAILED and failed > 0,
    }


def _failed(view: JobView) -> int:
    return view.rows.errored + view.rows.expired + view.rows.cancelled


def _series(request: Request, service: JobService, job: JobRecord, now: datetime) -> Sequence[Bucket]:
    start = job.started_at
    if start is None:
        return []
    # the last sum of a job that has ended is its own: nobody waits for the end to show
    kept: KeptSeries = request.app.state.series
    return kept.get(
        (job.id, job.finished_at), lambda: committed_over_time(service.engine, job.id, start, job.finished_at or now)
    )


def _forecast(service: JobService, job_id: str) -> ForecastReport | None:
    """What was expected of the job; None before it is planned."""
    try:
        return service.forecast(job_id)
    except NotFoundError:
        return None


def _first_rows(service: JobService, job: JobRecord) -> tuple[list[PreviewRow], str | None]:
    """The first result rows, or why they cannot be shown: workers may write where this server does not reach."""
    if job.num_rows is None:
        return [], None
    try:
        return service.preview(job.id, FIRST_ROWS), None
    except InputError as error:
        return [], error.message


def _amount(text: str) -> Decimal | None:
    if not text.strip():
        return None
    try:
        amount = Decimal(text.strip())
    except InvalidOperation:
        amount = Decimal(0)
    if not 0 < amount < 10**9:
        raise InvalidSpecError(f"a budget is an amount of dollars above 0, not {text[:40]!r}", param="budget_usd")
    return amount


def _back(job_id: str) -> RedirectResponse:
    return RedirectResponse(f"/jobs/{job_id}", SEE_OTHER)


@router.post("/jobs/{job_id}/cancel")
def cancel_from_page(job_id: JobId, service: Service) -> Response:
    """Cancel, and show the job."""
    service.cancel(job_id)
    return _back(job_id)


@router.post("/jobs/{job_id}/pause")
def pause_from_page(job_id: JobId, service: Service) -> Response:
    """Hold, and show the job."""
    service.pause(job_id)
    return _back(job_id)


@router.post("/jobs/{job_id}/resume")
def resume_from_page(job_id: JobId, service: Service, budget_usd: Annotated[str, Form()] = "") -> Response:
    """Go on, with a new budget if one is given, and show the job."""
    service.resume(job_id, budget_usd=_amount(budget_usd))
    return _back(job_id)


@router.post("/jobs/{job_id}/retry")
def retry_from_page(job_id: JobId, service: Service) -> Response:
    """Run failed rows again, and show the job."""
    service.retry(job_id)
    return _back(job_id)
