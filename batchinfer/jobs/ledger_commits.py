"""Committing results: parts as they come, a shard when its rows have all ended."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sqlalchemy import delete, func, insert, select, update

from batchinfer.db.tables import Attempt, Job, LedgerEntry, Part, RowErrorRow, Shard
from batchinfer.errors import ConflictError
from batchinfer.jobs.drift import DRIFT_WARNING, Drift
from batchinfer.jobs.ledger_leases import Leases, closing_status
from batchinfer.jobs.ledger_rows import count_columns, job_record, row_counts, spec_of
from batchinfer.jobs.ledger_usage import count_usage
from batchinfer.jobs.status import AttemptState, JobState, ShardState
from batchinfer.jobs.webhook_events import Event, tell

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from sqlalchemy import Connection, Row

    from batchinfer.jobs.leases import PartCommit, RowErrorSample, SentinelFound, ShardResult
    from batchinfer.jobs.records import JobRecord

MAX_SAMPLES = 1000
"""Row errors kept of a job; the Parquet output has all."""
MAX_SAMPLES_OF_CODE = 100
"""Row errors kept of a job and code."""


class Commits(Leases):
    """Fenced by the attempt: whatever a zombie hands in is refused and changes nothing."""

    def commit_part(self, attempt_id: int, part: PartCommit) -> int:
        """Add a part, its counters and its ledger entry; return the part's id. The same path twice is one part.

        Raises:
            FencedError: the attempt no longer holds the shard; the file is garbage.
            ValueError: the part's numbers contradict each other or the shard.
        """

        def work(connection: Connection, now: datetime) -> int:
            job, attempt, shard = self._fence(connection, attempt_id)
            known = select(Part.id).where(Part.attempt_id == attempt_id, Part.path == part.path)
            if (part_id := connection.execute(known).scalar_one_or_none()) is not None:
                return part_id
            _check_part(part, shard)
            self._start(connection, job, now)
            part_id = _insert_part(connection, attempt, part, now)
            _count_part(connection, attempt, part)
            count_usage(
                connection, job, now, num_rows=part.num_rows, **asdict(part.usage), device_ns=part.device_ns,
                **{name: getattr(part, name) for name in ("metered_nanos", "list_nanos", "saved_nanos")},
            )  # fmt: skip
            _keep_samples(connection, shard, part.row_errors)
            self._hold_if_spent(connection, job.id, now)
            return part_id

        return self._write(work)

    def commit_shard(self, attempt_id: int, result: ShardResult, sentinel: SentinelFound | None = None) -> JobRecord:
        """Publish the shard's file, and what a ``sentinel`` found in it; the last shard moves the job to ``finalizing``.

        Raises:
            FencedError: the attempt no longer holds the shard; the file is garbage.
            ConflictError: ``shard_incomplete``: rows are left without an outcome.
        """

        def work(connection: Connection, now: datetime) -> JobRecord:
            mine = select(Attempt.job_id).where(
                Attempt.id == attempt_id,
                Attempt.state == AttemptState.COMMITTED,
                Attempt.result_path == result.path,
            )
            if (job_id := connection.execute(mine).scalar_one_or_none()) is None:
                job_id = self._commit_shard(connection, attempt_id, result, sentinel, now)
            return job_record(self._lock_job(connection, job_id))

        return self._write(work)

    def _commit_shard(
        self,
        connection: Connection,
        attempt_id: int,
        result: ShardResult,
        sentinel: SentinelFound | None,
        now: datetime,
    ) -> str:
        job, attempt, shard = self._fence(connection, attempt_id)
        _check_complete(job, shard, result, now)
        self._start(connection, job, now)
        state = AttemptState.COMMITTED
        self._end_attempt(connection, attempt, now, state=state, metered_ns=0, result_path=result.path)
        _publish(connection, shard, result)
        if sentinel is not None:
            self._note_drift(connection, job, sentinel, now)
        open_shards = connection.execute(
            update(Job).where(Job.id == job.id).values(open_shards=Job.open_shards - 1).returning(Job.open_shards)
        ).scalar_one()
        if open_shards == 0 and job.state != JobState.FAILED:
            self._set_state(connection, self._lock_job(connection, job.id), JobState.FINALIZING, now)
        return str(job.id)

    def _note_drift(self, connection: Connection, job: Row[Any], sentinel: SentinelFound, now: datetime) -> None:
        """Add to a locked job's drift; say it loudly, once, when that is above the threshold."""
        drift = Drift.from_dict(job.drift or {})
        drift.add(Drift.from_dict(sentinel.drift))
        warnings = list(job.warnings)
        if sentinel.problem is not None and sentinel.problem not in warnings:
            warnings.append(sentinel.problem)
        threshold = spec_of(job).sentinel_threshold
        if drift.kl_mean > threshold and not any(warning.startswith(DRIFT_WARNING) for warning in warnings):
            warnings.append(
                f"{DRIFT_WARNING}: a mean divergence of {drift.kl_mean:.4f} nats a token from float32, above the "
                f"threshold of {threshold:g}, over the first {drift.num_rows} rows that the sentinel compared"
            )
            found = {
                "kl_mean": drift.kl_mean, "kl_p99": drift.kl_p99, "rows": drift.num_rows, "threshold": threshold,
            }  # fmt: skip
            self._tell(connection, job.id, now, "drift", **found)
            about = {"object": "job", "id": job.id, "tenant": job.tenant_id, "name": job.name, "tags": job.tags}
            tell(connection, job.tenant_id, Event.JOB_DRIFT, about | {"model": job.model, "drift": found}, now)
        connection.execute(update(Job).where(Job.id == job.id).values(drift=drift.to_dict(), warnings=warnings))


