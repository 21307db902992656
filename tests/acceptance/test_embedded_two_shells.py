"""No server at all: ``batchinfer worker`` in one shell, ``batchinfer submit`` in another, SQLite between them."""

from __future__ import annotations

import json

import pytest

from batchinfer.jobs.status import AttemptState, JobState
from tests.acceptance.farm import Farm, check_books, write_prompts


@pytest.fixture
def farm(tmp_path, sqlite_url):
    farm = Farm(tmp_path, sqlite_url, "memory://")
    yield farm
    farm.close()


def submit(farm: Farm, prompts: list[str], name: str) -> str:
    path = farm.folder / f"{name}.parquet"
    write_prompts(path, prompts)
    printed = farm.run_cli("submit", str(path), "--model", "fake", "--shard-rows", "50", "--json")
    return str(json.loads(printed)["id"])


def test_a_worker_finds_what_another_shell_submits(farm):
    """The worker's ticker sees the job in the database; jobs of a second model run as well."""
    farm.start_worker()
    job_id = submit(farm, [f"row {row}" for row in range(200)], "first")
    job = farm.wait_until_ended(job_id)
    assert job.state is JobState.COMPLETED, farm.logs()
    check_books(farm.ledger, job)


def test_sigterm_drains_and_the_next_worker_goes_on(farm):
    """A worker that is told to stop exits with 0 within seconds, leaves no lease behind, and loses no finished row."""
    worker = farm.start_worker()
    prompts = [f"SLEEP:0.02 row {row}" for row in range(400)]
    job_id = submit(farm, prompts, "input")
    farm.wait_for_rows(job_id, 40)
    worker.terminate()
    assert worker.wait(timeout=20) == 0, farm.logs()
    job = farm.ledger.get_job(job_id)
    assert job.state is JobState.IN_PROGRESS
    assert 40 <= job.counts.succeeded < 400
    states = {attempt.state for attempt in farm.ledger.attempts(job_id)}
    assert states <= {AttemptState.COMMITTED, AttemptState.RELEASED}, farm.logs()
    assert farm.ledger.list_workers() == []
    farm.start_worker()
    job = farm.wait_until_ended(job_id)
    assert job.counts.succeeded == 400
    check_books(farm.ledger, job)
