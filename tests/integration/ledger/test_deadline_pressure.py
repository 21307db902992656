"""A simulated night with the real claim: a job that would be late is let in before a more important one, in time."""

from __future__ import annotations

from datetime import timedelta

from batchinfer.jobs.status import JobState

SHARD_SECONDS = 2.0
FORECAST = {"seconds": {"low": 33.0, "expected": 40.0, "high": 48.0}}


def work_for(story, ledger, seconds, *, watch):
    """One worker, two seconds a shard of ten rows; give the jobs in the order in which their shards ran."""
    ran, end = [], story.clock.now + timedelta(seconds=seconds)
    while story.clock.now < end:
        if watch:
            ledger.watch_deadlines()
        ledger.expire_due()
        lease = ledger.lease_shard("w1", lease_seconds=60)
        if lease is None:
            break
        story.clock.advance(0 if lease.close_status else SHARD_SECONDS)
        story.complete(lease, lease.close_status or "succeeded", metered_nanos=0 if lease.close_status else 7)
        ran.append(lease.job.id)
    return ran


def two_jobs(story, ledger, *, deadline_seconds=100):
    big = story.planned(rows=1000, shard_rows=10, priority=10)
    deadline = story.clock.now + timedelta(seconds=deadline_seconds)
    small = story.planned(rows=200, shard_rows=10, deadline=deadline)
    ledger.note_forecast(ledger.get_job(small), FORECAST)
    return big, small


def test_without_the_watch_the_job_is_late(story, ledger):
    """The story below would be none if the job were in time anyway; its unfinished rows are labelled expired."""
    _, small = two_jobs(story, ledger)
    work_for(story, ledger, 300, watch=False)
    job = ledger.get_job(small)
    assert job.counts.succeeded == 0
    assert job.counts.expired == 200


def test_with_it_the_job_is_in_time_and_the_other_has_the_rest(story, ledger):
    big, small = two_jobs(story, ledger)
    ran = work_for(story, ledger, 100, watch=True)
    assert ledger.get_job(small).counts.succeeded == 200
    assert ledger.get_job(small).state == JobState.FINALIZING
    assert ran[0] == big, "there was time enough: nobody pushes in without need"
    assert ran.count(big) + ran.count(small) == 50


def test_a_hopeless_deadline_makes_nobody_else_late(story, ledger):
    """Ten seconds for forty seconds of work: the rows that did not run end as expired, the other job is not held up."""
    big, _ = two_jobs(story, ledger, deadline_seconds=10)
    ran = work_for(story, ledger, 10, watch=True)
    assert set(ran) == {big}


def test_what_was_finished_before_the_deadline_is_kept_and_charged(story, ledger):
    deadline = story.clock.now + timedelta(seconds=5)
    job_id = story.planned(rows=40, shard_rows=10, deadline=deadline)
    work_for(story, ledger, 60, watch=True)
    job = ledger.get_job(job_id)
    assert (job.counts.succeeded, job.counts.expired) == (30, 10)
    assert job.metered_nanos == 3 * 7
    story.finish(job_id)
    assert story.state(job_id) == JobState.EXPIRED
