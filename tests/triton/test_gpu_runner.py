"""The GPU's runner without a GPU: captured batches on buffers that stay, padding, pending tokens, memory."""

import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from batchinfer.engine import engine as engine_module
from batchinfer.engine import model_runner
from batchinfer.engine.attention_backend import choose_attention, choose_backend
from batchinfer.engine.attention_groups import Span
from batchinfer.engine.block_pool import BlockPool
from batchinfer.engine.config import EngineConfig
from batchinfer.engine.core import EngineCore
from batchinfer.engine.gpu.decode_plan import plan_decode
from batchinfer.engine.gpu.memory import GIB, MemoryProfile, profile_memory
from batchinfer.engine.gpu.padding import padded_size, padded_sizes
from batchinfer.engine.gpu.pipeline import PipelinedCore
from batchinfer.engine.gpu.runner import GpuRunner
from batchinfer.engine.gpu.sampler import DeviceSampler
from batchinfer.engine.head_output import HeadOutput
from batchinfer.engine.ingest import Ingest
from batchinfer.engine.kv_cache import LayerShape
from batchinfer.engine.logprobs import score_token
from batchinfer.engine.model_runner import ModelRunner
from batchinfer.engine.sampler import Sampler, SamplingRow
from batchinfer.engine.scheduler import Scheduler
from batchinfer.engine.triton_attention import TritonAttention
from batchinfer.errors import ModelError
from batchinfer.sampling_params import SamplingParams
from batchinfer.types import Request
from batchinfer_kernels.attention_plan import QuerySpan, plan_attention
from tests.engine.fakes import FakeDetokenizer, FakeRenderer, drain
from tests.engine.small_decoder import VOCAB, small_model
from tests.triton import interpreter  # noqa: F401 -- before any kernel module

BLOCK, NUM_BLOCKS, LONGEST, ANSWER = 16, 64, 160, 4
CPU = torch.device("cpu")


class FakeGraphs:
    """Records what is captured; a replay runs it on the same buffers, and results lie where the capture put them."""

    def __init__(self):
        self.sizes, self.replayed, self.addresses = [], [], {}

    def capture(self, run):
        first = run()
        size = len(first.best)
        self.sizes.append(size)

        def replay():
            self.replayed.append(size)
            again = run()
            for name in ("best", "best_index", "logits"):
                assert getattr(again, name).data_ptr() == getattr(first, name).data_ptr(), f"{name} has moved"
            return first

        return replay


class FakeMemory:
    """A device of so many bytes, where each run peaks at so much more than the weights."""

    def __init__(self, total, others, weights, peaks):
        self._total, self._others, self._weights, self._peaks = total, others, weights, list(peaks)

    def total(self):
        return self._total

    def free(self):
        return self._total - self._others - self.reserved()

    def reserved(self):
        return self._weights + 100  # what the allocator keeps beyond the tensors is no other user's

    def allocated(self):
        return self._weights

    def peak(self, run):
        run()
        return self._weights + self._peaks.pop(0)


def prompts() -> list[list[int]]:
    """Two that share 66 tokens; a prompt of a whole block; one of one token."""
    generator = torch.Generator().manual_seed(0)

    def some(count):
        return torch.randint(3, VOCAB, (count,), generator=generator).tolist()

    shared = some(66)
    return [[*shared, *some(3)], [*shared, *some(5)], some(16), some(1)]


@pytest.fixture(scope="module")
def model():
    return small_model("llama", max_position_embeddings=LONGEST, num_hidden_layers=1)


@pytest.fixture(scope="module")
def truth(model):
    """What transformers generates, one prompt at a time, without an engine."""
    model.set_attn_implementation("eager")
    answers = []
    for prompt in prompts():
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=ANSWER, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def loaded(model):
    return SimpleNamespace(model=model, name="small", max_model_len=LONGEST, dtype=torch.float32, device=CPU)


def config(**more):
    fields = {"dtype": "float32", "block_size": BLOCK, "max_num_seqs": 6, "max_num_batched_tokens": 60}
    return EngineConfig("small", attention_backend="triton", **fields | {"num_kv_blocks": NUM_BLOCKS} | more)


def make(model, overlaps, graphs, **more):
    """An engine whose attention splits contexts so early that these prompts are split, shared and merged."""

    def splitting(*args, kv_dtype=None, **_):
        return TritonAttention(*args, kv_dtype=kv_dtype, split=64)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "choose_attention", splitting)
        runner = GpuRunner(loaded(model), config(**more), graphs=graphs)
    scheduler = Scheduler(BlockPool(NUM_BLOCKS, BLOCK), max_num_seqs=6, max_num_batched_tokens=60)
    ingest = Ingest(FakeRenderer(), FakeDetokenizer(), {VOCAB}, max_model_len=LONGEST, max_kv_tokens=NUM_BLOCKS * BLOCK)
    sampler = Sampler()
    if overlaps is None:
        return EngineCore(runner, scheduler, ingest, sampler), runner
    chooser = DeviceSampler(sampler, CPU)
    return PipelinedCore(runner, scheduler, ingest, sampler, device_sampler=chooser, overlaps=overlaps), runner


