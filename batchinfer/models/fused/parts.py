"""Where a projection's weights lie in a transformers model: in a module, or in the stack of all experts' weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from batchinfer.models.deferred import read

if TYPE_CHECKING:
    from collections.abc import Callable


class ModulePart:
    """A linear module's weight and bias."""

    def __init__(self, module: torch.nn.Linear) -> None:
        self._module = module
        self.out_features, self.in_features = module.weight.shape

    def weight(self) -> torch.Tensor:
        """See :meth:`~batchinfer.models.fused.spec.Part.weight`."""
        return read(self._module.weight)

    def bias(self) -> torch.Tensor | None:
        """See :meth:`~batchinfer.models.fused.spec.Part.bias`."""
        return None if self._module.bias is None else read(self._module.bias)

    def release(self) -> None:
        """See :meth:`~batchinfer.models.fused.spec.Part.release`."""
        self._module.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)


class TensorPart:
    """A matrix that is in memory anyway, as embeddings that are the head's weights too."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight
        self.out_features, self.in_features = weight.shape

    def weight(self) -> torch.Tensor:
        """See :meth:`~batchinfer.models.fused.spec.Part.weight`."""
        return self._weight

    def bias(self) -> None:
        """See :meth:`~batchinfer.models.fused.spec.Part.bias`: it has none."""

    def release(self) -> None:
        """See :meth:`~batchinfer.models.fused.spec.Part.release`: others need it."""


class ExpertPart:
    """One expert's matrix in a parameter ``[num_experts, out, in]``; the parameter goes when its last expert does."""

    def __init__(self, stack: ExpertStack, index: int) -> None:
        self._stack = stack
        self._index = index
        _, self.out_features, self.in_features = stack.parameter.shape

    def weight(self) -> torch.Tensor:
        """See :meth:`~batchinfer.models.fused.spec.Part.weight`."""
        return read(self._stack.parameter, self._index)

    def bias(self) -> None:
        """See :meth:`~batchinfer.models.fused.spec.Part.bias`: these have none."""

    def release(self) -> None:
        """See :meth:`~batchinfer.models.fused.spec.Part.release`."""
        self._stack.release(self._index)


class ExpertStack:
    """The weights of all experts of a layer, in one parameter of a module."""

    def __init__(self, module: torch.nn.Module, name: str) -> None:
        self.parameter: torch.nn.Parameter = getattr(module, name)
        self._drop: Callable[[], None] = lambda: setattr(
            module, name, torch.nn.Parameter(torch.empty(0), requires_grad=False)
        )
        self._left = set(range(len(self.parameter)))

    def parts(self) -> list[ExpertPart]:
        """One an expert."""
        return [ExpertPart(self, index) for index in range(len(self.parameter))]

    def release(self, index: int) -> None:
        """Note that an expert's weights are not needed; the last one frees all."""
        self._left.discard(index)
        if not self._left:
            self._drop()
            self.parameter = torch.nn.Parameter(torch.empty(0), requires_grad=False)
