"""A row that kills engines, as the database sees it."""

from __future__ import annotations

import pytest

from batchinfer.jobs.status import FailureKind, JobState
from batchinfer.types import ErrorCode
from tests.integration.ledger.scenario import assert_books_balance


def work(story, lease, done, poison):
    """Do what a shard runner does; die on a row in ``poison``. True if the attempt lived."""
    shard = lease.shard
    remaining = [row for row in range(shard.row_start, shard.row_end) if row not in done]
    condemned = [row for row in remaining if row in lease.poisoned_rows]
    if condemned:
        story.commit(lease, len(condemned), "errored")
        done |= dict.fromkeys(condemned, ErrorCode.WORKER_LOST)
    batch = [row for row in remaining if row not in condemned]
    if lease.probe_rows is not None:
        batch = batch[: lease.probe_rows]
        if lease.probe_rows == 1 and batch:
            story.ledger.announce_probe(lease.attempt_id, batch[0])
    if poison & set(batch):
        return False
    if batch:
        story.commit(lease, len(batch))
        done |= dict.fromkeys(batch, "ok")
    if len(done) == shard.num_rows:
        story.publish(lease)
    else:
        story.ledger.release(lease.attempt_id, 0)
    return True


@pytest.mark.parametrize("how", ["engine died", "worker lost"])
@pytest.mark.parametrize("poison", [{0}, {6}, {9}, {2, 3}, {0, 9}])
def test_poisoned_rows_become_error_rows_and_all_others_finish(story, poison, how):
    job_id = story.planned(rows=10, shard_rows=10, max_attempts=2)
    done = {}
    for _ in range(60):
        lease = story.ledger.lease_shard("w1", lease_seconds=10)
        if lease is None:
            break
        if not work(story, lease, done, poison):
            if how == "engine died":
                story.ledger.fail(lease.attempt_id, "signal 11", 0)
            else:
                story.clock.advance(10)
    assert {row for row, outcome in done.items() if outcome != "ok"} == poison
    job = story.finish(job_id)
    assert job.state is JobState.COMPLETED
    assert job.outcome == "partial"
    assert (job.counts.errored, job.counts.succeeded) == (len(poison), 10 - len(poison))
    told = [e.data["row"] for e in story.ledger.events(job_id) if e.kind == "row_poisoned"]
    assert set(told) == poison
    assert_books_balance(story.ledger, job_id)


def test_a_suspect_waits_its_turn(story):
    """A shard being probed does not come first as other lost shards do, or it would kill all engines in a row."""
    story.planned(rows=5, max_attempts=1)
    suspect = story.lease()
    story.ledger.fail(suspect.attempt_id, "died", 0)
    urgent = story.planned(rows=5, priority=1)
    assert story.lease().job.id == urgent
    assert story.lease().probe_rows == 3


def test_closing_never_probes(story):
    """No engine is involved, so no row can be to blame."""
    job_id = story.planned(rows=5, max_attempts=2)
    story.ledger.cancel(job_id)
    lease = story.lease()
    shard = story.ledger.fail(lease.attempt_id, "disk full", 0, kind=FailureKind.ENGINE)
    assert (shard.probe_rows, shard.num_faults) == (None, 1)


def test_an_engine_that_kills_every_row_fails_the_job(story):
    job_id = story.planned(rows=100, shard_rows=100, max_attempts=1)
    done = {}
    for _ in range(60):
        lease = story.ledger.lease_shard("w1")
        if lease is None:
            break
        if not work(story, lease, done, set(range(100))):
            story.ledger.fail(lease.attempt_id, "CUDA error", 0)
    job = story.ledger.get_job(job_id)
    assert (job.state, job.error_code) == (JobState.FAILED, "shard_failed")
    assert job.counts.errored == 31
