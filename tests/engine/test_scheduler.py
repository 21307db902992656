"""Corners of scheduling that a whole engine reaches rarely: what a failed step may leave behind."""

import random
import weakref
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.engine.block_pool import BlockPool, chain_hash, root_hash
from batchinfer.engine.lengths import LengthHistory
from batchinfer.engine.prefix_cache import PrefixCache
from batchinfer.engine.scheduler import Scheduler
from batchinfer.engine.sequence import Sequence
from batchinfer.engine.waiting import PATIENCE
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
    assert set(scheduler.waiting) == set(rows)
    assert not scheduler.running
    assert pool.num_free == 32
    scheduler.add(sequence(3, [9] * 9, max_tokens=50))
    parts = scheduler.schedule().scheduled
    assert [part.sequence.arrival for part in parts] == [0, 1, 2, 3]


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


def scheduler_of(num_blocks=256, block_size=2, max_num_seqs=4, max_num_batched_tokens=1000, **more):
    return Scheduler(
        BlockPool(num_blocks, block_size),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        **more,
    )


def admitted_one_by_one(scheduler):
    """Run each sequence alone to its end; the order in which they were let in."""
    order = []
    while scheduler.waiting:
        output = scheduler.schedule()
        scheduler.commit(output)
        for part in output.scheduled:
            order.append(part.sequence.arrival)
            scheduler.finish(part.sequence)
    return order


def test_requests_that_begin_alike_run_one_after_the_other_wherever_they_stood():
    scheduler = scheduler_of(max_num_seqs=1)
    for i in range(12):
        scheduler.add(sequence(i, [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]][i % 2] + [20 + i]))
    order = admitted_one_by_one(scheduler)
    assert sorted(order[:6]) in ([0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11])


def test_denser_groups_go_first_and_long_answers_first_among_strangers():
    scheduler = scheduler_of(max_num_seqs=1)
    for i in range(4):
        scheduler.add(sequence(i, [50 + i] * 9, max_tokens=5 + i))
    for i in range(4, 8):
        scheduler.add(sequence(i, [1, 2, 3, 4, 5, 6, 7, 8, 20 + i]))
    order = admitted_one_by_one(scheduler)
    assert sorted(order[:4]) == [4, 5, 6, 7]
    assert order[4:] == [3, 2, 1, 0]


def test_a_stranger_is_let_in_after_a_bounded_number_of_others_however_dense_these_are():
    scheduler = scheduler_of(max_num_seqs=1)
    scheduler.add(sequence(0, [99] * 5, max_tokens=1))
    scheduler.add(sequence(1, [1, 2, 3, 4, 5, 6, 21]))
    seen = []
    for i in range(2, 200):
        scheduler.add(sequence(i, [1, 2, 3, 4, 5, 6, 20 + i]))
        output = scheduler.schedule()
        scheduler.commit(output)
        (part,) = output.scheduled
        seen.append(part.sequence.arrival)
        scheduler.finish(part.sequence)
        if seen[-1] == 0:
            break
    assert len(seen) == PATIENCE + 1


def test_an_answer_that_would_outlast_the_rest_does_not_wait_for_a_group():
    scheduler = scheduler_of(max_num_seqs=4)
    for i in range(8):
        scheduler.add(sequence(i, [1, 2, 3, 4, 5, 6, 20 + i], max_tokens=5))
    scheduler.add(sequence(8, [99] * 5, max_tokens=80))
    first = {part.sequence.arrival for part in scheduler.schedule().scheduled}
    assert 8 in first


def test_salts_and_adapters_share_nothing():
    scheduler = scheduler_of(max_num_seqs=8)
    for i in range(4):
        row = sequence(i, [1, 2, 3, 4, 5, 20 + i])
        row.root = root_hash(f"tenant {i % 2}")
        scheduler.add(row)
    parts = scheduler.schedule().scheduled
    assert sorted(part.sequence.num_cached_tokens for part in parts) == [0, 0, 4, 4]


