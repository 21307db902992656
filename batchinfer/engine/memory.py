"""Memory that a load needed and nobody needs any more."""

from __future__ import annotations

import ctypes
import gc
import os


def give_back_memory() -> None:
    """Return what is free to the system: C's allocator keeps it where it is in pieces, which a load leaves behind."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:  # glibc only
        trim(0)
