"""Paged attention gives what dense attention in float64 gives, whatever the layout of the batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer_kernels import reference
from batchinfer_kernels.cpu import AttentionBatch, KVShape, PagedKVCache
from tests.kernels.cpu.batches import PagedBatch, Sequence, expected, random_sequence, shape_of

HEAD_DIMS = (8, 13, 16, 64, 80, 96, 128, 256)
RATIOS = (1, 2, 3, 4, 5, 6, 7, 8, 13, 49)


def assert_close(actual, wanted, sequence, dtype):
    """float32: scores of unit-variance heads are off by some 1e-6, so are weights, relatively; so is their mean.

    bfloat16 weights (AVX-512 BF16) are each off by at most 2^-9 of themselves, hence the mean by 2^-9 of max |v|.
    """
    most = sequence.value.float().abs().max().item()
    tolerance = most * (1e-5 if dtype == torch.float32 else 2**-9 + 1e-5)
    assert (actual - wanted).abs().max().item() <= tolerance


@st.composite
def layouts(draw):
    """Sequences as (queries, context): decode and prefill, around the edges of pages, blocks and splits."""
    context = st.one_of(st.integers(1, 70), st.sampled_from([16, 17, 31, 32, 33, 255, 256, 257, 511, 512, 600]))
    totals = draw(st.lists(context, min_size=1, max_size=4))
    return [(draw(st.one_of(st.just(1), st.integers(1, total))), total) for total in totals]


@settings(max_examples=40, deadline=None)
@given(
    layout=layouts(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    dims=st.tuples(st.sampled_from(HEAD_DIMS), st.sampled_from(HEAD_DIMS)),
    heads=st.tuples(st.integers(1, 3), st.sampled_from(RATIOS)),
    block_size=st.sampled_from([16, 32, 48, 256]),
    window=st.one_of(st.none(), st.integers(1, 700)),
    softcap=st.one_of(st.none(), st.sampled_from([0.5, 30.0])),
    with_sinks=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_batch_against_the_reference(
    ops, layout, dtype, dims, heads, block_size, window, softcap, with_sinks, seed
):
    g = torch.Generator().manual_seed(seed)
    shape, num_heads = KVShape(heads[0], *dims), heads[0] * heads[1]
    sequences = [random_sequence(g, shape, num_heads, n, context, dtype) for n, context in layout]
    sinks = torch.randn(num_heads, generator=g) * 3 if with_sinks else None
    options = {"scale": dims[0] ** -0.5, "window": window, "softcap": softcap, "sinks": sinks}
    batch = PagedBatch(ops, sequences, shape, block_size=block_size, dtype=dtype, seed=seed)
    for sequence, actual in zip(sequences, batch.attend(**options), strict=True):
        assert_close(actual, expected(sequence, **options), sequence, dtype)


@settings(max_examples=25, deadline=None)
@given(
    layout=layouts(),
    dims=st.tuples(st.sampled_from(HEAD_DIMS), st.sampled_from(HEAD_DIMS)),
    heads=st.tuples(st.integers(1, 3), st.sampled_from(RATIOS)),
    block_size=st.sampled_from([16, 48, 256]),
    window=st.one_of(st.none(), st.integers(1, 700)),
    softcap=st.one_of(st.none(), st.just(5.0)),
    query_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_an_int8_cache_against_the_reference(ops, layout, dims, heads, block_size, window, softcap, query_dtype, seed):
    """What the cache holds, dequantised and rotated back, is what dense attention reads; a scale a token and head.

    The rounding of keys and values to INT8 is thus not in the tolerance; that of rotated queries to bfloat16, by which
    AVX-512 BF16 multiplies, is: scores of unit-variance heads move by some 2^-8, and weights by as much of themselves.
    """
    g = torch.Generator().manual_seed(seed)
    shape, num_heads = KVShape(heads[0], *dims), heads[0] * heads[1]
    sequences = [random_sequence(g, shape, num_heads, n, context, query_dtype) for n, context in layout]
    for s in sequences:  # channels and tokens of very different sizes
        s.key[..., 0] *= 6
        s.value *= torch.logspace(-2, 1, s.context).view(-1, 1, 1)
    options = {"scale": dims[0] ** -0.5, "window": window, "softcap": softcap}
    batch = PagedBatch(ops, sequences, shape, block_size=block_size, dtype=torch.int8, seed=seed)
    for sequence, table, actual in zip(sequences, batch.tables, batch.attend(**options), strict=True):
        slots = batch.layer.context_slots(torch.tensor(table), sequence.context)
        stored = Sequence(sequence.query, *batch.layer.gather(slots))
        most = stored.value.abs().max().item()
        tolerance = 3e-2 if ops.name in {"amx", "avx512_bf16"} else 1e-5
        assert (actual - expected(stored, **options)).abs().max().item() <= most * tolerance


@pytest.mark.parametrize("window", [1, 15, 16, 17, 40, 255, 256, 257, 299, 300, 301, 5000])
def test_windows_around_every_edge(ops, window):
    """A window shorter than, equal to and longer than the prompt, for a whole prefill of 300 tokens."""
    sequence = random_sequence(torch.Generator().manual_seed(1), shape_of(), 6, 300, 300)
    (actual,) = PagedBatch(ops, [sequence], shape_of()).attend(scale=0.125, window=window)
    assert_close(actual, expected(sequence, scale=0.125, window=window), sequence, torch.float32)


def test_output_and_query_in_bfloat16(ops):
    """A bfloat16 result is the float32 one rounded once."""
    sequence = random_sequence(torch.Generator().manual_seed(2), shape_of(), 6, 5, 40, torch.bfloat16)
    batch = PagedBatch(ops, [sequence], shape_of(), dtype=torch.bfloat16)
    (wide,), (narrow,) = batch.attend(scale=0.125), batch.attend(scale=0.125, out_dtype=torch.bfloat16)
    assert narrow.dtype == torch.bfloat16
    assert torch.equal(narrow, wide.to(torch.bfloat16))


def test_queries_may_be_a_slice_of_a_merged_projection(native):
    """Only a token's own heads must lie side by side."""
    sequence = random_sequence(torch.Generator().manual_seed(3), shape_of(), 6, 7, 20)
    batch = PagedBatch(native, [sequence], shape_of())
    merged = torch.cat((sequence.query.flatten(1), torch.randn(7, 200)), dim=1)
    sliced = merged[:, : 6 * 64].view(7, 6, 64)
    assert not sliced.is_contiguous()
    (wanted,) = batch.attend(scale=1.0)
    sequence.query = sliced
    plan = native.plan_attention(AttentionBatch.of([7], [20], batch.tables), batch.layer, 6)
    assert torch.equal(native.paged_attention(sliced, batch.layer, plan, scale=1.0), wanted)


