"""The sampler draws what the CPU's sampler draws; changes of logits and log-probabilities against plain torch."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from batchinfer.engine.philox import uniform
from batchinfer.engine.sampler import Sampler, SamplingRow
from batchinfer.sampling_params import SamplingParams
from batchinfer_kernels import logit_changes, logprobs, sampler
from batchinfer_kernels.logit_changes import Entries, LogitChanges
from tests.triton import interpreter  # noqa: F401 -- before any kernel module

EXPLORE = settings(max_examples=10, deadline=None, phases=(Phase.explicit, Phase.generate), derandomize=True)
F32, BF16, F64, I32 = torch.float32, torch.bfloat16, torch.float64, torch.int32
SEED = 2**62 + 12345
FILTERS = [(0, 1.0, 0.0), (40, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.4, 0.0), (20, 0.8, 0.0), (0, 1.0, 0.3), (500, 0.9, 0.2)]


def asking(num_rows: int, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=0) -> sampler.SamplingRows:
    def column(value, dtype):
        return torch.tensor(value if isinstance(value, list) else [value] * num_rows, dtype=dtype)

    return sampler.SamplingRows(
        column(temperature, F32), column(top_k, I32), column(top_p, F64), column(min_p, F64),
        column(seed, torch.int64), column(position, I32),
    )  # fmt: skip


@pytest.fixture
def small_blocks(monkeypatch):
    """Several stretches a row at a small vocabulary."""
    for module in (sampler, logprobs, logit_changes):
        monkeypatch.setattr(module, "BLOCK", 32)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_greedy_takes_the_first_of_the_best_and_its_log_probability(dtype, small_blocks):
    logits = torch.randn(3, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[1, [40, 70]] = 9.0
    tokens, chosen = sampler.sample(logits, asking(3))
    assert torch.equal(tokens, logits.float().argmax(dim=1).int())
    assert tokens[1] == 40
    expected = torch.log_softmax(logits.float(), dim=1).gather(1, tokens.long()[:, None])[:, 0]
    torch.testing.assert_close(chosen, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_row_has_no_token_and_its_neighbours_do(value, temperature):
    logits = torch.zeros(3, 208)
    logits[:, 0] = 30.0
    logits[1, 150] = value
    tokens, chosen = sampler.sample(logits, asking(3, temperature, top_k=3, top_p=0.9))
    assert tokens.tolist() == [0, -1, 0]
    assert chosen[1].isnan()


def kept_tokens(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Which tokens of one row may be drawn, by sorting, in float64."""
    x = logits.double()
    weights = torch.exp((x - x.max()) / temperature)
    if 0 < top_k < len(x):
        weights = weights.where(x >= x.sort(descending=True).values[top_k - 1], 0.0)
    if top_p < 1:
        ordered = weights.sort(descending=True).values
        before = ordered.cumsum(0) - ordered
        weights = weights.where(weights >= ordered[int((before < top_p * weights.sum()).sum()) - 1], 0.0)
    return (weights > 0) & (weights >= min_p)


