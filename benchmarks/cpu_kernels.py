"""Times the CPU kernels beside the torch way of doing the same: python benchmarks/cpu_kernels.py [--threads N].

Each pair is run in turns and the best of its rounds is kept, so that other load on the machine falls on both. The model
shape is SmolLM2-135M: hidden 576, 9 query and 3 KV heads of 64, MLP 1536, 49,152 words.
"""

from __future__ import annotations

import argparse
import platform
import time
from typing import TYPE_CHECKING, NamedTuple

import torch

from batchinfer_kernels.cpu import (
    Accumulated,
    AttentionBatch,
    Int8Recipe,
    KVShape,
    LogitsReduction,
    PagedKVCache,
    RotaryEmbedding,
    TorchOps,
    get_ops,
    is_available,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batchinfer_kernels.cpu import Ops

HIDDEN, MLP, VOCAB = 576, 1536, 49_152
HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
BLOCK_SIZE = 16
ATTENTION = {
    "decode, 64 contexts of 64-1024": ([1] * 64, [64 + 15 * i for i in range(64)]),
    "decode, 64 contexts of 160": ([1] * 64, [160] * 64),
    "decode, 4 contexts of 4096": ([1] * 4, [4096] * 4),
    "prefill of 512": ([512], [512]),
    "prefill, 16 of 32": ([32] * 16, [32] * 16),
    "chunk of 128 after 1920": ([128], [2048]),
}


class Case(NamedTuple):
    """One line of the table: the same work by the kernel and by torch."""

    name: str
    kernel: Callable[[], object]
    torch_way: Callable[[], object]


def attention_case(
    ops: Ops, label: str, queries: list[int], contexts: list[int], dtype: torch.dtype, *, shared: int = 0
) -> Case:
    """Paged attention against gathering the KV into one padded batch, with the group of a KV head folded into queries.

    ``shared`` tokens are the same blocks in every sequence.
    """
    counts = [-(-context // BLOCK_SIZE) for context in contexts]
    layer = PagedKVCache([KVShape(KV_HEADS, HEAD_DIM, HEAD_DIM)], sum(counts), BLOCK_SIZE, dtype).layer(0)
    layer.keys.copy_(torch.randn_like(layer.keys))
    layer.values.copy_(torch.randn_like(layer.values))
    free = torch.randperm(sum(counts)).tolist()
    tables = [[free.pop() for _ in range(count)] for count in counts]
    for table in tables[1:]:
        table[: shared // BLOCK_SIZE] = tables[0][: shared // BLOCK_SIZE]
    query = torch.randn(sum(queries), HEADS, HEAD_DIM).to(dtype)
    plan = ops.plan_attention(AttentionBatch.of(queries, contexts, tables), layer, HEADS)

    slots = [layer.context_slots(torch.tensor(t), c) for t, c in zip(tables, contexts, strict=True)]
    # what a torch engine would keep: [num_kv_heads, slots, head_dim], so that a gather is one index_select
    keys, values = (x.transpose(0, 1).contiguous() for x in layer.gather(torch.arange(layer.num_blocks * BLOCK_SIZE)))
    padded = torch.nn.utils.rnn.pad_sequence(slots, batch_first=True)
    (count, longest), most, group = padded.shape, max(queries), HEADS // KV_HEADS
    positions = torch.tensor(contexts).unsqueeze(1) - most + torch.arange(most)
    hidden = (torch.arange(longest) > positions.unsqueeze(-1)).unsqueeze(1)

    def torch_way() -> torch.Tensor:
        k, v = (x.index_select(1, padded.flatten()).view(KV_HEADS * count, longest, HEAD_DIM) for x in (keys, values))
        q = query.view(count, most, KV_HEADS, group, HEAD_DIM).permute(2, 0, 3, 1, 4)
        scores = torch.bmm(q.reshape(KV_HEADS * count, group * most, HEAD_DIM), k.transpose(1, 2)) * HEAD_DIM**-0.5
        scores = scores.view(KV_HEADS, count, group, most, longest).masked_fill_(hidden, float("-inf"))
        weights = torch.softmax(scores, dim=-1).view(KV_HEADS * count, group * most, longest)
        return torch.bmm(weights, v).view(KV_HEADS, count, group, most, HEAD_DIM).permute(1, 3, 0, 2, 4)

    name = f"attention {str(dtype).removeprefix('torch.')}: {label}"
    return Case(name, lambda: ops.paged_attention(query, layer, plan, scale=HEAD_DIM**-0.5), torch_way)


def row_cases(ops: Ops, rows: int) -> Iterator[Case]:
    """Norm, activation, rope and head, each fused against plain torch."""
    plain = TorchOps()
    x, stream, weight = torch.randn(rows, HIDDEN).bfloat16(), torch.randn(rows, HIDDEN), torch.rand(HIDDEN)
    gate_up = torch.randn(rows, 2 * MLP).bfloat16()
    smooth = Int8Recipe(torch.rand(HIDDEN) + 0.5, 64)
    norm = {"residual": stream, "out_dtype": torch.bfloat16}
    yield Case(
        f"residual + rms_norm, {rows} rows",
        lambda: ops.rms_norm(x, weight, 1e-5, **norm),
        lambda: plain.rms_norm(x, weight, 1e-5, **norm),
    )
    yield Case(
        f"residual + rms_norm + rotate + int8, {rows} rows",
        lambda: ops.rms_norm_int8(x, weight, 1e-5, residual=stream, recipe=smooth),
        lambda: plain.rms_norm_int8(x, weight, 1e-5, residual=stream, recipe=smooth),
    )
    yield Case(
        f"silu_and_mul, {rows} rows",
        lambda: ops.act_and_mul(gate_up, "silu"),
        lambda: torch.nn.functional.silu(gate_up[:, :MLP]) * gate_up[:, MLP:],
    )
    product = Accumulated(gate_up.mul(1000).int(), torch.rand(rows), torch.rand(2 * MLP) * 1e-3)
    yield Case(
        f"int8 product: silu_and_mul + int8, {rows} rows",
        lambda: ops.act_and_mul_int8(product, "silu"),
        lambda: plain.act_and_mul_int8(product, "silu"),
    )
    yield rope_case(ops, plain, rows)
    logits = torch.randn(rows, VOCAB)
    yield Case(
        f"argmax of fp32 logits, {rows} rows",
        lambda: ops.reduce_logits(LogitsReduction(rows), logits, 0),
        lambda: logits.argmax(dim=1),
    )
    narrow = logits.bfloat16()
    yield Case(
        f"argmax + top 20 + log-sum-exp of bf16 logits, {rows} rows",
        lambda: ops.reduce_logits(LogitsReduction(rows, top_k=20, log_sum_exp=True), narrow, 0),
        lambda: (narrow.float().topk(20, dim=1), narrow.float().logsumexp(dim=1)),
    )


def rope_case(ops: Ops, plain: Ops, rows: int) -> Case:
    """Rotate queries and keys of a merged projection and write the cache."""
    layer = PagedKVCache([KVShape(KV_HEADS, HEAD_DIM, HEAD_DIM)], rows, BLOCK_SIZE, torch.bfloat16).layer(0)
    merged = torch.randn(rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM).bfloat16()
    parts = merged.split([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM], dim=1)
    rope = RotaryEmbedding(torch.rand(2048, HEAD_DIM // 2), torch.rand(2048, HEAD_DIM // 2))
    positions = torch.randint(2048, (rows,))
    slots = torch.randperm(rows * BLOCK_SIZE)[:rows]

    def run(which: Ops) -> Callable[[], object]:
        return lambda: which.rope_and_kv_write(*parts, rope, positions=positions, slots=slots, layer=layer)

    return Case(f"rope + KV write, {rows} rows", run(ops), run(plain))


def best_of(case: Case, rounds: int) -> tuple[float, float]:
    """Microseconds of the kernel and of torch, the best of alternating rounds."""
    best = [float("inf"), float("inf")]
    for _ in range(rounds):
        for which, run in enumerate(case[1:]):
            started = time.perf_counter()
            run()
            best[which] = min(best[which], time.perf_counter() - started)
    return best[0] * 1e6, best[1] * 1e6


def cases(ops: Ops) -> Iterator[Case]:
    """All lines."""
    for dtype in (torch.bfloat16, torch.float32):
        for label, (queries, contexts) in ATTENTION.items():
            yield attention_case(ops, label, queries, contexts, dtype)
    for shared in (512, 2048):
        contexts = [shared + 64] * 64
        label = f"decode, 64 that share {shared} of {shared + 64}"
        yield attention_case(ops, label, [1] * 64, contexts, torch.bfloat16, shared=shared)
        yield attention_case(ops, f"the same, private copies ({shared})", [1] * 64, contexts, torch.bfloat16)
    for rows in (64, 512):
        yield from row_cases(ops, rows)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print(f"{is_available()[1]}; {platform.processor() or platform.machine()}, {arguments.threads} threads")
    print(f"torch {torch.__version__}; best of {arguments.rounds} alternating rounds, microseconds\n")
    print(f"{'':64} {'kernel':>9} {'torch':>9} {'ratio':>7}")
    for case in cases(get_ops()):
        kernel, torch_way = best_of(case, arguments.rounds)
        print(f"{case.name:64} {kernel:9.0f} {torch_way:9.0f} {torch_way / kernel:7.1f}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
