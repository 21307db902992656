"""Keeping a lease: renewed while there is progress, given up when fenced, patient with a database that is away."""

from __future__ import annotations

import threading

import pytest

from batchinfer.errors import FencedError
from batchinfer.jobs.status import Action
from batchinfer_workers.heartbeat import LeaseKeeper


class Renewals:
    """Counts renewals, tells when one was made, and answers from a script (the last answer repeats)."""

    def __init__(self, *script):
        self.script = list(script)
        self.count = 0
        self.happened = threading.Semaphore(0)

    def __call__(self):
        answer = self.script[min(self.count, len(self.script) - 1)]
        self.count += 1
        self.happened.release()
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_it_renews_until_closed_and_passes_on_what_the_ledger_says():
    renew = Renewals(Action.CONTINUE, Action.STOP_PAUSE)
    with LeaseKeeper(renew, seconds=0.001) as keeper:
        assert renew.happened.acquire(timeout=10)
        assert renew.happened.acquire(timeout=10)
        assert renew.happened.acquire(timeout=10)
        assert keeper.action is Action.STOP_PAUSE
    keeper._thread.join(10)
    count = renew.count
    assert keeper.beat() is Action.STOP_PAUSE
    assert renew.count == count, "a closed keeper renews no more"


def test_a_lost_lease_is_remembered():
    """After fencing nothing is renewed, and whoever checks is told."""
    renew = Renewals(FencedError("lost"))
    keeper = LeaseKeeper(renew, seconds=60)
    keeper.check()
    keeper.beat()
    keeper.beat()
    assert renew.count == 1
    with pytest.raises(FencedError):
        keeper.check()


def test_a_database_that_is_away_is_tried_again():
    renew = Renewals(OSError("no route"), Action.STOP_CANCEL)
    keeper = LeaseKeeper(renew, seconds=60)
    assert keeper.beat() is Action.CONTINUE
    assert keeper.beat() is Action.STOP_CANCEL


def test_a_holder_without_progress_is_not_renewed():
    """An engine that hangs must lose its shards: the thread asks first."""
    asked = threading.Semaphore(0)

    def makes_no_progress():
        asked.release()
        return False

    renew = Renewals(Action.CONTINUE)
    with LeaseKeeper(renew, seconds=0.001, may_renew=makes_no_progress):
        for _ in range(3):
            assert asked.acquire(timeout=10)
    assert renew.count == 0
