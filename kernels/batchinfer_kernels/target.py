"""Which GPU the kernels are compiled for, for the tables that choose block sizes."""

from __future__ import annotations

import triton
from triton.runtime import driver

INTERPRETED_ARCH = 90
"""What the interpreter stands in for."""
AMD_ARCH = 80
"""gfx targets take the tables of sm_80: no wgmma, no TMA."""


def target_arch() -> int:
    """Compute capability times ten of the active device: 80, 86, 89, 90, 100."""
    if triton.knobs.runtime.interpret:
        return INTERPRETED_ARCH
    arch = driver.active.get_current_target().arch
    return arch if isinstance(arch, int) else AMD_ARCH
