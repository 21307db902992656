"""A row's bytes depend on the row alone: not on its batch, its chunk, its blocks, its neighbours or the threads."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.cpu.batches import PagedBatch, Sequence, random_sequence, shape_of

DTYPES = [torch.float32, torch.bfloat16, torch.int8]
OPTIONS = [{}, {"window": 100}, {"softcap": 8.0, "sinks": True}]


def options_of(options, num_heads):
    options = dict(options)
    if options.pop("sinks", False):
        options["sinks"] = torch.linspace(-3, 3, num_heads)
    return {"scale": 0.125, **options}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_alone_or_among_others_in_any_order(native, dtype, options):
    g = torch.Generator().manual_seed(0)
    options = options_of(options, 9)
    layout = [(1, 1), (1, 700), (40, 40), (7, 300), (1, 256), (1, 257), (1, 33), (300, 300)]
    sequences = [random_sequence(g, shape_of(3), 9, n, context, dtype) for n, context in layout]
    alone = [PagedBatch(native, [s], shape_of(3), dtype=dtype).attend(**options)[0] for s in sequences]
    for seed in range(3):
        order = torch.randperm(len(sequences), generator=g).tolist()
        batch = PagedBatch(native, [sequences[i] for i in order], shape_of(3), dtype=dtype, seed=seed, block_size=32)
        for i, together in zip(order, batch.attend(**options), strict=True):
            assert torch.equal(alone[i], together)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@settings(max_examples=4, deadline=None)
@given(cuts=st.lists(st.integers(1, 559), min_size=1, max_size=5, unique=True), ratio=st.sampled_from([1, 2, 3, 7]))
def test_a_prompt_in_chunks_or_at_once(native, dtype, options, cuts, ratio):
    """Chunked anywhere, down to one token, 560 rows come out the same."""
    options = options_of(options, ratio * 2)
    whole = random_sequence(torch.Generator().manual_seed(1), shape_of(), ratio * 2, 560, 560, dtype)
    edges = [0, *sorted(cuts), 560]
    at_once = PagedBatch(native, [whole], shape_of(), dtype=dtype).attend(**options)[0]
    pieces = [whole.cut(start, stop) for start, stop in pairwise(edges)]
    chunks = [PagedBatch(native, [piece], shape_of(), dtype=dtype).attend(**options)[0] for piece in pieces]
    assert torch.equal(at_once, torch.cat(chunks))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_any_number_of_threads(native, dtype, options):
    """One long row among short ones is cut between threads: its splits are merged in the same order as ever."""
    g = torch.Generator().manual_seed(2)
    options = options_of(options, 6)
    for layout in ([(1, 3000)], [(1, 2000), (1, 20), (30, 30)], [(20, 1500)]):
        sequences = [random_sequence(g, shape_of(), 6, n, context, dtype) for n, context in layout]
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(torch.cat(PagedBatch(native, sequences, shape_of(), dtype=dtype).attend(**options)))
        assert all(torch.equal(results[0], other) for other in results[1:])


def with_prefix(prefix, tail):
    """A sequence that begins with another's keys and values."""
    return Sequence(tail.query, torch.cat((prefix.key, tail.key)), torch.cat((prefix.value, tail.value)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("threads", [1, 4])
def test_a_shared_prefix_or_private_copies(native, dtype, options, threads):
    """Rows that read the same blocks share the work of whole splits; a tree of prefixes, two levels deep, and an
    unrelated row between them."""
    torch.set_num_threads(threads)
    g = torch.Generator().manual_seed(3)
    options = options_of(options, 6)
    root = random_sequence(g, shape_of(), 6, 1, 528, dtype)
    branch = random_sequence(g, shape_of(), 6, 1, 256, dtype)
    deep = with_prefix(root, branch)
    tails = [random_sequence(g, shape_of(), 6, n, n, dtype) for n in (1, 3, 1, 2, 1, 1)]
    sequences = [with_prefix(p, t) for p, t in zip((root, deep, deep, root, deep, root), tails, strict=True)]
    sequences.insert(2, random_sequence(g, shape_of(), 6, 1, 700, dtype))
    batch = PagedBatch(native, sequences, shape_of(), dtype=dtype)
    private = batch.attend(**options)
    shared = [list(table) for table in batch.tables]
    for i in (1, 3, 4, 5, 6):  # the blocks of sequence 0's prefix; those of sequence 1 below that
        shared[i][:33] = shared[0][:33]
    for i in (3, 5):
        shared[i][:49] = shared[1][:49]
    together = batch.attend(tables=shared, **options)
    plan = native.plan_attention(_batch_of(sequences, shared), batch.layer, 6)
    assert plan.num_partials > 0, "this test must exercise shared items"
    assert all(torch.equal(a, b) for a, b in zip(private, together, strict=True))
    # nine tokens share two splits and five of them a third: nobody, all, only those five from the first split on
    for least in ((100,), (2, 9, 5), (100, 10, 5), (5, 100)):
        chosen = batch.attend(tables=shared, least_shared=least, **options)
        assert all(torch.equal(a, b) for a, b in zip(private, chosen, strict=True)), least


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_prefix_of_many_rows_is_cut_by_rows(native, dtype, options):
    """45 rows read two splits together and 20 of them a third: threads get rows of their own, and take those of others."""
    g = torch.Generator().manual_seed(4)
    options = options_of(options, 6)
    root, branch = (random_sequence(g, shape_of(), 6, 1, n, dtype) for n in (512, 272))
    deep = with_prefix(root, branch)
    tails = [random_sequence(g, shape_of(), 6, 1 + i % 2, 2 + 7 * i, dtype) for i in range(45)]
    sequences = [with_prefix(deep if i % 9 < 4 else root, tail) for i, tail in enumerate(tails)]
    torch.set_num_threads(1)
    batch = PagedBatch(native, sequences, shape_of(), dtype=dtype)
    private = batch.attend(**options)
    shared = [list(table) for table in batch.tables]
    for i in range(1, 45):
        shared[i][:32] = shared[0][:32]
        if i % 9 < 4:
            shared[i][:48] = shared[0][:48]
    for threads in (1, 2, 3, 20):
        torch.set_num_threads(threads)
        together = batch.attend(tables=shared, **options)
        assert all(torch.equal(a, b) for a, b in zip(private, together, strict=True)), threads


def _batch_of(sequences, tables):
    from batchinfer_kernels.cpu import AttentionBatch

    return AttentionBatch.of([s.num_queries for s in sequences], [s.context for s in sequences], tables)
