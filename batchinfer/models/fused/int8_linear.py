"""Linears with INT8 weights."""

from __future__ import annotations

import functools
import math
import time
from typing import TYPE_CHECKING

import torch

from batchinfer.models.fused.linear import FloatRows, column_parts, part_of, product_of
from batchinfer.models.fused.packed_linear import ROW_TILES, depends_on_rows, in_tiles
from batchinfer_kernels.cpu import Accumulated, Int8Recipe, Int8Rows, PackedProjection

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchinfer.models.fused.linear import Operand
    from batchinfer.models.fused.spec import Norm
    from batchinfer_kernels.cpu import Ops
    from batchinfer_kernels.cpu.native_gemm import NativeProduct
    from batchinfer_kernels.cpu.operands import Activation, Activations

SMALL_PRODUCT = 2**15
"""Weights of fewer numbers lie row after row: trying would cost more than it could gain."""
TRIED_BYTES = 8 * 1024**2
"""Weights read in a trial, unless one is larger: more than a core's cache holds, as in a step."""
TRIALS = 4


class Int8Linear:
    """W8A8: int8 weights with a scale a column, rows quantised as ``recipe`` says, exact int32 sums.

    The result keeps its scales to itself until the op that reads it applies them. Products are the ops' own where those
    are faster (:func:`~batchinfer.models.fused.linear.product_of`), else torch's, of weights that lie as this machine reads them fastest (:func:`laid_out`).
    """

    def __init__(
        self, ops: Ops, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, recipe: Int8Recipe
    ) -> None:
        """``weight`` int8 ``[in, out]``, smoothed and rotated as the recipe's rows are; ``scale [out]``."""
        self._ops = ops
        self._weight = weight
        self._is_laid_out = False
        self._product: NativeProduct | None = None
        self._scale = scale.contiguous()
        self._bias = bias
        self._recipe = recipe

    @property
    def recipe(self) -> Int8Recipe:
        """What its rows go through before they are rounded."""
        return self._recipe

    @property
    def rotation(self) -> int:
        """Block of its rows' rotation."""
        return self._recipe.rotation

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that makes it up, by name; :meth:`of_tensors` makes an equal one of them."""
        found = {
            "weight": self._plain().contiguous(),
            "scale": self._scale,
            "bias": self._bias,
            "smoothing": self._recipe.smoothing,
        }
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    @classmethod
    def of_tensors(cls, ops: Ops, tensors: Mapping[str, torch.Tensor], rotation: int) -> Int8Linear:
        """See :meth:`tensors`."""
        recipe = Int8Recipe(tensors.get("smoothing"), rotation)
        return cls(ops, tensors["weight"], tensors["scale"], tensors.get("bias"), recipe)

    def norm(self, x: Activations, norm: Norm, residual: torch.Tensor | None) -> Int8Rows:
        """See :meth:`~batchinfer.models.fused.linear.Linear.norm`."""
        return self._ops.rms_norm_int8(
            x, norm.weight, norm.eps, residual=residual, weight_offset=norm.offset, recipe=self._recipe
        )

    def act_and_mul(self, gate_up: Activations, activation: Activation) -> Int8Rows:
        """See :meth:`~batchinfer.models.fused.linear.Linear.act_and_mul`."""
        return self._ops.act_and_mul_int8(gate_up, activation, recipe=self._recipe)

    def convert(self, x: Activations) -> Int8Rows:
        """See :meth:`~batchinfer.models.fused.linear.Linear.convert`."""
        return self._ops.quantize(x, recipe=self._recipe)

    def __call__(self, x: Operand) -> Accumulated:
        """See :meth:`~batchinfer.models.fused.linear.Linear.__call__`."""
        assert isinstance(x, Int8Rows)
        self._lay_out()
        if self._product is None:
            return self._accumulated(torch._int_mm(x.values, self._weight), x)  # noqa: SLF001 -- the only one torch has
        return self._accumulated(self._product(x.values), x)

    def _accumulated(self, product: torch.Tensor, x: Int8Rows) -> Accumulated:
        return Accumulated(product, x.scales, self._scale, self._bias)

    def packed(self) -> PackedProjection | None:
        """What it is made of, where the ops multiply it themselves."""
        self._lay_out()
        if self._product is None:
            return None
        return PackedProjection(self._product.weights, self._scale, self._bias, self._recipe)

    def _plain(self) -> torch.Tensor:
        """The weights ``[in, out]``, laid out for torch."""
        return self._weight if self._product is None else self._product.weights.unpack().t()

    def _lay_out(self) -> None:
        """Put the weights in the order this machine likes; not before they are used: what is split never is as a whole."""
        if self._is_laid_out:
            return
        self._product, self._is_laid_out = product_of(self._ops, self._weight.t()), True
        self._weight = torch.empty(0) if self._product is not None else laid_out(self._weight)

    def split(self, columns: int) -> list[Int8Linear]:
        """See :meth:`~batchinfer.models.fused.linear.Linear.split`."""
        weight = self._plain()
        del self._weight
        self._product = None
        return [
            Int8Linear(self._ops, weight[:, part], self._scale[part], part_of(self._bias, part), self._recipe)
            for part in column_parts(weight.shape[1], columns)
        ]


def laid_out(weight: torch.Tensor) -> torch.Tensor:
    """int8 weights ``[in, out]`` in memory as ``torch._int_mm`` reads them fastest: row after row, or column after column.

    Sums are exact, so that the layout changes no byte of an answer.
    """
    by_columns = _reads_columns_faster(*weight.shape, torch.get_num_threads())
    return weight.t().contiguous().t() if by_columns else weight.contiguous()


@functools.cache
def _reads_columns_faster(rows: int, columns: int, threads: int) -> bool:
    """Tried once a shape: on an Intel Xeon with AMX columns took 0.4 to 0.9 of the time of rows, by shape."""
    del threads  # torch's own number; part of the key
    if rows * columns < SMALL_PRODUCT:
        return False
    copies = max(1, min(8, TRIED_BYTES // (rows * columns)))
    x = torch.ones(ROW_TILES[-1], rows, dtype=torch.int8)
    by_rows = [torch.ones(rows, columns, dtype=torch.int8) for _ in range(copies)]
    by_columns = [torch.ones(columns, rows, dtype=torch.int8).t() for _ in range(copies)]
    least = [math.inf, math.inf]
    for _ in range(TRIALS):
        for way, weights in enumerate((by_rows, by_columns)):
            started = time.perf_counter()
            for weight in weights:
                torch._int_mm(x, weight)  # noqa: SLF001 -- as above
            least[way] = min(least[way], time.perf_counter() - started)
    return least[1] < least[0]


class WeightOnlyLinear(FloatRows):
    """int8 weights with a scale a column, bfloat16 rows.

    An int8 is a bfloat16 exactly, so the weights are widened before each product, into a buffer that is let go after
    it. That costs time: a decode step of 64 rows took 1.8 times as long as in bfloat16. It is a choice for memory.
    """

    def __init__(self, ops: Ops, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> None:
        """``weight`` int8 ``[out, in]``, ``scale [out]``."""
        super().__init__(ops, torch.bfloat16)
        self._weight = weight
        self._scale = scale
        self._bias = bias

    def __call__(self, x: Operand) -> torch.Tensor:
        """See :meth:`~batchinfer.models.fused.linear.Linear.__call__`; float32."""
        assert isinstance(x, torch.Tensor)
        weight = self._weight.to(self._dtype)

        def multiply(rows: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(rows, weight)

        rows = in_tiles(x, multiply, ROW_TILES[-1:]) if depends_on_rows(self._dtype) else multiply(x)
        product = rows.float().mul_(self._scale)
        return product if self._bias is None else product.add_(self._bias)

    def split(self, columns: int) -> list[WeightOnlyLinear]:
        """See :meth:`~batchinfer.models.fused.linear.Linear.split`; views."""
        return [
            WeightOnlyLinear(self._ops, self._weight[part], self._scale[part], part_of(self._bias, part))
            for part in column_parts(len(self._weight), columns)
        ]
