"""A real model, small and random, on the CPU: overlapping steps give the answers of the plain engine."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from batchinfer.engine.block_pool import BlockPool
from batchinfer.engine.config import EngineConfig
from batchinfer.engine.core import EngineCore
from batchinfer.engine.gpu.pipeline import PipelinedCore
from batchinfer.engine.gpu.sampler import DeviceSampler
from batchinfer.engine.ingest import Ingest
from batchinfer.engine.model_runner import ModelRunner
from batchinfer.engine.sampler import Sampler
from batchinfer.engine.scheduler import Scheduler
from batchinfer.engine.sequence import PENDING
from batchinfer.sampling_params import SamplingParams
from batchinfer.types import Request
from tests.engine.fakes import FakeDetokenizer, FakeRenderer, drain
from tests.engine.small_decoder import CPU, LONGEST, VOCAB, small_model
from tests.engine.test_constraint import Countdown, constrained

END, BLOCK = 2, 16


class QueueingRunner(ModelRunner):
    """Keeps sampled tokens by sequence, where a GPU keeps them by its row in a table."""

    def __init__(self, *args):
        super().__init__(*args)
        self.kept = {}

    def keep(self, sequences, tokens):
        self.kept = dict(zip(sequences, tokens, strict=True))

    def _token_ids(self, scheduled, values):
        end = 0
        for part in scheduled:
            end += part.num_new_tokens
            if values[end - 1] == PENDING:
                values[end - 1] = int(self.kept[part.sequence])
        return super()._token_ids(scheduled, values)


@pytest.fixture(scope="module")
def model():
    return small_model("llama", num_hidden_layers=2)


def engine_of(model, overlaps, num_blocks, estimate=None):
    loaded = SimpleNamespace(model=model, name="small", max_model_len=LONGEST, dtype=torch.float32, device=CPU)
    config = EngineConfig(
        "small", dtype="float32", block_size=BLOCK, num_kv_blocks=num_blocks, attention_backend="torch"
    )
    scheduler = Scheduler(
        BlockPool(num_blocks, BLOCK), max_num_seqs=8, max_num_batched_tokens=40, estimate_remaining=estimate
    )
    renderer = FakeRenderer()
    renderer.vocab_size = VOCAB
    ingest = Ingest(renderer, FakeDetokenizer(), {END}, max_model_len=LONGEST, max_kv_tokens=num_blocks * BLOCK)
    sampler = Sampler({END})
    if not overlaps:
        return EngineCore(ModelRunner(loaded, config), scheduler, ingest, sampler), scheduler
    chooser = DeviceSampler(sampler, CPU)
    return PipelinedCore(QueueingRunner(loaded, config), scheduler, ingest, sampler, device_sampler=chooser), scheduler


def requests():
    kinds = [
        {"max_tokens": 20},
        {"max_tokens": 12, "stop": ("<7", "<1")},
        {"max_tokens": 9, "n": 3, "temperature": 1.5, "seed": 5, "logprobs": 2},
        {"max_tokens": 30, "ignore_eos": True, "logprobs": 0},
        {"max_tokens": 8, "repetition_penalty": 1.5, "min_tokens": 3},
        {"max_tokens": 25, "temperature": 1.0, "top_p": 0.8, "prompt_logprobs": 1},
    ]
    generator = torch.Generator().manual_seed(4)
    shared = torch.randint(3, VOCAB, (17,), generator=generator).tolist()
    return [
        Request(
            str(i),
            SamplingParams(**kinds[i % len(kinds)]),
            prompt_token_ids=shared[: 17 * (i % 2)] + torch.randint(3, VOCAB, (3 + i,), generator=generator).tolist(),
        )
        for i in range(12)
    ]


def answers(engine):
    for request in requests():
        engine.add_request(request)
    guided = Request("guided", SamplingParams(max_tokens=14, ignore_eos=True), prompt_token_ids=[9, 8])
    constrained(engine, guided, Countdown(38, forces=4))
    return {c.request_id: dataclasses.replace(c, device_ns=0) for c in drain(engine)}


def tokens_of(completions, *, with_cached=True):
    """Without log-probabilities: products in torch round by the size of the batch, which is not the same."""
    return {
        key: dataclasses.replace(
            c, extra={}, usage=c.usage if with_cached else dataclasses.replace(c.usage, cached_tokens=0)
        )
        for key, c in completions.items()
    }


def test_overlapping_steps_change_no_answer(model):
    """Text, tokens and usage of greedy, drawn, stopped, penalised, scored, sampled and guided rows."""
    expected = answers(engine_of(model, overlaps=False, num_blocks=100)[0])
    found = answers(engine_of(model, overlaps=True, num_blocks=100)[0])
    assert tokens_of(found) == tokens_of(expected)
    assert list(found["guided"].token_ids) == list(range(38, 24, -1))


def test_nor_where_sequences_are_evicted(model):
    """What a row found in the cache then depends on the moment, and nothing else does."""
    expected = answers(engine_of(model, overlaps=False, num_blocks=100)[0])
    engine, scheduler = engine_of(model, overlaps=True, num_blocks=9, estimate=lambda _: 1)
    found = answers(engine)
    assert scheduler.num_preemptions > 0
    assert tokens_of(found, with_cached=False) == tokens_of(expected, with_cached=False)