def test_an_empty_batch_and_sequences_without_queries(ops):
    """Nothing to do is done; a sequence with no new token takes no row; padding rows get zeros."""
    g = torch.Generator().manual_seed(4)
    layer = PagedKVCache([shape_of()], 4, 16, torch.float32).layer(0)
    plan = ops.plan_attention(AttentionBatch.of([], [], []), layer, 4)
    assert plan.num_tokens == 0
    assert ops.paged_attention(torch.empty(0, 4, 64), layer, plan, scale=1.0).shape == (0, 4, 64)
    assert torch.equal(ops.paged_attention(torch.ones(2, 4, 64), layer, plan, scale=1.0), torch.zeros(2, 4, 64))
    sequences = [random_sequence(g, shape_of(), 4, n, 20) for n in (0, 3, 0, 1)]
    for sequence, actual in zip(sequences, PagedBatch(ops, sequences, shape_of()).attend(scale=0.125), strict=True):
        assert actual.shape[0] == sequence.num_queries
        if sequence.num_queries:
            assert_close(actual, expected(sequence, scale=0.125), sequence, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stale", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("window", [None, 21])
def test_what_a_block_held_before_never_shows(native, stale, dtype, window):
    """Slots past a context hold an earlier owner's NaN or infinity; odd contexts leave half a bfloat16 pair stale."""
    g = torch.Generator().manual_seed(5)
    layout = [(1, 1), (1, 17), (33, 33), (5, 270), (1, 300)]
    sequences = [random_sequence(g, shape_of(), 6, n, context, dtype) for n, context in layout]
    clean = PagedBatch(native, sequences, shape_of(), dtype=dtype)
    dirty = PagedBatch(native, sequences, shape_of(), dtype=dtype, stale=stale)
    assert torch.equal(
        torch.cat(clean.attend(scale=0.125, window=window)), torch.cat(dirty.attend(scale=0.125, window=window))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_left_the_window_poisons_nobody(native, dtype):
    """Rows that see a NaN have it, in its dimension; those before it and those past the window keep their bits."""
    sequence = random_sequence(torch.Generator().manual_seed(7), shape_of(), 6, 40, 40, dtype)
    options = {"scale": 0.125, "window": 7}
    (clean,) = PagedBatch(native, [sequence], shape_of(), dtype=dtype).attend(**options)
    sequence.value[13, :, 5] = float("nan")
    (broken,) = PagedBatch(native, [sequence], shape_of(), dtype=dtype).attend(**options)
    assert torch.equal(clean[:13], broken[:13])
    assert torch.equal(clean[20:], broken[20:])
    assert broken[13:20, :, 5].isnan().all()
    assert not broken[13:20, :, 6].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_poisoned_row_poisons_no_other(native, dtype):
    """NaN and infinity in one sequence, even at a token of a shared tile, reach only rows that see it."""
    g = torch.Generator().manual_seed(6)
    sequences = [random_sequence(g, shape_of(), 6, n, n, dtype) for n in (21, 20)]
    clean = PagedBatch(native, sequences, shape_of(), dtype=dtype).attend(scale=0.125)
    sequences[0].value[13] = float("nan")
    sequences[0].key[17] = float("inf")
    broken = PagedBatch(native, sequences, shape_of(), dtype=dtype).attend(scale=0.125)
    assert torch.equal(clean[1], broken[1])
    assert torch.equal(clean[0][:13], broken[0][:13])
    assert broken[0][13:].isnan().all()


def test_plain_attention_agrees_with_torch():
    """The reference itself against an independent implementation."""
    sequence = random_sequence(torch.Generator().manual_seed(7), shape_of(), 6, 37, 37)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (sequence.query, sequence.key, sequence.value))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=0.2)
    actual = reference.attention(sequence.query, sequence.key, sequence.value, scale=0.2)
    torch.testing.assert_close(actual, wanted[0].transpose(0, 1), atol=2e-6, rtol=0)


