"""Fused layers on the Triton kernels: what their ops are, and how a step's context looks to them.

Importing this needs Triton, which comes with CUDA builds of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from batchinfer.engine.triton_attention import TritonAttention
from batchinfer_kernels.paged_kv import BLOCK_SIZES
from batchinfer_kernels.triton_ops import TritonOps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchinfer.engine.attention_backend import AttentionBackend
    from batchinfer.engine.attention_groups import Span
    from batchinfer.engine.kv_cache import LayerShape
    from batchinfer.engine.triton_attention import TritonContext
    from batchinfer.models.fused.spec import DecoderSpec
    from batchinfer_kernels.attention_plan import AttentionPlan

MULTIPLE = 16
"""Of everything that kernels read in rows."""


def ops_of(attention: AttentionBackend, device: torch.device) -> TritonOps:
    """The ops beside a Triton attention."""
    assert isinstance(attention, TritonAttention)
    return TritonOps(attention.dtype, device)


def why_not_fused(spec: DecoderSpec) -> str | None:
    """Why the kernels cannot run these layers, which their attention can; None if they can."""
    widths = {spec.embedding.shape[1]: "hidden_size"}
    for layer in spec.layers:
        for projection in layer.projections:
            widths[projection.in_features] = f"width of {projection.name}"
            if projection is not layer.o and not projection.name.endswith("down"):
                widths[projection.out_features] = f"width of what {projection.name} gives"
        widths[2 * layer.rope.cos.shape[1]] = "rotary dimension"
    return next((f"the {name}, {n}, is no multiple of {MULTIPLE}" for n, name in widths.items() if n % MULTIPLE), None)


class LayerContext:
    """A :class:`~batchinfer.engine.triton_attention.TritonContext` as fused layers ask for it, and their plan as well."""

    def __init__(self, context: TritonContext) -> None:
        self._context = context
        self.slots = context.slots
        self.num_tokens = context.num_tokens
        self.positions = context.positions
        self.block_tables = context.block_tables

    def layer(self, index: int) -> Any:
        """A layer's cache."""
        return self._context.cache(index)

    def plan(self, layer: object, num_heads: int) -> LayerContext:
        """See :class:`~batchinfer.models.fused.layer.StepContext`: one plan for all kinds of layers."""
        del layer, num_heads
        return self

    def of(self, group_size: int, window: int | None) -> AttentionPlan:
        """See :class:`~batchinfer_kernels.triton_ops.StepPlan`."""
        return self._context.plan(group_size, window)


def one_layer(ops: TritonOps, shape: LayerShape, num_blocks: int, spans: Sequence[Span], num_rows: int) -> LayerContext:
    """The context of one layer over a float32 cache of its own in blocks of 16, for the texts of a calibration."""
    attention = TritonAttention([shape], num_blocks, min(BLOCK_SIZES), torch.float32, ops.device)
    return LayerContext(attention.context(spans, num_rows))
