"""A model divided between ranks gives what the whole one gives; the truth is transformers' unpatched model.

Ranks are threads here; ``test_ranks.py`` has them as processes.
"""

import copy

import pytest
import torch
from transformers import AutoConfig

from batchinfer.errors import ModelError
from batchinfer.models.folder import defer_folder_part
from batchinfer.models.gguf import load_gguf_model
from batchinfer.models.gguf_file import GgufFile
from batchinfer.models.parallel.shard import PARALLEL_FAMILIES, Division, Shard, why_undivided
from tests.engine.small_decoder import CPU, STEPS, forward_of, logits_of, make_forward, probed, small_model
from tests.engine.test_gguf import tiny
from tests.engine.thread_ranks import run_ranks
from tests.gguf_writer import write_gguf


@pytest.fixture
def saved(tmp_path):
    """Save a small model as a folder."""

    def save(model):
        model.save_pretrained(tmp_path, max_shard_size="50KB")
        return tmp_path

    return save


def part_of(folder, shard, dtype=torch.float32):
    config = AutoConfig.from_pretrained(folder)
    return defer_folder_part(folder, config, shard, attn_implementation="eager", dtype=dtype)


def parallel_logits(
    folder, size, dtype=torch.float32, block_size=16, name="fused", quantization="none", steps=STEPS, **settings
):
    """Logits of rank 0, and the best words of each rank."""

    # not in the threads: transformers sets the process's default dtype while it builds a model
    parts = [part_of(folder, Shard(rank, size), dtype) for rank in range(size)]
    layers = [probed(part) for part in parts]

    def work(peers):
        own = parts[peers.rank], layers[peers.rank]
        forward, attention = forward_of(*own, dtype, True, quantization, block_size, None, None, peers)
        assert forward.name == name
        best = []

        def spy(*args, **kwargs):
            output = forward(*args, **kwargs)
            best.append(output.best_index)
            if peers.rank:
                output = type(output)(output.best, output.best_index, output.kept, _one_hot(output.best_index))
            return output

        return logits_of(spy, attention, steps=steps), best

    (found, best), *others = run_ranks(size, work, **settings)
    for _, other in others:
        assert all(map(torch.equal, best, other)), "every rank knows the best words"
    return found


def _one_hot(index):
    return torch.nn.functional.one_hot(index, 300).float()


def assert_as_unpatched(reference, logits, sequences, tolerance=2e-4):
    for ours, sequence in zip(logits, sequences, strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([sequence])).logits[0]
        assert expected.std() > 0.1, "the model must say something"
        assert (ours - expected).abs().max() < tolerance * expected.abs().max()


@pytest.mark.parametrize("family", sorted(PARALLEL_FAMILIES))
def test_two_ranks_equal_the_unpatched_model(family, saved):
    """Chunked prefill, a neighbour and decode steps, in fused layers; the vocabulary divides unevenly."""
    reference = small_model(family, vocab_size=97)
    assert_as_unpatched(reference, *parallel_logits(saved(copy.deepcopy(reference)), 2))


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "phi3", "granite"])
def test_two_ranks_in_transformers_modules(family, saved):
    """A block size that the kernels do not take: torch attention in transformers' own modules, as on any device."""
    reference = small_model(family, vocab_size=97)
    found = parallel_logits(saved(copy.deepcopy(reference)), 2, block_size=24, name="transformers")
    assert_as_unpatched(reference, *found)


@pytest.mark.parametrize(
    ("size", "heads"),
    [(4, (4, 2)), (4, (8, 1)), (3, (6, 3)), (2, (6, 2)), (6, (12, 3))],
    ids=["each KV head twice", "one KV head", "three ranks", "three queries a KV head", "six ranks"],
)
@pytest.mark.parametrize("block_size", [16, 24])
def test_more_ranks_and_repeated_kv_heads(size, heads, block_size, saved):
    reference = small_model("qwen3", num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=16)
    name = "fused" if block_size == 16 else "transformers"
    found = parallel_logits(saved(copy.deepcopy(reference)), size, block_size=block_size, name=name, one_shot_bytes=64)
    assert_as_unpatched(reference, *found)


def test_biases_of_products_that_are_summed_are_added_once(saved):
    reference = small_model("llama", attention_bias=True, mlp_bias=True)
    folder = saved(copy.deepcopy(reference))
    assert_as_unpatched(reference, *parallel_logits(folder, 2))
    assert_as_unpatched(reference, *parallel_logits(folder, 2, block_size=24, name="transformers"))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_bfloat16_is_no_further_from_the_truth_than_transformers(family, saved):
    reference = small_model(family)
    logits, sequences = parallel_logits(saved(copy.deepcopy(reference)), 2, torch.bfloat16)
    rounded = copy.deepcopy(reference).to(torch.bfloat16)
    for ours, sequence in zip(logits, sequences, strict=True):
        with torch.inference_mode():
            truth = reference(torch.tensor([sequence])).logits[0]
            theirs = rounded(torch.tensor([sequence])).logits[0].float()
        assert (ours - truth).abs().mean() < 1.2 * (theirs - truth).abs().mean()


