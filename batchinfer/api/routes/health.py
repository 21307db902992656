"""Whether the server lives, whether it can take jobs, and numbers for Prometheus."""

from http import HTTPStatus

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from sqlalchemy.exc import SQLAlchemyError

from batchinfer import __version__
from batchinfer.api.deps import PlatformService, PublicService
from batchinfer.api.schemas import Health, Readiness
from batchinfer.db import migrate
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
def metrics(service: PlatformService, request: Request) -> PlainTextResponse:
    """Jobs by state, work that waits, workers alive and requests answered, in Prometheus' text format."""
    del service  # asked for, so that only callers who see every tenant get here
    return PlainTextResponse(generate_latest(request.app.state.metrics.registry), media_type=CONTENT_TYPE_LATEST)
