"""Rows to INT8: smoothing, block-Hadamard rotation, one scale a row.

The device functions are the tail of every kernel that feeds a W8A8 GEMM. A row is held as a tile ``[ROWS, COLUMNS]`` of
float32, row-major, zero beyond its end. The rules are those of the CPU's kernels: ``scale = max|x| / 127``; a row of
zeros gets scale 0; a row with an infinity or NaN gets scale NaN, so that its products are NaN too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from batchinfer_kernels import reference
from batchinfer_kernels.jit import jit

TILE_COLUMNS = 64
MAX_ROTATION = 64


@dataclass(frozen=True, slots=True)
class RowTile:
    """How one row of ``n`` numbers lies in registers: ``rows * columns >= n``."""

    rows: int
    columns: int
    num_warps: int


def row_tile(n: int, rotation: int = 0) -> RowTile:
    """The tile of a row. Rotation multiplies it by a matrix, which takes at least 16 rows and ``rotation`` columns."""
    columns = rotation if rotation > 1 else TILE_COLUMNS
    rows = max(triton.next_power_of_2(triton.cdiv(n, columns)), 16 if rotation > 1 else 1)
    # 16 numbers a thread keep a row in registers; fewer warps could not hide the latency of one row. Rotation takes 32
    # a thread: Triton 3.7 fails on sm_100 where 8 warps share a product of 64 rows
    return RowTile(rows, columns, min(16, max(1, rows * columns // 512)))


@jit()
def rotate_tile(x: tl.tensor, ROTATION: tl.constexpr) -> tl.tensor:
    """``x [ROWS, ROTATION] @ H / sqrt(ROTATION)``, H the Hadamard matrix in natural order.

    Three bfloat16 parts hold all 24 bits of a float32, and H is +-1: the products are exact.
    """
    i = tl.arange(0, ROTATION)
    parity = i[:, None] & i[None, :]
    parity = parity ^ (parity >> 4)
    parity = parity ^ (parity >> 2)
    parity = parity ^ (parity >> 1)
    hadamard = (1 - 2 * (parity & 1)).to(tl.bfloat16)
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    y = tl.dot(low, hadamard)
    y = tl.dot(middle, hadamard, acc=y)
    y = tl.dot(high, hadamard, acc=y)
    return y * (1.0 / tl.sqrt(ROTATION * 1.0))


@jit()
def tile_max(x: tl.tensor) -> tl.tensor:
    """The largest number of a tile."""
    return tl.max(tl.reshape(x, (x.shape[0] * x.shape[1],)), axis=0)


@jit()
def tile_sum(x: tl.tensor) -> tl.tensor:
    """The sum of a tile."""
    return tl.sum(tl.sum(x, axis=1), axis=0)


@jit()
def peak_of(x: tl.tensor) -> tl.tensor:
    """max|x| of a tile, infinite where a number is infinite or NaN."""
    magnitude = tl.abs(x)
    return tile_max(tl.where(magnitude < float("inf"), magnitude, float("inf")))


@jit()
def scale_of(peak: tl.tensor) -> tl.tensor:
    """The scale of a row whose largest magnitude is ``peak``; below 1e-30 it counts as a row of zeros."""
    scale = tl.where(peak < 1e-30, 0.0, tl.div_rn(peak, 127.0))
    return tl.where(peak < float("inf"), scale, float("nan"))


@jit()
def quantized(x: tl.tensor, peak: tl.tensor) -> tl.tensor:
    """``x * 127 / peak`` rounded to nearest even, as int8."""
    is_plain = (peak >= 1e-30) & (peak < float("inf"))
    inverse = tl.where(is_plain, tl.div_rn(127.0, tl.where(is_plain, peak, 1.0)), 0.0)
    # 1.5 * 2**23: adding it leaves no fraction bits
    rounded = (tl.where(is_plain, x, 0.0) * inverse + 12582912.0) - 12582912.0
    return rounded.to(tl.int8)


@jit()
def smooth_and_rotate(
    x: tl.tensor, smoothing_ptr: tl.tensor, at: tl.tensor, inside: tl.tensor, ROTATION: tl.constexpr
) -> tl.tensor:
    """A tile times its smoothing factors, rotated; ``at`` are the places of its numbers in the row."""
    if smoothing_ptr is not None:
        x *= tl.load(smoothing_ptr + at, mask=inside, other=0.0)
    if ROTATION > 1:
        x = rotate_tile(x, ROTATION)
    return x


@jit()
def emit_row(
    x: tl.tensor,
    row: tl.tensor,
    out_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    smoothing_ptr: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    n: tl.tensor,
    ROTATION: tl.constexpr,
) -> tl.tensor:
    """Store a row: as int8 with its scale where ``scale_ptr`` is given, else in the type of ``out_ptr``."""
    target = out_ptr + row.to(tl.int64) * n + at
    if scale_ptr is not None:
        x = smooth_and_rotate(x, smoothing_ptr, at, inside, ROTATION)
        peak = peak_of(x)
        tl.store(scale_ptr + row, scale_of(peak))
        tl.store(target, quantized(x, peak), mask=inside)
    else:
        tl.store(target, x.to(out_ptr.dtype.element_ty), mask=inside)


@jit()
def _quantize_kernel(
    x_ptr: tl.tensor, x_stride: tl.tensor, out_ptr: tl.tensor, scale_ptr: tl.tensor, smoothing_ptr: tl.tensor, n: tl.tensor,
    ROTATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0)
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = at < n
    x = tl.load(x_ptr + row.to(tl.int64) * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    emit_row(x, row, out_ptr, scale_ptr, smoothing_ptr, at, inside, n, ROTATION)


def check_rows(x: torch.Tensor, rotation: int = 0) -> None:
    """Raise ValueError where a kernel over rows could not load vectors, or not rotate."""
    n = x.shape[-1]
    if x.ndim != 2 or x.stride(-1) != 1:
        raise ValueError(
            f"expected rows of contiguous numbers [num_tokens, n], got shape {tuple(x.shape)}, stride {x.stride()}"
        )
    if n % 16 or x.stride(0) % 16:
        raise ValueError(f"rows of {n} numbers at a stride of {x.stride(0)}: both must be multiples of 16")
    if rotation > 1 and (rotation not in (16, 32, MAX_ROTATION) or n % rotation):
        raise ValueError(f"rotation {rotation} must be 16, 32 or 64 and divide the width {n}")


def quantize_rows(
    x: torch.Tensor, *, smoothing: torch.Tensor | None = None, rotation: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise ``x [num_tokens, n]``: int8 of the same shape and float32 scales ``[num_tokens]``.

    ``smoothing [n]`` (float32) multiplies first; ``rotation`` is the width of the Hadamard blocks, 0 for none.
    Moves ``num_tokens * n * (size of x + 1)`` bytes.
    """
    check_rows(x, rotation)
    num_tokens, n = x.shape
    out, scale = (
        torch.empty(num_tokens, n, dtype=torch.int8, device=x.device),
        x.new_empty(num_tokens, dtype=torch.float32),
    )
    if num_tokens:
        tile = row_tile(n, rotation)
        _quantize_kernel[(num_tokens,)](
            x, x.stride(0), out, scale, smoothing, n, rotation, tile.rows, tile.columns, num_warps=tile.num_warps
        )
    return out, scale


def quantize_rows_reference(
    x: torch.Tensor, *, smoothing: torch.Tensor | None = None, rotation: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`quantize_rows` in plain torch."""
    x = x.float() if smoothing is None else x.float() * smoothing
    return reference.quantize_rows(reference.rotate(x, rotation))
