"""A row that is read: its sequences are computed a few at a time, and end with their prompts."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from batchinfer.engine.answers import failed
from batchinfer.errors import RowFailure
from batchinfer.types import Completion, RowError, RowStatus, Usage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from batchinfer.engine.sequence import Sequence
    from batchinfer.types import FinishReason, SampleProgress

MAX_LIVE = 16
"""Sequences of one row that the scheduler knows at a time: a row of any length needs bounded memory."""


class Outcome(Protocol):
    """What becomes of the sequences of a row."""

    num_prompt_tokens: int
    """Tokens that the row is charged for: each text once."""

    def take(self, sequence: Sequence) -> None:
        """A sequence is computed."""

    def result(self) -> tuple[str, dict[str, Any]]:
        """The row's text, and the values of its optional columns, once all are."""


class TaskRow:
    """The row of ``sequences``, of which there is at least one; they are made as they are needed."""

    def __init__(self, request_id: str, sequences: Iterator[Sequence], outcome: Outcome) -> None:
        self.request_id = request_id
        self._sequences = sequences
        self._outcome = outcome
        self.live = list(islice(sequences, MAX_LIVE))
        """Sequences that the scheduler knows."""
        self._first = self.live[0]
        self._new: list[Sequence] = []
        self._ended_ns = 0

    @property
    def device_ns(self) -> int:
        """Device time of all its sequences so far."""
        return self._ended_ns + sum(sequence.device_ns for sequence in self.live)

    def end(self, sequence: Sequence, outcome: FinishReason | RowError) -> Completion | None:
        """A sequence has ended; the row's completion, or None while it goes on."""
        self.live.remove(sequence)
        self._ended_ns += sequence.device_ns
        if isinstance(outcome, RowError):
            return self.fail(outcome)
        self._outcome.take(sequence)
        try:
            self._new = list(islice(self._sequences, 1))
        except RowFailure as failure:
            return self.fail(failure.error)
        self.live += self._new
        if self.live:
            return None
        text, extra = self._outcome.result()
        return Completion(
            self.request_id, RowStatus.SUCCEEDED, text=text, usage=self._usage(), device_ns=self.device_ns, extra=extra
        )

    def fail(self, error: RowError) -> Completion:
        """The row ends with an error, whatever its sequences have come to."""
        return failed(self.request_id, error, self._usage(), self.device_ns, None)

    def progress(self) -> tuple[SampleProgress, ...]:
        """Nothing is generated, so there is nothing to go on from."""
        return ()

    def continuations(self) -> list[Sequence]:
        """Sequences to compute next, since others have ended; they are live already."""
        new, self._new = self._new, []
        return new

    def _usage(self) -> Usage:
        return Usage(self._outcome.num_prompt_tokens, self._first.num_cached_tokens, 0)
