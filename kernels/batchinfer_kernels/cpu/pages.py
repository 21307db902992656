"""Large tensors on the CPU, as pages of the system."""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

HUGE_PAGE = 2 << 20
ROOM = 64 << 20
"""Bytes that small tensors share."""
LINE = 64
"""Bytes to which they are aligned."""


def untouched_zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose pages cost memory only once they are written (``torch.zeros`` writes them all).

    Huge pages where the system has them: what is read here and there would spend its time with looking up small ones.

    Raises:
        MemoryError: the system has no room for them.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < mmap.PAGESIZE or not hasattr(mmap, "MAP_PRIVATE"):
        return torch.zeros(*shape, dtype=dtype)
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise MemoryError(f"not enough memory: you tried to allocate {num_bytes} bytes") from error
    if num_bytes >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system built without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(*shape)  # holds the pages for as long as it lives


def trim_heap() -> None:
    """Return what is free of C's heap to the system: its allocator keeps it where it lies in pieces."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:  # glibc only
        trim(0)


class Arena:
    """Gives tensors that share large pages, since each alone would be too small for one.

    Pages live while one of their tensors does, and those that still have room while this does.
    """

    def __init__(self) -> None:
        self._room: torch.Tensor | None = None
        self._lock = threading.Lock()

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same numbers, contiguous, beside what was copied before."""
        num_bytes = tensor.numel() * tensor.element_size()
        place = untouched_zeros((num_bytes,), torch.uint8) if num_bytes > ROOM else self._take(num_bytes)
        return place.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def _take(self, num_bytes: int) -> torch.Tensor:
        padded = -(-num_bytes // LINE) * LINE
        with self._lock:
            room = self._room
            if room is None or room.numel() < padded:
                room = untouched_zeros((ROOM,), torch.uint8)
            self._room = room[padded:]
        return room[:num_bytes]
