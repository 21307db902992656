"""Linears whose product an adapter changes for some rows of a step: ``y += (x @ A.T) @ B.T``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from batchinfer.models.fused.linear import WrappedLinear, projection_of
from batchinfer.models.fused.packed_linear import PackedLinear
from batchinfer.models.fused.rotation import rotate
from batchinfer_kernels.cpu import Accumulated, Int8Rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from batchinfer.models.fused.linear import Linear, Operand
    from batchinfer.models.fused.spec import Projection
    from batchinfer_kernels.cpu import Int8Recipe, Ops, PackedProjection
    from batchinfer_kernels.cpu.operands import Activations

MIN_ROWS = 4
"""Rows a product is given at least: with fewer, floats round differently than in a larger batch."""
RANK_MULTIPLE = 16
"""Ranks are filled up with zeros, which add nothing: narrow products take paths whose rounding depends on their height."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a module's output lies in the product of a merged projection."""

    projection: str
    offset: int
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class Delta:
    """An adapter's two products for one projection, all of its modules side by side."""

    down: Linear
    up: Linear


@dataclass(frozen=True, slots=True)
class AdapterGroup:
    """Rows of a step that use one adapter."""

    deltas: Mapping[str, Delta]
    """By projection."""
    rows: torch.Tensor
    """int64, at least :data:`MIN_ROWS`: the first one is repeated if they are fewer."""
    num_rows: int

    @classmethod
    def of(cls, deltas: Mapping[str, Delta], rows: Sequence[int], device: torch.device | str = "cpu") -> AdapterGroup:
        """The group of these rows of the packed batch."""
        filled = [*rows, *[rows[0]] * (MIN_ROWS - len(rows))]
        return cls(deltas, torch.tensor(filled, dtype=torch.int64).to(device), len(rows))


@dataclass(slots=True)
class AdapterSlots:
    """All that adapters can change in a decoder, and what they change in the step that runs."""

    linears: dict[str, AdaptedLinear] = field(default_factory=dict)
    """By projection."""
    targets: dict[str, Target] = field(default_factory=dict)
    """By module: ``layers.3.self_attn.q_proj``."""
    groups: Sequence[AdapterGroup] = ()
    make: Callable[[Ops, Linear, Projection, AdapterSlots], AdaptedLinear] | None = None
    """Gives a linear room for adapters; None: :class:`AdaptedLinear`."""
    device: torch.device | str = "cpu"
    """Where rows and weights are."""
    step: object = None
    """What linears have made of ``groups``."""

    def wrap(self, ops: Ops, projection: Projection, linear: Linear) -> Linear:
        """The linear with room for adapters, if its projection has modules that one can name."""
        if not projection.modules:
            return linear
        offset = 0
        for module, part in zip(projection.modules, projection.parts, strict=True):
            self.targets[module] = Target(projection.name, offset, part.in_features, part.out_features)
            offset += part.out_features
        adapted = (self.make or AdaptedLinear)(ops, linear, projection, self)
        self.linears[projection.name] = adapted
        return adapted


class AdaptedLinear(WrappedLinear):
    """A linear that adds the adapters' part to the rows that use one. Without any it is the linear itself."""

    def __init__(self, ops: Ops, inner: Linear, projection: Projection, slots: AdapterSlots) -> None:
        super().__init__(inner)
        self._ops = ops
        self._slots = slots
        self._name = projection.name
        self._scale = projection.scale
        self._shape = (projection.out_features, projection.in_features)
        self._recipe: Int8Recipe | None = getattr(inner, "recipe", None)
        # what rows come as: an INT8 linear's are widened to float32
        self.dtype: torch.dtype = getattr(inner, "row_dtype", torch.float32)

    def num_bytes(self, ranks: Iterable[int]) -> int:
        """Size of a delta of modules of these ranks."""
        return _padded_rank(sum(ranks)) * sum(self._shape) * self.dtype.itemsize

    def delta(self, parts: Iterable[tuple[int, torch.Tensor, torch.Tensor]], scale: float) -> Delta:
        """Pack an adapter's matrices.

        ``parts`` are the first column of a module in the product, ``A [r, in]`` and ``B [out, r]`` of it; what they add
        is multiplied by ``scale``. A merged projection's modules become one product with zeros where they do not meet.
        """
        found = list(parts)
        out_features, in_features = self._shape
        rank = _padded_rank(sum(len(a) for _, a, _ in found))
        down, up = torch.zeros(rank, in_features), torch.zeros(out_features, rank)
        first = 0
        for offset, a, b in found:
            down[first : first + len(a)] = a.float()
            up[offset : offset + len(b), first : first + len(a)] = b.float() * (scale * self._scale)
            first += len(a)
        return self._delta(self._for_rows(down), up)

    def _delta(self, down: torch.Tensor, up: torch.Tensor) -> Delta:
        return Delta(*(PackedLinear(self._ops, matrix, None, self.dtype) for matrix in (down, up)))

    def packed(self) -> PackedProjection | None:
        """What the linear is made of without adapters, where the ops multiply it themselves."""
        return projection_of(self._inner)

    def split(self, columns: int) -> Sequence[Linear]:
        """See :meth:`~batchinfer.models.fused.linear.Linear.split`; the slices take no adapters."""
        return self._inner.split(columns)

    def __call__(self, x: Operand) -> Activations:
        """See :meth:`~batchinfer.models.fused.linear.Linear.__call__`."""
        product = self._inner(x)
        groups = [group for group in self._slots.groups if self._name in group.deltas]
        if not groups:
            return product
        # an INT8 product that waits for its scales is given them now: nothing can be added to it before
        out = self._ops.convert(product, torch.float32) if isinstance(product, Accumulated) else product
        for group in groups:
            delta = group.deltas[self._name]
            narrow = delta.down(_rows(x, group.rows, self.dtype))
            assert isinstance(narrow, torch.Tensor)
            added = delta.up(delta.up.convert(narrow))
            assert isinstance(added, torch.Tensor)
            out.index_add_(0, group.rows[: group.num_rows], added[: group.num_rows].to(out.dtype))
        return out

    def _for_rows(self, down: torch.Tensor) -> torch.Tensor:
        """``A`` for rows as the linear reads them: INT8 rows are smoothed and rotated, and ``A`` must be so inversely."""
        if (recipe := self._recipe) is None:
            return down
        return rotate(down if recipe.smoothing is None else down / recipe.smoothing.cpu(), recipe.rotation)


def _padded_rank(rank: int) -> int:
    return -(-rank // RANK_MULTIPLE) * RANK_MULTIPLE


def _rows(x: Operand, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(x, Int8Rows):
        return x.values.index_select(0, rows).float() * x.scales.index_select(0, rows).unsqueeze(1)
    return x.index_select(0, rows).to(dtype)
