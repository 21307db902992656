"""Paged attention by the Triton kernels: what :mod:`batchinfer.engine.attention` says in torch, on a GPU.

Importing this needs Triton, which comes with CUDA builds of torch.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import torch

from batchinfer.engine.gpu.transfer import upload
from batchinfer_kernels.attention_plan import SPLIT, PrefixGroup, QuerySpan, plan_attention
from batchinfer_kernels.kv_write import kv_write
from batchinfer_kernels.paged_attention import AttentionForm, paged_attention
from batchinfer_kernels.paged_kv import BLOCK_SIZES, PagedKV

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from batchinfer.engine.attention import AttentionOptions
    from batchinfer.engine.attention_groups import Span
    from batchinfer.engine.kv_cache import LayerShape
    from batchinfer_kernels.attention_plan import AttentionPlan

HEAD_DIM_MULTIPLE = 16
NO_SLOT = -1
"""Where the KV of padding goes: nowhere."""


def why_not_triton(layers: Sequence[LayerShape], block_size: int) -> str | None:
    """Why the kernels cannot serve these layers; None if they can."""
    if block_size not in BLOCK_SIZES:
        return f"block_size {block_size} is none of {BLOCK_SIZES}"
    for layer in layers:
        if layer.head_dim != layer.v_head_dim or layer.head_dim % HEAD_DIM_MULTIPLE:
            return f"heads of {layer.head_dim} and {layer.v_head_dim} numbers must be alike and multiples of {HEAD_DIM_MULTIPLE}"
    return None


class TritonAttention:
    """Keys and values of all layers, and the contexts of steps over them. ``kv_dtype`` int8 halves what decode reads."""

    name = "triton"

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        kv_dtype: torch.dtype | None = None,
        split: int = SPLIT,
    ) -> None:
        """``split`` is how many positions a decode token reads at a time.

        Raises ValueError for layers that :func:`why_not_triton` names.
        """
        if (reason := why_not_triton(layers, block_size)) is not None:
            raise ValueError(reason)
        self.dtype = dtype
        """Of queries."""
        self.split = split
        self.block_size = block_size
        self._layers = layers
        self._dtype = kv_dtype or dtype
        self._device = device
        self.caches: list[PagedKV] = []
        self.allocate(num_blocks)

    def allocate(self, num_blocks: int) -> None:
        """Make caches of so many blocks, and one for padding; what the caches held before is gone."""
        self.caches.clear()
        self.num_blocks = num_blocks
        self.caches += [
            PagedKV.empty(num_blocks + 1, self.block_size, s.num_kv_heads, s.head_dim, self._dtype, self._device)
            for s in self._layers
        ]

    @property
    def trash_block(self) -> int:
        """The block that padding rows of captured batches write to and read; no sequence ever has it."""
        return self.num_blocks

    def context(
        self, spans: Sequence[Span], num_rows: int, tables: torch.Tensor | None = None, rows: Sequence[int] = ()
    ) -> TritonContext:
        """Context of a step whose packed tokens are padded to ``num_rows``.

        Where block tables lie on the device already, span ``i`` has row ``rows[i]`` of ``tables``.
        """
        size = self.block_size
        positions = [p for s in spans for p in range(s.start, s.context)]
        slots = [s.block_table[p // size] * size + p % size for s in spans for p in range(s.start, s.context)]
        padding = num_rows - len(slots)
        if tables is None:
            width = max((len(s.block_table) for s in spans), default=1)
            padded = [s.block_table + [0] * (width - len(s.block_table)) for s in spans]
            tables, rows = upload(padded, torch.int32, self._device).view(-1, width), range(len(spans))
        return TritonContext(
            self,
            num_tokens=len(slots),
            slots=upload(slots + [NO_SLOT] * padding, torch.int32, self._device),
            positions=upload(positions + [0] * padding, torch.int32, self._device),
            block_tables=tables,
            spans=query_spans(spans, rows),
            groups=prefix_groups(spans, size, self.split),
        )


class TritonContext:
    """A step's layout; each distinct kind of layer plans its work once."""

    def __init__(
        self,
        attention: TritonAttention,
        *,
        num_tokens: int,
        slots: torch.Tensor,
        positions: torch.Tensor,
        block_tables: torch.Tensor,
        spans: Sequence[QuerySpan] = (),
        groups: Sequence[PrefixGroup] = (),
        plans: Mapping[PlanKind, AttentionPlan] | None = None,
    ) -> None:
        """``plans`` are those that are made already; all that layers ask for if there are no ``spans``."""
        self._attention = attention
        self.num_tokens = num_tokens
        """Rows that are not padding."""
        self.slots = slots
        self.positions = positions
        self.block_tables = block_tables
        self._spans = spans
        self._groups = groups
        self._plans = dict(plans or {})

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Write the new KV, then attend; see :meth:`batchinfer.engine.attention.PagedContext.attend`."""
        cache = self._attention.caches[layer]
        kv_write(key.contiguous(), value.contiguous(), self.slots, cache)
        plan = self.plan(query.shape[1] // cache.num_kv_heads, options.sliding_window)
        form = AttentionForm(options.scaling, options.sliding_window, options.softcap, options.sinks)
        out = paged_attention(query.contiguous(), cache, self.block_tables, self.positions, plan, form)
        out[self.num_tokens :] = 0  # padding, which no program writes
        return out

    def cache(self, layer: int) -> PagedKV:
        """A layer's cache."""
        return self._attention.caches[layer]

    def plan(self, group_size: int, sliding_window: int | None) -> AttentionPlan:
        """The work of layers with so many query heads a kv head."""
        key = PlanKind(group_size, sliding_window)
        if key not in self._plans:
            plan = plan_attention(
                self._spans,
                group_size=group_size,
                sliding_window=sliding_window,
                prefix_groups=self._groups,
                split=self._attention.split,
            )
            self._plans[key] = plan.to(self.positions.device)
        return self._plans[key]


