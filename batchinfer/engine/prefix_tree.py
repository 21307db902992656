"""Waiting requests by what their prompts begin with: a block-aligned radix tree that is walked depth first."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence as Sequence_

    from batchinfer.engine.block_pool import BlockHash
    from batchinfer.engine.sequence import Sequence

SPARE_ENTRIES = 64
"""Outdated heap entries that are not worth a clean-up."""

ALONE = -4
"""The density of a request that shares nothing, in quarters and negated."""


class _Node:
    """All waiting requests that begin with the same ``depth`` blocks."""

    __slots__ = (
        "children",
        "count",
        "depth",
        "distinct",
        "entries",
        "hashes",
        "longest",
        "members",
        "parent",
        "rank",
        "total",
    )

    def __init__(self, parent: _Node | None, depth: int, hashes: Sequence_[BlockHash], rank: int = 0) -> None:
        self.parent = parent
        self.rank = rank
        """When it was made; breaks ties."""
        self.depth = depth
        self.hashes = hashes
        """Of a request that is or was below; its first ``depth`` are this node's path."""
        self.children: dict[BlockHash, _Node] = {}
        self.members: list[tuple[int, int, int, Sequence]] = []
        """Heap of requests that end here: the longest expected output first, then the oldest."""
        self.entries: list[_Entry] = []
        """Heap of children; an entry may be outdated."""
        self.count = 0
        self.longest = 0
        self.total = 0
        """Blocks of all requests below, each for itself."""
        self.distinct = 0
        """Blocks below and in this node's own edge, shared ones once."""

    @property
    def density(self) -> int:
        """Blocks read a block kept, in quarters and negated: the denser, the smaller."""
        return -(-ALONE * self.total // max(1, self.distinct))

    def entry(self, arrival: int) -> _Entry:
        """Denser first, then the longest expected output, then the oldest."""
        return self.density, -self.longest, arrival, self.rank, self


_Entry = tuple[int, int, int, int, _Node]


class PrefixTree:
    """A radix tree over the hashes of the prompts' shareable blocks; a hash names a block and all before it.

    Hence the common prefix of two requests is found by bisection, and root, adapter and salt, which the first hash
    includes, keep strangers apart. Adding and removing cost O(branchings on the path), and a path has no more nodes than
    its prompt has blocks; most have two or three.
    """

    def __init__(self) -> None:
        self._root = _Node(None, 0, ())
        self._node_of: dict[Sequence, _Node] = {}
        self._cursor = self._root
        self._ranks = count(1)

    def __len__(self) -> int:
        return self._root.count

    def add(self, sequence: Sequence, hashes: Sequence_[BlockHash], expected: int) -> None:
        """Add a request with the hashes of its shareable blocks and its expected output in tokens."""
        node = self._root
        while node.depth < len(hashes):
            child = node.children.get(hashes[node.depth])
            if child is None:
                child = node.children[hashes[node.depth]] = _Node(node, len(hashes), hashes, next(self._ranks))
                self._grow(child, child.depth - node.depth)
            elif (common := _common(child, node.depth, hashes)) < child.depth:
                child = self._split(child, common)
            node = child
        heappush(node.members, (-expected, sequence.arrival, next(self._ranks), sequence))
        self._node_of[sequence] = node
        num_blocks = len(hashes) + 1
        while True:
            node.count += 1
            node.total += num_blocks
            node.distinct += 1  # its last, private block
            node.longest = max(node.longest, expected)
            if node.parent is None:
                return
            self._announce(node, sequence.arrival)
            node = node.parent

    def remove(self, sequence: Sequence, num_blocks: int) -> None:
        """Take a request of so many shareable blocks out; the walk goes on near it if it was chosen by :meth:`next`."""
        node: _Node | None = self._node_of.pop(sequence)
        assert node is not None
        if len(node.members) > 2 * node.count + SPARE_ENTRIES:
            node.members = [member for member in node.members if self._node_of.get(member[3]) is node]
            heapify(node.members)
        while node is not None:
            node.count -= 1
            node.total -= num_blocks + 1
            node.distinct -= 1
            parent = node.parent
            if node.count == 0 and parent is not None:
                del parent.children[node.hashes[parent.depth]]
                self._grow(node, parent.depth - node.depth)
                if self._cursor is node:
                    self._cursor = parent
            node = parent
        if not self._root.count:
            self._cursor = self._root
            self._root.entries.clear()
            self._root.members.clear()
            self._root.longest = 0

    def next(self) -> Sequence:
        """The request that shares most with the one chosen last: depth first, as far as the tree is known.

        Raises:
            IndexError: the tree is empty.
        """
        node = self._cursor
        while node.count == 0 and node.parent is not None:
            node = node.parent
        while True:
            member = self._member(node)
            child = self._best_child(node) if node.children else None
            if child is None or (member is not None and (ALONE, member[0]) <= (child.density, -child.longest)):
                break
            node = child
        assert member is not None, "a subtree that is counted has no request"
        self._cursor = node
        return member[3]

    def _member(self, node: _Node) -> tuple[int, int, int, Sequence] | None:
        while node.members and self._node_of.get(node.members[0][3]) is not node:
            heappop(node.members)
        return node.members[0] if node.members else None

    def _best_child(self, node: _Node) -> _Node:
        while True:
            entry = node.entries[0]
            child = entry[4]
            if child.count == 0 or child.parent is not node:
                heappop(node.entries)
            elif (now := child.entry(entry[2]))[0] > entry[0]:  # it was denser once
                heappop(node.entries)
                heappush(node.entries, now)
            else:
                return child

    def _announce(self, child: _Node, arrival: int) -> None:
        """A child became denser: tell its parent, and clear outdated entries now and then."""
        node = child.parent
        assert node is not None
        heappush(node.entries, child.entry(arrival))
        if len(node.entries) > 2 * len(node.children) + SPARE_ENTRIES:
            oldest: dict[_Node, int] = {}
            for entry in node.entries:
                other = entry[4]
                if other.count and other.parent is node:
                    oldest[other] = min(entry[2], oldest.get(other, entry[2]))
            node.entries = [other.entry(at) for other, at in oldest.items()]
            heapify(node.entries)

    def _split(self, child: _Node, depth: int) -> _Node:
        """Put a node at ``depth`` between a child and its parent."""
        parent = child.parent
        assert parent is not None
        middle = _Node(parent, depth, child.hashes, next(self._ranks))
        middle.count, middle.total, middle.distinct, middle.longest = (
            child.count, child.total, child.distinct, child.longest,
        )  # fmt: skip
        child.distinct -= depth - parent.depth
        child.parent = middle
        middle.children[child.hashes[depth]] = child
        parent.children[child.hashes[parent.depth]] = middle
        arrival = next((entry[2] for entry in parent.entries if entry[4] is child), 0)
        heappush(middle.entries, child.entry(arrival))
        heappush(parent.entries, middle.entry(arrival))
        return middle

    def _grow(self, node: _Node, num_blocks: int) -> None:
        """Count so many more (or less) distinct blocks in a node and above."""
        above: _Node | None = node
        while above is not None:
            above.distinct += num_blocks
            above = above.parent


def _common(child: _Node, depth: int, hashes: Sequence_[BlockHash]) -> int:
    """How many blocks a request shares with a node below ``depth``, where they agree in at least one."""
    low, high = depth + 1, min(child.depth, len(hashes))
    while low < high:
        middle = (low + high + 1) // 2
        if child.hashes[middle - 1] == hashes[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
