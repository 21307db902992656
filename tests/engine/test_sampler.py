"""Sampling: which tokens may be drawn, how often, and that a draw belongs to its row alone."""

import subprocess
import sys

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from batchinfer.engine import sampler as sampler_module
from batchinfer.engine.philox import philox4x32, uniform
from batchinfer.engine.sampler import Sampler, SamplingRow, _weights
from batchinfer.sampling_params import SamplingParams
from batchinfer.types import ErrorCode, RowError

FILTERS = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 1.7},
    {"top_k": 5},
    {"top_p": 0.5},
    {"top_p": 0.9, "temperature": 0.7},
    {"min_p": 0.2},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.1, "temperature": 1.3},
    {"top_p": 1e-6},
    {"top_k": 10_000},
]


def row(seed=0, position=0, **params) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), seed, position)


def drawn(seed=0, position=0, **params) -> SamplingRow:
    return row(seed, position, **{"temperature": 1.0, **params})


def logits(rows: int, vocab: int, seed=0, spread=3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def warped(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """What transformers makes of logits before it draws: -inf where a token is left out."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(min(params.top_k, scores.shape[1])))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers(torch.zeros(scores.shape[0], 1, dtype=torch.long), scores.clone())


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_its_authors_test_vectors(counter, key, expected):
    """The three known answers of Random123's ``kat_vectors`` for philox4x32-10."""
    assert philox4x32(torch.tensor([counter]), torch.tensor([key])).tolist() == [expected]


def test_uniform_numbers_lie_in_the_unit_interval_and_differ_by_seed_and_position():
    seeds = torch.arange(100).repeat_interleave(100) + 2**62
    positions = torch.arange(100).repeat(100)
    numbers = uniform(seeds, positions)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert len(set(numbers.tolist())) == 10_000
    # mean and variance of 10,000 uniform numbers, within five standard errors
    assert abs(numbers.mean().item() - 1 / 2) < 5 * (1 / 12 / 10_000) ** 0.5
    assert abs(numbers.var().item() - 1 / 12) < 5 * (1 / 180 / 10_000) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_largest_logit_and_of_equal_ones_the_first(dtype):
    scores = logits(7, 1000).to(dtype)
    scores[3, 17] = scores[3, 900] = 60
    expected = [max(range(1000), key=lambda i: (line[i], -i)) for line in scores.tolist()]
    assert Sampler().sample(scores, [row()] * 7) == expected
    assert expected[3] == 17


def test_top_k_1_is_greedy_whatever_the_temperature():
    scores = logits(5, 100)
    assert Sampler().sample(scores, [drawn(seed=i, top_k=1) for i in range(5)]) == scores.argmax(1).tolist()


@pytest.mark.parametrize("temperature", [1e-6, 1e-40])
def test_a_vanishing_temperature_is_greedy(temperature):
    scores = logits(5, 100)
    rows = [drawn(seed=i, temperature=temperature) for i in range(5)]
    assert Sampler().sample(scores, rows) == scores.argmax(1).tolist()


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("vocab", [50, 3000])
def test_the_candidates_are_those_of_transformers(filters, vocab):
    """Kept sets and their probabilities equal those of transformers' warpers in their own order."""
    params = SamplingParams(**{"temperature": 1.0, **filters})
    scores = logits(16, vocab, seed=vocab)
    expected = warped(scores, params)
    relative = scores - scores.max(1, keepdim=True).values
    weights = _weights(relative, [params] * 16)
    if filters.keys() & {"top_k", "top_p", "min_p"}:
        assert ((weights > 0) == expected.isfinite()).all()
    shares = weights.double() / weights.sum(1, keepdim=True)
    assert (shares - expected.double().softmax(1)).abs().max() < 1e-6


def test_rows_with_different_filters_share_a_batch():
    """Each row of a mixed batch keeps what it keeps alone."""
    scores = logits(len(FILTERS), 500)
    params = [SamplingParams(**{"temperature": 1.0, **filters}) for filters in FILTERS]
    relative = scores - scores.max(1, keepdim=True).values
    together = _weights(relative, params)
    for i, single in enumerate(params):
        assert (together[i] == _weights(relative[i : i + 1], [single])[0]).all()


def test_top_p_reaches_beyond_the_first_candidates():
    """A flat distribution needs more tokens than are looked at first: the rest is sorted, not cut off."""
    vocab = 4 * sampler_module.NUCLEUS_CANDIDATES
    scores = logits(2, vocab, spread=0.01)
    params = SamplingParams(temperature=1.0, top_p=0.9)
    weights = _weights(scores - scores.max(1, keepdim=True).values, [params] * 2)
    assert ((weights > 0) == warped(scores, params).isfinite()).all()
    assert (weights > 0).sum() > 2 * sampler_module.NUCLEUS_CANDIDATES


def test_tied_candidates_are_all_kept():
    """Two tokens that tie for the last place of top-k or top-p: chance must not depend on their order."""
    scores = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    relative = scores - 2
    for params in ({"top_k": 2}, {"top_p": 0.7}):
        weights = _weights(relative, [SamplingParams(temperature=1.0, **params)])
        assert (weights > 0).tolist() == [[True, True, True, False]]


@pytest.mark.parametrize("filters", [{}, {"temperature": 0.6, "top_p": 0.9}, {"top_k": 4}, {"min_p": 0.1}], ids=str)
def test_draws_are_as_frequent_as_their_probabilities(filters):
    """Chi-square of 20,000 draws over seeds and positions against exact probabilities, at a level of about 1e-5."""
    num_draws, vocab = 20_000, 12
    scores = logits(1, vocab, seed=5, spread=1.5)
    rows = [drawn(seed=i // 50, position=i % 50, **filters) for i in range(num_draws)]
    tokens = Sampler().sample(scores.expand(num_draws, vocab), rows)
    expected = warped(scores, rows[0].params).double().softmax(1)[0] * num_draws
    counts = torch.bincount(torch.tensor(tokens), minlength=vocab)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum().item()
    degrees = int(possible.sum()) - 1
    # mean + 6 standard deviations of chi-square; its tail beyond is below 1e-4 for these degrees of freedom
    assert chi_square < degrees + 6 * (2 * degrees) ** 0.5


def test_a_draw_belongs_to_its_row_alone():
    """The same logits, seed and position give the same token alone, in any batch, order and slice."""
    scores = logits(64, 997)
    rows = [drawn(seed=1000 + i, position=i % 7, top_p=0.95, temperature=0.5 + i / 40) for i in range(64)]
    rows[5] = row()
    together = Sampler().sample(scores, rows)
    for i in range(64):
        assert Sampler().sample(scores[i : i + 1], [rows[i]]) == [together[i]]
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = Sampler().sample(scores[order], [rows[i] for i in order])
    assert shuffled == [together[i] for i in order]


def test_slices_do_not_show(monkeypatch):
    scores = logits(33, 200)
    rows = [drawn(seed=i) if i % 3 else row() for i in range(33)]
    together = Sampler().sample(scores, rows)
    for elements in (1, 200, 450, 10_000):
        monkeypatch.setattr(sampler_module, "SLICE_ELEMENTS", elements)
        assert Sampler().sample(scores, rows) == together


def test_seed_and_position_both_change_the_draw():
    scores = logits(1, 5000, spread=0.1).expand(50, 5000)
    by_seed = Sampler().sample(scores, [drawn(seed=i) for i in range(50)])
    by_position = Sampler().sample(scores, [drawn(position=i) for i in range(50)])
    assert len(set(by_seed)) > 40
    assert len(set(by_position)) > 40
    assert Sampler().sample(scores[:1], [drawn(seed=2**63 - 1)]) == Sampler().sample(
        scores[:1], [drawn(seed=2**63 - 1)]
    )


def test_end_tokens_are_barred_until_min_tokens():
    """EOS and the row's stop ids cannot come before min_tokens tokens stand; afterwards they can."""
    scores = torch.zeros(1, 10)
    scores[0, 3], scores[0, 4], scores[0, 5] = 9, 8, 7
    sampler = Sampler(eos_token_ids={3})
    early = row(position=1, min_tokens=2, max_tokens=8, stop_token_ids=(4,))
    assert sampler.sample(scores, [early]) == [5]
    assert sampler.sample(scores, [row(position=2, min_tokens=2, stop_token_ids=(4,))]) == [3]
    assert scores[0, 3] == 9, "the caller's logits are not touched"
    many = [drawn(seed=i, position=0, min_tokens=1, stop_token_ids=(4,)) for i in range(200)]
    assert {3, 4}.isdisjoint(sampler.sample(scores.expand(200, 10), many))


def test_stop_ids_beyond_the_vocabulary_are_harmless():
    scores = logits(1, 10)
    sampler = Sampler(eos_token_ids=(10, 10**9))
    ids = (-1, 10, 2**40)
    assert sampler.sample(scores, [row(min_tokens=5, stop_token_ids=ids)]) == scores.argmax(1).tolist()


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
@pytest.mark.parametrize("make", [row, drawn])
def test_a_row_without_a_finite_maximum_fails_alone(value, make):
    """Neighbours of a poisoned row get their tokens, and it gets an error that says why."""
    scores = logits(3, 50)
    expected = Sampler().sample(scores, [make(seed=i) for i in range(3)])
    scores[1] = value
    found = Sampler().sample(scores, [make(seed=i) for i in range(3)])
    assert [found[0], found[2]] == [expected[0], expected[2]]
    assert isinstance(found[1], RowError)
    assert found[1].code is ErrorCode.ENGINE_ERROR
    assert "no finite maximum" in found[1].message


def test_a_single_nan_is_seen():
    scores = logits(1, 50)
    scores[0, 7] = float("nan")
    assert isinstance(Sampler().sample(scores, [row()])[0], RowError)


def test_masked_tokens_are_never_drawn():
    scores = torch.full((100, 20), -torch.inf)
    scores[:, 11] = -3.0
    assert set(Sampler().sample(scores, [drawn(seed=i) for i in range(100)])) == {11}


def test_memory_stays_bounded():
    """1,024 rows of 150,000 tokens: no [rows, vocab] float32 copy (614 MB); measured as the peak of a fresh process."""
    program = """
import resource, torch
from batchinfer.engine.sampler import Sampler, SamplingRow
from batchinfer.sampling_params import SamplingParams
torch.set_num_threads(1)
logits = torch.randn(1, 150_000).bfloat16().expand(1024, 150_000)  # one row's memory
greedy, hot = SamplingParams(), SamplingParams(temperature=1.0, top_p=0.9)
rows = [SamplingRow(hot if i % 32 == 0 else greedy, i, 0) for i in range(1024)]
sampler = Sampler()
sampler.sample(logits[:64], rows[:64])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert len(sampler.sample(logits, rows)) == 1024
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert int(done.stdout) < 100_000, "KiB beyond what a small batch needs"
