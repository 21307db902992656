"""What stands between a layer's second norm and its residual: two products, or experts that share the rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from batchinfer.models.fused.timed import ELEMENTWISE, LINEAR_KINDS, Timed
from batchinfer_kernels.routing import Routing, route

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchinfer.models.fused.linear import Linear, Operand
    from batchinfer.models.fused.spec import Norm
    from batchinfer_kernels.cpu import Ops
    from batchinfer_kernels.cpu.operands import Activation, Activations

MIN_ROWS = 4
"""Rows an expert is given at least: with fewer, products in float round differently than in a larger batch."""


class Mlp(Protocol):
    """A block that asks the op before it for rows in its own form, as a :class:`~batchinfer.models.fused.linear.Linear`."""

    def norm(self, x: Activations, norm: Norm, residual: torch.Tensor | None) -> Operand:
        """Normed rows; ``residual += x`` first where there is one."""

    def convert(self, x: Activations) -> Operand:
        """Rows as they are."""

    def __call__(self, x: Operand) -> Activations:
        """What the block adds to ``x``'s residual, ``[T, hidden_size]``."""

    def timed(self, spent: dict[str, int]) -> Mlp:
        """The same block that adds its parts' nanoseconds to ``spent``."""


class DenseMlp:
    """``down(act(gate) * up)``."""

    def __init__(self, gate_up: Linear, activation: Activation, down: Linear) -> None:
        self.gate_up = gate_up
        self.activation: Activation = activation
        self.down = down

    def norm(self, x: Activations, norm: Norm, residual: torch.Tensor | None) -> Operand:
        """See :meth:`Mlp.norm`."""
        return self.gate_up.norm(x, norm, residual)

    def convert(self, x: Activations) -> Operand:
        """See :meth:`Mlp.convert`."""
        return self.gate_up.convert(x)

    def __call__(self, x: Operand) -> Activations:
        """See :meth:`Mlp.__call__`."""
        return self.down(self.down.act_and_mul(self.gate_up(x), self.activation))

    def timed(self, spent: dict[str, int]) -> DenseMlp:
        """See :meth:`Mlp.timed`."""
        gate_up: Any = Timed(self.gate_up, LINEAR_KINDS, spent)
        down: Any = Timed(self.down, LINEAR_KINDS, spent)
        return DenseMlp(gate_up, self.activation, down)


class RoutedMlp:
    """What experts have in common: the router, which reads the rows and chooses."""

    def __init__(self, router: Linear, top_k: int, *, renormalize: bool) -> None:
        """``router`` takes and gives float32."""
        self._router = router
        self._top_k = top_k
        self._renormalize = renormalize

    def norm(self, x: Activations, norm: Norm, residual: torch.Tensor | None) -> Operand:
        """See :meth:`Mlp.norm`; float32, which each expert rounds for itself."""
        return self._router.norm(x, norm, residual)

    def convert(self, x: Activations) -> Operand:
        """See :meth:`Mlp.convert`."""
        return self._router.convert(x)

    def _route(self, x: torch.Tensor) -> Routing:
        logits = self._router(x)
        assert isinstance(logits, torch.Tensor)
        return route(logits, self._top_k, renormalize=self._renormalize)


class ExpertsMlp(RoutedMlp):
    """Each row through the experts that the router chooses for it; rows are put in the order of their experts.

    An expert's product does not depend on the rows beside it, and answers are added in the order of the router's
    liking, so a row's result does not depend on the batch either. Experts that no row chose cost nothing.
    """

    def __init__(self, ops: Ops, router: Linear, top_k: int, experts: Sequence[DenseMlp], *, renormalize: bool) -> None:
        """``router`` takes and gives float32."""
        super().__init__(router, top_k, renormalize=renormalize)
        self._ops = ops
        self._experts = experts

    def __call__(self, x: Operand) -> torch.Tensor:
        """See :meth:`Mlp.__call__`; float32."""
        assert isinstance(x, torch.Tensor)
        routing = self._route(x)
        pairs, sizes = routing.order.long(), routing.offsets.diff().tolist()
        answers = torch.empty(len(pairs), x.shape[1], device=x.device)
        for expert, chosen in zip(self._experts, torch.split(pairs, sizes), strict=True):
            if len(chosen):
                rows = expert.convert(x.index_select(0, _at_least(chosen // self._top_k, MIN_ROWS)))
                answers.index_copy_(0, chosen, self._ops.convert(expert(rows), torch.float32)[: len(chosen)])
        by_rank = answers.view(len(x), self._top_k, -1)
        total = by_rank[:, 0] * routing.weights[:, :1]
        for rank in range(1, self._top_k):
            total += by_rank[:, rank] * routing.weights[:, rank : rank + 1]
        return total

    def timed(self, spent: dict[str, int]) -> ExpertsMlp:
        """See :meth:`Mlp.timed`."""
        router: Any = Timed(self._router, LINEAR_KINDS, spent)
        ops: Any = Timed(self._ops, {"convert": ELEMENTWISE}, spent)
        experts = [expert.timed(spent) for expert in self._experts]
        return ExpertsMlp(ops, router, self._top_k, experts, renormalize=self._renormalize)


def _at_least(rows: torch.Tensor, count: int) -> torch.Tensor:
    """The rows, the first one repeated if they are too few."""
    missing = count - len(rows)
    return rows if missing <= 0 else torch.cat([rows, rows[:1].expand(missing)])
