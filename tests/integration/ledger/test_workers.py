"""The registered workers."""

from __future__ import annotations

import pytest

from batchinfer.errors import NotFoundError


def test_a_worker_registers_lives_and_goes(story):
    start = story.clock.now
    worker = story.ledger.register_worker(
        "gpu", hostname="box", pid=7, nanos_per_hour=3, device="H200", version="0.1", models=["m"]
    )
    assert (worker.hostname, worker.pid, worker.nanos_per_hour, worker.models) == ("box", 7, 3, ("m",))
    story.clock.advance(5)
    story.ledger.worker_heartbeat("gpu", models=["m", "n"], stats={"tokens": 5})
    seen = next(w for w in story.ledger.list_workers() if w.id == "gpu")
    assert (seen.models, seen.stats, seen.started_at) == (("m", "n"), {"tokens": 5}, start)
    assert (seen.last_seen_at - start).total_seconds() == 5
    story.ledger.drop_worker("gpu")
    assert {w.id for w in story.ledger.list_workers()} == {"w1", "w2"}
    with pytest.raises(NotFoundError, match="gpu"):
        story.ledger.worker_heartbeat("gpu", models=[], stats={})


def test_registering_again_refreshes(story):
    story.ledger.register_worker("w1", hostname="new", pid=2, nanos_per_hour=9)
    worker = next(w for w in story.ledger.list_workers() if w.id == "w1")
    assert (worker.hostname, worker.nanos_per_hour) == ("new", 9)


def test_a_lease_carries_the_price_of_its_worker(story):
    """The price is kept with the attempt: what the worker costs later does not change what it did."""
    job_id = story.planned(rows=5)
    story.ledger.register_worker("dear", hostname="h", pid=1, nanos_per_hour=7 * 3600 * 10**9)
    lease = story.lease("dear")
    story.ledger.register_worker("dear", hostname="h", pid=1, nanos_per_hour=1)
    story.ledger.drop_worker("dear")
    story.ledger.fail(lease.attempt_id, "died", 10)
    assert story.ledger.cost_report(job_id).overhead_nanos == {"lost": 70}


def test_the_newest_report_of_each_engine_is_kept_and_of_the_latest_engines_only(story):
    job_id = story.planned(rows=5)
    assert story.ledger.get_job(job_id).engines == ()
    story.ledger.note_engine(job_id, "a", {"steps": 1})
    story.ledger.note_engine(job_id, "b", {"steps": 5})
    story.ledger.note_engine(job_id, "a", {"steps": 2})
    assert story.ledger.get_job(job_id).engines == ({"id": "b", "steps": 5}, {"id": "a", "steps": 2})
    for number in range(20):
        story.ledger.note_engine(job_id, f"engine {number}", {"steps": number})
    kept = [report["steps"] for report in story.ledger.get_job(job_id).engines]
    assert kept == list(range(12, 20))
