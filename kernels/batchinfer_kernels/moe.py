"""The expert layer of a mixture of experts: two grouped products with the activation between, then the weighted sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchinfer_kernels.act_and_mul import act_and_mul, act_and_mul_quantize
from batchinfer_kernels.grouped_gemm import combine_experts, grouped_gemm
from batchinfer_kernels.quantize import quantize_rows

if TYPE_CHECKING:
    import torch

    from batchinfer_kernels.routing import Routing


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Weights of all experts ``[num_experts, N, K]``; INT8 ones with a float32 scale a channel ``[num_experts, N]``.

    ``smoothing [K]`` and ``rotation`` are what rows go through before they are quantised, the same for every expert.
    """

    w: torch.Tensor
    scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    smoothing: torch.Tensor | None = None
    rotation: int = 0


def expert_mlp(
    x: torch.Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    routing: Routing,
    activation: str,
    *,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """``sum_j weight_j * down_j(act(gate_j(x)) * up_j(x)) + residual`` of ``x [num_tokens, hidden]``, in its type.

    ``gate_up`` is ``[num_experts, 2 * inner, hidden]`` with the gate in the first half, ``down`` ``[num_experts, hidden,
    inner]``. INT8 weights are multiplied by INT8 rows (W8A8): each token is quantised once, before it is sent to its
    experts.
    """
    if gate_up.scale is None:
        wide = grouped_gemm(x, gate_up.w, routing, gather=True, scatter=False, bias=gate_up.bias, out_dtype=x.dtype)
    else:
        rows, scale = quantize_rows(x, smoothing=gate_up.smoothing, rotation=gate_up.rotation)
        wide = grouped_gemm(
            rows, gate_up.w, routing, gather=True, scatter=False, a_scale=scale, w_scale=gate_up.scale,
            bias=gate_up.bias, out_dtype=x.dtype,
        )  # fmt: skip
    if down.scale is None:
        inner = act_and_mul(wide, activation)
        y = grouped_gemm(inner, down.w, routing, gather=False, scatter=True, bias=down.bias, out_dtype=x.dtype)
    else:
        rows, scale = act_and_mul_quantize(wide, activation, smoothing=down.smoothing, rotation=down.rotation)
        y = grouped_gemm(
            rows, down.w, routing, gather=False, scatter=True, a_scale=scale, w_scale=down.scale, bias=down.bias,
            out_dtype=x.dtype,
        )  # fmt: skip
    return combine_experts(y, routing.weights, residual=residual, out_dtype=x.dtype)
