"""Running failed rows again: only they run, and no counter goes down or hides a row meanwhile."""

from __future__ import annotations

from datetime import timedelta

import pytest

from batchinfer.jobs.leases import PartCommit, RowErrorSample
from batchinfer.jobs.records import RowCounts
from batchinfer.jobs.status import JobState
from batchinfer.types import RowStatus
from tests.integration.ledger.scenario import assert_books_balance


def retry_part(lease, path, new, old, **fields):
    return PartCommit(path, new.total, new, replaced=old, **fields)


@pytest.fixture
def partial(story):
    """Ten rows in two shards; rows 2, 3 and 7 errored."""
    job_id = story.planned(rows=10, shard_rows=5)
    for errors in ((2, 3), (7,)):
        lease = story.lease()
        story.commit(lease, 5 - len(errors))
        samples = tuple(RowErrorSample(row, "engine_error", f"row {row}") for row in errors)
        story.commit(lease, len(errors), "errored", row_errors=samples)
        story.publish(lease, f"first-{lease.shard.index}")
    assert story.finish(job_id).outcome == "partial"
    return job_id


def test_only_failed_rows_run_again_and_their_old_file_is_the_base(story, partial):
    assert story.ledger.retry(partial) == 3
    job = story.ledger.get_job(partial)
    assert (job.state, job.retry_generation, job.outcome, job.finished_at) == (JobState.QUEUED, 1, None, None)
    assert job.counts == RowCounts(succeeded=7, errored=3)
    lease = story.lease()
    assert (lease.generation, lease.shard.todo_rows, lease.shard.remaining_rows) == (1, 2, 2)
    assert set(lease.retry_statuses) == {RowStatus.ERRORED, RowStatus.EXPIRED, RowStatus.CANCELLED}
    assert lease.base_path == "first-0"
    assert set(story.ledger.live_paths(partial)) == {"first-0", "first-1"}


def test_counters_never_go_down_while_rows_are_retried(story, partial):
    """After every step: all ten rows have an outcome, and what succeeded stays so."""
    story.ledger.retry(partial)
    seen = [story.ledger.get_job(partial).counts]
    for new in (RowCounts(succeeded=1), RowCounts(errored=1)):
        lease = story.lease()
        while story.shard(lease).remaining_rows:
            part = retry_part(lease, f"p{len(seen)}", new, RowCounts(errored=1))
            story.ledger.commit_part(lease.attempt_id, part)
            seen.append(story.ledger.get_job(partial).counts)
            assert_books_balance(story.ledger, partial)
        story.publish(lease, f"second-{lease.shard.index}")
    assert [c.succeeded for c in seen] == [7, 8, 9, 9]
    assert {c.total for c in seen} == {10}
    job = story.finish(partial)
    assert (job.counts, job.outcome) == (RowCounts(succeeded=9, errored=1), "partial")
    assert set(story.ledger.live_paths(partial)) == {"second-0", "second-1"}


def test_error_samples_follow_the_rows(story, partial):
    """Rows that succeeded at last have no error any more; one that failed anew has its new one."""
    story.ledger.retry(partial)
    first = story.lease()
    story.ledger.commit_part(first.attempt_id, retry_part(first, "a", RowCounts(succeeded=1), RowCounts(errored=1)))
    again = retry_part(
        first, "b", RowCounts(errored=1), RowCounts(errored=1), row_errors=(RowErrorSample(3, "engine_error", "anew"),)
    )
    story.ledger.commit_part(first.attempt_id, again)
    story.publish(first)
    assert [(s.row_index, s.message) for s in story.ledger.row_errors(partial)] == [(3, "anew"), (7, "row 7")]


def test_shards_without_such_rows_are_left_alone(story):
    job_id = story.planned(rows=10, shard_rows=5)
    story.complete(story.lease())
    story.complete(story.lease(), "errored")
    story.finish(job_id)
    assert story.ledger.retry(job_id) == 5
    assert story.lease().shard.index == 1
    assert story.ledger.lease_shard("w1") is None


