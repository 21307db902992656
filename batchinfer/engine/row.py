"""A request inside the engine: the sequences that are computed for it, and when it is done."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

from batchinfer.engine.answers import failed
from batchinfer.engine.progress import progress_of
from batchinfer.types import FinishReason, RowError, Usage

if TYPE_CHECKING:
    from batchinfer.engine.answers import AnswerWriter
    from batchinfer.engine.sequence import Sequence
    from batchinfer.types import Completion, SampleProgress


def sample_seed(seed: int, index: int) -> int:
    """The seed of a row's sample; that of the first is the row's own, so that one sample is the first of many."""
    if index == 0:
        return seed
    return int.from_bytes(blake2b(f"sample:{seed}:{index}".encode(), digest_size=8).digest()) >> 1


class Row:
    """One answer, or several samples of one prompt: sequences that share the prompt's blocks and end one by one.

    The row ends when its last sequence does, or with the first error among them.
    """

    def __init__(
        self, sequences: list[Sequence], writer: AnswerWriter, echo: str | None = None, notes: tuple[str, ...] = ()
    ) -> None:
        """``echo`` is the prompt's text, where the answer is to begin with it; ``notes`` become warnings."""
        self.request_id = sequences[0].request_id
        self.live = list(sequences)
        """Sequences that the scheduler knows."""
        self._all = list(sequences)
        self._writer = writer
        self._echo = echo
        self.notes = notes
        self._reasons: dict[Sequence, FinishReason] = {}

    @property
    def device_ns(self) -> int:
        """Device time of all its sequences so far."""
        return sum(sequence.device_ns for sequence in self._all)

    def end(self, sequence: Sequence, outcome: FinishReason | RowError) -> Completion | None:
        """A sequence has ended; the row's completion, or None while it goes on."""
        self.live.remove(sequence)
        if isinstance(outcome, RowError):
            return self.fail(outcome)
        self._reasons[sequence] = outcome
        return None if self.live else self._complete()

    def fail(self, error: RowError) -> Completion:
        """The row ends with an error, whatever its sequences have come to."""
        return failed(self.request_id, error, self._usage(), self.device_ns, self._all[0].clamped_max_tokens)

    def progress(self) -> tuple[SampleProgress, ...]:
        """How far its samples are; empty where there is nothing to go on from."""
        samples = tuple(progress_of(sequence, has_ended=sequence not in self.live) for sequence in self._all)
        return samples if any(sample.token_ids for sample in samples) else ()

    def continuations(self) -> list[Sequence]:
        """Sequences to compute next, since others have ended; they are live from now on."""
        return []

    def _complete(self) -> Completion:
        samples = self._all
        params = samples[0].params
        if len(samples) > params.n:
            # what is complete comes first; of equals the first: sorting is stable
            samples = sorted(samples, key=lambda s: (_is_incomplete(s), -(s.scores.cumulative if s.scores else 0.0)))
            samples = samples[: params.n]
        ended = [(sequence, self._reasons[sequence]) for sequence in samples]
        return self._writer.completion(ended, self._usage(), self.device_ns, self._echo, self.notes)

    def _usage(self) -> Usage:
        """The prompt counts once, whatever it is used for."""
        first = self._all[0]
        generated = sum(sequence.num_output_tokens for sequence in self._all)
        return Usage(first.num_prompt_tokens, first.num_cached_tokens, generated)


def _is_incomplete(sequence: Sequence) -> bool:
    return sequence.constraint is not None and not sequence.constraint.is_complete
