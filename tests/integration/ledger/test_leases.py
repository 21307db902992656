"""Who gets which shard, and for how long."""

from __future__ import annotations

from datetime import timedelta

import pytest

from batchinfer.errors import NotFoundError
from batchinfer.jobs.status import Action, AttemptState, FailureKind, JobState, LeaseMode, ShardState
from batchinfer.types import RowStatus


def test_the_first_lease_starts_the_job(story):
    job_id = story.planned(temperature=0.5)
    lease = story.lease(lease_seconds=60)
    assert lease.job.state is JobState.IN_PROGRESS
    assert lease.job.started_at == story.clock.now
    assert lease.job.spec.temperature == 0.5
    assert (lease.shard.index, lease.shard.row_start, lease.shard.row_end) == (0, 0, 5)
    assert (lease.mode, lease.close_status, lease.probe_rows, lease.generation) == (LeaseMode.RUN, None, None, 0)
    assert lease.attempt_number == 1
    assert lease.expires_at == story.clock.now + timedelta(seconds=60)
    assert story.shard(lease).state is ShardState.LEASED
    assert [a.id for a in story.ledger.attempts(job_id, running_only=True)] == [lease.attempt_id]


def test_a_shard_is_leased_once(story):
    story.planned(rows=10, shard_rows=5)
    leases = [story.ledger.lease_shard("w1"), story.ledger.lease_shard("w2"), story.ledger.lease_shard("w1")]
    assert [lease and lease.shard.index for lease in leases] == [0, 1, None]
    assert leases[0].attempt_id != leases[1].attempt_id


def test_an_unregistered_worker_gets_nothing(story):
    story.planned()
    with pytest.raises(NotFoundError, match="stranger"):
        story.ledger.lease_shard("stranger")


def test_order_is_priority_then_age_then_index(story):
    """The expected order is that of sorting by the rule; a deadline alone pushes nobody in, only one in danger does."""
    soon = story.clock.now + timedelta(days=1)
    jobs = [(0, None), (5, soon), (0, soon), (5, None), (0, None), (-3, soon)]
    ids = [story.planned(2, 1, priority=p, deadline=d) for p, d in jobs]
    expected = sorted((-p, job_id, index) for (p, _), job_id in zip(jobs, ids, strict=True) for index in (0, 1))
    got = [story.lease() for _ in range(12)]
    assert [(lease.job.id, lease.shard.index) for lease in got] == [(job_id, index) for _, job_id, index in expected]


def test_an_expired_lease_comes_before_everything_else(story):
    """Else an expired shard of a low-priority job would wait until the queue is empty."""
    low = story.planned(rows=5)
    expired = story.lease(lease_seconds=10)
    story.planned(rows=5, priority=50)
    story.clock.advance(10)
    again = story.lease("w2")
    assert (again.job.id, again.shard.id) == (low, expired.shard.id)
    assert again.attempt_id > expired.attempt_id
    assert again.attempt_number == 2


def test_a_lease_in_force_is_not_taken(story):
    story.planned(rows=5)
    lease = story.lease(lease_seconds=10)
    story.clock.advance(9.999)
    assert story.ledger.lease_shard("w2") is None
    story.ledger.heartbeat(lease.attempt_id, 0, lease_seconds=10)
    story.clock.advance(9.999)
    assert story.ledger.lease_shard("w2") is None
    assert story.ledger.reap_expired() == []


def test_models_filter_what_a_worker_may_lease(story):
    a, b = story.planned(model="a", rows=5), story.planned(model="b", rows=5)
    assert story.ledger.pending_models() == {"a": 1, "b": 1}
    assert story.ledger.lease_shard("w1", models=["c"]) is None
    assert story.ledger.lease_shard("w1", models=[]) is None
    assert story.lease(models=["b", "c"]).job.id == b
    assert story.ledger.lease_shard("w1", models=["b"]) is None
    assert story.lease(models=None).job.id == a
    assert story.ledger.pending_models() == {}


def test_expired_leases_count_as_waiting_work(story):
    story.planned(rows=5)
    story.lease(lease_seconds=10)
    assert story.ledger.pending_models() == {}
    story.clock.advance(10)
    assert story.ledger.pending_models() == {"m": 1}


def test_release_gives_the_rest_back_at_once_and_is_no_failure(story):
    story.planned(rows=5)
    lease = story.lease()
    story.commit(lease, 2)
    story.ledger.release(lease.attempt_id, 0)
    shard = story.shard(lease)
    assert (shard.state, shard.num_failures, shard.remaining_rows) == (ShardState.PENDING, 0, 3)
    again = story.lease("w2")
    assert (again.shard.id, again.shard.done_rows, again.probe_rows) == (lease.shard.id, 2, None)


def test_rows_given_back_by_an_ill_device_are_told_once_and_blame_nobody(story):
    job_id = story.planned(rows=10, shard_rows=5)
    story.lease("w1")
    lease = story.lease("w2")
    for _ in range(2):
        story.ledger.release(lease.attempt_id, 7, device_fault="uncorrectable ECC error")
    (told,) = [event.data for event in story.ledger.events(job_id) if event.kind == "device_failed"]
    assert told == {"shard": 1, "attempt": lease.attempt_id, "worker": "w2", "reason": "uncorrectable ECC error"}
    (attempt,) = [attempt for attempt in story.ledger.attempts(job_id) if attempt.id == lease.attempt_id]
    assert (attempt.state, attempt.error, attempt.metered_ns) == (AttemptState.RELEASED, told["reason"], 7)
    shard = story.shard(lease)
    assert (shard.state, shard.num_failures, shard.num_faults) == (ShardState.PENDING, 0, 0)
    story.ledger.release(story.lease("w2").attempt_id, 0)
    assert len([event for event in story.ledger.events(job_id) if event.kind == "device_failed"]) == 1


