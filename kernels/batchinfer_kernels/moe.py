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

    ``smoothing`` and ``rotation`` are what rows go through before they are quantised; factors are ``[K]``, or
    ``[num_experts, K]`` where each expert has its own. With ``is_weight_only`` rows stay as they are.
    """

    w: torch.Tensor
    scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    smoothing: torch.Tensor | None = None
    rotation: int = 0
    is_weight_only: bool = False

    @property
    def takes_int8(self) -> bool:
        """Whether rows are quantised."""
        return self.scale is not None and not self.is_weight_only

    @property
    def smooths_by_expert(self) -> bool:
        """Whether a row must be quantised anew for each of its experts."""
        return self.takes_int8 and self.smoothing is not None and self.smoothing.ndim > 1


def expert_mlp(
    x: torch.Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    routing: Routing,
    activation: str,
    *,
    residual: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``sum_j weight_j * down_j(act(gate_j(x)) * up_j(x)) + residual`` of ``x [num_tokens, hidden]``.

    ``gate_up`` is ``[num_experts, 2 * inner, hidden]`` with the gate in the first half, ``down`` ``[num_experts, hidden,
    inner]``. INT8 weights are multiplied by INT8 rows (W8A8): each token is quantised once, before it is sent to its
    experts, or once an expert where those smooth differently. ``dtype`` (None: that of ``x``) is that of products and of
    the rows of the others, ``out_dtype`` (None: likewise) of the result.

    No value is read back and every size follows from the number of tokens, so that a graph can hold it: the grids of the
    products have ``num_pairs / block_m + num_experts`` tiles of rows, the most that any routing needs.
    """
    dtype = dtype or x.dtype
    experts = routing.experts() if gate_up.smooths_by_expert or down.smooths_by_expert else None
    scale = None
    if gate_up.takes_int8:
        rows, scale = quantize_rows(
            x, smoothing=gate_up.smoothing, rotation=gate_up.rotation,
            source=routing.tokens() if gate_up.smooths_by_expert else None,
            groups=experts if gate_up.smooths_by_expert else None,
        )  # fmt: skip
    else:
        rows = x.to(dtype)
    wide = grouped_gemm(
        rows, gate_up.w, routing, gather=not gate_up.smooths_by_expert, scatter=False, a_scale=scale,
        w_scale=gate_up.scale, bias=gate_up.bias, out_dtype=dtype,
    )  # fmt: skip
    scale = None
    if down.takes_int8:
        rows, scale = act_and_mul_quantize(
            wide, activation, smoothing=down.smoothing, rotation=down.rotation,
            groups=experts if down.smooths_by_expert else None,
        )  # fmt: skip
    else:
        rows = act_and_mul(wide, activation)
    y = grouped_gemm(
        rows, down.w, routing, gather=False, scatter=True, a_scale=scale, w_scale=down.scale, bias=down.bias,
        out_dtype=dtype,
    )  # fmt: skip
    return combine_experts(y, routing.weights, residual=residual, out_dtype=out_dtype or dtype)