def _check_part(part: PartCommit, shard: Row[Any]) -> None:
    """Refuse numbers that would break the books."""
    if part.num_rows < 1 or part.counts.total != part.num_rows:
        raise ValueError(f"part {part.path} has {part.num_rows} rows but counts {part.counts.total}")
    if shard.done_rows + part.num_rows > shard.todo_rows:
        remaining = shard.todo_rows - shard.done_rows
        raise ValueError(f"part {part.path} has {part.num_rows} rows, but only {remaining} of its shard remain")
    num_replaced = part.num_rows if shard.generation else 0
    if part.replaced.total != num_replaced:
        raise ValueError(f"part {part.path} replaces {part.replaced.total} rows; expected {num_replaced}")
    left = row_counts(shard) - part.replaced
    if min(left.as_dict().values()) < 0:
        raise ValueError(f"part {part.path} replaces outcomes that its shard does not have: {part.replaced}")


def _insert_part(connection: Connection, attempt: Row[Any], part: PartCommit, now: datetime) -> int:
    part_id: int = connection.execute(
        insert(Part)
        .values(
            job_id=attempt.job_id, shard_id=attempt.shard_id, attempt_id=attempt.id, generation=attempt.generation,
            path=part.path, num_rows=part.num_rows, num_bytes=part.num_bytes, sha256=part.sha256,
            device_ns=part.device_ns, replaced=part.replaced.as_dict(), created_at=now,
            metered_nanos=part.metered_nanos, list_nanos=part.list_nanos,
            saved_nanos=part.saved_nanos, saved_list_nanos=part.saved_list_nanos,
            **count_columns(part.counts), **asdict(part.usage),
        )
        .returning(Part.id)
    ).scalar_one()  # fmt: skip
    connection.execute(
        insert(LedgerEntry).values(
            source_id=f"part:{part_id}", job_id=attempt.job_id, worker_id=attempt.worker_id, kind="rows",
            device_ns=part.device_ns, nanos=part.metered_nanos, list_nanos=part.list_nanos, created_at=now,
        )
    )  # fmt: skip
    return part_id


def _count_part(connection: Connection, attempt: Row[Any], part: PartCommit) -> None:
    """Add the part to its attempt, shard and job."""
    change = count_columns(part.counts - part.replaced)
    connection.execute(
        update(Attempt)
        .where(Attempt.id == attempt.id)
        .values(done_rows=Attempt.done_rows + part.num_rows, device_ns=Attempt.device_ns + part.device_ns)
    )
    connection.execute(
        update(Shard)
        .where(Shard.id == attempt.shard_id)
        .values(done_rows=Shard.done_rows + part.num_rows, num_faults=0, **_plus(Shard, change))
    )
    amounts = ("metered_nanos", "list_nanos", "saved_nanos", "saved_list_nanos")
    work = asdict(part.usage) | {name: getattr(part, name) for name in amounts}
    if changes := _plus(Job, change | work):
        connection.execute(update(Job).where(Job.id == attempt.job_id).values(changes))


def _plus(table: type[Job | Shard], change: Mapping[str, int]) -> dict[str, Any]:
    return {column: getattr(table, column) + amount for column, amount in change.items() if amount}


def _keep_samples(connection: Connection, shard: Row[Any], samples: Sequence[RowErrorSample]) -> None:
    """Keep row errors within the job's bounds; a row's newer error replaces its older one."""
    if not samples:
        return
    job_id = shard.job_id
    rows = [sample.row_index for sample in samples]
    connection.execute(delete(RowErrorRow).where(RowErrorRow.job_id == job_id, RowErrorRow.row_index.in_(rows)))
    by_code = select(RowErrorRow.code, func.count()).where(RowErrorRow.job_id == job_id).group_by(RowErrorRow.code)
    kept = {code: int(count) for code, count in connection.execute(by_code)}
    total = sum(kept.values())
    values = []
    for sample in samples:
        if total < MAX_SAMPLES and kept.get(sample.code, 0) < MAX_SAMPLES_OF_CODE:
            total += 1
            kept[sample.code] = kept.get(sample.code, 0) + 1
            values.append({"job_id": job_id, "shard_id": shard.id, "generation": shard.generation, **asdict(sample)})
    if values:
        connection.execute(insert(RowErrorRow), values)


def _check_complete(job: Row[Any], shard: Row[Any], result: ShardResult, now: datetime) -> None:
    remaining = shard.todo_rows - shard.done_rows
    # in a retry, rows that do not run any more keep the outcome they had
    may_leave_rows = shard.generation > 0 and closing_status(job, now) is not None
    if remaining and not may_leave_rows:
        raise ConflictError(
            f"shard {shard.shard_index} of job {job.id} has {remaining} rows without an outcome",
            code="shard_incomplete",
        )
    if result.num_rows != shard.row_end - shard.row_start:
        raise ValueError(f"{result.path} has {result.num_rows} rows, its shard {shard.row_end - shard.row_start}")


def _publish(connection: Connection, shard: Row[Any], result: ShardResult) -> None:
    connection.execute(
        update(Shard)
        .where(Shard.id == shard.id)
        .values(
            state=ShardState.COMMITTED, queue=None, retry_at=None, retry_statuses=[],
            result_path=result.path, result_rows=result.num_rows, result_bytes=result.num_bytes,
            result_sha256=result.sha256,
        )
    )  # fmt: skip
    if shard.done_rows == shard.todo_rows:
        # all rows of these statuses ran again: what is still to be said of them was said since
        connection.execute(
            delete(RowErrorRow).where(
                RowErrorRow.shard_id == shard.id,
                RowErrorRow.generation < shard.generation,
                RowErrorRow.status.in_(shard.retry_statuses),
            )
        )
