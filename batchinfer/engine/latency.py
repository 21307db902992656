"""How long rows wait for their first token, and then for each further one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchinfer.engine.sequence import Sequence


class Latency:
    """Sums over the sequences of an engine. ``clock`` gives integer nanoseconds.

    A sequence costs a reading of the clock when it comes, at its first token and at its end, and nothing in between.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock = clock
        self._first_tokens = 0
        self._first_token_ns = 0
        self._later_tokens = 0
        self._later_token_ns = 0

    def arrived(self, sequence: Sequence) -> None:
        """The sequence begins to wait."""
        sequence.arrived_ns = self._clock()

    def first(self, sequence: Sequence) -> None:
        """The sequence gets a token; only the first one counts, also after a preemption."""
        if sequence.arrived_ns and not sequence.first_token_ns:
            sequence.first_token_ns = self._clock()
            self._first_tokens += 1
            self._first_token_ns += sequence.first_token_ns - sequence.arrived_ns

    def ended(self, sequence: Sequence) -> None:
        """The sequence gets no further token."""
        if sequence.first_token_ns and sequence.num_output_tokens > 1:
            self._later_tokens += sequence.num_output_tokens - 1
            self._later_token_ns += self._clock() - sequence.first_token_ns

    def figures(self) -> dict[str, int]:
        """The fields of :class:`~batchinfer.engine.stats.EngineStats` that are kept here."""
        return {
            "first_tokens": self._first_tokens,
            "first_token_ns": self._first_token_ns,
            "later_tokens": self._later_tokens,
            "later_token_ns": self._later_token_ns,
        }