@settings(max_examples=150, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=14), min_size=1, max_size=30),
    most=st.integers(1, 5),
    seed=st.integers(0, 2**16),
)
def test_whatever_comes_and_goes_each_sequence_is_let_in_once(prompts, most, seed):
    """The tree's counts follow additions, removals and splits: nothing is lost, nothing comes twice."""
    scheduler, chance = scheduler_of(max_num_seqs=most), random.Random(seed)
    todo = [sequence(i, prompt, max_tokens=1 + len(prompt) % 3) for i, prompt in enumerate(prompts)]
    gone, seen = set(), []
    while todo or scheduler.waiting or scheduler.running:
        for _ in range(chance.randint(0, 4)):
            if todo:
                scheduler.add(todo.pop())
        waiting = list(scheduler.waiting)
        if waiting and chance.random() < 0.5:
            victim = chance.choice(waiting)
            scheduler.finish(victim)
            gone.add(victim.arrival)
        output = scheduler.schedule()
        scheduler.commit(output)
        for part in output.scheduled:
            seen.append(part.sequence.arrival)
            scheduler.finish(part.sequence)
        assert len(scheduler.waiting) == len(list(scheduler.waiting))
    assert sorted([*seen, *gone]) == list(range(len(prompts)))
    assert scheduler.pool.num_used == 0


def test_lengths_seen_let_more_rows_in():
    """Rows may generate 60 tokens and generate 4: the pool holds two of the former and many of the latter."""
    history = LengthHistory(warm_up=1)
    scheduler = scheduler_of(num_blocks=70, max_num_seqs=32, history=history)
    rows = [sequence(i, [i + 1] * 4, max_tokens=60) for i in range(40)]
    for row in rows:
        scheduler.add(row)
    output = scheduler.schedule()
    scheduler.commit(output)
    assert len(output.scheduled) == 2
    for part in output.scheduled:
        part.sequence.token_ids += [7] * 4
        scheduler.answered(part.sequence)
    assert len(scheduler.schedule().scheduled) > 10


def test_an_answer_longer_than_was_promised_is_counted():
    history = LengthHistory(warm_up=1)
    scheduler = scheduler_of(history=history)
    for i, length in enumerate([4, 4, 9]):
        row = sequence(i, [i + 1], max_tokens=60)
        scheduler.add(row)
        scheduler.commit(scheduler.schedule())
        row.token_ids += [7] * length
        scheduler.answered(row)
    assert scheduler.num_misestimates == 1
    assert history.remaining(sequence(9, [1], max_tokens=60)) == 9


def test_the_estimate_of_a_row_that_outgrew_all_others_is_what_it_may_generate():
    history = LengthHistory(warm_up=1)
    ended = sequence(0, [1], max_tokens=60)
    ended.token_ids += [7] * 4
    history.observe(ended)
    row = sequence(1, [1], max_tokens=60)
    row.token_ids += [7] * 3
    assert history.remaining(row) == 1
    row.token_ids += [7] * 2
    assert history.remaining(row) == 55


def test_sequences_that_left_are_not_kept():
    """The window never runs empty, and yet what went through it is forgotten: memory does not grow with the rows."""
    scheduler = scheduler_of(max_num_seqs=4)
    left = []
    for i in range(3000):
        row = sequence(i, [1] if i % 2 else [1, 2, 3, 4, 5, i], max_tokens=1 + i % 7)
        scheduler.add(row)
        row.params = Params()
        left.append(weakref.ref(row.params))
        del row
        if len(scheduler.waiting) < 40:
            continue
        output = scheduler.schedule()
        scheduler.commit(output)
        for part in output.scheduled:
            scheduler.finish(part.sequence)
        del output, part
    alive = sum(reference() is not None for reference in left)
    assert len(scheduler.waiting) > 0
    assert alive < 600


class Params(SimpleNamespace):
    """Something that a weak reference can follow, which a sequence itself cannot be."""
