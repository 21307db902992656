"""Hidden states of a prompt's tokens become one vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchinfer.tasks import Pooling

if TYPE_CHECKING:
    import torch

    from batchinfer.engine.scheduler import SchedulerOutput

LEAST_NORM = 1e-12
"""A vector shorter than this is divided by it: torch's and sentence-transformers' guard against zeros."""


class Pooler:
    """Takes in the hidden states of one prompt of ``num_tokens``, chunk by chunk and in order.

    A mean is summed in float64, token after token, so that its bytes do not depend on the chunks.
    """

    def __init__(self, pooling: Pooling, num_tokens: int) -> None:
        is_last = pooling is Pooling.LAST
        self._next = num_tokens - 1 if is_last else 0
        self._stop = 1 if pooling is Pooling.CLS else num_tokens
        self._count = self._stop - self._next
        self._sum: torch.Tensor | None = None

    @property
    def first_missing(self) -> int | None:
        """The next position whose hidden state is wanted; None once all are there."""
        return self._next if self._next < self._stop else None

    def wanted(self, start: int, stop: int) -> range:
        """Of the positions ``[start, stop)`` those whose hidden states are wanted."""
        return range(max(start, self._next), min(stop, self._stop))

    def add(self, hidden: torch.Tensor) -> None:
        """Take in the next positions' states ``[num_tokens, hidden_size]``."""
        self._next += len(hidden)
        for state in hidden.double():
            self._sum = state.clone() if self._sum is None else self._sum.add_(state)

    def vector(self) -> torch.Tensor:
        """float32 ``[hidden_size]``, once all states are there."""
        assert self._sum is not None, "no hidden state has come"
        return (self._sum / self._count).float()


def finish_vector(vector: torch.Tensor, dimensions: int | None, *, normalize: bool) -> list[float]:
    """The first ``dimensions`` numbers of a float32 vector, scaled to length 1 after the cut if asked for."""
    vector = vector[:dimensions]
    if normalize:
        vector = vector / vector.norm().clamp(min=LEAST_NORM)
    numbers: list[float] = vector.tolist()
    return numbers


@dataclass(frozen=True, slots=True)
class Unpooled:
    """Tokens of a step whose hidden states are wanted."""

    places: list[int]
    """Their places among the step's tokens."""
    _parts: list[tuple[Pooler, int]]

    @classmethod
    def of(cls, output: SchedulerOutput) -> Unpooled:
        """Those of a step."""
        places: list[int] = []
        parts = []
        first = 0
        for part in output.scheduled:
            if part.sequence.pooler is not None:
                wanted = part.sequence.pooler.wanted(part.start, part.start + part.num_new_tokens)
                places += [first + position - part.start for position in wanted]
                parts.append((part.sequence.pooler, len(wanted)))
            first += part.num_new_tokens
        return cls(places, parts)

    def deliver(self, hidden: torch.Tensor | None) -> None:
        """Hand the states over, once the step has passed."""
        if hidden is not None:
            first = 0
            for pooler, count in self._parts:
                pooler.add(hidden[first : first + count])
                first += count
