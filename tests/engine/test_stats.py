"""What the counters say, against counting by hand."""

import random

import pytest

from batchinfer.engine.block_pool import chain_hash, root_hash
from batchinfer.engine.config import EngineConfig
from batchinfer.engine.engine import build_engine
from batchinfer.engine.forward_pass import PROFILE_STEPS
from batchinfer.engine.seen_blocks import SeenBlocks
from batchinfer.engine.stats import EngineStats
from batchinfer.sampling_params import SamplingParams
from batchinfer.types import Request
from tests.engine.fakes import drain, make_engine


def hashes(tokens, size=2):
    found, parent = [], root_hash()
    for end in range(size, len(tokens) + 1, size):
        parent = chain_hash(parent, tokens[end - size : end])
        found.append(parent)
    return found


def test_seen_blocks_are_those_of_a_trie():
    rng = random.Random(3)
    trie, seen = set(), SeenBlocks()
    for _ in range(300):
        prompt = [rng.randrange(3) for _ in range(rng.randrange(12))]
        prefixes = [tuple(prompt[:end]) for end in range(2, len(prompt) + 1, 2)]
        expected = next((i for i, prefix in enumerate(prefixes) if prefix not in trie), len(prefixes))
        trie.update(prefixes)
        assert seen.add(hashes(prompt)) == expected


def test_reuse_is_measured_against_a_cache_without_end():
    """The pool holds one prompt: each is computed whole, though the third begins as the first did."""
    engine = make_engine(num_blocks=4, block_size=4, max_num_seqs=1)
    for name, prompt in (("a", [1] * 12), ("b", [2] * 12), ("c", [1] * 12)):
        engine.add_request(Request(name, SamplingParams(max_tokens=2, ignore_eos=True), prompt_token_ids=prompt))
        drain(engine)
    stats = engine.stats()
    assert stats.ideal_cached_tokens == 8
    assert stats.reuse == 0.0


def test_figures_of_a_snapshot():
    stats = EngineStats(
        steps=10, sequence_steps=40, max_num_seqs=8, completion_tokens=30, step_ns=2 * 10**9, schedule_ns=10**8,
        model_ns=16 * 10**8, sample_ns=10**8, gemm_ns=6, attention_ns=2, elementwise_ns=1, head_ns=1, profiled_ns=20,
        cached_tokens=9, ideal_cached_tokens=10, prefill_tokens=60, decode_tokens=30, padding_tokens=10,
    )  # fmt: skip
    assert stats.tokens_per_second == 15
    assert stats.occupancy == 0.5
    assert stats.reuse == 0.9
    assert stats.padding == 0.1
    assert stats.time_split == pytest.approx(
        {"schedule": 0.05, "sampling": 0.05, "gemm": 0.24, "attention": 0.08, "elementwise": 0.04, "head": 0.04,
         "python": 0.5}
    )  # fmt: skip


def test_what_was_counted_since():
    early = EngineStats(steps=3, num_blocks=5, kernels="avx2")
    late = EngineStats(steps=10, num_blocks=5, used_blocks=2, kernels="avx2")
    assert late.since(early) == EngineStats(steps=7, num_blocks=5, used_blocks=2, kernels="avx2")


@pytest.mark.real_model
def test_the_parts_of_a_step_are_taken_from_one_step_in_many_and_change_no_token(loaded):
    request = SamplingParams(max_tokens=2 * PROFILE_STEPS + 2, ignore_eos=True)
    engine = build_engine(loaded, EngineConfig(model="real", num_kv_blocks=40))
    stats = []
    for name in ("a", "b"):
        engine.add_request(Request(name, request, prompt_token_ids=[5, 6, 7]))
        (done,) = drain(engine)
        stats.append((done.token_ids, engine.stats()))
    assert stats[0][0] == stats[1][0], "timed steps fall on other tokens the second time"
    first = stats[0][1]
    assert first.layers == "fused"
    parts = first.gemm_ns + first.attention_ns + first.elementwise_ns + first.head_ns
    assert 0 < parts < first.profiled_ns < first.model_ns
    assert min(first.gemm_ns, first.attention_ns, first.elementwise_ns, first.head_ns) > 0
    assert sum(first.time_split.values()) == pytest.approx(1)
