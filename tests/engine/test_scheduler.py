"""Corners of scheduling that a whole engine reaches rarely: what a failed step may leave behind."""

from batchinfer.engine.block_pool import BlockPool, chain_hash, root_hash
from batchinfer.engine.prefix_cache import PrefixCache
from batchinfer.engine.scheduler import Scheduler
from batchinfer.engine.sequence import Sequence
from batchinfer.sampling_params import SamplingParams


def sequence(arrival, tokens, max_tokens=5):
    params = SamplingParams(max_tokens=max_tokens)
    return Sequence(str(arrival), params, list(tokens), len(tokens), max_tokens, 0, arrival, root_hash(), None)


def test_a_row_left_out_of_a_step_holds_no_block_of_that_step():
    """Else a failed step would leave it with blocks that were never written.

    The younger row is ahead, was alone for a step. Now the older one fills the next blocks and uses up the budget: the
    younger finds them, but has no budget left to go on.
    """
    pool = BlockPool(num_blocks=32, block_size=2)
    scheduler = Scheduler(pool, max_num_seqs=4, max_num_batched_tokens=4)
    older, younger = sequence(0, range(1, 14)), sequence(1, range(1, 14))
    scheduler.add(older)
    scheduler.commit(scheduler.schedule())
    scheduler.add(younger)
    scheduler.commit(scheduler.schedule(only={younger}))
    assert (older.num_computed_tokens, younger.num_computed_tokens) == (4, 8)

    output = scheduler.schedule()

    assert [(part.sequence, part.start, part.num_new_tokens) for part in output.scheduled] == [(older, 8, 4)]
    assert younger.num_computed_tokens == 8
    scheduler.rollback(output)
    assert (older.num_computed_tokens, younger.num_computed_tokens) == (4, 8)
    pool.check_integrity([older.block_table, younger.block_table])


def test_rollback_puts_new_rows_back_at_the_head_of_the_queue():
    pool = BlockPool(num_blocks=32, block_size=2)
    scheduler = Scheduler(pool, max_num_seqs=4, max_num_batched_tokens=100)
    rows = [sequence(i, [i + 1] * 5) for i in range(3)]
    for row in rows:
        scheduler.add(row)
    scheduler.rollback(scheduler.schedule())
    assert list(scheduler.waiting) == rows
    assert scheduler.running == []
    assert pool.num_free == 32


def test_a_half_full_block_is_never_skipped():
    """Another row offers the *next* block: taking it would leave a hole in the middle of the context."""
    pool = BlockPool(num_blocks=8, block_size=4)
    prefixes = PrefixCache(pool, is_enabled=True)
    row = sequence(0, range(1, 14))
    row.block_table.append(pool.allocate())
    row.num_computed_tokens = 2
    first = chain_hash(root_hash(), [1, 2, 3, 4])
    pool.register(pool.allocate(), chain_hash(first, [5, 6, 7, 8]))
    assert prefixes.find(row) == []


def test_what_cannot_run_though_nothing_else_does_is_named():
    """A row that was let in although the pool is too small: the engine ends it with an error instead of spinning."""
    pool = BlockPool(num_blocks=2, block_size=2)
    scheduler = Scheduler(pool, max_num_seqs=4, max_num_batched_tokens=100)
    row = sequence(0, range(1, 14))
    scheduler.add(row)
    output = scheduler.schedule()
    assert output.scheduled == []
    assert output.stuck is row
