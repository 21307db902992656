"""Which rows of a step's output belong to which token, where parts of the step have guesses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchinfer.engine.head_output import HeadOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchinfer.engine.scheduler import ScheduledSequence


@dataclass(frozen=True, slots=True)
class Guessed:
    """The parts that sample, and for each the row of its own last token; rows of its guesses follow that."""

    parts: list[ScheduledSequence]
    firsts: list[int]
    num_rows: int

    @classmethod
    def of(cls, parts: list[ScheduledSequence]) -> Guessed:
        """Those of a step."""
        firsts = []
        row = 0
        for part in parts:
            firsts.append(row)
            row += 1 + len(part.guesses)
        return cls(parts, firsts, row)

    @property
    def has_guesses(self) -> bool:
        """Whether there are more rows than parts."""
        return self.num_rows > len(self.parts)

    def kept(self, needs_logits: Sequence[bool]) -> list[int]:
        """Rows whose logits are needed: who needs them now may need them behind each guess."""
        return [
            row
            for part, first, is_needed in zip(self.parts, self.firsts, needs_logits, strict=True)
            if is_needed
            for row in range(first, first + 1 + len(part.guesses))
        ]

    def first(self, head: HeadOutput) -> HeadOutput:
        """The rows behind the parts' own tokens."""
        return head if not self.has_guesses else pick(head, self.firsts)

    def rows(self, head: HeadOutput, wanted: Sequence[tuple[ScheduledSequence, int]]) -> HeadOutput:
        """For each part the row behind its guess with that number; 1 is the first."""
        first_of = dict(zip((part.sequence for part in self.parts), self.firsts, strict=True))
        return pick(head, [first_of[part.sequence] + number for part, number in wanted])


def pick(head: HeadOutput, rows: Sequence[int]) -> HeadOutput:
    """Some rows of an output, in the order given."""
    place_of = {row: place for place, row in enumerate(head.kept)}
    kept = [i for i, row in enumerate(rows) if row in place_of]
    at = list(rows)
    return HeadOutput(head.best[at], head.best_index[at], kept, head.logits[[place_of[rows[i]] for i in kept]])
