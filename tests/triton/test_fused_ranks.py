"""Ranks of tensor parallelism in fused layers on the Triton kernels, under the interpreter: transformers' logits.

Ranks are threads, as in ``tests/engine/test_tensor_parallel.py``.
"""

import copy
import threading

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

from batchinfer.engine.triton_attention import TritonAttention
from tests.engine import small_decoder
from tests.engine.small_decoder import small_model
from tests.engine.test_tensor_parallel import assert_as_unpatched, parallel_logits
from tests.triton.test_fused_layers import STEPS, largest_error, on_triton, truth

F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def triton_attention(monkeypatch):
    """What an engine on a GPU chooses; the interpreter is one for all threads, so kernels run one at a time."""
    lock, call = threading.Lock(), GridExecutor.__call__

    def one_at_a_time(self, *args, **kwargs):
        with lock:
            return call(self, *args, **kwargs)

    def choose(shapes, num_blocks, block_size, dtype, device, **_):
        return TritonAttention(shapes, num_blocks, block_size, dtype, device, split=64)

    monkeypatch.setattr(GridExecutor, "__call__", one_at_a_time)
    monkeypatch.setattr(small_decoder, "choose_attention", choose)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 1}),
        ("gemma2", {"head_dim": 32, "num_hidden_layers": 2}),
    ],
    ids=["llama, biases", "gemma2"],
)
def test_two_ranks_equal_the_unpatched_model(family, options, tmp_path):
    """Biases are added once, the vocabulary divides unevenly and is no multiple of a tile; norms, caps and windows."""
    reference = small_model(family, vocab_size=97, **options)
    copy.deepcopy(reference).save_pretrained(tmp_path)
    assert_as_unpatched(reference, *parallel_logits(tmp_path, 2, steps=STEPS), tolerance=3e-4)


def test_three_ranks_with_weight_only_int8_are_as_near_as_one_device(tmp_path, monkeypatch):
    """Each rank has scales of its own for its part of a row."""
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16, "intermediate_size": 96}
    model = small_model("qwen3", num_hidden_layers=1, **sizes)
    copy.deepcopy(model).save_pretrained(tmp_path)
    alone, _ = small_decoder.logits_of(
        *on_triton(model, F32, monkeypatch, quantization="int8-weight-only"), steps=STEPS
    )
    shared, sequences = parallel_logits(tmp_path, 3, quantization="int8-weight-only", steps=STEPS, one_shot_bytes=64)
    for one, three, tokens in zip(alone, shared, sequences, strict=True):
        exact = truth(model, tokens)
        assert 0 < (three - exact).abs().mean() < 1.2 * (one - exact).abs().mean()


def test_bfloat16_shares_are_no_further_from_the_truth_than_transformers(tmp_path):
    model = small_model("llama", num_hidden_layers=1)
    copy.deepcopy(model).save_pretrained(tmp_path)
    logits, sequences = parallel_logits(tmp_path, 2, BF16, steps=STEPS)
    rounded = copy.deepcopy(model).to(BF16)
    for ours, tokens in zip(logits, sequences, strict=True):
        exact = truth(model, tokens)
        with torch.inference_mode():
            theirs = rounded(torch.tensor([tokens])).logits[0].float()
        assert largest_error(ours, exact) > 0
        assert (ours - exact).abs().mean() < 1.2 * (theirs - exact).abs().mean()
