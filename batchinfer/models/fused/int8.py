"""INT8 weights: how they are smoothed, rotated and rounded so that per-token products stay near the float model.

Per-token activations are dominated by a few large channels, and plain W8A8 loses the small ones. Two exact changes of
the product ``x @ w.T`` come before rounding: smoothing (SmoothQuant, arXiv 2211.10438) moves part of the large channels
into the weights, and a Hadamard rotation in blocks (as in QuaRot, arXiv 2404.00456) spreads what is left over its block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from batchinfer.models.fused.linear import Int8Linear, WeightOnlyLinear
from batchinfer_kernels.cpu import Int8Recipe

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchinfer.models.fused.linear import Linear
    from batchinfer.models.fused.spec import Projection
    from batchinfer_kernels.cpu import Ops

MIN_ROTATION = 16
SMALLEST = 1e-5
"""Least range of a channel: a dead one must neither vanish nor explode."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How rows and weights are changed before they are rounded."""

    smoothing: float | None = 0.5
    """Share of a channel's range that goes into the weights, as an exponent; None smooths nothing."""
    rotation: int = 64
    """Widest block of the rotation; 0 rotates nothing."""

    @property
    def name(self) -> str:
        """As the statistics and a job's manifest carry it."""
        parts = ["w8a8"]
        if self.smoothing is not None:
            parts.append(f"smoothquant{self.smoothing:g}")
        if self.rotation:
            parts.append(f"hadamard{self.rotation}")
        return "-".join(parts)


DEFAULT_SCHEME = Scheme()
RECIPES = {"int8": DEFAULT_SCHEME.name, "int8-weight-only": "w8-per-channel"}
"""What each quantisation does, by name."""


def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round float32 ``weight [out, in]`` to int8 with a scale a row; a row of zeros has scale 0."""
    scale = weight.abs().amax(dim=1) / 127
    divisor = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (weight / divisor.unsqueeze(1)).round_().to(torch.int8), scale


def smoothing_factors(peak: torch.Tensor, weight: torch.Tensor, exponent: float) -> torch.Tensor:
    """What rows are multiplied by, float32 ``[in]``; weights are divided by it.

    ``peak [in]`` is the largest magnitude seen in each channel. Factors are powers of two: they round nothing, and a
    last bit of the calibration that differs between machines does not reach the weights.
    """
    of_weight = weight.abs().amax(dim=0).clamp_min(SMALLEST)
    factor = of_weight ** (1 - exponent) / peak.clamp_min(SMALLEST) ** exponent
    return torch.exp2(torch.log2(factor).round())


def rotation_block(columns: int, widest: int) -> int:
    """The widest block that divides the columns, up to ``widest``; 0 (no rotation) if that is less than 16."""
    block = math.gcd(columns, widest)
    return block if block >= MIN_ROTATION else 0


def rotate(weight: torch.Tensor, block: int) -> torch.Tensor:
    """``weight [out, in]`` rotated by an orthonormal Hadamard matrix in blocks of its columns."""
    if not block:
        return weight
    matrix = torch.ones(1, 1)
    while len(matrix) < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (weight.view(len(weight), -1, block) @ (matrix / math.sqrt(block))).view_as(weight)


def w8a8(ops: Ops, peaks: dict[int, torch.Tensor], scheme: Scheme = DEFAULT_SCHEME) -> Callable[[Projection], Linear]:
    """Makes W8A8 linears; ``peaks`` are the calibrated magnitudes by ``id`` of a projection's first module."""

    def make(projection: Projection) -> Linear:
        weight = projection.weight()
        smoothing = None
        if scheme.smoothing is not None:
            smoothing = smoothing_factors(peaks[id(projection.modules[0])], weight, scheme.smoothing)
            weight = weight / smoothing
        block = rotation_block(projection.in_features, scheme.rotation) if scheme.rotation else 0
        rounded, scale = quantize_weight(rotate(weight, block))
        return Int8Linear(ops, rounded, scale, projection.bias(), Int8Recipe(smoothing, block))

    return make


def weight_only(ops: Ops) -> Callable[[Projection], Linear]:
    """Makes linears whose weights alone are rounded."""

    def make(projection: Projection) -> Linear:
        rounded, scale = quantize_weight(projection.weight())
        return WeightOnlyLinear(ops, rounded, scale, projection.bias())

    return make
