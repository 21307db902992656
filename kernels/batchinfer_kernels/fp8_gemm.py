"""FP8 (e4m3) linears for the GPUs that have the units: sm_89 and later."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from batchinfer_kernels.gemm import scaled_gemm

if TYPE_CHECKING:
    from batchinfer_kernels.gemm_config import GemmConfig

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""The largest number of e4m3."""


def fp8_gemm(
    a: torch.Tensor,
    w: torch.Tensor,
    a_scale: torch.Tensor,
    w_scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    config: GemmConfig | None = None,
) -> torch.Tensor:
    """``a [M, K]`` times ``w [N, K]``, both e4m3, with float32 scales ``a_scale [M]`` and ``w_scale [N]``: ``[M, N]``.

    Summed in float32; on sm_90 the tensor cores keep fewer bits of long sums than that.
    """
    if a.dtype != FP8 or w.dtype != FP8:
        raise ValueError(f"a is {a.dtype} and w is {w.dtype}; both must be {FP8}")
    return scaled_gemm(a, w, a_scale, w_scale, bias, residual, out_dtype, config)


def fp8_gemm_reference(
    a: torch.Tensor,
    w: torch.Tensor,
    a_scale: torch.Tensor,
    w_scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`fp8_gemm` in plain torch and float32."""
    out = (a.float() @ w.float().T) * a_scale[:, None] * w_scale
    if bias is not None:
        out = out + bias.float()
    return out if residual is None else out + residual.float()
