"""Whose turn it is: priority and danger first, then a fair share between tenants and between the jobs of one."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from itertools import groupby

import pytest

from batchinfer.jobs.caller import Caller
from batchinfer.jobs.lease_order import RUN_LENGTH, Offer
from batchinfer.jobs.tenants import Tenants


class Fleet:
    """Workers that take what the ledger gives them, on a clock that jumps from one shard's end to the next."""

    def __init__(self, story, num_workers: int, *, shard_seconds: float = 60.0) -> None:
        self.story = story
        self.shard_seconds = shard_seconds
        self.idle = [f"w{n}" for n in range(num_workers)]
        for worker in self.idle:
            story.ledger.register_worker(worker, hostname="host", pid=1, nanos_per_hour=0)
        self.running: list[tuple[float, int, str, object]] = []
        self.seconds = 0.0
        self.served: dict[str, list[float]] = defaultdict(list)
        """Job to the times at which its shards were leased."""

    def submit(self, shards: int, tenant: str = "default", **fields) -> str:
        job, _ = self.story.ledger.submit(self.story.spec(**fields), tenant=tenant)
        self.story.plan(job.id, rows=shards, shard_rows=1)
        return job.id

    def run(self, until: float) -> None:
        """Work until a time."""
        self._fill()
        while self.running and self.running[0][0] <= until:
            at, _, worker, lease = heapq.heappop(self.running)
            self.story.clock.advance(at - self.seconds)
            self.seconds = at
            self.story.complete(lease)
            self.idle.append(worker)
            self._fill()
        self.story.clock.advance(until - self.seconds)
        self.seconds = until

    def _fill(self) -> None:
        while self.idle:
            lease = self.story.ledger.lease_shard(self.idle[-1], lease_seconds=1e6)
            if lease is None:
                return
            self.served[lease.job.id].append(self.seconds)
            heapq.heappush(self.running, (self.seconds + self.shard_seconds, lease.attempt_id, self.idle.pop(), lease))

    def finished_at(self, job_id: str) -> float:
        return max(self.served[job_id]) + self.shard_seconds


def jain(shares) -> float:
    """Jain's index of fairness: 1 if all are equal, 1/n if one has everything."""
    shares = list(shares)
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


def add_tenants(engine, **weights) -> None:
    for tenant, weight in weights.items():
        Tenants(engine).add(Caller.operator(), tenant, weight=weight)


def order(story, count: int, **options) -> list[tuple[str, int]]:
    leases = [story.lease(**options) for _ in range(count)]
    return [(lease.job.id, lease.shard.index) for lease in leases]


def test_priority_goes_before_a_fair_share_and_deadlines_in_danger_before_priority(story):
    plain = story.planned(2, 1)
    high = story.planned(2, 1, priority=5)
    late = story.planned(2, 1, priority=-3)
    story.ledger.press(late, 0.3)
    assert order(story, 6) == [(job, index) for job in (late, high, plain) for index in (0, 1)]


def test_the_greater_danger_goes_first_and_the_hopeless_do_not_push_in(story):
    hopeless, safe, doubtful, bad = (story.planned(1, 1) for _ in range(4))
    for job_id, probability in ((hopeless, 0.001), (safe, 0.99), (doubtful, 0.8), (bad, 0.2)):
        story.ledger.press(job_id, probability)
    assert [job for job, _ in order(story, 2)] == [bad, doubtful]
    assert {job for job, _ in order(story, 2)} == {hopeless, safe}


def test_jobs_of_a_tenant_take_turns_in_runs_of_neighbours(story):
    """Else a small job would wait for all of a huge one; and neighbours' prompts begin alike."""
    one, other = story.planned(12, 1), story.planned(8, 1)
    got = order(story, 20)
    runs = [(job, [index for _, index in run]) for job, run in groupby(got, key=lambda lease: lease[0])]
    assert RUN_LENGTH == 4
    assert runs == [
        (one, [0, 1, 2, 3]), (other, [0, 1, 2, 3]), (one, [4, 5, 6, 7]), (other, [4, 5, 6, 7]), (one, [8, 9, 10, 11]),
    ]  # fmt: skip


def test_a_new_job_begins_where_the_others_stand(story):
    """Not behind what waits, and not with all the turns that it has missed either."""
    huge = story.planned(100, 1)
    order(story, 40)
    small = story.planned(8, 1)
    got = Counter(job for job, _ in order(story, 16))
    assert got == {huge: 8, small: 8}


