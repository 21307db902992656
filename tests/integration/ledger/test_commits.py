"""Parts, shards and their counters."""

from __future__ import annotations

import pytest

from batchinfer.errors import ConflictError
from batchinfer.jobs.leases import PartCommit, RowErrorSample, ShardResult
from batchinfer.jobs.ledger_commits import MAX_SAMPLES, MAX_SAMPLES_OF_CODE
from batchinfer.jobs.records import RowCounts
from batchinfer.jobs.status import JobState, ShardState
from batchinfer.types import RowStatus, Usage
from tests.integration.ledger.scenario import assert_books_balance


def test_parts_add_up(story):
    job_id = story.planned(rows=10, shard_rows=10)
    lease = story.lease()
    mixed = RowCounts(succeeded=3, errored=1, skipped=1)
    story.ledger.commit_part(
        lease.attempt_id,
        PartCommit(
            "a",
            5,
            mixed,
            usage=Usage(100, 40, 7),
            metered_nanos=11,
            list_nanos=21,
            device_ns=9,
            num_bytes=77,
            sha256="h",
        ),
    )
    story.commit(lease, 5, usage=Usage(1, 2, 3), metered_nanos=1, list_nanos=2, device_ns=3)
    job = story.ledger.get_job(job_id)
    assert job.counts == RowCounts(succeeded=8, errored=1, skipped=1)
    assert job.usage == Usage(101, 42, 10)
    assert (job.metered_nanos, job.list_nanos) == (12, 23)
    first, second = story.ledger.parts(lease.shard.id)
    assert (first.path, first.num_rows, first.num_bytes, first.sha256, first.counts) == ("a", 5, 77, "h", mixed)
    assert second.attempt_id == lease.attempt_id
    assert_books_balance(story.ledger, job_id)


def test_a_part_committed_twice_counts_once(story):
    """The worker's connection broke after the commit: it asks again with the same file."""
    job_id = story.planned(rows=5)
    lease = story.lease()
    part = story.part(2, metered_nanos=5, device_ns=5)
    assert story.ledger.commit_part(lease.attempt_id, part) == story.ledger.commit_part(lease.attempt_id, part)
    assert story.ledger.get_job(job_id).counts.succeeded == 2
    assert_books_balance(story.ledger, job_id)


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        (PartCommit("p", 2, RowCounts(succeeded=3)), "2 rows but counts 3"),
        (PartCommit("p", 0, RowCounts()), "0 rows"),
        (PartCommit("p", 6, RowCounts(succeeded=6)), "only 5"),
        (PartCommit("p", 1, RowCounts(succeeded=1), replaced=RowCounts(errored=1)), "replaces 1 rows; expected 0"),
    ],
)
def test_numbers_that_contradict_are_refused(story, part, problem):
    job_id = story.planned(rows=5)
    lease = story.lease()
    with pytest.raises(ValueError, match=problem):
        story.ledger.commit_part(lease.attempt_id, part)
    assert story.ledger.parts(lease.shard.id) == []
    assert story.ledger.get_job(job_id).counts.total == 0


def test_a_shard_with_rows_left_cannot_be_published(story):
    story.planned(rows=5)
    lease = story.lease()
    story.commit(lease, 4)
    with pytest.raises(ConflictError, match="1 rows without an outcome") as caught:
        story.publish(lease)
    assert caught.value.code == "shard_incomplete"
    story.commit(lease, 1)
    with pytest.raises(ValueError, match="has 4 rows, its shard 5"):
        story.ledger.commit_shard(lease.attempt_id, ShardResult("x", 4))
    story.publish(lease)


def test_the_last_shard_moves_the_job_to_finalizing(story):
    job_id = story.planned(rows=10, shard_rows=5)
    first, second = story.lease(), story.lease("w2")
    assert story.complete(second).state is JobState.IN_PROGRESS
    assert story.complete(first).state is JobState.FINALIZING
    shards = list(story.ledger.shards(job_id))
    assert {s.state for s in shards} == {ShardState.COMMITTED}
    assert all((s.result_rows, s.result_bytes, s.result_sha256) == (5, 100, "hash") for s in shards)
    assert sorted(story.ledger.live_paths(job_id)) == sorted(s.result_path for s in shards)


def test_a_shard_published_twice_counts_once(story):
    job_id = story.planned(rows=10, shard_rows=5)
    lease = story.lease()
    story.commit(lease, 5)
    for _ in range(2):
        assert story.publish(lease, "same").state is JobState.IN_PROGRESS
    story.complete(story.lease())
    assert story.state(job_id) == JobState.FINALIZING


def test_live_paths_are_what_must_not_be_swept(story):
    """Parts that wait for their merge, and published shards; parts of published shards are garbage."""
    job_id = story.planned(rows=10, shard_rows=5)
    done, running = story.lease(), story.lease()
    story.commit(done, 5, path="done-part")
    story.publish(done, "done-shard")
    story.commit(running, 2, path="running-part")
    assert sorted(story.ledger.live_paths(job_id)) == ["done-shard", "running-part"]


def test_a_held_jobs_last_running_shard_still_finishes_it(story):
    """There is nothing left to hold."""
    for hold in ("pause", "spend"):
        job_id = story.planned(rows=5, budget_usd="1")
        lease = story.lease()
        if hold == "pause":
            story.ledger.pause(job_id)
        else:
            story.commit(lease, 1, metered_nanos=10**9)
        assert story.state(job_id) in (JobState.PAUSED, JobState.BUDGET_EXHAUSTED)
        assert story.complete(lease).state is JobState.FINALIZING


def test_row_errors_are_a_bounded_sample_in_row_order(story):
    """At most 100 of a code and 1,000 of a job, so that one bad column cannot flood the database."""
    rows = 3000
    job_id = story.planned(rows=rows, shard_rows=rows)
    lease = story.lease()
    for start in range(0, rows, 250):
        errors = tuple(
            RowErrorSample(start + i, f"code{start // 250}", "bad \0\ud800", RowStatus.ERRORED) for i in range(250)
        )
        story.commit(lease, 250, "errored", row_errors=errors[::-1])
    samples = story.ledger.row_errors(job_id, limit=5000)
    assert len(samples) == MAX_SAMPLES
    assert [s.row_index for s in samples] == sorted(s.row_index for s in samples)
    of_one = story.ledger.row_errors(job_id, code="code3", limit=5000)
    assert len(of_one) == MAX_SAMPLES_OF_CODE
    assert {s.message for s in of_one} == {"bad \ufffd\ufffd"}
    assert story.ledger.row_errors(job_id, limit=7, offset=3) == samples[3:10]
    assert story.ledger.get_job(job_id).counts.errored == rows
