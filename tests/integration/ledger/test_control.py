"""Cancel, pause, resume, budgets and deadlines."""

from __future__ import annotations

from datetime import timedelta
from itertools import product

import pytest

from batchinfer.errors import ConflictError
from batchinfer.jobs.records import RowCounts
from batchinfer.jobs.status import JobState, LeaseMode
from batchinfer.types import RowStatus
from tests.integration.ledger.scenario import assert_books_balance


def job_in(story, state: JobState) -> str:  # noqa: C901 -- one case a state
    """Bring a job of two shards into a state, by legal steps only."""
    if state is JobState.VALIDATING:
        return story.ledger.submit(story.spec())[0].id
    if state is JobState.CANCELLED:
        job_id = story.ledger.submit(story.spec())[0].id
        story.ledger.cancel(job_id)
        return job_id
    deadline = story.clock.now + timedelta(seconds=10) if state is JobState.EXPIRED else None
    job_id = story.planned(budget_usd="1", deadline=deadline)
    match state:
        case JobState.IN_PROGRESS:
            story.lease()
        case JobState.PAUSED:
            story.ledger.pause(job_id)
        case JobState.CANCELLING:
            story.ledger.cancel(job_id)
        case JobState.BUDGET_EXHAUSTED:
            story.ledger.add_overhead(job_id, f"load:{job_id}", kind="load", device_ns=1, nanos=10**9)
        case JobState.FAILED:
            story.ledger.fail_job(job_id, "input_changed", "changed")
        case JobState.FINALIZING | JobState.COMPLETED | JobState.EXPIRED:
            if deadline:
                story.clock.advance(10)
            story.drain()
            if state is not JobState.FINALIZING:
                story.finish(job_id)
    return job_id


S = JobState
EXPECTED = {
    "cancel": {
        S.VALIDATING: S.CANCELLED, S.QUEUED: S.CANCELLING, S.IN_PROGRESS: S.CANCELLING, S.PAUSED: S.CANCELLING,
        S.BUDGET_EXHAUSTED: S.CANCELLING, S.CANCELLING: S.CANCELLING, S.CANCELLED: S.CANCELLED,
    },
    "pause": {
        S.VALIDATING: S.PAUSED, S.QUEUED: S.PAUSED, S.IN_PROGRESS: S.PAUSED, S.PAUSED: S.PAUSED,
    },
    "resume": {S.PAUSED: S.QUEUED, S.FAILED: S.QUEUED},  # a spent budget must be raised
    "retry": {S.COMPLETED: S.COMPLETED, S.CANCELLED: S.CANCELLED, S.EXPIRED: S.QUEUED},  # the first two have no such rows
    "fail_job": {
        S.VALIDATING: S.FAILED, S.QUEUED: S.FAILED, S.IN_PROGRESS: S.FAILED, S.PAUSED: S.FAILED, S.FINALIZING: S.FAILED,
        S.BUDGET_EXHAUSTED: S.FAILED, S.CANCELLING: S.FAILED, S.FAILED: S.FAILED,
    },
}  # fmt: skip


@pytest.mark.parametrize(("act", "state"), list(product(EXPECTED, JobState)))
def test_each_wish_in_each_state(story, act, state):
    """The table above is the whole rule; what is not in it is refused and changes nothing."""
    job_id = job_in(story, state)
    before = story.ledger.get_job(job_id)
    assert before.state is state
    arguments = ("code", "message") if act == "fail_job" else ()
    if state in EXPECTED[act]:
        getattr(story.ledger, act)(job_id, *arguments)
        assert story.state(job_id) == EXPECTED[act][state]
    else:
        with pytest.raises(ConflictError, match=f"{job_id}"):
            getattr(story.ledger, act)(job_id, *arguments)
        assert story.ledger.get_job(job_id) == before
    assert_books_balance(story.ledger, job_id)


