"""Run by test_sanitizers.py under AddressSanitizer: every op on small tensors of awkward sizes, on two threads."""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from batchinfer_kernels.cpu import (
    Accumulated,
    AttentionBatch,
    Int8Recipe,
    KVShape,
    LogitsReduction,
    PackedLayer,
    PackedProjection,
    PackedWeights,
    PagedKVCache,
    RotaryEmbedding,
    native_decoder,
    native_ops,
)
from batchinfer_kernels.cpu.operands import PLAIN_INT8
from batchinfer_kernels.cpu.variants import variant_named


def main(variant, folder, flags):
    torch.set_num_threads(2)
    ops = native_ops(variant_named(variant), folder=Path(folder), extra_flags=tuple(flags))
    for columns in (1, 15, 33, 128):
        rows(ops, columns)
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        for shape, heads, block_size in ((KVShape(2, 64, 64), 6, 16), (KVShape(1, 13, 80), 20, 48)):
            attention(ops, shape, heads, block_size, dtype)
    native_decoder.BLOCKS_FROM, native_decoder.BLOCK, native_decoder.BLOCK_STEP = 10, 16, 4
    for weights in (torch.int8, torch.bfloat16):
        for num_tokens in (1, 17, 37):
            decoder(ops, weights, num_tokens)
    print("clean")


def rows(ops, columns):
    x = torch.randn(600, 2 * columns).bfloat16()
    x[3, 0], x[4, 0] = float("nan"), float("inf")
    half = x[:, :columns]
    recipe = Int8Recipe(torch.ones(columns), 16 if columns % 16 == 0 else 0)
    for residual in (None, torch.zeros(600, columns), torch.zeros(600, columns).bfloat16()):
        ops.rms_norm_int8(half, torch.ones(columns), 1e-6, residual=residual, recipe=recipe)
    for activation in ("silu", "gelu_tanh"):
        ops.act_and_mul_int8(x, activation, recipe=recipe)
        ops.act_and_mul(x, activation)
    product = Accumulated(
        torch.ones(600, columns, dtype=torch.int32), torch.ones(600), torch.ones(columns), torch.ones(columns)
    )
    ops.convert(product, torch.bfloat16)
    reduction = LogitsReduction(600, top_k=40, log_sum_exp=True, kept=[599, 3], num_columns=2 * columns)
    ops.reduce_logits(reduction, x, 0, softcap=3.0)


def attention(ops, shape, heads, block_size, dtype):
    layout = [(1, 1), (33, 33), (1, 300), (2, 600), (1, 600), (90, 270)]
    counts = [-(-context // block_size) for _, context in layout]
    layer = PagedKVCache([shape], sum(counts), block_size, dtype).layer(0)
    free = torch.randperm(sum(counts)).tolist()
    tables = [[free.pop() for _ in range(count)] for count in counts]
    tables[4][: 512 // block_size] = tables[3][: 512 // block_size]
    half = shape.head_dim // 2
    rope = RotaryEmbedding(torch.ones(600, half), torch.ones(600, half), q_norm=torch.ones(shape.head_dim))
    for (_, context), table in zip(layout, tables, strict=True):
        slots = layer.context_slots(torch.tensor(table), context)
        key = torch.randn(context, shape.num_kv_heads * shape.head_dim)
        value = torch.randn(context, shape.num_kv_heads * shape.v_head_dim)
        query = torch.randn(context, heads * shape.head_dim)
        ops.rope_and_kv_write(query, key, value, rope, positions=torch.arange(context), slots=slots, layer=layer)
    queries = [n for n, _ in layout]
    batch = AttentionBatch.of(queries, [context for _, context in layout], tables)
    query = torch.randn(sum(queries), heads, shape.head_dim).to(torch.bfloat16 if dtype == torch.int8 else dtype)
    plan = ops.plan_attention(batch, layer, heads)
    assert plan.num_partials > 0
    for options in ({}, {"window": 7}, {"softcap": 4.0, "sinks": torch.zeros(heads)}):
        ops.paged_attention(query, layer, plan, scale=0.1, **options)


def decoder(ops, weights, num_tokens):
    """Two layers and a head in one call each, of sizes that fill no tile."""
    hidden, heads, kv_heads, dim, inner = 64, 4, 2, 16, 128

    def linear(columns, summed):
        packed = PackedWeights.of((torch.randn(columns, summed) * 9).to(weights))
        if weights == torch.bfloat16:
            return PackedProjection(packed, bias=torch.ones(columns))
        return PackedProjection(packed, torch.ones(columns), torch.ones(columns), Int8Recipe(torch.ones(summed), 64))

    rope = RotaryEmbedding(torch.ones(64, dim // 2), torch.ones(64, dim // 2))
    norm = SimpleNamespace(weight=torch.ones(hidden), eps=1e-6, offset=0.0)
    layers = [
        PackedLayer(
            linear((heads + 2 * kv_heads) * dim, hidden), linear(hidden, heads * dim), linear(2 * inner, hidden),
            linear(hidden, inner), norm, norm, rope, heads, kv_heads, dim, dim, "silu", 0.25, None, None,
        )
        for _ in range(2)
    ]  # fmt: skip
    caches = PagedKVCache([KVShape(kv_heads, dim, dim)] * 2, 4, 16, torch.bfloat16).layers
    plan = ops.plan_attention(AttentionBatch.of([num_tokens], [num_tokens], [[2, 0, 3]]), caches[0], heads)
    slots = caches[0].context_slots(torch.tensor([2, 0, 3]), num_tokens)
    run, residual = ops.layers(layers, torch.bfloat16), torch.randn(num_tokens, hidden)
    for _ in range(2):
        run(residual, torch.arange(num_tokens), slots, caches, plan)
    rows = ops.quantize(residual, recipe=PLAIN_INT8) if weights == torch.int8 else residual.bfloat16()
    head = ops.head([linear(96, hidden), linear(33, hidden)])
    head(rows, LogitsReduction(num_tokens))
    head(rows, LogitsReduction(num_tokens, log_sum_exp=True, kept=[0], num_columns=129))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
