"""The claim is one statement that reads an index until the first match, however long the queue is."""

from __future__ import annotations

import re

import pytest
from sqlalchemy import delete, event, insert, text

from batchinfer.db.tables import Base, Shard
from batchinfer.jobs.lease_order import ANYTHING, Offer, claim_statement
from batchinfer.jobs.ledger import Ledger
from batchinfer.jobs.status import JobState
from tests.integration.ledger.scenario import Scenario, shard_plans


@pytest.fixture
def long_queue(story):
    """Two thousand pending shards, and as many that are done."""
    job_id = story.planned(rows=2000, shard_rows=1)
    done, _ = story.ledger.submit(story.spec())
    values = [
        {
            "job_id": done.id, "shard_index": s.index, "row_start": s.row_start, "row_end": s.row_end, "est_tokens": 1,
            "model": "m", "state": "committed", "queue": None, "rank": 0, "todo_rows": 1, "done_rows": 1,
        }
        for s in shard_plans(2000, 1)
    ]  # fmt: skip
    with story.ledger._engine.begin() as connection:
        connection.execute(insert(Shard), values)
        connection.execute(text("ANALYZE"))
    return job_id


def explain(engine, statement) -> str:
    """The database's own word on how it would run the statement."""
    prefix = "EXPLAIN QUERY PLAN " if engine.dialect.name == "sqlite" else "EXPLAIN "

    def ask(_connection, _cursor, sql, parameters, _context, _many):
        return prefix + sql, parameters

    event.listen(engine, "before_cursor_execute", ask, retval=True)
    try:
        with engine.connect() as connection:
            rows = connection.execute(statement).cursor.fetchall()
            connection.rollback()
    finally:
        event.remove(engine, "before_cursor_execute", ask)
    return "\n".join(str(row) for row in rows)


OFFERS = [
    ANYTHING,
    Offer(models=("m",), needs=("",)),
    Offer(models=("a", "m", "z"), needs=("", "nightly/"), loaded=("m",)),
    Offer(models=("m",), loaded=("m",), near=("job_1", 7)),
    Offer(job_id="job_1"),
]


@pytest.mark.parametrize("offer", OFFERS)
def test_the_claim_reads_shards_through_indexes_alone(story, engine, long_queue, offer):
    """What is sorted is the heads of the lanes; shards come in an index's order, or by their id."""
    plan = explain(engine, claim_statement(story.clock.now, offer, dialect=engine.dialect.name))
    assert not re.search(r"Seq Scan on shards|SCAN (shards|head)", plan), plan
    assert "ix_shards_claim" in plan or offer.job_id is not None


def test_a_claim_costs_a_few_probes_a_lane_however_many_shards_wait(sqlite_shared, clock):
    """Counted in SQLite's own steps: twenty times as many shards are not twenty times the work, whoever may run them."""
    with sqlite_shared.begin() as connection:
        for table in reversed(Base.metadata.sorted_tables):
            connection.execute(delete(table))
    story = Scenario(Ledger(sqlite_shared, clock=clock), clock)
    for number in range(5):
        story.planned(rows=20, shard_rows=1, model=f"m{number}")
    few = sqlite_steps(sqlite_shared, claim_statement(clock.now, Offer(models=("m3",)), dialect="sqlite"))
    for number in range(5):
        story.planned(rows=400, shard_rows=1, model=f"m{number}")
    many = sqlite_steps(sqlite_shared, claim_statement(clock.now, Offer(models=("m3",)), dialect="sqlite"))
    assert few > 10
    assert many <= 1.5 * few


def sqlite_steps(engine, statement) -> int:
    """Tens of SQLite's virtual machine's instructions that a statement takes."""
    ticks: list[None] = []
    with engine.connect() as connection:
        raw = connection.connection.driver_connection
        raw.set_progress_handler(lambda: ticks.append(None), 10)
        try:
            assert connection.execute(statement).one_or_none() is not None
        finally:
            raw.set_progress_handler(None, 0)
            connection.rollback()
    return len(ticks)


def test_a_claim_is_one_update(story, engine, long_queue):
    """Select-then-update was measured at a third of the speed, and lets two workers want the same shard."""
    statements = []
    listener = event.listens_for(engine, "before_cursor_execute")(lambda *args: statements.append(args[2]))
    try:
        story.lease()
    finally:
        event.remove(engine, "before_cursor_execute", listener)
    touching = [s for s in statements if re.search(r"\bshards\b", s)]
    assert len(touching) == 1
    assert touching[0].startswith("UPDATE shards")
    assert "RETURNING" in touching[0]
    assert ("SKIP LOCKED" in touching[0]) == (engine.dialect.name == "postgresql")
    assert story.state(long_queue) == JobState.IN_PROGRESS


def test_two_transactions_at_once_claim_different_shards(story, engine, long_queue):
    """PostgreSQL passes over what another transaction has locked; SQLite has one writer at a time anyway."""
    if engine.dialect.name == "sqlite":
        first, second = story.lease().shard.id, story.lease().shard.id
    else:
        statement = claim_statement(story.clock.now, dialect=engine.dialect.name)
        with engine.connect() as one, engine.connect() as other:
            first = one.execute(statement).one().id
            second = other.execute(statement).one().id
            one.rollback()
            other.rollback()
    assert first != second
