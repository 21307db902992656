"""Workers started in other ways than ``batchinfer worker``: Celery's own command, and a ticker alone."""

from __future__ import annotations

import sys

import pytest

from batchinfer.jobs.spec import JobSpec
from batchinfer.jobs.status import AttemptState, JobState
from tests.acceptance.cluster import COMMAND, Cluster, check_books, write_prompts


@pytest.fixture
def cluster(tmp_path, sqlite_url, redis_url):
    cluster = Cluster(tmp_path, sqlite_url, redis_url)
    yield cluster
    cluster.close()


def submit(cluster: Cluster, num_rows: int, seconds: float = 0) -> str:
    write_prompts(cluster.folder / "input.parquet", [f"SLEEP:{seconds} row {row}" for row in range(num_rows)])
    spec = JobSpec(
        inputs=str(cluster.folder / "input.parquet"), model="fake", output=str(cluster.folder / "out"), shard_rows=50
    )
    return cluster.ledger.submit(spec)[0].id


@pytest.mark.service
def test_celerys_own_worker_command_does_the_same(cluster):
    """``celery -A batchinfer_workers.app worker`` runs a job, though its tasks outlast the broker's patience.

    The visibility timeout is a second, a shard takes several: each row runs once all the same. SIGTERM ends it well.
    """
    cluster.environment["BATCHINFER_VISIBILITY_SECONDS"] = "1"
    worker = cluster.start_worker(sys.executable, "-m", "celery", "-A", "batchinfer_workers.app", "worker")
    job = cluster.wait_until_ended(submit(cluster, 150, seconds=0.05))
    assert job.state is JobState.COMPLETED, cluster.logs()
    check_books(cluster.ledger, job)
    assert set(cluster.calls().values()) == {1}
    worker.terminate()
    assert worker.wait(timeout=30) == 0, cluster.logs()
    assert cluster.ledger.list_workers() == []


@pytest.mark.service
def test_a_ticker_alone_keeps_leases_and_wakes_the_next_worker(cluster):
    """No worker is up: the ticker ends the dead one's lease and leaves messages for the next."""
    worker = cluster.start_worker()
    job_id = submit(cluster, 400, seconds=0.02)
    cluster.wait_for_rows(job_id, 20)
    worker.kill()
    worker.wait()
    ticker = cluster.start_worker(*COMMAND, "worker", "--ticker-only")
    cluster.wait(
        "the ticker has ended the lease",
        lambda: all(attempt.state is not AttemptState.RUNNING for attempt in cluster.ledger.attempts(job_id)),
    )
    assert any(attempt.state is AttemptState.LOST for attempt in cluster.ledger.attempts(job_id))
    ticker.terminate()
    assert ticker.wait(timeout=20) == 0, cluster.logs()
    cluster.start_worker()
    job = cluster.wait_until_ended(job_id)
    assert job.counts.succeeded == 400
    check_books(cluster.ledger, job)
