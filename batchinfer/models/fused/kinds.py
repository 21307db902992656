"""How the ops of a device hold weights: which class stands for each kind of linear, and for a mixture of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from batchinfer.models.fused.adapted import AdaptedLinear
from batchinfer.models.fused.int8_linear import Int8Linear, WeightOnlyLinear
from batchinfer.models.fused.mlp import ExpertsMlp
from batchinfer.models.fused.packed_linear import PackedLinear

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from batchinfer.models.fused.adapted import AdapterSlots
    from batchinfer.models.fused.linear import Linear, QuantizedLinear
    from batchinfer.models.fused.mlp import DenseMlp, Mlp
    from batchinfer.models.fused.spec import Projection
    from batchinfer_kernels.cpu import Int8Recipe, Ops


class Kinds(Protocol):
    """Makes what a fused decoder is built of. Weights are ``[out, in]``, scales and biases ``[out]``."""

    def plain(self, ops: Ops, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> Linear:
        """Weights in ``dtype``."""

    def int8(
        self, ops: Ops, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, recipe: Int8Recipe
    ) -> QuantizedLinear:
        """W8A8; see :class:`~batchinfer.models.fused.int8_linear.Int8Linear`."""

    def int8_of_tensors(self, ops: Ops, tensors: Mapping[str, torch.Tensor], rotation: int) -> QuantizedLinear:
        """W8A8, of what :meth:`~batchinfer.models.fused.linear.QuantizedLinear.tensors` gave."""

    def weight_only(self, ops: Ops, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """INT8 weights, rows as they are."""

    def adapted(self, ops: Ops, inner: Linear, projection: Projection, slots: AdapterSlots) -> AdaptedLinear:
        """The linear with room for adapters."""

    def experts(self, ops: Ops, router: Linear, top_k: int, experts: Sequence[DenseMlp], *, renormalize: bool) -> Mlp:
        """A mixture of experts."""


class _Cpu:
    def plain(self, ops: Ops, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> PackedLinear:
        return PackedLinear(ops, weight, bias, dtype)

    def int8(
        self, ops: Ops, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, recipe: Int8Recipe
    ) -> Int8Linear:
        return Int8Linear(ops, weight.t().contiguous(), scale, bias, recipe)

    def int8_of_tensors(self, ops: Ops, tensors: Mapping[str, torch.Tensor], rotation: int) -> Int8Linear:
        return Int8Linear.of_tensors(ops, tensors, rotation)

    def weight_only(
        self, ops: Ops, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
    ) -> WeightOnlyLinear:
        return WeightOnlyLinear(ops, weight, scale, bias)

    def adapted(self, ops: Ops, inner: Linear, projection: Projection, slots: AdapterSlots) -> AdaptedLinear:
        return AdaptedLinear(ops, inner, projection, slots)

    def experts(
        self, ops: Ops, router: Linear, top_k: int, experts: Sequence[DenseMlp], *, renormalize: bool
    ) -> ExpertsMlp:
        return ExpertsMlp(ops, router, top_k, experts, renormalize=renormalize)


CPU: Kinds = _Cpu()


def kinds_of(ops: Ops) -> Kinds:
    """Those of these ops."""
    if ops.name == "triton":
        from batchinfer.models.fused.triton_kinds import TRITON  # noqa: PLC0415 -- needs Triton

        return TRITON
    return CPU
