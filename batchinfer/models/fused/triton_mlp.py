"""A mixture of experts in two grouped products on the Triton kernels. Importing this needs Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from batchinfer.models.fused.mlp import RoutedMlp
from batchinfer.models.fused.timed import LINEAR_KINDS, Timed
from batchinfer.models.fused.triton_linear import FloatLinear, TritonInt8Linear, TritonWeightOnlyLinear
from batchinfer_kernels.moe import ExpertWeights, expert_mlp

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchinfer.models.fused.linear import Linear, Operand
    from batchinfer.models.fused.mlp import DenseMlp
    from batchinfer_kernels.cpu.operands import Activation
    from batchinfer_kernels.triton_ops import TritonOps


class GroupedExperts(RoutedMlp):
    """See :class:`~batchinfer.models.fused.mlp.ExpertsMlp`: the same sums, all experts in one launch.

    Nothing depends on how many rows an expert has: a graph can hold it.
    """

    def __init__(
        self, ops: TritonOps, router: Linear, top_k: int, experts: Sequence[DenseMlp], *, renormalize: bool
    ) -> None:
        """``router`` takes and gives float32; the experts' linears are of one kind, and of no use afterwards."""
        super().__init__(router, top_k, renormalize=renormalize)
        self._activation: Activation = experts[0].activation
        self._gate_up = _stacked([expert.gate_up for expert in experts])
        self._down = _stacked([expert.down for expert in experts])
        first = experts[0].gate_up
        self._dtype = first.row_dtype if isinstance(first, FloatLinear) else ops.dtype

    def __call__(self, x: Operand) -> torch.Tensor:
        """See :meth:`~batchinfer.models.fused.mlp.Mlp.__call__`; float32."""
        assert isinstance(x, torch.Tensor)
        routing = self._route(x)
        return expert_mlp(
            x, self._gate_up, self._down, routing, self._activation, dtype=self._dtype, out_dtype=torch.float32
        )

    def timed(self, spent: dict[str, int]) -> GroupedExperts:
        """See :meth:`~batchinfer.models.fused.mlp.Mlp.timed`."""
        twin = object.__new__(GroupedExperts)
        vars(twin).update(vars(self), _router=Timed(self._router, LINEAR_KINDS, spent))
        return twin


def _stacked(linears: Sequence[Any]) -> ExpertWeights:
    """The weights of all experts together."""
    first = linears[0]
    assert isinstance(first, FloatLinear | TritonInt8Linear | TritonWeightOnlyLinear)
    w = torch.stack([linear.weight for linear in linears])
    bias = None if first.bias is None else torch.stack([linear.bias for linear in linears])
    if isinstance(first, FloatLinear):
        return ExpertWeights(w, bias=bias)
    scale = torch.stack([linear.scale for linear in linears])
    if isinstance(first, TritonWeightOnlyLinear):
        return ExpertWeights(w, scale, bias, is_weight_only=True)
    factors = [linear.recipe.smoothing for linear in linears]
    smoothing = None
    if any(factor is not None for factor in factors):  # an expert that calibration did not reach smooths nothing
        ones = torch.ones(w.shape[2], device=w.device)
        smoothing = torch.stack([ones if factor is None else factor for factor in factors])
    return ExpertWeights(w, scale, bias, smoothing, first.rotation)
