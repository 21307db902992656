"""RMS norm of rows, with the residual's addition before it and the quantisation for the next GEMM after it."""

from __future__ import annotations

import torch
import triton.language as tl

from batchinfer_kernels import reference
from batchinfer_kernels.jit import jit
from batchinfer_kernels.quantize import check_rows, emit_row, quantize_rows_reference, row_tile, tile_sum


# one program owns one row
@jit()
def _rms_norm_kernel(
    x_ptr: tl.tensor, x_stride: tl.tensor, residual_ptr: tl.tensor, weight_ptr: tl.tensor, out_ptr: tl.tensor, scale_ptr: tl.tensor, smoothing_ptr: tl.tensor,
    n: tl.tensor, eps: tl.tensor, weight_offset: tl.tensor, ROTATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0)
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = at < n
    x = tl.load(x_ptr + row.to(tl.int64) * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual_at = residual_ptr + row.to(tl.int64) * n + at
        kept = (tl.load(residual_at, mask=inside, other=0.0).to(tl.float32) + x).to(residual_ptr.dtype.element_ty)
        tl.store(residual_at, kept, mask=inside)
        x = kept.to(tl.float32)  # what later layers will see, not what it was before rounding
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32) + weight_offset
    x = x * tl.rsqrt(tile_sum(x * x) / n + eps) * weight
    # a weight offset turns the zeros beyond the row's end into zeros still: x is zero there
    emit_row(x, row, out_ptr, scale_ptr, smoothing_ptr, at, inside, n, ROTATION, ROWS, COLUMNS)


def _launch(
    x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float, residual: torch.Tensor | None,
    out: torch.Tensor, scale: torch.Tensor | None, smoothing: torch.Tensor | None, rotation: int,
) -> None:  # fmt: skip
    check_rows(x, rotation)
    if residual is not None and (residual.shape != x.shape or not residual.is_contiguous()):
        raise ValueError(f"the residual must be contiguous and of shape {tuple(x.shape)}, got {tuple(residual.shape)}")
    num_tokens, n = x.shape
    if not num_tokens:
        return
    tile = row_tile(n, rotation)
    _rms_norm_kernel[(num_tokens,)](
        x, x.stride(0), residual, weight, out, scale, smoothing, n, eps, weight_offset,
        rotation, tile.rows, tile.columns, num_warps=tile.num_warps,
    )  # fmt: skip


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    weight_offset: float = 0.0,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``x [num_tokens, n]`` over its root mean square, times ``weight [n] + weight_offset``, by default in the type of ``x``.

    ``residual [num_tokens, n]``, where given, becomes ``residual + x`` in place and is what gets normalised.
    ``weight_offset`` is 1 for Gemma. Moves ``num_tokens * n`` numbers in and out, and the residual in and out.
    """
    out = torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device)
    _launch(x, weight, eps, weight_offset, residual, out, None, None, 0)
    return out


def rms_norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    weight_offset: float = 0.0,
    residual: torch.Tensor | None = None,
    smoothing: torch.Tensor | None = None,
    rotation: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`rms_norm`, then :func:`~batchinfer_kernels.quantize.quantize_rows`, without the numbers between in memory."""
    out = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scale = torch.empty(len(x), dtype=torch.float32, device=x.device)
    _launch(x, weight, eps, weight_offset, residual, out, scale, smoothing, rotation)
    return out, scale


def rms_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    weight_offset: float = 0.0,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`rms_norm` in plain torch, in float32; the residual is changed as the kernel changes it."""
    if residual is not None:
        x = residual.copy_(residual.float() + x.float())
    return reference.rms_norm(x, weight, eps, weight_offset=weight_offset)


def rms_norm_quantize_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    weight_offset: float = 0.0,
    residual: torch.Tensor | None = None,
    smoothing: torch.Tensor | None = None,
    rotation: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`rms_norm_quantize` in plain torch."""
    normed = rms_norm_reference(x, weight, eps, weight_offset=weight_offset, residual=residual)
    return quantize_rows_reference(normed, smoothing=smoothing, rotation=rotation)
