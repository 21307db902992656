"""SIGTERM of a worker, however it was started: finished rows are kept, leases go back, it exits with 0 in its time."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from batchinfer.jobs.spec import JobSpec
from batchinfer.jobs.status import AttemptState, JobState, ShardState
from batchinfer_workers.node import DRAIN_SECONDS
from tests.acceptance.cluster import COMMAND, Cluster, check_books, write_prompts

if TYPE_CHECKING:
    from pathlib import Path

NUM_ROWS = 400
CELERY = (sys.executable, "-m", "celery", "-A", "batchinfer_workers.app", "worker")
WORKER = (*COMMAND, "worker")


@pytest.fixture
def make_cluster(tmp_path, sqlite_url):
    made = []

    def make(broker_url):
        made.append(Cluster(tmp_path, sqlite_url, broker_url))
        return made[0]

    yield make
    for cluster in made:
        cluster.close()


def committed_rows(cluster: Cluster, job_id: str) -> list[int]:
    """Indices of the rows that parts hold, read from the files that the ledger names."""
    paths: list[Path | str] = []
    for shard in cluster.ledger.shards(job_id):
        if shard.state is ShardState.COMMITTED:
            # merged and published: its parts may be gone
            paths.append(cluster.folder / "out" / f"shard-{shard.index:05}.parquet")
        else:
            paths += [part.path for part in cluster.ledger.parts(shard.id)]
    return sorted(row for path in paths for row in pq.read_table(path)["row_index"].to_pylist())


@pytest.mark.service
@pytest.mark.parametrize(
    ("command", "broker"),
    [(WORKER, "memory"), (WORKER, "redis"), (CELERY, "redis")],
    ids=["embedded", "redis", "celery"],
)
def test_sigterm_drains_and_the_next_worker_goes_on(make_cluster, request, command, broker):
    """Each row that was committed ran once, and never again; the others run in the next worker, and none is missing."""
    cluster = make_cluster("memory://" if broker == "memory" else request.getfixturevalue("redis_url"))
    worker = cluster.start_worker(*command)
    prompts = [f"SLEEP:0.02 row {row}" for row in range(NUM_ROWS)]
    write_prompts(cluster.folder / "input.parquet", prompts)
    spec = JobSpec(
        inputs=str(cluster.folder / "input.parquet"), model="fake", output=str(cluster.folder / "out"), shard_rows=50
    )
    job_id = cluster.ledger.submit(spec)[0].id
    cluster.wait_for_rows(job_id, 40)
    worker.terminate()
    assert worker.wait(timeout=DRAIN_SECONDS + 15) == 0, cluster.logs()

    job = cluster.ledger.get_job(job_id)
    assert job.state is JobState.IN_PROGRESS
    kept = committed_rows(cluster, job_id)
    assert len(kept) == len(set(kept)) == job.counts.succeeded
    assert 40 <= len(kept) < NUM_ROWS
    states = {attempt.state for attempt in cluster.ledger.attempts(job_id)}
    assert states <= {AttemptState.COMMITTED, AttemptState.RELEASED}, cluster.logs()
    assert {shard.state for shard in cluster.ledger.shards(job_id)} <= {ShardState.PENDING, ShardState.COMMITTED}
    assert cluster.ledger.list_workers() == []
    begun = cluster.calls()
    assert {begun[prompts[row]] for row in kept} == {1}

    cluster.start_worker(*command)
    job = cluster.wait_until_ended(job_id)
    assert job.counts.succeeded == NUM_ROWS
    check_books(cluster.ledger, job)
    calls = cluster.calls()
    assert {calls[prompts[row]] for row in kept} == {1}
    # what was under way when the signal came runs a second time, no other row does
    assert {prompt for prompt, number in calls.items() if number > 1} <= set(begun) - {prompts[row] for row in kept}
    assert set(calls) == set(prompts)
    assert max(calls.values()) <= 2
