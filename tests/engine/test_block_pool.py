import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from batchinfer.engine.block_pool import BlockPool, chain_hash, root_hash


def test_free_blocks_go_out_in_the_order_in_which_they_became_free():
    pool = BlockPool(num_blocks=3, block_size=2)
    first, second, third = (pool.allocate() for _ in range(3))
    for block, content in ((first, 1), (second, 2), (third, 3)):
        pool.register(block, chain_hash(root_hash(), [content]))
    pool.release([second])
    pool.release([third])
    pool.release([first])
    assert [pool.allocate() for _ in range(3)] == [second, third, first]


def test_a_sequence_loses_its_tail_before_its_head():
    """A prefix is found from its head: its last block must be handed out first."""
    pool = BlockPool(num_blocks=2, block_size=1)
    table = [pool.allocate(), pool.allocate()]
    parent = root_hash()
    for block in table:
        parent = chain_hash(parent, [7])
        pool.register(block, parent)
    pool.release(table)
    assert pool.allocate() == table[1]


def test_blocks_without_content_go_out_before_any_prefix():
    pool = BlockPool(num_blocks=2, block_size=1)
    prefix, empty = pool.allocate(), pool.allocate()
    pool.register(prefix, chain_hash(root_hash(), [1]))
    pool.release([prefix])
    pool.release([empty])
    assert pool.allocate() == empty


def test_a_prefix_that_others_used_outlives_prompts_that_none_did():
    pool = BlockPool(num_blocks=2, block_size=1)
    proven, alone = pool.allocate(), pool.allocate()
    pool.register(proven, chain_hash(root_hash(), [1]))
    pool.register(alone, chain_hash(root_hash(), [2]))
    pool.share(proven)
    assert (pool.num_shared, pool.num_shared_of([proven, alone])) == (1, 1)
    pool.release([proven])
    pool.release([proven])
    pool.release([alone])
    assert [pool.allocate(), pool.allocate()] == [alone, proven]
    assert pool.num_shared == 0


def test_a_free_block_keeps_its_content_until_it_is_handed_out():
    pool = BlockPool(num_blocks=1, block_size=2)
    key = chain_hash(root_hash(), [5, 6])
    block = pool.allocate()
    pool.register(block, key)
    pool.release([block])
    assert pool.lookup(key) == block
    pool.share(block)
    assert pool.num_free == 0
    pool.release([block])
    pool.allocate()
    assert pool.lookup(key) is None


def test_hashes_name_the_content_and_all_before_it():
    one = chain_hash(root_hash(), [1, 2])
    assert chain_hash(root_hash(), [1, 2]) == one
    assert chain_hash(root_hash(), [1, 3]) != one
    assert chain_hash(chain_hash(root_hash(), [0, 0]), [1, 2]) != one
    assert chain_hash(root_hash("tenant"), [1, 2]) != one


def test_an_empty_pool_says_so():
    pool = BlockPool(num_blocks=1, block_size=1)
    pool.allocate()
    with pytest.raises(IndexError, match="no KV cache block is free"):
        pool.allocate()


def test_integrity_finds_a_leak():
    pool = BlockPool(num_blocks=2, block_size=1)
    block = pool.allocate()
    pool.check_integrity([[block]])
    with pytest.raises(AssertionError):
        pool.check_integrity([])


def test_memory_grows_with_what_runs_and_not_with_prompts_that_nobody_else_asks_for():
    pool = BlockPool(num_blocks=100, block_size=1, max_unproven=3)
    for content in range(50):
        table = [pool.allocate() for _ in range(10)]
        for at, block in enumerate(table):
            pool.register(block, chain_hash(root_hash(), [content, at]))
        pool.release(table)
    assert pool.num_touched <= 10 + 3
    first, second = ([pool.allocate() for _ in range(10)] for _ in range(2))
    assert pool.num_touched <= 20 + 3
    for at, block in enumerate(first):
        pool.register(block, chain_hash(root_hash(), [at]))
    for block in first:
        pool.share(block)
    pool.release(first * 2)
    pool.release(second)
    assert pool.num_free == 100
    assert {pool.allocate() for _ in range(90)}.isdisjoint(first), "a shared prefix went before memory was used up"
    assert {pool.allocate() for _ in range(10)} == set(first)


def test_a_pool_without_that_bound_keeps_every_prefix_while_there_is_room():
    pool = BlockPool(num_blocks=100, block_size=1)
    for content in range(100):
        block = pool.allocate()
        pool.register(block, chain_hash(root_hash(), [content]))
        pool.release([block])
    assert all(pool.lookup(chain_hash(root_hash(), [content])) is not None for content in range(100))


class PoolMachine(RuleBasedStateMachine):
    """Any order of allocate, share, register and release keeps the pool equal to a naive model of it."""

    tables = Bundle("tables")
    max_unproven = None

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(num_blocks=5, block_size=1, max_unproven=self.max_unproven)
        self.living = []

    @rule(target=tables)
    def start(self):
        self.living.append([])
        return self.living[-1]

    @rule(table=tables, content=st.integers(0, 3))
    def grow(self, table, content):
        key = chain_hash(root_hash(), [content, len(table)])
        block = self.pool.lookup(key)
        if block is not None and block not in table:
            self.pool.share(block)
            table.append(block)
        elif self.pool.num_free:
            table.append(self.pool.allocate())
            self.pool.register(table[-1], key)

    @precondition(lambda self: self.living)
    @rule(table=consumes(tables))
    def end(self, table):
        self.pool.release(table)
        self.living = [other for other in self.living if other is not table]

    @invariant()
    def is_whole(self):
        self.pool.check_integrity(self.living)
        held = {block for table in self.living for block in table}
        assert self.pool.num_used == len(held)
        assert self.pool.num_free == 5 - len(held)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPoolMachine = PoolMachine.TestCase


class ThriftyMachine(PoolMachine):
    """The same of a pool that spares memory."""

    max_unproven = 1


ThriftyMachine.TestCase.settings = PoolMachine.TestCase.settings
TestThriftyMachine = ThriftyMachine.TestCase
