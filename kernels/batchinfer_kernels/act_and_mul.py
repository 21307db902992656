"""Gated activations: ``act(gate) * up`` of a fused gate/up projection, quantised for the down projection if asked."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from batchinfer_kernels import reference
from batchinfer_kernels.jit import jit
from batchinfer_kernels.quantize import (
    TILE_COLUMNS,
    check_groups,
    check_rotation,
    check_rows,
    peak_of,
    quantize_rows_reference,
    quantized,
    row_tile,
    scale_of,
    smooth_and_rotate,
    smoothing_of,
)
from batchinfer_kernels.target import target_arch

ACTIVATIONS = ("silu", "gelu_tanh")
CHUNK = 4096
"""Numbers a program holds at once; a row of an 8B model has 14,336, and would not fit the registers."""


@jit()
def _gated(row_ptr: tl.tensor, at: tl.tensor, inside: tl.tensor, n: tl.tensor, IS_GELU: tl.constexpr) -> tl.tensor:
    """``act(gate) * up`` at the places ``at`` of a row, zero beyond its end."""
    gate = tl.load(row_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(row_ptr + n + at, mask=inside, other=0.0).to(tl.float32)
    # gelu: 0.5 x (1 + tanh(u)) = x / (1 + e^-2u)
    exponent = -1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if IS_GELU else -gate
    return gate / (1.0 + tl.exp(exponent)) * up


# one program owns one chunk of one row
@jit()
def _act_and_mul_kernel(
    x_ptr: tl.tensor, x_stride: tl.tensor, out_ptr: tl.tensor, n: tl.tensor,
    IS_GELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * (ROWS * COLUMNS) + tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = at < n
    y = _gated(x_ptr + row * x_stride, at, inside, n, IS_GELU)
    tl.store(out_ptr + row * n + at, y.to(out_ptr.dtype.element_ty), mask=inside)


# one program owns one row: it finds the largest number, then computes all again (from the cache) and stores
@jit()
def _act_and_mul_quantize_kernel(
    x_ptr: tl.tensor, x_stride: tl.tensor, out_ptr: tl.tensor, scale_ptr: tl.tensor, smoothing_ptr: tl.tensor,
    group_ptr: tl.tensor, n: tl.tensor, IS_GELU: tl.constexpr, ROTATION: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    smoothing_ptr = smoothing_of(smoothing_ptr, group_ptr, row, n)
    row_ptr = x_ptr + row * x_stride
    offsets = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    peak = 0.0
    for start in range(0, n, ROWS * COLUMNS):
        at = start + offsets
        y = _gated(row_ptr, at, at < n, n, IS_GELU)
        peak = tl.maximum(peak, peak_of(smooth_and_rotate(y, smoothing_ptr, at, at < n, ROTATION, ROWS, COLUMNS)))
    tl.store(scale_ptr + row, scale_of(peak))
    for start in range(0, n, ROWS * COLUMNS):
        at = start + offsets
        y = _gated(row_ptr, at, at < n, n, IS_GELU)
        y = smooth_and_rotate(y, smoothing_ptr, at, at < n, ROTATION, ROWS, COLUMNS)
        tl.store(out_ptr + row * n + at, quantized(y, peak), mask=at < n)


def _checked_width(x: torch.Tensor, activation: str, rotation: int) -> int:
    check_rows(x)
    n = x.shape[1] // 2
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} must be one of {', '.join(ACTIVATIONS)}")
    if n % 16:
        raise ValueError(f"gate and up of {n} numbers each: must be a multiple of 16")
    check_rotation(n, rotation)
    return n


def _chunk(rotation: int) -> int:
    """Half of it where a rotation mixes rows of the tile, which takes a second product; sm_90 has the registers."""
    return CHUNK if rotation <= TILE_COLUMNS or target_arch() == 90 else CHUNK // 2


def act_and_mul(x: torch.Tensor, activation: str, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """``act(gate) * up`` of ``x [num_tokens, 2 * n]`` = (gate, up): ``[num_tokens, n]``, by default in the type of ``x``.

    ``activation`` is ``silu`` or ``gelu_tanh``. Moves ``num_tokens * 3 * n`` numbers.
    """
    n = _checked_width(x, activation, 0)
    out = torch.empty(len(x), n, dtype=out_dtype or x.dtype, device=x.device)
    if len(x):
        tile = row_tile(min(n, CHUNK))
        grid = (len(x), triton.cdiv(n, tile.rows * tile.columns))
        _act_and_mul_kernel[grid](
            x, x.stride(0), out, n, activation == "gelu_tanh", tile.rows, tile.columns, num_warps=tile.num_warps
        )
    return out


def act_and_mul_quantize(
    x: torch.Tensor,
    activation: str,
    *,
    smoothing: torch.Tensor | None = None,
    rotation: int = 0,
    groups: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`act_and_mul`, then :func:`~batchinfer_kernels.quantize.quantize_rows`: int8 and a scale a row.

    Moves ``num_tokens * n * (2 * size of x + 1)`` bytes; the second reading of ``x`` is meant to hit the cache.
    """
    n = _checked_width(x, activation, rotation)
    check_groups(smoothing, groups, len(x), n)
    out = torch.empty(len(x), n, dtype=torch.int8, device=x.device)
    scale = torch.empty(len(x), dtype=torch.float32, device=x.device)
    if len(x):
        tile = row_tile(min(n, _chunk(rotation)), rotation)
        _act_and_mul_quantize_kernel[(len(x),)](
            x, x.stride(0), out, scale, smoothing, groups, n, activation == "gelu_tanh", rotation, tile.rows, tile.columns,
            num_warps=tile.num_warps,
        )  # fmt: skip
    return out, scale


def act_and_mul_quantize_reference(
    x: torch.Tensor,
    activation: str,
    *,
    smoothing: torch.Tensor | None = None,
    rotation: int = 0,
    groups: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`act_and_mul_quantize` in plain torch."""
    return quantize_rows_reference(
        reference.act_and_mul(x, activation), smoothing=smoothing, rotation=rotation, groups=groups
    )
