"""How long answers will be, by those that have ended: the less a row is feared to need, the more rows fit."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict, deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchinfer.engine.sequence import Sequence

MAX_OBSERVED = 512
"""Latest lengths kept of a kind."""
MAX_KINDS = 64
"""Kinds kept; the one unused for longest is forgotten."""
QUANTILE = 0.95
"""Share of the answers that end within the estimate. The sum over many rows is then far on the safe side."""


class _Observed:
    """The latest lengths of one kind of row."""

    __slots__ = ("count", "latest", "ordered")

    def __init__(self) -> None:
        self.latest: deque[int] = deque()
        self.ordered: list[int] = []
        self.count = 0

    def add(self, length: int) -> None:
        self.count += 1
        self.latest.append(length)
        insort(self.ordered, length)
        if len(self.latest) > MAX_OBSERVED:
            del self.ordered[bisect_right(self.ordered, self.latest.popleft()) - 1]


class LengthHistory:
    """Estimates what a row still generates from rows that asked for the same ``max_tokens`` and stop alike.

    The careful estimate, all that a row may generate, stands until ``warm_up`` rows have ended: the first to end are
    the short ones, and would make all look short. Rows that ignore the end of a sequence need no estimate.
    """

    def __init__(self, warm_up: int) -> None:
        self._warm_up = warm_up
        self._observed: OrderedDict[_Kind, _Observed] = OrderedDict()

    def observe(self, sequence: Sequence) -> None:
        """A row ended with an answer."""
        kind = _kind(sequence)
        observed = self._observed.get(kind)
        if observed is None:
            observed = self._observed[kind] = _Observed()
            if len(self._observed) > MAX_KINDS:
                self._observed.popitem(last=False)
        else:
            self._observed.move_to_end(kind)
        observed.add(sequence.num_output_tokens)

    def remaining(self, sequence: Sequence) -> int:
        """Tokens that a row will still generate: a high quantile of the rows that came as far as it is.

        At least 1, at most what it may; for a row that has outgrown all others, what it may.
        """
        most = sequence.num_remaining_tokens
        observed = self._observed.get(_kind(sequence))
        if observed is None or observed.count < self._warm_up or sequence.params.ignore_eos:
            return most
        done = sequence.num_output_tokens
        longer = bisect_right(observed.ordered, done)
        if (left := len(observed.ordered) - longer) == 0:
            return most
        expected = observed.ordered[longer + int(QUANTILE * (left - 1) + 0.999)] - done
        return max(1, min(most, expected))


_Kind = tuple[int, bool]


def _kind(sequence: Sequence) -> _Kind:
    params = sequence.params
    return params.max_tokens, bool(params.stop or params.stop_token_ids)
