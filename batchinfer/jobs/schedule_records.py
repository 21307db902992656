"""Frozen records of schedules and runs as the database has them. Times are aware and UTC."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from batchinfer.jobs.cron import Calendar
from batchinfer.jobs.schedule_spec import CatchUp, MissingInput, Overlap

if TYPE_CHECKING:
    from datetime import datetime

    from sqlalchemy import Row


class RunKind(StrEnum):
    """Why a run is there."""

    SCHEDULED = "scheduled"
    MANUAL = "manual"
    BACKFILL = "backfill"


class RunState(StrEnum):
    """Where a run stands. ``done`` says that its job has ended; how, the job says."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    SKIPPED = "skipped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ScheduleRecord:
    """A schedule."""

    id: str
    tenant: str
    name: str
    cron: str
    tz: str
    job: dict[str, Any]
    catch_up: CatchUp
    overlap: Overlap
    max_active: int
    jitter_seconds: int
    missing_input: MissingInput
    wait_seconds: int
    is_paused: bool
    next_at: datetime | None
    created_at: datetime

    @property
    def calendar(self) -> Calendar:
        """When it is due."""
        return Calendar(self.cron, self.tz)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run. ``job_state`` and ``job_outcome`` are those of its job, where it has one."""

    id: int
    schedule_id: str
    logical_date: datetime
    run_id: str
    kind: RunKind
    backfill_id: str | None
    state: RunState
    reason: str | None
    job_id: str | None
    try_number: int
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    job_state: str | None = None
    job_outcome: str | None = None


def schedule_record(row: Row[Any]) -> ScheduleRecord:
    """A row of ``schedules``."""
    return ScheduleRecord(
        id=row.id,
        tenant=row.tenant_id,
        name=row.name,
        cron=row.cron,
        tz=row.tz,
        job=row.job,
        catch_up=CatchUp(row.catch_up),
        overlap=Overlap(row.overlap),
        max_active=row.max_active,
        jitter_seconds=row.jitter_seconds,
        missing_input=MissingInput(row.missing_input),
        wait_seconds=row.wait_seconds,
        is_paused=bool(row.is_paused),
        next_at=row.next_at,
        created_at=row.created_at,
    )


def run_record(row: Row[Any]) -> RunRecord:
    """A row of ``schedule_runs``, with the state of its job if the query has it."""
    return RunRecord(
        id=row.id,
        schedule_id=row.schedule_id,
        logical_date=row.logical_date,
        run_id=row.run_id,
        kind=RunKind(row.kind),
        backfill_id=row.backfill_id,
        state=RunState(row.run_state),
        reason=row.reason,
        job_id=row.job_id,
        try_number=row.try_number,
        created_at=row.created_at,
        started_at=row.started_at,
        ended_at=row.ended_at,
        job_state=getattr(row, "job_state", None),
        job_outcome=getattr(row, "job_outcome", None),
    )
