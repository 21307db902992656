"""The LM head: the best token of each row, and logits only of rows that asked for theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchinfer.models.fused.program import head_program
from batchinfer_kernels.cpu import Accumulated, Int8Rows, LogitsReduction

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from batchinfer.models.fused.linear import Linear, Operand
    from batchinfer.models.fused.spec import Norm
    from batchinfer_kernels.cpu import Ops
    from batchinfer_kernels.cpu.operands import Activations

SLICE_COLUMNS = 2048
"""Words whose logits are computed at a time: those of 64 rows are reduced while they are in a core's cache."""


class Head:
    """Product with the vocabulary, slice by slice; each slice is reduced and forgotten."""

    def __init__(self, ops: Ops, linear: Linear, num_words: int, scale: float, softcap: float | None) -> None:
        """Takes ``linear`` apart; logits are multiplied by ``scale``, then capped."""
        self._ops = ops
        self._slices = linear.split(SLICE_COLUMNS)
        self._program = head_program(ops, self._slices)
        self._num_words = num_words
        self._scale = scale
        self._softcap = softcap

    def norm(self, x: Activations, norm: Norm, residual: torch.Tensor | None) -> Operand:
        """See :meth:`batchinfer.models.fused.linear.Linear.norm`."""
        return self._slices[0].norm(x, norm, residual)

    def __call__(self, x: Operand, num_rows: int, kept: Sequence[int]) -> LogitsReduction:
        """Best words of the ``num_rows`` rows of ``x``, and the logits of rows ``kept``."""
        device = x.values.device if isinstance(x, Int8Rows) else x.device
        reduction = LogitsReduction(num_rows, kept=kept, num_columns=self._num_words, device=device)
        if self._program is not None:
            self._program(x, reduction, scale=self._scale, softcap=self._softcap)
            return reduction
        first = 0
        for part in self._slices:
            product = part(x)
            self._ops.reduce_logits(reduction, product, first, scale=self._scale, softcap=self._softcap)
            first += (product.values if isinstance(product, Accumulated) else product).shape[1]
        return reduction
