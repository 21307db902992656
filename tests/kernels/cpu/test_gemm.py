"""Products of packed weights: int8 exact, bfloat16 near the float64 product, and no row's bytes from its neighbours."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer_kernels.cpu.native_gemm import NativeProduct
from batchinfer_kernels.cpu.packed import PackedWeights

SHAPES = [(1, 1, 64), (5, 40, 64), (16, 32, 128), (17, 33, 64), (33, 96, 192), (700, 40, 1536), (513, 17, 3072)]
"""Rows, columns and summed numbers: around a tile's 16 rows, a block's 32, and more rows than a core's cache holds."""


def product(native, weight):
    return NativeProduct(native._library, PackedWeights.of(weight))


def integers(generator, *shape):
    return torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator)


@pytest.mark.parametrize(("rows", "columns", "summed"), SHAPES)
def test_int8_sums_are_exact(native, rows, columns, summed):
    """Extremes included: -128 times -128 in every place."""
    generator = torch.Generator().manual_seed(rows)
    x, weight = integers(generator, rows, summed), integers(generator, columns, summed)
    x[0], weight[0] = -128, -128
    assert torch.equal(product(native, weight)(x).double(), x.double() @ weight.double().T)


@pytest.mark.parametrize(("rows", "columns", "summed"), SHAPES)
def test_bfloat16_is_a_float32_sum(native, rows, columns, summed):
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(n, summed, generator=generator).bfloat16() for n in (rows, columns))
    truth = x.double() @ weight.double().T
    magnitude = x.double().abs() @ weight.double().abs().T
    assert ((product(native, weight)(x).double() - truth).abs() <= magnitude * summed * 2**-24).all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
def test_a_row_does_not_depend_on_the_rows_beside_it(native, dtype):
    generator = torch.Generator().manual_seed(1)
    weight, x = ((torch.randn(n, 1536, generator=generator) * 20).to(dtype) for n in (48, 300))
    multiply = product(native, weight)
    whole = multiply(x)
    for number in (1, 15, 16, 17, 31, 33, 64, 299):
        for start in (0, 300 - number):
            assert torch.equal(multiply(x[start : start + number]), whole[start : start + number])


def test_threads_share_the_columns(best):
    generator = torch.Generator().manual_seed(2)
    weight, x = (torch.randn(n, 64, generator=generator).bfloat16() for n in (500, 70))
    multiply = product(best, weight)
    alone = multiply(x)
    torch.set_num_threads(3)
    assert torch.equal(multiply(x), alone)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
def test_no_rows_give_nothing(native, dtype):
    assert product(native, torch.ones(40, 64).to(dtype))(torch.ones(0, 64).to(dtype)).shape == (0, 40)


@given(st.integers(1, 70), st.integers(1, 4), st.sampled_from([torch.int8, torch.bfloat16]), st.booleans())
@settings(max_examples=40, deadline=None)
def test_unpacking_gives_the_weights_back(columns, tiles, dtype, by_columns):
    weight = torch.randint(-100, 100, (columns, tiles * 64)).to(dtype)
    packed = PackedWeights.of(weight.t().contiguous().t() if by_columns else weight)
    assert torch.equal(packed.unpack(), weight)
    assert (packed.num_columns, packed.num_summed) == weight.shape
    assert packed.padded_columns % 32 == 0


@pytest.mark.parametrize(("dtype", "summed"), [(torch.int8, 96), (torch.bfloat16, 48), (torch.float32, 64)])
def test_what_does_not_fit_is_refused(best, dtype, summed):
    weight = torch.ones(8, summed).to(dtype)
    assert not PackedWeights.fits(weight)
    assert best.product(weight) is None
    with pytest.raises(ValueError, match="cannot be packed"):
        PackedWeights.of(weight)


def test_rows_of_another_shape_or_kind_are_refused(best):
    multiply = product(best, torch.ones(8, 64, dtype=torch.int8))
    for rows in (torch.ones(3, 128, dtype=torch.int8), torch.ones(3, 64), torch.ones(64, 3, dtype=torch.int8).t()):
        with pytest.raises(ValueError, match="rows"):
            multiply(rows)