def test_a_release_whose_answer_was_lost_may_be_asked_again(story):
    story.planned(rows=5)
    lease = story.lease()
    story.ledger.release(lease.attempt_id, 0)
    story.ledger.release(lease.attempt_id, 0)
    failed = story.lease()
    story.ledger.fail(failed.attempt_id, "died", 0)
    assert story.ledger.fail(failed.attempt_id, "died", 0).num_failures == 1


def test_heartbeats_tell_what_was_asked_of_the_job(story):
    """Each running attempt hears of it at its next heartbeat."""
    actions = {}
    for ask in ("nothing", "cancel", "pause", "expire", "spend", "fail"):
        deadline = story.clock.now + timedelta(seconds=5) if ask == "expire" else None
        job_id = story.planned(rows=5, budget_usd="1", deadline=deadline)
        lease = story.lease()
        match ask:
            case "cancel":
                story.ledger.cancel(job_id)
            case "pause":
                story.ledger.pause(job_id)
            case "expire":
                story.clock.advance(5)
            case "spend":
                story.commit(lease, 1, metered_nanos=10**9)
            case "fail":
                story.ledger.fail_job(job_id, "input_changed", "the input changed")
        actions[ask] = story.ledger.heartbeat(lease.attempt_id, 0).action
    assert actions == {
        "nothing": Action.CONTINUE, "cancel": Action.STOP_CANCEL, "pause": Action.STOP_PAUSE,
        "expire": Action.STOP_EXPIRED, "spend": Action.STOP_BUDGET, "fail": Action.STOP_PAUSE,
    }  # fmt: skip


def test_a_heartbeat_never_takes_device_time_back(story):
    job_id = story.planned(rows=5)
    lease = story.lease()
    for metered_ns in (5, 9, 7):
        story.ledger.heartbeat(lease.attempt_id, metered_ns)
    assert story.ledger.attempts(job_id)[0].metered_ns == 9


def test_a_fault_waits_before_it_is_tried_again(story):
    """Storage that is down for a moment must not use up the attempts within milliseconds: 5 s, then 15 s."""
    story.planned(rows=5)
    for delay in (5, 15):
        lease = story.lease()
        story.ledger.fail(lease.attempt_id, "S3 is down", 0, kind=FailureKind.SHARD)
        story.clock.advance(delay - 0.001)
        assert story.ledger.lease_shard("w1") is None
        assert story.ledger.pending_models() == {}
        story.clock.advance(0.001)
        assert story.ledger.pending_models() == {"m": 1}
    assert story.lease().probe_rows is None


def test_a_shard_that_only_faults_fails_its_job_which_a_resume_revives(story):
    job_id = story.planned(rows=10, shard_rows=5, max_attempts=2)
    other = story.lease("w2")
    shard = None
    for _ in range(2):
        lease = story.lease()
        shard = story.ledger.fail(lease.attempt_id, "S3 is gone", 0, kind=FailureKind.SHARD)
        story.clock.advance(60)
        story.ledger.heartbeat(other.attempt_id, 0, lease_seconds=1000)
    assert shard.state is ShardState.QUARANTINED
    job = story.ledger.get_job(job_id)
    assert (job.state, job.error_code) == (JobState.FAILED, "shard_failed")
    assert "S3 is gone" in job.error_message
    story.complete(other)  # finished work is kept
    assert story.state(job_id) == JobState.FAILED
    assert story.ledger.lease_shard("w1") is None
    assert story.ledger.resume(job_id).error_code is None
    story.drain()
    assert story.finish(job_id).counts.succeeded == 10


def test_progress_forgives_faults(story):
    job_id = story.planned(rows=5, max_attempts=2)
    for _ in range(4):
        lease = story.lease()
        story.commit(lease, 1)
        story.ledger.fail(lease.attempt_id, "S3 stutters", 0, kind=FailureKind.SHARD)
        story.clock.advance(60)
    assert story.state(job_id) == JobState.IN_PROGRESS


def test_attempts_are_kept_as_history(story):
    job_id = story.planned(rows=5)
    released = story.lease()
    story.ledger.release(released.attempt_id, 0)
    failed = story.lease()
    story.ledger.fail(failed.attempt_id, "engine died: signal 9", 0)
    lost = story.lease(lease_seconds=1)
    story.clock.advance(1)
    committed = story.lease("w2")
    story.complete(committed)
    history = story.ledger.attempts(job_id)
    assert [(a.id, a.state, a.worker_id) for a in history] == [
        (released.attempt_id, AttemptState.RELEASED, "w1"),
        (failed.attempt_id, AttemptState.FAILED, "w1"),
        (lost.attempt_id, AttemptState.LOST, "w1"),
        (committed.attempt_id, AttemptState.COMMITTED, "w2"),
    ]
    assert history[1].error == "engine died: signal 9"
    assert "w1" in history[2].error
    assert history[2].ended_at == story.clock.now


def test_close_leases_go_to_workers_of_any_model(story):
    """A cancelled job must end even where the worker that had its model is gone."""
    job_id = story.planned(model="rare", rows=5)
    story.ledger.cancel(job_id)
    lease = story.lease(models=["common"])
    assert (lease.job.id, lease.mode, lease.close_status) == (job_id, LeaseMode.CLOSE, RowStatus.CANCELLED)
    assert story.ledger.heartbeat(lease.attempt_id, 0).action is Action.CONTINUE
