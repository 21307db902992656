"""Whatever workers, people and time do in whatever order: each row ends once, and the books balance."""

from __future__ import annotations

from collections import Counter

import pytest
from sqlalchemy import select

from batchinfer.db.tables import LedgerEntry
from batchinfer.jobs.leases import PartCommit, ShardResult
from batchinfer.jobs.ledger import RETRIED
from batchinfer.jobs.records import RowCounts
from tests.integration.ledger.machine import PLENTY, Interleavings
from tests.integration.ledger.model import HELD, OVER
from tests.integration.ledger.scenario import assert_books_balance


@pytest.mark.parametrize("seed", range(6))
def test_random_interleavings_agree_with_the_model(engine, seed):
    """Leases, heartbeats, commits, deaths, zombies, faults, cancels, pauses, retries and deadlines, at random."""
    play(Interleavings(engine, seed), num_steps=100)


def play(machine, num_steps):
    """Act at random; after each step the job it touched must be as the model says, at the end all."""
    machine.submit()
    machine.lease()
    steps = {
        machine.commit_part: 8, machine.lease: 4, machine.commit_shard: 4, machine.heartbeat: 2, machine.give_up: 1,
        machine.time_passes: 2, machine.ask: 2, machine.finalize: 2, machine.tick: 1, machine.submit: 1,
        machine.book_overhead: 1,
    }  # fmt: skip
    for step in machine.random.choices(list(steps), list(steps.values()), k=num_steps):
        is_idle = not any(attempt.running for attempt in machine.attempts)
        machine.touched = None
        machine.lease() if is_idle and machine.random.random() < 0.5 else step()
        if machine.touched is not None:
            machine.check(machine.touched)
    for job in machine.jobs:
        machine.check(job)
    let_everything_end(machine)


def let_everything_end(machine):
    """Then each row has exactly one outcome, and each source was booked once."""
    machine.clock.advance(1000)
    machine.ledger.reap_expired()
    for job in machine.jobs:
        if machine.ledger.get_job(job.id).state in HELD:
            machine.ledger.resume(job.id, budget_nanos=PLENTY)
    machine.clock.advance(1000)
    drain(machine.ledger)
    while machine.ledger.lease_finalizing("w1") is not None:
        pass
    for job in machine.jobs:
        record = machine.ledger.get_job(job.id)
        assert record.counts.total == record.num_rows == job.num_rows
        assert record.state in {*OVER, "finalizing"}
        assert_books_balance(machine.ledger, job.id)
    with machine.engine.begin() as connection:
        sources = connection.execute(select(LedgerEntry.source_id)).scalars().all()
    assert len(sources) == len(set(sources))


def drain(ledger):
    """One faultless worker does all that is left."""
    while (lease := ledger.lease_shard("w1")) is not None:
        shard, todo = lease.shard, lease.shard.remaining_rows
        if todo and not (lease.close_status and lease.generation):
            outcomes = Counter({status: shard.counts[status] for status in RETRIED}) if lease.generation else Counter()
            old = RowCounts.of(list(outcomes.elements())[:todo])
            new = RowCounts(**{lease.close_status or "succeeded": todo})
            ledger.commit_part(lease.attempt_id, PartCommit(f"end-{lease.attempt_id}", todo, new, replaced=old))
        ledger.commit_shard(lease.attempt_id, ShardResult(f"end-{lease.attempt_id}", shard.num_rows))
