"""A tenant's monthly budget stops its jobs before the next shard is handed out, and no other tenant's."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from batchinfer.errors import ConflictError, InvalidSpecError, NotFoundError
from batchinfer.jobs.prices import device_kinds
from batchinfer.jobs.status import Action, JobState
from batchinfer.money import Price
from tests.integration.ledger.scenario import RATE, assert_books_balance


def submit(story, tenant, **fields):
    job, _ = story.ledger.submit(story.spec(**fields), tenant=tenant)
    story.plan(job.id)
    return job.id


def test_a_spent_budget_holds_all_of_the_tenants_jobs_and_no_one_elses(story, ledger):
    ledger.set_budget("red", 100)
    first, second, other = submit(story, "red"), submit(story, "red"), submit(story, "blue")
    lease = story.lease(job_id=first)
    story.commit(lease, 5, metered_nanos=100)
    assert story.state(first) == JobState.BUDGET_EXHAUSTED
    # nothing was said about the second job yet: its shards are not handed out for all that
    assert ledger.lease_shard("w2", job_id=second) is None
    assert story.state(second) == JobState.BUDGET_EXHAUSTED
    assert story.lease("w2").job.id == other
    told = [event for event in ledger.events(second) if event.kind == "budget_spent"]
    assert [(e.data["budget"], e.data["month"], e.data["spent_nanos"]) for e in told] == [("tenant", "2026-01", 100)]


def test_a_running_attempt_hears_of_it_at_its_heartbeat(story, ledger):
    ledger.set_budget("red", 100)
    first, second = submit(story, "red"), submit(story, "red")
    one, two = story.lease(job_id=first), story.lease("w2", job_id=second)
    story.commit(one, 5, metered_nanos=100)
    assert ledger.hold_overspent() == [second]
    assert ledger.heartbeat(two.attempt_id, 7).action is Action.STOP_BUDGET
    found = ledger.list_budgets("red")[0]
    assert (found.spent_nanos, found.in_flight_nanos) == (100, 7)
    story.commit(two, 2, metered_nanos=7, device_ns=7)
    ledger.release(two.attempt_id, 7)
    found = ledger.list_budgets("red")[0]
    assert (found.spent_nanos, found.in_flight_nanos, found.held_jobs) == (107, 0, (first, second))


def test_a_resume_needs_a_raise(story, ledger):
    ledger.set_budget("red", 100)
    job_id = submit(story, "red")
    story.complete(story.lease(), metered_nanos=120)
    with pytest.raises(ConflictError, match="budget set") as caught:
        ledger.resume(job_id)
    assert caught.value.code == "budget_spent"
    ledger.set_budget("red", 1000)
    ledger.resume(job_id)
    story.complete(story.lease(), metered_nanos=1)
    assert story.state(job_id) == JobState.FINALIZING
    assert_books_balance(ledger, job_id)


def test_a_new_month_has_a_new_budget(story, ledger):
    ledger.set_budget("red", 100)
    job_id = submit(story, "red")
    story.complete(story.lease(), metered_nanos=100)
    story.clock.now = datetime(2026, 2, 1, tzinfo=UTC)
    ledger.resume(job_id)
    assert story.lease().job.id == job_id
    assert [(b.spent_month, b.spent_nanos) for b in ledger.list_budgets("red")] == [("2026-02", 0)]


def test_a_month_of_its_own_comes_before_every_month(story, ledger):
    ledger.set_budget("red", 1)
    ledger.set_budget("red", 1000, "2026-01")
    submit(story, "red")
    story.complete(story.lease(), metered_nanos=100)
    assert ledger.hold_overspent() == []
    ledger.remove_budget("red", "2026-01")
    assert len(ledger.hold_overspent()) == 1
    assert [b.month for b in ledger.list_budgets()] == [None]
    with pytest.raises(NotFoundError, match="budget ls"):
        ledger.remove_budget("red", "2026-01")


def test_overhead_counts_too(story, ledger):
    ledger.set_budget("red", 100)
    job_id = submit(story, "red")
    ledger.add_overhead(job_id, "load:1", kind="load", device_ns=100, nanos=100)
    assert story.state(job_id) == JobState.BUDGET_EXHAUSTED


def test_what_is_only_closed_goes_on(story, ledger):
    """A cancelled job's rows are written whatever the budget says: that costs nothing."""
    ledger.set_budget("red", 100)
    first, second = submit(story, "red"), submit(story, "red")
    story.commit(story.lease(job_id=first), 5, metered_nanos=100)
    ledger.cancel(second)
    assert story.lease("w2").job.id == second


def test_a_finished_job_is_left_alone(story, ledger):
    ledger.set_budget("red", 100)
    job_id = submit(story, "red")
    story.complete(story.lease(), metered_nanos=50)
    story.complete(story.lease(), metered_nanos=50)
    assert story.state(job_id) == JobState.FINALIZING


def test_a_strange_month_is_refused(ledger):
    for month in ["2026", "2026-13", "2026-1", "26-01", "2026-01-01"]:
        with pytest.raises(InvalidSpecError, match="YYYY-MM"):
            ledger.set_budget("red", 1, month)


def test_a_device_has_the_price_books_price_from_its_moment_on(story, ledger):
    ledger.register_worker("gpu", hostname="h", pid=1, nanos_per_hour=RATE, device="cuda:1")
    submit(story, "red")
    assert story.lease("gpu").nanos_per_hour == RATE
    ledger.set_device_price("cuda", 5)
    ledger.set_device_price("cuda:1", 7, valid_from=datetime(2026, 1, 2, tzinfo=UTC))
    assert ledger.worker_price("gpu") == 5
    assert story.lease("gpu").nanos_per_hour == 5
    story.clock.advance(86_400)
    assert ledger.worker_price("gpu") == 7
    assert ledger.worker_price("w1") == RATE
    assert device_kinds("cuda:1") == ["cuda:1", "cuda"]
    assert [(p.device, p.nanos_per_hour) for p in ledger.device_prices()] == [("cuda", 5), ("cuda:1", 7)]


def test_the_price_book_keeps_what_was(ledger, story):
    ledger.set_price("m", Price(1, 2, 3))
    story.clock.advance(60)
    ledger.set_price("m", Price(4, 5, 6))
    ledger.set_price("n", Price(7, 8, 9))
    assert [(p.model, p.price) for p in ledger.model_prices()] == [
        ("m", Price(4, 5, 6)), ("m", Price(1, 2, 3)), ("n", Price(7, 8, 9)),
    ]  # fmt: skip
    assert ledger.price_at("m", datetime(2026, 1, 1, tzinfo=UTC)) == Price(1, 2, 3)
