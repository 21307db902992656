"""A vocabulary whose words are divided between the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchinfer.models.parallel.peers import Peers


class Words:
    """This rank's words. Making one is an exchange: all ranks make theirs at once."""

    def __init__(self, num_own: int, peers: Peers) -> None:
        self._peers = peers
        self._counts = [int(n) for n in peers.all_gather(torch.tensor(num_own))]
        self.start = sum(self._counts[: peers.rank])
        """The rank's first word."""
        self.stop = self.start + num_own

    def localize(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids among the rank's words, and which of them are another rank's (0 in the former)."""
        is_elsewhere = (token_ids < self.start) | (token_ids >= self.stop)
        return (token_ids - self.start).masked_fill_(is_elsewhere, 0), is_elsewhere

    def join(self, logits: torch.Tensor) -> torch.Tensor:
        """Everyone's logits side by side, ``[..., vocab_size]``."""
        return self._side_by_side(self._peers.all_gather(self._padded(logits)))

    def join_first(self, logits: torch.Tensor) -> torch.Tensor | None:
        """As :meth:`join` for rank 0; None for the others."""
        parts = self._peers.gather(self._padded(logits))
        return None if parts is None else self._side_by_side(parts)

    def _padded(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(logits, (0, max(self._counts) - logits.shape[-1]))

    def _side_by_side(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([part[..., :count] for part, count in zip(parts, self._counts, strict=True)], dim=-1)
