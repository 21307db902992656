"""A decoder of the Llama shape as few, large operations: what the fused path runs instead of transformers' modules."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from batchinfer.models.fused.head import Head
from batchinfer.models.fused.timed import HEAD_KINDS, LINEAR_KINDS, OPS_KINDS, Timed
from batchinfer_kernels.cpu import Accumulated, LogitsReduction

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchinfer.models.fused.linear import Linear, Operand
    from batchinfer.models.fused.spec import DecoderSpec, LayerSpec, Norm
    from batchinfer_kernels.cpu import AttentionPlan, LayerKV, Ops
    from batchinfer_kernels.cpu.operands import Activations


class StepContext(Protocol):
    """Where a step's keys and values go, and what its queries read."""

    slots: torch.Tensor

    def layer(self, index: int) -> LayerKV:
        """A layer's cache."""

    def plan(self, layer: LayerKV, num_heads: int) -> AttentionPlan:
        """The step's work in attention."""


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """A layer's spec with its projections converted."""

    spec: LayerSpec
    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class _Step:
    """What all layers of a step share; ``residual`` is changed in place."""

    residual: torch.Tensor
    positions: torch.Tensor
    context: StepContext


class FusedDecoder:
    """Embeddings, layers and head. The residual stream is float32 in every precision."""

    def __init__(
        self, ops: Ops, spec: DecoderSpec, layers: Sequence[FusedLayer], head: Linear, dtype: torch.dtype
    ) -> None:
        """``dtype`` is that of queries and of the KV cache."""
        self._ops = ops
        self._spec = spec
        self._layers = layers
        self._head = Head(ops, head, spec.head.out_features, spec.logits_scale, spec.logits_softcap)
        self._dtype = dtype

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        sampling: torch.Tensor,
        context: StepContext,
        kept: Sequence[int],
    ) -> LogitsReduction:
        """The best token of each row in ``sampling``, and the logits of those at the places ``kept`` of it.

        ``token_ids``, ``positions`` and ``sampling`` are int64; the first two have a row each of the packed batch.
        """
        spec = self._spec
        residual = spec.embedding.index_select(0, token_ids).float()
        if spec.embedding_scale != 1.0:
            residual *= spec.embedding_scale
        x: Activations | None = None
        step = _Step(residual, positions, context)
        for index, layer in enumerate(self._layers):
            x = self._layer(index, layer, x, step)
        if not len(sampling):
            return LogitsReduction(0)
        residual = residual.index_select(0, sampling)
        last = None if x is None else _rows(x, sampling)
        norm = spec.final_norm
        rows = self._head.norm(residual, norm, None) if last is None else self._head.norm(last, norm, residual)
        return self._head(rows, len(sampling), kept)

    def timed(self, spent: dict[str, int]) -> FusedDecoder:
        """The same decoder, same weights, that adds its parts' nanoseconds to ``spent``; slower by their overhead."""
        twin = copy(self)
        layers = [_timed_layer(layer, spent) for layer in self._layers]
        ops, head = Timed(self._ops, OPS_KINDS, spent), Timed(self._head, HEAD_KINDS, spent)
        vars(twin).update(_ops=ops, _head=head, _layers=layers)
        return twin

    def _layer(self, index: int, layer: FusedLayer, x: Activations | None, step: _Step) -> Activations:
        """What the layer adds to the residual next; ``x`` is what the layer before still has to add."""
        spec = layer.spec
        qkv = layer.qkv(self._enter(layer.qkv, spec.attention_norm, x, step.residual))
        attended = self._attend(index, spec, qkv, step)
        x = self._leave(layer.o(layer.o.convert(attended)), spec.post_attention_norm)
        gate_up = layer.gate_up(self._enter(layer.gate_up, spec.mlp_norm, x, step.residual))
        return self._leave(layer.down(layer.down.act_and_mul(gate_up, spec.activation)), spec.post_mlp_norm)

    def _enter(self, linear: Linear, norm: Norm | None, x: Activations | None, residual: torch.Tensor) -> Operand:
        """``residual += x``, then the rows that ``linear`` reads: the residual, normed if the family does."""
        if norm is not None:
            return linear.norm(residual, norm, None) if x is None else linear.norm(x, norm, residual)
        if x is not None:
            residual += self._ops.convert(x, torch.float32)
        return linear.convert(residual)

    def _leave(self, x: Activations, norm: Norm | None) -> Activations:
        """What a block gives, normed if the family does that."""
        return x if norm is None else self._norm(x, norm)

    def _norm(self, x: Activations, norm: Norm) -> torch.Tensor:
        return self._ops.rms_norm(x, norm.weight, norm.eps, weight_offset=norm.offset, out_dtype=torch.float32)

    def _attend(self, index: int, spec: LayerSpec, qkv: Activations, step: _Step) -> torch.Tensor:
        """Attention output ``[T, num_heads * v_head_dim]``; new keys and values go to the cache."""
        a = spec.attention
        q_end = a.num_heads * a.head_dim
        k_end = q_end + a.num_kv_heads * a.head_dim
        q, k, v = _columns(qkv, 0, q_end), _columns(qkv, q_end, k_end), _columns(qkv, k_end, None)
        if spec.q_norm is not None and spec.k_norm is not None:
            q, k = self._norm(q, spec.q_norm), self._norm(k, spec.k_norm)
        cache = step.context.layer(index)
        query = self._ops.rope_and_kv_write(
            q,
            k,
            v,
            spec.rope,
            positions=step.positions,
            slots=step.context.slots,
            layer=cache,
            out_dtype=self._dtype,
        )
        attended = self._ops.paged_attention(
            query,
            cache,
            step.context.plan(cache, a.num_heads),
            scale=a.scaling,
            window=a.sliding_window,
            softcap=a.softcap,
        )
        return attended.flatten(1)


def _timed_layer(layer: FusedLayer, spent: dict[str, int]) -> FusedLayer:
    names = ("qkv", "o", "gate_up", "down")
    linears: dict[str, Any] = {name: Timed(getattr(layer, name), LINEAR_KINDS, spent) for name in names}
    return replace(layer, **linears)


def _columns(x: Activations, start: int, stop: int | None) -> Activations:
    """A projection out of a merged one; a view."""
    if isinstance(x, Accumulated):
        return x.columns(start, x.values.shape[1] if stop is None else stop)
    return x[:, start:stop]


def _rows(x: Activations, rows: torch.Tensor) -> Activations:
    if isinstance(x, Accumulated):
        return Accumulated(x.values.index_select(0, rows), x.row_scale.index_select(0, rows), x.column_scale, x.bias)
    return x.index_select(0, rows)
