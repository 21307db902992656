"""The scaled matrix product behind the INT8 and FP8 linears: ``out = (a @ w.T) * a_scale * w_scale + bias + residual``.

Results are rounded to a float type, or to INT8 of a scale that is known before. Weights are ``[N, K]`` with K
contiguous, as checkpoints have them. Products of INT8 are summed in int32, exactly, so the tables below may choose by the
number of rows: the result does not depend on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from batchinfer_kernels.gemm_config import gemm_config, shares_of
from batchinfer_kernels.jit import jit
from batchinfer_kernels.target import target_arch

if TYPE_CHECKING:
    from batchinfer_kernels.gemm_config import GemmConfig


# one program owns one tile of the output, or a share of the depth of one; tiles go down group_m rows of tiles before the
# next column, so that programs at work together share what they read
@jit(do_not_specialize=["m"])
def _gemm_kernel(
    a_ptr: tl.tensor, a_stride: tl.tensor, w_ptr: tl.tensor, a_scale_ptr: tl.tensor, w_scale_ptr: tl.tensor, bias_ptr: tl.tensor,
    residual_ptr: tl.tensor, out_scale_ptr: tl.tensor, out_ptr: tl.tensor, m: tl.tensor, n: tl.tensor, k: tl.tensor,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr, GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr, USE_TMA: tl.constexpr, IS_EXACT: tl.constexpr, OUT_SCALES: tl.constexpr,
) -> None:  # fmt: skip
    row_tile, column_tile = tile_of(tl.program_id(0), tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), GROUP_M)
    row0, column0 = row_tile * BLOCK_M, column_tile * BLOCK_N
    depth = tl.cdiv(tl.cdiv(k, BLOCK_K), SPLIT_K) * BLOCK_K
    begin = tl.program_id(1) * depth
    end = tl.minimum(begin + depth, k)
    acc = _tile_sums(
        a_ptr, a_stride, w_ptr, row0, column0, begin, end, m, n, k, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, USE_TMA, IS_EXACT
    )
    rows, columns = row0 + tl.arange(0, BLOCK_M), column0 + tl.arange(0, BLOCK_N)
    if SPLIT_K > 1:
        inside = (rows[:, None] < m) & (columns[None, :] < n)
        at = (tl.program_id(1) * m + rows[:, None]).to(tl.int64) * n + columns[None, :]
        tl.store(out_ptr + at, acc, mask=inside)
    else:
        _store_scaled(
            acc,
            rows,
            columns,
            a_scale_ptr,
            w_scale_ptr,
            bias_ptr,
            residual_ptr,
            out_scale_ptr,
            out_ptr,
            m,
            n,
            OUT_SCALES,
        )


# each program takes an equal share of all tiles' steps of depth, and goes on from tile to tile. A tile that is its alone it
# ends itself. Of others it keeps its sums: in its second place those of a tile that it opens, in its first those of one
# that others opened, of which it has one at most, where its share begins
@jit(do_not_specialize=["m", "share"])
def _stream_kernel(
    a_ptr: tl.tensor, a_stride: tl.tensor, w_ptr: tl.tensor, a_scale_ptr: tl.tensor, w_scale_ptr: tl.tensor, bias_ptr: tl.tensor,
    residual_ptr: tl.tensor, out_scale_ptr: tl.tensor, out_ptr: tl.tensor, partials_ptr: tl.tensor, m: tl.tensor, n: tl.tensor,
    k: tl.tensor, share: tl.tensor, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, EVEN_K: tl.constexpr, USE_TMA: tl.constexpr, OUT_SCALES: tl.constexpr,
) -> None:  # fmt: skip
    tiles_m, tiles_n, depth = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), tl.cdiv(k, BLOCK_K)
    begin = tl.program_id(0) * share
    end = tl.minimum(begin + share, tiles_m * tiles_n * depth)
    for tile in range(begin // depth, tl.cdiv(end, depth)):
        row_tile, column_tile = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        row0, column0 = row_tile * BLOCK_M, column_tile * BLOCK_N
        first, last = tl.maximum(begin - tile * depth, 0), tl.minimum(end - tile * depth, depth)
        acc = _tile_sums(
            a_ptr, a_stride, w_ptr, row0, column0, first * BLOCK_K, tl.minimum(last * BLOCK_K, k), m, n, k,
            BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, USE_TMA, True,
        )  # fmt: skip
        i, j = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
        if last - first == depth:
            _store_scaled(
                acc, row0 + i, column0 + j, a_scale_ptr, w_scale_ptr, bias_ptr, residual_ptr, out_scale_ptr, out_ptr, m, n,
                OUT_SCALES,
            )  # fmt: skip
        else:
            place = 2 * tl.program_id(0) + (first == 0).to(tl.int32)
            at = place * (BLOCK_M * BLOCK_N) + i[:, None] * BLOCK_N + j[None, :]
            tl.store(partials_ptr + at, acc)


# one program adds ROWS rows of the partial sums of a tile that several programs had a share of, from the first to the last
@jit(do_not_specialize=["m", "share"])
def _add_partials_kernel(
    partials_ptr: tl.tensor, a_scale_ptr: tl.tensor, w_scale_ptr: tl.tensor, bias_ptr: tl.tensor, residual_ptr: tl.tensor,
    out_scale_ptr: tl.tensor, out_ptr: tl.tensor, m: tl.tensor, n: tl.tensor, k: tl.tensor, share: tl.tensor,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, ROWS: tl.constexpr,
    OUT_SCALES: tl.constexpr,
) -> None:  # fmt: skip
    tile, depth = tl.program_id(0), tl.cdiv(k, BLOCK_K)
    first, last = tile * depth // share, ((tile + 1) * depth - 1) // share
    if first < last:
        i, j = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_N)
        at = i[:, None] * BLOCK_N + j[None, :]
        acc = tl.load(partials_ptr + (2 * first + 1) * (BLOCK_M * BLOCK_N) + at)
        for program in range(first + 1, last + 1):
            acc += tl.load(partials_ptr + 2 * program * (BLOCK_M * BLOCK_N) + at)
        row_tile, column_tile = tile_of(tile, tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), GROUP_M)
        _store_scaled(
            acc, row_tile * BLOCK_M + i, column_tile * BLOCK_N + j, a_scale_ptr, w_scale_ptr, bias_ptr, residual_ptr,
            out_scale_ptr, out_ptr, m, n, OUT_SCALES,
        )  # fmt: skip


@jit()
def tile_of(program: tl.tensor, tiles_m: tl.tensor, tiles_n: tl.tensor, GROUP_M: tl.constexpr) -> tl.tensor:
    """Which tile of rows and of columns a program owns."""
    first = program // (GROUP_M * tiles_n) * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    within = program % (GROUP_M * tiles_n)
    return first + within % height, within // height


@jit()
def _tile_sums(
    a_ptr: tl.tensor, a_stride: tl.tensor, w_ptr: tl.tensor, row0: tl.tensor, column0: tl.tensor, begin: tl.tensor,
    end: tl.tensor, m: tl.tensor, n: tl.tensor, k: tl.tensor, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, USE_TMA: tl.constexpr, IS_EXACT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    if USE_TMA:
        acc = _product_tma(a_ptr, w_ptr, row0, column0, begin, end, BLOCK_M, BLOCK_N, BLOCK_K, IS_EXACT)
    else:
        a_rows, w_rows = row0 + tl.arange(0, BLOCK_M), column0 + tl.arange(0, BLOCK_N)
        acc = tile_product(
            a_ptr + a_rows.to(tl.int64)[:, None] * a_stride, (a_rows < m)[:, None],
            w_ptr + w_rows.to(tl.int64)[:, None] * k, (w_rows < n)[:, None],
            begin, end, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, IS_EXACT,
        )  # fmt: skip
    return acc


@jit()
def tile_product(
    a_row_ptr: tl.tensor, is_row: tl.tensor, w_row_ptr: tl.tensor, is_column: tl.tensor, begin: tl.tensor, end: tl.tensor,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, IS_EXACT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """``[BLOCK_M, BLOCK_N]`` sums over the depths ``begin .. end``; pointers to the rows of both, each with its mask."""
    depth = tl.arange(0, BLOCK_K)
    a_at, w_at = a_row_ptr + depth[None, :], w_row_ptr + depth[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if IS_EXACT else tl.float32)
    for start in range(begin, end, BLOCK_K):
        a_inside, w_inside = is_row, is_column
        if not EVEN_K:
            is_deep = (start + depth < end)[None, :]
            a_inside, w_inside = a_inside & is_deep, w_inside & is_deep
        a = tl.load(a_at + start, mask=a_inside, other=0.0)
        w = tl.load(w_at + start, mask=w_inside, other=0.0)
        acc = tl.dot(a, tl.trans(w.to(a.dtype)), acc=acc, out_dtype=acc.dtype, input_precision="ieee")
    return acc


@jit()
def _product_tma(
    a_desc: tl.tensor, w_desc: tl.tensor, row0: tl.tensor, column0: tl.tensor, begin: tl.tensor, end: tl.tensor,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, IS_EXACT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if IS_EXACT else tl.float32)
    for start in range(begin, end, BLOCK_K):
        a = a_desc.load([row0, start])  # zeros beyond the edges
        w = w_desc.load([column0, start])
        acc = tl.dot(a, tl.trans(w), acc=acc, out_dtype=acc.dtype)
    return acc


@jit()
def _store_scaled(
    acc: tl.tensor, rows: tl.tensor, columns: tl.tensor, a_scale_ptr: tl.tensor, w_scale_ptr: tl.tensor, bias_ptr: tl.tensor,
    residual_ptr: tl.tensor, out_scale_ptr: tl.tensor, out_ptr: tl.tensor, m: tl.tensor, n: tl.tensor,
    OUT_SCALES: tl.constexpr,
) -> None:  # fmt: skip
    is_row, is_column = rows < m, columns < n
    inside = is_row[:, None] & is_column[None, :]
    out = acc.to(tl.float32)
    if a_scale_ptr is not None:
        out *= tl.load(a_scale_ptr + rows, mask=is_row, other=0.0)[:, None]
    out *= tl.load(w_scale_ptr + columns, mask=is_column, other=0.0)[None, :]
    if bias_ptr is not None:
        out += tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    at = rows[:, None].to(tl.int64) * n + columns[None, :]
    if residual_ptr is not None:
        out += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if out_scale_ptr is not None:
        step = tl.load(out_scale_ptr + columns * OUT_SCALES, mask=is_column, other=1.0)
        out = requantized(out, tl.where(step > 0, tl.div_rn(1.0, step), 0.0)[None, :])
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


@jit()
def requantized(x: tl.tensor, inverse: tl.tensor) -> tl.tensor:
    """``x * inverse`` rounded to the nearest even integer of -127 .. 127; NaN is 0."""
    x = x * inverse
    x = tl.where(tl.abs(x) <= float("inf"), x, 0.0)
    # 1.5 * 2**23: adding it leaves no fraction bits
    return (tl.minimum(tl.maximum(x, -127.0), 127.0) + 12582912.0) - 12582912.0


# one program adds the shares of a stretch of a row's columns, in any order: they are integers
@jit(do_not_specialize=["m"])
def _reduce_kernel(
    shares_ptr: tl.tensor, a_scale_ptr: tl.tensor, w_scale_ptr: tl.tensor, bias_ptr: tl.tensor, residual_ptr: tl.tensor,
    out_scale_ptr: tl.tensor, out_ptr: tl.tensor, m: tl.tensor, n: tl.tensor, SPLIT_K: tl.constexpr, BLOCK_N: tl.constexpr,
    OUT_SCALES: tl.constexpr,
) -> None:  # fmt: skip
    rows = tl.program_id(0) + tl.arange(0, 1)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = rows[:, None].to(tl.int64) * n + columns[None, :]
    acc = tl.zeros((1, BLOCK_N), tl.int32)
    for share in tl.static_range(SPLIT_K):
        acc += tl.load(shares_ptr + at + share * m.to(tl.int64) * n, mask=columns[None, :] < n, other=0)
    _store_scaled(
        acc, rows, columns, a_scale_ptr, w_scale_ptr, bias_ptr, residual_ptr, out_scale_ptr, out_ptr, m, n, OUT_SCALES
    )


def check_operands(
    a: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> None:
    """Raise ValueError for shapes or layouts that no config takes."""
    m, k = a.shape
    n = w.shape[0]
    if w.shape[1] != k or not w.is_contiguous() or a.stride(1) != 1:
        raise ValueError(f"a {tuple(a.shape)} and w {tuple(w.shape)} must have the same K, contiguous")
    if k % 16 or n % 16 or a.stride(0) % 16:
        raise ValueError(f"K = {k}, N = {n} and the stride {a.stride(0)} of a must be multiples of 16")
    if len(w_scale) != n or (bias is not None and len(bias) != n):
        raise ValueError(f"scales and bias of w must have {n} numbers")
    if residual is not None and (tuple(residual.shape) != (m, n) or not residual.is_contiguous()):
        raise ValueError(f"the residual must be contiguous and of shape {(m, n)}, got {tuple(residual.shape)}")


def check_out_scale(out_scale: torch.Tensor | None, out_dtype: torch.dtype, n: int) -> None:
    """Raise ValueError where results are to be INT8 without a scale, or have one and are not."""
    if (out_scale is not None) != (out_dtype == torch.int8):
        raise ValueError(f"results of {out_dtype} take {'a' if out_scale is None else 'no'} scale: int8 alone does")
    if out_scale is not None and (
        out_scale.dtype != torch.float32 or tuple(out_scale.shape) not in ((1,), (n,)) or not out_scale.is_contiguous()
    ):
        raise ValueError(f"out_scale is {tuple(out_scale.shape)}: it must be contiguous float32, one number or {n}")


def scaled_gemm(
    a: torch.Tensor, w: torch.Tensor, a_scale: torch.Tensor | None, w_scale: torch.Tensor, bias: torch.Tensor | None,
    residual: torch.Tensor | None, out_dtype: torch.dtype, config: GemmConfig | None,
    out_scale: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The product described at the head of this module, ``[M, N]``; weights are converted to the type of ``a``."""
    check_operands(a, w, w_scale, bias, residual)
    check_out_scale(out_scale, out_dtype, len(w))
    (m, k), n = a.shape, w.shape[0]
    is_exact = a.dtype == torch.int8
    out = torch.empty(m, n, dtype=out_dtype, device=a.device)
    if not m:
        return out
    has_epilogue = residual is not None or out_scale is not None
    c = config or gemm_config(target_arch(), m, n, k, a.dtype, is_exact=is_exact, has_epilogue=has_epilogue)
    out_scales = int(out_scale is not None and len(out_scale) > 1)
    a_arg, w_arg = a, w
    if c.use_tma:
        a_arg = TensorDescriptor.from_tensor(a, [c.block_m, c.block_k])
        w_arg = TensorDescriptor.from_tensor(w, [c.block_n, c.block_k])
    operands, ends = (a_arg, a.stride(0), w_arg), (a_scale, w_scale, bias, residual, out_scale)
    tiles = triton.cdiv(m, c.block_m) * triton.cdiv(n, c.block_n)
    if c.programs:
        if not is_exact:
            raise ValueError("sums that round are not divided over programs: a row's would depend on its batch")
        share, programs = shares_of(c, m, n, k)
        blocks = (c.block_m, c.block_n, c.block_k, c.group_m)
        partials = torch.empty(2 * programs, c.block_m, c.block_n, dtype=torch.int32, device=a.device)
        _stream_kernel[(programs,)](
            *operands, *ends, out, partials, m, n, k, share, *blocks, k % c.block_k == 0, c.use_tma, out_scales,
            num_warps=c.num_warps, num_stages=c.num_stages,
        )  # fmt: skip
        _add_partials_kernel[tiles, c.block_m // 16](
            partials, *ends, out, m, n, k, share, *blocks, 16, out_scales, num_warps=4
        )
        return out
    shares = torch.empty(c.split_k, m, n, dtype=torch.int32, device=a.device) if c.split_k > 1 else None
    _gemm_kernel[tiles, c.split_k](
        *operands, *ends, out if shares is None else shares, m, n, k, c.block_m, c.block_n, c.block_k, c.split_k, c.group_m,
        k % c.block_k == 0, c.use_tma, is_exact, out_scales, num_warps=c.num_warps, num_stages=c.num_stages,
    )  # fmt: skip
    if shares is not None:
        block_n = min(1024, triton.next_power_of_2(n))
        _reduce_kernel[m, triton.cdiv(n, block_n)](
            shares, *ends, out, m, n, c.split_k, block_n, out_scales, num_warps=4
        )
    return out
