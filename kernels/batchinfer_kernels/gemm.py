"""The scaled matrix product behind the INT8 and FP8 linears: ``out = (a @ w.T) * a_scale * w_scale + bias + residual``.

Results are rounded to a float type, or to INT8 of a scale that is known before. Weights are ``[N, K]`` with K
contiguous, as checkpoints have them. Products of INT8 are summed in int32, exactly, so the tables below may choose by the
number of rows: the result does not depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from batchinfer_kernels.jit import jit
from batchinfer_kernels.target import GFX942, LARGE_SHARED, target_arch

NUM_SMS = {80: 108, 86: 84, 89: 142, 90: 132, 100: 148, 120: 170, GFX942: 304}
"""Of the largest part of each architecture: A100, A40, L40S, H100 and H200, B200, RTX 5090, MI300X."""
MAX_SPLIT_K = 8


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """Compile-time choices. ``split_k`` programs share an output tile; ``use_tma`` loads through tensor descriptors."""

    block_m: int
    block_n: int
    block_k: int
    split_k: int
    num_warps: int
    num_stages: int
    use_tma: bool = False
    group_m: int = 8


def gemm_config(
    arch: int, m: int, n: int, k: int, dtype: torch.dtype, *, is_exact: bool, has_epilogue: bool = False
) -> GemmConfig:
    """The config of ``[m, k] @ [n, k].T`` with activations of ``dtype``; a residual or an INT8 result is an epilogue.

    Few rows (decode) wait for the weights: narrow tiles keep every SM loading, and where a narrow matrix gives too few of
    them, programs share the depth if the sums are exact. Many rows (prefill) want the largest tile that fits.
    """
    wide = dtype.itemsize == 1
    if m > 64:
        return _large_config(arch, m, n, wide=wide, is_plain=not has_epilogue and (arch == 90 or not is_exact))
    block_m = 16 if m <= 16 else 32 if m <= 32 else 64
    block_n, block_k = (64, 256) if wide else (64, 128)
    num_tiles, num_sms = triton.cdiv(n, block_n), NUM_SMS.get(arch, NUM_SMS[80])
    split_k = 1
    while is_exact and split_k < MAX_SPLIT_K and num_tiles * split_k <= num_sms and k >= 4 * split_k * block_k:
        split_k *= 2
    return GemmConfig(block_m, block_n, block_k, split_k, 4, 2 if arch == GFX942 else 4)


def _large_config(arch: int, m: int, n: int, *, wide: bool, is_plain: bool) -> GemmConfig:
    """``is_plain``: neither an epilogue nor, where Triton has only mma.sync for int8, its operands need more registers."""
    block_k = 128 if wide else 64
    if arch < 90 or not wide:
        big = m >= 256 and n >= 256
        return GemmConfig(128 if big else 64, 128, block_k, 1, 8 if big else 4, 3 if arch in LARGE_SHARED else 2)
    block_n = 256 if m >= 512 and n >= 1024 and is_plain else 128
    return GemmConfig(128, block_n, block_k, 1, 8, 3, use_tma=arch in (90, 100))


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
    if USE_TMA:
        acc = _product_tma(a_ptr, w_ptr, row0, column0, begin, end, BLOCK_M, BLOCK_N, BLOCK_K, IS_EXACT)
    else:
        a_rows, w_rows = row0 + tl.arange(0, BLOCK_M), column0 + tl.arange(0, BLOCK_N)
        acc = tile_product(
            a_ptr + a_rows.to(tl.int64)[:, None] * a_stride, (a_rows < m)[:, None],
            w_ptr + w_rows.to(tl.int64)[:, None] * k, (w_rows < n)[:, None],
            begin, end, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, IS_EXACT,
        )  # fmt: skip
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


@jit()
def tile_of(program: tl.tensor, tiles_m: tl.tensor, tiles_n: tl.tensor, GROUP_M: tl.constexpr) -> tl.tensor:
    """Which tile of rows and of columns a program owns."""
    first = program // (GROUP_M * tiles_n) * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    within = program % (GROUP_M * tiles_n)
    return first + within % height, within // height


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
    shares = torch.empty(c.split_k, m, n, dtype=torch.int32, device=a.device) if c.split_k > 1 else None
    out_scales = int(out_scale is not None and len(out_scale) > 1)
    a_arg, w_arg = a, w
    if c.use_tma:
        a_arg = TensorDescriptor.from_tensor(a, [c.block_m, c.block_k])
        w_arg = TensorDescriptor.from_tensor(w, [c.block_n, c.block_k])
    grid = (triton.cdiv(m, c.block_m) * triton.cdiv(n, c.block_n), c.split_k)
    _gemm_kernel[grid](
        a_arg, a.stride(0), w_arg, a_scale, w_scale, bias, residual, out_scale, out if shares is None else shares, m, n, k,
        c.block_m, c.block_n, c.block_k, c.split_k, c.group_m, k % c.block_k == 0, c.use_tma, is_exact, out_scales,
        num_warps=c.num_warps, num_stages=c.num_stages,
    )  # fmt: skip
    if shares is not None:
        block_n = min(1024, triton.next_power_of_2(n))
        _reduce_kernel[m, triton.cdiv(n, block_n)](
            shares, a_scale, w_scale, bias, residual, out_scale, out, m, n, c.split_k, block_n, out_scales, num_warps=4
        )
    return out
