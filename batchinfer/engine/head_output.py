"""What a step gives the sampler: the best token of every row, and logits of those rows that need them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchinfer_kernels.cpu import LogitsReduction

SLICE_ELEMENTS = 1 << 21
"""Logits widened at a time: 8 MiB in float32."""


@dataclass(frozen=True, slots=True)
class HeadOutput:
    """Of the rows that sample in a step, in order."""

    best: torch.Tensor
    """Largest logit, float32 ``[num_rows]``; NaN where a logit is NaN, -inf where none is above that."""
    best_index: torch.Tensor
    """Its token, int64 ``[num_rows]``: the lowest of equals; meaningless where ``best`` is not finite."""
    kept: Sequence[int]
    """Rows whose logits were asked for."""
    logits: torch.Tensor
    """Their logits ``[len(kept), vocab_size]``, any float dtype."""
    hidden: torch.Tensor | None = None
    """Of other rows the hidden states after the last norm, float32 ``[num_rows, hidden_size]``; None if none was asked
    for."""

    @staticmethod
    def of_logits(logits: torch.Tensor, kept: Sequence[int]) -> HeadOutput:
        """Reduce whole logits ``[num_rows, vocab_size]``, of which only the rows ``kept`` stay."""
        num_rows, vocab_size = logits.shape
        best = torch.empty(num_rows, device=logits.device)
        index = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
        step = max(1, SLICE_ELEMENTS // max(1, vocab_size))
        for start in range(0, num_rows, step):
            part = slice(start, start + step)
            torch.max(logits[part].float(), dim=1, out=(best[part], index[part]))
        whole = len(kept) == num_rows
        return HeadOutput(best, index, kept, logits if whole else logits[list(kept)])

    @staticmethod
    def of_reduction(reduction: LogitsReduction) -> HeadOutput:
        """What the CPU's head kept."""
        best = reduction.best.masked_fill(reduction.has_nan, float("nan"))
        return HeadOutput(best, reduction.best_index, reduction.kept, reduction.logits)

    def first(self, num_rows: int) -> HeadOutput:
        """Without the padding that follows the first rows, none of which is kept."""
        return HeadOutput(self.best[:num_rows], self.best_index[:num_rows], self.kept, self.logits, self.hidden)

    def split(self, num_rows: int) -> tuple[HeadOutput, torch.Tensor]:
        """The first rows, and the logits of all others, each of which is kept."""
        if len(self.best) == num_rows:
            return self, self.logits[:0]
        num_kept = len(self.kept) - (len(self.best) - num_rows)
        head = HeadOutput(
            self.best[:num_rows], self.best_index[:num_rows], self.kept[:num_kept], self.logits[:num_kept]
        )
        return head, self.logits[num_kept:]
