"""Schedules: jobs that come back by the clock, their runs, backfills."""

import re
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Path, Query, Response

from batchinfer.api.deps import Limit, Service
from batchinfer.api.schemas import BackfillBody, ErrorBody, TriggerBody
from batchinfer.errors import NotFoundError
from batchinfer.jobs.schedule_records import RunState
from batchinfer.jobs.schedule_spec import ScheduleSpec
from batchinfer.jobs.schedule_views import BackfillView, RunList, RunView, ScheduleList, ScheduleView
from batchinfer.jobs.schedules import ScheduleService

_NAME = re.compile(r"[\w.-]{1,100}", re.ASCII)
_ERRORS: dict[int | str, dict[str, Any]] = {
    404: {"model": ErrorBody, "description": "No such schedule."},
    409: {"model": ErrorBody, "description": "There is one of that name, or the logical date has a run."},
    422: {"model": ErrorBody, "description": "A field is wrong; `param` names it."},
}
router = APIRouter(prefix="/v1/schedules", tags=["schedules"], responses=_ERRORS)


def get_schedules(service: Service) -> ScheduleService:
    """The schedules beside the jobs, for the same caller."""
    return ScheduleService.of(service)


def get_name(schedule: Annotated[str, Path(description="Name or id of a schedule.")]) -> str:
    """The name of the path. Text that no name can be never reaches the database. Raises NotFoundError."""
    if not _NAME.fullmatch(schedule):
        raise NotFoundError("no such schedule; GET /v1/schedules lists them", param="schedule")
    return schedule


Schedules = Annotated[ScheduleService, Depends(get_schedules)]
Name = Annotated[str, Depends(get_name)]
After = Annotated[str | None, Query(pattern=r"^[\w.-]{1,100}$", description="Last id of the page before.")]


@router.post("", status_code=201)
def add_schedule(spec: ScheduleSpec, response: Response, schedules: Schedules) -> ScheduleView:
    """Add a schedule. Paths of its `job` are absolute or URIs, and may have variables such as `{{ logical_date }}`."""
    view = schedules.add(spec, base=None)
    response.headers["Location"] = f"/v1/schedules/{view.id}"
    return view


@router.get("")
def list_schedules(schedules: Schedules, limit: Limit = 20, after: After = None) -> ScheduleList:
    """List schedules by name, with their next and last runs."""
    return schedules.list(limit=limit, after=after)


@router.get("/{schedule}")
def get_schedule(schedule: Name, schedules: Schedules) -> ScheduleView:
    """One schedule by name or id."""
    return schedules.get(schedule)


@router.delete("/{schedule}")
def remove_schedule(schedule: Name, schedules: Schedules) -> ScheduleView:
    """Remove a schedule and the list of its runs; their jobs stay."""
    return schedules.remove(schedule)


@router.post("/{schedule}/pause")
def pause_schedule(schedule: Name, schedules: Schedules) -> ScheduleView:
    """Hold a schedule and its backfills; jobs at work go on."""
    return schedules.pause(schedule)


@router.post("/{schedule}/resume")
def resume_schedule(schedule: Name, schedules: Schedules) -> ScheduleView:
    """Let a schedule go on; what passed meanwhile is caught up with as `catch_up` says."""
    return schedules.resume(schedule)


@router.post("/{schedule}/trigger", status_code=202)
def trigger_schedule(
    schedule: Name, schedules: Schedules, body: Annotated[TriggerBody | None, Body()] = None
) -> RunView:
    """Run a schedule's job now, paused or not. A worker starts it within seconds."""
    return schedules.trigger(schedule, logical_date=None if body is None else body.logical_date)


@router.post("/{schedule}/backfill", status_code=202)
def backfill_schedule(schedule: Name, schedules: Schedules, body: BackfillBody) -> BackfillView:
    """Run every moment of a range in the past. Dates that have a run are left alone."""
    return schedules.backfill(schedule, start=body.start, end=body.end, parallel=body.parallel, retry=body.retry)


@router.get("/{schedule}/runs")
def list_runs(
    schedule: Name,
    schedules: Schedules,
    limit: Limit = 20,
    after: After = None,
    state: Annotated[RunState | None, Query(description="Only runs in this state.")] = None,
) -> RunList:
    """Runs of a schedule, the latest logical date first: their jobs, or why they have none."""
    return schedules.runs(schedule, state=state, limit=limit, after=after)
