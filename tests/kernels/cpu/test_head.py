"""The best word of each row without logits: threads look at parts of the words, and agree with the whole row of exact sums."""

import pytest
import torch

from batchinfer_kernels.cpu import Int8Rows, LogitsReduction, PackedProjection, PackedWeights
from tests.kernels.cpu.test_gemm import integers

SLICES = (96, 41, 7)
"""Words of each; the last tiles of two are ragged."""
SUMMED = 64


def head_of(native, weight, **options):
    parts, first = [], 0
    for words in SLICES:
        columns = slice(first, first + words)
        of_part = {name: values[columns] for name, values in options.items()}
        parts.append(PackedProjection(PackedWeights.of(weight[columns]), **of_part))
        first += words
    return native.head(parts)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [1, 16, 33, 70])
def test_the_largest_of_int8_products(native, rows, threads):
    """Exact sums whose scales are powers of two: every number is known, ties among them included."""
    generator = torch.Generator().manual_seed(rows)
    weight, x = integers(generator, sum(SLICES), SUMMED), integers(generator, rows, SUMMED)
    weight[100] = weight[3]  # in another slice
    x[0] = weight[3]
    column_scale = 2.0 ** torch.randint(-2, 1, (len(weight),), generator=generator)
    column_scale[[3, 100]] = 4.0
    bias = torch.randint(-9, 9, (len(weight),), generator=generator).float()
    bias[[3, 100]] = 9.0
    row_scale = 2.0 ** torch.randint(-3, 3, (rows,), generator=generator)
    head = head_of(native, weight, column_scale=column_scale, bias=bias)
    torch.set_num_threads(threads)
    reduction = LogitsReduction(rows)
    head(Int8Rows(x, row_scale), reduction, scale=0.5)
    logits = 0.5 * ((x.double() @ weight.double().T) * row_scale[:, None] * column_scale + bias)
    assert torch.equal(reduction.best.double(), logits.max(dim=1).values)
    first = torch.tensor([int((row == row.max()).nonzero()[0]) for row in logits])
    assert first[0] == 3
    assert torch.equal(reduction.best_index, first)
    assert not reduction.has_nan.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_no_row_depends_on_what_is_kept_of_it(native, dtype):
    """The way that writes logits gives the same numbers."""
    generator = torch.Generator().manual_seed(5)
    weight = (torch.randn(sum(SLICES), SUMMED, generator=generator) * 30).to(dtype)
    x = (torch.randn(40, SUMMED, generator=generator) * 30).to(dtype)
    options = {"column_scale": torch.rand(len(weight), generator=generator)} if dtype == torch.int8 else {}
    rows = Int8Rows(x, torch.rand(40, generator=generator)) if dtype == torch.int8 else x
    head = head_of(native, weight, **options)
    torch.set_num_threads(2)
    plain, kept = LogitsReduction(40), LogitsReduction(40, kept=[7], num_columns=len(weight))
    for reduction in (plain, kept):
        head(rows, reduction, scale=0.7)
    assert torch.equal(plain.best, kept.best)
    assert torch.equal(plain.best_index, kept.best_index)


def test_rows_with_nan_are_named_and_their_largest_is_a_number(native):
    weight = torch.ones(sum(SLICES), SUMMED, dtype=torch.bfloat16)
    weight[120] = float("nan")
    weight[130] = 2.0
    weight[5] = float("-inf")
    x = torch.ones(20, SUMMED, dtype=torch.bfloat16)
    x[4] = float("nan")
    reduction = LogitsReduction(20)
    head_of(native, weight)(x, reduction)
    assert reduction.has_nan.all()
    others = torch.arange(20) != 4
    assert (reduction.best_index[others] == 130).all()
    assert reduction.best_index[4] == -1
    assert reduction.best[4] == float("-inf")
