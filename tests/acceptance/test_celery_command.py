"""Workers started in other ways than ``batchinfer worker``: Celery's own command, and a ticker alone."""

from __future__ import annotations

import sys

import pytest

from batchinfer.jobs.spec import JobSpec
from batchinfer.jobs.status import AttemptState, JobState
from tests.acceptance.farm import COMMAND, Farm, check_books, write_prompts


@pytest.fixture
def farm(tmp_path, sqlite_url, redis_url):
    farm = Farm(tmp_path, sqlite_url, redis_url)
    yield farm
    farm.close()


def submit(farm: Farm, num_rows: int, seconds: float = 0) -> str:
    write_prompts(farm.folder / "input.parquet", [f"SLEEP:{seconds} row {row}" for row in range(num_rows)])
    spec = JobSpec(
        inputs=str(farm.folder / "input.parquet"), model="fake", output=str(farm.folder / "out"), shard_rows=50
    )
    return farm.ledger.submit(spec)[0].id


@pytest.mark.service
def test_celerys_own_worker_command_does_the_same(farm):
    """``celery -A batchinfer_workers.app worker`` runs a job, though its tasks outlast the broker's patience.

    The visibility timeout is a second, a shard takes several: each row runs once all the same. SIGTERM ends it well.
    """
    farm.environment["BATCHINFER_VISIBILITY_SECONDS"] = "1"
    worker = farm.start_worker(sys.executable, "-m", "celery", "-A", "batchinfer_workers.app", "worker")
    job = farm.wait_until_ended(submit(farm, 150, seconds=0.05))
    assert job.state is JobState.COMPLETED, farm.logs()
    check_books(farm.ledger, job)
    assert set(farm.calls().values()) == {1}
    worker.terminate()
    assert worker.wait(timeout=30) == 0, farm.logs()
    assert farm.ledger.list_workers() == []


@pytest.mark.service
def test_a_ticker_alone_keeps_leases_and_wakes_the_next_worker(farm):
    """No worker is up: the ticker ends the dead one's lease and leaves messages for the next."""
    worker = farm.start_worker()
    job_id = submit(farm, 400, seconds=0.02)
    farm.wait_for_rows(job_id, 20)
    worker.kill()
    worker.wait()
    ticker = farm.start_worker(*COMMAND, "worker", "--ticker-only")
    farm.wait(
        "the ticker has ended the lease",
        lambda: all(attempt.state is not AttemptState.RUNNING for attempt in farm.ledger.attempts(job_id)),
    )
    assert any(attempt.state is AttemptState.LOST for attempt in farm.ledger.attempts(job_id))
    ticker.terminate()
    assert ticker.wait(timeout=20) == 0, farm.logs()
    farm.start_worker()
    job = farm.wait_until_ended(job_id)
    assert job.counts.succeeded == 400
    check_books(farm.ledger, job)
