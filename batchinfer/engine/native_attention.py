"""Paged attention by the CPU kernels: what :mod:`batchinfer.engine.attention` says in torch, in C++."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from batchinfer_kernels.cpu import AttentionBatch, KVShape, PagedKVCache

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from batchinfer.engine.attention import AttentionOptions
    from batchinfer.engine.attention_groups import Span
    from batchinfer.engine.kv_cache import LayerShape
    from batchinfer_kernels.cpu import AttentionPlan, LayerKV, Ops

DTYPES = (torch.float32, torch.bfloat16)
BLOCK_MULTIPLE = 16
"""The kernels keep keys and values in tiles of so many tokens."""
SPLIT_TOKENS = 256
"""The kernels cut contexts, and share prefixes, in runs of so many tokens (``SPLIT`` in C++)."""
NO_SLOT = -1
"""Where the KV of padding goes: nowhere."""


def kv_shape(layer: LayerShape) -> KVShape:
    """The kernels' name for the KV of a layer."""
    return KVShape(layer.num_kv_heads, layer.head_dim, layer.v_head_dim)


class NativeAttention:
    """Keys and values of all layers in the kernels' layout, and the contexts of steps over them."""

    def __init__(
        self,
        ops: Ops,
        layers: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        *,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """``dtype`` is that of queries, and of keys and values unless ``kv_dtype`` is another."""
        self.ops = ops
        self.dtype = dtype
        self.kv_cache = PagedKVCache([kv_shape(layer) for layer in layers], num_blocks, block_size, kv_dtype or dtype)

        self.least_shared: tuple[int, ...] = ()
        """See :meth:`~batchinfer_kernels.cpu.interface.Ops.plan_attention`."""

    def share_prefixes(self, least: Mapping[int, int]) -> None:
        """Read prefixes together where so many tokens share them: by the prefix' tokens, the longest measured counts."""
        splits = {max(1, prefix // SPLIT_TOKENS): tokens for prefix, tokens in sorted(least.items())}
        table: list[int] = []
        for number, tokens in splits.items():
            table += [table[-1] if table else tokens] * (number - 1 - len(table))
            table.append(tokens)
        self.least_shared = tuple(table)

    def shared_prefix_runs(
        self, prefix: int, rows: int, num_heads: int
    ) -> tuple[Callable[[], object], Callable[[], object]] | None:
        """The first layer's attention of decoding rows over a shared prefix, together and alone; None without room."""
        size = self.kv_cache.block_size
        held = prefix // size
        if held + rows > self.kv_cache.num_blocks or prefix % size:
            return None
        layer = self.kv_cache.layer(0)
        tables = [[*range(held), held + row] for row in range(rows)]
        batch = AttentionBatch.of([1] * rows, [prefix + size] * rows, tables)
        query = torch.ones(rows, num_heads, layer.shape.head_dim, dtype=self.dtype)

        def run(least_shared: int) -> Callable[[], object]:
            plan = self.ops.plan_attention(batch, layer, num_heads, (least_shared,))
            return lambda: self.ops.paged_attention(query, layer, plan, scale=1.0)

        return run(2), run(rows + 1)

    @property
    def name(self) -> str:
        """Which kernels these are."""
        return self.ops.name

    def context(self, spans: Sequence[Span], num_rows: int) -> NativeContext:
        """Context of a step whose packed tokens are padded to ``num_rows``."""
        size = self.kv_cache.block_size
        slots = [s.block_table[p // size] * size + p % size for s in spans for p in range(s.start, s.context)]
        slots += [NO_SLOT] * (num_rows - len(slots))
        batch = AttentionBatch.of(
            [s.num_queries for s in spans], [s.context for s in spans], [s.block_table for s in spans]
        )
        return NativeContext(self, torch.tensor(slots, dtype=torch.int64), batch)


class NativeContext:
    """A step's layout; the work it causes is found by the first layer and used by all."""

    def __init__(self, attention: NativeAttention, slots: torch.Tensor, batch: AttentionBatch) -> None:
        self.ops = attention.ops
        self.slots = slots
        """Where the packed rows' KV goes, int64 ``[num_rows]``; padding has :data:`NO_SLOT`."""
        self._kv_cache = attention.kv_cache
        self._least_shared = attention.least_shared
        self._batch = batch
        self._plan: AttentionPlan | None = None

    def layer(self, index: int) -> LayerKV:
        """A layer's cache."""
        return self._kv_cache.layer(index)

    def plan(self, layer: LayerKV, num_heads: int) -> AttentionPlan:
        """The step's work."""
        if self._plan is None:
            self._plan = self.ops.plan_attention(self._batch, layer, num_heads, self._least_shared)
        return self._plan

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Write the new KV, then attend; see :meth:`batchinfer.engine.attention.PagedContext.attend`."""
        cache = self.layer(layer)
        num_rows, num_heads, _ = query.shape
        self.ops.kv_write(key.reshape(num_rows, -1), value.reshape(num_rows, -1), self.slots, cache)
        return self.ops.paged_attention(
            query.contiguous(),
            cache,
            self.plan(cache, num_heads),
            scale=options.scaling,
            window=options.sliding_window,
            softcap=options.softcap,
            sinks=options.sinks,
        )
