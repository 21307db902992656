"""The Triton kernels behind the interface of the CPU's ops, so that one call site of a fused layer serves both.

What differs is what the engine makes once: caches are :class:`~batchinfer_kernels.paged_kv.PagedKV`, and products apply
their scales themselves, so that activations are always tensors. ``reduce_logits`` has no counterpart: ``lm_head_argmax``
never has logits, and ``sample`` and ``token_logprobs`` take whole rows. Importing this needs Triton.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from batchinfer_kernels.act_and_mul import act_and_mul, act_and_mul_quantize
from batchinfer_kernels.attention_plan import AttentionPlan as DevicePlan
from batchinfer_kernels.attention_plan import QuerySpan, plan_attention
from batchinfer_kernels.cpu.operands import PLAIN_INT8, Accumulated, Int8Rows
from batchinfer_kernels.kv_write import kv_write
from batchinfer_kernels.paged_attention import AttentionForm, paged_attention
from batchinfer_kernels.quantize import quantize_rows
from batchinfer_kernels.rms_norm import rms_norm, rms_norm_quantize
from batchinfer_kernels.rope_and_kv_write import Rope, rope_and_kv_write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchinfer_kernels.cpu.interface import AttentionPlan
    from batchinfer_kernels.cpu.operands import Activation, Activations, AttentionBatch, Int8Recipe, RotaryEmbedding
    from batchinfer_kernels.paged_kv import PagedKV


@dataclass(slots=True)
class TritonPlan:
    """A batch on the device; the work of each kind of layer is laid out when the first of that kind asks."""

    num_tokens: int
    spans: list[QuerySpan]
    block_tables: torch.Tensor
    positions: torch.Tensor
    _plans: dict[tuple[int, int | None], DevicePlan] = field(default_factory=dict)

    def of(self, group_size: int, window: int | None) -> DevicePlan:
        """The work for so many query heads a kv head."""
        key = (group_size, window)
        if key not in self._plans:
            plan = plan_attention(self.spans, group_size=group_size, sliding_window=window)
            self._plans[key] = plan.to(self.positions.device)
        return self._plans[key]


class TritonOps:
    """See :class:`~batchinfer_kernels.cpu.interface.Ops`; plans do not look for shared prefixes by themselves."""

    name = "triton"

    def rms_norm(
        self, x: Activations, weight: torch.Tensor, eps: float, *, residual: torch.Tensor | None = None,
        weight_offset: float = 0.0, out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """See :meth:`~batchinfer_kernels.cpu.interface.Ops.rms_norm`."""
        rows = _tensor(x)
        return rms_norm(rows, weight, eps, weight_offset=weight_offset, residual=residual, out_dtype=out_dtype)

    def rms_norm_int8(
        self, x: Activations, weight: torch.Tensor, eps: float, *, residual: torch.Tensor | None = None,
        weight_offset: float = 0.0, recipe: Int8Recipe = PLAIN_INT8,
    ) -> Int8Rows:  # fmt: skip
        """See :meth:`~batchinfer_kernels.cpu.interface.Ops.rms_norm_int8`."""
        rows = rms_norm_quantize(
            _tensor(x), weight, eps, weight_offset=weight_offset, residual=residual, smoothing=recipe.smoothing,
            rotation=recipe.rotation,
        )  # fmt: skip
        return Int8Rows(*rows)

    def act_and_mul(
        self, gate_up: Activations, activation: Activation, *, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """See :meth:`~batchinfer_kernels.cpu.interface.Ops.act_and_mul`."""
        return act_and_mul(_tensor(gate_up), activation, out_dtype=out_dtype)

    def act_and_mul_int8(
        self, gate_up: Activations, activation: Activation, *, recipe: Int8Recipe = PLAIN_INT8
    ) -> Int8Rows:
        """See :meth:`~batchinfer_kernels.cpu.interface.Ops.act_and_mul_int8`."""
        rows = _tensor(gate_up)
        return Int8Rows(*act_and_mul_quantize(rows, activation, smoothing=recipe.smoothing, rotation=recipe.rotation))

    def convert(self, x: Activations, dtype: torch.dtype) -> torch.Tensor:
        """See :meth:`~batchinfer_kernels.cpu.interface.Ops.convert`."""
        return _tensor(x).to(dtype)

    def quantize(self, x: Activations, *, recipe: Int8Recipe = PLAIN_INT8) -> Int8Rows:
        """See :meth:`~batchinfer_kernels.cpu.interface.Ops.quantize`."""
        return Int8Rows(*quantize_rows(_tensor(x), smoothing=recipe.smoothing, rotation=recipe.rotation))

    def rope_and_kv_write(
        self, query: Activations, key: Activations, value: Activations, rope: RotaryEmbedding, *,
        positions: torch.Tensor, slots: torch.Tensor, layer: PagedKV, out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """See :meth:`~batchinfer_kernels.cpu.interface.Ops.rope_and_kv_write`."""
        q, k, v = (_heads(x, layer.head_dim) for x in (query, key, value))
        form = Rope(rope.cos, rope.sin, rope.interleaved, rope.q_norm, rope.k_norm, rope.norm_offset, rope.norm_eps)
        out = rope_and_kv_write(q, k, v, positions, slots, form, layer)
        return out if out_dtype is None else out.to(out_dtype)

    def kv_write(self, key: Activations, value: Activations, slots: torch.Tensor, layer: PagedKV) -> None:
        """See :meth:`~batchinfer_kernels.cpu.interface.Ops.kv_write`."""
        kv_write(_heads(key, layer.head_dim), _heads(value, layer.head_dim), slots, layer)

    def plan_attention(
        self, batch: AttentionBatch, layer: PagedKV, num_heads: int, least_shared: Sequence[int] = ()
    ) -> TritonPlan:
        """See :meth:`~batchinfer_kernels.cpu.interface.Ops.plan_attention`; the batch's tensors are on the host."""
        del num_heads, least_shared
        starts, contexts = batch.query_start.tolist(), batch.context_lens.tolist()
        spans = [
            QuerySpan(starts[i], starts[i + 1] - starts[i], contexts[i], i)
            for i in range(len(contexts))
            if starts[i + 1] > starts[i]
        ]
        positions = [p for span in spans for p in range(span.context - span.num_queries, span.context)]
        device = layer.keys.device
        return TritonPlan(
            starts[-1], spans, batch.block_tables.to(device), torch.tensor(positions, dtype=torch.int32, device=device)
        )

    def paged_attention(
        self, query: torch.Tensor, layer: PagedKV, plan: AttentionPlan, *, scale: float, window: int | None = None,
        softcap: float | None = None, sinks: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """See :meth:`~batchinfer_kernels.cpu.interface.Ops.paged_attention`."""
        if not isinstance(plan, TritonPlan):
            raise TypeError("the plan was not made by these ops")
        work = plan.of(query.shape[1] // layer.num_kv_heads, window)
        form = AttentionForm(scale, window, softcap, sinks)
        out = paged_attention(query, layer, plan.block_tables, plan.positions, work, form)
        out[plan.num_tokens :] = 0  # padding, which no program writes
        return out if out_dtype is None else out.to(out_dtype)


def _tensor(x: Activations) -> torch.Tensor:
    if isinstance(x, Accumulated):
        raise TypeError("a product without its scales is the CPU's form: int8_gemm applies them itself")
    return x


def _heads(x: Activations, head_dim: int) -> torch.Tensor:
    rows = _tensor(x)
    return rows.view(len(rows), rows.shape[1] // head_dim, head_dim)
