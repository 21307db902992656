"""What it costs that a row's bytes never depend on its batch: each fixed choice beside the library's free one, in turn.

    python -m benchmarks.determinism [--threads 1] [--seconds 0.4]

Fixed are: at least four rows a product, one packing of the weights for all batch sizes, the head in slices of 2,048
words, and attention in splits of 256 tokens merged in order. Free is whatever is fastest for the batch at hand: rows as
they are, weights packed for exactly that many, the head at once, splits of 512 or 1,024. INT8 products sum exactly in
any order: only their rows could be padded. Shapes are those of SmolLM2-135M. The best CPU time of each counts, and a
step is the sum of its parts; the last column is what the fixed step takes longer.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from batchinfer.engine.model_runner import MIN_ROWS
from batchinfer.models.fused.head import SLICE_COLUMNS
from batchinfer.models.fused.int8_linear import Int8Linear
from batchinfer.models.fused.packed_linear import PackedLinear
from batchinfer_kernels.cpu import (
    AttentionBatch,
    Int8Recipe,
    Int8Rows,
    KVShape,
    LogitsReduction,
    PagedKVCache,
    get_ops,
)
from batchinfer_kernels.cpu.choice import native_ops
from batchinfer_kernels.cpu.variants import best_variant, cpu_features
from benchmarks.cpu_kernels import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, MLP, VOCAB
from benchmarks.machine import machine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchinfer_kernels.cpu import Ops

LAYERS = 30
PRODUCTS = ((HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM), (HEADS * HEAD_DIM, HIDDEN), (HIDDEN, 2 * MLP), (MLP, HIDDEN))
ROWS = (1, 4, 16, 64)
CONTEXT = 400
"""Tokens of a decoding row's context, on the average: from 100 to 700."""
SPLITS = (512, 1024)
BLOCK = 16
TURNS = 12


def best_of(ways: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """CPU seconds of the fastest run of each, run in turns, at least :data:`TURNS` times."""
    best = [float("inf")] * len(ways)
    for way in ways:
        way()
    end, turns = time.monotonic() + seconds, 0
    while turns < TURNS or time.monotonic() < end:
        turns += 1
        for at, way in enumerate(ways):
            started = time.process_time_ns()
            way()
            best[at] = min(best[at], (time.process_time_ns() - started) / 1e9)
    return best


def padded(rows: int) -> int:
    """Rows that a step computes."""
    return max(rows, MIN_ROWS)


def product_ways(ops: Ops, rows: int, size: tuple[int, int], dtype: torch.dtype) -> list[Callable[[], object]]:
    """Ours first, then the free ones."""
    columns, width = size
    if dtype == torch.int8:
        weight = torch.randint(-127, 127, (width, columns), dtype=torch.int8).t()
        linear = Int8Linear(ops, weight, torch.ones(width), None, Int8Recipe())
        return [_int8(linear, padded(rows), columns), _int8(linear, rows, columns)]
    mkldnn: Any = torch.ops.mkldnn
    weight = torch.randn(width, columns).to(dtype)
    ours = PackedLinear(ops, weight, None, dtype)
    packed = mkldnn._reorder_linear_weight(weight.contiguous(), rows)  # noqa: SLF001 -- as inductor, for this batch size
    pointwise = mkldnn._linear_pointwise  # noqa: SLF001 -- as above
    whole, exact = torch.randn(padded(rows), columns).to(dtype), torch.randn(rows, columns).to(dtype)
    return [
        lambda: ours(whole),
        lambda: pointwise(exact, packed, None, "none", [], ""),
        lambda: ours(exact),
        lambda: torch.nn.functional.linear(exact, weight),
    ]


def _int8(linear: Int8Linear, rows: int, columns: int) -> Callable[[], object]:
    values = Int8Rows(torch.ones(rows, columns, dtype=torch.int8), torch.ones(rows))
    return lambda: linear(values)


def head_ways(ops: Ops, rows: int, dtype: torch.dtype) -> list[Callable[[], object]]:
    """The head in slices and at once."""

    def head(slices: Sequence[Any], number: int) -> Callable[[], object]:
        if dtype == torch.int8:
            x: Any = Int8Rows(torch.ones(number, HIDDEN, dtype=torch.int8), torch.ones(number))
        else:
            x = torch.randn(number, HIDDEN).to(dtype)

        def run() -> None:
            reduction, at = LogitsReduction(number), 0
            for part in slices:
                logits = part(x)
                ops.reduce_logits(reduction, logits, at)
                at += (logits.values if dtype == torch.int8 else logits).shape[1]

        return run

    def linear() -> Any:
        if dtype == torch.int8:
            weight = torch.randint(-127, 127, (HIDDEN, VOCAB), dtype=torch.int8)
            return Int8Linear(ops, weight, torch.ones(VOCAB), None, Int8Recipe())
        return PackedLinear(ops, torch.randn(VOCAB, HIDDEN).to(dtype), None, dtype)

    sliced = linear().split(SLICE_COLUMNS)
    return [head(sliced, padded(rows)), head(sliced, rows), head([linear()], rows)]


def attention_ways(every: Sequence[Ops], rows: int, dtype: torch.dtype) -> list[Callable[[], object]]:
    """One layer with each of the libraries, which differ in their splits."""
    contexts = [100 + 600 * at // max(1, rows - 1) if rows > 1 else CONTEXT for at in range(rows)]
    counts = [-(-context // BLOCK) for context in contexts]
    layer = PagedKVCache([KVShape(KV_HEADS, HEAD_DIM, HEAD_DIM)], sum(counts), BLOCK, dtype).layer(0)
    tables, at = [], 0
    for number in counts:
        tables.append(list(range(at, at + number)))
        at += number
    query = torch.randn(rows, HEADS, HEAD_DIM).to(dtype)

    def way(ops: Ops) -> Callable[[], object]:
        plan = ops.plan_attention(AttentionBatch.of([1] * rows, contexts, tables), layer, HEADS)
        return lambda: ops.paged_attention(query, layer, plan, scale=0.125)

    return [way(ops) for ops in every]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.4)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ops = get_ops()
    variant = best_variant(cpu_features())
    print(machine())
    print("| precision | rows | products | head | attention | step | longer than free |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        others = [native_ops(variant, folder=Path(folder), extra_flags=(f"-DBI_SPLIT={size}",)) for size in SPLITS]
        for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16"), (torch.int8, "INT8")):
            for rows in ROWS:
                found = [best_of(product_ways(ops, rows, size, dtype), options.seconds) for size in PRODUCTS]
                kv = torch.bfloat16 if dtype == torch.int8 else dtype
                parts = {
                    "products": [LAYERS * sum(f[0] for f in found), LAYERS * sum(min(f) for f in found)],
                    "head": _two(best_of(head_ways(ops, rows, dtype), options.seconds)),
                    "attention": [
                        LAYERS * s for s in _two(best_of(attention_ways([ops, *others], rows, kv), options.seconds))
                    ],
                }
                fixed, free = (sum(part[which] for part in parts.values()) for which in (0, 1))
                cells = [f"{1e3 * ours:.2f} / {1e3 * best:.2f}" for ours, best in parts.values()]
                total = f"{1e3 * fixed:.2f} / {1e3 * free:.2f}"
                print(
                    f"| {name} | {rows} | {' | '.join(cells)} | {total} | {100 * (fixed / free - 1):.1f} % |",
                    flush=True,
                )


def _two(times: Sequence[float]) -> list[float]:
    return [times[0], min(times)]


if __name__ == "__main__":
    main()
