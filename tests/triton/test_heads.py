"""What begins and ends a model: embedding and the greedy head."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from batchinfer_kernels import embedding, lm_head
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
