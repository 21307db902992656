"""Measures what each projection reads, on a little text: one layer at a time, in float32, on the model's own weights.

Only one layer's weights and the texts' residual stream are held; the caller quantises and releases a layer before the
next one runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from batchinfer.models.fused.convert import build_layer
from batchinfer.models.fused.kinds import kinds_of
from batchinfer.models.fused.layer import LayerRunner, Step
from batchinfer.models.fused.linear import WrappedLinear

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchinfer.models.fused.layer import StepContext
    from batchinfer.models.fused.linear import Linear, Operand
    from batchinfer.models.fused.spec import DecoderSpec, LayerAttention, LayerSpec, Projection
    from batchinfer_kernels.cpu import Ops
    from batchinfer_kernels.cpu.operands import Activations

MAX_TOKENS = 128
"""Of one text."""
ROUTER = "router"
"""What a layer's experts read together."""


class Statistics:
    """What was seen of the rows that a projection reads."""

    def __init__(self, columns: int, *, has_products: bool, device: torch.device | str = "cpu") -> None:
        self.count = 0
        self.peak = torch.zeros(columns, device=device)
        """Largest magnitude of each channel, float32 ``[in]``."""
        self.products = torch.zeros(columns, columns, device=device) if has_products else None
        """Sum of each row's outer product with itself, float32 ``[in, in]``; None if it was not asked for."""

    def add(self, rows: torch.Tensor) -> None:
        """Take float32 ``rows [n, in]``."""
        self.count += len(rows)
        self.peak = torch.maximum(self.peak, rows.abs().amax(dim=0))
        if self.products is not None:
            self.products.addmm_(rows.T, rows)

    @property
    def is_usable(self) -> bool:
        """Whether anything was seen, and all of it was finite."""
        return self.count > 0 and bool(self.peak.isfinite().all())


class _Observed(WrappedLinear):
    """A linear that notes the rows it is given."""

    def __init__(self, inner: Linear, seen: Statistics) -> None:
        super().__init__(inner)
        self._seen = seen

    def __call__(self, x: Operand) -> Activations:
        assert isinstance(x, torch.Tensor)
        self._seen.add(x)
        return self._inner(x)

    def split(self, columns: int) -> Sequence[Linear]:
        raise NotImplementedError


class Calibration:
    """The texts on their way through the model."""

    def __init__(
        self,
        ops: Ops,
        spec: DecoderSpec,
        texts: Sequence[Sequence[int]],
        context_of: Callable[[LayerAttention], StepContext],
    ) -> None:
        """``texts`` are token ids; ``context_of`` gives a cache for one such layer, in which its index is 0."""
        self._ops = ops
        self._spec = spec
        self._context_of = context_of
        device = spec.embedding.device
        self._positions = torch.cat([torch.arange(len(text)) for text in texts]).to(device)
        self._residual = spec.embed(torch.tensor([token for text in texts for token in text], device=device))
        self._x: Activations | None = None
        self._run_layer = LayerRunner(ops, torch.float32)

    @torch.inference_mode()
    def layer(self, layer: LayerSpec) -> dict[str, Statistics]:
        """Run the next layer; what was seen by the names of its projections.

        An expert's first projection has what all experts of the layer read; its second what came to it alone.
        """
        seen: dict[str, Statistics] = {}

        def observe(name: str, weight: torch.Tensor, bias: torch.Tensor | None, *, has_products: bool) -> _Observed:
            seen[name] = Statistics(weight.shape[1], has_products=has_products, device=weight.device)
            return _Observed(kinds_of(self._ops).plain(self._ops, weight, bias, torch.float32), seen[name])

        def make(projection: Projection) -> Linear:
            is_expert = ".experts." in projection.name
            return observe(projection.name, projection.weight(), projection.bias(), has_products=not is_expert)

        def make_router(weight: torch.Tensor) -> Linear:
            return observe(ROUTER, weight, None, has_products=True)

        fused = build_layer(layer, make, self._ops, make_router=make_router)
        step = Step(self._residual, self._positions, self._context_of(layer.attention))
        self._x = self._run_layer(0, fused, self._x, step)
        if shared := seen.pop(ROUTER, None):
            seen |= dict.fromkeys((name for name in seen if name.endswith("gate_up")), shared)
        return seen

    @torch.inference_mode()
    def head(self) -> Statistics:
        """What the head reads, after all layers have run."""
        norm = self._spec.final_norm
        x, residual = (self._residual, None) if self._x is None else (self._x, self._residual)
        rows = self._ops.rms_norm(
            x, norm.weight, norm.eps, residual=residual, weight_offset=norm.offset, out_dtype=torch.float32
        )
        seen = Statistics(rows.shape[1], has_products=True, device=rows.device)
        seen.add(rows)
        return seen
