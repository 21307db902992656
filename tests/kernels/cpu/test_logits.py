"""Reductions over slices of logits equal those over the whole."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer_kernels.cpu import Accumulated, LogitsReduction


def reduce_in_slices(ops, logits, cuts, *, top_k=0, log_sum_exp=False, kept=(), **options):
    reduction = LogitsReduction(
        logits.shape[0], top_k=top_k, log_sum_exp=log_sum_exp, kept=kept, num_columns=logits.shape[1]
    )
    edges = [0, *sorted(cuts), logits.shape[1]]
    for start, stop in pairwise(edges):
        ops.reduce_logits(reduction, logits[:, start:stop], start, **options)
    return reduction


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 4),
    columns=st.sampled_from([1, 5, 64, 1000, 1024, 1025, 3000]),
    top_k=st.sampled_from([0, 1, 5, 50]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    scale=st.sampled_from([1.0, 0.25]),
    softcap=st.sampled_from([None, 30.0]),
    data=st.data(),
)
def test_argmax_top_k_and_log_sum_exp(ops, rows, columns, top_k, dtype, scale, softcap, data):
    """bfloat16 makes ties: the lower index wins, in the argmax and along the top k."""
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    logits = (torch.randn(rows, columns, generator=g) * 8).to(dtype)
    cuts = data.draw(st.lists(st.integers(1, columns - 1), max_size=3, unique=True)) if columns > 1 else []
    reduction = reduce_in_slices(ops, logits, cuts, top_k=top_k, log_sum_exp=True, scale=scale, softcap=softcap)
    exact = logits.double() * scale
    if softcap is not None:
        exact = torch.tanh(exact / softcap) * softcap
    torch.testing.assert_close(reduction.log_sum_exp().double(), exact.logsumexp(1), atol=3e-5, rtol=1e-6)
    order = logits.double().argsort(dim=1, descending=True, stable=True)
    if softcap is None:  # the cap may make two neighbours equal that were not
        assert torch.equal(reduction.best_index, order[:, 0])
    k = min(top_k, columns)
    ranked = exact.gather(1, order)
    torch.testing.assert_close(reduction.best.double(), ranked[:, 0], atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(reduction.top_values[:, :k].double(), ranked[:, :k], atol=1e-5, rtol=1e-6)
    if softcap is None:
        assert torch.equal(reduction.top_indices[:, :k], order[:, :k])
    assert (reduction.top_indices[:, k:] == -1).all()


@settings(max_examples=25, deadline=None)
@given(
    columns=st.sampled_from([5, 1000, 1025, 3000]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    scale=st.sampled_from([1.0, 0.25]),
    softcap=st.sampled_from([None, 30.0]),
    data=st.data(),
)
def test_kept_rows_are_whole_and_change_no_other_figure(ops, columns, dtype, scale, softcap, data):
    """Whether its logits are asked for or not, a row's best word is the first of the largest of them."""
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    logits = (torch.randn(5, columns, generator=g) * 8).to(dtype)
    logits[0, -1], logits[1, 0], logits[2, -1], logits[3] = float("inf"), float("-inf"), float("nan"), float("-inf")
    kept = data.draw(st.permutations(range(5)))[: data.draw(st.integers(0, 5))]
    cuts = data.draw(st.lists(st.integers(1, columns - 1), max_size=3, unique=True))
    options = {"scale": scale, "softcap": softcap}
    bare = reduce_in_slices(ops, logits, cuts, **options)
    reduction = reduce_in_slices(ops, logits, cuts, kept=kept, **options)
    assert torch.equal(reduction.best, bare.best)
    assert torch.equal(reduction.best_index, bare.best_index)
    assert reduction.has_nan.tolist() == bare.has_nan.tolist() == [False, False, True, False, False]
    exact = logits.double() * scale
    if softcap is not None:
        exact = torch.tanh(exact / softcap) * softcap
    torch.testing.assert_close(reduction.logits.double(), exact[kept], atol=1e-5, rtol=1e-6, equal_nan=True)
    for place, row in enumerate(kept):
        if row not in (2, 3):
            assert reduction.best_index[row] == reduction.logits[place].argmax()
            assert reduction.best[row] == reduction.logits[place].max()


def test_ties_across_slices_go_to_the_lower_word(ops):
    logits = torch.zeros(1, 3000)
    logits[0, [2999, 700, 1500]] = 5.0
    reduction = reduce_in_slices(ops, logits, [1000, 2000], top_k=4)
    assert reduction.best_index.tolist() == [700]
    assert reduction.top_indices.tolist() == [[700, 1500, 2999, 0]]


def test_rows_without_a_number(ops):
    """-inf (a forbidden word) never counts; NaN is never the largest and shows in the log-sum-exp; a row of nothing has
    no argmax."""
    logits = torch.full((4, 200), float("-inf"))
    logits[1, 50] = 2.0
    logits[2] = 1.0
    logits[2, 70] = float("nan")
    logits[3] = float("nan")
    reduction = reduce_in_slices(ops, logits, [100], top_k=2, log_sum_exp=True)
    assert reduction.best_index.tolist() == [-1, 50, 0, -1]
    assert reduction.top_indices.tolist() == [[-1, -1], [50, -1], [0, 1], [-1, -1]]
    total = reduction.log_sum_exp()
    assert total[0] == float("-inf")
    assert total[1] == 2.0
    assert total[2:].isnan().all()
    with pytest.raises(ValueError, match="log_sum_exp=True"):
        LogitsReduction(1).log_sum_exp()


def test_scaled_int8_products_need_no_float_copy(ops):
    """The product's scales are applied on the way; its argmax is that of the real logits."""
    g = torch.Generator().manual_seed(0)
    product = Accumulated(
        torch.randint(-1000, 1000, (3, 500), generator=g, dtype=torch.int32), torch.rand(3), torch.rand(500)
    )
    reduction = LogitsReduction(3, top_k=3)
    ops.reduce_logits(reduction, product.columns(0, 200), 0)
    ops.reduce_logits(reduction, product.columns(200, 500), 200)
    values, indices = product.dequantize().topk(3, dim=1)
    assert torch.equal(reduction.best_index, indices[:, 0])
    assert torch.equal(reduction.top_indices, indices)
    torch.testing.assert_close(reduction.top_values, values)


def test_a_row_alone_or_in_a_batch_on_any_number_of_threads(native):
    logits = torch.randn(40, 3000, generator=torch.Generator().manual_seed(2)) * 5
    totals = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        totals.append(reduce_in_slices(native, logits, [1024, 2048], log_sum_exp=True).log_sum_exp())
    assert torch.equal(*totals)
    alone = reduce_in_slices(native, logits[7:8], [1024, 2048], log_sum_exp=True).log_sum_exp()
    assert torch.equal(alone, totals[0][7:8])


def test_columns_beyond_those_that_are_kept_are_refused(native):
    reduction = LogitsReduction(2, kept=[1], num_columns=6)
    native.reduce_logits(reduction, torch.zeros(2, 4), 0)
    for first in (3, -1):
        with pytest.raises(ValueError, match="outside of the 6 kept"):
            native.reduce_logits(reduction, torch.zeros(2, 4), first)


def test_another_number_of_rows_is_refused(native):
    with pytest.raises(ValueError, match="the reduction has 2"):
        native.reduce_logits(LogitsReduction(2), torch.zeros(3, 4), 0)
