"""Sums over time, on SQLite and on PostgreSQL, against figures worked out by hand."""

from datetime import UTC, datetime, timedelta

import pytest

from batchinfer.jobs.caller import Caller
from batchinfer.jobs.history import NUM_BUCKETS, committed_over_time, latest_spans, use_by_day
from batchinfer.jobs.ledger import Ledger
from batchinfer.jobs.service import JobService
from tests.played import LOAD_NANOS, NANOS_PER_ROW, finish, make_spec, plan, run_shard

pytestmark = pytest.mark.service
START = datetime(2026, 3, 28, 23, 59, 50, tzinfo=UTC)


class Clock:
    """Stands still until it is moved."""

    now = START

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def service(database_url, clock):
    made = JobService.connect(database_url, "memory://")
    made.ledger = Ledger(made.engine, clock=clock)
    made.tenants.add(Caller.operator(), "red", input_roots=["/"], output_roots=["/"])
    yield made
    made.close()


@pytest.fixture
def job_id(service, clock, tmp_path):
    """Ten rows in two shards: one committed 10 s before midnight in UTC, one 10 s after it."""
    job, _ = service.ledger.submit(make_spec(tmp_path), tenant="red")
    plan(service.ledger, job.id)
    service.ledger.add_overhead(job.id, "load", kind="load", device_ns=5, nanos=LOAD_NANOS)
    run_shard(service.ledger)
    clock.now = START + timedelta(seconds=20)
    run_shard(service.ledger)
    finish(service.ledger, job.id)
    return job.id


def test_work_lies_in_the_bucket_of_its_commit(service, job_id):
    """Over 48 seconds a bucket is a second: the first shard is in the first, the second in the twenty-first."""
    series = committed_over_time(service.engine, job_id, START, START + timedelta(seconds=NUM_BUCKETS))
    assert len(series) == NUM_BUCKETS
    assert {n: (b.num_rows, b.completion_tokens, b.metered_nanos) for n, b in enumerate(series) if b.num_rows} == {
        0: (5, 100, 5 * NANOS_PER_ROW),
        20: (5, 100, 5 * NANOS_PER_ROW),
    }
    assert [bucket.start for bucket in series[:2]] == [START, START + timedelta(seconds=1)]


def test_what_is_outside_of_the_stretch_is_not_lost(service, job_id):
    series = committed_over_time(service.engine, job_id, START + timedelta(seconds=5), START + timedelta(seconds=10))
    assert sum(bucket.num_rows for bucket in series) == 10
    assert (series[0].num_rows, series[-1].num_rows) == (5, 5)


def test_attempts_in_order(service, job_id):
    spans = latest_spans(service.engine, job_id)
    assert [(span.shard_index, span.state, span.done_rows) for span in spans] == [
        (0, "committed", 5),
        (1, "committed", 5),
    ]
    assert [span.started_at for span in spans] == [START, START + timedelta(seconds=20)]


def test_use_by_day_is_in_utc_and_the_callers_own(service, job_id, clock):
    service.ledger.add_overhead(None, "idle", kind="idle", device_ns=7, nanos=9)
    for caller, idle in ((Caller.operator(), 9), (Caller.operator("red"), 0)):
        days = use_by_day(service.engine, caller, now=clock.now, num_days=3)
        assert [day.day.isoformat() for day in days] == ["2026-03-27", "2026-03-28", "2026-03-29"]
        figures = [(d.num_rows, d.prompt_tokens, d.cached_tokens, d.completion_tokens, d.metered_nanos) for d in days]
        assert figures == [(0, 0, 0, 0, 0), (5, 500, 50, 100, 5 * NANOS_PER_ROW), (5, 500, 50, 100, 5 * NANOS_PER_ROW)]
        assert [day.overhead_nanos for day in days] == [0, LOAD_NANOS, idle]
    assert not any(day.total_nanos for day in use_by_day(service.engine, Caller.operator("blue"), now=clock.now))
