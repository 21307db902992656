"""Causal attention over a paged cache: decode, chunked prefill and shared prefixes in one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from batchinfer_kernels import reference
from batchinfer_kernels.attention_plan import ALIGNMENT, ITEM_FIELDS
from batchinfer_kernels.jit import jit
from batchinfer_kernels.merge_states import launch_merge
from batchinfer_kernels.target import GFX942, LARGE_SHARED, target_arch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchinfer_kernels.attention_plan import AttentionPlan, QuerySpan
    from batchinfer_kernels.paged_kv import PagedKV

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """What a layer's attention adds to the plain one.

    ``sliding_window`` is how many positions a query sees, itself included; ``softcap`` bounds scores by
    ``cap * tanh(score / cap)``; ``sinks [num_heads]`` (float32) take a share of the softmax.
    """

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Compile-time choices."""

    block_n: int
    num_warps: int
    num_stages: int


def attention_config(
    arch: int, head_dim: int, block_size: int, dtype: torch.dtype, *, has_large: bool
) -> AttentionConfig:
    """The config for an architecture. Keys a tile: one block number is read for each, so a tile lies in one block.

    Without the units of sm_90 and later the large tile's accumulators fill the registers of four warps: with eight none
    is spilled.
    """
    block_n = min(ALIGNMENT, block_size)
    if dtype == torch.float32 or head_dim > 128 or (arch in (86, 89) and has_large and head_dim not in (64, 128)):
        block_n = min(block_n, 32)
    is_wide = head_dim > (64 if arch < 90 else 128) or (arch == 100 and head_dim not in (64, 128))
    num_stages = 3 if arch in LARGE_SHARED and head_dim <= 128 else 2  # elsewhere a program has 99 KiB
    return AttentionConfig(block_n, 8 if has_large and is_wide and arch != GFX942 else 4, num_stages)


@jit()
def _masked_scores(
    scores: tl.tensor, position: tl.tensor, n: tl.tensor, kv_end: tl.tensor, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr
) -> tl.tensor:
    """Scores in units of log2, -inf where a query may not look."""
    if SOFTCAP > 0.0:  # tanh(x) = 1 - 2 / (1 + e^2x)
        scores = SOFTCAP * (1.0 - 2.0 / (1.0 + tl.exp(scores * (2.0 / SOFTCAP))))
    visible = (n[None, :] <= position[:, None]) & (n[None, :] < kv_end)
    if WINDOW > 0:
        visible = visible & (n[None, :] > position[:, None] - WINDOW)
    return tl.where(visible, scores * 1.4426950408889634, float("-inf"))


