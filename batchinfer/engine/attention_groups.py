"""Sequences of alike lengths, put together so that a step costs few tensor operations a layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence as Sequence_

    from numpy.typing import NDArray

MAX_WASTE = 1.25
"""A group's padded size over its real one, at most: shorter contexts would wait for the longest."""
MAX_GROUP_SLOTS = 4 * 1024
"""Context slots gathered at once, so that what is gathered is still in the CPU's cache when it is read: 64 decoding rows
of 64 to 1,024 tokens took 10 ms a layer with this, 21 ms with four times as many (SmolLM2-135M, one core of Zen 4)."""
FAR = 2**30
"""The position of padding: after every query, hence never seen."""


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's part in a step: packed rows ``row .. row + num_queries`` at positions ``start ..``."""

    row: int
    start: int
    num_queries: int
    block_table: list[int]

    @property
    def context(self) -> int:
        """Tokens its last query sees, itself included."""
        return self.start + self.num_queries


@dataclass(frozen=True, slots=True)
class ContextView:
    """What a group's queries read: ``rows [num_kv_heads, n, context]``, and ``hidden [n, 1, num_queries, context]``.

    A row is ``slot * num_kv_heads + head``; hidden is True where a query may not look.
    """

    rows: torch.Tensor
    hidden: torch.Tensor


@dataclass(slots=True)
class AttentionGroup:
    """``n`` sequences, padded to the same number of queries and the same context."""

    rows: torch.Tensor
    """Packed rows of the real queries, sequence by sequence ``[num_rows]``."""
    query_rows: torch.Tensor
    """Packed rows, padded with the sequence's last one ``[n, num_queries]``."""
    kept: torch.Tensor | None
    """Which of the flattened ``query_rows`` are real; None if all."""
    positions: NDArray[np.int64]
    """Positions of ``query_rows`` ``[n, num_queries]``."""
    slots: NDArray[np.int64]
    """Slots of positions 0, 1, ... of each sequence ``[n, context]``, padded with its own first slot.

    Its own, since a weight of zero times another row's infinity would still be NaN.
    """
    contexts: NDArray[np.int64]
    """Real context of each sequence ``[n]``."""
    device: torch.device
    _views: dict[tuple[int | None, int], ContextView] = field(default_factory=dict)

    def view(self, sliding_window: int | None, num_kv_heads: int) -> ContextView:
        """What to read under a window of so many tokens (None: everything); computed once a step, not once a layer."""
        key = sliding_window, num_kv_heads
        if key not in self._views:
            self._views[key] = self._make_view(*key)
        return self._views[key]

    def _make_view(self, sliding_window: int | None, num_kv_heads: int) -> ContextView:
        lowest = np.zeros_like(self.contexts)
        if sliding_window is not None:  # the first query of a sequence looks back furthest
            lowest = np.maximum(self.positions[:, 0] - sliding_window + 1, 0)
        length = int((self.contexts - lowest).max())
        at = lowest[:, None] + np.arange(length)
        inside = at < self.contexts[:, None]
        slots = np.take_along_axis(self.slots, np.where(inside, at, lowest[:, None]), axis=1)
        at = np.where(inside, at, FAR)[:, None, None, :]
        queries = self.positions[:, None, :, None]
        hidden = at > queries
        if sliding_window is not None:
            hidden |= at <= queries - sliding_window
        rows = slots * num_kv_heads + np.arange(num_kv_heads)[:, None, None]
        return ContextView(torch.from_numpy(rows).to(self.device), torch.from_numpy(hidden).to(self.device))


def group_spans(spans: Sequence_[Span], block_size: int, device: torch.device) -> list[AttentionGroup]:
    """Cut spans into groups of alike shape, so that padding wastes little."""
    groups: list[list[Span]] = []
    real = 0
    for span in sorted(spans, key=lambda span: (-span.num_queries, -span.context)):
        size = span.num_queries * span.context
        head = groups[-1][0] if groups else span
        longest = max((s.context for s in groups[-1]), default=0) if groups else 0
        longest = max(longest, span.context)
        count = len(groups[-1]) + 1 if groups else 1
        padded = count * head.num_queries * longest
        if groups and padded <= MAX_WASTE * (real + size) and count * longest <= MAX_GROUP_SLOTS:
            groups[-1].append(span)
            real += size
        else:
            groups.append([span])
            real = size
    return [_make_group(members, block_size, device) for members in groups]


def _make_group(spans: list[Span], block_size: int, device: torch.device) -> AttentionGroup:
    num_queries = max(span.num_queries for span in spans)
    steps = np.arange(num_queries)
    counts = np.array([span.num_queries for span in spans])
    offsets = np.minimum(steps, counts[:, None] - 1)
    starts = np.array([span.start for span in spans])
    rows = np.array([span.row for span in spans])[:, None] + offsets
    real = steps < counts[:, None]
    contexts = starts + counts
    return AttentionGroup(
        rows=torch.from_numpy(rows[real]).to(device),
        query_rows=torch.from_numpy(rows).to(device),
        kept=None if real.all() else torch.from_numpy(np.flatnonzero(real)).to(device),
        positions=starts[:, None] + offsets,
        slots=_context_slots(spans, int(contexts.max()), block_size),
        contexts=contexts,
        device=device,
    )


def _context_slots(spans: list[Span], length: int, block_size: int) -> NDArray[np.int64]:
    """Slots of positions ``0 .. length`` of each span, in rows; past its context, its first slot."""
    num_blocks = -(-length // block_size)
    tables = np.zeros((len(spans), num_blocks), dtype=np.int64)
    for table, span in zip(tables, spans, strict=True):
        held = span.block_table[:num_blocks]
        table[: len(held)] = held
        table[len(held) :] = held[0]
    slots = (tables[:, :, None] * block_size + np.arange(block_size)).reshape(len(spans), -1)[:, :length]
    contexts = np.array([span.context for span in spans])
    return np.where(np.arange(length) < contexts[:, None], slots, slots[:, :1])
