"""A decoder's layers, or its head, as one call into the kernels: where every linear is one that the kernels multiply."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchinfer.models.fused.linear import projection_of
from batchinfer.models.fused.mlp import DenseMlp
from batchinfer_kernels.cpu import PackedLayer
from batchinfer_kernels.cpu.native import NativeOps, NativePlan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from batchinfer.models.fused.layer import FusedLayer, StepContext
    from batchinfer.models.fused.linear import Linear
    from batchinfer_kernels.cpu import Ops
    from batchinfer_kernels.cpu.native_decoder import NativeHead, NativeLayers
    from batchinfer_kernels.cpu.operands import Activations


class LayersProgram:
    """All layers in one call; the same bytes as layer by layer."""

    def __init__(self, layers: NativeLayers, num_layers: int, num_heads: int) -> None:
        self._layers = layers
        self._num_layers = num_layers
        self._num_heads = num_heads

    def __call__(self, residual: torch.Tensor, positions: torch.Tensor, context: StepContext) -> Activations:
        """What the last layer still has to add to ``residual``; good until the next call."""
        caches = [context.layer(index) for index in range(self._num_layers)]
        plan = context.plan(caches[0], self._num_heads)
        assert isinstance(plan, NativePlan)
        return self._layers(residual, positions, context.slots, caches, plan)

    def take_spent(self) -> Mapping[str, int]:
        """Nanoseconds by part since this was last asked for."""
        return self._layers.spent.take()


def program_of(ops: Ops, layers: Sequence[FusedLayer], dtype: torch.dtype) -> LayersProgram | None:
    """None if a layer has a part that the kernels do not have in it: experts, norms after blocks, shared ranks, linears of torch."""
    if not isinstance(ops, NativeOps) or not layers:
        return None
    packed = []
    for layer in layers:
        if (one := _packed_layer(layer)) is None:
            return None
        packed.append(one)
    if len({(one.num_heads, one.num_kv_heads, one.head_dim, one.v_head_dim) for one in packed}) > 1:
        return None
    return LayersProgram(ops.layers(packed, dtype), len(packed), packed[0].num_heads)


def head_program(ops: Ops, slices: Sequence[Linear]) -> NativeHead | None:
    """None if a slice is not the kernels' own."""
    packed = [projection_of(one) for one in slices]
    found = [one for one in packed if one is not None]
    return ops.head(found) if isinstance(ops, NativeOps) and found and len(found) == len(packed) else None


def _packed_layer(layer: FusedLayer) -> PackedLayer | None:
    spec, mlp = layer.spec, layer.mlp
    if not isinstance(mlp, DenseMlp) or any((spec.q_norm, spec.k_norm, spec.post_attention_norm, spec.post_mlp_norm)):
        return None
    qkv, o, gate_up, down = (projection_of(one) for one in (layer.qkv, layer.o, mlp.gate_up, mlp.down))
    if qkv is None or o is None or gate_up is None or down is None:
        return None
    if spec.attention_norm is None or spec.mlp_norm is None:
        return None
    a = spec.attention
    return PackedLayer(
        qkv, o, gate_up, down, spec.attention_norm, spec.mlp_norm, spec.rope,
        a.num_heads, a.num_kv_heads, a.head_dim, a.v_head_dim, mlp.activation, a.scaling, a.sliding_window, a.softcap,
    )  # fmt: skip
