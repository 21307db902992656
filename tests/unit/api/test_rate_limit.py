"""Requests a minute of a key, in one process and over several that share Redis."""

import asyncio

import pytest
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.api.access import Access
from batchinfer.api.app import create_app
from batchinfer.api.rate_limit import MAX_BUCKETS, LocalBuckets, RedisBuckets, choose_buckets
from batchinfer.jobs.caller import Caller, Role
from batchinfer.settings import Settings


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def take(buckets, key, rate):
    return asyncio.run(buckets.take(key, rate))


@settings(max_examples=40)
@given(st.integers(1, 50), st.lists(st.floats(0, 90), max_size=80))
def test_no_window_of_any_length_sees_more_than_its_share(rate, pauses):
    """Over any t seconds at most a full bucket and what t refills: rate + rate * t / 60."""
    clock = Clock()
    buckets = LocalBuckets(clock)
    allowed = []
    for pause in pauses:
        clock.now += pause
        taken = take(buckets, "k", rate)
        if taken.is_allowed:
            allowed.append(clock.now)
        else:
            clock.now += taken.wait_seconds
            assert take(buckets, "k", rate).is_allowed, "Retry-After must suffice"
            allowed.append(clock.now)
    for i, first in enumerate(allowed):
        for j, last in enumerate(allowed[i:], 1):
            assert j <= rate + rate * (last - first) / 60 + 1e-6


def test_keys_do_not_share_and_unused_ones_are_forgotten():
    buckets = LocalBuckets(Clock())
    assert take(buckets, "a", 1).is_allowed
    assert not take(buckets, "a", 1).is_allowed
    assert take(buckets, "b", 1).is_allowed
    for i in range(MAX_BUCKETS):
        take(buckets, str(i), 1)
    assert take(buckets, "a", 1).is_allowed


@pytest.fixture
def app(service):
    return create_app(Settings.load(rate_per_minute=5), service=service, access=Access.KEYS)


def client_of(app, service, rate=None):
    token = service.keys.create(Caller.operator(), tenant=None, role=Role.VIEWER, rate_per_minute=rate)[1]
    return TestClient(app, headers={"Authorization": f"Bearer {token}"})


def test_a_key_that_asks_too_often_is_told_when_to_come_back(app, service):
    with client_of(app, service, rate=2) as client:
        first, second, third = (client.get("/v1/jobs") for _ in range(3))
    assert [first.status_code, second.status_code, third.status_code] == [200, 200, 429]
    assert first.headers["X-RateLimit-Limit-Requests"] == "2"
    assert [r.headers["X-RateLimit-Remaining-Requests"] for r in (first, second, third)] == ["1", "0", "0"]
    assert 1 <= int(third.headers["Retry-After"]) <= 30
    error = third.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limited")
    assert "2 requests a minute" in error["message"]


def test_a_key_without_a_rate_has_the_server_s_and_health_has_none(app, service):
    with client_of(app, service) as client:
        assert [client.get("/v1/jobs").status_code for _ in range(6)] == [200] * 5 + [429]
        assert client.get("/healthz").status_code == 200
    with client_of(app, service) as other:
        assert other.get("/v1/jobs").status_code == 200


def test_without_any_rate_nothing_is_counted(service):
    app = create_app(Settings.load(), service=service, access=Access.KEYS)
    with client_of(app, service) as client:
        answers = [client.get("/v1/jobs") for _ in range(50)]
    assert {answer.status_code for answer in answers} == {200}
    assert "X-RateLimit-Limit-Requests" not in answers[0].headers


def test_processes_that_share_redis_count_together(redis_server):
    async def requests(key, rate, turns):
        """Turns of two processes, each with a connection of its own."""
        one, two = choose_buckets(redis_server.url), choose_buckets(redis_server.url)
        try:
            return [await (one, two)[turn % 2].take(key, rate) for turn in range(turns)]
        finally:
            await one.close()
            await two.close()

    taken = asyncio.run(requests("shared", 10, 13))
    assert [t.is_allowed for t in taken[:10]] == [True] * 10
    assert not taken[-1].is_allowed
    assert 1 <= taken[-1].wait_seconds <= 6


def test_while_redis_is_away_the_process_counts_by_itself(caplog):
    async def requests():
        buckets = RedisBuckets("redis://127.0.0.1:1")
        try:
            return [(await buckets.take("k", 1)).is_allowed for _ in range(2)]
        finally:
            await buckets.close()

    assert asyncio.run(requests()) == [True, False]
    assert "Redis does not count requests" in caplog.text
