"""Storing a plan: the job's shards."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from sqlalchemy import insert

from batchinfer.db.tables import Shard
from batchinfer.jobs.lease_order import RUN_LENGTH, join
from batchinfer.jobs.ledger_rows import job_record
from batchinfer.jobs.ledger_steps import Steps
from batchinfer.jobs.needs import needs_of
from batchinfer.jobs.status import JobState, ShardState

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from datetime import datetime

    from sqlalchemy import Connection, Row

    from batchinfer.jobs.leases import ShardPlan
    from batchinfer.jobs.records import JobRecord

BATCH = 1000
"""Shards inserted at once."""


class Planning(Steps):
    """The planner's result."""

    def commit_plan(
        self,
        job_id: str,
        token: str,
        *,
        num_rows: int,
        fingerprint: Mapping[str, Any],
        warnings: Sequence[str],
        output: str,
        shards: Iterable[ShardPlan],
    ) -> JobRecord:
        """Store the plan in one transaction; shards are inserted in batches as the iterable yields them.

        The job becomes ``queued``, or ``finalizing`` if there are no rows. Shards must tile ``[0, num_rows)``.
        A transient database error is not retried here, since the iterable is spent: the plan is made again.

        Raises:
            FencedError: the planning lease was lost.
            ValueError: shards overlap, leave a gap or are empty.
        """

        def work(connection: Connection, now: datetime) -> JobRecord:
            job = self._fence_step(connection, job_id, token, JobState.VALIDATING)
            num_shards = _insert_shards(connection, job, num_rows, shards, now)
            self._set_state(
                connection, job, JobState.QUEUED if num_shards else JobState.FINALIZING, now,
                num_rows=num_rows, num_shards=num_shards, open_shards=num_shards, fingerprint=dict(fingerprint),
                warnings=list(warnings), output=output, planned_at=now,
            )  # fmt: skip
            self._tell(connection, job_id, now, "planned", rows=num_rows, shards=num_shards)
            return job_record(self._lock_job(connection, job_id))

        return self._write(work, again=False)


def _insert_shards(
    connection: Connection, job: Row[Any], num_rows: int, shards: Iterable[ShardPlan], now: datetime
) -> int:
    num_shards = 0
    needs = needs_of(job.spec.get("pool"), job.spec.get("device_kind"))
    first_key = join(connection, tenant=job.tenant_id, queue=job.model, needs=needs, rank=-job.priority, now=now)
    rows = _shard_rows(job, num_rows, shards, needs=needs, first_key=first_key)
    while batch := list(islice(rows, BATCH)):
        connection.execute(insert(Shard), batch)
        num_shards += len(batch)
    return num_shards


def _shard_rows(
    job: Row[Any], num_rows: int, shards: Iterable[ShardPlan], *, needs: str, first_key: int
) -> Iterator[dict[str, Any]]:
    """Check that the shards tile the input, and yield their rows."""
    next_row = 0
    fair_key = next_key = first_key
    for index, shard in enumerate(shards):
        if shard.index != index or shard.row_start != next_row or shard.row_end <= next_row:
            raise ValueError(f"shard {shard} should have index {index} and begin at row {next_row}")
        next_row = shard.row_end
        if index % RUN_LENGTH == 0:
            fair_key = next_key
        next_key += max(1, shard.est_tokens)
        yield {
            "job_id": job.id,
            "tenant_id": job.tenant_id,
            "shard_index": index,
            "row_start": shard.row_start,
            "row_end": shard.row_end,
            "est_tokens": shard.est_tokens,
            "model": job.model,
            "state": ShardState.PENDING,
            "queue": job.model,
            "rank": -job.priority,
            "needs": needs,
            "fair_key": fair_key,
            "todo_rows": shard.row_end - shard.row_start,
        }
    if next_row != num_rows:
        raise ValueError(f"the shards end at row {next_row}, the input at {num_rows}")
