"""Linear layers of the fused path, and the form of the rows they read."""

from __future__ import annotations

import functools
import math
import time
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

from batchinfer_kernels.cpu import Accumulated, Int8Recipe, Int8Rows
from batchinfer_kernels.cpu.variants import cpu_features

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from batchinfer.models.fused.spec import Norm, Projection
    from batchinfer_kernels.cpu import Ops
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


ROW_TILES = (512, 256, 128, 64)
"""Rows of a bfloat16 product where its kernel depends on their number; longer first."""
SMALL_PRODUCT = 2**15
"""Weights of fewer numbers lie row after row: trying would cost more than it could gain."""
TRIED_BYTES = 8 * 1024**2
"""Weights read in a trial, unless one is larger: more than a core's cache holds, as in a step."""
TRIALS = 4
_equal_tiles: dict[tuple[int, ...], tuple[int, ...]] = {}
"""The tiles that give the bytes of the shortest: by columns out and in, and threads."""


@functools.cache
def depends_on_rows(dtype: torch.dtype) -> bool:
    """Whether a product's bytes depend on how many rows are multiplied at once.

    They do in bfloat16 on CPUs with AMX: oneDNN takes other kernels, which sum in another order, for less than some 35
    and more than some 250 rows. Without AMX no such case is known (``tests/engine/test_same_bytes.py``).
    """
    return dtype == torch.bfloat16 and "amx_bf16" in cpu_features()


def in_tiles(
    x: torch.Tensor, product: Callable[[torch.Tensor], torch.Tensor], tiles: Sequence[int] = ROW_TILES
) -> torch.Tensor:
    """A product of rows in tiles of fixed sizes, of which the last may be padded: no row's bytes depend on the others."""
    done, at, rows = [], 0, len(x)
    for tile in tiles:
        while rows - at >= tile:
            done.append(product(x[at : at + tile]))
            at += tile
    if at < rows:
        rest = torch.nn.functional.pad(x[at:], (0, 0, 0, tiles[-1] - (rows - at)))
        done.append(product(rest)[: rows - at])
    return done[0] if len(done) == 1 else torch.cat(done) if done else product(x)


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


