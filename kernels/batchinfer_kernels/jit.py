"""``triton.jit`` with a type, since Triton ships none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import triton

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Kernel(Protocol):
    """A Triton function: launched as ``kernel[grid](...)``, or called from inside another."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        """Bind the number of programs along up to three axes."""
        ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Inline into the calling kernel."""
        ...


def jit(*, do_not_specialize: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Kernel]:
    """Compile a function with Triton. ``do_not_specialize`` names integers that vary from step to step.

    Triton compiles anew for each integer argument that turns out to be 1 or a multiple of 16; a batch size would make a
    kernel of its own for every such value.
    """
    decorate: Callable[[Callable[..., Any]], Kernel] = triton.jit(do_not_specialize=list(do_not_specialize))
    return decorate