def test_cancel_after_one_of_two_shards_keeps_its_rows(story):
    """Rows that ended are kept, charged and not relabelled; all others end as cancelled."""
    job_id = story.planned(rows=10, shard_rows=5)
    story.complete(story.lease(), metered_nanos=7)
    running = story.lease()
    story.commit(running, 2, metered_nanos=3)
    story.ledger.cancel(job_id)
    story.ledger.release(running.attempt_id, 0)
    closing = story.lease("w2")
    assert (closing.mode, closing.close_status, closing.shard.remaining_rows) == (LeaseMode.CLOSE, "cancelled", 3)
    story.complete(closing, "cancelled")
    job = story.finish(job_id)
    assert job.state is JobState.CANCELLED
    assert job.outcome == "partial"
    assert job.counts == RowCounts(succeeded=7, cancelled=3)
    assert job.metered_nanos == 10


def test_an_attempt_that_hears_of_the_cancel_may_close_by_itself(story):
    job_id = story.planned(rows=5)
    lease = story.lease()
    story.commit(lease, 2)
    story.ledger.cancel(job_id)
    assert story.complete(lease, "cancelled").state is JobState.FINALIZING


def test_a_paused_job_is_not_leased_until_resumed(story):
    job_id = story.planned(rows=10, shard_rows=5)
    running = story.lease()
    assert story.ledger.pause(job_id).state is JobState.PAUSED
    story.ledger.release(running.attempt_id, 0)
    assert story.ledger.lease_shard("w1") is None
    assert story.ledger.pending_models() == {}
    story.ledger.resume(job_id)
    assert story.ledger.pending_models() == {"m": 2}
    story.drain()
    assert story.finish(job_id).outcome == "succeeded"


def test_a_lost_lease_of_a_paused_job_stays_with_it(story):
    job_id = story.planned(rows=5)
    story.lease(lease_seconds=1)
    story.ledger.pause(job_id)
    story.clock.advance(1)
    assert story.ledger.lease_shard("w2") is None
    assert len(story.ledger.attempts(job_id, running_only=True)) == 0
    story.ledger.resume(job_id)
    assert story.lease("w2").shard.num_failures == 1


def test_cancelling_a_paused_job_closes_its_rows(story):
    job_id = story.planned(rows=5)
    story.ledger.pause(job_id)
    story.ledger.cancel(job_id)
    assert story.drain() == 1
    assert story.finish(job_id).counts == RowCounts(cancelled=5)


def test_a_spent_budget_stops_before_the_next_dispatch(story):
    """It is an outcome, resumable with more money, and not an error that retries and spends."""
    job_id = story.planned(rows=15, shard_rows=5, budget_usd="0.000000100")
    story.complete(story.lease(), metered_nanos=99)
    second = story.lease()
    story.commit(second, 1, metered_nanos=1)
    job = story.ledger.get_job(job_id)
    assert (job.state, job.cost_nanos) == (JobState.BUDGET_EXHAUSTED, 100)
    assert story.ledger.lease_shard("w1") is None
    story.ledger.release(second.attempt_id, 0)
    assert story.ledger.lease_shard("w1") is None
    for budget in (None, 100):
        with pytest.raises(ConflictError, match="--budget") as caught:
            story.ledger.resume(job_id, budget_nanos=budget)
        assert caught.value.code == "budget_spent"
    assert story.ledger.resume(job_id, budget_nanos=101).budget_nanos == 101
    assert story.lease().shard.remaining_rows == 4


def test_lost_work_and_overhead_count_against_the_budget(story):
    job_id = story.planned(rows=5, budget_usd="0.000000100")
    lease = story.lease(lease_seconds=10)
    story.ledger.heartbeat(lease.attempt_id, 60, lease_seconds=10)
    story.clock.advance(10)
    story.ledger.reap_expired()
    assert story.state(job_id) == JobState.IN_PROGRESS
    story.ledger.add_overhead(job_id, "load:1", kind="load", device_ns=40, nanos=40)
    assert story.state(job_id) == JobState.BUDGET_EXHAUSTED


