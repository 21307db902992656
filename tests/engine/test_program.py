"""All layers in one call into the kernels: the same bytes as layer by layer, and only where all of a layer is in it."""

import copy
from dataclasses import replace

import pytest
import torch

from batchinfer.engine.attention_groups import Span
from batchinfer.models.fused.families import FAMILIES
from batchinfer_kernels.cpu import KVShape, LogitsReduction, PagedKVCache, get_ops, native_decoder
from tests.engine.small_decoder import NumbersTokenizer, logits_of, make_forward, small_model

OWN_WAY = {"gemma2", "gemma3_text", "olmo2", "mixtral", "qwen3_moe"}
"""Norms after blocks or over all heads, and experts."""


@pytest.fixture(autouse=True)
def _own_products(monkeypatch):
    """As on a CPU whose tiles make them the faster ones; threads as before afterwards."""
    before = torch.get_num_threads()
    monkeypatch.setattr(get_ops(), "_packs", True)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_layers_in_one_call_give_the_same_bytes(family, quantization, monkeypatch):
    """Chunked prefill, a neighbour and decode steps; float32 queries with INT8 weights too, and blocks of a few tokens."""
    for name, tokens in (("BLOCKS_FROM", 4), ("BLOCK", 4), ("BLOCK_STEP", 2)):
        monkeypatch.setattr(native_decoder, name, tokens)
    model = small_model(family, hidden_size=64, intermediate_size=128, head_dim=16)
    for dtype in (torch.bfloat16, torch.float32) if quantization == "int8" else (torch.bfloat16,):
        forward, attention = make_forward(
            copy.deepcopy(model), dtype, quantization=quantization, tokenizer=NumbersTokenizer()
        )
        decoder = forward._decoder
        assert (decoder._program is None) == (family in OWN_WAY)
        torch.set_num_threads(2)  # which wait for each other between operations
        together = logits_of(forward, attention)[0]
        torch.set_num_threads(1)
        decoder._program = None
        one_by_one = logits_of(*_again(forward, attention))[0]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(together, one_by_one, strict=True))


@pytest.mark.parametrize("threads", [1, 2, 3, 8, 64])
def test_blocks_occupy_the_threads(threads):
    """Each of most a core's cache, whole steps of rows, and hardly a thread without one."""
    least = threads * native_decoder.BLOCKS_FROM
    assert native_decoder.block_of(least - 1, threads) == 0
    for tokens in range(least, 5 * least, 7):
        block = native_decoder.block_of(tokens, threads)
        assert 0 < block <= native_decoder.BLOCK
        assert block % native_decoder.BLOCK_STEP == 0
        turns = -(-tokens // (threads * native_decoder.BLOCK))
        assert 0.7 * threads * turns <= -(-tokens // block) <= threads * turns


def _again(forward, attention):
    for layer in attention.kv_cache.layers:  # nothing that was written before may help
        layer.keys.zero_()
        layer.values.zero_()
    return forward, attention


def test_the_parts_of_a_step_are_timed():
    forward, attention = make_forward(small_model("llama", intermediate_size=128), torch.bfloat16)
    forward._num_calls = 31  # the next one is looked at
    logits_of(forward, attention)
    spent = forward.profile()
    assert all(spent[f"{part}_ns"] > 0 for part in ("gemm", "attention", "elementwise", "head"))
    assert sum(spent[f"{part}_ns"] for part in ("gemm", "attention", "elementwise", "head")) <= spent["profiled_ns"]


def test_a_position_outside_of_the_table_is_refused():
    forward, attention = make_forward(small_model("llama", intermediate_size=128), torch.bfloat16)
    program = forward._decoder._program
    context = attention.context([Span(0, 0, 1, [0])], 1)
    with pytest.raises(ValueError, match="outside"):
        program(torch.zeros(1, 64), torch.tensor([10**6]), context)


def test_parts_that_do_not_fit_are_refused_before_anything_is_written():
    """Each would have the kernels write past the end of something."""
    forward, attention = make_forward(small_model("llama", intermediate_size=128), torch.bfloat16)
    layers = forward._decoder._program._layers
    context = attention.context([Span(0, 0, 2, [0])], 2)
    caches, tokens = attention.kv_cache.layers, (torch.zeros(2, 64), torch.arange(2), context.slots)
    plan = context.plan(caches[0], 4)
    layers(*tokens, caches, plan)
    with pytest.raises(ValueError, match="the plan has 2 tokens"):
        layers(torch.zeros(1, 64), torch.arange(1), context.slots[:1], caches, plan)
    with pytest.raises(ValueError, match="2 caches for 3 layers"):
        layers(*tokens, caches[1:], plan)
    other = PagedKVCache([KVShape(1, 16, 16)] * 3, 16, 16, torch.bfloat16)
    with pytest.raises(ValueError, match="not what its layer writes"):
        layers(*tokens, other.layers, plan)
    fewer = PagedKVCache([KVShape(2, 16, 16)] * 3, 4, 16, torch.bfloat16)
    with pytest.raises(ValueError, match="the plan was made for 16 blocks"):
        layers(*tokens, fewer.layers, plan)
    first = layers._layers[0]
    with pytest.raises(ValueError, match=r"gate_up is \[256, 64\]; it must be \[128, 64\]"):
        get_ops().layers([replace(first, down=first.o)], torch.bfloat16)


def test_a_head_keeps_logits_only_where_all_words_have_room():
    forward, _ = make_forward(small_model("llama", intermediate_size=128), torch.bfloat16)
    program = forward._decoder._head._program
    rows = torch.ones(2, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="keeps 95 columns; there are 96 words"):
        program(rows, LogitsReduction(2, kept=[1], num_columns=95))
