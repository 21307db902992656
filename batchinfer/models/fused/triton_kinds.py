"""What fused decoders are built of on the Triton kernels. Importing this needs Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchinfer.models.fused.triton_adapted import TritonAdaptedLinear
from batchinfer.models.fused.triton_linear import FloatLinear, TritonInt8Linear, TritonWeightOnlyLinear
from batchinfer.models.fused.triton_mlp import GroupedExperts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from batchinfer.models.fused.adapted import AdapterSlots
    from batchinfer.models.fused.kinds import Kinds
    from batchinfer.models.fused.linear import Linear
    from batchinfer.models.fused.mlp import DenseMlp
    from batchinfer.models.fused.spec import Projection
    from batchinfer_kernels.cpu import Int8Recipe


class _Triton:
    """See :class:`~batchinfer.models.fused.kinds.Kinds`; ``ops`` are :class:`~batchinfer_kernels.triton_ops.TritonOps`."""

    def plain(self, ops: Any, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> FloatLinear:
        return FloatLinear(ops, weight, bias, dtype)

    def int8(
        self, ops: Any, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, recipe: Int8Recipe
    ) -> TritonInt8Linear:
        return TritonInt8Linear(ops, weight, scale, bias, recipe)

    def int8_of_tensors(self, ops: Any, tensors: Mapping[str, torch.Tensor], rotation: int) -> TritonInt8Linear:
        return TritonInt8Linear.of_tensors(ops, tensors, rotation)

    def weight_only(
        self, ops: Any, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
    ) -> TritonWeightOnlyLinear:
        return TritonWeightOnlyLinear(ops, weight, scale, bias)

    def adapted(self, ops: Any, inner: Linear, projection: Projection, slots: AdapterSlots) -> TritonAdaptedLinear:
        return TritonAdaptedLinear(ops, inner, projection, slots)

    def experts(
        self, ops: Any, router: Linear, top_k: int, experts: Sequence[DenseMlp], *, renormalize: bool
    ) -> GroupedExperts:
        return GroupedExperts(ops, router, top_k, experts, renormalize=renormalize)


TRITON: Kinds = _Triton()
