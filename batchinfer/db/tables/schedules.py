"""Tables of schedules and of their runs. No rules live here."""

from datetime import datetime
from typing import Any

from sqlalchemy import ForeignKey, Index, String, text
from sqlalchemy.orm import Mapped, mapped_column

from batchinfer.db.tables.base import Base
from batchinfer.db.types import BigId, SafeText

# Partial indexes: see batchinfer.db.tables.jobs.
MAY_FIRE = text("is_paused = 0 AND due_at IS NOT NULL")
WAITS = text("run_state = 'waiting'")
IS_OPEN = text("run_state IN ('waiting', 'running')")


class ScheduleRow(Base):
    """A schedule: when, what, and what to do when things are not as planned.

    ``next_at`` is the next logical date that has no run yet, ``due_at`` the same with its jitter. ``job`` is a job's
    spec as JSON, its paths still templates. ``is_paused`` is 0 or 1.
    """

    __tablename__ = "schedules"

    id: Mapped[str] = mapped_column(String(30), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(40), server_default="default")
    name: Mapped[str] = mapped_column(String(100))
    cron: Mapped[str]
    tz: Mapped[str]
    job: Mapped[dict[str, Any]]
    catch_up: Mapped[str] = mapped_column(String(20))
    overlap: Mapped[str] = mapped_column(String(20))
    max_active: Mapped[int]
    jitter_seconds: Mapped[int]
    missing_input: Mapped[str] = mapped_column(String(20))
    wait_seconds: Mapped[int]
    is_paused: Mapped[int]
    next_at: Mapped[datetime | None]
    due_at: Mapped[datetime | None]
    created_at: Mapped[datetime]

    __table_args__ = (
        Index("uq_schedules_tenant_id_name", "tenant_id", "name", unique=True),
        Index("ix_schedules_due_at", "due_at", sqlite_where=MAY_FIRE, postgresql_where=MAY_FIRE),
    )


class ScheduleRunRow(Base):
    """One run of a schedule: what became of one logical date. ``try_number`` counts the jobs that were made for it.

    While it waits nobody looks at it before ``look_at``. ``parallel`` bounds the runs of one backfill.
    """

    __tablename__ = "schedule_runs"

    id: Mapped[int] = mapped_column(BigId, primary_key=True)
    schedule_id: Mapped[str] = mapped_column(ForeignKey("schedules.id"))
    logical_date: Mapped[datetime]
    run_id: Mapped[str] = mapped_column(String(30), unique=True)
    kind: Mapped[str] = mapped_column(String(20))
    backfill_id: Mapped[str | None] = mapped_column(String(30))
    parallel: Mapped[int | None]
    run_state: Mapped[str] = mapped_column(String(20))
    reason: Mapped[str | None] = mapped_column(SafeText)
    job_id: Mapped[str | None] = mapped_column(ForeignKey("jobs.id"))
    try_number: Mapped[int]
    look_at: Mapped[datetime]
    created_at: Mapped[datetime]
    started_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]

    __table_args__ = (
        Index("uq_schedule_runs_schedule_id_logical_date", "schedule_id", "logical_date", unique=True),
        Index("ix_schedule_runs_look_at", "look_at", sqlite_where=WAITS, postgresql_where=WAITS),
        Index("ix_schedule_runs_open", "schedule_id", "run_state", sqlite_where=IS_OPEN, postgresql_where=IS_OPEN),
        {"sqlite_autoincrement": True},
    )
