"""A call of one op: its operands, what it must compute, what it must move, and what torch has for the same."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchinfer.engine.devices import Device

BF16, F16, F32, I8, I32 = torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.int32
FLOATS = (BF16, F16, F32)
NAMES = {BF16: "bf16", F16: "f16", F32: "f32", I8: "int8"}
ROUNDING = {F32: 1e-5, BF16: 2**-8, F16: 2**-11}
"""Half a unit in the last place, relative: what rounding the right number may cost. Float32: a sum's order."""


class UnsupportedError(Exception):
    """This device lacks the units of a kernel."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the operands. ``rows`` are a decode step's products', ``many`` prefill steps'."""

    hidden: int = 4096
    mlp: int = 14336
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    vocab: int = 128256
    rows: int = 64
    many: tuple[int, ...] = (2048, 8192)
    tokens: int = 8192
    """Of what works token by token: norms, activations, the cache's writes."""
    experts: tuple[int, int, int, int] = (128, 8, 1536, 2048)
    """How many, experts a token, N and K."""
    expert_tokens: tuple[int, ...] = (64, 4096)
    sequences: int = 128
    context: int = 4096
    shared: int = 3072
    chunk: int = 4096
    block_size: int = 64
    num_top: int = 20


TINY = Sizes(
    hidden=64, mlp=128, heads=(4, 2), head_dim=16, vocab=96, rows=3, many=(66,), tokens=5, experts=(3, 2, 32, 64),
    expert_tokens=(4,), sequences=2, context=70, shared=64, chunk=20, block_size=16, num_top=2,
)  # fmt: skip
"""What Triton's interpreter computes in a moment."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a call must move and compute at least; ``unit`` is the matrix unit, None where the device table has none."""

    num_bytes: float
    operations: float = 0.0
    unit: str | None = None

    def seconds(self, device: Device) -> tuple[float, str]:
        """The least time on a device, and what it waits for: ``memory`` or the unit."""
        memory = self.num_bytes / device.bandwidth
        if self.unit is None or getattr(device, self.unit) is None:
            return memory, "memory"
        compute = self.operations / device.peak(self.unit)
        return max((memory, "memory"), (compute, self.unit))


@dataclass(frozen=True, slots=True)
class Call:
    """A case with its operands in memory.

    ``run`` returns all that the op gives and writes to; ``expected`` the same by the oracle, from operands of its own;
    ``error`` how far the first is from the second, in tolerances: above 1 is wrong.
    """

    run: Callable[[], Any]
    expected: Callable[[], Any]
    error: Callable[[Any, Any], float]
    work: Work
    peer: tuple[str, Callable[[], object]] | None = None
    """What torch calls it, and torch's own."""


@dataclass(frozen=True, slots=True)
class Case:
    """A variant of an op of ``torch.ops.batchinfer``; ``build`` makes its operands on a device."""

    op: str
    variant: str
    dtype: torch.dtype
    """Of the activations."""
    build: Callable[[torch.device], Call]
    goal: float | None = None
    """Share of the roofline that it is meant to reach."""

    @property
    def name(self) -> str:
        """Op and variant."""
        return f"{self.op} {self.variant}"


def op(name: str) -> Callable[..., Any]:
    """An op as the engine calls it."""
    found: Callable[..., Any] = getattr(torch.ops.batchinfer, name)
    return found


def num_bytes(*tensors: torch.Tensor | None) -> int:
    """Bytes of tensors together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def randn(
    device: torch.device, *shape: int, dtype: torch.dtype = F32, scale: float = 1.0, seed: int = 0
) -> torch.Tensor:
    """Normal numbers, the same for the same shape and seed."""
    generator = torch.Generator(device).manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=generator, device=device) * scale).to(dtype)


def int8s(device: torch.device, *shape: int, seed: int = 0) -> torch.Tensor:
    """Uniform numbers of -127 .. 127."""
    generator = torch.Generator(device).manual_seed(seed + sum(shape))
    return torch.randint(-127, 128, shape, dtype=I8, generator=generator, device=device)


def excess(actual: torch.Tensor, exact: torch.Tensor, rtol: float, atol: float) -> float:
    """The largest error over its tolerance; infinite where shapes differ, or one is NaN or infinite and the other not."""
    if actual.shape != exact.shape:
        return math.inf
    if not actual.numel():
        return 0.0
    mine, theirs = actual.float(), exact.float()
    same = (mine == theirs) | (mine.isnan() & theirs.isnan())
    error = (mine - theirs).abs() / (atol + rtol * theirs.abs())
    return float(torch.where(same, 0.0, error.nan_to_num(math.inf, math.inf)).max())


def rms(x: torch.Tensor) -> float:
    """Root of the mean square; what is not finite counts as zero."""
    return float(x.float().nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt()) if x.numel() else 0.0


def rounded(*, slack: float = 1.02, sums: float = 0.0) -> Callable[[Any, Any], float]:
    """Numbers of any type that are the exact ones rounded; ``sums`` is what their order may cost, in root mean squares.

    A sum that rounds differently in its last bit may end on the other side of a rounding boundary: hence the slack.
    """

    def error(actual: Any, expected: Any) -> float:
        worst = 0.0
        for mine, exact in zip(_listed(actual), _listed(expected), strict=True):
            tolerance = ROUNDING[mine.dtype] * slack
            worst = max(worst, excess(mine, exact, tolerance, tolerance * 1e-2 + 1e-6 + sums * rms(exact)))
        return worst

    return error


def quantized(actual: Any, expected: Any) -> float:
    """Same scales, and same integers but for one in a thousand that a sum's order moved across a rounding boundary."""
    worst = 0.0
    mine, exact = _listed(actual), _listed(expected)
    for numbers, target in zip(mine, exact, strict=True):
        if numbers.dtype != I8:
            worst = max(
                worst, excess(numbers, target, 1e-5, 1e-30) if numbers.dtype == F32 else rounded()(numbers, target)
            )
            continue
        off = (numbers.int() - target.int()).abs()
        worst = max(worst, math.inf if bool((off > 1).any()) else float((off > 0).sum()) / (1 + numbers.numel() / 1000))
    return worst


def _listed(value: Any) -> Sequence[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)
