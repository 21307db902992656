"""What the ranks of tensor parallelism compute together: sums and maxima whose bytes are the same on each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

ONE_SHOT_BYTES = 256 * 1024
"""Sums of more than two ranks are taken in one exchange up to this size, in two above it. Kernels written for this
switch at 256 KiB (8 GPUs) to 1 MiB (2); it has not been measured here, and answers do not depend on it."""


class Communicator(Protocol):
    """The ranks' exchange. All of them make the same calls in the same order, with tensors of equal shape."""

    @property
    def rank(self) -> int:
        """This one, from 0."""

    @property
    def size(self) -> int:
        """How many there are."""

    def all_gather(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Everyone's ``x`` in the order of ranks."""

    def gather(self, x: torch.Tensor) -> Sequence[torch.Tensor] | None:
        """As :meth:`all_gather` for rank 0; None for the others."""

    def all_to_all(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """What everyone has for this rank: row ``rank`` of their ``x [size, n]``, in the order of ranks."""


class Peers:
    """Reductions over the ranks.

    A sum is taken in the order of ranks, element by element, in float32. An all-reduce of the communication libraries
    would add in an order that depends on the size of the message, so that a row's bytes would depend on its batch.
    """

    def __init__(self, communicator: Communicator, *, one_shot_bytes: int = ONE_SHOT_BYTES) -> None:
        self._communicator = communicator
        self._one_shot_bytes = one_shot_bytes
        self.rank = communicator.rank
        self.size = communicator.size

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of everyone's ``x``, float32, on every rank."""
        # one exchange sends everything to everyone; two send a share each way, which pays from three ranks on
        if self.size == 2 or x.nbytes <= self._one_shot_bytes:
            return _total(self._communicator.all_gather(x))
        flat = x.flatten()
        share = -(-len(flat) // self.size)
        padded = torch.nn.functional.pad(flat, (0, share * self.size - len(flat)))
        own = _total(self._communicator.all_to_all(padded.view(self.size, share)))
        return torch.cat(list(self._communicator.all_gather(own)))[: len(flat)].view(x.shape)

    def least(self, value: int) -> int:
        """The least of everyone's values."""
        return min(int(other) for other in self._communicator.all_gather(torch.tensor(value)))

    def all_gather(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Everyone's ``x`` in the order of ranks."""
        return self._communicator.all_gather(x)

    def gather(self, x: torch.Tensor) -> Sequence[torch.Tensor] | None:
        """As :meth:`all_gather` for rank 0; None for the others."""
        return self._communicator.gather(x)


def _total(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    return total
