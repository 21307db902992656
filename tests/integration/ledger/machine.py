"""Random interleavings of workers, people and time, played against the ledger and the model at once.

A plain driver and not hypothesis.stateful: its swarms of rules left most runs without a single committed part, and
its shrinking takes minutes here; a seed repeats a run just as well.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from datetime import timedelta
from random import Random
from typing import TYPE_CHECKING

from sqlalchemy import delete

from batchinfer.db.tables import Base
from batchinfer.errors import ConflictError, FencedError
from batchinfer.jobs.isolation import fault_delay_s
from batchinfer.jobs.leases import PartCommit, ShardResult
from batchinfer.jobs.ledger import Ledger
from batchinfer.jobs.records import RowCounts
from batchinfer.jobs.status import FailureKind
from batchinfer.money import NS_PER_HOUR
from tests.integration.ledger.model import HELD, ModelAttempt, ModelJob, ModelShard
from tests.integration.ledger.scenario import FakeClock, Scenario, assert_books_balance, shard_plans

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine

LEASE_S = 10.0
PLENTY = 10**6
"""A budget that nothing here can spend."""


class Interleavings:
    """Workers are calls that may come from any attempt ever leased: the living, the crashed and the zombies."""

    def __init__(self, engine: Engine, seed: int) -> None:
        with engine.begin() as connection:
            for table in reversed(Base.metadata.sorted_tables):
                connection.execute(delete(table))
        self.engine = engine
        self.random = Random(seed)
        self.clock = FakeClock()
        self.start = self.clock.now
        self.ledger = Ledger(engine, clock=self.clock)
        self.story = Scenario(self.ledger, self.clock)
        self.jobs: list[ModelJob] = []
        self.attempts: list[ModelAttempt] = []
        self.num_files = 0
        self.touched: ModelJob | None = None

    # -- time and people ----------------------------------------------------------------------------------------------
    def submit(self):
        if len(self.jobs) == 4:
            return
        draw = self.random
        rows, shard_rows, max_attempts = draw.randint(1, 12), draw.randint(1, 6), draw.randint(1, 3)
        budget, deadline = draw.choice([None, None, 20, 60]), draw.choice([None, None, 40, 200])
        spec = self.story.spec(
            max_attempts=max_attempts, priority=draw.randint(-1, 1),
            budget_usd=None if budget is None else f"{budget / 10**9:.9f}",
            deadline=None if deadline is None else self.clock.now + timedelta(seconds=deadline),
        )  # fmt: skip
        job, _ = self.ledger.submit(spec)
        self.story.plan(job.id, rows, shard_rows)
        ranges = [range(p.row_start, p.row_end) for p in shard_plans(rows, shard_rows)]
        shards = [ModelShard(i, rows, set(rows)) for i, rows in enumerate(ranges)]
        until = None if deadline is None else self.now + deadline
        self.jobs.append(ModelJob(job.id, shards, max_attempts, budget, until))

    def time_passes(self):
        self.clock.advance(self.random.choice([0.5, 1, 2, 4, 11, 20]))

    def ask(self):
        job = self.pick_job()
        wishes = ["cancel", "pause", "resume", "resume", "retry", "retry"]
        legal = [act for act in wishes if job.is_legal(act)]
        act = self.random.choice(legal if legal and self.random.random() < 0.8 else wishes)
        with self.expect(ConflictError, if_not=job.is_legal(act)):
            match act:
                case "cancel":
                    self.ledger.cancel(job.id)
                    job.cancel()
                case "pause":
                    self.ledger.pause(job.id)
                    job.pause()
                case "resume":
                    self.ledger.resume(job.id, budget_nanos=PLENTY)
                    job.resume(PLENTY)
                case "retry":
                    self.ledger.retry(job.id)
                    job.retry(self.now)

    def tick(self):
        self.ledger.reap_expired()
        self.model_reap()
        states = {"queued", "in_progress", "paused", "budget_exhausted"}
        due = [j for j in self.jobs if j.state in states and not j.closing and j.closes_as(self.now)]
        assert set(self.ledger.expire_due()) == {job.id for job in due}
        for job in due:
            job.closing = "expired"
            if job.state in HELD:
                job.state = "in_progress"

    def book_overhead(self):
        job, nanos = self.pick_job(), self.random.randint(0, 9)
        self.num_files += 1
        for is_new in (True, False):
            source = f"load:{self.num_files}"
            assert self.ledger.add_overhead(job.id, source, kind="load", device_ns=nanos, nanos=nanos) is is_new
        job.overhead_nanos += nanos
        job.spend()

    # -- workers ------------------------------------------------------------------------------------------------------
    def lease(self):
        worker = self.random.choice(["w1", "w2"])
        lease = self.ledger.lease_shard(worker, lease_seconds=LEASE_S)
        self.model_reap()
        free = {(job.id, shard.index) for job in self.jobs for shard in job.claimable(self.now)}
        if lease is None:
            assert not free
            return
        assert (lease.job.id, lease.shard.index) in free
        job = next(job for job in self.jobs if job.id == lease.job.id)
        shard = job.shards[lease.shard.index]
        job.start()
        assert (lease.close_status, lease.generation) == (job.closes_as(self.now), job.generation)
        assert lease.shard.remaining_rows == len(shard.todo)
        attempt = ModelAttempt(
            lease.attempt_id, job, shard, lease.nanos_per_hour, self.now + LEASE_S, lease.close_status
        )
        assert all(attempt.id > other.id for other in self.attempts)
        shard.holder = attempt
        self.attempts.append(attempt)
        self.touched = job

    def heartbeat(self):
        attempt, more_ns = self.pick_attempt(), self.random.randint(0, 5)
        with self.expect(FencedError, if_not=attempt.running):
            self.ledger.heartbeat(attempt.id, attempt.metered_ns + more_ns, lease_seconds=LEASE_S)
            attempt.metered_ns += more_ns
            attempt.expires_at = self.now + LEASE_S

    def commit_part(self):
        attempt = self.pick_attempt()
        count, ns = self.random.randint(1, 5), self.random.randint(0, 5)
        status = self.random.choice(["succeeded", "succeeded", "errored"])
        job, shard = attempt.job, attempt.shard
        if job.closes_as(self.now) and job.generation and attempt.running:
            return  # nothing is written when a retry is closed
        rows = sorted(shard.todo)[:count] if attempt.running else [0]
        if not rows:
            return
        status = (attempt.closes or status) if attempt.running else status
        with self.expect(FencedError, if_not=attempt.running):
            self.hand_in(attempt, rows, status, ns)

    def commit_shard(self):
        attempt = self.pick_attempt()
        job, shard = attempt.job, attempt.shard
        may_end = not shard.todo or (job.generation > 0 and job.closes_as(self.now) is not None)
        self.num_files += 1
        result = ShardResult(f"shard-{self.num_files}", len(shard.rows))
        with (
            self.expect(FencedError, if_not=attempt.running),
            self.expect(ConflictError, if_not=may_end or not attempt.running),
        ):
            self.ledger.commit_shard(attempt.id, result)
            attempt.ending, shard.holder, shard.is_committed = "committed", None, True
            job.start()
            if all(s.is_committed for s in job.shards) and job.state != "failed":
                job.state = "finalizing"

    def give_up(self):
        attempt, how = self.pick_attempt(), self.random.choice(["release", "engine", "fault"])
        ending = "released" if how == "release" else "failed"
        with self.expect(FencedError, if_not=attempt.running or attempt.ending == ending):
            if how == "release":
                self.ledger.release(attempt.id, attempt.metered_ns)
            else:
                kind = FailureKind.ENGINE if how == "engine" else FailureKind.SHARD
                self.ledger.fail(attempt.id, "told to", attempt.metered_ns, kind=kind)
            if attempt.ending == ending:
                return  # the same ending twice is one
            attempt.end(ending)
            if how != "release":
                self.model_failure(attempt)

    def finalize(self):
        lease = self.ledger.lease_finalizing("w1")
        waiting = [job for job in self.jobs if job.state == "finalizing"]
        if lease is None:
            assert not waiting
            return
        job = next(job for job in waiting if job.id == lease.job.id)
        done = self.ledger.finish(job.id, lease.token, "manifest")
        job.state = job.final_state()
        assert (done.state, done.outcome) == (job.state, job.final_outcome())
        with self.expect(FencedError, if_not=False):
            self.ledger.finish(job.id, lease.token, "twice")
        self.touched = job

    # -- what the rules share -----------------------------------------------------------------------------------------
    @property
    def now(self) -> float:
        return (self.clock.now - self.start).total_seconds()

    def pick_job(self) -> ModelJob:
        self.touched = self.random.choice(self.jobs)
        return self.touched

    def pick_attempt(self) -> ModelAttempt:
        """Mostly one that runs; else any, and most of them are dead."""
        running = [attempt for attempt in self.attempts if attempt.running]
        attempt = self.random.choice(running if running and self.random.random() < 0.8 else self.attempts)
        self.touched = attempt.job
        return attempt

    @contextmanager
    def expect(self, error: type[Exception], *, if_not: bool) -> Iterator[None]:
        """The body must raise ``error`` if and only if ``if_not`` is false; then the model was not changed either."""
        try:
            yield
        except error:
            assert not if_not, f"{error.__name__} although it was legal"
        else:
            assert if_not, f"no {error.__name__} although it was not legal"

    def hand_in(self, attempt, rows, status, ns):
        job, shard = attempt.job, attempt.shard
        old = RowCounts.of(job.outcome[row] for row in rows) if job.generation else RowCounts()
        self.num_files += 1
        nanos = (attempt.device_ns + ns) * attempt.rate // NS_PER_HOUR - attempt.device_ns * attempt.rate // NS_PER_HOUR
        part = PartCommit(
            f"part-{self.num_files}", len(rows), RowCounts(**{status: len(rows)}), replaced=old,
            metered_nanos=nanos, device_ns=ns,
        )  # fmt: skip
        self.ledger.commit_part(attempt.id, part)
        attempt.device_ns += ns
        job.rows_nanos += nanos
        job.outcome |= dict.fromkeys(rows, status)
        shard.todo -= set(rows)
        shard.faults = 0
        job.start()
        job.spend()

    def model_reap(self):
        """Leases that have run out are lost, whoever notices."""
        for attempt in self.attempts:
            if attempt.running and attempt.expires_at <= self.now:
                attempt.end("lost")
                self.model_failure(attempt)

    def model_failure(self, attempt):
        """Who is to blame is another test's story (test_isolation.py); here only what follows from it."""
        job, shard = attempt.job, attempt.shard
        record = next(s for s in self.ledger.shards(job.id) if s.index == shard.index)
        if record.num_faults > shard.faults:
            shard.not_before = self.now + fault_delay_s(record.num_faults)
        shard.faults = record.num_faults
        if record.state == "quarantined":
            assert shard.faults >= job.max_attempts
            shard.is_quarantined = True
            job.state = "failed"

    # -- what must always be true -------------------------------------------------------------------------------------
    def check(self, job: ModelJob) -> None:
        record = self.ledger.get_job(job.id)
        assert (record.state, record.closing) == (job.state, job.closing)
        assert +Counter(record.counts.as_dict()) == job.counts()
        assert (record.metered_nanos, record.overhead_nanos) == (job.rows_nanos, job.overhead_nanos)
        if self.random.random() < 0.2:  # the long recount, now and then
            assert_books_balance(self.ledger, job.id)
