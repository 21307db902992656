"""Jobs brought into any state through the ledger alone: no worker, no engine, no files but an input."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchinfer.jobs.leases import PartCommit, RowErrorSample, ShardPlan, ShardResult
from batchinfer.jobs.records import RowCounts
from batchinfer.jobs.spec import JobSpec
from batchinfer.types import ErrorCode, Usage

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from batchinfer.jobs.leases import Lease, SentinelFound
    from batchinfer.jobs.ledger import Ledger

WORKER = "played"
NANOS_PER_ROW = 1_000
LOAD_NANOS = 77


def make_input(folder: Path) -> str:
    """A file that is there; nothing reads it here."""
    path = folder / "prompts.parquet"
    path.write_bytes(b"PAR1")
    return str(path)


def make_spec(folder: Path, **fields: Any) -> JobSpec:
    """A small valid spec."""
    return JobSpec(**{"inputs": (make_input(folder),), "model": "org/name"} | fields)


def plan(ledger: Ledger, job_id: str, *, num_rows: int = 10, num_shards: int = 2) -> None:
    """Plan a validating job into equal shards."""
    lease = ledger.lease_planning(WORKER)
    assert lease is not None
    assert lease.job.id == job_id
    size = num_rows // num_shards
    ledger.commit_plan(
        job_id,
        lease.token,
        num_rows=num_rows,
        fingerprint={},
        warnings=["something odd"],
        output=lease.job.output or "/o",
        shards=[ShardPlan(index, index * size, (index + 1) * size) for index in range(num_shards)],
    )


def lease(ledger: Ledger) -> Lease:
    """Lease the next shard."""
    ledger.register_worker(WORKER, hostname="h", pid=1, nanos_per_hour=1)
    found = ledger.lease_shard(WORKER)
    assert found is not None
    return found


def run_shard(ledger: Ledger, *, errored: int = 0, sentinel: SentinelFound | None = None) -> Lease:
    """Lease a shard, end all of its rows, commit it with what a sentinel found."""
    held = lease(ledger)
    shard = held.shard
    errors = tuple(
        RowErrorSample(shard.row_start + number, ErrorCode.EMPTY_PROMPT, "nothing to say") for number in range(errored)
    )
    ledger.commit_part(
        held.attempt_id,
        PartCommit(
            path=f"/o/_parts/{held.attempt_id}.parquet",
            num_rows=shard.num_rows,
            counts=RowCounts(succeeded=shard.num_rows - errored, errored=errored),
            usage=Usage(100 * shard.num_rows, 10 * shard.num_rows, 20 * shard.num_rows),
            metered_nanos=NANOS_PER_ROW * shard.num_rows,
            device_ns=1_000_000 * shard.num_rows,
            row_errors=errors,
        ),
    )
    ledger.commit_shard(
        held.attempt_id,
        ShardResult(f"/o/_parts/shard-{shard.index}.parquet", shard.num_rows, 1234, "ab" * 32),
        sentinel,
    )
    return held


def finish(ledger: Ledger, job_id: str) -> None:
    """Finalize a job whose rows have all ended."""
    held = ledger.lease_finalizing(WORKER)
    assert held is not None
    assert held.job.id == job_id
    ledger.finish(job_id, held.token, "/o/_manifest.json")


def complete(ledger: Ledger, job_id: str, *, errored: int = 0) -> None:
    """Bring a validating job of ten rows to its end; ``errored`` rows of the first shard fail."""
    plan(ledger, job_id)
    ledger.add_overhead(job_id, f"{job_id}:load", kind="load", device_ns=5, nanos=LOAD_NANOS)
    run_shard(ledger, errored=errored)
    run_shard(ledger)
    finish(ledger, job_id)
