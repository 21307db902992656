"""Turns a described model into a fused decoder, layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchinfer.models.fused.decoder import FusedDecoder, FusedLayer
from batchinfer.models.fused.linear import PackedLinear

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from batchinfer.models.fused.linear import Linear
    from batchinfer.models.fused.spec import DecoderSpec, Projection
    from batchinfer_kernels.cpu import Ops

    MakeLinear = Callable[[Projection], Linear]


def pack(ops: Ops, dtype: torch.dtype) -> MakeLinear:
    """Linears in ``dtype``, not quantised."""
    return lambda projection: PackedLinear(ops, projection.weight(), projection.bias(), dtype)


def convert(
    ops: Ops, spec: DecoderSpec, dtype: torch.dtype, make_linear: MakeLinear, *, releases_weights: bool
) -> FusedDecoder:
    """Build the decoder; queries and KV are in ``dtype``.

    With ``releases_weights`` the model's own weights go as theirs are made, so that at no time more than one layer is
    held twice; the model cannot run afterwards. A head that shares the embeddings' tensor keeps it.
    """
    layers = []
    for layer in spec.layers:
        made = []
        for projection in layer.projections:
            made.append(make_linear(projection))
            if releases_weights:
                projection.release()
        layers.append(FusedLayer(layer, *made))
    head = make_linear(spec.head)
    if releases_weights and spec.head.modules[0].weight is not spec.embedding:
        spec.head.release()
    return FusedDecoder(ops, spec, layers, head, dtype)