def test_statuses_can_be_chosen(story):
    job_id = story.planned(rows=3, shard_rows=3)
    lease = story.lease()
    for status in ("errored", "skipped", "succeeded"):
        story.commit(lease, 1, status)
    story.publish(lease)
    story.finish(job_id)
    assert story.ledger.retry(job_id, [RowStatus.EXPIRED]) == 0
    assert story.state(job_id) == JobState.COMPLETED
    assert story.ledger.retry(job_id, [RowStatus.SKIPPED, RowStatus.SKIPPED]) == 1
    assert story.lease().retry_statuses == (RowStatus.SKIPPED,)


@pytest.mark.parametrize(
    ("new", "old", "problem"),
    [
        (RowCounts(succeeded=1), RowCounts(), "replaces 0 rows; expected 1"),
        (RowCounts(succeeded=1), RowCounts(cancelled=1), "outcomes that its shard does not have"),
        (RowCounts(succeeded=3), RowCounts(errored=3), "only 2"),
    ],
)
def test_a_part_must_replace_what_it_runs_again(story, partial, new, old, problem):
    story.ledger.retry(partial)
    lease = story.lease()
    with pytest.raises(ValueError, match=problem):
        story.ledger.commit_part(lease.attempt_id, retry_part(lease, "p", new, old))
    assert story.ledger.get_job(partial).counts == RowCounts(succeeded=7, errored=3)


def test_cancelling_a_retry_leaves_rows_the_outcome_they_had(story, partial):
    story.ledger.retry(partial)
    running = story.lease()
    story.ledger.commit_part(running.attempt_id, retry_part(running, "a", RowCounts(succeeded=1), RowCounts(errored=1)))
    story.ledger.cancel(partial)
    story.ledger.release(running.attempt_id, 0)
    assert story.drain() == 2
    job = story.finish(partial)
    assert (job.state, job.counts) == (JobState.CANCELLED, RowCounts(succeeded=8, errored=2))
    assert_books_balance(story.ledger, partial)
    assert story.ledger.retry(partial) == 2


def test_an_expired_job_is_retried_without_its_past_deadline(story):
    job_id = story.planned(rows=5, deadline=story.clock.now + timedelta(seconds=1))
    story.clock.advance(1)
    story.drain()
    assert story.finish(job_id).state is JobState.EXPIRED
    assert story.ledger.retry(job_id) == 5
    lease = story.lease()
    assert (lease.close_status, lease.job.deadline_at) == (None, None)
    part = retry_part(lease, "a", RowCounts(succeeded=5), RowCounts(expired=5))
    story.ledger.commit_part(lease.attempt_id, part)
    story.publish(lease)
    job = story.finish(job_id)
    assert (job.state, job.outcome) == (JobState.COMPLETED, "succeeded")


def test_a_retry_of_a_job_without_budget_left_waits_for_money(story):
    job_id = story.planned(rows=5, budget_usd="0.000000005")
    lease = story.lease()
    story.commit(lease, 5, "errored", metered_nanos=5)
    story.publish(lease)
    story.finish(job_id)
    assert story.ledger.retry(job_id) == 5
    assert story.state(job_id) == JobState.BUDGET_EXHAUSTED
    story.ledger.resume(job_id, budget_nanos=10)
    assert story.lease().generation == 1


def test_a_second_retry_replaces_the_first(story, partial):
    for generation in (1, 2):
        assert story.ledger.retry(partial) == 3
        while (lease := story.ledger.lease_shard("w1")) is not None:
            n = lease.shard.remaining_rows
            part = retry_part(lease, f"{generation}-{lease.shard.index}", RowCounts(errored=n), RowCounts(errored=n))
            story.ledger.commit_part(lease.attempt_id, part)
            story.publish(lease)
        assert story.finish(partial).counts == RowCounts(succeeded=7, errored=3)
        assert_books_balance(story.ledger, partial)
    first, *_ = story.ledger.shards(partial)
    assert [p.generation for p in story.ledger.parts(first.id)] == [0, 0, 1, 2]
    assert len(story.ledger.parts(first.id, generation=2)) == 1
