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
from batchinfer_kernels.target import GFX942, target_arch

TILE_COLUMNS = 64
ROTATIONS = (16, 32, 64, 128, 256, 512)
"""Widths of the Hadamard blocks. One wider than a tile's row is rotated in two steps: H of 512 is H of 8 times H of 64."""
MAX_TILE_ROWS = 64
"""Of a tile whose rows are rotated among each other; a longer row gets wider ones."""


@dataclass(frozen=True, slots=True)
class RowTile:
    """How one row of ``n`` numbers lies in registers: ``rows * columns >= n``."""

    rows: int
    columns: int
    num_warps: int


def row_tile(n: int, rotation: int = 0) -> RowTile:
    """The tile of a row. Rotation multiplies it by a matrix, which takes at least 16 rows and up to ``rotation`` columns."""
    columns = min(rotation, TILE_COLUMNS) if rotation > 1 else TILE_COLUMNS
    while rotation > columns and n > MAX_TILE_ROWS * columns:
        columns *= 2
    rows = max(triton.next_power_of_2(triton.cdiv(n, columns)), 16 if rotation > 1 else 1)
    # 16 numbers a thread keep a row in registers; fewer warps could not hide the latency of one row. Rotation takes 32
    # a thread: Triton 3.7 fails on sm_100 where 8 warps share a product of 64 rows
    most = 8 if rotation > 1 and target_arch() == GFX942 else 16  # 16 warps of 64 lanes have 128 registers each
    return RowTile(rows, columns, min(most, max(1, rows * columns // 512)))


@jit()
def _signs(i: tl.tensor, j: tl.tensor) -> tl.tensor:
    """Entries (i, j) of the Hadamard matrix in natural order, of up to 256 rows: +-1."""
    parity = i & j
    parity = parity ^ (parity >> 4)
    parity = parity ^ (parity >> 2)
    parity = parity ^ (parity >> 1)
    return 1 - 2 * (parity & 1)


@jit()
def _parts(x: tl.tensor) -> tl.tensor:
    """Three bfloat16 parts that hold all 24 bits of a float32, the largest first."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@jit()
def rotate_tile(x: tl.tensor, ROTATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr) -> tl.tensor:
    """``x [ROWS, COLUMNS] @ H / sqrt(ROTATION)`` in blocks of ``ROTATION`` numbers, H the Hadamard matrix in natural order.

    A float32 is three bfloat16 parts, and H is +-1: the products are exact. Where a block is several rows, each row is
    rotated by itself, then the rows of a block among each other by a block-diagonal matrix: H is the Kronecker product.
    """
    i = tl.arange(0, COLUMNS)
    across = _signs(i[:, None], i[None, :]).to(tl.bfloat16)
    high, middle, low = _parts(x)
    y = tl.dot(low, across)
    y = tl.dot(middle, across, acc=y)
    y = tl.dot(high, across, acc=y)
    if ROTATION > COLUMNS:
        DEPTH: tl.constexpr = ROTATION // COLUMNS
        r = tl.arange(0, ROWS)
        is_near = r[:, None] // DEPTH == r[None, :] // DEPTH
        down = tl.where(is_near, _signs(r[:, None] % DEPTH, r[None, :] % DEPTH), 0).to(tl.bfloat16)
        high, middle, low = _parts(y)
        y = tl.dot(down, low)
        y = tl.dot(down, middle, acc=y)
        y = tl.dot(down, high, acc=y)
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
    x: tl.tensor, smoothing_ptr: tl.tensor, at: tl.tensor, inside: tl.tensor, ROTATION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """A tile times its smoothing factors, rotated; ``at`` are the places of its numbers in the row."""
    if smoothing_ptr is not None:
        x *= tl.load(smoothing_ptr + at, mask=inside, other=0.0)
    if ROTATION > 1:
        x = rotate_tile(x, ROTATION, ROWS, COLUMNS)
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
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Store a row: as int8 with its scale where ``scale_ptr`` is given, else in the type of ``out_ptr``."""
    target = out_ptr + row.to(tl.int64) * n + at
    if scale_ptr is not None:
        x = smooth_and_rotate(x, smoothing_ptr, at, inside, ROTATION, ROWS, COLUMNS)
        peak = peak_of(x)
        tl.store(scale_ptr + row, scale_of(peak))
        tl.store(target, quantized(x, peak), mask=inside)
    else:
        tl.store(target, x.to(out_ptr.dtype.element_ty), mask=inside)


@jit()
def smoothing_of(smoothing_ptr: tl.tensor, group_ptr: tl.tensor, row: tl.tensor, n: tl.tensor) -> tl.tensor:
    """The factors of a row: those of its group where rows have groups."""
    if group_ptr is not None:
        smoothing_ptr += tl.load(group_ptr + row).to(tl.int64) * n
    return smoothing_ptr


@jit()
def _quantize_kernel(
    x_ptr: tl.tensor, x_stride: tl.tensor, out_ptr: tl.tensor, scale_ptr: tl.tensor, smoothing_ptr: tl.tensor,
    source_ptr: tl.tensor, group_ptr: tl.tensor, n: tl.tensor,
    ROTATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0)
    source = row
    if source_ptr is not None:
        source = tl.load(source_ptr + row)
    smoothing_ptr = smoothing_of(smoothing_ptr, group_ptr, row, n)
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = at < n
    x = tl.load(x_ptr + source.to(tl.int64) * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    emit_row(x, row, out_ptr, scale_ptr, smoothing_ptr, at, inside, n, ROTATION, ROWS, COLUMNS)


def check_rows(x: torch.Tensor, rotation: int = 0) -> None:
    """Raise ValueError where a kernel over rows could not load vectors, or not rotate."""
    n = x.shape[-1]
    if x.ndim != 2 or x.stride(-1) != 1:
        raise ValueError(
            f"expected rows of contiguous numbers [num_tokens, n], got shape {tuple(x.shape)}, stride {x.stride()}"
        )
    if n % 16 or x.stride(0) % 16:
        raise ValueError(f"rows of {n} numbers at a stride of {x.stride(0)}: both must be multiples of 16")
    check_rotation(n, rotation)


def check_rotation(n: int, rotation: int) -> None:
    """Raise ValueError where rows of ``n`` numbers cannot be rotated in blocks of so many."""
    if rotation > 1 and (rotation not in ROTATIONS or n % rotation):
        raise ValueError(f"rotation {rotation} must be one of {ROTATIONS} and divide the width {n}")


def check_groups(smoothing: torch.Tensor | None, groups: torch.Tensor | None, num_rows: int, n: int) -> None:
    """Raise ValueError where rows name groups of factors that are not ``smoothing [num_groups, n]``, or have none to name."""
    if smoothing is not None and (smoothing.ndim, smoothing.shape[-1]) != (1 if groups is None else 2, n):
        raise ValueError(f"smoothing is {tuple(smoothing.shape)}: it must be [{n}], or [num_groups, {n}] with groups")
    if groups is not None and (smoothing is None or tuple(groups.shape) != (num_rows,)):
        raise ValueError(f"groups must be {num_rows} numbers of rows of smoothing, got {tuple(groups.shape)}")


def quantize_rows(
    x: torch.Tensor,
    *,
    smoothing: torch.Tensor | None = None,
    rotation: int = 0,
    source: torch.Tensor | None = None,
    groups: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise ``x [num_tokens, n]``: int8 of the same shape and float32 scales ``[num_tokens]``.

    ``smoothing [n]`` (float32) multiplies first; ``rotation`` is the width of the Hadamard blocks, 0 for none. With
    ``source [num_rows]`` (integers) row i of the result is row ``source[i]`` of ``x``, and with ``groups [num_rows]`` it
    is smoothed by row ``groups[i]`` of ``smoothing [num_groups, n]``: what experts with factors of their own read.
    Moves ``num_rows * n * (size of x + 1)`` bytes.
    """
    check_rows(x, rotation)
    num_rows, n = len(x) if source is None else len(source), x.shape[1]
    check_groups(smoothing, groups, num_rows, n)
    out = torch.empty(num_rows, n, dtype=torch.int8, device=x.device)
    scale = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if num_rows:
        tile = row_tile(n, rotation)
        _quantize_kernel[(num_rows,)](
            x, x.stride(0), out, scale, smoothing, source, groups, n, rotation, tile.rows, tile.columns,
            num_warps=tile.num_warps,
        )  # fmt: skip
    return out, scale


def quantize_rows_reference(
    x: torch.Tensor,
    *,
    smoothing: torch.Tensor | None = None,
    rotation: int = 0,
    source: torch.Tensor | None = None,
    groups: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`quantize_rows` in plain torch."""
    x = x.float() if source is None else x[source.long()].float()
    if smoothing is not None:
        x = x * (smoothing if groups is None else smoothing[groups.long()])
    return reference.quantize_rows(reference.rotate(x, rotation))
