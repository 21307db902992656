"""What waits, for autoscalers; and why a job does, for people."""

from __future__ import annotations

from datetime import timedelta

import pytest

from batchinfer.jobs.needs import needs_of, offers_of
from batchinfer.jobs.queue_lanes import WORKER_SILENCE, queue_lanes, why_it_waits
from batchinfer.jobs.serving import Serves
from batchinfer.types import Usage


def lanes(engine, story, **options):
    return {(lane.model, lane.pool, lane.device_kind): lane for lane in queue_lanes(engine, story.clock.now, **options)}


def test_waiting_and_running_work_is_counted_by_model_pool_and_kind(story, engine):
    """Ten shards of 100 estimated tokens and five rows each; one runs and has two of its rows done."""
    story.planned(rows=50, shard_rows=5, model="m")
    story.planned(rows=10, shard_rows=5, model="m", pool="nightly", device_kind="h200")
    lease = story.lease(models=["m"])
    story.commit(lease, 2)
    found = lanes(engine, story)
    assert set(found) == {("m", "default", None), ("m", "nightly", "h200")}
    plain = found["m", "default", None]
    assert (plain.waiting_shards, plain.waiting_rows, plain.waiting_tokens) == (9, 45, 900)
    assert (plain.running_shards, plain.running_rows, plain.running_tokens) == (1, 3, 60)
    nightly = found["m", "nightly", "h200"]
    assert (nightly.waiting_shards, nightly.waiting_rows, nightly.running_shards) == (2, 10, 0)
    assert not plain.is_measured


def test_device_seconds_come_from_the_newest_parts_of_the_model(story, engine):
    """The part computed 20 tokens (30 less 10 cached) in 4 seconds: 0.2 s a token, and 900 + 60 tokens are left."""
    story.planned(rows=50, shard_rows=5)
    lease = story.lease()
    story.commit(lease, 2, usage=Usage(prompt_tokens=25, cached_tokens=10, completion_tokens=5), device_ns=4 * 10**9)
    (lane,) = queue_lanes(engine, story.clock.now, target_seconds=60)
    assert lane.is_measured
    assert lane.device_seconds == pytest.approx(960 * 0.2)
    assert lane.workers_wanted == 4  # 192 s of work in 60 s
    (lane,) = queue_lanes(engine, story.clock.now, target_seconds=1)
    assert lane.workers_wanted == 10  # no more than one a shard


def test_a_model_that_never_ran_is_guessed_from_the_others(story, engine):
    """20 computed tokens took 4 seconds: the other model's 200 tokens are taken to need 40."""
    story.planned(rows=5, shard_rows=5, model="a")
    story.commit(story.lease(), 2, usage=Usage(25, 10, 5), device_ns=4 * 10**9)
    story.planned(rows=10, shard_rows=5, model="b")
    new = lanes(engine, story)["b", "default", None]
    assert (new.waiting_tokens, new.is_measured) == (200, False)
    assert new.device_seconds == pytest.approx(40)


def test_no_work_wants_no_worker_and_is_still_told(story, engine):
    """An autoscaler must see 0 for the model that is loaded, not nothing."""
    assert queue_lanes(engine, story.clock.now) == []
    story.ledger.worker_heartbeat("w1", models=["m"], stats={})
    (lane,) = queue_lanes(engine, story.clock.now)
    assert (lane.model, lane.waiting_rows, lane.workers_wanted, lane.workers) == ("m", 0, 0, 2)


def test_only_living_workers_that_may_serve_it_count(story, engine):
    story.ledger.register_worker("special", hostname="h", pid=1, nanos_per_hour=0, serves=Serves(("x",), ("nightly",)))
    story.planned(model="x", pool="nightly")
    story.planned(model="y", pool="nightly")
    found = lanes(engine, story)
    assert (found["x", "nightly", None].workers, found["y", "nightly", None].workers) == (1, 0)
    story.clock.advance(WORKER_SILENCE.total_seconds() + 1)
    assert lanes(engine, story)["x", "nightly", None].workers == 0


def test_a_job_says_why_it_waits(story, engine):
    def why(job_id):
        return why_it_waits(engine, story.ledger.get_job(job_id), story.clock.now)

    job, _ = story.ledger.submit(story.spec(model="m", pool="nightly", device_kind="h200"))
    assert why(job.id) == "a worker has yet to read its input"
    story.plan(job.id)
    assert why(job.id) == (
        "no live worker serves m in pool nightly on h200; start `batchinfer worker --pool nightly --device-kind h200`"
    )
    story.ledger.register_worker(
        "able", hostname="h", pid=1, nanos_per_hour=0, serves=Serves(None, ("default", "nightly"), ("h200",))
    )
    assert why(job.id) == "the workers that serve it have not come to it yet"
    story.lease()
    assert why(job.id) is None
    story.ledger.pause(job.id)
    assert why(job.id) is None
    waiting = story.planned()
    story.clock.advance(timedelta(days=1).total_seconds())
    assert why(waiting) == "no worker is running: start `batchinfer worker`"


@pytest.mark.parametrize(
    ("job", "pools", "kinds", "expected"),
    [
        ((None, None), ("default",), (), True),
        (("default", None), ("default",), (), True),
        ((None, None), ("nightly",), (), False),
        (("nightly", None), ("default",), (), False),
        (("nightly", None), ("default", "nightly"), ("h200",), True),
        ((None, "h200"), ("default",), (), False),
        ((None, "h200"), ("default",), ("cuda", "h200"), True),
        (("nightly", "h200"), ("nightly",), ("h100",), False),
    ],
)
def test_needs_are_met_by_pool_and_by_kind(job, pools, kinds, expected):
    assert (needs_of(*job) in offers_of(pools, kinds)) == expected
    assert Serves(None, pools, kinds).can_serve("any", needs_of(*job)) == expected


def test_what_a_worker_serves_survives_the_database():
    serves = Serves(("a",), ("p", "q"), ("cuda",), "job_1")
    assert Serves.from_json(serves.to_json()) == serves
    assert Serves.from_json(None) == Serves()
