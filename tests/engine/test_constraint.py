"""The hooks for structured output: the engine asks for a mask before each token and tells what came."""

import pytest
import torch

from batchinfer.types import ErrorCode
from tests.engine.fakes import VOCAB, answer, drain, make_engine
from tests.engine.test_core import ask, by_id


class Free:
    """Allows everything, and has no opinion."""

    fault = None
    is_complete = True
    is_json = all_or_nothing = False

    def prepare(self):
        pass

    def mask(self):
        return None

    def accept(self, token_id):
        return False

    def forced(self):
        return ()


class Countdown(Free):
    """Allows one token only, one less each time; ``forces`` says how many follow without sampling."""

    def __init__(self, first, forces=0):
        self.next = first
        self.accepted = []
        self.forces = forces

    def mask(self):
        bits = [0] * (VOCAB // 32 + 1)
        bits[self.next // 32] = 1 << (self.next % 32)
        return torch.tensor(bits, dtype=torch.int64).to(torch.int32)

    def accept(self, token_id):
        self.accepted.append(token_id)
        self.next -= 1
        if self.next < 10:
            raise ValueError("the grammar has ended")
        return False

    def forced(self):
        count, self.forces = self.forces, 0
        return range(self.next, self.next - count, -1)


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


@pytest.mark.parametrize("size", [1, 3, 16])
def test_forced_tokens_follow_without_a_step_of_their_own(size):
    """The fake model proves that each step sees them in the cache, whatever the block and the budget."""
    engine = make_engine(block_size=4, max_num_batched_tokens=size, max_num_seqs=1)
    constraint = Countdown(38, forces=9)
    constrained(engine, ask("a", [3, 1], max_tokens=14), constraint)
    (done,) = drain(engine)
    assert list(done.token_ids) == constraint.accepted == list(range(38, 24, -1))
    assert done.usage.completion_tokens == 14
    assert done.usage.cached_tokens == 0
    assert engine.stats().forced_tokens == 9
    assert engine.stats().completion_tokens == 14


def test_forced_tokens_end_with_max_tokens():
    engine = make_engine()
    constrained(engine, ask("a", [3, 1], max_tokens=4), Countdown(38, forces=9))
    (done,) = drain(engine)
    assert list(done.token_ids) == [38, 37, 36, 35]
    assert done.finish_reason == "length"


def test_a_constraint_may_end_the_answer():
    class Two(Free):
        left = 2

        def accept(self, token_id):
            self.left -= 1
            return self.left == 0

    engine = make_engine()
    constrained(engine, ask("a", [3, 1], max_tokens=9, ignore_eos=True), Two())
    (done,) = drain(engine)
    assert list(done.token_ids) == answer([3, 1], 2, ())
    assert done.finish_reason == "stop"
