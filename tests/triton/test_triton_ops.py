"""One call site serves both: the Triton ops and the CPU's torch ops, called alike, give the same."""

import pytest
import torch

from batchinfer_kernels.cpu.kv_cache import KVShape, PagedKVCache
from batchinfer_kernels.cpu.operands import (
    Accumulated,
    AttentionBatch,
    Int8Recipe,
    LogitsReduction,
    RotaryEmbedding,
)
from batchinfer_kernels.cpu.torch_ops import TorchOps
from batchinfer_kernels.lm_head import HeadWeights
from batchinfer_kernels.paged_kv import PagedKV
from batchinfer_kernels.triton_ops import HeadProduct, TritonOps
from tests.triton.checks import assert_quantized

HEADS, KV_HEADS, DIM, HIDDEN = 4, 2, 16, 64
F32, BF16 = torch.float32, torch.bfloat16


def caches() -> dict[str, object]:
    return {
        "torch": PagedKVCache([KVShape(KV_HEADS, DIM, DIM)], 16, 16, F32).layer(0),
        "triton": PagedKV.empty(16, 16, KV_HEADS, DIM, F32, "cpu"),
    }


def layer_of(ops: TorchOps | TritonOps, cache: object, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """A decoder layer's ops as a fused layer calls them: a chunk of 20 tokens, one of 3, and padding."""
    width = HEADS * DIM
    rows = ops.rms_norm(x, torch.linspace(0.5, 1.5, HIDDEN), 1e-5, residual=residual, out_dtype=F32)
    fused = rows @ torch.randn(HIDDEN, width + 2 * KV_HEADS * DIM, generator=torch.Generator().manual_seed(1))
    query, key, value = fused.split([width, KV_HEADS * DIM, KV_HEADS * DIM], dim=1)
    angles = torch.arange(64)[:, None] / torch.tensor([1.0, 3.0, 9.0, 30.0, 60.0, 90.0, 200.0, 500.0])
    rope = RotaryEmbedding(angles.cos(), angles.sin(), q_norm=torch.ones(DIM), k_norm=torch.full((DIM,), 0.5))
    positions = torch.tensor([*range(20), *range(3), 0])
    slots = torch.tensor([*range(48, 64), *range(16, 20), *range(96, 99), -1])
    q = ops.rope_and_kv_write(query, key, value, rope, positions=positions, slots=slots, layer=cache)
    batch = AttentionBatch.of([20, 3], [20, 3], [[3, 1], [6]])
    plan = ops.plan_attention(batch, cache, HEADS)
    attended = ops.paged_attention(q, cache, plan, scale=DIM**-0.5, window=9)
    return ops.act_and_mul(attended.flatten(1), "silu")


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_layers_ops_give_what_the_cpus_give(dtype):
    x = torch.randn(24, HIDDEN, generator=torch.Generator().manual_seed(0)).to(dtype)
    found, residuals = {}, {}
    for ops in (TorchOps(), TritonOps()):
        residuals[ops.name] = torch.ones(24, HIDDEN)
        found[ops.name] = layer_of(ops, caches()[ops.name], x, residuals[ops.name])
    torch.testing.assert_close(found["triton"], found["torch"], rtol=1e-4, atol=1e-5)
    assert torch.equal(residuals["triton"], residuals["torch"])
    assert (found["triton"][23] == 0).all()


@pytest.mark.parametrize("recipe", [Int8Recipe(), Int8Recipe(torch.linspace(0.5, 2, 64), 16)])
def test_int8_rows_are_the_cpus(recipe):
    x, weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(2)), torch.linspace(0.1, 1, 64)
    half = Int8Recipe(None if recipe.smoothing is None else recipe.smoothing[:32], recipe.rotation)
    rows = {
        ops.name: (
            ops.quantize(x, recipe=recipe),
            ops.rms_norm_int8(x, weight, 1e-6, residual=torch.ones(5, 64), weight_offset=1.0, recipe=recipe),
            ops.act_and_mul_int8(x, "gelu_tanh", recipe=half),
        )
        for ops in (TorchOps(), TritonOps())
    }
    for ours, theirs in zip(rows["triton"], rows["torch"], strict=True):
        assert_quantized((ours.values, ours.scales), (theirs.values, theirs.scales))


def test_logits_are_reduced_as_the_cpu_reduces_them():
    """Best, largest, log-sum-exp, kept rows, a row of NaN: without logits in memory on one side, in slices on the other."""
    generator = torch.Generator().manual_seed(7)
    x, w = (torch.randn(n, 32, generator=generator) for n in (4, 200))
    x[2, 5] = float("nan")
    options = {"top_k": 5, "log_sum_exp": True, "kept": [3, 1], "num_columns": 200}
    ours, theirs = LogitsReduction(4, **options), LogitsReduction(4, **options)
    TritonOps().reduce_logits(ours, HeadProduct(x, HeadWeights(w)), 0, scale=0.3, softcap=2.0)
    for first in (0, 90):
        part = slice(first, 90 if first == 0 else 200)
        TorchOps().reduce_logits(theirs, x @ w[part].T, first, scale=0.3, softcap=2.0)
    assert ours.has_nan.tolist() == theirs.has_nan.tolist() == [False, False, True, False]
    good = [0, 1, 3]
    for name in ("best", "best_index", "top_values", "top_indices"):
        torch.testing.assert_close(getattr(ours, name)[good], getattr(theirs, name)[good], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.log_sum_exp(), theirs.log_sum_exp(), rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-5, atol=1e-6)
    with pytest.raises(TypeError, match="HeadProduct"):
        TritonOps().reduce_logits(ours, x @ w.T, 0)


def test_a_layer_without_positions_norms_and_writes_as_it_is():
    found = {}
    generator = torch.Generator().manual_seed(8)
    q, k, v = (torch.randn(3, n * DIM, generator=generator) for n in (HEADS, KV_HEADS, KV_HEADS))
    rope = RotaryEmbedding(
        torch.empty(64, 0), torch.empty(64, 0), q_norm=torch.full((DIM,), 2.0), k_norm=torch.ones(DIM)
    )
    for ops in (TorchOps(), TritonOps()):
        cache = caches()[ops.name]
        slots, positions = torch.tensor([16, 17, 18]), torch.arange(3)
        query = ops.rope_and_kv_write(q, k, v, rope, positions=positions, slots=slots, layer=cache, out_dtype=F32)
        plan = ops.plan_attention(AttentionBatch.of([3], [3], [[1]]), cache, HEADS)
        found[ops.name] = ops.paged_attention(query, cache, plan, scale=0.25)
    torch.testing.assert_close(found["triton"], found["torch"], rtol=1e-4, atol=1e-5)


def test_what_only_the_cpu_has_is_refused():
    product = Accumulated(torch.zeros(2, 16, dtype=torch.int32), torch.ones(2), torch.ones(16))
    with pytest.raises(TypeError, match="int8_gemm"):
        TritonOps().convert(product, F32)
    with pytest.raises(TypeError, match="not made by these ops"):
        TritonOps().paged_attention(torch.zeros(1, 4, 16), caches()["triton"], None, scale=1.0)
