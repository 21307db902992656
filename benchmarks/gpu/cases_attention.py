"""Attention over the paged cache, what is written to it, and the merge of partial results."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from batchinfer_kernels.attention_plan import PrefixGroup, QuerySpan, plan_attention
from batchinfer_kernels.kv_write import kv_write_reference
from batchinfer_kernels.merge_states import merge_states_reference
from batchinfer_kernels.paged_attention import AttentionForm, paged_attention_reference
from batchinfer_kernels.paged_kv import PagedKV
from batchinfer_kernels.reference import quantize_rows
from batchinfer_kernels.rope_and_kv_write import Rope, rope_and_kv_write_reference
from benchmarks.gpu.case import (
    BF16,
    F32,
    FLOATS,
    I8,
    I32,
    NAMES,
    ROUNDING,
    Call,
    Case,
    Work,
    excess,
    num_bytes,
    op,
    quantized,
    randn,
    rms,
    rounded,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from benchmarks.gpu.case import Sizes

DECODE_GOAL = 0.8
WINDOW, SOFTCAP = 128, 30.0


def attention_cases(sizes: Sizes) -> list[Case]:
    """Decode, prefill and mixed steps; plain and with all that a layer may add; every type of queries and of caches."""
    heads = f"{sizes.heads[0]}/{sizes.heads[1]} heads of {sizes.head_dim}"
    decode = [QuerySpan(i, 1, sizes.context, i) for i in range(sizes.sequences)]
    ragged = [replace(span, context=max(1, span.context - 37 * i)) for i, span in enumerate(decode)]
    chunk = [QuerySpan(0, sizes.chunk, sizes.chunk, 0)]
    mixed = [*ragged, QuerySpan(len(ragged), sizes.chunk // 4, sizes.chunk // 2, len(ragged))]
    at = f"{sizes.sequences} x {sizes.context}, {heads}"
    found = []
    for dtype in FLOATS:
        kind = NAMES[dtype]
        goal = None if dtype == F32 else DECODE_GOAL
        found += [
            Case("paged_attention", f"decode {kind} {at}", dtype, partial(_attend, sizes, decode, dtype, dtype), goal),
            Case("paged_attention", f"decode {kind}, int8 cache, {at}", dtype, partial(_attend, sizes, decode, dtype, I8), goal),
            Case("paged_attention", f"prefill {kind} {sizes.chunk}, {heads}", dtype, partial(_attend, sizes, chunk, dtype, dtype)),
        ]  # fmt: skip
    plain = partial(_attend, sizes)
    extra = {"sliding_window": WINDOW, "softcap": SOFTCAP}
    found += [
        Case("paged_attention", f"prefill bf16, int8 cache, {sizes.chunk}", BF16, partial(plain, chunk, BF16, I8)),
        Case("paged_attention", f"mixed bf16, ragged, {at}", BF16, partial(plain, mixed, BF16, BF16)),
        Case("paged_attention", f"decode bf16, window, softcap, sinks, {at}", BF16,
             partial(plain, ragged, BF16, BF16, **extra)),
        Case("paged_attention", f"decode bf16, {sizes.shared} tokens shared, {at}", BF16,
             partial(plain, decode, BF16, BF16, shared=sizes.shared)),
    ]  # fmt: skip
    m = sizes.tokens
    for dtype in FLOATS:
        for cache in (dtype, I8):
            name = f"{NAMES[dtype]}{', int8 cache' if cache == I8 else ''} {m} tokens, {heads}"
            found.append(Case("kv_write", name, dtype, partial(_write, sizes, m, dtype, cache)))
            found.append(Case("rope_and_kv_write", name, dtype, partial(_rope, sizes, m, dtype, cache, False)))
    found += [
        Case("rope_and_kv_write", f"bf16, interleaved, norms, {m} tokens, {heads}", BF16, partial(_rope, sizes, m, BF16, BF16, True)),
        Case("merge_states", f"f32 4 x {m}, {heads}", F32, partial(_merge, sizes, m)),
    ]  # fmt: skip
    return found


def _filled(sizes: Sizes, num_blocks: int, dtype: torch.dtype, device: torch.device) -> PagedKV:
    shape = (num_blocks, sizes.block_size, sizes.heads[1], sizes.head_dim)
    k, v = (randn(device, *shape, seed=seed) for seed in (1, 2))
    if dtype != I8:
        return PagedKV(k.to(dtype), v.to(dtype))
    (keys, key_scale), (values, value_scale) = quantize_rows(k), quantize_rows(v)
    scales = [scale.transpose(1, 2).contiguous() for scale in (key_scale, value_scale)]
    return PagedKV(keys, values, *scales)


def _attend(
    sizes: Sizes, spans: Sequence[QuerySpan], dtype: torch.dtype, cache: torch.dtype, device: torch.device,
    *, sliding_window: int | None = None, softcap: float | None = None, shared: int = 0,
) -> Call:  # fmt: skip
    """Blocks of all sequences are shuffled; with ``shared`` all begin with the same ones."""
    num_heads, num_kv_heads = sizes.heads
    counts = [-(-span.context // sizes.block_size) for span in spans]
    num_shared = shared // sizes.block_size
    pool = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).int()
    tables = torch.zeros(len(spans), max(counts), dtype=I32)
    used = 0
    for row, count in enumerate(counts):
        tables[row, :count] = pool[used : used + count]
        used += count
    tables[:, :num_shared] = tables[0, :num_shared]
    kv = _filled(sizes, len(pool), cache, device)
    q = randn(device, sum(span.num_queries for span in spans), num_heads, sizes.head_dim, dtype=dtype)
    positions = torch.cat([torch.arange(s.context - s.num_queries, s.context) for s in spans]).int().to(device)
    sinks = randn(device, num_heads, seed=4) if softcap else None
    form = AttentionForm(sizes.head_dim**-0.5, sliding_window, softcap, sinks)
    groups = [PrefixGroup(tuple(range(len(spans))), shared)] if shared else []
    plan = plan_attention(
        spans, group_size=num_heads // num_kv_heads, sliding_window=sliding_window, prefix_groups=groups
    ).to(device)
    run = partial(
        op("paged_attention"), q, kv.keys, kv.values, kv.key_scale, kv.value_scale, tables.to(device), positions,
        plan.items, plan.queries, plan.merges, plan.num_partials,
        [plan.small_tile, plan.large_tile, int(plan.has_small), int(plan.has_large)],
        form.scale, sliding_window, softcap, sinks,
    )  # fmt: skip
    expected = partial(paged_attention_reference, q, kv, tables.to(device), spans, form)
    work = _attention_work(sizes, spans, q, kv, sliding_window, shared)
    is_plain = not (sliding_window or softcap or shared) and cache == dtype and len({s.context for s in spans}) == 1
    peer = ("scaled_dot_product_attention", _sdpa(sizes, spans, q, device)) if is_plain else None
    return Call(run, expected, _attended, work, peer)


def _attention_work(
    sizes: Sizes, spans: Sequence[QuerySpan], q: torch.Tensor, kv: PagedKV, window: int | None, shared: int
) -> Work:
    seen = [min(span.context, (window or span.context) + span.num_queries - 1) for span in spans]
    read = sum(seen) - shared * (len(spans) - 1)
    per_token = 2 * sizes.heads[1] * (sizes.head_dim * kv.keys.element_size() + (4 if kv.is_int8 else 0))
    pairs = 0.0
    for span in spans:
        first = span.context - span.num_queries
        pairs += sum(min(window or span.context, first + i + 1) for i in range(span.num_queries))
    operations = 4.0 * pairs * sizes.heads[0] * sizes.head_dim
    return Work(read * per_token + num_bytes(q, q), operations, None if q.dtype == F32 else "bf16")


def _attended(actual: Any, expected: Any) -> float:
    """The output's rounding and that of the softmax's weights."""
    tolerance = 2 * ROUNDING[actual.dtype]
    return excess(actual, expected, tolerance, tolerance * rms(expected))


def _sdpa(
    sizes: Sizes, spans: Sequence[QuerySpan], q: torch.Tensor, device: torch.device
) -> Callable[[], torch.Tensor]:
    """Torch's attention of the same sizes, over keys and values that lie together."""
    span = spans[0]
    k, v = (
        randn(device, len(spans), sizes.heads[1], span.context, sizes.head_dim, dtype=q.dtype, seed=seed)
        for seed in (1, 2)
    )
    queries = q.view(len(spans), span.num_queries, *q.shape[1:]).transpose(1, 2).contiguous()
    return partial(
        functional.scaled_dot_product_attention, queries, k, v, is_causal=span.num_queries > 1, enable_gqa=True
    )