class PlanKind(NamedTuple):
    """Layers that share a plan."""

    group_size: int
    """Query heads a kv head."""
    sliding_window: int | None


def query_spans(spans: Sequence[Span], rows: Sequence[int]) -> list[QuerySpan]:
    """The kernels' name for spans whose block tables are these rows."""
    return [QuerySpan(s.row, s.num_queries, s.context, row) for s, row in zip(spans, rows, strict=True)]


def prefix_groups(spans: Sequence[Span], block_size: int, split: int) -> list[PrefixGroup]:
    """Decoding sequences that share at least their first ``split`` tokens, to the last whole block that all of them share.

    Equal blocks at equal places are equal prefixes: that is how the prefix cache hands them out.
    """
    first_blocks = Counter(span.block_table[0] for span in spans if span.num_queries == 1 and span.context > split)
    alike: dict[tuple[int, ...], list[int]] = {}
    for index, span in enumerate(spans):
        if span.num_queries == 1 and span.context > split and first_blocks[span.block_table[0]] > 1:
            alike.setdefault(tuple(span.block_table[: split // block_size]), []).append(index)
    groups = []
    for members in alike.values():
        first = spans[members[0]].block_table
        length = len(first)
        for index in members:
            length = _common_length(first, spans[index].block_table, length)
        context = min(spans[index].context for index in members)
        if len(members) > 1:
            groups.append(PrefixGroup(tuple(members), min(length * block_size, context)))
    return groups


def _common_length(left: list[int], right: list[int], most: int) -> int:
    """Leading blocks that two tables have in common, up to ``most``."""
    most = min(most, len(right))
    if left[:most] == right[:most]:  # as a rule, once the shortest is known; a loop over 256 rows takes milliseconds
        return most
    return next(i for i in range(most) if left[i] != right[i])
