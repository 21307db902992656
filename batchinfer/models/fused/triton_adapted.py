"""Linears with room for adapters on the Triton kernels. Importing this needs Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchinfer.models.fused.adapted import AdaptedLinear, Delta
from batchinfer.models.fused.triton_linear import FloatLinear

if TYPE_CHECKING:
    import torch


class TritonAdaptedLinear(AdaptedLinear):
    """See :class:`~batchinfer.models.fused.adapted.AdaptedLinear`."""

    def _delta(self, down: torch.Tensor, up: torch.Tensor) -> Delta:
        ops: Any = self._ops
        return Delta(*(FloatLinear(ops, matrix, None, self.dtype) for matrix in (down, up)))