def _plan(native, queries, contexts, tables, num_heads=4, shape=None):
    layer = PagedKVCache([shape or shape_of()], 8, 16, torch.float32).layer(0)
    return native.plan_attention(AttentionBatch.of(queries, contexts, tables), layer, num_heads), layer


@pytest.mark.parametrize(
    ("queries", "contexts", "tables", "message"),
    [
        ([2], [1], [[0]], "fewer tokens"),
        ([1], [17], [[0]], "too few blocks"),
        ([1, 1], [3, 3], [[0], [8]], "sequence 1 .* outside"),
        ([1], [3], [[-1]], "outside"),
    ],
)
def test_a_batch_that_would_read_out_of_bounds_is_refused(native, queries, contexts, tables, message):
    with pytest.raises(ValueError, match=message):
        _plan(native, queries, contexts, tables)


def test_operands_of_another_shape_are_refused(native):
    plan, layer = _plan(native, [1], [3], [[0]])
    attend = lambda query, **options: native.paged_attention(query, layer, plan, scale=1.0, **options)  # noqa: E731 -- one line for three uses
    for query in (torch.zeros(1, 4, 32), torch.zeros(1, 3, 64), torch.zeros(0, 4, 64), torch.zeros(1, 4, 64).double()):
        with pytest.raises(ValueError, match="query is"):
            attend(query)
    with pytest.raises(ValueError, match="side by side"):
        attend(torch.zeros(1, 64, 4).transpose(1, 2))
    with pytest.raises(ValueError, match="sinks"):
        attend(torch.zeros(1, 4, 64), sinks=torch.zeros(3))
    with pytest.raises(ValueError, match="window"):
        attend(torch.zeros(1, 4, 64), window=0)
    with pytest.raises(ValueError, match="KV heads"):
        _plan(native, [1], [3], [[0]], num_heads=3)
    other = PagedKVCache([shape_of()], 9, 16, torch.float32).layer(0)
    with pytest.raises(ValueError, match="not for this layer"):
        native.paged_attention(torch.zeros(1, 4, 64), other, plan, scale=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_scores_beyond_what_a_float_can_tell_apart(ops, dtype):
    """Scores of some 1e11 lie thousands apart: the best token has all the weight, exactly, and nothing overflows."""
    g = torch.Generator().manual_seed(5)
    layer = PagedKVCache([KVShape(1, 64, 64)], 4, 16, dtype).layer(0)
    slots = torch.arange(40)
    key, value = 1e5 * torch.randn(40, 1, 64, generator=g), torch.randn(40, 1, 64, generator=g)
    layer.write(slots, key, value)
    query = key[20:36, 0].unsqueeze(0)  # each its own key's
    plan = ops.plan_attention(AttentionBatch.of([1], [40], [[0, 1, 2]]), layer, 16)
    out = ops.paged_attention(query, layer, plan, scale=0.125)
    keys, values = (kept[:, 0].double() for kept in layer.gather(slots))
    best, second = (query[0].double() @ keys.T * 0.125).topk(2).values.T
    assert (best > 2e10).all()
    assert (second < best / 2).all()
    torch.testing.assert_close(out[0].double(), values[20:36], atol=0.01, rtol=2**-8)  # an INT8 head is rotated back
