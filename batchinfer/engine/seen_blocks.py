"""What a prefix cache without end would have found: the ideal that reuse is measured against, in bounded memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchinfer.engine.block_pool import BlockHash

BITS = 2**25
"""4 MiB. A block is taken for one seen before by mistake at most once in 16."""
MOST_SEEN = BITS // 16
"""Two million blocks, some 32 million tokens; then it begins anew."""


class SeenBlocks:
    """Remembers the hashes of blocks as bits; allocates its memory with the first."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self._count = 0

    def add(self, hashes: Sequence[BlockHash]) -> int:
        """How many of a prompt's leading blocks were seen before; from now on all of them are."""
        if not hashes:
            return 0
        if not self._bits or self._count > MOST_SEEN:
            self._bits, self._count = bytearray(BITS // 8), 0
        bits = self._bits
        num_known = len(hashes)
        for index, block_hash in enumerate(hashes):
            place = int.from_bytes(block_hash[:4], "little") % BITS
            mask = 1 << (place & 7)
            if not bits[place >> 3] & mask:
                bits[place >> 3] |= mask
                self._count += 1
                num_known = min(num_known, index)
        return num_known
