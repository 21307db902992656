"""Leases of the planner, and the plan."""

from __future__ import annotations

import pytest

from batchinfer.errors import FencedError
from batchinfer.jobs.leases import ShardPlan
from batchinfer.jobs.ledger_steps import MAX_STEP_ATTEMPTS
from batchinfer.jobs.status import JobState
from tests.integration.ledger.scenario import shard_plans


def plan(story, lease, rows=10, shards=None):
    return story.ledger.commit_plan(
        lease.job.id, lease.token, num_rows=rows, fingerprint={"files": [{"path": "a", "rows": rows}]},
        warnings=["one huge row group"], output="s3://out/x", shards=shard_plans(rows, 4) if shards is None else shards,
    )  # fmt: skip


def test_a_plan_queues_the_job_with_shards_that_tile_its_rows(story):
    story.ledger.submit(story.spec())
    job = plan(story, story.ledger.lease_planning("w1"))
    assert (job.state, job.num_rows, job.num_shards, job.output) == (JobState.QUEUED, 10, 3, "s3://out/x")
    assert job.fingerprint == {"files": [{"path": "a", "rows": 10}]}
    assert job.warnings == ("one huge row group",)
    assert job.planned_at == story.clock.now
    ranges = [(s.index, s.row_start, s.row_end, s.todo_rows) for s in story.ledger.shards(job.id, page_size=2)]
    assert ranges == [(0, 0, 4, 4), (1, 4, 8, 4), (2, 8, 10, 2)]


def test_an_input_without_rows_goes_straight_to_the_finalizer(story):
    job, _ = story.ledger.submit(story.spec())
    assert plan(story, story.ledger.lease_planning("w1"), rows=0).state is JobState.FINALIZING
    assert story.finish(job.id).outcome == "succeeded"


def test_a_planning_lease_is_one_workers_until_it_expires(story):
    story.ledger.submit(story.spec())
    first = story.ledger.lease_planning("w1", lease_seconds=60)
    assert story.ledger.lease_planning("w2") is None
    story.clock.advance(59)
    story.ledger.heartbeat_planning(first.job.id, first.token, lease_seconds=60)
    story.clock.advance(59)
    assert story.ledger.lease_planning("w2") is None
    story.clock.advance(1)
    second = story.ledger.lease_planning("w2")
    assert second.job.id == first.job.id
    for late in (
        lambda: story.ledger.heartbeat_planning(first.job.id, first.token),
        lambda: plan(story, first),
        lambda: story.ledger.fail_planning(first.job.id, first.token, "x", "y"),
    ):
        with pytest.raises(FencedError):
            late()
    assert list(story.ledger.shards(first.job.id)) == []
    assert plan(story, second).state is JobState.QUEUED


def test_higher_priority_is_planned_first_then_the_older_job(story):
    ids = [story.ledger.submit(story.spec(priority=p), job_id=f"job_{i}")[0].id for i, p in enumerate((0, 5, 5))]
    assert [story.ledger.lease_planning("w1").job.id for _ in ids] == [ids[1], ids[2], ids[0]]


@pytest.mark.parametrize(
    ("shards", "problem"),
    [
        ([ShardPlan(0, 0, 4), ShardPlan(1, 5, 10)], "begin at row 4"),
        ([ShardPlan(0, 0, 6), ShardPlan(1, 5, 10)], "begin at row 6"),
        ([ShardPlan(0, 0, 5), ShardPlan(1, 5, 5), ShardPlan(2, 5, 10)], "begin at row 5"),
        ([ShardPlan(0, 0, 5), ShardPlan(2, 5, 10)], "index 1"),
        ([ShardPlan(0, 0, 9)], "end at row 9"),
        ([], "end at row 0"),
    ],
)
def test_shards_that_lose_or_double_a_row_are_refused_whole(story, shards, problem):
    job, _ = story.ledger.submit(story.spec())
    lease = story.ledger.lease_planning("w1")
    with pytest.raises(ValueError, match=problem):
        plan(story, lease, shards=shards)
    assert story.state(job.id) == JobState.VALIDATING
    assert list(story.ledger.shards(job.id)) == []
    plan(story, lease)


def test_thousands_of_shards_are_stored_in_batches(story):
    story.ledger.submit(story.spec())
    job = plan(story, story.ledger.lease_planning("w1"), rows=2500, shards=iter(shard_plans(2500, 1)))
    assert job.num_shards == 2500
    assert [s.index for s in story.ledger.shards(job.id)] == list(range(2500))


def test_a_job_that_cannot_be_planned_fails_and_can_be_resumed(story):
    job, _ = story.ledger.submit(story.spec())
    lease = story.ledger.lease_planning("w1")
    failed = story.ledger.fail_planning(job.id, lease.token, "invalid_input", "no file a\0b \ud800")
    assert (failed.state, failed.error_code, failed.error_message) == (
        "failed",
        "invalid_input",
        "no file a\ufffdb \ufffd",
    )
    assert failed.finished_at == story.clock.now
    resumed = story.ledger.resume(job.id)
    assert (resumed.state, resumed.error_code, resumed.finished_at) == ("validating", None, None)
    plan(story, story.ledger.lease_planning("w1"))


def test_a_job_whose_planners_all_die_fails_and_the_next_job_is_planned(story):
    """An input that ends the planner each time must not hold the queue for ever."""
    bad, _ = story.ledger.submit(story.spec(priority=1))
    good, _ = story.ledger.submit(story.spec())
    for _ in range(MAX_STEP_ATTEMPTS):
        assert story.ledger.lease_planning("w1", lease_seconds=10).job.id == bad.id
        story.clock.advance(10)
    assert story.ledger.lease_planning("w1").job.id == good.id
    assert story.ledger.get_job(bad.id).error_code == "planning_lost"


def test_cancel_and_pause_fence_the_planner(story):
    cancelled, _ = story.ledger.submit(story.spec(priority=1))
    paused, _ = story.ledger.submit(story.spec())
    leases = [story.ledger.lease_planning("w1") for _ in range(2)]
    assert story.ledger.cancel(cancelled.id).state is JobState.CANCELLED
    assert story.ledger.pause(paused.id).state is JobState.PAUSED
    for lease in leases:
        with pytest.raises(FencedError):
            plan(story, lease)
    assert story.ledger.pending_control() == (0, 0)
    assert story.ledger.resume(paused.id).state is JobState.VALIDATING
    assert story.ledger.pending_control() == (1, 0)
