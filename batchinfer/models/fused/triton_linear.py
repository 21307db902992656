"""Linears of the fused layers on the Triton kernels. Importing this needs Triton.

Products of floats are torch's own, which on a GPU are cuBLAS. Those with INT8 weights apply their scales before they are
written, so that activations are tensors everywhere. The head is multiplied and reduced in one kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from batchinfer.models.fused.linear import FloatRows, WrappedLinear
from batchinfer_kernels.cpu import Int8Recipe, Int8Rows
from batchinfer_kernels.int8_gemm import int8_gemm
from batchinfer_kernels.lm_head import HeadWeights
from batchinfer_kernels.triton_ops import HeadProduct

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from batchinfer.models.fused.linear import Linear, Operand
    from batchinfer.models.fused.spec import Norm
    from batchinfer_kernels.cpu.operands import Activation, Activations
    from batchinfer_kernels.triton_ops import TritonOps

MULTIPLE = 16
"""Of rows of weights: what the kernels load at a time."""


class HeadLinear(WrappedLinear):
    """The head's product, which its reduction computes."""

    def __init__(self, linear: Linear, weights: HeadWeights) -> None:
        super().__init__(linear)
        self._weights = weights

    def __call__(self, x: Operand) -> Any:
        """The product that the Triton ops' ``reduce_logits`` takes."""
        return HeadProduct(x, self._weights)

    def split(self, columns: int) -> Sequence[Linear]:
        """See :meth:`~batchinfer.models.fused.linear.Linear.split`: it is whole whatever is asked for."""
        del columns
        return [self]


class FloatLinear(FloatRows):
    """Weights in ``dtype``, ``[out, in]``."""

    def __init__(self, ops: TritonOps, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(ops, dtype)
        self.weight = weight.to(ops.device, dtype).contiguous()
        self.bias = None if bias is None else bias.to(ops.device, dtype)

    def __call__(self, x: Operand) -> torch.Tensor:
        """See :meth:`~batchinfer.models.fused.linear.Linear.__call__`."""
        assert isinstance(x, torch.Tensor)
        return torch.nn.functional.linear(x, self.weight, self.bias)

    def split(self, columns: int) -> list[Linear]:
        """See :meth:`~batchinfer.models.fused.linear.Linear.split`: the head, reduced as it is multiplied."""
        del columns
        return [HeadLinear(self, HeadWeights(self.weight, bias=self.bias))]


class TritonInt8Linear:
    """W8A8: see :class:`~batchinfer.models.fused.int8_linear.Int8Linear`. Weights are ``[out, in]``, padded to whole loads."""

    def __init__(
        self, ops: TritonOps, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, recipe: Int8Recipe
    ) -> None:
        """``weight`` int8 ``[out, in]``, smoothed and rotated as the recipe's rows are; ``scale [out]``."""
        self._ops = ops
        self.num_columns = len(weight)
        self.weight, self.scale, self.bias = (_padded(x, ops.device) for x in (weight, scale, bias))
        smoothing = None if recipe.smoothing is None else recipe.smoothing.to(ops.device)
        self.recipe = Int8Recipe(smoothing, recipe.rotation)

    @property
    def rotation(self) -> int:
        """Block of its rows' rotation."""
        return self.recipe.rotation

    def tensors(self) -> dict[str, torch.Tensor]:
        """See :meth:`~batchinfer.models.fused.linear.QuantizedLinear.tensors`."""
        n = self.num_columns
        found = {
            "weight": self.weight[:n].t().contiguous(),
            "scale": self.scale[:n],
            "bias": None if self.bias is None else self.bias[:n],
            "smoothing": self.recipe.smoothing,
        }
        return {name: tensor.cpu().clone() for name, tensor in found.items() if tensor is not None}

    @classmethod
    def of_tensors(cls, ops: TritonOps, tensors: Mapping[str, torch.Tensor], rotation: int) -> TritonInt8Linear:
        """See :meth:`tensors`."""
        recipe = Int8Recipe(tensors.get("smoothing"), rotation)
        return cls(ops, tensors["weight"].t(), tensors["scale"], tensors.get("bias"), recipe)

    def norm(self, x: Activations, norm: Norm, residual: torch.Tensor | None) -> Int8Rows:
        """See :meth:`~batchinfer.models.fused.linear.Linear.norm`."""
        return self._ops.rms_norm_int8(
            x, norm.weight, norm.eps, residual=residual, weight_offset=norm.offset, recipe=self.recipe
        )

    def act_and_mul(self, gate_up: Activations, activation: Activation) -> Int8Rows:
        """See :meth:`~batchinfer.models.fused.linear.Linear.act_and_mul`."""
        return self._ops.act_and_mul_int8(gate_up, activation, recipe=self.recipe)

    def convert(self, x: Activations) -> Int8Rows:
        """See :meth:`~batchinfer.models.fused.linear.Linear.convert`."""
        return self._ops.quantize(x, recipe=self.recipe)

    def __call__(self, x: Operand) -> torch.Tensor:
        """See :meth:`~batchinfer.models.fused.linear.Linear.__call__`."""
        assert isinstance(x, Int8Rows)
        product = int8_gemm(
            x.values, self.weight, self.scale, a_scale=x.scales, bias=self.bias, out_dtype=self._ops.dtype
        )
        return product[:, : self.num_columns]

    def split(self, columns: int) -> list[Linear]:
        """See :meth:`~batchinfer.models.fused.linear.Linear.split`: the head, reduced as it is multiplied."""
        del columns
        return [_head(self)]


class TritonWeightOnlyLinear(FloatRows):
    """INT8 weights ``[out, in]`` with a scale a column, widened tile by tile as they are multiplied."""

    def __init__(self, ops: TritonOps, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(ops, ops.dtype)
        self.num_columns = len(weight)
        self.weight, self.scale, self.bias = (_padded(x, ops.device) for x in (weight, scale, bias))

    def __call__(self, x: Operand) -> torch.Tensor:
        """See :meth:`~batchinfer.models.fused.linear.Linear.__call__`."""
        assert isinstance(x, torch.Tensor)
        product = int8_gemm(x, self.weight, self.scale, bias=self.bias, out_dtype=self.row_dtype)
        return product[:, : self.num_columns]

    def split(self, columns: int) -> list[Linear]:
        """See :meth:`~batchinfer.models.fused.linear.Linear.split`: the head, reduced as it is multiplied."""
        del columns
        return [_head(self)]


def _head(linear: TritonInt8Linear | TritonWeightOnlyLinear) -> HeadLinear:
    """The head that has these weights, without their padding."""
    n = linear.num_columns
    bias = None if linear.bias is None else linear.bias[:n]
    return HeadLinear(linear, HeadWeights(linear.weight[:n], linear.scale[:n], bias))


def _padded(rows: Any, device: torch.device) -> Any:
    """With zeros behind the last one, up to a multiple that the kernels take; on the device, contiguous."""
    if rows is None:
        return None
    missing = -len(rows) % MULTIPLE
    rows = rows.to(device)
    return (torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows).contiguous()
