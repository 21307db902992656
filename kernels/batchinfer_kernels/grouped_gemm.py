"""The matrix products of a mixture of experts: rows in the order of their experts, each expert with weights of its own."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from batchinfer_kernels.gemm import tile_of, tile_product
from batchinfer_kernels.jit import jit
from batchinfer_kernels.target import LARGE_SHARED, target_arch

if TYPE_CHECKING:
    from batchinfer_kernels.routing import Routing

GROUP_M = 8
"""Tiles of rows that go through all columns together, so that they share what they read."""


@dataclass(frozen=True, slots=True)
class GroupedConfig:
    """Compile-time choices."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def grouped_config(arch: int, num_pairs: int, num_experts: int, dtype: torch.dtype) -> GroupedConfig:
    """The config of ``num_pairs`` rows over ``num_experts``, with activations of ``dtype``.

    Tiles are as high as an expert has rows on average: a higher one multiplies zeros, a lower one reads the weights again.
    """
    wide, many_stages = dtype.itemsize == 1, arch in LARGE_SHARED
    mean = triton.cdiv(num_pairs, max(1, num_experts))
    if dtype == torch.float32:
        return GroupedConfig(16 if mean <= 16 else 32, 64, 32, 4, 2)
    if mean <= 64:
        block_m = 16 if mean <= 16 else 32 if mean <= 32 else 64
        return GroupedConfig(block_m, 64, 256 if wide else 128, 4, 3 if many_stages else 2)
    return GroupedConfig(128, 128, 128 if wide else 64, 8, 3 if many_stages else 2)


@jit()
def rows_of(tile: tl.tensor, offsets_ptr: tl.tensor, NUM_EXPERTS: tl.constexpr, EXPERTS_P: tl.constexpr, BLOCK_M: tl.constexpr) -> tl.tensor:  # fmt: skip
    """A tile's expert, its first row and the end of its expert's rows; past the last tile the expert is EXPERTS_P."""
    e = tl.arange(0, EXPERTS_P)
    begins = tl.load(offsets_ptr + e, mask=e < NUM_EXPERTS, other=0)
    ends = tl.load(offsets_ptr + e + 1, mask=e < NUM_EXPERTS, other=0)
    tiles = (ends - begins + BLOCK_M - 1) // BLOCK_M
    after = tl.cumsum(tiles, axis=0)
    expert = tl.sum((after <= tile).to(tl.int32), axis=0)
    is_it = e == expert
    within = tile - tl.sum(tl.where(is_it, after - tiles, 0), axis=0)
    row0 = tl.sum(tl.where(is_it, begins, 0), axis=0) + within * BLOCK_M
    return expert, row0, tl.sum(tl.where(is_it, ends, 0), axis=0)


