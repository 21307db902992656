"""From logits to token ids: greedy or drawn, each row by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import torch

    from batchinfer.sampling_params import SamplingParams
    from batchinfer.types import RowError


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One row that samples in this step.

    ``seed`` is the row's own, already derived where the request had none (0 <= seed < 2**63). ``position`` is the
    number of tokens the row has generated so far. The draw depends on the row's logits, ``seed`` and ``position`` only.
    """

    params: SamplingParams
    seed: int
    position: int


class Sampler:
    """Samples the next token of each row; holds no state between calls."""

    def __init__(self, eos_token_ids: Collection[int] = ()) -> None:
        self._eos_token_ids = tuple(eos_token_ids)

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int | RowError]:
        """Sample one token a row from ``logits [len(rows), vocab_size]`` (any float dtype; not modified).

        A row without a finite largest logit gets a :class:`RowError` (``engine_error``) in its place.
        """
        raise NotImplementedError(logits, rows)