def test_weight_only_int8_is_no_further_from_the_truth_than_on_one_device(saved):
    """Each rank has its own scales for its part of a row, so that they fit rather better."""
    reference = small_model("llama")
    folder = saved(copy.deepcopy(reference))
    alone, _ = logits_of(*make_forward(copy.deepcopy(reference), torch.float32, quantization="int8-weight-only"))
    shared, sequences = parallel_logits(folder, 2, quantization="int8-weight-only")
    for one, two, sequence in zip(alone, shared, sequences, strict=True):
        with torch.inference_mode():
            truth = reference(torch.tensor([sequence])).logits[0]
        assert 0 < (two - truth).abs().mean() < 1.2 * (one - truth).abs().mean()


def test_the_same_bytes_run_after_run_and_however_sums_are_exchanged(saved):
    """Three ranks: sums of one exchange and of two have the same bytes, since either adds in the order of ranks."""
    model = small_model("qwen3", num_attention_heads=6, num_key_value_heads=3)
    folder = saved(model)
    first, _ = parallel_logits(folder, 3)
    again, _ = parallel_logits(folder, 3)
    in_two, _ = parallel_logits(folder, 3, one_shot_bytes=64)
    for one, two, three in zip(first, again, in_two, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


def test_a_sum_is_taken_in_the_order_of_ranks():
    """1e8 + 1 - 1e8 in float32 is 0 from the left and 1 in another order: every element of every shape shows it."""
    values = (1e8, 1.0, -1e8)
    expected = (torch.tensor(values[0]) + values[1]) + values[2]
    for shape in [(1,), (3, 5), (1000,), (64, 33)]:
        for limit in (0, 10**9):

            def work(peers, shape=shape):
                return peers.sum(torch.full(shape, values[peers.rank]))

            for total in run_ranks(3, work, one_shot_bytes=limit):
                assert torch.equal(total, expected.expand(shape))


def test_large_sums_of_many_ranks_move_a_share_each_way():
    counts = []
    run_ranks(4, lambda peers: peers.sum(torch.ones(1000)), counts, one_shot_bytes=1000)
    assert counts == [("all_to_all", 4000), ("all_gather", 1000)]


@pytest.mark.parametrize("family", ["llama", "phi3", "qwen2"])
def test_each_rank_reads_its_part_alone(family, saved):
    """Every number of a matrix is read by one rank; norms, which are small, by all."""
    whole = small_model(family, tie_word_embeddings=False)
    folder = saved(whole)
    parts = [dict(part_of(folder, Shard(rank, 2)).named_parameters()) for rank in (0, 1)]
    for name, weight in whole.named_parameters():
        numbers = [part[name].numel() for part in parts]
        if weight.dim() == 2:
            assert sum(numbers) == weight.numel(), name
            assert all(part[name].is_meta for part in parts), f"{name} must stay in its file"


def test_a_gguf_file_is_read_in_parts(tmp_path):
    """Rows of whole heads, which llama.cpp has reordered; what the ranks read makes up the whole tensor."""
    model = tiny("llama")
    path = tmp_path / "small.gguf"
    write_gguf(path, model, "llama")
    expected = dict(model.named_parameters())

    def load(shard):
        return load_gguf_model(
            GgufFile(path), attn_implementation="eager", dtype=torch.float32, device=CPU, shard=shard
        )

    parts = [dict(load(Shard(rank, 2)).named_parameters()) for rank in (0, 1)]
    for name, weight in expected.items():
        found = [part[name].load(None) if part[name].is_meta else part[name] for part in parts]
        dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
        joined = torch.cat(found, dim=dim) if weight.dim() == 2 else found[0]
        torch.testing.assert_close(joined, weight, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(
    ("fields", "size", "words"),
    [
        ({"num_attention_heads": 4, "num_key_value_heads": 2}, 3, ["4 query heads", "2 KV heads", "can be 1, 2, 4"]),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, 2, ["3 KV heads", "can be 1, 3, 6"]),
        ({"num_attention_heads": 4, "intermediate_size": 90}, 4, ["90 MLP columns", "can be 1, 2"]),
    ],
)
def test_heads_that_do_not_divide_are_refused_with_sizes_that_do(fields, size, words):
    config = small_model("llama", **{"hidden_size": 48, "num_hidden_layers": 1} | fields).config
    with pytest.raises(ModelError) as caught:
        Division(config, Shard(0, size))
    assert caught.value.param == "tensor_parallel_size"
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("family", ["olmo2", "mixtral", "qwen3_moe"])
def test_families_that_do_not_divide_say_why(family):
    reason = why_undivided(small_model(family).config, 2)
    assert f"a {family} model cannot be divided" in reason
    assert "use tensor_parallel_size 1" in reason
