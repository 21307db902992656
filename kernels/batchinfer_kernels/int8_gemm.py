"""INT8 linears: W8A8 with a scale a token and a scale a channel, and W8A16."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from batchinfer_kernels.gemm import scaled_gemm

if TYPE_CHECKING:
    from batchinfer_kernels.gemm_config import GemmConfig


def int8_gemm(
    a: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    *,
    a_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out_scale: torch.Tensor | None = None,
    config: GemmConfig | None = None,
) -> torch.Tensor:
    """``a [M, K]`` times INT8 weights ``w [N, K]``: ``[M, N]`` in ``out_dtype``, rounded once.

    ``a`` is INT8 with ``a_scale [M]`` (W8A8: summed in int32, so that a row's result does not depend on the batch), or
    bfloat16, float16 or float32 without (W8A16: the order of sums may follow the tile that M selects). ``w_scale [N]`` is
    float32. ``bias [N]`` and ``residual [M, N]`` are added in float32.

    With ``out_dtype`` int8 the result leaves as the next product's INT8: divided by ``out_scale`` (float32, ``[1]`` for
    the whole tensor or ``[N]`` a channel), rounded to nearest even and held within +-127, after bias and residual. A scale
    of 0 gives zeros. INT8 has no NaN: a broken row comes out as zeros, infinities as +-127.

    That serves scales that were fixed before the run: a recipe with calibrated activations (``[1]``: it is the next
    product's ``a_scale``, the same for each row), or what is kept with a scale a channel. It saves ``M * N`` bytes written
    and, of a quantise step, ``3 * M * N`` moved. A scale a token, as dynamic recipes take it, needs the largest number of a
    whole row, which no tile sees: there quantisation stays the tail of the norm or activation that follows.

    Moves ``M * K + N * K`` bytes and ``M * N`` outputs; ``2 * M * N * K`` operations.
    """
    if w.dtype != torch.int8 or (a.dtype == torch.int8) != (a_scale is not None):
        raise ValueError(f"w is {w.dtype} and must be int8; a is {a.dtype}: int8 takes scales, other types none")
    return scaled_gemm(a, w, a_scale, w_scale, bias, residual, out_dtype, config, out_scale)


def int8_gemm_reference(
    a: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    *,
    a_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`int8_gemm` in plain torch and float32, INT8 with ``out_scale``; products of INT8 are exact."""
    # float64 holds every sum of int8 products
    out = a.float() @ w.float().T if a_scale is None else (a.double() @ w.double().T).float() * a_scale[:, None]
    out = out * w_scale
    if bias is not None:
        out = out + bias.float()
    if residual is not None:
        out = out + residual.float()
    if out_scale is None:
        return out
    inverse = torch.where(out_scale > 0, 1 / out_scale, 0.0)
    return (out * inverse).nan_to_num(0.0).clamp(-127, 127).round().to(torch.int8)
