"""Money: rows and overhead sum to the meter, to the nano-dollar."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from batchinfer.money import NS_PER_HOUR, DeviceMeter, Price
from tests.integration.ledger.scenario import assert_books_balance


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking would take minutes
)
@given(
    rate=st.integers(1, 10**12),
    parts=st.lists(st.integers(0, 10**13), max_size=5),
    lost_ns=st.integers(0, 10**13),
    ending=st.sampled_from(["commit", "release", "fail", "lose"]),
)
def test_parts_and_lost_work_sum_to_the_attempts_device_time(story, rate, parts, lost_ns, ending):
    """However the attempt ends: all its device time is booked, once, and no nano-dollar is rounded away.

    A heartbeat estimates the share of unfinished rows. An attempt that commits its shard has none: its parts are all.
    """
    story.ledger.register_worker("metered", hostname="h", pid=1, nanos_per_hour=rate)
    num_rows = len(parts) + (ending != "commit") + 1
    job_id = story.planned(rows=num_rows, shard_rows=num_rows)
    lease = story.lease("metered", lease_seconds=10)
    assert lease.job.id == job_id
    meter = DeviceMeter(lease.nanos_per_hour)
    for device_ns in (*parts, 0):
        story.commit(lease, 1, device_ns=device_ns, metered_nanos=meter.charge(device_ns))
    total_ns = reported_ns = sum(parts) + lost_ns
    story.ledger.heartbeat(lease.attempt_id, reported_ns, lease_seconds=10)
    match ending:
        case "commit":
            story.publish(lease)
            total_ns = sum(parts)
        case "release":
            story.ledger.release(lease.attempt_id, reported_ns)
        case "fail":
            story.ledger.fail(lease.attempt_id, "died", reported_ns)
        case "lose":
            story.clock.advance(10)
            story.ledger.reap_expired()
    report = story.ledger.cost_report(job_id)
    assert report.total_nanos == total_ns * rate // NS_PER_HOUR
    assert report.device_ns == total_ns
    assert report.rows_nanos == sum(parts) * rate // NS_PER_HOUR
    assert_books_balance(story.ledger, job_id)
    if ending != "commit":
        story.ledger.cancel(job_id)
        story.drain()


def test_a_last_word_counts_more_than_the_last_heartbeat(story):
    """The dying attempt says what it used since its last heartbeat."""
    job_id = story.planned(rows=5)
    lease = story.lease()
    story.ledger.heartbeat(lease.attempt_id, 100)
    story.ledger.fail(lease.attempt_id, "died", 150)
    assert story.ledger.cost_report(job_id).overhead_nanos == {"lost": 150}


def test_overhead_is_booked_once_a_source_and_by_kind(story):
    job_id = story.planned(rows=5)
    book = story.ledger.add_overhead
    assert book(job_id, "load:w1:1", kind="load", device_ns=5, nanos=50)
    assert not book(job_id, "load:w1:1", kind="load", device_ns=5, nanos=50)
    assert book(job_id, "idle:w1:1", kind="idle", device_ns=1, nanos=2, worker_id="w1")
    assert book(None, "idle:w1:2", kind="idle", device_ns=1, nanos=2)  # nobody's
    report = story.ledger.cost_report(job_id)
    assert report.overhead_nanos == {"load": 50, "idle": 2}
    assert (report.total_nanos, report.device_ns) == (52, 6)
    assert_books_balance(story.ledger, job_id)


def test_one_source_booked_at_once_by_many_counts_once(story):
    job_id = story.planned(rows=5)
    with ThreadPoolExecutor(8) as pool:
        booked = list(
            pool.map(lambda _: story.ledger.add_overhead(job_id, "load:1", kind="load", device_ns=1, nanos=7), range(8))
        )
    assert sum(booked) == 1
    assert story.ledger.get_job(job_id).overhead_nanos == 7


def test_amounts_beyond_32_and_53_bits_stay_exact(story):
    job_id = story.planned(rows=2, shard_rows=2)
    lease = story.lease()
    amount = 2**60 + 1
    for _ in range(2):
        story.commit(lease, 1, metered_nanos=amount, list_nanos=amount, device_ns=1)
    assert story.ledger.cost_report(job_id).rows_nanos == 2 * amount
    assert_books_balance(story.ledger, job_id)


def test_the_price_book_knows_which_price_was_in_force_when(story):
    old, new = Price(1, 2, 3), Price(10, 20, 30)
    start = story.clock.now
    assert story.ledger.price_at("m") is None
    story.ledger.set_price("m", old)
    story.ledger.set_price("m", new, valid_from=start + timedelta(days=1))
    story.ledger.set_price("other", new)
    moments = {-1: None, 0: old, 86_399: old, 86_400: new, 10**8: new}
    assert {s: story.ledger.price_at("m", start + timedelta(seconds=s)) for s in moments} == moments
    story.ledger.set_price("m", new)  # a correction of the same moment
    assert story.ledger.price_at("m") == new


def test_naive_times_are_refused(story):
    with pytest.raises(Exception, match="no time zone"):
        story.ledger.set_price("m", Price(1, 1, 1), valid_from=story.clock.now.replace(tzinfo=None))