# the queries of one item and one kv head over the item's stretch of the cache; writes results or partial results
@jit()
def _attend(
    q_ptr: tl.tensor, q_stride: tl.tensor, keys_ptr: tl.tensor, values_ptr: tl.tensor, key_scale_ptr: tl.tensor,
    value_scale_ptr: tl.tensor, block_stride: tl.tensor, token_stride: tl.tensor, head_stride: tl.tensor, table_ptr: tl.tensor,
    positions_ptr: tl.tensor, queries_ptr: tl.tensor, out_ptr: tl.tensor, partial_ptr: tl.tensor, lse_ptr: tl.tensor,
    sinks_ptr: tl.tensor, scale: tl.tensor, kv_begin: tl.tensor, kv_end: tl.tensor, num_queries: tl.tensor, kv_head: tl.tensor,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_P: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, TILE: tl.constexpr, BLOCK_N: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.arange(0, TILE)
    query = row // GROUP
    is_row = query < num_queries
    token = tl.load(queries_ptr + query * 2, mask=is_row, other=0).to(tl.int64)
    partial = tl.load(queries_ptr + query * 2 + 1, mask=is_row, other=-1).to(tl.int64)
    position = tl.load(positions_ptr + token, mask=is_row, other=-1).to(tl.int32)
    head = kv_head * GROUP + row % GROUP
    d = tl.arange(0, HEAD_DIM_P)
    inside = is_row[:, None] & (d[None, :] < HEAD_DIM)
    q = tl.load(q_ptr + token[:, None] * q_stride + head[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0)
    peak = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    acc = tl.zeros((TILE, HEAD_DIM_P), tl.float32)
    for start in range(kv_begin, kv_end, BLOCK_N):
        block = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64)
        offset = start % BLOCK_SIZE + tl.arange(0, BLOCK_N)
        n = start + tl.arange(0, BLOCK_N)
        at = block * block_stride + kv_head * head_stride + offset[:, None] * token_stride + d[None, :]
        # beyond the end lies what another sequence left behind: zero times its NaN would still be NaN
        live = (n[:, None] < kv_end) & (d[None, :] < HEAD_DIM)
        k = tl.load(keys_ptr + at, mask=live, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if key_scale_ptr is not None:
            scale_at = (block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + offset
            scores *= tl.load(key_scale_ptr + scale_at, mask=n < kv_end, other=0.0)[None, :]
        scores = _masked_scores(scores, position, n, kv_end, WINDOW, SOFTCAP)
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf would be NaN
        weights = tl.exp2(scores - safe[:, None])
        kept = tl.exp2(peak - safe)
        total = total * kept + tl.sum(weights, axis=1)
        if value_scale_ptr is not None:
            scale_at = (block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + offset
            weights *= tl.load(value_scale_ptr + scale_at, mask=n < kv_end, other=0.0)[None, :]
        v = tl.load(values_ptr + at, mask=live, other=0.0).to(q.dtype)
        acc = tl.dot(weights.to(q.dtype), v, acc=acc * kept[:, None], input_precision="ieee")
        peak = higher
    _finish(
        acc, peak, total, token, partial, head, d, inside, is_row, out_ptr, partial_ptr, lse_ptr, sinks_ptr,
        GROUP * NUM_KV_HEADS, HEAD_DIM,
    )  # fmt: skip


@jit()
def _finish(
    acc: tl.tensor, peak: tl.tensor, total: tl.tensor, token: tl.tensor, partial: tl.tensor, head: tl.tensor, d: tl.tensor,
    inside: tl.tensor, is_row: tl.tensor, out_ptr: tl.tensor, partial_ptr: tl.tensor, lse_ptr: tl.tensor, sinks_ptr: tl.tensor,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
) -> None:  # fmt: skip
    is_partial = partial >= 0
    if partial_ptr is not None:
        share = acc * tl.where(total > 0.0, 1.0 / total, 0.0)[:, None]
        lse = (peak + tl.log2(tl.where(total > 0.0, total, 1.0))) * 0.6931471805599453
        row = partial * NUM_HEADS + head
        tl.store(partial_ptr + row[:, None] * HEAD_DIM + d[None, :], share, mask=inside & is_partial[:, None])
        tl.store(lse_ptr + row, lse, mask=is_row & is_partial)
    if sinks_ptr is not None:  # takes its share of the softmax and gives nothing
        sink = tl.load(sinks_ptr + head, mask=is_row, other=0.0) * 1.4426950408889634
        higher = tl.maximum(peak, sink)
        kept = tl.exp2(peak - higher)
        acc, total = acc * kept[:, None], total * kept + tl.exp2(sink - higher)
    share = acc * tl.where(total > 0.0, 1.0 / total, 0.0)[:, None]
    target = out_ptr + (token[:, None] * NUM_HEADS + head[:, None]) * HEAD_DIM + d[None, :]
    tl.store(target, share.to(out_ptr.dtype.element_ty), mask=inside & (partial < 0)[:, None])


# program (i, h) owns item i and kv head h. An item with no queries does nothing: padding for a fixed grid
@jit()
def _paged_attention_kernel(
    q_ptr: tl.tensor, q_stride: tl.tensor, keys_ptr: tl.tensor, values_ptr: tl.tensor, key_scale_ptr: tl.tensor,
    value_scale_ptr: tl.tensor, block_stride: tl.tensor, token_stride: tl.tensor, head_stride: tl.tensor, tables_ptr: tl.tensor,
    table_stride: tl.tensor, positions_ptr: tl.tensor, items_ptr: tl.tensor, queries_ptr: tl.tensor, out_ptr: tl.tensor,
    partial_ptr: tl.tensor, lse_ptr: tl.tensor, sinks_ptr: tl.tensor, scale: tl.tensor,
    ITEM_FIELDS: tl.constexpr, GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_P: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SMALL_TILE: tl.constexpr, LARGE_TILE: tl.constexpr,
    HAS_SMALL: tl.constexpr, HAS_LARGE: tl.constexpr, BLOCK_N: tl.constexpr,
) -> None:  # fmt: skip
    item = items_ptr + tl.program_id(0) * ITEM_FIELDS
    kv_head = tl.program_id(1)
    is_large = tl.load(item)
    table_ptr = tables_ptr + tl.load(item + 1).to(tl.int64) * table_stride
    # plans begin items at multiples of the tile of keys; the compiler cannot know
    kv_begin, kv_end = tl.multiple_of(tl.load(item + 2), BLOCK_N), tl.load(item + 3)
    queries_ptr += tl.load(item + 4).to(tl.int64) * 2
    num_queries = tl.load(item + 5)
    if HAS_SMALL:  # noqa: SIM102 -- decided when compiling, the inner one in each program
        if is_large == 0:
            _attend(
                q_ptr, q_stride, keys_ptr, values_ptr, key_scale_ptr, value_scale_ptr, block_stride, token_stride,
                head_stride, table_ptr, positions_ptr, queries_ptr, out_ptr, partial_ptr, lse_ptr, sinks_ptr, scale,
                kv_begin, kv_end, num_queries, kv_head, GROUP, NUM_KV_HEADS, HEAD_DIM, HEAD_DIM_P, BLOCK_SIZE, WINDOW,
                SOFTCAP, SMALL_TILE, BLOCK_N,
            )  # fmt: skip
    if HAS_LARGE:  # noqa: SIM102 -- as above
        if is_large != 0:
            _attend(
                q_ptr, q_stride, keys_ptr, values_ptr, key_scale_ptr, value_scale_ptr, block_stride, token_stride,
                head_stride, table_ptr, positions_ptr, queries_ptr, out_ptr, partial_ptr, lse_ptr, sinks_ptr, scale,
                kv_begin, kv_end, num_queries, kv_head, GROUP, NUM_KV_HEADS, HEAD_DIM, HEAD_DIM_P, BLOCK_SIZE, WINDOW,
                SOFTCAP, LARGE_TILE, BLOCK_N,
            )  # fmt: skip


def paged_attention(
    q: torch.Tensor,
    kv: PagedKV,
    block_tables: torch.Tensor,
    positions: torch.Tensor,
    plan: AttentionPlan,
    form: AttentionForm,
    *,
    config: AttentionConfig | None = None,
) -> torch.Tensor:
    """Attention of ``q [num_tokens, num_heads, head_dim]`` over a layer's cache, in the shape and type of ``q``.

    ``block_tables [num_sequences, max_blocks]`` and ``positions [num_tokens]`` are int32; the new tokens' keys and values
    are in the cache already. ``plan`` and ``form`` must have the same sliding window. Tokens in no span stay unwritten.
    Reads each sequence's keys and values once a 64-row tile of queries, a shared prefix once a tile of its group's rows.
    """
    num_tokens, num_heads, head_dim = q.shape
    _check(q, kv, form)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not num_tokens or not len(plan.items):
        return out
    partials = lses = None
    if plan.num_partials:
        partials = torch.empty(plan.num_partials, num_heads, head_dim, dtype=torch.float32, device=q.device)
        lses = torch.empty(plan.num_partials, num_heads, dtype=torch.float32, device=q.device)
    for launch, has_small, has_large in _launches(q, kv, plan, config):
        _paged_attention_kernel[(len(plan.items), kv.num_kv_heads)](
            q, q.stride(0), kv.keys, kv.values, kv.key_scale, kv.value_scale, *kv.keys.stride()[:3], block_tables,
            block_tables.stride(0), positions, plan.items, plan.queries, out, partials, lses, form.sinks, form.scale,
            ITEM_FIELDS, num_heads // kv.num_kv_heads, kv.num_kv_heads, head_dim, triton.next_power_of_2(head_dim),
            kv.block_size, form.sliding_window or 0, form.softcap or 0.0, plan.small_tile, plan.large_tile, has_small,
            has_large, launch.block_n, num_warps=launch.num_warps, num_stages=launch.num_stages,
        )  # fmt: skip
    if partials is not None and lses is not None:
        launch_merge(partials, lses, plan.merges, form.sinks, out)
    return out


def _launches(
    q: torch.Tensor, kv: PagedKV, plan: AttentionPlan, config: AttentionConfig | None
) -> list[tuple[AttentionConfig, bool, bool]]:
    """The configs to launch with, and whether each runs small and large tiles.

    One where both tiles are compiled alike; else one for each, so that a decode token's sums are added in the same order
    whether or not a chunk is in the step.
    """
    small, large = (
        config or attention_config(target_arch(), kv.head_dim, kv.block_size, q.dtype, has_large=has_large)
        for has_large in (False, True)
    )
    if plan.has_small and plan.has_large and small != large:
        return [(small, True, False), (large, False, True)]
    return [(large if plan.has_large else small, plan.has_small, plan.has_large)]


def _check(q: torch.Tensor, kv: PagedKV, form: AttentionForm) -> None:
    num_heads, head_dim = q.shape[1:]
    if head_dim != kv.head_dim or num_heads % kv.num_kv_heads or head_dim % 16:
        raise ValueError(
            f"{num_heads} query heads of {head_dim} do not fit {kv.num_kv_heads} kv heads of {kv.head_dim} numbers"
        )
    if q.stride()[1:] != (head_dim, 1) or q.stride(0) % 16:
        raise ValueError(f"queries at strides {q.stride()}: heads must lie together, tokens at multiples of 16")
    if form.sinks is not None and (form.sinks.dtype != torch.float32 or len(form.sinks) != num_heads):
        raise ValueError(f"sinks must be {num_heads} float32 numbers, got {tuple(form.sinks.shape)} {form.sinks.dtype}")


def paged_attention_reference(
    q: torch.Tensor, kv: PagedKV, block_tables: torch.Tensor, spans: Sequence[QuerySpan], form: AttentionForm
) -> torch.Tensor:
    """:func:`paged_attention` in plain torch and float32, sequence by sequence; tokens in no span are NaN."""
    keys, values = (cache.flatten(0, 1) for cache in kv.dequantized())
    out = torch.full(q.shape, float("nan"))
    for span in spans:
        at = torch.arange(span.context)
        slots = block_tables[span.table].long()[at // kv.block_size] * kv.block_size + at % kv.block_size
        rows = slice(span.first, span.first + span.num_queries)
        out[rows] = reference.attention(
            q[rows], keys[slots], values[slots], scale=form.scale, window=form.sliding_window, softcap=form.softcap,
            sinks=form.sinks,
        )  # fmt: skip
    return out
