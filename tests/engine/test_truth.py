"""Greedy tokens equal those of transformers' ``generate`` on the unpatched float32 model, however the batch is made."""

import pytest

from batchinfer.engine.config import EngineConfig
from batchinfer.engine.engine import build_engine
from batchinfer.sampling_params import SamplingParams
from batchinfer.types import Request
from tests.engine.conftest import NEW_TOKENS
from tests.engine.fakes import drain
from tests.engine.reference import check_tokens

# the reference alone computes for a minute, and other work may share the machine
# and one process computes it for all of them
pytestmark = [pytest.mark.real_model, pytest.mark.timeout(1200)]


def run(loaded, truths, **settings):
    """All prompts through an engine with these settings; its completions by index, and its statistics."""
    engine = build_engine(loaded, EngineConfig(model="real", **settings))
    for i, truth in enumerate(truths):
        engine.add_request(Request(str(i), SamplingParams(max_tokens=NEW_TOKENS), prompt_token_ids=truth.prompt))
    done = {int(c.request_id): list(c.token_ids) for c in drain(engine)}
    return done, engine.stats()


def assert_truth(truths, done):
    """Every row equals the reference, up to ties that the reference's own logits show; those are rare."""
    ties = [i for i, truth in enumerate(truths) if not check_tokens(truth, done[i])]
    assert len(ties) <= len(truths) // 30, f"rows {ties} part from the reference at ties"


def test_alone(loaded, truths):
    """One sequence at a time, so that every decode step is a batch of one."""
    done, stats = run(loaded, truths, max_num_seqs=1, enable_prefix_caching=False)
    assert_truth(truths, done)
    assert stats.mean_batch_size == 1
    assert [len(done[i]) for i in range(len(truths))] == [len(truth.tokens) for truth in truths]


def test_mixed_in_batches_with_prefix_reuse(loaded, truths):
    done, stats = run(loaded, truths, max_num_seqs=32)
    assert_truth(truths, done)
    assert stats.cached_tokens > 500, "the chats share their system message"
    assert [len(done[i]) for i in range(len(truths))] == [len(truth.tokens) for truth in truths]


def test_mixed_in_batches_without_prefix_reuse(loaded, truths):
    done, stats = run(loaded, truths, max_num_seqs=64, max_num_batched_tokens=700, enable_prefix_caching=False)
    assert_truth(truths, done)
    assert stats.cached_tokens == 0


@pytest.mark.parametrize(
    ("block_size", "max_num_batched_tokens", "max_num_seqs"),
    [(1, 100, 16), (7, 64, 24)],
)
def test_odd_blocks_and_small_chunks(loaded, truths, block_size, max_num_batched_tokens, max_num_seqs):
    """Prompts are computed in chunks that end in the middle of things."""
    done, _ = run(
        loaded,
        truths,
        block_size=block_size,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
    )
    assert_truth(truths, done)


def test_a_tiny_pool_makes_rows_wait_and_changes_nothing(loaded, truths):
    """The pool holds one of the longest rows and little else."""
    longest = max(len(truth.prompt) for truth in truths) + NEW_TOKENS
    done, stats = run(loaded, truths, block_size=3, num_kv_blocks=-(-longest // 3) + 10, max_num_seqs=64)
    assert_truth(truths, done)
    assert stats.preemptions == 0
    assert stats.mean_batch_size < 20


def test_preempted_rows_are_computed_again_to_the_same_end(loaded, truths):
    """Admission is told that every row ends at once: the pool runs full and rows are evicted."""
    longest = max(len(truth.prompt) for truth in truths) + NEW_TOKENS
    engine = build_engine(loaded, EngineConfig(model="real", block_size=2, num_kv_blocks=longest // 2 + 1))
    engine._scheduler.estimate_remaining = lambda _: 1
    for i, truth in enumerate(truths):
        engine.add_request(Request(str(i), SamplingParams(max_tokens=NEW_TOKENS), prompt_token_ids=truth.prompt))
    done = {int(c.request_id): list(c.token_ids) for c in drain(engine)}
    assert_truth(truths, done)
    assert engine.stats().preemptions > 0
