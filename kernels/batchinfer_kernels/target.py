"""Which GPU the kernels are compiled for, for the tables that choose block sizes."""

from __future__ import annotations

import triton
from triton.runtime import driver

INTERPRETED_ARCH = 90
"""What the interpreter stands in for."""
GFX942 = 42
"""MI300's number in the tables. Lower than any NVIDIA one with wgmma or TMA, as it has neither; LDS is 64 KiB."""
LARGE_SHARED = (80, 90, 100)
"""Architectures with at least 163 KiB of shared memory a program; the others have 99, MI300 has 64."""


def target_arch() -> int:
    """Compute capability times ten of the active device: 80, 86, 89, 90, 100; or :data:`GFX942`."""
    if triton.knobs.runtime.interpret:
        return INTERPRETED_ARCH
    arch = driver.active.get_current_target().arch
    return arch if isinstance(arch, int) else GFX942
