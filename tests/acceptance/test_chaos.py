"""A bad night: two workers on Redis and PostgreSQL, and everything that can be taken away is taken away."""

from __future__ import annotations

import os
import signal

import pytest

from batchinfer.jobs.spec import JobSpec
from batchinfer.jobs.status import AttemptState, JobState, Outcome
from tests.acceptance.cluster import Cluster, check_books, write_prompts

NUM_ROWS = 3000


@pytest.fixture
def cluster(tmp_path, postgresql_url, redis_url):
    cluster = Cluster(tmp_path, postgresql_url, redis_url)
    yield cluster
    cluster.close()


def lost_attempts(cluster: Cluster, job_id: str, pid: int) -> int:
    """Attempts that a worker process lost."""
    attempts = cluster.ledger.attempts(job_id)
    return sum(attempt.state is AttemptState.LOST and f"-{pid}-" in attempt.worker_id for attempt in attempts)


@pytest.mark.service
def test_a_job_survives_everything_and_each_row_ends_once(cluster, postgres, redis_server, tmp_path):
    """kill -9 (twice), SIGSTOP past the lease and SIGCONT, FLUSHDB, restarts of PostgreSQL and Redis: the job ends by itself.

    What the zombie still writes changes nothing: each row has one outcome, and rows, tokens and money add up.
    """
    write_prompts(tmp_path / "input.parquet", [f"SLEEP:0.004 row {row}" for row in range(NUM_ROWS)])
    spec = JobSpec(
        inputs=str(tmp_path / "input.parquet"),
        model="fake",
        output=str(tmp_path / "out"),
        shard_rows=100,
        max_attempts=5,
    )
    job, _ = cluster.ledger.submit(spec)
    first, second = cluster.start_worker(), cluster.start_worker()
    cluster.wait_for_rows(job.id, 200)

    first.kill()
    first.wait()
    cluster.wait("the killed worker's lease is lost", lambda: lost_attempts(cluster, job.id, first.pid))
    third = cluster.start_worker()

    redis_server.flush()
    cluster.wait_for_rows(job.id, 600)

    os.kill(second.pid, signal.SIGSTOP)
    cluster.wait("the frozen worker's lease is lost", lambda: lost_attempts(cluster, job.id, second.pid))
    os.kill(second.pid, signal.SIGCONT)
    cluster.wait_for_rows(job.id, 1200)

    postgres.restart()
    cluster.wait_for_rows(job.id, 1600)
    redis_server.restart()

    third.kill()
    third.wait()
    fourth = cluster.start_worker()
    job = cluster.wait_until_ended(job.id)

    assert (job.state, job.outcome) == (JobState.COMPLETED, Outcome.SUCCEEDED), cluster.logs()
    check_books(cluster.ledger, job)
    assert set(cluster.calls()) == {f"SLEEP:0.004 row {row}" for row in range(NUM_ROWS)}
    for worker in (second, fourth):
        worker.terminate()
        assert worker.wait(timeout=30) == 0, cluster.logs()
    assert cluster.ledger.list_workers() == [] or {worker.pid for worker in cluster.ledger.list_workers()} <= {
        first.pid,
        third.pid,
    }
