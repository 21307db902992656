"""The KV cache's blocks: who holds which, and which hold a prefix that can be used again. No tensors here."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

BlockHash = bytes
"""Names a block's content *and* everything before it: a chain of 128-bit BLAKE2b digests."""


def root_hash(salt: str = "") -> BlockHash:
    """The parent of a first block. Sequences with different salts share nothing."""
    return blake2b(salt.encode(), digest_size=16).digest()


def chain_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """The hash of a full block of ``token_ids`` that follows ``parent``."""
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


class BlockPool:
    """``num_blocks`` blocks of ``block_size`` tokens, each free or held by one or more sequences.

    A block that nobody holds is free, and keeps its content until it is handed out again: free blocks without content are
    handed out first, then those that were never found by another sequence, then those that were, each in the order in
    which they became free. So the cache is an LRU in two parts, and a flood of prompts of their own cannot wash away a
    prefix that has proved its worth. All operations are O(1) a block.

    Blocks that were never handed out may cost no memory yet. They go out after those without content, but only while
    fewer than ``max_unproven`` free blocks (default: any number) keep content that nobody has found so far: memory is
    then for what runs and what is shared, and the rest of a pool is a reserve.

    Index of a block: ``0 <= block < num_blocks``; its slots are ``block * block_size + offset``.
    """

    def __init__(self, num_blocks: int, block_size: int, *, max_unproven: int | None = None) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._max_unproven = num_blocks if max_unproven is None else max_unproven
        self._num_touched = 0  # blocks from here on were never handed out
        self._num_holders = [0] * num_blocks
        # Keys are free blocks, oldest first; an OrderedDict is a queue that can also lose an element in its middle.
        self._free: OrderedDict[int, None] = OrderedDict()
        self._free_proven: OrderedDict[int, None] = OrderedDict()
        self._is_proven = bytearray(num_blocks)
        self._num_shared = 0
        self._hash_of: dict[int, BlockHash] = {}
        self._block_of: dict[BlockHash, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks nobody holds, whether or not they hold a prefix."""
        return len(self._free) + len(self._free_proven) + self.num_blocks - self._num_touched

    @property
    def num_touched(self) -> int:
        """Blocks that were handed out at least once: those that may cost memory."""
        return self._num_touched

    @property
    def num_used(self) -> int:
        """Blocks held by at least one sequence."""
        return self.num_blocks - self.num_free

    @property
    def num_shared(self) -> int:
        """Blocks held by more than one sequence."""
        return self._num_shared

    def num_shared_of(self, table: Sequence[int]) -> int:
        """Leading blocks of a table that others hold too."""
        holders = self._num_holders
        for index, block in enumerate(table):
            if holders[block] < 2:
                return index
        return len(table)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def num_holders(self, block: int) -> int:
        """How many sequences hold a block."""
        return self._num_holders[block]

    def allocate(self) -> int:
        """Hand out a free block, the next by the order above; its old content is forgotten.

        Raises:
            IndexError: no block is free.
        """
        if self._takes_untouched():
            block = self._num_touched
            self._num_touched += 1
        else:
            queue = self._free or self._free_proven
            if not queue:
                raise IndexError("no KV cache block is free")
            block, _ = queue.popitem(last=False)
            self.forget(block)
        self._num_holders[block] = 1
        return block

    def _takes_untouched(self) -> bool:
        if self._num_touched == self.num_blocks:
            return False
        if not self._free:
            return True
        return next(iter(self._free)) in self._hash_of and len(self._free) < self._max_unproven

    def lookup(self, block_hash: BlockHash) -> int | None:
        """The block that holds this content, free or held; None if there is none. Changes nothing."""
        return self._block_of.get(block_hash)

    def share(self, block: int) -> None:
        """Hold a block found by :meth:`lookup`, beside those who may hold it already."""
        holders = self._num_holders[block]
        if holders == 0:
            del (self._free_proven if self._is_proven[block] else self._free)[block]
        self._num_shared += holders == 1
        self._is_proven[block] = 1
        self._num_holders[block] = holders + 1

    def register(self, block: int, block_hash: BlockHash) -> bool:
        """Offer a held block's content for sharing; False if an equal block is offered already."""
        if block_hash in self._block_of or block in self._hash_of:
            return False
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash
        return True

    def forget(self, block: int) -> None:
        """Offer a block's content no longer; those who hold it keep it."""
        if (block_hash := self._hash_of.pop(block, None)) is not None:
            del self._block_of[block_hash]
        if self._is_proven[block]:
            self._is_proven[block] = 0
            if block in self._free_proven:
                del self._free_proven[block]
                self._free[block] = None
                self._free.move_to_end(block, last=False)

    def release(self, blocks: Iterable[int]) -> None:
        """Let go of blocks, given in a sequence's order.

        The last becomes free first: a prefix is found from its head, so its tail is the first to be worth nothing.
        """
        for block in reversed(list(blocks)):
            holders = self._num_holders[block] = self._num_holders[block] - 1
            self._num_shared -= holders == 1
            if holders == 0 and self._is_proven[block]:
                self._free_proven[block] = None
            elif holders == 0:
                self._free[block] = None
                self._free.move_to_end(block, last=block in self._hash_of)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Compare the pool with the block tables of all living sequences.

        Raises:
            AssertionError: a block is lost, counted wrongly, or offered under a wrong name.
        """
        holders = [0] * self.num_blocks
        for table in tables:
            assert len(set(table)) == len(table), f"a block stands twice in one table: {table}"
            for block in table:
                holders[block] += 1
        assert holders == self._num_holders, "reference counts differ from the block tables"
        assert self._free.keys().isdisjoint(self._free_proven), "a block is free twice"
        free = {*self._free, *self._free_proven, *range(self._num_touched, self.num_blocks)}
        assert free == {b for b, n in enumerate(holders) if n == 0}, "free list differs from what is unheld"
        assert self._num_shared == sum(n > 1 for n in holders), "the count of shared blocks is wrong"
        assert {b: h for h, b in self._block_of.items()} == self._hash_of, "hash maps are not each other's inverse"
