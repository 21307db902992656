"""Which models jobs and workers name."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from sqlalchemy import func, select

from batchinfer.db.session import read_transaction
from batchinfer.db.tables import Job, Worker
from batchinfer.jobs.models import RECENT_JOBS

if TYPE_CHECKING:
    from datetime import datetime

    from sqlalchemy import Engine


def model_use(engine: Engine, *, workers_since: datetime) -> tuple[Counter[str], Counter[str]]:
    """Of each model, how many of the newest jobs name it, and how many workers alive have it loaded."""
    newest = select(Job.model).order_by(Job.id.desc()).limit(RECENT_JOBS).subquery()
    of_jobs = select(newest.c.model, func.count()).group_by(newest.c.model)
    of_workers = select(Worker.models).where(Worker.last_seen_at >= workers_since)
    with read_transaction(engine) as connection:
        jobs = Counter({str(model): int(count) for model, count in connection.execute(of_jobs)})
        workers = Counter(str(model) for (models,) in connection.execute(of_workers) for model in models)
    return jobs, workers
