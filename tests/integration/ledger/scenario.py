"""Words in which the ledger's stories are told."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import count
from typing import TYPE_CHECKING, Any

from sqlalchemy import func, select

from batchinfer.db.tables import UsageRow
from batchinfer.jobs.leases import PartCommit, ShardPlan, ShardResult
from batchinfer.jobs.records import RowCounts
from batchinfer.jobs.spec import JobSpec
from batchinfer.types import RowStatus, Usage

if TYPE_CHECKING:
    from batchinfer.jobs.leases import Lease
    from batchinfer.jobs.ledger import Ledger
    from batchinfer.jobs.records import JobRecord, ShardRecord

RATE = 3_600 * 10**9
"""Nano-dollars an hour at which one nanosecond costs one nano-dollar."""


class FakeClock:
    """Stands until it is told to move on."""

    def __init__(self) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


class Scenario:
    """A ledger with two registered workers and a clock."""

    def __init__(self, ledger: Ledger, clock: FakeClock) -> None:
        self.ledger = ledger
        self.clock = clock
        self._numbers = count(1)
        for worker in ("w1", "w2"):
            ledger.register_worker(worker, hostname="host", pid=1, nanos_per_hour=RATE)

    def spec(self, **fields: Any) -> JobSpec:
        return JobSpec(**{"inputs": ("in.parquet",), "model": "m"} | fields)

    def planned(self, rows: int = 10, shard_rows: int = 5, **fields: Any) -> str:
        """Submit and plan a job; give its id."""
        job, _ = self.ledger.submit(self.spec(**fields))
        self.plan(job.id, rows, shard_rows)
        return job.id

    def plan(self, job_id: str, rows: int = 10, shard_rows: int = 5) -> JobRecord:
        lease = self.ledger.lease_planning("w1")
        assert lease is not None
        assert lease.job.id == job_id
        return self.ledger.commit_plan(
            job_id, lease.token, num_rows=rows, fingerprint={"files": []}, warnings=[], output="out",
            shards=shard_plans(rows, shard_rows),
        )  # fmt: skip

    def lease(self, worker: str = "w1", **options: Any) -> Lease:
        """Lease a shard; there must be one."""
        lease = self.ledger.lease_shard(worker, **options)
        assert lease is not None
        return lease

    def commit(self, lease: Lease, num_rows: int = 1, status: str = "succeeded", **fields: Any) -> int:
        """Commit a part of rows that all ended alike."""
        return self.ledger.commit_part(lease.attempt_id, self.part(num_rows, status, **fields))

    def part(self, num_rows: int = 1, status: str = "succeeded", **fields: Any) -> PartCommit:
        path = fields.pop("path", f"part-{next(self._numbers)}")
        return PartCommit(path=path, num_rows=num_rows, counts=RowCounts(**{status: num_rows}), **fields)

    def publish(self, lease: Lease, path: str | None = None) -> JobRecord:
        """Commit the shard."""
        path = path or f"shard-{next(self._numbers)}"
        return self.ledger.commit_shard(lease.attempt_id, ShardResult(path, lease.shard.num_rows, 100, "hash"))

    def complete(self, lease: Lease, status: str = "succeeded", **fields: Any) -> JobRecord:
        """Commit all that remains of a leased shard."""
        remaining = self.shard(lease).remaining_rows
        if remaining:
            self.commit(lease, remaining, status, **fields)
        return self.publish(lease)

    def drain(self, worker: str = "w1", status: str = "succeeded") -> int:
        """Work until there is nothing to lease; close where asked to. Give the number of leases."""
        leases = 0
        while (lease := self.ledger.lease_shard(worker)) is not None:
            leases += 1
            if lease.close_status is not None and lease.generation:
                self.publish(lease)
            else:
                self.complete(lease, lease.close_status or status)
        return leases

    def finish(self, job_id: str) -> JobRecord:
        lease = self.ledger.lease_finalizing("w1")
        assert lease is not None
        assert lease.job.id == job_id
        return self.ledger.finish(job_id, lease.token, "out/_manifest.json")

    def finished(self, rows: int = 10, shard_rows: int = 5, status: str = "succeeded", **fields: Any) -> str:
        """A job run to its end."""
        job_id = self.planned(rows, shard_rows, **fields)
        self.drain(status=status)
        self.finish(job_id)
        return job_id

    def shard(self, lease: Lease) -> ShardRecord:
        """The leased shard as it is now."""
        return next(s for s in self.ledger.shards(lease.job.id) if s.id == lease.shard.id)

    def state(self, job_id: str) -> str:
        return self.ledger.get_job(job_id).state


def shard_plans(rows: int, shard_rows: int) -> list[ShardPlan]:
    starts = range(0, rows, shard_rows)
    return [ShardPlan(i, start, min(start + shard_rows, rows), 100) for i, start in enumerate(starts)]


def assert_books_balance(ledger: Ledger, job_id: str) -> None:
    """Recount everything a second way: counters from the parts, money from the ledger's entries."""
    job = ledger.get_job(job_id)
    shards = list(ledger.shards(job_id))
    parts = [part for shard in shards for part in ledger.parts(shard.id)]
    assert job.counts == sum((p.counts - p.replaced for p in parts), RowCounts())
    assert job.counts == sum((s.counts for s in shards), RowCounts())
    assert job.usage == sum((p.usage for p in parts), Usage())
    for shard in shards:
        assert shard.done_rows == sum(
            p.num_rows for p in parts if (p.shard_id, p.generation) == (shard.id, shard.generation)
        )
        assert shard.counts.total <= shard.num_rows
    report = ledger.cost_report(job_id)
    assert report.rows_nanos == job.metered_nanos == sum(p.metered_nanos for p in parts)
    assert sum(report.overhead_nanos.values()) == job.overhead_nanos
    assert report.total_nanos == job.cost_nanos
    assert report.list_nanos == job.list_nanos == sum(p.list_nanos for p in parts)
    assert job.counts.total <= (job.num_rows or 0)
    with ledger.engine.connect() as connection:
        row = UsageRow
        sums = select(
            func.sum(row.metered_nanos), func.sum(row.overhead_nanos), func.sum(row.list_nanos), func.sum(row.device_ns),
            func.sum(row.num_rows), func.sum(row.prompt_tokens), func.sum(row.completion_tokens),
        ).where(row.dimension == "job", row.key == job_id)  # fmt: skip
        by_day = [int(value or 0) for value in connection.execute(sums).one()]
    num_rows = sum(p.num_rows for p in parts)
    money = [report.rows_nanos, job.overhead_nanos, report.list_nanos, report.device_ns]
    assert by_day == [*money, num_rows, job.usage.prompt_tokens, job.usage.completion_tokens]
    assert set(RowStatus) == set(job.counts.as_dict())
