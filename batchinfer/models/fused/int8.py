"""INT8 weights: how they are smoothed, rotated and rounded so that per-token products stay near the float model.

Per-token activations are dominated by a few large channels, and plain W8A8 loses the small ones. Two exact changes of
the product ``x @ w.T`` come before rounding: smoothing (SmoothQuant, arXiv 2211.10438) moves part of the large channels
into the weights, and a Hadamard rotation in blocks (as in QuaRot, arXiv 2404.00456) spreads what is left over its block. Weights are
then rounded so that their errors cancel on the rows that calibration saw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from batchinfer.errors import ModelError
from batchinfer.models.fused.convert import PlainMaker
from batchinfer.models.fused.kinds import kinds_of
from batchinfer.models.fused.rotation import rotate, rotation_block
from batchinfer.models.fused.rounding import compensated, nearest
from batchinfer_kernels.cpu import Int8Recipe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from batchinfer.models.fused.calibration import Calibration, Statistics
    from batchinfer.models.fused.linear import Linear, QuantizedLinear
    from batchinfer.models.fused.spec import LayerSpec, Projection
    from batchinfer_kernels.cpu import Ops

MAX_COMPENSATED = 8192
"""Columns up to which errors are made up for; beyond, what must be held for it outweighs a layer."""
SMALLEST = 1e-5
"""Least range of a channel: a dead one must neither vanish nor explode."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How rows and weights are changed before they are rounded."""

    smoothing: float | None = 0.5
    """Share of a channel's range that goes into the weights, as an exponent; None smooths nothing."""
    rotation: int = 512
    """Widest block of the rotation; 0 rotates nothing."""
    damping: float | None = 0.05
    """Weights are rounded so that errors cancel, with this share of the mean added to what was seen; None: to nearest."""

    @property
    def name(self) -> str:
        """As the statistics and a job's manifest carry it."""
        parts = ["w8a8"]
        if self.smoothing is not None:
            parts.append(f"smoothquant{self.smoothing:g}")
        if self.rotation:
            parts.append(f"hadamard{self.rotation}")
        if self.damping is not None:
            parts.append("gptq")
        if self == self.without_data:
            parts.append("data-free")
        return "-".join(parts)

    @property
    def without_data(self) -> Scheme:
        """What of it needs no calibration."""
        return Scheme(None, self.rotation, None)


DEFAULT_SCHEME = Scheme()
RECIPES = {"int8": DEFAULT_SCHEME.name, "int8-weight-only": "w8-per-channel"}
"""What each quantisation does, by name."""


def smoothing_factors(peak: torch.Tensor, weight: torch.Tensor, exponent: float) -> torch.Tensor:
    """What rows are multiplied by, float32 ``[in]``; weights are divided by it.

    ``peak [in]`` is the largest magnitude seen in each channel. Factors are powers of two: they round nothing, and a
    last bit of the calibration that differs between machines does not reach the weights.
    """
    of_weight = weight.abs().amax(dim=0).clamp_min(SMALLEST)
    factor = of_weight ** (1 - exponent) / peak.clamp_min(SMALLEST) ** exponent
    return torch.exp2(torch.log2(factor).round())


class W8A8Maker:
    """Makes W8A8 linears, a layer's after it was calibrated; without calibration, by rotation and rounding alone."""

    def __init__(
        self,
        ops: Ops,
        scheme: Scheme,
        calibration: Calibration | None,
        *,
        keep: Callable[[str, Mapping[str, QuantizedLinear]], None] | None = None,
    ) -> None:
        """``keep`` gets the recipe's name and all linears by name when all are made, if all were calibrated."""
        self._ops = ops
        self._scheme = scheme if calibration else scheme.without_data
        self._calibration = calibration
        self._keep = keep
        self._seen: dict[str, Statistics] = {}
        self._made: dict[str, QuantizedLinear] = {}
        self._num_uncalibrated = 0

    @property
    def recipe(self) -> str:
        """See :meth:`~batchinfer.models.fused.convert.LinearMaker.recipe`."""
        partly = "-partly-data-free" if self._calibration and self._num_uncalibrated else ""
        return self._scheme.name + partly

    def begin_layer(self, layer: LayerSpec) -> None:
        """See :meth:`~batchinfer.models.fused.convert.LinearMaker.begin_layer`."""
        if self._calibration:
            self._seen = self._calibration.layer(layer)

    def begin_head(self) -> None:
        """See :meth:`~batchinfer.models.fused.convert.LinearMaker.begin_head`."""
        if self._calibration:
            self._seen = {"head": self._calibration.head()}

    def __call__(self, projection: Projection) -> QuantizedLinear:
        """See :meth:`~batchinfer.models.fused.convert.LinearMaker.__call__`."""
        seen = self._seen.get(projection.name)
        if seen is not None and seen.is_usable:
            scheme = self._scheme
        else:
            scheme, seen = self._scheme.without_data, None
            # an expert that no text reached is no fault of the model
            self._num_uncalibrated += ".experts." not in projection.name
        linear = w8a8(self._ops, projection, scheme, seen)
        if self._keep:
            self._made[projection.name] = linear
        return linear

    def finish(self) -> None:
        """See :meth:`~batchinfer.models.fused.convert.LinearMaker.finish`."""
        if self._keep and self._calibration and not self._num_uncalibrated:
            self._keep(self.recipe, self._made)
        self._made, self._seen = {}, {}


def w8a8(ops: Ops, projection: Projection, scheme: Scheme, seen: Statistics | None) -> QuantizedLinear:
    """One W8A8 linear; ``seen`` is what calibration saw of its rows, which a scheme without data does not need.

    Raises:
        ModelError: the weights hold inf or NaN.
    """
    weight = _finite(projection)
    smoothing = None
    if scheme.smoothing is not None and seen is not None:
        smoothing = smoothing_factors(seen.peak, weight, scheme.smoothing)
        weight /= smoothing
    block = rotation_block(projection.in_features, scheme.rotation) if scheme.rotation else 0
    weight = rotate(weight, block)
    products = seen.products if seen is not None and scheme.damping is not None else None
    if products is None or len(products) > MAX_COMPENSATED:
        rounded, scale = nearest(weight)
    else:
        smoothed = products if smoothing is None else products * smoothing * smoothing.unsqueeze(1)
        rounded, scale = compensated(weight, rotate(rotate(smoothed, block).T, block), scheme.damping or 0.0)
    return kinds_of(ops).int8(ops, rounded, scale, projection.bias(), Int8Recipe(smoothing, block))


def weight_only(ops: Ops) -> PlainMaker:
    """Makes linears whose weights alone are rounded.

    Raises:
        ModelError: when one is made, the weights hold inf or NaN.
    """

    def make(projection: Projection) -> Linear:
        rounded, scale = nearest(_finite(projection))
        return kinds_of(ops).weight_only(ops, rounded, scale, projection.bias())

    return PlainMaker(make, RECIPES["int8-weight-only"])


def _finite(projection: Projection) -> torch.Tensor:
    weight = projection.weight()
    if not weight.abs().amax().isfinite():
        raise ModelError(
            f"the weights of {projection.name} hold inf or NaN, which INT8 cannot: download the model again, "
            "or use quantization none",
            param="quantization",
        )
    return weight
