"""Large tensors on the CPU, as pages of the system."""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

HUGE_PAGE = 2 << 20
ROOM = 16 << 20
"""Bytes that small tensors share."""
LINE = 64
"""Bytes to which they are aligned."""


def untouched_zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose pages cost memory only once they are written (``torch.zeros`` writes them all).

    Huge pages where the system has them: what is read here and there would spend its time with looking up small ones.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < mmap.PAGESIZE or not hasattr(mmap, "MAP_PRIVATE"):
        return torch.zeros(*shape, dtype=dtype)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system built without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(*shape)  # holds the pages for as long as it lives


class Arena:
    """Gives tensors that share large pages, since each alone would be too small for one. Pages live while one of them does."""

    def __init__(self) -> None:
        self._room = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same numbers, contiguous, beside what was copied before."""
        num_bytes = tensor.numel() * tensor.element_size()
        padded = -(-num_bytes // LINE) * LINE
        if padded > self._room.numel():
            self._room = untouched_zeros((max(padded, ROOM),), torch.uint8)
        place, self._room = self._room[:padded], self._room[padded:]
        return place[:num_bytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
