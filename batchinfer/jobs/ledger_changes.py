"""What may be changed of a job after it was submitted."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from sqlalchemy import delete, update

from batchinfer.db.tables import Job, JobTag, Shard
from batchinfer.errors import ConflictError, InvalidSpecError, PreconditionError
from batchinfer.jobs.ledger_base import LedgerBase
from batchinfer.jobs.ledger_jobs import add_tags
from batchinfer.jobs.ledger_rows import job_record
from batchinfer.jobs.status import JobState, ShardState

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from sqlalchemy import Connection, Row

    from batchinfer.jobs.records import JobRecord

LABELS = frozenset({"name", "tags"})
"""What may be changed at any time; the rest only while rows can still run."""
COLUMNS = ("name", "tags", "priority", "deadline_at", "budget_nanos")


def version_of(job: JobRecord) -> str:
    """Names the state of what may be changed: two people who read the same version read the same values."""
    values = [getattr(job, column) for column in COLUMNS]
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Changes(LedgerBase):
    """Change a job."""

    def change(self, job_id: str, changes: Mapping[str, Any], *, version: str | None = None) -> JobRecord:
        """Set columns of :data:`COLUMNS`, if the job is still at ``version`` (see :func:`version_of`).

        Raises:
            NotFoundError: no such job.
            PreconditionError: somebody changed it since.
            ConflictError: priority, deadline or budget of a job that has ended or is ending.
            InvalidSpecError: a deadline that has passed.
        """

        def work(connection: Connection, now: datetime) -> JobRecord:
            job = self._lock_job(connection, job_id)
            if version is not None and version != version_of(job_record(job)):
                raise PreconditionError(f"job {job_id} was changed since you read it; read it again, then change it")
            _check(job, changes, now)
            if changes:
                connection.execute(update(Job).where(Job.id == job_id).values(dict(changes)))
                if "tags" in changes:
                    connection.execute(delete(JobTag).where(JobTag.job_id == job_id))
                    add_tags(connection, job_id, job.tenant_id, changes["tags"])
                _change_shards(connection, job_id, changes)
                self._tell(connection, job_id, now, "changed", fields=sorted(changes))
                self._hold_if_spent(connection, job_id, now)
            return job_record(self._lock_job(connection, job_id))

        return self._write(work)


def _check(job: Row[Any], changes: Mapping[str, Any], now: datetime) -> None:
    steering = set(changes) - LABELS
    if steering and (JobState(job.state).is_terminal or job.closing is not None or job.state == JobState.FINALIZING):
        raise ConflictError(f"job {job.id} is {job.state} and ending; only its name and tags can be changed")
    deadline = changes.get("deadline_at")
    if deadline is not None and deadline <= now:
        raise InvalidSpecError(f"the deadline {deadline.isoformat()} has passed already", param="deadline")


def _change_shards(connection: Connection, job_id: str, changes: Mapping[str, Any]) -> None:
    """The order of leasing is kept with the shards."""
    values: dict[str, Any] = {}
    if "priority" in changes:
        values["rank"] = -changes["priority"]
    if "deadline_at" in changes:
        # whoever looks after deadlines says anew whether it is in danger
        values["pressure"] = 0
    if values:
        is_open = (Shard.job_id == job_id) & (Shard.state != ShardState.COMMITTED)
        connection.execute(update(Shard).where(is_open).values(values))
