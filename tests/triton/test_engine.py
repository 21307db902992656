"""A whole engine on the Triton kernels, under the interpreter: the tokens of the CPU's torch path and of transformers."""

from types import SimpleNamespace

import pytest
import torch

from batchinfer.engine import model_runner
from batchinfer.engine.attention_backend import TorchAttention
from batchinfer.engine.attention_groups import Span
from batchinfer.engine.block_pool import BlockPool
from batchinfer.engine.config import EngineConfig
from batchinfer.engine.core import EngineCore
from batchinfer.engine.ingest import Ingest
from batchinfer.engine.kv_cache import LayerShape
from batchinfer.engine.sampler import Sampler
from batchinfer.engine.scheduler import Scheduler
from batchinfer.engine.triton_attention import TritonAttention, prefix_groups, why_not_triton
from batchinfer.sampling_params import SamplingParams
from batchinfer.types import Request
from tests.engine.fakes import FakeDetokenizer, FakeRenderer, drain
from tests.engine.small_decoder import VOCAB, small_model
from tests.triton import interpreter  # noqa: F401 -- before any kernel module

BLOCK, NUM_BLOCKS, LONGEST, ANSWER = 16, 64, 160, 4
CPU = torch.device("cpu")


def prompts() -> list[list[int]]:
    """Three that share 80 tokens, one of them exactly; a prompt of whole blocks; one of one token."""
    generator = torch.Generator().manual_seed(0)

    def some(count):
        return torch.randint(3, VOCAB, (count,), generator=generator).tolist()

    shared = some(80)
    return [[*shared, *some(5)], [*shared, *some(17)], shared, some(32), some(1)]


@pytest.fixture(scope="module")
def model():
    return small_model("llama", max_position_embeddings=LONGEST, num_hidden_layers=2)


@pytest.fixture(scope="module")
def truth(model):
    """What transformers generates, one prompt at a time, without an engine."""
    answers = []
    for prompt in prompts():
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=ANSWER, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def generate(model, make_attention, monkeypatch) -> tuple[list[list[int]], EngineCore]:
    """All prompts through an engine whose steps mix chunks and decode tokens."""
    monkeypatch.setattr(model_runner, "choose_attention", lambda *args, **_: make_attention(*args))
    loaded = SimpleNamespace(model=model, name="small", max_model_len=LONGEST, dtype=torch.float32, device=CPU)
    config = EngineConfig(model="small", dtype="float32", block_size=BLOCK, num_kv_blocks=NUM_BLOCKS)
    runner = model_runner.ModelRunner(loaded, config)
    scheduler = Scheduler(
        BlockPool(NUM_BLOCKS, BLOCK), max_num_seqs=8, max_num_batched_tokens=60, enable_prefix_caching=True
    )
    ingest = Ingest(FakeRenderer(), FakeDetokenizer(), {VOCAB}, max_model_len=LONGEST, max_kv_tokens=NUM_BLOCKS * BLOCK)
    engine = EngineCore(runner, scheduler, ingest, Sampler())
    for i, prompt in enumerate(prompts()):
        engine.add_request(Request(str(i), SamplingParams(max_tokens=ANSWER), prompt_token_ids=prompt))
    done = {int(completion.request_id): list(completion.token_ids) for completion in drain(engine)}
    return [done[i] for i in range(len(done))], engine


def test_the_torch_path_gives_transformers_tokens(model, truth, monkeypatch):
    assert generate(model, TorchAttention, monkeypatch)[0] == truth


@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
def test_the_triton_path_gives_the_same_tokens(model, truth, monkeypatch, kv_dtype):
    """With prefix reuse and prefix groups; INT8 caches too, whose error is too small to change these tokens."""
    group_sizes = []
    make_context = TritonAttention.context

    def watched(self, spans, num_rows):
        group_sizes.extend(len(group.spans) for group in prefix_groups(spans, BLOCK, 64))
        return make_context(self, spans, num_rows)

    monkeypatch.setattr(TritonAttention, "context", watched)
    tokens, engine = generate(model, lambda *args: TritonAttention(*args, kv_dtype=kv_dtype, split=64), monkeypatch)
    assert tokens == truth
    assert engine.stats().cached_tokens > 0
    assert max(group_sizes) >= 2


def test_groups_are_of_equal_blocks_at_equal_places():
    spans = [
        Span(0, 99, 1, [1, 2, 3, 4, 5, 6, 7]),
        Span(1, 89, 1, [1, 2, 3, 4, 8, 9]),
        Span(2, 99, 1, [1, 2, 3, 5, 4, 6, 7]),  # other blocks within the first 64 tokens
        Span(3, 99, 1, [1, 2, 3, 4, 5, 6, 9]),
        Span(4, 60, 1, [1, 2, 3, 4]),  # shorter than a split
        Span(5, 90, 9, [1, 2, 3, 4, 5, 6, 7]),  # a chunk
    ]
    groups = prefix_groups(spans, 16, 64)
    assert [(group.spans, group.num_tokens) for group in groups] == [((0, 1, 3), 64)]


def test_layers_that_the_kernels_do_not_serve_are_named():
    assert why_not_triton([LayerShape(2, 64, 64)], 64) is None
    assert "block_size 48" in why_not_triton([LayerShape(2, 64, 64)], 48)
    assert "24" in why_not_triton([LayerShape(2, 24, 24)], 64)
    assert "32" in why_not_triton([LayerShape(2, 64, 32)], 64)
    with pytest.raises(ValueError, match="block_size"):
        TritonAttention([LayerShape(2, 64, 64)], 4, 48, torch.float32, CPU)
