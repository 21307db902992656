"""A shard's share of the engine: names of requests, and the end of an engine."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from batchinfer.errors import EngineDiedError
from batchinfer.types import Completion, Request, RowStatus
from batchinfer_workers.engine_session import EngineSession, _rename, by_session, row_of


class Process:
    """Takes requests and does nothing."""

    def __init__(self):
        self.submitted = []
        self.aborted = []
        self.counters = {}

    def submit(self, requests):
        self.submitted += requests

    def abort(self, ids):
        self.aborted += ids

    def stats(self):
        return self.counters


def make():
    process = Process()
    return EngineSession(7, process, share_of_unfinished=lambda session: 10 * session.num_outstanding), process


def done(row, device_ns=0):
    return Completion(f"7:{row}", RowStatus.SUCCEEDED, device_ns=device_ns)


def test_renaming_a_request_keeps_everything_else():
    """Written out by hand for speed: a new field of Request must not get lost."""
    full = Request(**{field.name: f"value of {field.name}" for field in fields(Request)})
    assert _rename(full, "7:1") == replace(full, request_id="7:1")


def test_what_is_outstanding_and_what_it_costs():
    """Finished rows cost what the engine says, unfinished ones their share."""
    session, process = make()
    session.submit([Request("3", prompt="a"), Request("4", prompt="b")])
    assert [request.request_id for request in process.submitted] == ["7:3", "7:4"]
    assert (session.num_outstanding, session.metered_ns, session.is_waiting) == (2, 20, True)
    session.deliver([done(4, 1000)])
    assert not session.is_waiting, "it is the shard's turn"
    assert [row_of(completion) for completion in session.poll(1)] == [4]
    assert (session.num_outstanding, session.metered_ns, session.is_waiting) == (1, 1010, True)
    session.abort()
    assert process.aborted == ["7:3"]
    assert session.num_outstanding == 0


def test_what_an_engine_gave_before_it_ended_is_not_lost():
    """Completions first, then the error, then the error again."""
    session, _ = make()
    session.submit([Request("1"), Request("2")])
    session.deliver([done(1)])
    session.break_off(EngineDiedError("gone"))
    assert [row_of(completion) for completion in session.poll(0)] == [1]
    for _ in range(2):
        with pytest.raises(EngineDiedError, match="gone"):
            session.poll(0)
    with pytest.raises(EngineDiedError, match="gone"):
        session.submit([Request("3")])


def test_completions_are_sorted_by_session():
    mixed = [Completion(name, RowStatus.SUCCEEDED) for name in ("1:5", "2:5", "1:6")]
    assert {number: [row_of(c) for c in group] for number, group in by_session(mixed).items()} == {1: [5, 6], 2: [5]}


def test_a_job_is_told_what_the_engine_did_since_it_began_on_it():
    """Whatever session it was that began; another job's beginning is its own."""
    first, process = make()
    begun = {}
    second = EngineSession(8, process, share_of_unfinished=lambda _: 0, first_stats=begun)
    first._first_stats = begun
    process.counters = {"steps": 10, "completion_tokens": 100, "step_ns": 10**9}
    first.begin("job")
    process.counters = {"steps": 30, "completion_tokens": 700, "step_ns": 3 * 10**9}
    second.begin("job")
    second.begin("other")
    assert second.report("job")["steps"] == 20
    assert second.report("job")["tokens_per_second"] == 300
    assert second.report("other")["steps"] == 0