class PackedLinear(FloatRows):
    """float32 or bfloat16 weights in the layout oneDNN likes best, reordered once.

    Against ``F.linear`` on one core with AVX-512 BF16, 64 rows: 2.3 times as fast in float32, 1.1-1.3 times in bfloat16; and a row's
    result does not depend on the rows beside it from 2 rows on, where ``F.linear`` in float32 needs 4. With AMX it does
    (:func:`depends_on_rows`), and rows go in tiles.
    """

    def __init__(self, ops: Ops, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(ops, dtype)
        mkldnn: Any = torch.ops.mkldnn  # has no annotations
        self._weight = mkldnn._reorder_linear_weight(weight.to(dtype).contiguous(), None)  # noqa: SLF001 -- as inductor
        self._product = mkldnn._linear_pointwise  # noqa: SLF001 -- what torch's own inductor generates calls to
        self._bias = None if bias is None else bias.to(dtype)
        self._shape = tuple(weight.shape)

    def __call__(self, x: Operand) -> torch.Tensor:
        """See :meth:`Linear.__call__`."""
        assert isinstance(x, torch.Tensor)
        return in_tiles(x, self._multiply, self._tiles()) if depends_on_rows(self._dtype) else self._multiply(x)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = self._product(x, self._weight, self._bias, "none", [], "")
        return product

    def _tiles(self) -> Sequence[int]:
        """The tiles that give equal bytes: which kernel is taken depends on shapes and threads, so that one look is enough."""
        key = (*self._shape, torch.get_num_threads())
        if key not in _equal_tiles:
            short = ROW_TILES[-1]
            rows = torch.randn(ROW_TILES[0], self._shape[1], generator=torch.Generator().manual_seed(0)).to(self._dtype)
            truth = in_tiles(rows, self._multiply, (short,))
            longer = (t for t in ROW_TILES[:-1] if torch.equal(in_tiles(rows, self._multiply, (t, short)), truth))
            _equal_tiles[key] = (*longer, short)
        return _equal_tiles[key]

    def split(self, columns: int) -> list[PackedLinear]:
        """See :meth:`Linear.split`."""
        weight = self._weight.to_dense()
        del self._weight
        return [
            PackedLinear(self._ops, weight[part], _part(self._bias, part), self._dtype)
            for part in _parts(len(weight), columns)
        ]


class PackedSlices(FloatRows):
    """A :class:`PackedLinear` that is not made until it is split, so that wide weights are never widened as a whole."""

    def __init__(self, ops: Ops, projection: Projection, dtype: torch.dtype) -> None:
        super().__init__(ops, dtype)
        self._projection = projection

    def split(self, columns: int) -> list[PackedLinear]:
        """See :meth:`Linear.split`."""
        bias = self._projection.bias()
        parts = _parts(self._projection.out_features, columns)
        return [
            PackedLinear(self._ops, weight, _part(bias, part), self._dtype)
            for weight, part in zip(self._projection.slices(columns), parts, strict=True)
        ]

    def __call__(self, x: Operand) -> torch.Tensor:
        """See :meth:`Linear.__call__`."""
        return torch.cat([part(x) for part in self.split(self._projection.out_features)], dim=1)


class Int8Linear:
    """W8A8: int8 weights with a scale a column, rows quantised as ``recipe`` says, exact int32 sums.

    ``torch._int_mm`` ran at 760-840 GOP/s on one core at 64 rows, of 960 at 256; its result keeps its scales to itself
    until the op that reads it applies them. Weights lie as this machine reads them fastest (:func:`laid_out`).
    """

    def __init__(
        self, ops: Ops, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, recipe: Int8Recipe
    ) -> None:
        """``weight`` int8 ``[in, out]``, smoothed and rotated as the recipe's rows are; ``scale [out]``."""
        self._ops = ops
        self._weight = weight
        self._is_laid_out = False
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
            "weight": self._weight.contiguous(),
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
        """See :meth:`Linear.norm`."""
        return self._ops.rms_norm_int8(
            x, norm.weight, norm.eps, residual=residual, weight_offset=norm.offset, recipe=self._recipe
        )

    def act_and_mul(self, gate_up: Activations, activation: Activation) -> Int8Rows:
        """See :meth:`Linear.act_and_mul`."""
        return self._ops.act_and_mul_int8(gate_up, activation, recipe=self._recipe)

    def convert(self, x: Activations) -> Int8Rows:
        """See :meth:`Linear.convert`."""
        return self._ops.quantize(x, recipe=self._recipe)

    def __call__(self, x: Operand) -> Accumulated:
        """See :meth:`Linear.__call__`."""
        assert isinstance(x, Int8Rows)
        if not self._is_laid_out:  # not before: what is split is never laid out whole
            self._weight, self._is_laid_out = laid_out(self._weight), True
        product = torch._int_mm(x.values, self._weight)  # noqa: SLF001 -- the only int8 product torch has
        return Accumulated(product, x.scales, self._scale, self._bias)

    def split(self, columns: int) -> list[Int8Linear]:
        """See :meth:`Linear.split`."""
        weight = self._weight
        del self._weight
        return [
            Int8Linear(self._ops, weight[:, part], self._scale[part], _part(self._bias, part), self._recipe)
            for part in _parts(weight.shape[1], columns)
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
        """See :meth:`Linear.__call__`; float32."""
        assert isinstance(x, torch.Tensor)
        weight = self._weight.to(self._dtype)

        def multiply(rows: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(rows, weight)

        rows = in_tiles(x, multiply, ROW_TILES[-1:]) if depends_on_rows(self._dtype) else multiply(x)
        product = rows.float().mul_(self._scale)
        return product if self._bias is None else product.add_(self._bias)

    def split(self, columns: int) -> list[WeightOnlyLinear]:
        """See :meth:`Linear.split`; views."""
        return [
            WeightOnlyLinear(self._ops, self._weight[part], self._scale[part], _part(self._bias, part))
            for part in _parts(len(self._weight), columns)
        ]


def _parts(length: int, step: int) -> Iterator[slice]:
    return (slice(start, start + step) for start in range(0, length, step))


def _part(bias: torch.Tensor | None, part: slice) -> torch.Tensor | None:
    return None if bias is None else bias[part].contiguous()
