"""Who runs next: requests that share a prefix together, long answers early, and nobody kept waiting for ever."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from batchinfer.engine.prefix_tree import SPARE_ENTRIES, PrefixTree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from batchinfer.engine.prefix_cache import PrefixCache
    from batchinfer.engine.sequence import Sequence

PATIENCE = 16
"""So many full batches may be let in before the request that has waited for longest."""
LONG = 2
"""An answer so many times as long as the mean may hold up the end of the job."""


class WaitingQueue:
    """Sequences that do not run, and which of them is the next. All operations cost O(log n) or less.

    In this order:

    1. what was already running and was put back, the oldest first;
    2. what has waited while ``PATIENCE * max_num_seqs`` others were let in: overtaking is bounded;
    3. a long answer that would outlast all the rest if it began later;
    4. the walk through the prefix tree: depth first, denser subtrees first, the longest answers first inside.
    """

    def __init__(self, prefixes: PrefixCache, max_num_seqs: int, estimate: Callable[[Sequence], int]) -> None:
        """``estimate`` gives the expected output of a sequence in tokens."""
        self._prefixes = prefixes
        self._estimate = estimate
        self._patience = PATIENCE * max_num_seqs
        self._tree = PrefixTree()
        self._entries: dict[Sequence, _Entry] = {}
        self._returned: dict[Sequence, None] = {}
        self._returned_heap: list[tuple[int, int, Sequence]] = []
        self._longest: list[tuple[int, int, Sequence]] = []
        self._expected = 0
        self._serial = 0
        self._num_taken = 0

    def __len__(self) -> int:
        return len(self._entries) + len(self._returned)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._returned
        yield from self._entries

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._entries or sequence in self._returned

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        hashes = self._prefixes.shareable(sequence)
        expected = self._estimate(sequence)
        self._serial += 1
        self._entries[sequence] = len(hashes), expected, self._num_taken
        self._expected += expected
        heappush(self._longest, (-expected, self._serial, sequence))
        self._tree.add(sequence, hashes, expected)

    def put_back(self, sequence: Sequence) -> None:
        """Queue a sequence that was let in already: it comes before those that were not."""
        self._serial += 1
        self._returned[sequence] = None
        heappush(self._returned_heap, (sequence.arrival, self._serial, sequence))

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out.

        Raises:
            KeyError: it does not wait.
        """
        if sequence in self._returned:
            del self._returned[sequence]
            return
        num_blocks, expected, _ = self._entries.pop(sequence)
        self._expected -= expected
        self._num_taken += 1
        self._tree.remove(sequence, num_blocks)
        if len(self._longest) > 2 * len(self._entries) + SPARE_ENTRIES:  # else those who left would be kept for ever
            self._longest = [entry for entry in self._longest if entry[2] in self._entries]
            heapify(self._longest)

    def head(self, num_running: int) -> Sequence | None:
        """The sequence that is to run next, or None."""
        while self._returned and self._returned_heap[0][2] not in self._returned:
            heappop(self._returned_heap)
        if self._returned:
            return self._returned_heap[0][2]
        self._returned_heap.clear()
        if not self._entries:
            return None
        oldest, (_, _, taken_before) = next(iter(self._entries.items()))
        if self._num_taken - taken_before >= self._patience:
            return oldest
        while self._longest[0][2] not in self._entries:
            heappop(self._longest)
        longest = -self._longest[0][0]
        if longest * len(self._entries) > LONG * self._expected and longest * max(1, num_running) > self._expected:
            return self._longest[0][2]
        return self._tree.next()


_Entry = tuple[int, int, int]
"""Shareable blocks, expected output, and how many were taken before it came."""
