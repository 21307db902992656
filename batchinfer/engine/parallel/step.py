"""A step as whole numbers, as rank 0 tells it to the others: what :meth:`ModelRunner.execute` looks at, and no more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from batchinfer.engine.scheduler import ScheduledSequence


@dataclass(frozen=True, slots=True)
class StepTokens:
    """A sequence's tokens, of which only those of the step are known here."""

    start: int
    known: list[int]

    def __getitem__(self, places: slice) -> list[int]:
        """Tokens at these places of the sequence."""
        return self.known[places.start - self.start : places.stop - self.start]


@dataclass(frozen=True, slots=True)
class StepSequence:
    """What a rank has to know of a :class:`~batchinfer.engine.sequence.Sequence`."""

    token_ids: StepTokens
    block_table: list[int]
    is_prefill_only: bool
    adapter: None = None


@dataclass(frozen=True, slots=True)
class StepPart:
    """What a rank has to know of a :class:`~batchinfer.engine.scheduler.ScheduledSequence`."""

    sequence: StepSequence
    start: int
    num_new_tokens: int
    samples: bool
    guesses: list[int]


def write_step(scheduled: Sequence[ScheduledSequence], kept: Sequence[int], scored: Sequence[int]) -> torch.Tensor:
    """The step as int64 ``[n]``."""
    numbers = [len(scheduled), len(kept), len(scored), *kept, *scored]
    for part in scheduled:
        sequence, stop = part.sequence, part.start + part.num_new_tokens
        tokens, table = sequence.token_ids[part.start : stop], sequence.block_table
        flags = part.samples + 2 * sequence.is_prefill_only
        numbers += (part.start, part.num_new_tokens, flags, len(tokens), len(part.guesses), len(table))
        numbers += tokens
        numbers += part.guesses
        numbers += table
    return torch.tensor(numbers, dtype=torch.int64)


def read_step(numbers: torch.Tensor) -> tuple[list[Any], list[int], list[int]]:
    """What :func:`write_step` wrote: :class:`StepPart` instances, ``kept`` and ``scored``."""
    values = iter(numbers.tolist())
    num_parts, num_kept, num_scored = _take(values, 3)
    kept, scored = _take(values, num_kept), _take(values, num_scored)
    parts = []
    for _ in range(num_parts):
        start, num_new_tokens, flags, num_tokens, num_guesses, num_blocks = _take(values, 6)
        tokens, guesses = _take(values, num_tokens), _take(values, num_guesses)
        sequence = StepSequence(StepTokens(start, tokens), _take(values, num_blocks), bool(flags & 2))
        parts.append(StepPart(sequence, start, num_new_tokens, bool(flags & 1), guesses))
    return parts, kept, scored


def _take(values: Iterator[int], count: int) -> list[int]:
    return [next(values) for _ in range(count)]
