"""One decoder layer of the Llama shape as few, large operations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from batchinfer.models.fused.timed import LINEAR_KINDS, Timed
from batchinfer_kernels.cpu import Accumulated

if TYPE_CHECKING:
    from batchinfer.models.fused.linear import Linear, Operand
    from batchinfer.models.fused.mlp import Mlp
    from batchinfer.models.fused.spec import LayerSpec, Norm
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
    mlp: Mlp

    def timed(self, spent: dict[str, int]) -> FusedLayer:
        """The same layer that adds its parts' nanoseconds to ``spent``."""
        qkv: Any = Timed(self.qkv, LINEAR_KINDS, spent)
        o: Any = Timed(self.o, LINEAR_KINDS, spent)
        return replace(self, qkv=qkv, o=o, mlp=self.mlp.timed(spent))


@dataclass(frozen=True, slots=True)
class Step:
    """What all layers of a step share; ``residual`` is changed in place."""

    residual: torch.Tensor
    positions: torch.Tensor
    context: StepContext


class LayerRunner:
    """Runs layers one by one."""

    def __init__(self, ops: Ops, dtype: torch.dtype) -> None:
        """``dtype`` is that of queries."""
        self._ops = ops
        self._dtype = dtype

    def __call__(self, index: int, layer: FusedLayer, x: Activations | None, step: Step) -> Activations:
        """What the layer adds to the residual next; ``x`` is what the layer before still has to add."""
        spec = layer.spec
        qkv = layer.qkv(self._enter(layer.qkv, spec.attention_norm, x, step.residual))
        attended = self._attend(index, spec, qkv, step)
        x = self._leave(layer.o(layer.o.convert(attended)), spec.post_attention_norm)
        rows = self._enter(layer.mlp, spec.mlp_norm, x, step.residual)
        return self._leave(layer.mlp(rows), spec.post_mlp_norm)

    def _enter(self, block: Linear | Mlp, norm: Norm | None, x: Activations | None, residual: torch.Tensor) -> Operand:
        """``residual += x``, then the rows that ``block`` reads: the residual, normed if the family does."""
        if norm is not None:
            return block.norm(residual, norm, None) if x is None else block.norm(x, norm, residual)
        if x is not None:
            residual += self._ops.convert(x, torch.float32)
        return block.convert(residual)

    def _leave(self, x: Activations, norm: Norm | None) -> Activations:
        """What a block gives, normed if the family does that."""
        return x if norm is None else self._norm(x, norm)

    def _norm(self, x: Activations, norm: Norm) -> torch.Tensor:
        return self._ops.rms_norm(x, norm.weight, norm.eps, weight_offset=norm.offset, out_dtype=torch.float32)

    def _attend(self, index: int, spec: LayerSpec, qkv: Activations, step: Step) -> torch.Tensor:
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


def _columns(x: Activations, start: int, stop: int | None) -> Activations:
    """A projection out of a merged one; a view."""
    if isinstance(x, Accumulated):
        return x.columns(start, x.values.shape[1] if stop is None else stop)
    return x[:, start:stop]
