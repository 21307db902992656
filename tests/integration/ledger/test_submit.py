"""Submission and look-ups."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal

import pytest

from batchinfer.errors import ConflictError, NotFoundError
from batchinfer.jobs.ids import new_job_id
from batchinfer.jobs.status import JobState


def test_a_new_job_waits_for_the_planner_and_keeps_its_spec(story):
    """What was submitted is stored: a resume never uses today's defaults."""
    spec = story.spec(
        name="n", tags={"team": "x"}, priority=3, budget_usd=Decimal("0.5"), stop=("\0end",), temperature=0.7
    )
    job, created = story.ledger.submit(spec)
    assert created
    assert job.state is JobState.VALIDATING
    assert job.spec == spec
    assert (job.name, job.tags, job.priority, job.budget_nanos) == ("n", {"team": "x"}, 3, 500_000_000)
    assert job.created_at == story.clock.now
    assert story.ledger.get_job(job.id) == job
    assert [e.kind for e in story.ledger.events(job.id)] == ["submitted"]


def test_the_same_key_and_body_give_the_same_job(story):
    first, created = story.ledger.submit(story.spec(), idempotency_key="k")
    again, created_again = story.ledger.submit(story.spec(), idempotency_key="k")
    assert (created, created_again) == (True, False)
    assert first.id == again.id
    assert len(story.ledger.list_jobs()) == 1


def test_the_same_key_with_another_body_is_a_conflict(story):
    story.ledger.submit(story.spec(), idempotency_key="k")
    with pytest.raises(ConflictError, match="'k'") as caught:
        story.ledger.submit(story.spec(max_tokens=7), idempotency_key="k")
    assert caught.value.code == "idempotency_conflict"
    assert len(story.ledger.list_jobs()) == 1


def test_a_body_hash_decides_where_a_spec_has_moments_derived_from_the_request(story):
    """Two equal requests with a deadline of 6h make two different specs, yet are one job."""
    first, _ = story.ledger.submit(story.spec(deadline="6h"), idempotency_key="k", body_hash="same")
    again, created = story.ledger.submit(story.spec(deadline="7h"), idempotency_key="k", body_hash="same")
    assert not created
    assert again.spec == first.spec


def test_jobs_without_a_key_never_meet(story):
    ids = {story.ledger.submit(story.spec())[0].id for _ in range(3)}
    assert len(ids) == 3


def test_an_id_in_use_is_refused_unless_it_is_the_same_submission(story):
    job_id = new_job_id()
    story.ledger.submit(story.spec(), job_id=job_id)
    assert story.ledger.submit(story.spec(), job_id=job_id)[0].id == job_id
    with pytest.raises(ConflictError, match=job_id):
        story.ledger.submit(story.spec(max_tokens=9), job_id=job_id)
    with pytest.raises(ConflictError, match=job_id):
        story.ledger.submit(story.spec(), job_id=job_id, idempotency_key="other")


def test_concurrent_submissions_with_one_key_make_one_job(story):
    """Eight threads post the same body at once: one creates, the others find it."""
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: story.ledger.submit(story.spec(), idempotency_key="k"), range(8)))
    assert len({job.id for job, _ in results}) == 1
    assert sum(created for _, created in results) == 1


def test_jobs_are_listed_newest_first_in_pages(story):
    ids = [story.ledger.submit(story.spec(), job_id=new_job_id(time_ms))[0].id for time_ms in (1, 2, 3, 4, 5)]
    newest_first = ids[::-1]
    assert [j.id for j in story.ledger.list_jobs(limit=2)] == newest_first[:2]
    assert [j.id for j in story.ledger.list_jobs(limit=9, after=newest_first[1])] == newest_first[2:]
    story.ledger.cancel(ids[0])
    assert [j.id for j in story.ledger.list_jobs(state=JobState.CANCELLED)] == ids[:1]


def test_an_unknown_job_is_not_found(story):
    for ask in (story.ledger.get_job, story.ledger.cancel, story.ledger.pause, story.ledger.resume, story.ledger.retry):
        with pytest.raises(NotFoundError, match="job_none"):
            ask("job_none")
    with pytest.raises(NotFoundError):
        story.ledger.cost_report("job_none")
