"""Paged attention by the Triton kernels: what :mod:`batchinfer.engine.attention` says in torch, on a GPU.

Importing this needs Triton, which comes with CUDA builds of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from batchinfer_kernels.attention_plan import SPLIT, PrefixGroup, QuerySpan, plan_attention
from batchinfer_kernels.kv_write import kv_write
from batchinfer_kernels.paged_attention import AttentionForm, paged_attention
from batchinfer_kernels.paged_kv import BLOCK_SIZES, PagedKV

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        self.caches = [
            PagedKV.empty(num_blocks, block_size, s.num_kv_heads, s.head_dim, kv_dtype or dtype, device) for s in layers
        ]
        self.split = split
        self._block_size = block_size
        self._device = device

    def context(self, spans: Sequence[Span], num_rows: int) -> TritonContext:
        """Context of a step whose packed tokens are padded to ``num_rows``."""
        size = self._block_size
        positions = [p for s in spans for p in range(s.start, s.context)]
        slots = [s.block_table[p // size] * size + p % size for s in spans for p in range(s.start, s.context)]
        padding = num_rows - len(slots)
        width = max((len(s.block_table) for s in spans), default=1)
        tables = [s.block_table + [0] * (width - len(s.block_table)) for s in spans]
        return TritonContext(
            self,
            spans,
            groups=prefix_groups(spans, size, self.split),
            slots=self._row(slots + [NO_SLOT] * padding),
            positions=self._row(positions + [0] * padding),
            block_tables=torch.tensor(tables, dtype=torch.int32, device=self._device).view(-1, width),
        )

    def _row(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._device)


class TritonContext:
    """A step's layout; each distinct kind of layer plans its work once."""

    def __init__(
        self,
        attention: TritonAttention,
        spans: Sequence[Span],
        *,
        groups: list[PrefixGroup],
        slots: torch.Tensor,
        positions: torch.Tensor,
        block_tables: torch.Tensor,
    ) -> None:
        self._attention = attention
        self._spans = [QuerySpan(s.row, s.num_queries, s.context, i) for i, s in enumerate(spans)]
        self._num_tokens = sum(s.num_queries for s in spans)
        self._groups = groups
        self._slots = slots
        self._positions = positions
        self._block_tables = block_tables
        self._plans: dict[tuple[int, int | None], AttentionPlan] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Write the new KV, then attend; see :meth:`batchinfer.engine.attention.PagedContext.attend`."""
        cache = self._attention.caches[layer]
        kv_write(key.contiguous(), value.contiguous(), self._slots, cache)
        plan = self._plan(query.shape[1] // cache.num_kv_heads, options.sliding_window)
        form = AttentionForm(options.scaling, options.sliding_window, options.softcap, options.sinks)
        out = paged_attention(query.contiguous(), cache, self._block_tables, self._positions, plan, form)
        out[self._num_tokens :] = 0  # padding, which no program writes
        return out

    def _plan(self, group_size: int, sliding_window: int | None) -> AttentionPlan:
        key = (group_size, sliding_window)
        if key not in self._plans:
            plan = plan_attention(
                self._spans,
                group_size=group_size,
                sliding_window=sliding_window,
                prefix_groups=self._groups,
                split=self._attention.split,
            )
            self._plans[key] = plan.to(self._positions.device)
        return self._plans[key]


def prefix_groups(spans: Sequence[Span], block_size: int, split: int) -> list[PrefixGroup]:
    """Decoding sequences that share at least their first ``split`` tokens, to the last whole block that all of them share.

    Equal blocks at equal places are equal prefixes: that is how the prefix cache hands them out.
    """
    alike: dict[tuple[int, ...], list[int]] = {}
    for index, span in enumerate(spans):
        if span.num_queries == 1 and span.context > split:
            alike.setdefault(tuple(span.block_table[: split // block_size]), []).append(index)
    groups = []
    for members in alike.values():
        first = spans[members[0]].block_table
        length = min(_common_length(first, spans[index].block_table) for index in members)
        context = min(spans[index].context for index in members)
        if len(members) > 1:
            groups.append(PrefixGroup(tuple(members), min(length * block_size, context)))
    return groups


def _common_length(left: list[int], right: list[int]) -> int:
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    return length
