"""Whether the server lives, whether it can take jobs, and numbers for Prometheus."""

from http import HTTPStatus

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from sqlalchemy.exc import SQLAlchemyError

from batchinfer import __version__
from batchinfer.api.deps import PlatformService, PublicService
from batchinfer.api.schemas import Health, Readiness
from batchinfer.db import migrate
from batchinfer.jobs import queries
from batchinfer.jobs.service import JobService

router = APIRouter(tags=["health"])


@router.get("/healthz")
def healthz() -> Health:
    """The process answers; nothing else is looked at."""
    return Health(version=__version__)


@router.get("/readyz", responses={503: {"model": Readiness}})
def readyz(service: PublicService, response: Response) -> Readiness:
    """The database answers and has this program's schema."""
    checks = _check_database(service)
    is_ready = all(text == "ok" for text in checks.values())
    if not is_ready:
        response.status_code = HTTPStatus.SERVICE_UNAVAILABLE
    return Readiness(status="ready" if is_ready else "not_ready", checks=checks)


def _check_database(service: JobService) -> dict[str, str]:
    try:
        found = migrate.current(service.engine)
    except SQLAlchemyError as error:
        # the class only: a driver's message may hold the URL with its password
        return {"database": f"does not answer ({type(error).__name__})", "migrations": "unknown"}
    needed = migrate.head()
    migrated = "ok" if found == needed else f"at {found or 'none'}, needs {needed}: run `batchinfer db upgrade`"
    return {"database": "ok", "migrations": migrated}


@router.get("/metrics", response_class=PlainTextResponse)
def metrics(service: PlatformService) -> PlainTextResponse:
    """Jobs by state, shards that wait and workers alive, in Prometheus' text format."""
    lines = ["# HELP batchinfer_jobs Jobs by state.", "# TYPE batchinfer_jobs gauge"]
    lines += [
        f'batchinfer_jobs{{state="{name}"}} {number}' for name, number in queries.jobs_by_state(service.engine).items()
    ]
    lines += [
        "# HELP batchinfer_pending_shards Shards that a worker could lease now.",
        "# TYPE batchinfer_pending_shards gauge",
    ]
    lines += [
        f'batchinfer_pending_shards{{model="{_label(model)}"}} {number}'
        for model, number in service.ledger.pending_models().items()
    ]
    lines += [
        "# HELP batchinfer_workers Workers alive.",
        "# TYPE batchinfer_workers gauge",
        f"batchinfer_workers {service.num_workers()}",
    ]
    return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4; charset=utf-8")


def _label(text: str) -> str:
    """A label's value as the text format wants it."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
