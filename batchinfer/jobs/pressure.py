"""Deadlines in danger: the one rule by which the chance to finish in time moves a job in the order of leasing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import select, update

from batchinfer.db.tables import HAS_OPEN_DEADLINE, Job, Shard
from batchinfer.jobs.ledger_base import LedgerBase
from batchinfer.jobs.ledger_rows import job_record
from batchinfer.jobs.status import RUNNABLE, ShardState

if TYPE_CHECKING:
    from datetime import datetime

    from sqlalchemy import Connection

    from batchinfer.jobs.records import JobRecord

SAFE = 0.9
"""Jobs that finish in time with this probability wait for their turn like all others."""
HOPELESS = 0.02
"""Jobs below this do not push in: they would be late anyway, and make others late, too."""
MAX_WATCHED = 500
"""Deadlines looked at together, the nearest first."""

_WATCHED = (
    select(Job)
    .where(HAS_OPEN_DEADLINE, Job.state.in_(RUNNABLE), Job.planned_at.is_not(None))
    .order_by(Job.deadline_at)
    .limit(MAX_WATCHED)
)


def pressure_of(probability: float | None) -> int:
    """Sort key of a job that finishes in time with this probability (None: not known); lower goes first.

    Steps, not a smooth function: jobs in like danger share, and a job's shards are written only when its step changes.
    """
    if probability is None or probability >= SAFE or probability < HOPELESS:
        return 0
    return -1 if probability >= 0.5 else -2


class Pressure(LedgerBase):
    """Keeps the shards' ``pressure``."""

    def press(self, job_id: str, probability: float | None) -> bool:
        """Say how likely a job finishes in time; tell whether that changed its place. Raises NotFoundError."""
        pressure = pressure_of(probability)

        def work(connection: Connection, _now: datetime) -> bool:
            is_open = (Shard.job_id == job_id) & (Shard.state != ShardState.COMMITTED)
            others = select(Shard.id).where(is_open, Shard.pressure != pressure).limit(1)
            if connection.execute(others).one_or_none() is None:
                return False
            self._lock_job(connection, job_id)
            connection.execute(update(Shard).where(is_open).values(pressure=pressure))
            return True

        return self._write(work)

    def jobs_with_deadlines(self) -> list[JobRecord]:
        """Jobs that run towards a deadline, the nearest first, a bounded number."""

        def work(connection: Connection, _now: datetime) -> list[JobRecord]:
            return [job_record(row) for row in connection.execute(_WATCHED)]

        return self._read(work)