def length_of(row):
    """Rows end one after the other, so that batches need padding."""
    return ANSWER - row % 3


def generate(engine, **params):
    for i, prompt in enumerate(prompts()):
        # one row has no use for logits, so that some of a step's are kept and others are not
        wanted = SamplingParams(max_tokens=length_of(i), **(params if i != 1 else {}))
        engine.add_request(Request(str(i), wanted, prompt_token_ids=prompt))
    done = {int(c.request_id): dataclasses.replace(c, device_ns=0) for c in drain(engine)}
    return [done[i] for i in range(len(done))]


@pytest.mark.parametrize("is_captured", [False, True])
def test_the_tokens_are_those_of_transformers(model, truth, is_captured):
    """Steps that overlap, kernel by kernel or captured; batches of 1 to 4 run in 4 rows."""
    graphs = FakeGraphs()
    engine, runner = make(model, True, graphs if is_captured else None)
    expected = [answer[: length_of(i)] for i, answer in enumerate(truth)]
    assert [list(c.token_ids) for c in generate(engine)] == expected
    assert graphs.sizes == ([6, 4] if is_captured else []), "the largest first"
    assert bool(graphs.replayed) == is_captured
    assert runner.captured_sizes == sorted(graphs.sizes)


def test_overlap_graphs_and_padding_change_no_byte(model):
    """Drawn rows and log-probabilities: of the plain engine, step by step, and of captured steps that overlap.

    Padding rows are in each of these, and what the trash block holds from before is of no matter.
    """
    params = {"temperature": 0.9, "top_p": 0.95, "seed": 3, "logprobs": 2}
    expected = generate(make(model, None, None)[0], **params)
    engine, runner = make(model, True, FakeGraphs())
    for cache in runner._attention.caches:
        for tensor in (cache.keys, cache.values):
            tensor[runner._attention.trash_block] = float("nan")
    assert generate(engine, **params) == expected
    assert runner.profile()["padding_tokens"] > 0


def test_padding_writes_to_the_trash_block_alone(model):
    engine, runner = make(model, True, FakeGraphs())
    runner._batch.fill(6, [], [], [])
    before = [cache.keys.clone() for cache in runner._attention.caches]
    runner._replays[6]()
    for old, cache in zip(before, runner._attention.caches, strict=True):
        changed = (old != cache.keys).flatten(2).any(dim=2)
        assert set(changed.any(dim=1).nonzero().flatten().tolist()) <= {runner._attention.trash_block}
        assert changed[runner._attention.trash_block].sum() <= 6
    assert runner._attention.trash_block == NUM_BLOCKS, "the pool hands out blocks below that"
    assert engine.has_unfinished() is False


def test_a_plan_without_room_is_not_captured(model):
    """Contexts that share blocks can have more splits than the pool has: such a step runs kernel by kernel."""
    _, runner = make(model, True, FakeGraphs())
    batch = runner._batch
    table = list(range(10))
    spans = [Span(row, 158, 1, table) for row in range(4)]
    assert batch.fill(4, [1] * 4, spans, [0, 1, 2, 3])
    whole = batch.room(4)
    for field in ("items", "partials", "queries", "merges"):
        batch.room = lambda size, field=field: dataclasses.replace(whole, **{field: 1})
        assert not batch.fill(4, [1] * 4, spans, [0, 1, 2, 3])


@pytest.mark.parametrize("window", [None, 30, 200])
def test_plans_without_a_loop_are_those_with_one(window):
    generator = torch.Generator().manual_seed(1)
    contexts = [1, 64, 65, 128, 129, 640, *torch.randint(1, 700, (20,), generator=generator).tolist()]
    tables = list(range(40, 40 + len(contexts)))
    spans = [QuerySpan(row, 1, context, tables[row]) for row, context in enumerate(contexts)]
    expected = plan_attention(spans, group_size=3, sliding_window=window, split=64)
    found = plan_decode(np.array(contexts), np.array(tables), group_size=3, sliding_window=window, split=64)
    for field in dataclasses.fields(expected):
        ours, theirs = getattr(found, field.name), getattr(expected, field.name)
        same = torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs
        assert same, field.name


