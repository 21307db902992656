"""No server at all: ``batchinfer worker`` in one shell, ``batchinfer submit`` in another, SQLite between them."""

from __future__ import annotations

import json

import pytest

from batchinfer.jobs.status import JobState
from tests.acceptance.cluster import Cluster, check_books, write_prompts


@pytest.fixture
def cluster(tmp_path, sqlite_url):
    cluster = Cluster(tmp_path, sqlite_url, "memory://")
    yield cluster
    cluster.close()


def submit(cluster: Cluster, prompts: list[str], name: str) -> str:
    path = cluster.folder / f"{name}.parquet"
    write_prompts(path, prompts)
    printed = cluster.run_cli("submit", str(path), "--model", "fake", "--shard-rows", "50", "--json")
    return str(json.loads(printed)["id"])


def test_a_worker_finds_what_another_shell_submits(cluster):
    """The worker's ticker sees the job in the database; jobs of a second model run as well."""
    cluster.start_worker()
    job_id = submit(cluster, [f"row {row}" for row in range(200)], "first")
    job = cluster.wait_until_ended(job_id)
    assert job.state is JobState.COMPLETED, cluster.logs()
    check_books(cluster.ledger, job)
