"""Linears with room for adapters on the Triton kernels: all adapters of a step at once. Importing this needs Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from batchinfer.models.fused.adapted import AdaptedLinear, Delta
from batchinfer.models.fused.triton_linear import FloatLinear
from batchinfer_kernels.cpu import Int8Rows
from batchinfer_kernels.lora import LoraRows, LoraTable, lora_add, padded_offsets

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchinfer.models.fused.adapted import AdapterGroup, AdapterSlots
    from batchinfer.models.fused.linear import Linear, Operand
    from batchinfer.models.fused.spec import Projection
    from batchinfer_kernels.cpu.operands import Activations


@dataclass(frozen=True, slots=True)
class _Step:
    """The adapters of a step, as the kernels read them; made by the first linear that asks."""

    groups: Sequence[AdapterGroup]
    rows: LoraRows
    tables: dict[str, LoraTable]
    """By projection; one that no adapter changes is not there."""

    @classmethod
    def of(cls, slots: AdapterSlots) -> _Step:
        groups, device = slots.groups, slots.device
        offsets = padded_offsets([group.num_rows for group in groups])
        order = torch.cat([group.rows[: group.num_rows] for group in groups]).int()
        rows = LoraRows(order, torch.tensor(offsets, dtype=torch.int32).to(device))
        names = [name for name in slots.linears if any(name in group.deltas for group in groups)]
        numbers = torch.zeros(len(names), 3, len(offsets) - 1, dtype=torch.int64)
        for i, name in enumerate(names):
            for g, group in enumerate(groups):
                if (delta := group.deltas.get(name)) is not None:
                    numbers[i, :, g] = torch.tensor(_addresses(delta))
        dtypes = [slots.linears[name].dtype for name in names]
        most = numbers[:, 2].amax(dim=1).tolist()
        on_device = numbers.to(device)  # one copy for all projections
        tables = {
            name: LoraTable(on_device[i, 0], on_device[i, 1], on_device[i, 2], most[i], dtypes[i])
            for i, name in enumerate(names)
        }
        return cls(groups, rows, tables)


class TritonAdaptedLinear(AdaptedLinear):
    """See :class:`~batchinfer.models.fused.adapted.AdaptedLinear`; INT8 rows stay INT8, adapters have the ops' type."""

    def __init__(self, ops: Any, inner: Linear, projection: Projection, slots: AdapterSlots) -> None:
        super().__init__(ops, inner, projection, slots)
        if self._recipe is not None:
            self.dtype = ops.dtype

    def _delta(self, down: torch.Tensor, up: torch.Tensor) -> Delta:
        ops: Any = self._ops
        return Delta(*(FloatLinear(ops, matrix, None, self.dtype) for matrix in (down, up)))

    def __call__(self, x: Operand) -> Activations:
        """See :meth:`~batchinfer.models.fused.linear.Linear.__call__`."""
        product = self._inner(x)
        if not self._slots.groups:
            return product
        table = _step_of(self._slots).tables.get(self._name)
        if table is not None:
            assert isinstance(product, torch.Tensor)
            values, scale = (x.values, x.scales) if isinstance(x, Int8Rows) else (x, None)
            lora_add(product, values, _step_of(self._slots).rows, table, x_scale=scale)
        return product


def _step_of(slots: AdapterSlots) -> _Step:
    """What was made of these groups, or is now."""
    step = slots.step
    if not isinstance(step, _Step) or step.groups is not slots.groups:
        step = slots.step = _Step.of(slots)
    return step


def _addresses(delta: Delta) -> tuple[int, int, int]:
    down, up = delta.down, delta.up
    assert isinstance(down, FloatLinear)
    assert isinstance(up, FloatLinear)
    return down.weight.data_ptr(), up.weight.data_ptr(), len(down.weight)
