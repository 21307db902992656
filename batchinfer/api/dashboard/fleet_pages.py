"""Pages of what stands around jobs: schedules, workers, usage; and the files that pages load."""

from datetime import UTC, datetime
from importlib.resources import files as resource_files
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from batchinfer.api.dashboard.job_pages import SEE_OTHER
from batchinfer.api.dashboard.rendering import PageRoute, render
from batchinfer.api.deps import Service
from batchinfer.api.routes.schedules import After, Name, Schedules
from batchinfer.jobs.history import use_by_day

PAGE = 50
ASSET_SECONDS = 300

router = APIRouter(route_class=PageRoute, include_in_schema=False, default_response_class=HTMLResponse)


@router.get("/schedules")
def schedules_page(request: Request, schedules: Schedules, after: After = None) -> HTMLResponse:
    """Schedules by name, with their next and last runs."""
    return render(request, "schedules.html", schedules=schedules.list(limit=PAGE, after=after))


@router.get("/schedules/{schedule}")
def schedule_page(request: Request, schedule: Name, schedules: Schedules) -> HTMLResponse:
    """One schedule and its latest runs."""
    view = schedules.get(schedule)
    return render(request, "schedule.html", schedule=view, runs=schedules.runs(view.id, limit=PAGE).data)


@router.post("/schedules/{schedule}/pause")
def pause_schedule_from_page(schedule: Name, schedules: Schedules) -> Response:
    """Hold a schedule, and show it."""
    return RedirectResponse(f"/schedules/{schedules.pause(schedule).id}", SEE_OTHER)


@router.post("/schedules/{schedule}/resume")
def resume_schedule_from_page(schedule: Name, schedules: Schedules) -> Response:
    """Let a schedule go on, and show it."""
    return RedirectResponse(f"/schedules/{schedules.resume(schedule).id}", SEE_OTHER)


@router.post("/schedules/{schedule}/trigger")
def trigger_schedule_from_page(schedule: Name, schedules: Schedules) -> Response:
    """Run now, and show the schedule."""
    view = schedules.get(schedule)
    schedules.trigger(view.id)
    return RedirectResponse(f"/schedules/{view.id}", SEE_OTHER)


@router.get("/workers")
def workers_page(request: Request, service: Service) -> HTMLResponse:
    """Workers with their last sign of life and their model; for callers that see every tenant."""
    return render(request, "workers.html", workers=service.workers().data)


@router.get("/usage")
def usage_page(request: Request, service: Service, days: Annotated[int, Query(ge=1, le=366)] = 30) -> HTMLResponse:
    """Rows, tokens and cost by day."""
    used = use_by_day(service.engine, service.caller, now=datetime.now(UTC), num_days=days)
    return render(request, "usage.html", days=used)


@router.get("/assets/dashboard.css")
def style_sheet() -> Response:
    """The pages' style sheet."""
    return _asset("dashboard.css", "text/css")


@router.get("/assets/dashboard.js")
def script() -> Response:
    """The pages' script."""
    return _asset("dashboard.js", "text/javascript")


def _asset(name: str, kind: str) -> Response:
    text = resource_files("batchinfer.api.dashboard").joinpath("static", name).read_text(encoding="utf-8")
    return Response(text, media_type=kind, headers={"Cache-Control": f"private, max-age={ASSET_SECONDS}"})
