"""Usage by day is what the ledger's entries add up to, is found by an index, and no look at it writes anything."""

from __future__ import annotations

import re
from collections import Counter
from datetime import date
from random import Random

import pyarrow.parquet as pq
import pytest
from sqlalchemy import event, insert, select, text

from batchinfer.db.tables import Job, LedgerEntry, UsageRow
from batchinfer.errors import InvalidSpecError
from batchinfer.jobs.caller import Caller, Role
from batchinfer.jobs.usage import UsageQuery, export_usage, iter_usage, parse_groups, usage_statement, usage_sums
from batchinfer.types import Usage
from tests.integration.ledger.test_claim_plan import explain

OPERATOR = Caller.operator()
DAY = 86_400


def query(*groups, **more):
    return UsageQuery(parse_groups(groups), **more)


@pytest.fixture
def busy(story, ledger):
    """Four jobs of two tenants and two models over three days: (tenant, model, tags, id) each."""
    random, jobs = Random(5), []
    for tenant, model, tags in (
        ("red", "m", {"team": "a"}),
        ("red", "n", {"team": "a", "kind": "night"}),
        ("blue", "m", {}),
        ("blue", "m", {"team": "b"}),
    ):
        job, _ = ledger.submit(story.spec(model=model, tags=tags), tenant=tenant)
        story.plan(job.id, 8, 4)
        jobs.append((tenant, model, tags, job.id))
    while (lease := ledger.lease_shard("w1", lease_seconds=3 * DAY)) is not None:
        for _ in range(2):
            ns = random.randint(1, 999)
            usage = Usage(random.randint(1, 9), 1, random.randint(1, 9))
            story.commit(lease, 2, usage=usage, device_ns=ns, metered_nanos=ns, list_nanos=ns // 3, saved_nanos=1)
            story.clock.advance(DAY / 5)
        story.publish(lease)
        ledger.add_overhead(lease.job.id, f"load:{lease.attempt_id}", kind="load", device_ns=7, nanos=7)
    ledger.add_overhead(None, "idle:1", kind="idle", device_ns=5, nanos=5)
    return jobs


def recount(engine, jobs, key):
    """Money of each group, from the ledger's entries one by one."""
    known = {job_id: (tenant, model, tags) for tenant, model, tags, job_id in jobs} | {None: ("", "", {})}
    sums = Counter()
    with engine.connect() as connection:
        for entry in connection.execute(select(LedgerEntry)):
            tenant, model, tags = known[entry.job_id]
            facts = {"day": [entry.created_at.date().isoformat()], "tenant": [tenant], "model": [model]}
            facts |= {"job": [entry.job_id] if entry.job_id else [], "tag": [f"{k}={v}" for k, v in tags.items()]}
            first, *second = key
            for one in facts[first]:
                for other in facts[second[0]] if second else [None]:
                    sums[(one,) if other is None else (one, other)] += entry.nanos
    return sums


GROUPS = [("day",), ("tenant",), ("model",), ("job",), ("tag",), ("day", "tenant"), ("tenant", "day"), ("model", "tag"),
          ("job", "day"), ("tag", "day"), ("tenant", "tag")]  # fmt: skip


def test_each_grouping_is_the_sum_of_the_entries(engine, busy):
    for groups in GROUPS:
        sums, more = usage_sums(engine, query(*groups), OPERATOR)
        assert more is None
        assert {s.group: s.metered_nanos + s.overhead_nanos for s in sums} == dict(recount(engine, busy, groups))
        assert [s.group for s in sums] == sorted(s.group for s in sums)


def test_tokens_rows_and_savings_are_those_of_the_jobs(ledger, engine, busy):
    for s in usage_sums(engine, query("job"), OPERATOR)[0]:
        job = ledger.get_job(s.group[0])
        assert Usage(s.prompt_tokens, s.cached_tokens, s.completion_tokens) == job.usage
        assert (s.metered_nanos, s.overhead_nanos, s.list_nanos) == (
            job.metered_nanos, job.overhead_nanos, job.list_nanos,
        )  # fmt: skip
        assert (s.num_rows, s.saved_nanos) == (8, job.saved_nanos)


def test_a_tenant_sees_its_own_and_not_the_platforms(engine, busy):
    sums, _ = usage_sums(engine, query("tenant", "model"), Caller("red", Role.VIEWER))
    assert [s.group for s in sums] == [("red", "m"), ("red", "n")]
    everyone, _ = usage_sums(engine, query("tenant"), OPERATOR)
    assert [s.group for s in everyone] == [("",), ("blue",), ("red",)]


def test_days_are_cut_with_both_ends(engine, busy, story):
    first = story.clock.now.date().replace(day=1)
    whole = recount(engine, busy, ("day",))
    second = date(first.year, first.month, 2)
    sums, _ = usage_sums(engine, query("day", first_day=second, last_day=second), OPERATOR)
    assert {s.group: s.metered_nanos + s.overhead_nanos for s in sums} == {
        (second.isoformat(),): whole[(second.isoformat(),)]
    }


def test_pages_join_to_the_whole(engine, busy):
    for groups in [("job",), ("job", "day"), ("tag", "day")]:
        whole, _ = usage_sums(engine, query(*groups), OPERATOR)
        pages, after = [], None
        while True:
            page, after = usage_sums(engine, query(*groups), OPERATOR, after=after, limit=2)
            pages += page
            if after is None:
                break
        assert pages == whole
        assert len(whole) > 2


@pytest.mark.parametrize("after", ["", "!!", "W10=", "WyJhIiwgImIiXQ==", "WzFd"])
def test_a_strange_cursor_is_refused(after):
    with pytest.raises(InvalidSpecError, match="next_after"):
        usage_statement(query("day"), OPERATOR, after=after)


@pytest.mark.parametrize("groups", [("day", "day"), ("job", "tag"), ("day", "model", "job"), ("week",)])
def test_a_strange_grouping_is_refused(groups):
    with pytest.raises(InvalidSpecError, match="group"):
        query(*groups)


def test_export_has_every_line_and_exact_dollars(engine, busy, tmp_path):
    path = tmp_path / "usage.parquet"
    number = export_usage(engine, query("job", "day"), OPERATOR, str(path))
    table = pq.read_table(path)
    lines = [line for batch in iter_usage(engine, query("job", "day"), OPERATOR) for line in batch]
    assert table.num_rows == number == len(lines)
    assert [(r["job"], r["day"], int(r["metered_usd"] * 10**9), r["num_rows"]) for r in table.to_pylist()] == [
        (*line.group, line.metered_nanos, line.num_rows) for line in lines
    ]


def test_a_tag_that_no_column_can_hold_costs_nothing_but_its_looks(story, ledger, engine):
    job_id = story.planned(rows=1, tags={"a": "x\0y"})
    story.complete(story.lease(), metered_nanos=3)
    assert usage_sums(engine, query("tag"), OPERATOR)[0][0].group == ("a=x\ufffdy",)
    assert ledger.get_job(job_id).metered_nanos == 3


@pytest.fixture
def many(engine):
    """Twenty thousand jobs' rows, twenty of each day, of which one tenant has a few."""
    keys = {"dimension": "job", "model": "m"}
    values = [
        keys | {"day": f"2026-{1 + i // 2000:02}-{1 + i // 80 % 25:02}", "key": f"job_{i:08}",
                "tenant_id": "red" if i % 1000 == 0 else "blue"}
        for i in range(20_000)
    ]  # fmt: skip
    days = [value | {"dimension": "all", "key": ""} for value in values[::80]]
    with engine.begin() as connection:
        for rows in (values, days):
            connection.execute(insert(UsageRow), rows)
        connection.execute(text("ANALYZE"))


def test_no_question_scans_the_table(engine, many):
    """The roll-up of all has few rows; a page of jobs is read from an index in its order and ends with the page."""
    red = Caller("red", Role.VIEWER)
    for groups, who, after in [
        (("day",), OPERATOR, None),
        (("tenant", "model"), OPERATOR, None),
        (("day",), red, None),
        (("job",), OPERATOR, None),
        (("job",), OPERATOR, "WyJqb2JfMDAwMTAwMDAiXQ=="),
        (("job",), red, None),
    ]:
        plan = explain(engine, usage_statement(query(*groups), who, after=after, limit=101))
        assert not re.search(r"Seq Scan|SCAN usage_days(?! USING)", plan), (groups, plan)
        assert groups != ("job",) or not re.search(r"TEMP B-TREE|Sort ", plan), (groups, plan)


def test_looking_at_money_writes_nothing(engine, busy, ledger):
    """A poll that books is a poll that books twice."""
    written = []

    def note(_connection, _cursor, sql, *_rest):
        if not sql.lstrip().upper().startswith(("SELECT", "BEGIN", "PRAGMA", "SHOW", "WITH")):
            written.append(sql)

    event.listen(engine, "before_cursor_execute", note)
    try:
        for groups in GROUPS:
            usage_sums(engine, query(*groups), OPERATOR)
        ledger.list_budgets()
        ledger.model_prices()
        ledger.device_prices()
        for *_, job_id in busy:
            ledger.cost_report(job_id)
            ledger.in_flight_nanos(job_id)
    finally:
        event.remove(engine, "before_cursor_execute", note)
    assert written == []


def test_jobs_of_one_day_do_not_lose_each_others_amounts(engine, story, ledger):
    """Two jobs' parts add to one row; a lost update would show in the sum."""
    for _ in range(2):
        story.planned(rows=30, shard_rows=30)
    leases = [story.lease(worker) for worker in ("w1", "w2")]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda lease: [story.commit(lease, 1, metered_nanos=1) for _ in range(30)], leases))
    assert usage_sums(engine, query("day"), OPERATOR)[0][0].metered_nanos == 60
    with engine.connect() as connection:
        assert sum(connection.execute(select(Job.metered_nanos)).scalars()) == 60
