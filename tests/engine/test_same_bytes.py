"""The same row gives the same logits, to the bit, whatever the batch, the order, the chunks and the cache."""

import hashlib
import random

import pytest
import torch

from batchinfer.engine.attention import ATTENTION_NAME, register_attention
from batchinfer.engine.block_pool import BlockPool
from batchinfer.engine.chat import ChatRenderer
from batchinfer.engine.config import EngineConfig
from batchinfer.engine.core import EngineCore
from batchinfer.engine.detokenizer import Detokenizer
from batchinfer.engine.head_output import HeadOutput
from batchinfer.engine.ingest import Ingest
from batchinfer.engine.model_runner import ModelRunner
from batchinfer.engine.sampler import Sampler
from batchinfer.engine.scheduler import Scheduler
from batchinfer.engine.speculation import Speculator
from batchinfer.models.load import load_model
from batchinfer.sampling_params import SamplingParams
from batchinfer.types import Request
from tests.engine.fakes import drain

# each precision is quantised and loaded for all of its tests: by one process
pytestmark = [pytest.mark.real_model]
NUM_BLOCKS, BLOCK = 160, 16
NEW_TOKENS = 5
SHARED = 40
LENGTHS = (1, 2, 3, 15, 16, 17, 33, 60, 130)


class Witness:
    """A runner that keeps a hash of the bytes of each row's logits, by row and position."""

    def __init__(self, runner):
        self._runner = runner
        self.seen = {}

    def execute(self, scheduled, kept, scored=(), hidden=()):
        places = [
            (part.sequence.request_id, part.sequence.num_tokens + number)
            for part in scheduled
            if part.samples
            for number in range(1 + len(part.guesses))
        ]
        head = self._runner.execute(scheduled, range(len(places)))
        # behind a wrong guess stands a wrong hash, until the place is computed again
        for place, line in zip(places, head.logits, strict=True):
            digest = hashlib.sha256(line.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
            self.seen[place] = digest
        return HeadOutput(head.best, head.best_index, kept, head.logits[kept])


@pytest.fixture(scope="module", params=["float32", "bfloat16", "int8", "int8-weight-only", "int8 kv"])
def model(request, model_path):
    """A runner in each precision, with what an engine needs besides."""
    quantization = request.param.removesuffix(" kv") if "int8" in request.param else "none"
    config = EngineConfig(
        model=str(model_path),
        dtype="auto" if quantization != "none" else request.param,
        quantization=quantization,
        kv_cache_dtype="int8" if request.param.endswith("kv") else "auto",
        max_model_len=512,
        num_kv_blocks=NUM_BLOCKS,
        block_size=BLOCK,
        device="cpu",
    )
    register_attention()
    loaded = load_model(config, ATTENTION_NAME)
    runner = ModelRunner(loaded, config, owns_model=True)
    assert runner.about["layers"] == "fused"
    return loaded, runner


@pytest.fixture(scope="module")
def rows(model):
    """Prompts of many lengths, four of which begin alike."""
    rng = random.Random(11)
    vocab = model[0].hf_config.vocab_size
    prompts = [[rng.randrange(10, vocab) for _ in range(length)] for length in LENGTHS]
    shared = [rng.randrange(10, vocab) for _ in range(SHARED)]
    prompts += [[*shared, *(rng.randrange(10, vocab) for _ in range(more))] for more in (1, 9, 9, 30)]
    sampled = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, temperature=1.0, seed=5)
    greedy = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    return [Request(str(i), sampled if i % 2 else greedy, prompt_token_ids=prompt) for i, prompt in enumerate(prompts)]


def run(model, requests, num_blocks=NUM_BLOCKS, **limits):
    """Tokens by request, the hashes of all logits they were chosen from, and how many tokens the cache gave."""
    loaded, runner = model
    witness = Witness(runner)
    tokenizer, ends = loaded.tokenizer, loaded.eos_token_ids
    ingest = Ingest(
        ChatRenderer(tokenizer, loaded.hf_config.vocab_size),
        Detokenizer(tokenizer),
        ends,
        max_model_len=loaded.max_model_len,
        max_kv_tokens=num_blocks * BLOCK,
        seed=0,
    )
    engine = EngineCore(witness, Scheduler(BlockPool(num_blocks, BLOCK), **limits), ingest, Sampler(ends))
    for request in requests:
        engine.add_request(request)
    tokens = {completion.request_id: completion.token_ids for completion in drain(engine)}
    assert all(len(answer) == NEW_TOKENS for answer in tokens.values())
    return tokens, witness.seen, engine.stats().cached_tokens


