"""What a stream of prompts has in common, in bounded memory: shared prefixes, distinct rows, lengths."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from heapq import heappush, heappushpop
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

BLOCK_TOKENS = 16
"""Tokens a KV cache block: what shares less than a block shares nothing."""
MAX_NODES = 1 << 17
"""Blocks whose sharing is counted at once."""
MAX_EXACT_ROWS = 1 << 16
"""Distinct rows are counted exactly up to here, and estimated to about 0.4 % beyond."""
_HASH_SPACE = 1 << 64


def chain(token_ids: Sequence[int]) -> list[int]:
    """Hashes of a prompt's full blocks, each with all before it; its last token is always computed, so never shared."""
    parent, hashes = b"", []
    for start in range(0, len(token_ids) - BLOCK_TOKENS, BLOCK_TOKENS):
        parent = blake2b(parent + array("q", token_ids[start : start + BLOCK_TOKENS]).tobytes(), digest_size=8).digest()
        hashes.append(int.from_bytes(parent))
    return hashes


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A prefix that several prompts begin with."""

    num_tokens: int
    num_rows: int
    first_row: int
    """One of the rows that have it."""

    @property
    def saved_tokens(self) -> int:
        """Prompt tokens that need not be computed again."""
        return self.num_tokens * (self.num_rows - 1)


class PrefixTree:
    """Counts how many prompts run through each block. Full, it forgets what was seen once, then what was seen least.

    So what many rows share is never forgotten, while sharing of rows that lie far apart may be missed: then
    ``is_exact`` is False and ``shared_tokens`` a lower bound.
    """

    def __init__(self, max_nodes: int = MAX_NODES) -> None:
        self._max_nodes = max_nodes
        # hash -> [prompts, depth in blocks, parent's hash, first row]
        self._nodes: dict[int, list[int]] = {}
        self.shared_tokens = 0
        """Prompt tokens that an endless cache would have had."""
        self.is_exact = True

    def add(self, hashes: Sequence[int], row_index: int) -> None:
        """Add a prompt by its :func:`chain`."""
        nodes, parent = self._nodes, 0
        for depth, block in enumerate(hashes, 1):
            node = nodes.get(block)
            if node is None:
                nodes[block] = [1, depth, parent, row_index]
            else:
                node[0] += 1
                self.shared_tokens += BLOCK_TOKENS
            parent = block
        if len(nodes) > self._max_nodes:
            self._forget()

    def _forget(self) -> None:
        self.is_exact = False
        least = 1
        while len(self._nodes) > self._max_nodes // 2:
            self._nodes = {block: node for block, node in self._nodes.items() if node[0] > least}
            least *= 2

    def top(self, number: int = 5) -> list[SharedPrefix]:
        """The prefixes that save most; of nested ones only those that fewer rows share further on."""
        deeper: dict[int, int] = {}
        for count, _, parent, _ in self._nodes.values():
            deeper[parent] = max(deeper.get(parent, 0), count)
        ends = [
            SharedPrefix(depth * BLOCK_TOKENS, count, row)
            for block, (count, depth, _, row) in self._nodes.items()
            if count > 1 and deeper.get(block, 0) < count
        ]
        return sorted(ends, key=lambda one: (-one.saved_tokens, one.first_row))[:number]


class CacheModel:
    """What a KV cache of so many blocks would hit if rows came in windows and ran depth first, as the scheduler does."""

    def __init__(self, num_blocks: int, window_rows: int) -> None:
        self._num_blocks = num_blocks
        self._window_rows = window_rows
        self._window: list[list[int]] = []
        self._cached: OrderedDict[int, None] = OrderedDict()
        self.hit_tokens = 0

    def add(self, hashes: list[int]) -> None:
        """A prompt, by its chain; :meth:`flush` after the last one."""
        self._window.append(hashes)
        if len(self._window) >= self._window_rows:
            self.flush()

    def flush(self) -> None:
        """Run what waits."""
        cached = self._cached
        for hashes in sorted(self._window):
            is_hit = True
            for block in hashes:
                is_hit = is_hit and block in cached
                self.hit_tokens += BLOCK_TOKENS * is_hit
                cached[block] = None
                cached.move_to_end(block)
            while len(cached) > self._num_blocks:
                cached.popitem(last=False)
        self._window = []


class DistinctCounter:
    """Counts distinct keys: exactly while they are few, then by the smallest hashes (k minimum values)."""

    def __init__(self, size: int = MAX_EXACT_ROWS) -> None:
        self._size = size
        self._kept: set[int] = set()
        self._largest: list[int] = []  # of what is kept, negated

    def add(self, key: bytes) -> None:
        """Count a key."""
        value = int.from_bytes(blake2b(key, digest_size=8).digest())
        if value in self._kept:
            return
        if len(self._kept) < self._size:
            heappush(self._largest, -value)
            self._kept.add(value)
        elif value < -self._largest[0]:
            self._kept.add(value)
            self._kept.discard(-heappushpop(self._largest, -value))

    @property
    def is_exact(self) -> bool:
        """Whether every distinct key is still kept."""
        return len(self._kept) < self._size

    @property
    def number(self) -> int:
        """Distinct keys."""
        if self.is_exact:
            return len(self._kept)
        return round((self._size - 1) * _HASH_SPACE / -self._largest[0])


class Histogram:
    """Counts by powers of two: bucket ``n`` holds values from ``2**(n-1)`` to ``2**n - 1``, bucket 0 zero."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.largest = 0

    def add(self, value: int) -> None:
        """Count a value."""
        bucket = value.bit_length()
        self._counts[bucket] = self._counts.get(bucket, 0) + 1
        self.largest = max(self.largest, value)

    def buckets(self) -> list[tuple[int, int, int]]:
        """``(from, up to and including, count)`` from the first to the last that has any."""
        if not self._counts:
            return []
        return [
            ((1 << bucket) >> 1, (1 << bucket) - 1, self._counts.get(bucket, 0))
            for bucket in range(min(self._counts), max(self._counts) + 1)
        ]


def common_suffix(known: Sequence[int] | None, token_ids: Sequence[int]) -> list[int]:
    """The end that two prompts share; with None, all of the second."""
    if known is None:
        return list(token_ids)
    length = 0
    for one, other in zip(reversed(known), reversed(token_ids), strict=False):
        if one != other:
            break
        length += 1
    return list(known[len(known) - length :])


def key_of(parts: Iterable[object]) -> bytes:
    """Bytes that are equal for equal parts."""
    return repr(tuple(parts)).encode("utf-8", "surrogatepass")
