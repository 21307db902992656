"""Turns a described model into a fused decoder, layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from batchinfer.models.fused.adapted import AdapterSlots
from batchinfer.models.fused.decoder import FusedDecoder
from batchinfer.models.fused.kinds import CPU, kinds_of
from batchinfer.models.fused.layer import FusedLayer
from batchinfer.models.fused.mlp import DenseMlp
from batchinfer.models.fused.packed_linear import PackedSlices
from batchinfer.models.fused.spec import ExpertsSpec, MlpSpec
from batchinfer.models.parallel.fused import share_layer
from batchinfer_kernels.cpu.pages import trim_heap

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchinfer.models.fused.linear import Linear
    from batchinfer.models.fused.mlp import Mlp
    from batchinfer.models.fused.spec import DecoderSpec, LayerSpec, Projection
    from batchinfer.models.parallel.peers import Peers
    from batchinfer_kernels.cpu import Ops

    MakeLinear = Callable[[Projection], Linear]


class LinearMaker(Protocol):
    """Makes a decoder's linears, in the order in which they run."""

    @property
    def recipe(self) -> str:
        """How weights are quantised; empty if they are not. Final once all linears are made."""

    def begin_layer(self, layer: LayerSpec) -> None:
        """The next ones are this layer's."""

    def begin_head(self) -> None:
        """The next one is the head."""

    def __call__(self, projection: Projection) -> Linear:
        """One linear."""

    def finish(self) -> None:
        """All are made."""


class PlainMaker:
    """Makes linears from weights alone, with a function."""

    def __init__(self, make: MakeLinear, recipe: str = "", make_head: MakeLinear | None = None) -> None:
        """The head is made by ``make_head``; None: like all others."""
        self._make = make
        self._make_head = make_head or make
        self.recipe = recipe

    def begin_layer(self, layer: LayerSpec) -> None:
        """See :meth:`LinearMaker.begin_layer`: nothing to do."""

    def begin_head(self) -> None:
        """See :meth:`LinearMaker.begin_head`."""
        self._make = self._make_head

    def __call__(self, projection: Projection) -> Linear:
        """See :meth:`LinearMaker.__call__`."""
        return self._make(projection)

    def finish(self) -> None:
        """See :meth:`LinearMaker.finish`: nothing to do."""


def pack(ops: Ops, dtype: torch.dtype) -> PlainMaker:
    """Linears in ``dtype``, not quantised."""
    kinds = kinds_of(ops)
    return PlainMaker(
        lambda projection: kinds.plain(ops, projection.weight(), projection.bias(), dtype),
        make_head=(lambda projection: PackedSlices(ops, projection, dtype)) if kinds is CPU else None,
    )


def convert(
    ops: Ops,
    spec: DecoderSpec,
    dtype: torch.dtype,
    make: LinearMaker,
    *,
    releases_weights: bool,
    peers: Peers | None = None,
) -> FusedDecoder:
    """Build the decoder; queries and KV are in ``dtype``. With ``peers`` the spec is a rank's share of a model.

    With ``releases_weights`` the model's own weights go as theirs are made, so that at no time more than one layer is
    held twice; the model cannot run afterwards.
    """
    adapters = AdapterSlots(make=kinds_of(ops).adapted, device=spec.embedding.device)

    def make_one(projection: Projection) -> Linear:
        linear = adapters.wrap(ops, projection, make(projection))
        if releases_weights:
            projection.release()
        return linear

    layers = []
    for layer in spec.layers:
        make.begin_layer(layer)
        built = build_layer(layer, make_one, ops)
        layers.append(built if peers is None else share_layer(built, peers))
        if releases_weights:
            trim_heap()  # of what this layer's conversion took beside its weights
    make.begin_head()
    head = make(spec.head)
    make.finish()
    decoder = FusedDecoder(ops, spec, layers, head, dtype, adapters=adapters, peers=peers)
    if releases_weights:
        spec.head.release()
    return decoder


def build_layer(
    layer: LayerSpec, make: MakeLinear, ops: Ops, *, make_router: Callable[[torch.Tensor], Linear] | None = None
) -> FusedLayer:
    """One layer; routers are float32 whatever the linears are. With ``make_router`` linears need not be the ops' kind."""
    qkv, o = make(layer.qkv), make(layer.o)
    mlp: Mlp
    if isinstance(layer.mlp, ExpertsSpec):
        weight = layer.mlp.router
        kinds = CPU if make_router else kinds_of(ops)  # expert by expert, any linear will do
        router = make_router(weight) if make_router else kinds.plain(ops, weight, None, torch.float32)
        experts = [_mlp(expert, make) for expert in layer.mlp.experts]
        mlp = kinds.experts(ops, router, layer.mlp.top_k, experts, renormalize=layer.mlp.renormalize)
    else:
        mlp = _mlp(layer.mlp, make)
    return FusedLayer(layer, qkv, o, mlp)


def _mlp(spec: MlpSpec, make: MakeLinear) -> DenseMlp:
    return DenseMlp(make(spec.gate_up), spec.activation, make(spec.down))
