"""What begins and ends a model: embedding, the greedy head, the sampler."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from batchinfer.engine.philox import philox4x32
from batchinfer_kernels import embedding, lm_head, sampler
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
    logits = torch.zeros(3, 208)
    logits[1, 150] = value
    tokens, logprobs = sampler.sample(logits, asking(3))
    assert tokens.tolist() == [0, -1, 0]
    assert logprobs[1].isnan()


def asking(num_rows: int, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=0) -> sampler.SamplingRows:
    def column(value, dtype):
        return torch.tensor(value if isinstance(value, list) else [value] * num_rows, dtype=dtype)

    return sampler.SamplingRows(
        column(temperature, F32), column(top_k, torch.int32), column(top_p, F32), column(min_p, F32),
        column(seed, torch.int64), column(position, torch.int32),
    )  # fmt: skip


@pytest.fixture
def small_blocks(monkeypatch):
    """Several stretches a row at a small vocabulary."""
    monkeypatch.setattr(sampler, "BLOCK", 32)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_greedy_takes_the_first_of_the_best_and_its_log_probability(dtype, small_blocks):
    logits = torch.randn(3, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[1, [40, 70]] = 9.0
    tokens, logprobs = sampler.sample(logits, asking(3))
    assert torch.equal(tokens, logits.float().argmax(dim=1).int())
    assert tokens[1] == 40
    expected = torch.log_softmax(logits.float(), dim=1).gather(1, tokens.long()[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)


FILTERS = [(0, 1.0, 0.0), (40, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.4, 0.0), (20, 0.8, 0.0), (0, 1.0, 0.3), (500, 0.9, 0.2)]
SEED = 2**62 + 12345


def gumbel_noise(num_positions: int, n: int) -> torch.Tensor:
    """The noise of each position and token ``[num_positions, n]``, from the engine's own Philox."""
    zeros = torch.zeros(num_positions * n, dtype=torch.long)
    counters = torch.stack(
        (torch.arange(n).repeat(num_positions), torch.arange(num_positions).repeat_interleave(n), zeros, zeros), 1
    )
    keys = torch.tensor([[SEED & 0xFFFFFFFF, SEED >> 32]]).expand(len(zeros), 2)
    uniform = ((philox4x32(counters, keys)[:, 0] >> 9).double() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform)).view(num_positions, n)


def telling_positions(logits: torch.Tensor, kept: torch.Tensor, noisy: torch.Tensor) -> list[int]:
    """Where noise prefers the last token kept, and where it prefers the first one dropped: an error of one shows."""
    last = logits.where(kept, float("inf")).argmin()
    chosen = noisy.masked_fill(~kept, float("-inf")).argmax(dim=1)
    found = [int((chosen == last).nonzero()[0])]
    dropped = ~kept & logits.isfinite()
    if dropped.any():
        first = logits.where(dropped, float("-inf")).argmax()
        found.append(int((noisy.argmax(dim=1) == first).nonzero()[0]))
    return found


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_draw_is_the_noisiest_of_what_the_filters_keep(temperature, small_blocks):
    n, noise = 64, gumbel_noise(3000, 64)
    logits = torch.randn(n, generator=torch.Generator().manual_seed(3)) * 0.7
    logits[5] = float("-inf")
    noisy = logits / temperature + noise
    rows, expected = [], []
    for filters in FILTERS:
        kept = sampler.kept_reference(logits, temperature, *filters)
        for position in telling_positions(logits, kept, noisy):
            rows.append((*filters, SEED, position))
            expected.append(int(noisy[position].masked_fill(~kept, float("-inf")).argmax()))
    columns = [list(column) for column in zip(*rows, strict=True)]
    tokens, logprobs = sampler.sample(
        logits.expand(len(rows), n).contiguous(), asking(len(rows), temperature, *columns)
    )
    assert tokens.tolist() == expected
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, 0)[expected], rtol=1e-4, atol=1e-4)


def test_ties_with_the_last_one_kept_are_kept(small_blocks):
    logits = torch.full((20, 16), -5.0)
    logits[:, 3:7] = 2.0
    tokens, _ = sampler.sample(logits, asking(20, 1.0, top_k=2, seed=list(range(20))))
    assert set(tokens.tolist()) == {3, 4, 5, 6}


def test_draws_follow_the_distribution(small_blocks):
    """120 seeds on four tokens: within four standard deviations of what the logits say."""
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    logits = torch.full((120, 48), float("-inf"))
    logits[:, [0, 17, 33, 47]] = probabilities.log()
    tokens, _ = sampler.sample(logits, asking(120, 1.0, seed=list(range(120))))
    counts = torch.tensor([int((tokens == token).sum()) for token in (0, 17, 33, 47)])
    assert counts.sum() == 120
    spread = (120 * probabilities * (1 - probabilities)).sqrt()
    assert ((counts - 120 * probabilities).abs() < 4 * spread).all()


def test_a_draw_depends_on_seed_and_position_only():
    logits = torch.randn(1, 64, generator=torch.Generator().manual_seed(1)).expand(6, -1).contiguous()
    rows = asking(6, 1.5, seed=[7, 7, 7, 8, 9, 10], position=[0, 0, 1, 0, 0, 0])
    tokens = sampler.sample(logits, rows)[0].tolist()
    assert tokens[0] == tokens[1]
    assert len(set(tokens)) > 2


def test_layouts_that_no_kernel_reads_well_are_refused():
    with pytest.raises(ValueError, match="multiples of 16"):
        sampler.sample(torch.zeros(2, 50), asking(2))
    with pytest.raises(ValueError, match="multiple of 16"):
        embedding.embedding(torch.tensor([0]), torch.zeros(4, 24))
    with pytest.raises(ValueError, match="same K"):
        lm_head.lm_head_argmax(torch.zeros(1, 16), torch.zeros(4, 32))