def test_a_cancelled_job_is_closed_whatever_its_budget(story):
    job_id = story.planned(rows=5, budget_usd="0.000000100")
    story.ledger.cancel(job_id)
    story.ledger.add_overhead(job_id, "load:1", kind="load", device_ns=1, nanos=500)
    assert story.drain() == 1
    assert story.finish(job_id).state is JobState.CANCELLED


def test_after_the_deadline_the_rest_is_closed_as_expired(story):
    """Even before the ticker noticed."""
    job_id = story.planned(rows=10, shard_rows=5, deadline=story.clock.now + timedelta(seconds=10))
    story.complete(story.lease())
    story.clock.advance(9.999)
    assert story.ledger.expire_due() == []
    running = story.lease()
    assert running.mode is LeaseMode.RUN
    story.commit(running, 1)
    story.clock.advance(0.001)
    story.ledger.release(running.attempt_id, 0)
    lease = story.lease()
    assert (lease.mode, lease.close_status) == (LeaseMode.CLOSE, RowStatus.EXPIRED)
    story.complete(lease, "expired")
    job = story.finish(job_id)
    assert (job.state, job.counts) == (JobState.EXPIRED, RowCounts(succeeded=6, expired=4))


def test_the_ticker_expires_held_jobs_too_and_each_once(story):
    """A pause does not stop the clock."""
    deadline = story.clock.now + timedelta(seconds=10)
    paused, spent, free = (story.planned(rows=5, deadline=deadline, budget_usd="1") for _ in range(3))
    story.ledger.pause(paused)
    story.ledger.add_overhead(spent, "x", kind="load", device_ns=1, nanos=10**9)
    story.clock.advance(10)
    assert set(story.ledger.expire_due()) == {paused, spent, free}
    assert story.ledger.expire_due() == []
    assert story.ledger.get_job(paused).closing is RowStatus.EXPIRED
    with pytest.raises(ConflictError):
        story.ledger.pause(paused)
    assert story.drain() == 3
    for _ in range(3):
        lease = story.ledger.lease_finalizing("w1")
        assert story.ledger.finish(lease.job.id, lease.token, "m").state is JobState.EXPIRED


def test_a_deadline_that_passes_after_the_last_row_changes_nothing(story):
    job_id = story.planned(rows=5, deadline=story.clock.now + timedelta(seconds=10))
    story.drain()
    story.clock.advance(10)
    assert story.ledger.expire_due() == []
    assert story.finish(job_id).state is JobState.COMPLETED


def test_a_failed_job_goes_on_where_it_was(story):
    """With rows left they run; with none left only the manifest is made again."""
    job_id = story.planned(rows=5)
    story.drain()
    lease = story.ledger.lease_finalizing("w1")
    failed = story.ledger.fail_finalizing(job_id, lease.token, "output_error", "bucket is gone")
    assert (failed.state, failed.error_code) == (JobState.FAILED, "output_error")
    assert story.ledger.resume(job_id).state is JobState.FINALIZING
    assert story.finish(job_id).outcome == "succeeded"


def test_a_job_that_failed_while_cancelling_goes_on_cancelling(story):
    job_id = story.planned(rows=5)
    story.ledger.cancel(job_id)
    story.ledger.fail_job(job_id, "output_error", "bucket is gone")
    assert story.ledger.lease_shard("w1") is None
    assert story.ledger.resume(job_id).state is JobState.CANCELLING
    assert story.lease().close_status == "cancelled"


def test_events_tell_the_story_in_order(story):
    job_id = story.planned(rows=5)
    story.ledger.pause(job_id)
    story.ledger.resume(job_id)
    story.drain()
    story.finish(job_id)
    events = story.ledger.events(job_id)
    assert [(e.kind, e.data.get("new")) for e in events] == [
        ("submitted", None), ("state", "queued"), ("planned", None), ("state", "paused"), ("state", "queued"),
        ("state", "in_progress"), ("state", "finalizing"), ("state", "completed"),
    ]  # fmt: skip
    assert [e.id for e in story.ledger.events(job_id, after=events[4].id)] == [e.id for e in events[5:]]
