"""Memory that a load needed and nobody needs any more."""

from __future__ import annotations

import gc

from batchinfer_kernels.cpu.pages import trim_heap


def give_back_memory() -> None:
    """Return what is free to the system."""
    gc.collect()
    trim_heap()
