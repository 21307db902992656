"""Finds blocks that already hold what a sequence needs next, and offers those that it fills."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchinfer.engine.block_pool import chain_hash
from batchinfer.engine.sequence import PENDING

if TYPE_CHECKING:
    from batchinfer.engine.block_pool import BlockHash, BlockPool
    from batchinfer.engine.sequence import Sequence


class PrefixCache:
    """Reuse of KV blocks between sequences that begin alike; switched off, it never finds anything.

    At least the last token of a sequence is always left to compute: its logits are what the next token comes from.
    """

    def __init__(self, pool: BlockPool, *, is_enabled: bool) -> None:
        self._pool = pool
        self._is_enabled = is_enabled

    def find(self, sequence: Sequence) -> list[int]:
        """Blocks that could be appended to a sequence's table now. Changes nothing."""
        size = self._pool.block_size
        index = len(sequence.block_table)
        blocks: list[int] = []
        if not self._is_enabled or index * size != sequence.num_computed_tokens:
            return blocks  # a block of its own is half full: tables are only appended to
        unread = sequence.first_unread  # the cache has no logits and no hidden states
        end = (sequence.num_tokens - 1 if unread is None else unread) // size
        while index < end:
            block = self._pool.lookup(self._hash(sequence, index))
            if block is None:
                break
            blocks.append(block)
            index += 1
        return blocks

    def take(self, sequence: Sequence) -> None:
        """Append what :meth:`find` finds: its tokens count as computed."""
        for block in self.find(sequence):
            self._pool.share(block)
            sequence.block_table.append(block)
            sequence.num_computed_tokens += self._pool.block_size
            if sequence.num_preemptions == 0:  # what it computed itself before a preemption is no hit
                # nor is what a grammar forces after the prompt
                left = sequence.num_prompt_tokens + self._pool.block_size - sequence.num_computed_tokens
                sequence.num_cached_tokens += max(0, min(self._pool.block_size, left))

    def shareable(self, sequence: Sequence) -> list[BlockHash]:
        """Hashes of the blocks of a sequence's tokens that others could share: all but the one with the last token."""
        count = (sequence.num_tokens - 1) // self._pool.block_size if self._is_enabled else 0
        if count:
            self._hash(sequence, count - 1)
        return sequence.block_hashes[:count]

    def offer(self, sequence: Sequence, start: int, end: int) -> list[int]:
        """Offer the blocks that tokens ``start .. end`` fill; return those that were not offered by others already.

        None while the last of these tokens is not known: what names a block is its content.
        """
        size = self._pool.block_size
        if not self._is_enabled or sequence.token_ids[end - 1] == PENDING:
            return []
        return [
            sequence.block_table[index]
            for index in range(start // size, end // size)
            if self._pool.register(sequence.block_table[index], self._hash(sequence, index))
        ]

    def _hash(self, sequence: Sequence, index: int) -> BlockHash:
        """Hash of a sequence's full block, computed once."""
        size = self._pool.block_size
        hashes = sequence.block_hashes
        while len(hashes) <= index:
            at = len(hashes) * size
            hashes.append(chain_hash(hashes[-1] if hashes else sequence.root, sequence.token_ids[at : at + size]))
        return hashes[index]
