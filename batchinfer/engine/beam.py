"""Beam search: the bookkeeping of ``generate(num_beams=...)`` of transformers, with its default of early stopping.

Each beam is a sequence that computes one token and ends; the next step's beams are sequences that find their tokens in
the prefix cache, but for those beyond the last full block, which are computed again. So beams share whatever they have
in common, hold no block while they wait for each other, and cannot starve or stall another row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from batchinfer.engine.row import Row
from batchinfer.types import FinishReason, RowError, Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from batchinfer.engine.answers import AnswerWriter
    from batchinfer.engine.sequence import Sequence
    from batchinfer.types import Completion, SampleProgress


@dataclass(frozen=True, slots=True)
class Beam:
    """Generated tokens, and the float32 sum of their log-probabilities."""

    tokens: tuple[int, ...] = ()
    score: np.float32 = field(default_factory=np.float32)


def num_candidates(width: int, num_ends: int) -> int:
    """Candidates looked at a step: enough that ``width`` are left to go on if all ends come first."""
    return max(2, 1 + num_ends) * width


class BeamSearch:
    """The search itself: continuations in, beams to compute next out. ``ends`` are the tokens that end a beam."""

    def __init__(self, width: int, max_tokens: int, length_penalty: float, ends: Collection[int]) -> None:
        self.running = [Beam()]
        self.finished: list[tuple[np.float32, Beam]] = []
        """Best first, at most ``width``, each with its score after the length penalty."""
        self._width = width
        self._max_tokens = max_tokens
        self._length_penalty = length_penalty
        self._ends = ends

    def advance(self, candidates: Iterable[Iterable[tuple[int, float]]]) -> bool:
        """Take the continuations (token, log-probability) of each running beam; False if the search is over."""
        found = [
            Beam((*beam.tokens, token), beam.score + np.float32(logprob))
            for beam, options in zip(self.running, candidates, strict=True)
            for token, logprob in options
        ]
        # of equals the first beam's, and of one beam's the first option: sorting is stable
        best = sorted(found, key=lambda beam: -beam.score)[: num_candidates(self._width, len(self._ends))]
        going_on = [beam for beam in best if not self.is_over(beam)]
        over = [(self._final_score(beam), beam) for beam in best[: self._width] if self.is_over(beam)]
        self.finished = sorted([*self.finished, *over], key=lambda pair: -pair[0])[: self._width]
        self.running = going_on[: self._width]
        return bool(self.running) and self._may_improve()

    def is_over(self, beam: Beam) -> bool:
        """Whether a beam has ended."""
        return beam.tokens[-1] in self._ends or len(beam.tokens) == self._max_tokens

    def _final_score(self, beam: Beam) -> np.float32:
        return np.float32(beam.score / np.float32(len(beam.tokens) ** self._length_penalty))

    def _may_improve(self) -> bool:
        """Whether the best running beam, as it stands, would still be among the finished ones."""
        if len(self.finished) < self._width:
            return True
        return bool(self._final_score(self.running[0]) > self.finished[-1][0])


class BeamRow(Row):
    """A row that is searched for. ``make`` gives the sequence that computes what follows some generated tokens."""

    def __init__(
        self, search: BeamSearch, ends: Collection[int], make: Callable[[Beam], Sequence], writer: AnswerWriter,
        *, echo: str | None = None, notes: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self._first = make(search.running[0])
        super().__init__([self._first], writer, echo, notes)
        self._search = search
        self._ends = ends
        self._make = make
        self._beams = [self._first]
        self._ended_ns = 0
        self._num_generated = 0

    @property
    def device_ns(self) -> int:
        """Device time of all beams so far."""
        return self._ended_ns + sum(sequence.device_ns for sequence in self.live)

    def progress(self) -> tuple[SampleProgress, ...]:
        """A search begins again: its beams are no answers yet."""
        return ()

    def end(self, sequence: Sequence, outcome: FinishReason | RowError) -> Completion | None:
        """A beam has its continuations; once all have, the search goes on or is over."""
        self.live.remove(sequence)
        self._ended_ns += sequence.device_ns
        self._num_generated += 1
        if isinstance(outcome, RowError):
            return self.fail(outcome)
        if self.live or self._search.advance(map(_options, self._beams)):
            return None
        return self._complete()

    def continuations(self) -> list[Sequence]:
        """The next step's beams, once the last one of this step has ended."""
        if self.live:
            return []
        self._beams = [self._make(beam) for beam in self._search.running]
        self.live = list(self._beams)
        return self._beams

    def _complete(self) -> Completion:
        params = self._first.params
        ended = []
        for _, beam in self._search.finished[: params.n]:
            sequence = self._make(beam)
            sequence.prompt_scores = self._first.prompt_scores
            assert sequence.scores is not None
            sequence.scores.num_top, sequence.scores.cumulative = None, float(beam.score)
            for token_id in beam.tokens:
                sequence.stop.append(token_id)
            ended.append((sequence, FinishReason.STOP if beam.tokens[-1] in self._ends else FinishReason.LENGTH))
        return self._writer.completion(ended, self._usage(), self.device_ns, self._echo, self.notes)

    def _usage(self) -> Usage:
        return Usage(self._first.num_prompt_tokens, self._first.num_cached_tokens, self._num_generated)


def _options(sequence: Sequence) -> tuple[tuple[int, float], ...]:
    """What may follow a beam, best first."""
    assert sequence.scores is not None
    return sequence.scores.tokens[0].top