def drawn_by_hand(
    logits: torch.Tensor, temperature: float, kept: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Inverse of the cumulative distribution, in float64, at the engine's uniform numbers."""
    weights = torch.exp((logits.double() - logits.max()) / temperature) * kept
    target = uniform(torch.full_like(positions, SEED), positions) * weights.sum()
    return torch.searchsorted(weights.cumsum(0), target, right=True)


def telling_positions(logits: torch.Tensor, temperature: float, kept: torch.Tensor) -> list[int]:
    """Where the last token kept is drawn, and where the first one dropped would be: an error of one shows."""
    positions = torch.arange(6000)
    last = logits.where(kept, float("inf")).argmin()
    found = [int((drawn_by_hand(logits, temperature, kept, positions) == last).nonzero()[0])]
    dropped = ~kept & logits.isfinite()
    if dropped.any():
        first = logits.where(dropped, float("-inf")).argmax()
        more = kept.clone()
        more[first] = True
        found.append(int((drawn_by_hand(logits, temperature, more, positions) == first).nonzero()[0]))
    return found


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_draw_is_the_cpu_samplers_and_what_is_computed_by_hand(temperature, small_blocks):
    n = 64
    logits = torch.randn(n, generator=torch.Generator().manual_seed(3)) * 0.7
    logits[5] = float("-inf")
    rows, expected, asked = [], [], []
    for top_k, top_p, min_p in FILTERS:
        kept = kept_tokens(logits, temperature, top_k, top_p, min_p)
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        for position in telling_positions(logits, temperature, kept):
            rows.append((top_k, top_p, min_p, SEED, position))
            expected.append(int(drawn_by_hand(logits, temperature, kept, torch.tensor([position]))))
            asked.append(SamplingRow(params, SEED, position))
    columns = [list(column) for column in zip(*rows, strict=True)]
    wide = logits.expand(len(rows), n).contiguous()
    tokens, chosen = sampler.sample(wide, asking(len(rows), temperature, *columns))
    assert tokens.tolist() == expected
    assert tokens.tolist() == Sampler().sample(wide, asked)
    torch.testing.assert_close(chosen, torch.log_softmax(logits, 0)[expected], rtol=1e-4, atol=1e-4)


@EXPLORE
@given(
    temperature=st.sampled_from([0.3, 1.0, 7.0]), top_k=st.sampled_from([0, 1, 3, 200]), top_p=st.sampled_from([0.05, 0.7, 1.0]),
    min_p=st.sampled_from([0.0, 0.02]), sharpness=st.sampled_from([0.01, 1.0, 20.0]), seed=st.integers(0, 2**63 - 1),
    position=st.integers(0, 2**31 - 1), dtype=st.sampled_from([F32, BF16]),
)  # fmt: skip
def test_any_draw_is_the_cpu_samplers(temperature, top_k, top_p, min_p, sharpness, seed, position, dtype):
    """bfloat16 has many ties. A vocabulary of several production blocks, not a whole number of them."""
    logits = (torch.randn(2, 9008, generator=torch.Generator().manual_seed(seed % 1000)) * sharpness).to(dtype)
    positions = [position, position // 2]
    tokens, _ = sampler.sample(logits, asking(2, temperature, top_k, top_p, min_p, seed, positions))
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert tokens.tolist() == Sampler().sample(logits, [SamplingRow(params, seed, at) for at in positions])


def test_ties_with_the_last_one_kept_are_kept(small_blocks):
    logits = torch.full((20, 16), -5.0)
    logits[:, 3:7] = 2.0
    for filters in ({"top_k": 2}, {"top_p": 0.3}):
        tokens, _ = sampler.sample(logits, asking(20, 1.0, seed=list(range(20)), **filters))
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


@EXPLORE
@given(
    num_rows=st.integers(0, 3), n=st.sampled_from([16, 80, 112]), num_top=st.integers(0, 5), dtype=st.sampled_from([F32, BF16]),
    picked=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_token_logprobs(num_rows, n, num_top, dtype, picked, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(4 if picked else num_rows, n, generator=generator) * 3).to(dtype)
    rows = torch.randperm(4, generator=generator)[:num_rows].int() if picked else None
    tokens = torch.randint(0, n, (num_rows,), generator=generator, dtype=I32)
    chosen, ids, top = logprobs.token_logprobs(logits, tokens, num_top, rows=rows)
    expected = logprobs.token_logprobs_reference(logits, tokens, num_top, rows=rows)
    torch.testing.assert_close(chosen, expected[0], rtol=1e-4, atol=1e-4)
    assert torch.equal(ids, expected[1])
    torch.testing.assert_close(top, expected[2], rtol=1e-4, atol=1e-4)


def test_the_largest_logprobs_among_equals_across_stretches(small_blocks):
    """Equals come by id, tokens at -inf never, and a broken row is NaN."""
    logits = torch.full((3, 96), float("-inf"))
    logits[0, [90, 40, 41, 7]] = torch.tensor([1.0, 2.0, 2.0, 2.0])
    logits[1, 3] = float("nan")
    logits[2] = 0.0
    chosen, ids, top = logprobs.token_logprobs(logits, torch.tensor([90, 3, -1], dtype=I32), 6)
    assert ids.tolist() == [[7, 40, 41, 90, -1, -1], [-1] * 6, [0, 1, 2, 3, 4, 5]]
    assert top[0, 4:].tolist() == [float("-inf")] * 2
    torch.testing.assert_close(top[0, :4].exp().sum(), torch.tensor(1.0))
    torch.testing.assert_close(chosen[0], top[0, 3])
    assert top[1].isnan().all()
    assert chosen[1:].isnan().all()


def entries(lists: list[list[tuple[int, float]]], dtype: torch.dtype) -> Entries:
    starts = [0]
    for one in lists:
        starts.append(starts[-1] + len(one))
    flat = [pair for one in lists for pair in one]
    ids, values = [pair[0] for pair in flat], [pair[1] for pair in flat]
    return Entries(torch.tensor(starts, dtype=I32), torch.tensor(ids, dtype=I32), torch.tensor(values, dtype=dtype))


def changes_of(num_changed: int, num_rows: int, n: int, seed: int) -> LogitChanges:
    generator = torch.Generator().manual_seed(seed)

    def lists(longest: int) -> list[list[tuple[int, int]]]:
        return [
            [(int(token), int(token) % 3) for token in torch.randperm(n, generator=generator)[: 7 * i % longest]]
            for i in range(num_changed)
        ]

    def column() -> torch.Tensor:
        return torch.rand(num_changed, generator=generator) + 0.5

    words = torch.randint(-(2**31), 2**31, (num_changed, -(-n // 32) + 1), generator=generator)
    rows = torch.randperm(num_rows, generator=generator)[:num_changed].int()
    bias, seen = entries(lists(9), F32), entries(lists(40), I32)
    return LogitChanges(rows, bias, seen, column(), column(), column(), words.int())


@EXPLORE
@given(num_changed=st.integers(0, 5), n=st.sampled_from([48, 100]), seed=st.integers(0, 99))
def test_change_logits(num_changed, n, seed):
    logits = torch.randn(6, n, generator=torch.Generator().manual_seed(seed)) * 2
    expected, changes = logits.clone(), changes_of(num_changed, 6, n, seed)
    logit_changes.change_logits(logits, changes)
    logit_changes.change_logits_reference(expected, changes)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)


def test_changes_by_hand(small_blocks):
    """Bias before penalties; a repetition penalty for the prompt's tokens too, the others for generated ones only."""
    logits = torch.zeros(2, 70)
    logits[1, [0, 1, 2, 69]] = torch.tensor([4.0, -4.0, 4.0, 1.0])
    masked = torch.tensor([[-1, -1, ~(1 << 4)]], dtype=I32)  # not token 68
    changes = LogitChanges(
        torch.tensor([1], dtype=I32), entries([[(2, 2.0), *((i, 0.0) for i in range(3, 40)), (69, float("-inf"))]], F32),
        entries([[(0, 0), (1, 2), (2, 1)]], I32), torch.tensor([2.0]), torch.tensor([0.5]), torch.tensor([0.25]), masked,
    )  # fmt: skip
    logit_changes.change_logits(logits, changes)
    assert logits[1, :3].tolist() == [2.0, -8.0 - 2 * 0.5 - 0.25, 3.0 - 0.5 - 0.25]
    assert logits[1, [67, 68, 69]].tolist() == [0.0, float("-inf"), float("-inf")]
    assert (logits[0] == 0).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sampler.sample(torch.zeros(2, 50), asking(2)), "multiples of 16"),
        (lambda: logprobs.token_logprobs(torch.zeros(2, 32), torch.zeros(1, dtype=I32), 2), "which rows"),
        (lambda: logit_changes.change_logits(torch.zeros(2, 32, dtype=BF16), changes_of(1, 2, 32, 0)), "float32"),
        (
            lambda: logit_changes.change_logits(
                torch.zeros(1, 64), LogitChanges(torch.zeros(1, dtype=I32), mask=torch.zeros(1, 1, dtype=I32))
            ),
            "2 int32 words",
        ),
        (
            lambda: logit_changes.change_logits(
                torch.zeros(1, 64), LogitChanges(torch.zeros(1, dtype=I32), seen=entries([[(0, 1)]], I32))
            ),
            "three penalties",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