def test_a_job_that_was_held_does_not_catch_up(story):
    held, other = story.planned(60, 1), story.planned(60, 1)
    story.ledger.pause(held)
    order(story, 40)
    story.ledger.resume(held)
    assert Counter(job for job, _ in order(story, 16)) == {held: 8, other: 8}


def test_tenants_share_by_weight_whatever_the_number_of_their_jobs(story, engine):
    """Three tenants with weights 3, 2 and 1; the one of weight 1 sends four jobs, the others one each."""
    add_tenants(engine, gold=3, silver=2, bronze=1)
    fleet = Fleet(story, 6)
    jobs = {fleet.submit(100, "gold"): 3, fleet.submit(100, "silver"): 2}
    many = [fleet.submit(20, "bronze") for _ in range(4)]
    fleet.run(1200)
    served = [len(fleet.served[job]) / weight for job, weight in jobs.items()]
    served.append(sum(len(fleet.served[job]) for job in many))
    assert jain(served) > 0.99
    assert jain(len(fleet.served[job]) for job in many) > 0.8


@pytest.mark.parametrize("tenant", ["big", "small"])
def test_a_small_job_behind_a_huge_one_finishes_soon(story, engine, tenant):
    """Of the same tenant or another's: half the workers are its own, so it takes at most about twice its time alone."""
    add_tenants(engine, big=1, small=1)
    fleet = Fleet(story, 4)
    huge = fleet.submit(500, "big")
    fleet.run(600)
    small = fleet.submit(8, tenant)
    fleet.run(600 + 480)
    alone = 8 / 4 * fleet.shard_seconds
    # what runs when it comes is not stopped
    assert fleet.finished_at(small) - 600 <= 2 * alone + 2 * fleet.shard_seconds
    assert max(fleet.served[huge]) > fleet.finished_at(small)


def test_who_was_away_earns_no_arrears(story, engine):
    """A tenant that comes back shares from then on; the one that used the idle workers meanwhile is not shut out."""
    add_tenants(engine, steady=1, visitor=1)
    fleet = Fleet(story, 2)
    steady = fleet.submit(200, "steady")
    fleet.run(2400)
    visitor = fleet.submit(50, "visitor")
    before = len(fleet.served[steady])
    fleet.run(2400 + 900)
    assert jain((len(fleet.served[steady]) - before, len(fleet.served[visitor]))) > 0.95


def test_a_worker_stays_near_within_equal_turn_and_priority(story):
    one, other = story.planned(12, 1), story.planned(12, 1)
    lease = story.lease()
    near = Offer(loaded=("m",), near=(lease.job.id, lease.shard.index + 4))
    assert (lease.job.id, order(story, 1, offer=near)) == (one, [(one, 5)])
    urgent = story.planned(1, 1, priority=1)
    assert order(story, 1, offer=near) == [(urgent, 0)]
    assert order(story, 1, offer=Offer(loaded=("m",), near=(other, 11)))[0] == (one, 1)


def test_the_loaded_model_goes_first_and_the_others_when_it_has_nothing(story):
    a, b = story.planned(2, 1, model="a"), story.planned(2, 1, model="b")
    offer = Offer(loaded=("b",))
    assert order(story, 4, offer=offer) == [(b, 0), (b, 1), (a, 0), (a, 1)]


def test_a_pool_and_a_kind_of_hardware_are_served_by_workers_that_have_them(story):
    plain = story.planned(1, 1)
    pool = story.planned(1, 1, pool="nightly")
    kind = story.planned(1, 1, device_kind="h200")
    both = story.planned(1, 1, pool="nightly", device_kind="h200")

    def could_take(*needs: str) -> set[str]:
        leases = []
        while (lease := story.ledger.lease_shard("w1", offer=Offer(needs=needs))) is not None:
            leases.append(lease)
        for lease in leases:
            story.ledger.release(lease.attempt_id, 0)
        return {lease.job.id for lease in leases}

    assert could_take("") == {plain}
    assert could_take("", "/h200") == {plain, kind}
    assert could_take("nightly/") == {pool}
    assert could_take("nightly/", "nightly/h200", "", "/h200") == {plain, pool, kind, both}


def test_closing_needs_no_pool(story):
    job = story.planned(1, 1, pool="nobody")
    story.ledger.cancel(job)
    assert story.lease(offer=Offer(models=("other",), needs=("",))).close_status == "cancelled"
