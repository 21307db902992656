"""Parameters that stay in their file until they are read: how a model is converted without being in memory twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Index: TypeAlias = "int | tuple[slice, ...] | None"
"""Which part of a tensor: all of it, one entry of its first dimension, or a slice of each dimension."""


class DeferredParameter(torch.nn.Parameter):
    """A parameter without data (on the meta device) that knows how to read it."""

    load: Callable[[Index], torch.Tensor]
    """Gives what an index says."""

    @staticmethod
    def like(parameter: torch.Tensor, dtype: torch.dtype, load: Callable[[Index], torch.Tensor]) -> Any:
        """One of the shape of ``parameter``; what ``load`` gives is converted to ``dtype``."""
        empty = torch.empty(parameter.shape, dtype=dtype, device="meta")
        made: Any = torch.Tensor._make_subclass(DeferredParameter, empty, require_grad=False)  # noqa: SLF001 -- as Parameter does
        made.load = lambda index: load(index).to(dtype)
        return made


def read(parameter: torch.Tensor, index: int | None = None) -> torch.Tensor:
    """The parameter's data, from its file if it is there still; with ``index`` one entry of its first dimension."""
    if isinstance(parameter, DeferredParameter):
        return parameter.load(index)
    return parameter if index is None else parameter[index]


def read_all(model: torch.nn.Module) -> None:
    """Bring every deferred parameter of a model into memory; tied ones stay tied."""
    known: dict[int, torch.nn.Parameter] = {}
    for module, name, parameter in _deferred(model):
        if id(parameter) not in known:
            known[id(parameter)] = torch.nn.Parameter(parameter.load(None), requires_grad=False)
        setattr(module, name, known[id(parameter)])


def _deferred(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, DeferredParameter]]:
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, DeferredParameter):
                yield module, name, parameter
