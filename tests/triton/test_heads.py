"""What begins and ends a model: embedding and the greedy head."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from batchinfer_kernels import embedding, lm_head, reference
from tests.triton.checks import assert_rounded

EXPLORE = settings(max_examples=16, deadline=None, phases=(Phase.explicit, Phase.generate), derandomize=True)
F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("n", [16, 576, 4112])
def test_embedding_gathers_and_scales(dtype, n):
    table = torch.randn(10, n).to(dtype)
    ids = torch.tensor([9, 0, 3, 3])
    assert torch.equal(embedding.embedding(ids, table), table[ids])
    assert_rounded(embedding.embedding(ids.int(), table, scale=24.0), table[ids].float() * 24)


def test_ranks_with_a_part_of_the_vocabulary_add_up():
    table = torch.randn(12, 32)
    ids = torch.tensor([0, 11, 5, 6, 7])
    parts = [embedding.embedding(ids, table[first : first + 6], first_id=first) for first in (0, 6)]
    assert torch.equal(parts[0] + parts[1], table[ids])
    for first, part in zip((0, 6), parts, strict=True):
        assert torch.equal(part, embedding.embedding_reference(ids, table[first : first + 6], first_id=first))


@EXPLORE
@given(
    m=st.integers(0, 70), n=st.sampled_from([1, 100, 128, 300]), k=st.sampled_from([16, 64, 80]),
    dtype=st.sampled_from([F32, BF16]), softcap=st.sampled_from([None, 3.0]), seed=st.integers(0, 99),
)  # fmt: skip
def test_lm_head_argmax(m, n, k, dtype, softcap, seed):
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(rows, k, generator=generator).to(dtype) for rows in (m, n))
    tokens, logprobs = lm_head.lm_head_argmax(x, w, scale=0.5, softcap=softcap)
    expected = lm_head.lm_head_argmax_reference(x, w, scale=0.5, softcap=softcap)
    torch.testing.assert_close(logprobs, expected[1], rtol=1e-4, atol=1e-4)
    assert torch.equal(tokens, expected[0])


@pytest.mark.parametrize(("x_dtype", "w_dtype"), [(F32, F32), (torch.int8, torch.int8), (BF16, torch.int8)])
def test_lm_head_reduce(x_dtype, w_dtype):
    """Largest logits, log-sum-exp and the logits of some rows, of a vocabulary whose last tile is a part."""
    generator = torch.Generator().manual_seed(5)
    x, w = (torch.randn(rows, 80, generator=generator) for rows in (5, 300))
    x_scale = w_scale = None
    if w_dtype == torch.int8:
        w, w_scale = reference.quantize_rows(w)
    if x_dtype == torch.int8:
        x, x_scale = reference.quantize_rows(x)
    head = lm_head.HeadWeights(w, w_scale, torch.linspace(-1, 1, 300), 0.5, 4.0)
    x = x.to(x_dtype)
    place, kept = torch.tensor([1, -1, -1, 0, -1], dtype=torch.int32), torch.empty(2, 300)
    found = lm_head.lm_head_reduce(x, head, x_scale=x_scale, top_k=7, place=place, logits=kept)
    expected, logits = lm_head.lm_head_reduce_reference(x, head, x_scale=x_scale, top_k=7)
    torch.testing.assert_close(kept, logits[[3, 0]], rtol=1e-4, atol=1e-5)
    for name in ("best", "logprob", "top_values"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-4, atol=1e-5)
    assert torch.equal(found.token, expected.token)
    assert torch.equal(found.top_tokens, expected.top_tokens)
    torch.testing.assert_close(found.log_sum_exp(), torch.logsumexp(logits, dim=1), rtol=1e-5, atol=1e-5)


def test_the_largest_among_equals_nan_and_nothing():
    """Equal logits come in the order of their places, across tiles; NaN is not among the largest, nor is -inf."""
    x, w = torch.ones(2, 16), torch.zeros(260, 16)
    w[[255, 3, 130], 0] = 1.0
    found = lm_head.lm_head_reduce(x[:1], lm_head.HeadWeights(w), top_k=4)
    assert found.top_tokens.tolist() == [[3, 130, 255, 0]]
    bias = torch.full((260,), float("-inf"))
    bias[[7, 259]], bias[100] = 0.0, float("nan")
    found = lm_head.lm_head_reduce(x, lm_head.HeadWeights(torch.zeros(260, 16), bias=bias), top_k=3)
    assert found.top_tokens.tolist() == [[7, 259, -1]] * 2
    assert found.best.isnan().all()
    assert found.token.tolist() == [-1, -1]
    assert found.log_sum_exp().isnan().all()


def test_the_lowest_of_equal_tokens_wins_even_across_tiles():
    w = torch.zeros(400, 16)
    w[[130, 131, 300], 0] = 2.0
    assert lm_head.lm_head_argmax(torch.ones(1, 16), w)[0].tolist() == [130]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_row_has_no_token_and_its_neighbours_do(value):
    x = torch.ones(3, 16)
    x[1, 3] = value
    tokens, logprobs = lm_head.lm_head_argmax(x, torch.ones(200, 16))
    assert tokens.tolist() == [0, -1, 0]
    assert logprobs[1].isnan()


def test_layouts_that_no_kernel_reads_well_are_refused():
    with pytest.raises(ValueError, match="multiple of 16"):
        embedding.embedding(torch.tensor([0]), torch.zeros(4, 24))
    with pytest.raises(ValueError, match="same K"):
        lm_head.lm_head_argmax(torch.zeros(1, 16), torch.zeros(4, 32))
    head = lm_head.HeadWeights(torch.zeros(4, 16))
    with pytest.raises(ValueError, match="top_k"):
        lm_head.lm_head_reduce(torch.zeros(1, 16), head, top_k=5)
    with pytest.raises(ValueError, match="come together"):
        lm_head.lm_head_reduce(torch.zeros(1, 16), head, logits=torch.zeros(1, 4))
    with pytest.raises(ValueError, match="int8 takes scales"):
        lm_head.lm_head_reduce(torch.zeros(1, 16), head, x_scale=torch.ones(1))
