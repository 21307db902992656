"""The ops where no compiler is: plain torch, slower, the same results within rounding.

They are made of the reference functions. How a prompt was cut into chunks may show in the last bits here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from batchinfer_kernels import reference
from batchinfer_kernels.cpu.operands import PLAIN_INT8, Accumulated, Int8Rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchinfer_kernels.cpu.interface import AttentionPlan
    from batchinfer_kernels.cpu.kv_cache import LayerKV
    from batchinfer_kernels.cpu.operands import (
        Activation,
        Activations,
        AttentionBatch,
        Int8Recipe,
        LogitsReduction,
        RotaryEmbedding,
    )


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """A batch and the slots of each sequence's context."""

    num_tokens: int
    sequences: list[tuple[int, int, torch.Tensor]]
    """First and last query row, and int64 slots ``[context]``."""


class TorchOps:
    """See :class:`~batchinfer_kernels.cpu.interface.Ops`."""

    name = "torch"

    def rms_norm(
        self,
        x: Activations,
        weight: torch.Tensor,
        eps: float,
        *,
        residual: torch.Tensor | None = None,
        weight_offset: float = 0.0,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """See :meth:`~batchinfer_kernels.cpu.interface.Ops.rms_norm`."""
        values = _values(x)
        if residual is not None:
            values = residual.copy_(residual.float() + values).float()
        return reference.rms_norm(values, weight, eps, weight_offset=weight_offset).to(_out_dtype(x, out_dtype))

    def rms_norm_int8(
        self,
        x: Activations,
        weight: torch.Tensor,
        eps: float,
        *,
        residual: torch.Tensor | None = None,
        weight_offset: float = 0.0,
        recipe: Int8Recipe = PLAIN_INT8,
    ) -> Int8Rows:
        """See :meth:`~batchinfer_kernels.cpu.interface.Ops.rms_norm_int8`."""
        normed = self.rms_norm(x, weight, eps, residual=residual, weight_offset=weight_offset, out_dtype=torch.float32)
        return self.quantize(normed, recipe=recipe)

    def act_and_mul(
        self, gate_up: Activations, activation: Activation, *, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """See :meth:`~batchinfer_kernels.cpu.interface.Ops.act_and_mul`."""
        return reference.act_and_mul(_values(gate_up), activation).to(_out_dtype(gate_up, out_dtype))

    def act_and_mul_int8(
        self, gate_up: Activations, activation: Activation, *, recipe: Int8Recipe = PLAIN_INT8
    ) -> Int8Rows:
        """See :meth:`~batchinfer_kernels.cpu.interface.Ops.act_and_mul_int8`."""
        return self.quantize(self.act_and_mul(gate_up, activation, out_dtype=torch.float32), recipe=recipe)

    def convert(self, x: Activations, dtype: torch.dtype) -> torch.Tensor:
        """See :meth:`~batchinfer_kernels.cpu.interface.Ops.convert`."""
        return _values(x).to(dtype)

    def quantize(self, x: Activations, *, recipe: Int8Recipe = PLAIN_INT8) -> Int8Rows:
        """See :meth:`~batchinfer_kernels.cpu.interface.Ops.quantize`."""
        values = _values(x)
        recipe.check(values.shape[1])
        if recipe.smoothing is not None:
            values = values * recipe.smoothing
        return Int8Rows(*reference.quantize_rows(reference.rotate(values, recipe.rotation)))

    def rope_and_kv_write(
        self,
        query: Activations,
        key: Activations,
        value: Activations,
        rope: RotaryEmbedding,
        *,
        positions: torch.Tensor,
        slots: torch.Tensor,
        layer: LayerKV,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """See :meth:`~batchinfer_kernels.cpu.interface.Ops.rope_and_kv_write`."""
        cos, sin = rope.cos[positions], rope.sin[positions]

        def rotated(x: Activations, norm: torch.Tensor | None) -> torch.Tensor:
            heads = _heads(x, layer.shape.head_dim)
            if norm is not None:
                heads = reference.rms_norm(heads, norm, rope.norm_eps, weight_offset=rope.norm_offset)
            return reference.rope(heads, cos, sin, interleaved=rope.interleaved)

        layer.write(slots, rotated(key, rope.k_norm), _heads(value, layer.shape.v_head_dim))
        return rotated(query, rope.q_norm).to(_out_dtype(query, out_dtype))

    def kv_write(self, key: Activations, value: Activations, slots: torch.Tensor, layer: LayerKV) -> None:
        """See :meth:`~batchinfer_kernels.cpu.interface.Ops.kv_write`."""
        layer.write(slots, _heads(key, layer.shape.head_dim), _heads(value, layer.shape.v_head_dim))

    def plan_attention(
        self, batch: AttentionBatch, layer: LayerKV, num_heads: int, least_shared: Sequence[int] = ()
    ) -> TorchPlan:
        """See :meth:`~batchinfer_kernels.cpu.interface.Ops.plan_attention`; nothing is read together here."""
        del num_heads, least_shared
        starts, contexts = batch.query_start.tolist(), batch.context_lens.tolist()
        sequences = [
            (starts[i], starts[i + 1], layer.context_slots(batch.block_tables[i], contexts[i]))
            for i in range(len(contexts))
            if starts[i + 1] > starts[i]
        ]
        return TorchPlan(starts[-1], sequences)

    def paged_attention(
        self,
        query: torch.Tensor,
        layer: LayerKV,
        plan: AttentionPlan,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """See :meth:`~batchinfer_kernels.cpu.interface.Ops.paged_attention`."""
        if not isinstance(plan, TorchPlan):
            raise TypeError("the plan was not made by these ops")
        out = torch.zeros(*query.shape[:2], layer.shape.v_head_dim, dtype=out_dtype or query.dtype)
        for start, stop, slots in plan.sequences:
            key, value = layer.gather(slots)
            out[start:stop] = reference.attention(
                query[start:stop], key, value, scale=scale, window=window, softcap=softcap, sinks=sinks
            )
        return out

    def reduce_logits(
        self,
        reduction: LogitsReduction,
        logits: Activations,
        first_column: int,
        *,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        """See :meth:`~batchinfer_kernels.cpu.interface.Ops.reduce_logits`."""
        values = _values(logits) * scale
        if softcap is not None:
            values = torch.tanh(values / softcap) * softcap
        if reduction.kept:
            reduction.logits[:, first_column : first_column + values.shape[1]] = values[list(reduction.kept)]
        reduction.has_nan |= values.isnan().any(dim=1)
        if reduction.peak is not None and reduction.total is not None:
            earlier = reduction.peak + torch.log(reduction.total)
            torch.logaddexp(earlier, torch.logsumexp(values, dim=1), out=reduction.peak)
            reduction.total.fill_(1.0)
        values = values.masked_fill(values.isnan(), float("-inf"))
        best, index = values.max(dim=1)
        better = best > reduction.best
        reduction.best[better] = best[better]
        reduction.best_index[better] = index[better] + first_column
        if reduction.top_k:
            _merge_top(reduction, values, first_column)


def _merge_top(reduction: LogitsReduction, values: torch.Tensor, first_column: int) -> None:
    columns = torch.arange(first_column, first_column + values.shape[1]).expand_as(values)
    columns = columns.masked_fill(values == float("-inf"), -1)
    merged = torch.cat((reduction.top_values, values), dim=1)
    # stable: equal values stay in column order
    order = merged.argsort(dim=1, descending=True, stable=True)[:, : reduction.top_k]
    reduction.top_indices.copy_(torch.cat((reduction.top_indices, columns), dim=1).gather(1, order))
    reduction.top_values.copy_(merged.gather(1, order))


def _values(x: Activations) -> torch.Tensor:
    return x.dequantize() if isinstance(x, Accumulated) else x.float()


def _heads(x: Activations, dim: int) -> torch.Tensor:
    values = _values(x)
    return values.reshape(values.shape[0], values.shape[1] // dim, dim)


def _out_dtype(x: Activations, out_dtype: torch.dtype | None) -> torch.dtype:
    if out_dtype is not None:
        return out_dtype
    return torch.float32 if isinstance(x, Accumulated) else x.dtype
