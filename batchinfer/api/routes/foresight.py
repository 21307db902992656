"""Jobs before they run: estimate and explain."""

from decimal import Decimal
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import Field

from batchinfer.api.deps import Files, JobId, Service
from batchinfer.api.schemas import ErrorBody
from batchinfer.jobs.foresight import Question
from batchinfer.jobs.foresight_views import EstimateView, ExplainView
from batchinfer.jobs.ids import new_job_id
from batchinfer.jobs.money_views import ForecastReport
from batchinfer.jobs.spec import JobSpec
from batchinfer.money import usd_to_nanos

_ERRORS: dict[int | str, dict[str, Any]] = {
    404: {"model": ErrorBody, "description": "No such job or file."},
    422: {
        "model": ErrorBody,
        "description": "A field is wrong, or the input or the model cannot be read; `param` names it.",
    },
}
MAX_ROWS = 20_000
"""Rows that one request may have tokenised; the command line has no such limit."""

router = APIRouter(prefix="/v1", tags=["jobs"], responses=_ERRORS)
Workers = Annotated[int, Query(ge=1, le=10_000, description="Workers that share the job.")]
Device = Annotated[str | None, Query(max_length=200, description="Only past jobs of this kind of device count.")]


@router.post("/jobs:estimate")
def estimate_job(  # noqa: PLR0917 -- FastAPI passes them by name
    spec: JobSpec,
    request: Request,
    service: Service,
    files: Files,
    workers: Workers = 1,
    device: Device = None,
    sample: Annotated[int, Query(ge=1, le=MAX_ROWS, description="Rows to tokenise.")] = 512,
) -> EstimateView:
    """Rows, tokens, time and cost of a job, with intervals. The body is that of `POST /v1/jobs`; nothing is submitted."""
    settings = request.app.state.settings
    question = Question(settings.usd_per_hour, workers, device or settings.device, sample_rows=sample)
    spec, _ = files.use_inputs(service.caller, spec, new_job_id())
    resolved, foresight = service.foresee(spec, base=None)
    return foresight.estimate(resolved, question)


@router.post("/jobs:explain")
def explain_job(  # noqa: PLR0917 -- FastAPI passes them by name
    spec: JobSpec,
    request: Request,
    service: Service,
    files: Files,
    workers: Workers = 1,
    device: Annotated[
        list[Annotated[str, Field(max_length=200)]] | None,
        Query(
            max_length=20,
            description="One or several: GPUs of the table, by their data sheets; at most one other, of past jobs.",
        ),
    ] = None,
    usd_per_hour: Annotated[
        Decimal | None,
        Query(
            ge=0, max_digits=18, decimal_places=9, description="Price of one such GPU, in place of the price book's."
        ),
    ] = None,
    rows: Annotated[int, Query(ge=1, le=MAX_ROWS, description="Look at the first rows only.")] = 2_000,
    kv_blocks: Annotated[int, Query(ge=1, le=10_000_000, description="KV cache that is modelled.")] = 4096,
) -> ExplainView:
    """The input as the engine will see it: shared prefixes, copies, lengths, shards, time, cost, and advice."""
    settings = request.app.state.settings
    price = None if usd_per_hour is None else usd_to_nanos(usd_per_hour)
    spec, _ = files.use_inputs(service.caller, spec, new_job_id())
    # whether the caller may read that model is decided here, before its config is read
    resolved, foresight = service.foresee(spec, base=None)
    own, speeds = request.app.state.device_speeds(device or (), resolved, settings, service.ledger, price)
    question = Question(settings.usd_per_hour, workers, own or settings.device, max_rows=rows, kv_blocks=kv_blocks)
    return foresight.explain(resolved, question, speeds=speeds)


@router.get("/jobs/{job_id}/forecast")
def get_forecast(job_id: JobId, service: Service) -> ForecastReport:
    """What was expected of a job when it was planned, beside how it came out."""
    return service.forecast(job_id)
