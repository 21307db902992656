"""Every op of ``torch.ops.batchinfer``: its schema, what it says it writes to, its shapes, and that graphs can hold it."""

import pytest
import torch

from batchinfer_kernels import fp8_gemm, int4_gemm, library, routing
from batchinfer_kernels.attention_plan import QuerySpan, plan_attention
from batchinfer_kernels.paged_kv import PagedKV
from batchinfer_kernels.reference import quantize_rows
from tests.triton import interpreter

ADAPTER = (torch.ones(16, 32), torch.ones(24, 16))
"""Kept alive: the kernel is told their addresses."""
F32, BF16, I32 = torch.float32, torch.bfloat16, torch.int32


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=I32)


def int8_operands() -> tuple[torch.Tensor, ...]:
    return (*quantize_rows(randn(3, 32)), *quantize_rows(randn(16, 32)))


def attention_arguments() -> tuple[object, ...]:
    """One token over two splits, and a chunk of three."""
    cache = PagedKV.empty(12, 16, 1, 16, F32, "cpu")
    cache.keys.normal_()
    plan = plan_attention([QuerySpan(0, 1, 80, 0), QuerySpan(1, 3, 20, 1)], group_size=2, split=64)
    tables = torch.arange(12, dtype=I32).view(2, 6)
    tiles = [plan.small_tile, plan.large_tile, int(plan.has_small), int(plan.has_large)]
    return (
        randn(4, 2, 16), cache.keys, cache.values, None, None, tables, int32(79, 17, 18, 19),
        plan.items, plan.queries, plan.merges, plan.num_partials, tiles, 0.25,
    )  # fmt: skip


def lora_arguments() -> tuple[object, ...]:
    """Two adapters, one of which has nothing here."""
    addresses = [torch.tensor([matrix.data_ptr(), 0]) for matrix in ADAPTER]
    return (randn(3, 24), randn(3, 32), int32(2, 0), int32(0, 1, 2), *addresses, torch.tensor([16, 0]), 16, F32)


def examples() -> dict[str, tuple[tuple[object, ...], dict[str, object]]]:
    """Arguments of each op."""
    x, wide = randn(3, 32), randn(3, 64)
    a, a_scale, w, w_scale = int8_operands()
    sent = routing.route(randn(3, 4), 2)
    experts = (sent.weights, sent.order, sent.offsets)
    cache = PagedKV.empty(4, 16, 2, 16, torch.int8, "cpu")
    paged = (cache.keys, cache.values, cache.key_scale, cache.value_scale)
    heads, slots, tables = randn(3, 2, 16), int32(5, 40, -1), (torch.ones(9, 8), torch.zeros(9, 8))
    packed = int4_gemm.pack_int4(randn(16, 128))
    fp8 = [randn(rows, 32).to(fp8_gemm.FP8) for rows in (3, 16)]
    columns = (torch.ones(3), int32(0, 5, 0), torch.full((3,), 0.9).double(), torch.zeros(3).double())
    return {
        "rms_norm": ((x, randn(32), 1e-5, 1.0), {"residual": randn(3, 32)}),
        "rms_norm_quantize": ((x, randn(32), 1e-5), {"residual": randn(3, 32), "rotation": 16}),
        "act_and_mul": ((wide, "silu"), {}),
        "act_and_mul_quantize": ((wide, "gelu_tanh"), {"smoothing": torch.ones(32)}),
        "quantize_rows": ((x, torch.ones(2, 32)), {"rotation": 16, "source": int32(2, 0), "groups": int32(0, 1)}),
        "int8_gemm": (
            (a, w, w_scale, torch.int8),
            {"a_scale": a_scale, "bias": randn(16), "out_scale": torch.full((1,), 0.1)},
        ),
        "fp8_gemm": ((*fp8, a_scale, w_scale, F32), {}),
        "int4_gemm": ((randn(3, 128), *packed), {}),
        "grouped_gemm": ((x, randn(4, 16, 32), *experts, True, False, F32), {}),
        "combine_experts": ((randn(6, 16), sent.weights, F32), {"residual": randn(3, 16)}),
        "lora_add": (lora_arguments(), {}),
        "kv_write": ((heads, heads, slots, *paged), {}),
        "rope_and_kv_write": ((heads, heads, heads, int32(3, 4, 5), slots, *tables, *paged), {}),
        "paged_attention": (attention_arguments(), {}),
        "merge_states": ((randn(2, 3, 2, 16), randn(2, 3, 2)), {}),
        "embedding": ((int32(3, 0), randn(5, 32)), {"scale": 2.0}),
        "lm_head_argmax": ((x, randn(40, 32)), {}),
        "lm_head_reduce": (
            (a, w),
            {
                "x_scale": a_scale,
                "w_scale": w_scale,
                "top_k": 2,
                "place": int32(-1, 1, 0),
                "logits": torch.zeros(2, 16),
            },
        ),
        "sample": ((randn(3, 48), *columns, torch.arange(3), int32(0, 1, 2)), {}),
        "change_logits": (
            (
                randn(3, 48),
                int32(2, 0),
                [int32(0, 1, 1), int32(7), torch.ones(1)],
                [int32(0, 0, 2), int32(3, 4), int32(1, 0)],
                [torch.full((2,), 1.5)] * 3,
                torch.full((2, 2), -2, dtype=I32),
            ),
            {},
        ),
        "token_logprobs": ((randn(3, 48), int32(1, 2, 3), 2), {}),
    }


EXAMPLES = examples()


def test_every_op_has_an_example():
    registered = {
        name for name, value in vars(library).items() if isinstance(value, torch.library.CustomOpDef)
    }  # fmt: skip
    assert registered == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_ops_schema_and_shapes_are_true(name):
    """torch's own check: nothing else is written to or aliased, and the fake's shapes, types and strides are the real ones."""
    args, options = EXAMPLES[name]
    interpreter.reach(*ADAPTER)
    # torch's schema check multiplies its arguments, which no CPU does in float8
    checks = ("test_faketensor",) if name == "fp8_gemm" else ("test_schema", "test_faketensor")
    torch.library.opcheck(getattr(torch.ops.batchinfer, name).default, args, options, test_utils=checks)


def test_a_graph_holds_the_ops():
    """Two in a row, one of which changes its argument, in one full graph."""

    def layer(x, weight, residual, gate_up):
        rows = torch.ops.batchinfer.rms_norm(x, weight, 1e-5, 0.0, residual)
        return torch.ops.batchinfer.act_and_mul(rows @ gate_up, "silu")

    arguments = randn(3, 32), randn(32), randn(3, 32), randn(32, 64)
    expected_residual = arguments[2] + arguments[0]
    expected = layer(*[x.clone() for x in arguments])
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*arguments), expected)
    torch.testing.assert_close(arguments[2], expected_residual)
