"""Sizes of decode batches that are captured, and where their padding rows write."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_CAPTURED = 512
"""Larger decode batches launch their kernels one by one: then the kernels, and not their launches, take the time."""
FINE, COARSE = 8, 16
COARSE_FROM = 256


def padded_sizes(max_num_seqs: int, least: int = 1) -> list[int]:
    """Batch sizes to capture, ascending: ``least``, 1, 2, 4, 8, 16, 24, ... 256, 272, ..., ``max_num_seqs``.

    No gap is wider than a block of the KV cache, so that padding rows have a slot each in one trash block.
    """
    most = max(least, min(max_num_seqs, MAX_CAPTURED))
    sizes = {1, 2, 4, *range(FINE, COARSE_FROM, FINE), *range(COARSE_FROM, most + 1, COARSE), least, most}
    return sorted(size for size in sizes if least <= size <= most)


def padded_size(sizes: Sequence[int], num_rows: int) -> int | None:
    """The smallest captured size that holds so many rows; None if none does."""
    at = bisect_left(sizes, num_rows)
    return sizes[at] if at < len(sizes) else None
