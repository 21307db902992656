"""A zombie - a worker that was thought dead, and works on - can change nothing."""

from __future__ import annotations

import pytest
from sqlalchemy import select

from batchinfer.db.tables import Base
from batchinfer.errors import FencedError
from batchinfer.jobs.leases import ShardResult
from batchinfer.jobs.status import AttemptState, FailureKind


def snapshot(engine):
    """All rows of all tables."""
    with engine.begin() as connection:
        return {t.name: sorted(map(repr, connection.execute(select(t)))) for t in Base.metadata.sorted_tables}


ZOMBIE_ACTS = {
    "heartbeat": lambda story, lease: story.ledger.heartbeat(lease.attempt_id, 10**9),
    "announce_probe": lambda story, lease: story.ledger.announce_probe(lease.attempt_id, 0),
    "commit_part": lambda story, lease: story.commit(lease, 2, metered_nanos=5, device_ns=5),
    "commit_shard": lambda story, lease: story.ledger.commit_shard(lease.attempt_id, ShardResult("zombie", 5)),
    "release": lambda story, lease: story.ledger.release(lease.attempt_id, 10**9),
    "device fault": lambda story, lease: story.ledger.release(lease.attempt_id, 10**9, device_fault="x"),
    "fail": lambda story, lease: story.ledger.fail(lease.attempt_id, "x", 10**9),
    "fault": lambda story, lease: story.ledger.fail(lease.attempt_id, "x", 10**9, kind=FailureKind.SHARD),
}


def assert_fenced(story, engine, lease):
    """Every act raises, and leaves every table as it was."""
    before = snapshot(engine)
    for act in ZOMBIE_ACTS.values():
        with pytest.raises(FencedError):
            act(story, lease)
        assert snapshot(engine) == before


@pytest.mark.parametrize("after", ["reaped", "leased again", "committed by another", "job cancelled and closed"])
def test_a_zombie_changes_nothing(story, engine, after):
    """Whatever happened since its lease was lost: FencedError, and every table is as before."""
    job_id = story.planned(rows=5)
    zombie = story.lease(lease_seconds=10)
    story.commit(zombie, 1)
    story.clock.advance(10)
    story.ledger.reap_expired()
    if after != "reaped":
        if after == "job cancelled and closed":
            story.ledger.cancel(job_id)
        successor = story.lease("w2")
        if after != "leased again":
            story.complete(successor, successor.close_status or "succeeded")
    assert_fenced(story, engine, zombie)


def test_an_attempt_that_committed_is_fenced(story, engine):
    story.planned(rows=5)
    lease = story.lease()
    story.complete(lease)
    assert_fenced(story, engine, lease)


def test_an_attempt_id_that_never_was_is_fenced(story):
    with pytest.raises(FencedError, match="987"):
        story.ledger.heartbeat(987, 0)
    with pytest.raises(FencedError, match="987"):
        story.ledger.commit_part(987, story.part())


def test_a_late_worker_whose_shard_nobody_took_may_go_on(story):
    """Expired is not lost: as long as nobody noticed, the work counts."""
    job_id = story.planned(rows=5)
    lease = story.lease(lease_seconds=10)
    story.clock.advance(100)
    story.commit(lease, 5)
    story.ledger.heartbeat(lease.attempt_id, 0, lease_seconds=10)
    assert story.ledger.reap_expired() == []
    story.publish(lease)
    assert story.ledger.attempts(job_id)[0].state is AttemptState.COMMITTED


def test_reaping_counts_each_loss_once(story):
    story.planned(rows=10, shard_rows=5)
    leases = [story.lease(lease_seconds=10) for _ in range(2)]
    story.clock.advance(10)
    assert {a.id for a in story.ledger.reap_expired(limit=1) + story.ledger.reap_expired()} == {
        lease.attempt_id for lease in leases
    }
    assert story.ledger.reap_expired() == []
    assert [story.shard(lease).num_failures for lease in leases] == [1, 1]
