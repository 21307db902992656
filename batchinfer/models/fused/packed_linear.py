"""Linears with float weights, packed for the ops' products or for oneDNN's, and what makes oneDNN's bytes independent of the batch."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from batchinfer.models.fused.linear import FloatRows, column_parts, part_of, product_of
from batchinfer_kernels.cpu import PackedProjection
from batchinfer_kernels.cpu.variants import cpu_features

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchinfer.models.fused.linear import Operand
    from batchinfer.models.fused.spec import Projection
    from batchinfer_kernels.cpu import Ops

ROW_TILES = (512, 256, 128, 64)
"""Rows of a bfloat16 product where its kernel depends on their number; longer first."""
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


class PackedLinear(FloatRows):
    """float32 or bfloat16 weights, reordered once: as the ops multiply them, or in the layout oneDNN likes best.

    oneDNN against ``F.linear`` on one core with AVX-512 BF16, 64 rows: 2.3 times as fast in float32, 1.1-1.3 times in
    bfloat16; and a row's result does not depend on the rows beside it from 2 rows on, where ``F.linear`` in float32
    needs 4. In bfloat16 with AMX it does (:func:`depends_on_rows`), and rows go in tiles where the ops cannot help.
    """

    def __init__(self, ops: Ops, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(ops, dtype)
        self._shape = tuple(weight.shape)
        self._own = product_of(ops, weight.to(dtype))
        if self._own is not None:
            self._bias = bias  # added to float32 sums
            return
        mkldnn: Any = torch.ops.mkldnn  # has no annotations
        self._weight = mkldnn._reorder_linear_weight(weight.to(dtype).contiguous(), None)  # noqa: SLF001 -- as inductor
        self._product = mkldnn._linear_pointwise  # noqa: SLF001 -- what torch's own inductor generates calls to
        self._bias = None if bias is None else bias.to(dtype)

    def __call__(self, x: Operand) -> torch.Tensor:
        """See :meth:`~batchinfer.models.fused.linear.Linear.__call__`; packed for the ops, float32."""
        assert isinstance(x, torch.Tensor)
        if self._own is not None:
            product = self._own(x)
            return product if self._bias is None else product.add_(self._bias)
        return in_tiles(x, self._multiply, self._tiles()) if depends_on_rows(self._dtype) else self._multiply(x)

    def packed(self) -> PackedProjection | None:
        """What it is made of, where the ops multiply it themselves."""
        return None if self._own is None else PackedProjection(self._own.weights, bias=self._bias)

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
        """See :meth:`~batchinfer.models.fused.linear.Linear.split`."""
        weight = self._weight.to_dense() if self._own is None else self._own.weights.unpack()
        self._weight = self._own = None
        return [
            PackedLinear(self._ops, weight[part], part_of(self._bias, part), self._dtype)
            for part in column_parts(len(weight), columns)
        ]


class PackedSlices(FloatRows):
    """A :class:`PackedLinear` that is not made until it is split, so that wide weights are never widened as a whole."""

    def __init__(self, ops: Ops, projection: Projection, dtype: torch.dtype) -> None:
        super().__init__(ops, dtype)
        self._projection = projection

    def split(self, columns: int) -> list[PackedLinear]:
        """See :meth:`~batchinfer.models.fused.linear.Linear.split`."""
        bias = self._projection.bias()
        parts = column_parts(self._projection.out_features, columns)
        return [
            PackedLinear(self._ops, weight, part_of(bias, part), self._dtype)
            for weight, part in zip(self._projection.slices(columns), parts, strict=True)
        ]

    def __call__(self, x: Operand) -> torch.Tensor:
        """See :meth:`~batchinfer.models.fused.linear.Linear.__call__`."""
        return torch.cat([part(x) for part in self.split(self._projection.out_features)], dim=1)