# one program owns one tile of one expert's rows; the grid has the most tiles there can be, and those beyond do nothing
@jit(do_not_specialize=["tiles_m"])
def _grouped_gemm_kernel(
    a_ptr: tl.tensor, a_stride: tl.tensor, w_ptr: tl.tensor, order_ptr: tl.tensor, offsets_ptr: tl.tensor, a_scale_ptr: tl.tensor,
    w_scale_ptr: tl.tensor, bias_ptr: tl.tensor, out_ptr: tl.tensor, tiles_m: tl.tensor, n: tl.tensor, k: tl.tensor,
    NUM_EXPERTS: tl.constexpr, EXPERTS_P: tl.constexpr, GATHER: tl.constexpr, SCATTER: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, EVEN_K: tl.constexpr, IS_EXACT: tl.constexpr,
) -> None:  # fmt: skip
    tile, column_tile = tile_of(tl.program_id(0), tiles_m, tl.cdiv(n, BLOCK_N), GROUP_M)
    expert, row0, end = rows_of(tile, offsets_ptr, NUM_EXPERTS, EXPERTS_P, BLOCK_M)
    if expert < NUM_EXPERTS:
        rows, columns = row0 + tl.arange(0, BLOCK_M), column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        is_row, is_column = rows < end, columns < n
        pair = tl.load(order_ptr + rows, mask=is_row, other=0)
        source = pair // GATHER if GATHER > 0 else rows
        at = expert.to(tl.int64) * n + columns
        acc = tile_product(
            a_ptr + source.to(tl.int64)[:, None] * a_stride, is_row[:, None], w_ptr + at[:, None] * k, is_column[:, None],
            0, k, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, IS_EXACT,
        )  # fmt: skip
        out = acc.to(tl.float32)
        if a_scale_ptr is not None:
            out *= tl.load(a_scale_ptr + source, mask=is_row, other=0.0)[:, None]
        if w_scale_ptr is not None:
            out *= tl.load(w_scale_ptr + at, mask=is_column, other=0.0)[None, :]
        if bias_ptr is not None:
            out += tl.load(bias_ptr + at, mask=is_column, other=0.0).to(tl.float32)[None, :]
        target = (pair if SCATTER else rows).to(tl.int64)[:, None] * n + columns[None, :]
        tl.store(out_ptr + target, out.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


# program (t, j) owns the j-th stretch of token t: the sum of its experts' answers, best expert first
@jit()
def _combine_kernel(
    y_ptr: tl.tensor, weights_ptr: tl.tensor, residual_ptr: tl.tensor, out_ptr: tl.tensor, n: tl.tensor,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOP_K):
        weight = tl.load(weights_ptr + token * TOP_K + choice)
        acc += tl.load(y_ptr + (token * TOP_K + choice) * n + at, mask=at < n, other=0.0).to(tl.float32) * weight
    if residual_ptr is not None:
        acc += tl.load(residual_ptr + token * n + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * n + at, acc.to(out_ptr.dtype.element_ty), mask=at < n)


def _check(
    a: torch.Tensor, w: torch.Tensor, routing: Routing, num_rows: int, a_scale: torch.Tensor | None,
    w_scale: torch.Tensor | None, bias: torch.Tensor | None,
) -> None:  # fmt: skip
    num_experts, n, k = w.shape
    if tuple(a.shape) != (num_rows, k) or not w.is_contiguous() or a.stride(1) != 1:
        raise ValueError(f"a {tuple(a.shape)} must be {(num_rows, k)} and w {tuple(w.shape)} contiguous, K innermost")
    if k % 16 or n % 16 or a.stride(0) % 16:
        raise ValueError(f"K = {k}, N = {n} and the stride {a.stride(0)} of a must be multiples of 16")
    if len(routing.offsets) != num_experts + 1:
        raise ValueError(f"the routing is over {len(routing.offsets) - 1} experts, the weights are of {num_experts}")
    is_int8 = a.dtype == torch.int8
    if is_int8 != (a_scale is not None) or (w.dtype == torch.int8) != (w_scale is not None):
        raise ValueError(f"a is {a.dtype} and w is {w.dtype}: int8 takes scales, other types none")
    if w.dtype not in (a.dtype, torch.int8):
        raise ValueError(f"w is {w.dtype}; it must be int8 or of the type of a, {a.dtype}")
    for name, tensor in (("w_scale", w_scale), ("bias", bias)):
        if tensor is not None and (tuple(tensor.shape) != (num_experts, n) or not tensor.is_contiguous()):
            raise ValueError(f"{name} must be contiguous {(num_experts, n)}, got {tuple(tensor.shape)}")


def grouped_gemm(
    a: torch.Tensor,
    w: torch.Tensor,
    routing: Routing,
    *,
    gather: bool,
    scatter: bool,
    a_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    config: GroupedConfig | None = None,
) -> torch.Tensor:
    """Each row of ``a`` times the transposed weights of its expert, ``w [num_experts, N, K]``: ``[num_pairs, N]``.

    A pair is a token and one of its experts. With ``gather``, ``a [num_tokens, K]`` has a row a token, read once a pair;
    without, ``a [num_pairs, K]`` has a row a pair, in the order of the experts. With ``scatter``, row ``token * top_k +
    choice`` of the result is that pair's; without, results stay in the order of the experts.

    ``a`` is INT8 with ``a_scale [rows of a]`` (W8A8, exact sums), or bfloat16, float16 or float32 without. ``w`` has the
    type of ``a``, or is INT8 with ``w_scale [num_experts, N]``; scales are float32. ``bias [num_experts, N]`` is added in
    float32. Results are rounded once. Experts without rows cost nothing.

    Moves ``num_pairs * K`` numbers of ``a``, ``N * K`` of each expert that has rows, ``num_pairs * N`` results; ``2 *
    num_pairs * N * K`` operations.
    """
    num_experts, n, k = w.shape
    num_tokens, top_k = routing.weights.shape
    num_pairs = num_tokens * top_k
    _check(a, w, routing, num_tokens if gather else num_pairs, a_scale, w_scale, bias)
    out = torch.empty(num_pairs, n, dtype=out_dtype, device=a.device)
    if num_pairs:
        c = config or grouped_config(target_arch(), num_pairs, num_experts, a.dtype)
        tiles_m = num_pairs // c.block_m + min(num_experts, num_pairs)
        _grouped_gemm_kernel[(tiles_m * triton.cdiv(n, c.block_n),)](
            a, a.stride(0), w, routing.order, routing.offsets, a_scale, w_scale, bias, out, tiles_m, n, k,
            num_experts, triton.next_power_of_2(num_experts), top_k if gather else 0, scatter, c.block_m, c.block_n,
            c.block_k, GROUP_M, k % c.block_k == 0, a.dtype == torch.int8, num_warps=c.num_warps, num_stages=c.num_stages,
        )  # fmt: skip
    return out


def combine_experts(
    y: torch.Tensor,
    weights: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """``sum_j weights[t, j] * y[t * top_k + j] + residual[t]``: ``[num_tokens, N]``, added in float32 in the order of j.

    ``y [num_tokens * top_k, N]`` are a scattered product's rows, ``weights [num_tokens, top_k]`` float32, ``residual
    [num_tokens, N]`` a shared expert's answer or the stream. Moves ``num_tokens * (top_k + 1) * N`` numbers.
    """
    num_tokens, top_k = weights.shape
    n = y.shape[1]
    if len(y) != num_tokens * top_k or not (y.is_contiguous() and weights.is_contiguous()) or n % 16:
        raise ValueError(f"y {tuple(y.shape)} must be contiguous [{num_tokens * top_k}, N], and N a multiple of 16")
    if residual is not None and (tuple(residual.shape) != (num_tokens, n) or not residual.is_contiguous()):
        raise ValueError(f"the residual must be contiguous and of shape {(num_tokens, n)}, got {tuple(residual.shape)}")
    out = torch.empty(num_tokens, n, dtype=out_dtype, device=y.device)
    if num_tokens:
        block = min(2048, triton.next_power_of_2(n))
        _combine_kernel[num_tokens, triton.cdiv(n, block)](
            y, weights, residual, out, n, top_k, block, num_warps=max(1, block // 512)
        )
    return out


def grouped_gemm_reference(
    a: torch.Tensor,
    w: torch.Tensor,
    routing: Routing,
    *,
    gather: bool,
    scatter: bool,
    a_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`grouped_gemm` in plain torch and float32, expert by expert; products of INT8 are exact."""
    top_k, offsets = routing.weights.shape[1], routing.offsets.tolist()
    out = torch.full((len(routing.order), w.shape[1]), float("nan"))
    for expert, (begin, end) in enumerate(itertools.pairwise(offsets)):
        pairs = routing.order[begin:end].long()
        rows = pairs // top_k if gather else torch.arange(begin, end)
        y = (a[rows].double() @ w[expert].double().T).float()
        y = y if a_scale is None else y * a_scale[rows, None]
        y = y if w_scale is None else y * w_scale[expert]
        y = y if bias is None else y + bias[expert].float()
        out[pairs if scatter else torch.arange(begin, end)] = y
    return out


def combine_experts_reference(
    y: torch.Tensor, weights: torch.Tensor, *, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """:func:`combine_experts` in plain torch and float32."""
    out = (y.float().view(*weights.shape, -1) * weights[..., None]).sum(dim=1)
    return out if residual is None else out + residual.float()
