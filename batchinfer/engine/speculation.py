"""Guessing the next tokens from what the row has said before (prompt lookup), and when that is worth a try.

A guess changes no answer: each guessed token is computed with its context like any other, sampled as if it had come
alone, and dropped with all behind it where the sample is another.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as Sequence_

    from batchinfer.engine.sequence import Sequence

GRAMS = (3, 2)
"""Lengths of the text that must have been there before; the longer one is looked for first."""
LENGTHS = (8, 4, 2)
"""Guesses a sequence and step, most first."""
WEIGHT = 0.1
"""Of the newest observation in a moving mean."""
FIRST_ACCEPTED = 0.7
"""Share of guesses that is expected to be right before any was made."""
RETRY_STEPS = 64
"""Steps until guessing is tried again after it did not pay: an answer may begin to repeat later."""


class NgramIndex:
    """Where each short run of tokens of one sequence was seen last. Memory: some 200 bytes a token."""

    __slots__ = ("_last", "_num_indexed", "accepted", "skipped")

    def __init__(self) -> None:
        self._last: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0
        self.accepted = FIRST_ACCEPTED
        """Moving mean of the share of guesses that were right."""
        self.skipped = 0
        """Steps without a guess since the last one, for want of success."""

    def guess(self, token_ids: Sequence_[int], count: int) -> list[int]:
        """At most ``count`` tokens that followed when the end of ``token_ids`` was seen before."""
        for end in range(max(self._num_indexed, 1), len(token_ids)):
            for gram in GRAMS:
                if gram <= end:
                    self._last[tuple(token_ids[end - gram : end])] = end
        self._num_indexed = len(token_ids)
        for gram in GRAMS:
            at = self._last.get(tuple(token_ids[-gram:])) if gram <= len(token_ids) else None
            if at is not None:
                return list(token_ids[at : at + count])
        return []


class StepCosts:
    """Mean time of steps by the tokens in them, as they were measured: a table of a few points, straight in between."""

    def __init__(self, measured: Iterable[tuple[int, int]] = ()) -> None:
        """``measured`` are tokens and nanoseconds of steps that were measured before."""
        self._points: dict[int, tuple[float, float]] = {}
        for num_tokens, elapsed_ns in measured:
            self.observe(num_tokens, elapsed_ns)
        self._is_calibrated = len(self._points) > 1

    def observe(self, num_tokens: int, elapsed_ns: int) -> None:
        """Take in a step."""
        bucket = num_tokens.bit_length()
        tokens, cost = self._points.get(bucket, (num_tokens, elapsed_ns))
        self._points[bucket] = tokens + WEIGHT * (num_tokens - tokens), cost + WEIGHT * (elapsed_ns - cost)

    def of(self, num_tokens: int) -> float | None:
        """Expected time in ns; None before any step was seen.

        Beyond the largest step: on the last line, if there was a measurement to begin with; else that of the largest,
        so that it is tried.
        """
        points = sorted(self._points.values())
        if not points:
            return None
        at = bisect_left(points, (num_tokens, 0.0))
        if at == len(points) and self._is_calibrated:
            at -= 1
        if at == 0 or at == len(points):
            return points[min(at, len(points) - 1)][1]
        (low, low_cost), (high, high_cost) = points[at - 1], points[at]
        return low_cost + (high_cost - low_cost) * (num_tokens - low) / max(high - low, 1e-9)


class Speculator:
    """Decides step by step how many tokens to guess.

    ``always`` guesses wherever there is something to guess from; otherwise only while tokens a second are expected to
    rise: by the measured times of steps of either size, and by the share of guesses that were right.
    """

    def __init__(self, *, always: bool = False, costs: StepCosts | None = None) -> None:
        """``costs`` are what is known of steps before the first; without, some are seen before any guess is made."""
        self._always = always
        self._costs = costs or StepCosts()
        self._accepted = FIRST_ACCEPTED
        self._idle_steps = 0

    def length(self, num_sequences: int) -> int:
        """Tokens to guess for each of so many sequences in the next step; 0 is none."""
        if self._always:
            return LENGTHS[0]
        length = best_length(self._costs, num_sequences, self._accepted)
        self._idle_steps = 0 if length else self._idle_steps + 1
        if self._idle_steps >= RETRY_STEPS:
            self._idle_steps, self._accepted = 0, FIRST_ACCEPTED
        return length

    def guess(self, sequence: Sequence, count: int) -> list[int]:
        """Guesses for one sequence; none while its own guesses are mostly wrong, except now and then."""
        index = sequence.guesses
        if index is None:
            index = sequence.guesses = NgramIndex()
        if not self._always and index.accepted < 0.2 and index.skipped < RETRY_STEPS:
            index.skipped += 1
            return []
        index.skipped = 0
        return index.guess(sequence.token_ids, count)

    def observe_step(self, num_tokens: int, elapsed_ns: int) -> None:
        """A step that only decoded took so long."""
        self._costs.observe(num_tokens, elapsed_ns)

    def observe_guesses(self, sequence: Sequence, num_guessed: int, num_accepted: int) -> None:
        """So many of a sequence's guesses were right. One wrong guess ends a run: those behind it say nothing."""
        share = num_accepted / min(num_guessed, num_accepted + 1)
        self._accepted += WEIGHT * (share - self._accepted)
        if sequence.guesses is not None:
            sequence.guesses.accepted += WEIGHT * (share - sequence.guesses.accepted)


def best_length(costs: StepCosts, num_sequences: int, accepted: float) -> int:
    """Guesses for each of so many sequences that give the most tokens a second; 0 if none do better than none."""
    plain = costs.of(num_sequences)
    if plain is None:
        return 0
    best, length = num_sequences / plain, 0
    for count in LENGTHS:
        cost = costs.of(num_sequences * (1 + count))
        rate = num_sequences * expected_tokens(accepted, count) / cost if cost else 0.0
        if rate > best:
            best, length = rate, count
    return length


def break_even(costs: StepCosts, accepted: float = FIRST_ACCEPTED, most: int = 1024) -> int:
    """The largest batch, of at most ``most`` rows, up to which guessing pays if that share of guesses is right."""
    sizes = itertools.takewhile(lambda number: best_length(costs, number, accepted), range(1, most + 1))
    return max(sizes, default=0)


def expected_tokens(accepted: float, count: int) -> float:
    """Tokens a step gives with ``count`` guesses, each right with the same chance if all before it are."""
    return sum(accepted**i for i in range(count + 1))