@pytest.fixture(scope="module")
def alone(model, rows):
    """Each row by itself, its whole prompt at once."""
    return run(model, rows, max_num_seqs=1, max_num_batched_tokens=512, enable_prefix_caching=False)


@pytest.mark.parametrize(
    ("order", "limits"),
    [
        (None, {"max_num_seqs": 64, "max_num_batched_tokens": 512}),
        (1, {"max_num_seqs": 64, "max_num_batched_tokens": 512, "enable_prefix_caching": False}),
        (2, {"max_num_seqs": 7, "max_num_batched_tokens": 48}),
        (3, {"max_num_seqs": 3, "max_num_batched_tokens": 23, "enable_prefix_caching": False}),
        (4, {"max_num_seqs": 64, "max_num_batched_tokens": 100, "num_blocks": 16}),
    ],
    ids=["one batch", "shuffled, no prefix cache", "chunks of 48", "chunks of 23", "a tiny pool"],
)
def test_the_same_bytes(model, rows, alone, order, limits):
    """Tokens and logits equal those of the row alone, in every precision; half of the rows are drawn by seed."""
    requests = list(rows)
    if order is not None:
        random.Random(order).shuffle(requests)
    tokens, seen, _ = run(model, requests, **limits)
    assert tokens == alone[0]
    assert seen == alone[1]


def test_a_warm_prefix_cache_gives_the_same_bytes(model, rows, alone):
    """The same rows twice through one engine: the second time their prompts are read from the cache."""
    again = [Request(f"again {r.request_id}", r.params, prompt_token_ids=r.prompt_token_ids) for r in rows]
    tokens, seen, cached = run(model, [*rows, *again], max_num_seqs=len(rows), max_num_batched_tokens=512)
    assert cached > sum(LENGTHS) // 2, "the second time is read from the cache"
    for row, answer in alone[0].items():
        assert tokens[row] == tokens[f"again {row}"] == answer
    for (row, position), digest in alone[1].items():
        assert seen[row, position] == seen[f"again {row}", position] == digest


def test_two_threads_give_the_same_bytes(model, rows, alone):
    """One batch on two threads, decode tokens beside chunks of prompts; the head's slices are cut between the two."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        tokens, seen, _ = run(model, rows[5:10], max_num_seqs=64, max_num_batched_tokens=100)
    finally:
        torch.set_num_threads(before)
    assert len(tokens) == 5
    assert tokens == {row: alone[0][row] for row in tokens}
    assert seen == {place: alone[1][place] for place in seen}


class Oracle(Speculator):
    """Guesses what the row will say, and every third time something else at the end."""

    def __init__(self, answers):
        super().__init__(always=True)
        self._answers = answers
        self._num_guesses = 0

    def guess(self, sequence, count):
        known = self._answers[sequence.request_id]
        tokens = list(known[sequence.num_output_tokens : sequence.num_output_tokens + min(count, 3)])
        self._num_guesses += 1
        if tokens and self._num_guesses % 3 == 0:
            tokens[-1] += 1 if tokens[-1] < 100 else -1
        return tokens


def test_guessed_tokens_give_the_same_bytes(model, rows, alone):
    """Several tokens of a row in one step, right and wrong ones: logits behind each equal those of single steps."""
    oracle = Oracle(alone[0])
    tokens, seen, _ = run(model, rows, max_num_seqs=64, max_num_batched_tokens=512, speculator=oracle)
    assert tokens == alone[0]
    assert {place: seen[place] for place in alone[1]} == alone[1]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("columns", "width"), [(1536, 576), (576, 2048)])
def test_a_bfloat16_product_of_any_number_of_rows(columns, width, threads):
    """Where a CPU has AMX, oneDNN takes other kernels for few and for many rows; these sizes met three of them."""
    from batchinfer.models.fused.int8_linear import WeightOnlyLinear
    from batchinfer.models.fused.packed_linear import PackedLinear
    from batchinfer_kernels.cpu import get_ops

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(width, columns, generator=generator) * 0.05
    narrow = torch.randint(-9, 9, (width, columns), dtype=torch.int8, generator=generator)
    rows = torch.randn(600, columns, generator=generator).to(torch.bfloat16)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for linear in (
            PackedLinear(get_ops(), weight, None, torch.bfloat16),
            WeightOnlyLinear(get_ops(), narrow, torch.ones(width), None),
        ):
            whole = linear(rows)
            for number in (4, 20, 33, 34, 64, 100, 300, 353, 512, 576):
                for start in (0, 600 - number):
                    assert torch.equal(linear(rows[start : start + number]), whole[start : start + number]), number
    finally:
        torch.set_num_threads(before)
