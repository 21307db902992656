"""The hooks for structured output: the engine asks for a mask before each token and tells what came."""

import torch

from batchinfer.types import ErrorCode
from tests.engine.fakes import VOCAB, answer, drain, make_engine
from tests.engine.test_core import ask, by_id


class Countdown:
    """Allows one token only, one less each time."""

    def __init__(self, first):
        self.next = first
        self.accepted = []

    def mask(self):
        bits = [0] * (VOCAB // 32 + 1)
        bits[self.next // 32] = 1 << (self.next % 32)
        return torch.tensor(bits, dtype=torch.int64).to(torch.int32)

    def accept(self, token_id):
        self.accepted.append(token_id)
        self.next -= 1
        if self.next < 10:
            raise ValueError("the grammar has ended")


def constrained(engine, request, constraint):
    engine.add_request(request)
    next(s for s in engine._scheduler.waiting if s.request_id == request.request_id).constraint = constraint


def test_only_masked_tokens_come_and_neighbours_do_not_notice():
    engine = make_engine()
    constraint = Countdown(38)
    constrained(engine, ask("a", [3, 1], max_tokens=4), constraint)
    engine.add_request(ask("b", [3, 1], max_tokens=4))
    done = by_id(drain(engine))
    assert list(done["a"].token_ids) == constraint.accepted == [38, 37, 36, 35]
    assert list(done["b"].token_ids) == answer([3, 1], 4)


def test_a_constraint_that_fails_ends_its_row_alone():
    engine = make_engine()
    constrained(engine, ask("a", [3, 1], max_tokens=9), Countdown(12))
    engine.add_request(ask("b", [3, 1], max_tokens=9))
    done = by_id(drain(engine))
    assert done["a"].error.code is ErrorCode.ENGINE_ERROR
    assert "the grammar has ended" in done["a"].error.message
    assert list(done["b"].token_ids) == answer([3, 1], 9)
