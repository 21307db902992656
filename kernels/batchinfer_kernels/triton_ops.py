"""The Triton kernels behind the interface of the CPU's ops, so that one call site of a fused layer serves both.

What differs is what the engine makes once: caches are :class:`~batchinfer_kernels.paged_kv.PagedKV`, and products apply
their scales themselves, so that activations are always tensors. The head's product is the exception: it comes as a
:class:`HeadProduct`, and ``reduce_logits`` multiplies and reduces at once, so that logits are never in memory.

Nothing here reads a value back to the host or allocates by one, so that CUDA graphs can hold it; ``plan_attention`` alone
works on the host. Importing this needs Triton.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import torch

from batchinfer_kernels.act_and_mul import act_and_mul, act_and_mul_quantize
from batchinfer_kernels.attention_plan import AttentionPlan as DevicePlan
from batchinfer_kernels.attention_plan import QuerySpan, plan_attention
from batchinfer_kernels.cpu.operands import PLAIN_INT8, Accumulated, Int8Rows
from batchinfer_kernels.kv_write import kv_write
from batchinfer_kernels.lm_head import HeadReduction, HeadWeights, lm_head_reduce
from batchinfer_kernels.paged_attention import AttentionForm, paged_attention
from batchinfer_kernels.quantize import quantize_rows
from batchinfer_kernels.rms_norm import rms_norm, rms_norm_quantize
from batchinfer_kernels.rope_and_kv_write import Rope, rope_and_kv_write

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from batchinfer_kernels.cpu.operands import (
        Activation,
        Activations,
        AttentionBatch,
        Int8Recipe,
        LogitsReduction,
        RotaryEmbedding,
    )


class StepPlan(Protocol):
    """A step's batch on the device, and the work in attention of each kind of layer."""

    @property
    def num_tokens(self) -> int:
        """Rows that are not padding."""

    @property
    def block_tables(self) -> torch.Tensor:
        """int32 ``[num_sequences, max_blocks]``."""

    @property
    def positions(self) -> torch.Tensor:
        """int32, of each row."""

    def of(self, group_size: int, window: int | None) -> DevicePlan:
        """The work for so many query heads a kv head."""


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


@dataclass(frozen=True, slots=True)
class HeadProduct:
    """Logits that are not computed yet: ``rows @ head.w.T``."""

    rows: torch.Tensor | Int8Rows
    head: HeadWeights

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and words, as of the logits."""
        rows = self.rows.values if isinstance(self.rows, Int8Rows) else self.rows
        return len(rows), len(self.head.w)


class TritonOps:
    """See :class:`~batchinfer_kernels.cpu.interface.Ops`; plans do not look for shared prefixes by themselves."""

    name = "triton"

    def __init__(self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> None:
        """``dtype`` is what products with INT8 weights come in; weights are kept on ``device``."""
        self.dtype = dtype
        self.device = torch.device(device)

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
        positions: torch.Tensor, slots: torch.Tensor, layer: Any, out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """See :meth:`~batchinfer_kernels.cpu.interface.Ops.rope_and_kv_write`; ``layer`` is a ``PagedKV``."""
        q, k, v = (_heads(x, layer.head_dim) for x in (query, key, value))
        if rope.cos.shape[1]:
            form = Rope(rope.cos, rope.sin, rope.interleaved, rope.q_norm, rope.k_norm, rope.norm_offset, rope.norm_eps)
            return rope_and_kv_write(q, k, v, positions, slots, form, layer, out_dtype=out_dtype)
        # a layer without positions (SmolLM3)
        q, k = _normed(q, rope.q_norm, rope), _normed(k, rope.k_norm, rope)
        kv_write(k, v, slots, layer)
        return q.to(out_dtype or q.dtype).contiguous()

    def kv_write(self, key: Activations, value: Activations, slots: torch.Tensor, layer: Any) -> None:
        """See :meth:`~batchinfer_kernels.cpu.interface.Ops.kv_write`; ``layer`` is a ``PagedKV``."""
        kv_write(_heads(key, layer.head_dim), _heads(value, layer.head_dim), slots, layer)

    def plan_attention(
        self, batch: AttentionBatch, layer: Any, num_heads: int, least_shared: Sequence[int] = ()
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
        self, query: torch.Tensor, layer: Any, plan: Any, *, scale: float, window: int | None = None,
        softcap: float | None = None, sinks: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """See :meth:`~batchinfer_kernels.cpu.interface.Ops.paged_attention`; ``plan`` is a :class:`StepPlan`."""
        if not hasattr(plan, "of"):
            raise TypeError("the plan was not made by these ops")
        work = plan.of(query.shape[1] // layer.num_kv_heads, window)
        form = AttentionForm(scale, window, softcap, sinks)
        out = paged_attention(query, layer, plan.block_tables, plan.positions, work, form)
        out[plan.num_tokens :] = 0  # padding, which no program writes
        return out if out_dtype is None else out.to(out_dtype)

    def reduce_logits(
        self, reduction: LogitsReduction, logits: Any, first_column: int, *, scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:  # fmt: skip
        """See :meth:`~batchinfer_kernels.cpu.interface.Ops.reduce_logits`; ``logits`` is a :class:`HeadProduct`.

        Logits in memory would be the cost this is there to save. They are not cut into slices: ``first_column`` is 0.
        """
        if not isinstance(logits, HeadProduct) or first_column:
            raise TypeError("these ops reduce a HeadProduct, whole")
        given = logits.rows
        rows, row_scale = (given.values, given.scales) if isinstance(given, Int8Rows) else (given, None)
        keeps = bool(reduction.kept)
        found = lm_head_reduce(
            rows, replace(logits.head, logits_scale=scale, softcap=softcap), x_scale=row_scale, top_k=reduction.top_k,
            place=reduction.place if keeps else None, logits=reduction.logits if keeps else None,
        )  # fmt: skip
        _note(reduction, found)


def _note(reduction: LogitsReduction, found: HeadReduction) -> None:
    reduction.best, reduction.has_nan = found.best, found.best.isnan()
    reduction.best_index = found.token.long()
    if reduction.top_k:
        reduction.top_values, reduction.top_indices = found.top_values, found.top_tokens.long()
    if reduction.peak is not None:
        reduction.peak, reduction.total = found.log_sum_exp(), torch.ones_like(found.best)


def _normed(heads: torch.Tensor, weight: torch.Tensor | None, rope: RotaryEmbedding) -> torch.Tensor:
    """Each head of ``[num_tokens, num_heads, head_dim]`` normed, if the rope has norms."""
    if weight is None:
        return heads
    rows = heads.reshape(-1, heads.shape[2])
    return rms_norm(rows, weight, rope.norm_eps, weight_offset=rope.norm_offset).view(heads.shape)


def _tensor(x: Activations) -> torch.Tensor:
    if isinstance(x, Accumulated):
        raise TypeError("a product without its scales is the CPU's form: int8_gemm applies them itself")
    return x


def _heads(x: Activations, head_dim: int) -> torch.Tensor:
    rows = _tensor(x)
    return rows.view(len(rows), rows.shape[1] // head_dim, head_dim)
