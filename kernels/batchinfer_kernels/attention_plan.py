"""The work of one step's attention on a GPU: which tile of queries reads which stretch of which sequence.

A decode token's context is cut into splits of a fixed size counted from position 0, and its result is its splits merged in
order: what a split gives depends on the row alone, not on who shares the step. Splits that lie in a prefix shared by a
group are computed for many rows at once. The queries of a longer chunk read their whole context in one go.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

SPLIT = 512
"""Tokens of context a decode item reads: 128 KiB of keys and values for a head of 128 in bfloat16."""
ALIGNMENT = 64
"""Items begin at multiples of this; a kernel's tile of keys divides it."""
SMALL_TILE = 16
LARGE_TILE = 64
ITEM_FIELDS = 6
"""Of an item: is_large, row of the block tables, first and past-the-last position, first and number of its queries."""


@dataclass(frozen=True, slots=True)
class QuerySpan:
    """A sequence's queries in this step: packed tokens ``first .. first + num_queries``, the last one at ``context - 1``.

    ``table`` is the sequence's row of the block tables.
    """

    first: int
    num_queries: int
    context: int
    table: int


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Spans (by index) whose first ``num_tokens`` positions lie in the same blocks. A span is in one group at most."""

    spans: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What :func:`~batchinfer_kernels.paged_attention.paged_attention` is told; all int32.

    ``items [num_items, 6]`` (see :data:`ITEM_FIELDS`), ``queries [n, 2]``: an item's packed tokens and where its partial
    results go (-1: it is the token's only item), ``merges [num_merges, 3]``: token, its first partial, how many.
    """

    items: torch.Tensor
    queries: torch.Tensor
    merges: torch.Tensor
    num_partials: int
    small_tile: int
    large_tile: int
    has_small: bool
    has_large: bool

    def to(self, device: torch.device | str) -> AttentionPlan:
        """The same on a device, which is not waited for."""
        is_queued = torch.device(device).type == "cuda"
        items, queries, merges = (
            (array.pin_memory() if is_queued and array.numel() else array).to(device, non_blocking=True)
            for array in (self.items, self.queries, self.merges)
        )
        return replace(self, items=items, queries=queries, merges=merges)


@dataclass(slots=True)
class _Builder:
    tile_tokens: tuple[int, int]
    items: list[tuple[int, ...]] = field(default_factory=list)
    queries: list[tuple[int, int]] = field(default_factory=list)

    def add(self, table: int, begin: int, end: int, queries: Sequence[tuple[int, int]], *, is_large: bool) -> None:
        """Items for queries over positions ``begin .. end``, as many as the tile needs."""
        step = self.tile_tokens[is_large]
        for at in range(0, len(queries), step):
            part = queries[at : at + step]
            self.items.append((int(is_large), table, begin, end, len(self.queries), len(part)))
            self.queries += part


def tile_rows(group_size: int) -> tuple[int, int]:
    """Rows (tokens x query heads of a kv head) of the small and of the large tile."""
    small = max(SMALL_TILE, 1 << (group_size - 1).bit_length())
    return small, max(LARGE_TILE, small)


def plan_attention(
    spans: Sequence[QuerySpan],
    *,
    group_size: int,
    sliding_window: int | None = None,
    prefix_groups: Sequence[PrefixGroup] = (),
    split: int = SPLIT,
) -> AttentionPlan:
    """Lay out the work of a step, longest items first. ``group_size`` is query heads a kv head.

    Raises ValueError for a split that is no multiple of :data:`ALIGNMENT` or a group longer than a member's context.
    """
    if split % ALIGNMENT:
        raise ValueError(f"split {split} must be a multiple of {ALIGNMENT}")
    tiles = tile_rows(group_size)
    builder = _Builder((tiles[0] // group_size, tiles[1] // group_size))
    shared = _shared_splits(spans, prefix_groups, sliding_window, split)
    merges: list[tuple[int, int, int]] = []
    num_partials = 0
    first_partial: dict[int, int] = {}
    for index, span in enumerate(spans):
        lowest = _lowest(span, sliding_window)
        if span.num_queries > 1:
            _add_chunk(builder, span, sliding_window)
            continue
        first_split, last_split = lowest // split, (span.context - 1) // split
        count = last_split - first_split + 1
        if count > 1:
            first_partial[index] = num_partials - first_split
            merges.append((span.first, num_partials, count))
            num_partials += count
        for number in range(max(first_split, shared.get(index, 0)), last_split + 1):
            partial = first_partial[index] + number if count > 1 else -1
            begin, end = number * split, min((number + 1) * split, span.context)
            builder.add(span.table, _aligned(max(begin, lowest)), end, [(span.first, partial)], is_large=False)
    for group in prefix_groups:
        members = [index for index in group.spans if index in shared]
        for number in range(max((shared[index] for index in members), default=0)):
            queries = [(spans[index].first, first_partial[index] + number) for index in members]
            is_large = len(queries) > builder.tile_tokens[0]
            builder.add(spans[members[0]].table, number * split, (number + 1) * split, queries, is_large=is_large)
    return _finished(builder, merges, num_partials, tiles)


def _aligned(position: int) -> int:
    return position // ALIGNMENT * ALIGNMENT


def _lowest(span: QuerySpan, sliding_window: int | None) -> int:
    """The first position that the span's first query sees."""
    if sliding_window is None:
        return 0
    return max(0, span.context - span.num_queries - sliding_window + 1)


def _add_chunk(builder: _Builder, span: QuerySpan, sliding_window: int | None) -> None:
    """Tiles of a chunk's queries; each reads as far as its last query sees."""
    step = builder.tile_tokens[1]
    start = span.context - span.num_queries
    for at in range(0, span.num_queries, step):
        count = min(step, span.num_queries - at)
        end = start + at + count
        begin = 0 if sliding_window is None else _aligned(max(0, start + at - sliding_window + 1))
        builder.add(span.table, begin, end, [(span.first + at + i, -1) for i in range(count)], is_large=True)


def _shared_splits(
    spans: Sequence[QuerySpan], groups: Sequence[PrefixGroup], sliding_window: int | None, split: int
) -> dict[int, int]:
    """How many leading splits each grouped span leaves to its group.

    None under a sliding window, which moves away from the prefix, and none of a chunk: its queries share the reading
    already. A split that holds the whole of a context is no partial, hence not shared.
    """
    found: dict[int, int] = {}
    for group in groups:
        for index in group.spans:
            if group.num_tokens > spans[index].context or index in found:
                raise ValueError(
                    f"span {index} is in two prefix groups or shorter than its prefix of {group.num_tokens}"
                )
            found[index] = group.num_tokens // split
    return {
        index: count
        for index, count in found.items()
        if sliding_window is None and count and spans[index].num_queries == 1 and spans[index].context > split
    }


def _finished(
    builder: _Builder, merges: list[tuple[int, int, int]], num_partials: int, tiles: tuple[int, int]
) -> AttentionPlan:
    # the longest first, so that the last programs to finish are short ones
    items = sorted(builder.items, key=lambda item: item[2] - item[3])
    large = [bool(item[0]) for item in items]
    return AttentionPlan(
        items=torch.tensor(items, dtype=torch.int32).view(-1, ITEM_FIELDS),
        queries=torch.tensor(builder.queries, dtype=torch.int32).view(-1, 2),
        merges=torch.tensor(merges, dtype=torch.int32).view(-1, 3),
        num_partials=num_partials,
        small_tile=tiles[0],
        large_tile=tiles[1],
        has_small=not all(large),
        has_large=any(large),
    )
