"""A page of jobs is read from an index that ends with the id, whatever it is filtered by: nothing is sorted or scanned."""

from __future__ import annotations

import re

import pytest
from sqlalchemy import insert, text

from batchinfer.db.tables import Job, JobTag
from batchinfer.jobs.caller import Caller
from batchinfer.jobs.ledger_jobs import list_statement
from batchinfer.jobs.status import JobState
from tests.integration.ledger.test_claim_plan import explain

NUM_JOBS = 5000
FILTERS = {
    "none": {},
    "tenant": {"tenant": "t3"},
    "state": {"state": JobState.QUEUED},
    "model": {"model": "m7"},
    "name": {"name": "n1234"},
    "tag": {"tag": ("team", "x5")},
}


@pytest.fixture
def many_jobs(story, engine):
    """Enough for the planners to prefer an index; their statistics are up to date."""
    job, _ = story.ledger.submit(story.spec())
    with engine.begin() as connection:
        columns = connection.execute(Job.__table__.select().where(Job.id == job.id)).mappings().one()
        values = [
            dict(columns) | {
                "id": f"job_{number:06}", "tenant_id": f"t{number % 10}", "model": f"m{number % 100}",
                "name": f"n{number}", "state": "queued" if number % 50 == 0 else "completed",
            }
            for number in range(NUM_JOBS)
        ]  # fmt: skip
        connection.execute(insert(Job), values)
        tags = [
            {"job_id": row["id"], "key": "team", "value": f"x{n % 40}", "tenant_id": row["tenant_id"]}
            for n, row in enumerate(values)
        ]
        connection.execute(insert(JobTag), tags)
        connection.execute(text("ANALYZE"))


@pytest.mark.parametrize("after", [None, "job_004000"])
@pytest.mark.parametrize("caller", [Caller.operator(), Caller.operator("t3")])
def test_each_filter_reads_a_page_from_an_index(engine, many_jobs, caller, after):
    for name, options in FILTERS.items():
        plan = explain(engine, list_statement(caller=caller, limit=20, after=after, **options))
        assert not re.search(r"TEMP B-TREE|Seq Scan|SCAN jobs(?! USING INDEX)|SCAN job_tags", plan), (name, plan)
        # where PostgreSQL expects less than a page, it may fetch these by the index and then put them in order
        sorted_rows = [int(rows) for rows in re.findall(r"Sort  \(cost=\S+ rows=(\d+)", plan)]
        assert all(rows < 20 for rows in sorted_rows), (name, plan)


def test_pages_by_tag_and_tenant_are_what_a_count_by_hand_says(story, engine, many_jobs):
    expected = [n for n in reversed(range(NUM_JOBS)) if n % 40 == 5 and n % 10 == 5]
    first = story.ledger.list_jobs(tag=("team", "x5"), tenant="t5", limit=50)
    second = story.ledger.list_jobs(tag=("team", "x5"), tenant="t5", limit=1000, after=first[-1].id)
    assert [job.id for job in (*first, *second)] == [f"job_{n:06}" for n in expected]
    assert story.ledger.list_jobs(caller=Caller.operator("t4"), tag=("team", "x5")) == []


def test_changed_tags_are_found_under_their_new_values_only(story):
    job, _ = story.ledger.submit(story.spec(tags={"team": "a", "run": "1"}))
    story.ledger.change(job.id, {"tags": {"team": "b"}})
    assert story.ledger.list_jobs(tag=("team", "a")) == []
    assert story.ledger.list_jobs(tag=("run", "1")) == []
    assert [found.id for found in story.ledger.list_jobs(tag=("team", "b"))] == [job.id]
