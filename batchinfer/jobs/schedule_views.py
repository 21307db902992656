"""What people and programs see of schedules and their runs."""

from __future__ import annotations

from datetime import datetime  # noqa: TC003 -- pydantic reads it
from typing import Any, Literal

from batchinfer.jobs.views import View


class RunView(View):
    """One run of a schedule."""

    id: str
    object: Literal["schedule_run"] = "schedule_run"
    schedule: str
    """The schedule's name."""
    logical_date: datetime
    """The moment that the run stands for, whenever it started."""
    kind: str
    """``scheduled``, ``manual`` or ``backfill``."""
    backfill_id: str | None
    state: str
    """``waiting``, ``running``, ``done`` (its job has ended), ``skipped`` or ``failed`` (without a job)."""
    reason: str | None
    """Why it waits, or why it has no job."""
    job_id: str | None
    job_state: str | None
    job_outcome: str | None
    try_number: int
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None


class RunList(View):
    """A page of runs, the latest logical date first."""

    object: Literal["list"] = "list"
    data: list[RunView]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ScheduleView(View):
    """One schedule: when, what, and how its last run went."""

    id: str
    object: Literal["schedule"] = "schedule"
    name: str
    cron: str
    tz: str
    catch_up: str
    overlap: str
    max_active: int
    jitter: str
    missing_input: str
    paused: bool
    next_runs: list[datetime]
    """The next logical dates; empty while it is paused."""
    last_run: RunView | None
    job: dict[str, Any]
    """The job that each run submits; its paths may have variables."""
    created_at: datetime


class ScheduleList(View):
    """A page of schedules by name."""

    object: Literal["list"] = "list"
    data: list[ScheduleView]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BackfillView(View):
    """What a backfill has set going."""

    id: str | None
    """None if every date has a run already."""
    object: Literal["backfill"] = "backfill"
    schedule: str
    runs: list[RunView]
    existing: int
    """Logical dates that have a run already; they are left alone."""
