"""Linear layers of the fused path, and the form of the rows they read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch

from batchinfer_kernels.cpu import PackedProjection
from batchinfer_kernels.cpu.native import NativeOps

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from batchinfer.models.fused.spec import Norm
    from batchinfer_kernels.cpu import Int8Rows, Ops
    from batchinfer_kernels.cpu.native_gemm import NativeProduct
    from batchinfer_kernels.cpu.operands import Activation, Activations

Operand: TypeAlias = "torch.Tensor | Int8Rows"
"""Rows as a linear reads them."""


class Linear(Protocol):
    """A product that asks the op before it for rows in its own form, so that no conversion stands between."""

    def norm(self, x: Activations, norm: Norm, residual: torch.Tensor | None) -> Operand:
        """Normed rows; ``residual += x`` first where there is one."""

    def act_and_mul(self, gate_up: Activations, activation: Activation) -> Operand:
        """``act(gate) * up``."""

    def convert(self, x: Activations) -> Operand:
        """Rows as they are."""

    def __call__(self, x: Operand) -> Activations:
        """``x [T, in]`` times the weights, ``[T, out]``."""

    def split(self, columns: int) -> Sequence[Linear]:
        """The same product in slices of so many columns, in order; this one is of no use afterwards."""


class QuantizedLinear(Linear, Protocol):
    """One whose INT8 weights can be kept in a file."""

    @property
    def rotation(self) -> int:
        """Block of its rows' rotation."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that makes it up, by name, on the CPU; ``weight`` is int8 ``[in, out]``."""


class FloatRows:
    """Asks for rows in ``dtype``."""

    def __init__(self, ops: Ops, dtype: torch.dtype) -> None:
        self._ops = ops
        self._dtype = dtype

    @property
    def row_dtype(self) -> torch.dtype:
        """Precision of its rows."""
        return self._dtype

    def norm(self, x: Activations, norm: Norm, residual: torch.Tensor | None) -> torch.Tensor:
        """See :meth:`Linear.norm`."""
        return self._ops.rms_norm(
            x, norm.weight, norm.eps, residual=residual, weight_offset=norm.offset, out_dtype=self._dtype
        )

    def act_and_mul(self, gate_up: Activations, activation: Activation) -> torch.Tensor:
        """See :meth:`Linear.act_and_mul`."""
        return self._ops.act_and_mul(gate_up, activation, out_dtype=self._dtype)

    def convert(self, x: Activations) -> torch.Tensor:
        """See :meth:`Linear.convert`."""
        if isinstance(x, torch.Tensor) and x.dtype == self._dtype and x.is_contiguous():
            return x
        return self._ops.convert(x, self._dtype)


class WrappedLinear:
    """A linear around another one, whose rows it takes; what becomes of the product is its own."""

    def __init__(self, inner: Linear) -> None:
        self._inner = inner

    def norm(self, x: Activations, norm: Norm, residual: torch.Tensor | None) -> Operand:
        """See :meth:`Linear.norm`."""
        return self._inner.norm(x, norm, residual)

    def act_and_mul(self, gate_up: Activations, activation: Activation) -> Operand:
        """See :meth:`Linear.act_and_mul`."""
        return self._inner.act_and_mul(gate_up, activation)

    def convert(self, x: Activations) -> Operand:
        """See :meth:`Linear.convert`."""
        return self._inner.convert(x)


def projection_of(linear: Linear) -> PackedProjection | None:
    """What a linear is made of, if the kernels can multiply it and nothing is added to it."""
    packed = getattr(linear, "packed", None)
    found = None if packed is None else packed()
    return found if isinstance(found, PackedProjection) else None


def product_of(ops: Ops, weight: torch.Tensor) -> NativeProduct | None:
    """The ops' own product with weights ``[out, in]``; None where torch's is as good."""
    return ops.product(weight) if isinstance(ops, NativeOps) else None


def column_parts(length: int, step: int) -> Iterator[slice]:
    """Slices of so many columns, the last of which may be narrower."""
    return (slice(start, start + step) for start in range(0, length, step))


def part_of(bias: torch.Tensor | None, part: slice) -> torch.Tensor | None:
    """A bias's numbers for a slice of the columns."""
    return None if bias is None else bias[part].contiguous()
