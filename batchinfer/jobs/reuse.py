"""Whose results may stand in for a row: the scope of a job, and the indexes of finished jobs of that scope."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import delete, insert, select

from batchinfer.db.tables import Job, KeyIndexRow
from batchinfer.jobs.ledger_base import LedgerBase

if TYPE_CHECKING:
    from datetime import datetime

    from sqlalchemy import Connection

    from batchinfer.jobs.records import JobRecord
    from batchinfer.jobs.spec import JobSpec

MAX_SOURCES = 8
"""How many finished jobs of a scope, the latest first, are searched. Each night's index has that night's copies too."""
NO_PART_OF_ANSWERS = frozenset(
    {
        "inputs", "output", "name", "tags", "limit", "id_column", "column_prefix", "shard_rows", "priority", "deadline",
        "budget_usd", "max_attempts", "reuse_results", "adapter", "adapter_folder",
        "speculation",
    }
)  # fmt: skip
"""Fields of a spec that change no answer. All others are part of the scope, also those that a later version adds.

A row's key holds its adapter by content, whatever it was called.
"""


def scope_parts(job: JobRecord, *, revision: str, version: str) -> dict[str, Any]:
    """What must be equal before rows of two jobs are compared: tenant, model, its revision, spec, program."""
    spec: JobSpec = job.spec
    fields = spec.model_dump(mode="json", exclude=set(NO_PART_OF_ANSWERS))
    return {"tenant": job.tenant_id, "revision": revision, "version": version, "spec": fields}


@dataclass(frozen=True, slots=True)
class KeySource:
    """A finished job's index and output."""

    job_id: str
    path: str
    output: str


class KeyIndexes(LedgerBase):
    """Which finished jobs have an index."""

    def add_key_index(self, job: JobRecord, scope: str, path: str, num_rows: int) -> None:
        """Note a job's index; a job has one."""

        def work(connection: Connection, now: datetime) -> None:
            connection.execute(delete(KeyIndexRow).where(KeyIndexRow.job_id == job.id))
            connection.execute(
                insert(KeyIndexRow).values(
                    job_id=job.id, tenant_id=job.tenant_id, scope=scope, path=path, num_rows=num_rows, created_at=now
                )
            )

        self._write(work)

    def find_key_indexes(self, tenant_id: str, scope: str, *, limit: int = MAX_SOURCES) -> list[KeySource]:
        """Indexes of a tenant's scope, the latest first."""

        def work(connection: Connection, _now: datetime) -> list[KeySource]:
            index = KeyIndexRow
            query = select(index.job_id, index.path, Job.output).join(Job, Job.id == index.job_id)
            query = query.where(index.tenant_id == tenant_id, index.scope == scope, Job.output.is_not(None))
            query = query.order_by(index.created_at.desc(), index.job_id.desc()).limit(limit)
            return [KeySource(row.job_id, row.path, row.output) for row in connection.execute(query)]

        return self._read(work)
