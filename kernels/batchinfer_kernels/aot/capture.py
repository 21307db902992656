"""Compile what a launcher would launch, without a GPU: run it on meta tensors under a driver that only names a target."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_GRID_YZ = 65_535


@dataclass(frozen=True, slots=True)
class Launched:
    """One compiled kernel and the grid it was launched on."""

    name: str
    grid: tuple[int, ...]
    compiled: Any


class NamedTarget:
    """A driver that knows its target and nothing else."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        """What to compile for."""
        return self.target

    def get_current_device(self) -> str:
        """Keys Triton's cache of compiled kernels."""
        return f"aot-{self.target.arch}"

    def get_current_stream(self, _device: object = None) -> int:
        """There is none."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Where launchers make their tensors."""
        return torch.device("meta")

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a launcher asked for {name}, which needs a GPU")


def gpu_target(arch: int | str) -> GPUTarget:
    """``90`` is NVIDIA's sm_90, ``"gfx942"`` AMD's."""
    return GPUTarget("cuda", arch, 32) if isinstance(arch, int) else GPUTarget("hip", arch, 64)


@contextlib.contextmanager
def captured_launches(arch: int | str) -> Iterator[list[Launched]]:
    """Launches inside of the block are compiled for ``arch``, not run, and listed."""
    launched: list[Launched] = []
    stock_run, active = JITFunction.run, driver._active  # noqa: SLF001 -- Triton has no way to set a driver for a while

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:  # noqa: ARG001 -- Triton's signature
        compiled = stock_run(self, *args, grid=grid, warmup=True, **options)
        size = tuple(grid(options) if callable(grid) else grid)
        if not size or min(size) < 1 or max((*size[1:], 0)) > MAX_GRID_YZ:
            raise ValueError(f"{self.fn.__name__} is launched on the impossible grid {size}")
        launched.append(Launched(self.fn.__name__, size, compiled))
        return compiled

    JITFunction.run = run
    driver.set_active(NamedTarget(gpu_target(arch)))
    try:
        yield launched
    finally:
        JITFunction.run = stock_run
        driver._active = active  # noqa: SLF001 -- as above
