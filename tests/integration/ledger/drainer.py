"""A worker process for test_concurrency: drains the queue with the database's own clock, and says what it leased."""

from __future__ import annotations

import sys

from batchinfer.db.session import create_db_engine
from batchinfer.jobs.leases import PartCommit, ShardResult
from batchinfer.jobs.ledger import Ledger
from batchinfer.jobs.records import RowCounts


def drain(url: str, worker: str) -> list[int]:
    """Lease, commit and publish until nothing is left; give the indexes of the shards leased."""
    engine = create_db_engine(url)
    ledger = Ledger(engine)
    ledger.register_worker(worker, hostname="h", pid=1, nanos_per_hour=1)
    leased = []
    while (lease := ledger.lease_shard(worker, lease_seconds=600)) is not None:
        leased.append(lease.shard.index)
        rows = lease.shard.num_rows
        part = PartCommit(f"{worker}-{lease.attempt_id}", rows, RowCounts(succeeded=rows), metered_nanos=3, device_ns=1)
        ledger.commit_part(lease.attempt_id, part)
        ledger.heartbeat(lease.attempt_id, 1)
        ledger.commit_shard(lease.attempt_id, ShardResult(part.path, rows))
    engine.dispose()
    return leased


if __name__ == "__main__":
    print(*drain(sys.argv[1], sys.argv[2]))
