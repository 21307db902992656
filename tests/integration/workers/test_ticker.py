"""The ticker against a real ledger: what it ends, closes and wakes; and publishing against a real Redis."""

from __future__ import annotations

import json
import threading
from datetime import UTC, datetime, timedelta

import pytest
import redis
from sqlalchemy import event

from batchinfer.db.session import create_db_engine
from batchinfer.jobs.dispatch import (
    CONTROL_QUEUE,
    MAX_WAKE_UPS,
    NullDispatcher,
    connect_dispatcher,
    shard_queue,
)
from batchinfer.jobs.leases import ShardPlan
from batchinfer.jobs.ledger import Ledger
from batchinfer.jobs.schedule_firing import Firing
from batchinfer.jobs.schedule_runner import ScheduleRunner
from batchinfer.jobs.serving import Serves
from batchinfer.jobs.spec import JobSpec
from batchinfer.jobs.status import AttemptState
from batchinfer.jobs.webhook_queue import WebhookQueue
from batchinfer_workers.ticker import Ticker
from tests.services import free_port


class Recorder:
    """A dispatcher that remembers."""

    def __init__(self):
        self.sent = []

    def wake_planner(self, job_id):
        self.sent.append("plan")

    def wake_shards(self, model, count):
        self.sent.append((model, count))

    def wake_finalizer(self, job_id):
        self.sent.append("finalize")


class Clock:
    now = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def ledger(sqlite_url, clock):
    engine = create_db_engine(sqlite_url)
    ledger = Ledger(engine, clock=clock)
    ledger.register_worker("w", hostname="h", pid=1, nanos_per_hour=1)
    yield ledger
    engine.dispose()


def planned_job(ledger, num_shards, model="m", **spec):
    job, _ = ledger.submit(JobSpec(inputs="in.parquet", model=model, **spec))
    lease = ledger.lease_planning("w", job_id=job.id)
    ledger.commit_plan(
        job.id,
        lease.token,
        num_rows=10 * num_shards,
        fingerprint={},
        warnings=[],
        output="/nowhere",
        shards=[ShardPlan(index, 10 * index, 10 * index + 10) for index in range(num_shards)],
    )
    return job.id


def test_it_wakes_what_waits_and_no_more_than_there_is_room_for(ledger):
    """A new job wakes a planner; shards are woken per model, up to the free places; nothing waits, nothing is sent."""
    sent = Recorder()
    heard = []
    ticker = Ticker(ledger, sent, seconds=1, num_free=lambda: 3, listen=heard.append)
    ticker.tick()
    assert sent.sent == []
    planned_job(ledger, 2, model="small")
    planned_job(ledger, 9, model="large")
    ledger.submit(JobSpec(inputs="in.parquet", model="m"))
    ticker.tick()
    assert sent.sent[0] == "plan"
    assert sorted(sent.sent[1:]) == [("large", 3), ("small", 2)]
    assert sorted(heard) == ["large", "small"]


def test_a_full_worker_and_foreign_models_are_not_woken(ledger):
    planned_job(ledger, 2, model="mine")
    planned_job(ledger, 2, model="foreign")
    full, limited = Recorder(), Recorder()
    Ticker(ledger, full, seconds=1, num_free=lambda: 0).tick()
    Ticker(ledger, limited, seconds=1, serves=Serves(models=("mine",))).tick()
    assert full.sent == []
    assert limited.sent == [("mine", 1)]


def test_it_ends_expired_leases_and_closes_jobs_past_their_deadline(ledger, clock):
    """A silent worker's shard can be leased again; a late job's rows are closed, whoever ticks."""
    job_id = planned_job(ledger, 1, deadline=clock.now + timedelta(hours=1))
    ledger.lease_shard("w", lease_seconds=60)
    sent = Recorder()
    ticker = Ticker(ledger, sent, seconds=1)
    ticker.tick()
    assert sent.sent == []
    clock.now += timedelta(seconds=61)
    ticker.tick()
    assert [attempt.state for attempt in ledger.attempts(job_id)] == [AttemptState.LOST]
    assert sent.sent == [("m", 1)]
    clock.now += timedelta(hours=1)
    ticker.tick()
    assert ledger.get_job(job_id).closing == "expired"


def test_a_tick_that_fails_does_not_stop_the_ticker(ledger):
    """A database that is away for a while: the next tick works again."""
    ticks = []
    recovered = threading.Event()

    def on_tick():
        ticks.append(1)
        if len(ticks) == 1:
            raise OSError("no database")
        recovered.set()

    ticker = Ticker(ledger, NullDispatcher(), seconds=0.01, on_tick=on_tick)
    ticker.start()
    assert recovered.wait(20)
    ticker.close()


@pytest.mark.service
def test_messages_carry_ids_only_and_do_not_pile_up(redis_url):
    """Waking ten times leaves no more messages than shards were asked for; each has one short text as its body."""
    dispatcher = connect_dispatcher(redis_url)
    for _ in range(10):
        dispatcher.wake_shards("model", 3)
        dispatcher.wake_planner("job_1")
    dispatcher.wake_shards("many", 10**6)
    client = redis.Redis.from_url(redis_url)
    assert client.llen(shard_queue("model")) == 3
    assert client.llen(CONTROL_QUEUE) == 10
    assert client.llen(shard_queue("many")) == MAX_WAKE_UPS
    message = json.loads(client.lindex(CONTROL_QUEUE, 0))
    assert message["headers"]["argsrepr"] == "('job_1',)"
    assert message["headers"]["eta"] is None
    client.close()


def test_a_broker_that_is_away_loses_no_submit():
    """Publishing is best effort: it says so in the log and goes on; the job is in the database."""
    dispatcher = connect_dispatcher(f"redis://127.0.0.1:{free_port()}/0")
    dispatcher.wake_planner("job_1")
    dispatcher.wake_shards("model", 5)
    dispatcher.wake_finalizer("job_1")


def test_without_a_server_there_is_nobody_to_tell():
    dispatcher = connect_dispatcher("memory://")
    assert isinstance(dispatcher, NullDispatcher)
    dispatcher.wake_planner("x")
    dispatcher.wake_shards("m", 1)
    dispatcher.wake_finalizer("x")


def test_a_second_without_news_locks_nothing_and_builds_no_query(ledger):
    """Looks come every second beside an engine that wants the same cores."""
    job_id = planned_job(ledger, 2)
    assert all(ledger.lease_shard("w") for _ in range(2))
    looks = (
        Ticker(ledger, Recorder(), seconds=1.0, job_id=job_id).tick,
        ScheduleRunner(Firing(ledger.engine), ledger, NullDispatcher()).tick,
        WebhookQueue(ledger.engine).claim,
    )
    asked, begun = [], []
    event.listen(ledger.engine, "before_execute", lambda _c, query, *_: asked.append(query))
    event.listen(ledger.engine, "before_cursor_execute", lambda _c, _cursor, text, *_: begun.append(text))
    for look in looks:
        look()
    first = {id(query) for query in asked}  # all of which `asked` keeps alive
    assert len(first) == len(asked) == 11
    for look in looks:
        look()
    again = [id(query) for query in asked[11:]]
    assert len(again) == 10  # deadlines are looked at less often
    assert set(again) <= first
    assert not [text for text in begun if not text.startswith("SELECT")]