def test_the_kernels_choose_what_the_host_would():
    """Greedy, drawn and filtered rows, with scores: tokens are equal, log-probabilities to the last bits."""
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(2)) * 3
    head = HeadOutput.of_logits(logits, range(5))
    kinds = [{"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 9}, {"top_p": 0.8, "temperature": 1.0},
             {"min_p": 0.1, "temperature": 1.0}]  # fmt: skip
    rows = [SamplingRow(SamplingParams(**kind), seed, 4 + seed) for seed, kind in enumerate(kinds)]
    results = [
        DeviceSampler(Sampler(), CPU, uses_kernels=uses_kernels).launch(head, rows, {0: 2, 3: 0, 4: 3}).collect()
        for uses_kernels in (False, True)
    ]
    (tokens, scores), (kernel_tokens, kernel_scores) = results
    assert tokens == kernel_tokens == Sampler().choose(head, rows)
    for row, score in scores.items():
        other = kernel_scores[row]
        assert (other.token_id, other.rank) == (score.token_id, score.rank)
        assert [token for token, _ in other.top] == [token for token, _ in score.top]
        assert other.logprob == pytest.approx(score.logprob, abs=1e-5)
        assert score == score_token(logits[row], tokens[row], {0: 2, 3: 0, 4: 3}[row])


def test_a_model_that_cannot_be_captured_runs_eagerly(model, caplog):
    class Refusing:
        def capture(self, run):
            raise RuntimeError("operation not permitted when stream is capturing")

    _, runner = make(model, True, Refusing())
    assert runner.captured_sizes == []
    assert "not permitted" in caplog.text


def test_enforce_eager_captures_nothing(model):
    graphs = FakeGraphs()
    _, runner = make(model, True, graphs, enforce_eager=True)
    assert graphs.sizes == runner.captured_sizes == []


def test_sizes_are_padded_by_less_than_a_block():
    assert padded_sizes(1) == [1]
    assert padded_sizes(40) == [1, 2, 4, 8, 16, 24, 32, 40]
    assert padded_sizes(300)[-5:] == [248, 256, 272, 288, 300]
    assert padded_sizes(5000)[-1] == 512
    assert padded_sizes(3, 4) == [4]
    sizes = padded_sizes(512)
    assert max(b - a for a, b in itertools.pairwise(sizes)) <= 16
    assert [padded_size(sizes, n) for n in (1, 3, 9, 257, 512, 513)] == [1, 4, 16, 272, 512, None]


def test_blocks_are_counted_from_what_is_measured(model):
    """By hand: a block of 16 tokens, 1 layer, 2 heads of 16 for keys and values, 4 bytes: 4,096 bytes."""
    memory = FakeMemory(total=2_000_000, others=50_000, weights=300_000, peaks=[200_000])
    runner = GpuRunner(loaded(model), config(num_kv_blocks=None, enforce_eager=True), memory=memory)
    profile = runner.memory
    assert (profile.others, profile.weights, profile.graphs) == (50_000 - 0, 300_000, 0)
    # left before partial results: 1,800,000 - 50,000 - 300,000 - 200,000 = 1,250,000: 305 blocks, 4,880 tokens.
    # 6 rows of one split of 512 each need 6 partials of 4 heads of 17 floats: 1,632 bytes
    assert profile.step == 200_000 + 1_632
    assert runner.num_blocks == (1_250_000 - 1_632) // 4_096 - 1
    assert runner._attention.caches[0].keys.shape[0] == runner.num_blocks + 1


def test_a_cache_too_small_for_one_sequence_is_refused_with_numbers():
    profile = MemoryProfile(80 * GIB, 0.9, others=1 * GIB, weights=60 * GIB, step=5 * GIB, graphs=2 * GIB)
    assert profile.for_cache == 4 * GIB
    block = 2 * 1024**2
    assert profile.num_blocks(block, 16, 16_384) == 2047
    with pytest.raises(ModelError) as caught:
        profile.num_blocks(block, 16, 131_072)
    message = caught.value.message
    for part in (
        "max_model_len 131072 needs 16.00 GiB", "4.00 GiB are left", "0.9 of 80.00 GiB is 72.00 GiB", "weights take 60.00",
        "largest step 5.00", "graphs 2.00", "other users of the GPU 1.00", "at most 32752", "raise gpu_memory_utilization",
        "kv_cache_dtype int8",
    ):  # fmt: skip
        assert part in message


def test_a_largest_step_that_does_not_fit_is_refused_with_the_way_out():
    def explode():
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(ModelError, match="lower max_num_batched_tokens or max_num_seqs"):
        profile_memory(FakeMemory(10, 0, 5, [0]), 0.9, explode, None)


def test_backends_are_chosen_by_device_and_refused_with_the_way_out():
    layers, f32 = [LayerShape(2, 64, 64)], torch.float32
    cuda = torch.device("cuda")
    assert choose_backend(layers, 16, torch.bfloat16, cuda) == ("triton", None)
    name, reason = choose_backend([LayerShape(2, 64, 32)], 16, torch.bfloat16, cuda)
    assert name == "torch"
    assert "64 and 32" in reason
    assert isinstance(choose_attention(layers, 2, 16, f32, CPU, backend="triton"), TritonAttention)
    with pytest.raises(ModelError, match=r"attention_backend native cannot serve: .*cuda; use attention_backend auto"):
        choose_backend(layers, 16, f32, cuda, wanted="native")


def test_async_scheduling_is_refused_where_it_cannot_be(model):
    runner = engine_module.make_runner(loaded(model), config(num_kv_blocks=4))
    assert isinstance(runner, GpuRunner)
    plain = dataclasses.replace(config(num_kv_blocks=4), attention_backend="torch")
    assert type(engine_module.make_runner(loaded(model), plain)) is ModelRunner
    with pytest.raises(ModelError, match="async_scheduling needs a GPU"):
        engine_module.make_runner(loaded(model), dataclasses.replace(plain, async_scheduling=True))