def _projection(sizes: Sizes, m: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values as views of one fused projection."""
    num_heads, num_kv_heads = sizes.heads
    fused = randn(device, m, num_heads + 2 * num_kv_heads, sizes.head_dim, dtype=dtype)
    return fused[:, :num_heads], fused[:, num_heads:-num_kv_heads], fused[:, -num_kv_heads:]


def _slots(sizes: Sizes, m: int, device: torch.device) -> tuple[torch.Tensor, int]:
    """A slot a token, the first one padding; and how many blocks there are."""
    num_blocks = -(-m // sizes.block_size) + 1
    slots = torch.randperm(num_blocks * sizes.block_size, generator=torch.Generator().manual_seed(0))[:m].int()
    slots[0] = -1
    return slots.to(device), num_blocks


def _caches(sizes: Sizes, num_blocks: int, dtype: torch.dtype, device: torch.device) -> tuple[PagedKV, PagedKV]:
    mine, theirs = (
        PagedKV.empty(num_blocks, sizes.block_size, sizes.heads[1], sizes.head_dim, dtype, device) for _ in range(2)
    )
    return mine, theirs


def _parts(kv: PagedKV) -> list[torch.Tensor]:
    return [part for part in (kv.keys, kv.values, kv.key_scale, kv.value_scale) if part is not None]


def _write(sizes: Sizes, m: int, dtype: torch.dtype, cache: torch.dtype, device: torch.device) -> Call:
    _, k, v = _projection(sizes, m, dtype, device)
    slots, num_blocks = _slots(sizes, m, device)
    mine, theirs = _caches(sizes, num_blocks, cache, device)

    def run() -> list[torch.Tensor]:
        op("kv_write")(k, v, slots, mine.keys, mine.values, mine.key_scale, mine.value_scale)
        return _parts(mine)

    def expected() -> list[torch.Tensor]:
        kv_write_reference(k, v, slots, theirs)
        return _parts(theirs)

    return Call(run, expected, quantized, Work(num_bytes(k, v, slots) + _written(m, mine)))


def _written(m: int, kv: PagedKV) -> float:
    return m * sum(num_bytes(part) for part in _parts(kv)) / (kv.keys.shape[0] * kv.block_size)


def _rope(sizes: Sizes, m: int, dtype: torch.dtype, cache: torch.dtype, has_extras: bool, device: torch.device) -> Call:
    q, k, v = _projection(sizes, m, dtype, device)
    half = sizes.head_dim // 2
    angles = torch.arange(m, device=device)[:, None] * 1e4 ** (-torch.arange(half, device=device) / half)
    norms = [randn(device, sizes.head_dim, dtype=dtype, seed=seed) for seed in (3, 4)] if has_extras else [None, None]
    rope = Rope(angles.cos(), angles.sin(), has_extras, *norms)
    slots, num_blocks = _slots(sizes, m, device)
    mine, theirs = _caches(sizes, num_blocks, cache, device)
    positions = torch.arange(m, dtype=I32, device=device)

    def run() -> list[torch.Tensor]:
        out = op("rope_and_kv_write")(
            q, k, v, positions, slots, rope.cos, rope.sin, mine.keys, mine.values, mine.key_scale, mine.value_scale,
            rope.interleaved, rope.q_norm, rope.k_norm, rope.norm_offset, rope.norm_eps,
        )  # fmt: skip
        return [out, *_parts(mine)]

    def expected() -> list[torch.Tensor]:
        return [rope_and_kv_write_reference(q, k, v, positions, slots, rope, theirs), *_parts(theirs)]

    moved = num_bytes(q, q, k, v, slots, positions, rope.cos, rope.sin) + _written(m, mine)
    return Call(run, expected, _roped, Work(moved))


def _roped(actual: Any, expected: Any) -> float:
    """Queries and unquantised caches are rounded once or, where the oracle rounds too, up to twice."""
    (out, *parts), (exact, *targets) = actual, expected
    twice = rounded(slack=2.0)
    worst = twice(out, exact)
    if parts[0].dtype == I8:
        return max(worst, quantized(parts, targets))
    return max(worst, twice(parts, [target.float() for target in targets]))


def _merge(sizes: Sizes, m: int, device: torch.device) -> Call:
    outputs = randn(device, 4, m, sizes.heads[0], sizes.head_dim)
    lses = randn(device, 4, m, sizes.heads[0], scale=20.0, seed=1)
    lses[1:, ::2] = float("-inf")
    run, expected = partial(op("merge_states"), outputs, lses), partial(merge_states_reference, outputs, lses)
    return Call(run, expected, rounded(slack=3.0), Work(num_bytes(outputs, lses) * 1.25))
