"""How fast a job goes, and when it will be done."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from batchinfer.jobs import queries
from batchinfer.jobs.status import JobState

if TYPE_CHECKING:
    from datetime import datetime

    from sqlalchemy import Connection, Engine

    from batchinfer.jobs.records import JobRecord

WINDOW = timedelta(seconds=120)
"""Speed is measured over this long: several checkpoints, yet soon true again after a pause or a new worker."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Rows and generated tokens a second, and seconds to the end; None where not known."""

    rows_per_second: float | None = None
    tokens_per_second: float | None = None
    eta_seconds: float | None = None


def measure_speed(source: Engine | Connection, job: JobRecord, now: datetime) -> Speed:
    """Speed of the last two minutes while a job runs, of the whole run once it has ended."""
    if job.started_at is None:
        return Speed()
    if job.finished_at is not None:
        return whole_run_speed(job, job.finished_at)
    if job.state is not JobState.IN_PROGRESS:
        return Speed()
    since = max(job.started_at, now - WINDOW)
    recent = queries.recent_work(source, job.id, since)
    if not recent.num_rows:
        # slower than a row in two minutes, or a worker has just come back: the average is the best guess there is
        return _with_eta(whole_run_speed(job, now), job)
    return _with_eta(_speed(recent.num_rows, recent.completion_tokens, (now - since).total_seconds()), job)


def whole_run_speed(job: JobRecord, end: datetime) -> Speed:
    """Average from the first lease to ``end``."""
    assert job.started_at is not None
    return _speed(job.counts.total, job.usage.completion_tokens, (end - job.started_at).total_seconds())


def _speed(num_rows: int, num_tokens: int, seconds: float) -> Speed:
    if seconds <= 0 or not num_rows:
        return Speed()
    return Speed(num_rows / seconds, num_tokens / seconds)


def _with_eta(speed: Speed, job: JobRecord) -> Speed:
    if not speed.rows_per_second or job.num_rows is None:
        return speed
    remaining = job.num_rows - job.counts.total
    return Speed(speed.rows_per_second, speed.tokens_per_second, remaining / speed.rows_per_second)
