"""The end of a job: once, and with the outcome that its rows had."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from batchinfer.errors import BatchInferError, FencedError
from batchinfer.jobs.ledger_steps import MAX_STEP_ATTEMPTS
from batchinfer.jobs.status import JobState


@pytest.mark.parametrize(
    ("statuses", "outcome"),
    [
        (["succeeded"] * 3, "succeeded"),
        (["succeeded", "skipped", "deduplicated"], "succeeded"),
        (["skipped"] * 3, "succeeded"),
        (["succeeded", "filtered", "filtered"], "succeeded"),
        (["succeeded", "errored", "skipped"], "partial"),
        (["errored"] * 3, "none"),
        (["errored", "skipped", "skipped"], "none"),
    ],
)
def test_a_job_is_green_only_if_its_rows_are(story, statuses, outcome):
    job_id = story.planned(rows=3, shard_rows=3)
    lease = story.lease()
    for status in statuses:
        story.commit(lease, 1, status)
    story.publish(lease)
    job = story.finish(job_id)
    assert (job.state, job.outcome, job.manifest_path) == (JobState.COMPLETED, outcome, "out/_manifest.json")
    assert job.finished_at == story.clock.now


def test_a_finalizing_lease_is_one_workers_until_it_expires(story):
    job_id = story.planned(rows=5)
    story.drain()
    assert story.ledger.pending_control() == (0, 1)
    first = story.ledger.lease_finalizing("w1", lease_seconds=10)
    assert story.ledger.lease_finalizing("w2") is None
    assert story.ledger.pending_control() == (0, 0)
    story.ledger.heartbeat_finalizing(job_id, first.token, lease_seconds=20)
    story.clock.advance(20)
    second = story.ledger.lease_finalizing("w2")
    for late in (
        lambda: story.ledger.heartbeat_finalizing(job_id, first.token),
        lambda: story.ledger.finish(job_id, first.token, "late"),
        lambda: story.ledger.fail_finalizing(job_id, first.token, "x", "y"),
    ):
        with pytest.raises(FencedError):
            late()
    assert story.ledger.finish(job_id, second.token, "m").manifest_path == "m"
    with pytest.raises(FencedError):
        story.ledger.finish(job_id, second.token, "twice")


def test_one_of_many_finishers_finishes(story):
    """Eight threads race for the end: one lease, one finish, one event."""
    job_id = story.planned(rows=5)
    story.drain()

    def race(number: int) -> bool:
        lease = story.ledger.lease_finalizing("w1")
        if lease is None:
            return False
        try:
            story.ledger.finish(job_id, lease.token, f"m{number}")
        except BatchInferError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(race, range(8))) == 1
    ends = [e for e in story.ledger.events(job_id) if e.data.get("new") == "completed"]
    assert len(ends) == 1


def test_an_output_that_kills_every_finalizer_fails_the_job(story):
    job_id = story.planned(rows=5)
    story.drain()
    for _ in range(MAX_STEP_ATTEMPTS):
        assert story.ledger.lease_finalizing("w1", lease_seconds=1) is not None
        story.clock.advance(1)
    assert story.ledger.lease_finalizing("w1") is None
    assert story.ledger.get_job(job_id).error_code == "finalizing_lost"
