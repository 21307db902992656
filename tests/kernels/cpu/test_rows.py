"""Norms, activations and quantisation, row by row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer_kernels import reference
from batchinfer_kernels.cpu import Accumulated, Int8Recipe

WIDTHS = st.sampled_from([1, 2, 15, 16, 17, 63, 64, 100, 576, 1000, 1536])
DTYPES = [torch.float32, torch.bfloat16]
EPS = 2.0**-24
"""Half a unit in the last place of float32."""


def rows_of(seed, rows, columns, kind, scale=1.0):
    """Activations of one kind, and the same numbers in float64."""
    g = torch.Generator().manual_seed(seed)
    if kind == "int8 product":
        values = torch.randint(-(10**6), 10**6, (rows, columns + 3), generator=g, dtype=torch.int32)
        row, column = torch.rand(rows, generator=g) * scale, torch.rand(columns + 3, generator=g) * 1e-5
        bias = torch.randn(columns + 3, generator=g)
        product = Accumulated(values, row, column, bias).columns(2, columns + 2)
        exact = (values.double() * row.double().unsqueeze(1) * column.double() + bias.double())[:, 2 : columns + 2]
        return product, exact
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    x = (torch.randn(rows, columns + 5, generator=g) * scale).to(dtype)[:, :columns]
    return x, x.double()


kinds = st.sampled_from(["float32", "bfloat16", "int8 product"])
rows_and_columns = st.tuples(st.integers(0, 5), WIDTHS)


@settings(max_examples=40, deadline=None)
@given(shape=rows_and_columns, kind=kinds, residual=st.sampled_from([None, *DTYPES]), offset=st.sampled_from([0.0, 1.0]),
       seed=st.integers(0, 999))  # fmt: skip
def test_rms_norm_with_and_without_residual(ops, shape, kind, residual, offset, seed):
    """The sum is kept in the residual's precision, and what was kept is normed.

    Normed rows have unit variance, so float32 arithmetic is off by some 1e-6 of the weight; an INT8 product is rounded
    before it is normed, and a small one is then divided by as little as the root of eps.
    """
    x, exact = rows_of(seed, *shape, kind)
    weight = torch.randn(shape[1], generator=torch.Generator().manual_seed(seed + 1))
    stream = None
    if residual is not None:
        before = torch.randn(shape, generator=torch.Generator().manual_seed(seed + 2)).to(residual)
        stream = before.clone()
    out = ops.rms_norm(x, weight, 1e-5, residual=stream, weight_offset=offset, out_dtype=torch.float32)
    if stream is not None:
        total = before.double() + exact
        step = 2**-8 if residual == torch.bfloat16 else 2**-22  # a sum of rounded operands may round the other way
        assert torch.all((stream.double() - total).abs() <= step * (total.abs() + exact.abs() + 5))
        exact = stream.double()
    wanted = reference.rms_norm(exact, weight, 1e-5, weight_offset=offset, dtype=torch.float64)
    unit = (weight + offset).abs().double() * (1e-4 if kind == "int8 product" else 0) + wanted.abs() * 1e-5
    assert torch.all((out - wanted).abs() <= unit + 1e-9)


@settings(max_examples=40, deadline=None)
@given(shape=rows_and_columns, kind=kinds, activation=st.sampled_from(["silu", "gelu_tanh"]), scale=st.sampled_from([1.0, 30.0]),
       seed=st.integers(0, 999))  # fmt: skip
def test_gated_activations(ops, shape, kind, activation, scale, seed):
    """Far out as well: silu(-90) * up is tiny, silu(90) * up is 90 * up."""
    x, exact = rows_of(seed, shape[0], 2 * shape[1], kind, scale)
    wanted = reference.act_and_mul(exact, activation, dtype=torch.float64)
    out = ops.act_and_mul(x, activation, out_dtype=torch.float32)
    size = exact.abs().amax() if exact.numel() else 0.0
    # e^x is off by |x| float32 rounding steps; gate and up by one each
    assert torch.all((out - wanted).abs() <= 4e-6 * wanted.abs() + 1e-6 * (1 + size) + EPS * size**2)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(0, 4), blocks=st.integers(1, 5), rotation=st.sampled_from([0, 2, 16, 32, 64, 128]), kind=kinds,
       smooth=st.booleans(), seed=st.integers(0, 999))  # fmt: skip
def test_quantised_rows_are_within_half_a_step(ops, rows, blocks, rotation, kind, smooth, seed):
    """Smoothed, rotated by the explicit Hadamard matrix, then each number is the nearest multiple of max / 127."""
    columns = blocks * (rotation or 24)
    x, exact = rows_of(seed, rows, columns, kind)
    smoothing = torch.rand(columns, generator=torch.Generator().manual_seed(seed)) + 0.5 if smooth else None
    out = ops.quantize(x, recipe=Int8Recipe(smoothing, rotation))
    if smoothing is not None:
        exact = exact * smoothing.double()
    if rotation:
        exact = (exact.view(rows, columns // rotation, rotation) @ reference.hadamard(rotation).double()).view(
            rows, columns
        )
    peak = exact.abs().amax(dim=-1)
    assert torch.all((out.scales * 127 - peak).abs() <= 1e-5 * (peak + 1))
    error = (out.values.double() * out.scales.unsqueeze(1) - exact).abs()
    assert torch.all(error <= (out.scales.unsqueeze(1) / 2 + 2e-5 * (peak.unsqueeze(1) + 1)))
    if rows:
        assert out.values.abs().amax() == 127


def test_the_fused_ops_quantise_what_the_plain_ones_give(ops):
    """Norm or activation, then the recipe: the same as in two steps."""
    x, _ = rows_of(1, 7, 128, "float32")
    weight, recipe = torch.rand(128), Int8Recipe(torch.rand(128) + 0.5, 64)
    stream = torch.randn(7, 128)
    fused = ops.rms_norm_int8(x, weight, 1e-6, residual=stream.clone(), recipe=recipe)
    steps = ops.quantize(ops.rms_norm(x, weight, 1e-6, residual=stream.clone()), recipe=recipe)
    assert torch.equal(fused.values, steps.values)
    assert torch.equal(fused.scales, steps.scales)
    fused = ops.act_and_mul_int8(torch.cat((x, x * 2), dim=1), "silu", recipe=recipe)
    steps = ops.quantize(ops.act_and_mul(torch.cat((x, x * 2), dim=1), "silu"), recipe=recipe)
    assert torch.equal(fused.values, steps.values)
    assert torch.equal(fused.scales, steps.scales)


def test_rows_of_zeros_and_of_no_numbers(ops):
    """Zeros, and what is too small to divide by, get scale 0; infinity and NaN get scale NaN and never a plausible
    number; their neighbours notice nothing."""
    x = torch.ones(6, 100)
    x[0] = 0.0
    x[1, 50] = float("nan")
    x[2, 99] = float("inf")
    x[3, 0] = float("-inf")
    x[4] = 1e-38
    out = ops.quantize(x)
    assert out.scales[0] == 0
    assert out.scales[4] == 0
    assert out.scales[1:4].isnan().all()
    assert torch.equal(out.values[:5], torch.zeros(5, 100, dtype=torch.int8))
    assert torch.equal(out.values[5], torch.full((100,), 127, dtype=torch.int8))
    assert out.scales[5].item() == pytest.approx(1 / 127)
    assert ops.rms_norm(x[1:3], torch.ones(100), 1e-6)[0].isnan().all()
    assert torch.equal(ops.rms_norm(x[:1], torch.ones(100), 1e-6), torch.zeros(1, 100))


def test_bfloat16_results_are_rounded_to_nearest_even(ops):
    """As torch rounds; NaN stays NaN, whatever its bits."""
    x = torch.randn(50, 64) * torch.logspace(-30, 30, 64)
    x[0, 0], x[1, 1], x[2, 2] = float("nan"), float("inf"), float("-inf")
    x[3, 3] = torch.tensor(0x7F800001, dtype=torch.int32).view(torch.float32)
    out = ops.convert(x, torch.bfloat16)
    assert torch.equal(out.isnan(), x.isnan())
    assert torch.equal(out.nan_to_num(7.0), x.to(torch.bfloat16).nan_to_num(7.0))


def test_an_int8_product_gets_its_scales(ops):
    product, exact = rows_of(3, 4, 37, "int8 product")
    torch.testing.assert_close(ops.convert(product, torch.float32), exact.float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(product.dequantize(), exact.float(), rtol=1e-6, atol=1e-6)


def test_every_build_gives_the_same_bytes(every_native):
    """Norms and quantisation: sums run over 16 fixed lanes and nothing is fused, so register width does not show."""
    x, _ = rows_of(5, 9, 576, "bfloat16", 3.0)
    weight, recipe = torch.rand(576), Int8Recipe(torch.rand(576) + 0.5, 64)
    results = []
    for ops in every_native:
        stream = torch.ones(9, 576)
        quantised = ops.rms_norm_int8(x, weight, 1e-5, residual=stream, recipe=recipe)
        results.append([stream, quantised.values, quantised.scales])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_a_row_alone_or_in_a_batch_on_any_number_of_threads(native):
    x, _ = rows_of(6, 300, 576, "float32", 2.0)
    weight = torch.rand(576)
    both = torch.cat((x, x.flip(1)), dim=1)
    whole = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        norm = native.rms_norm(x, weight, 1e-6)
        gated, rows = native.act_and_mul(both, "silu"), native.quantize(x)
        whole.append([norm, gated, rows.values, rows.scales])
    assert all(torch.equal(a, b) for a, b in zip(*whole, strict=True))
    for i in (0, 17, 299):
        rows = native.quantize(x[i : i + 1])
        alone = [native.rms_norm(x[i : i + 1], weight, 1e-6), native.act_and_mul(both[i : i + 1], "silu"), rows.values]
        assert all(torch.equal(a[i : i + 1], b) for a, b in zip(whole[0], [*alone, rows.scales], strict=True))


def test_operands_of_another_kind_are_refused(native):
    """Each would have C++ read or write where it must not."""
    x, weight = torch.zeros(2, 8), torch.zeros(8)
    calls = {
        "weight": lambda: native.rms_norm(x, torch.zeros(7), 1e-6),
        "weight is torch.float64": lambda: native.rms_norm(x, weight.double(), 1e-6),
        "residual": lambda: native.rms_norm(x, weight, 1e-6, residual=torch.zeros(2, 16)[:, ::2]),
        "x has 1 dimensions": lambda: native.quantize(weight),
        "x must lie": lambda: native.quantize(torch.zeros(8, 2).t()),
        "x is torch.float16": lambda: native.quantize(x.half()),
        "gate_up has 7": lambda: native.act_and_mul(x[:, :7], "silu"),
        "activation is 'relu'": lambda: native.act_and_mul(x, "relu"),
        "rotation is 3": lambda: native.quantize(x, recipe=Int8Recipe(rotation=3)),
        "rotation is 16": lambda: native.quantize(x, recipe=Int8Recipe(rotation=16)),
        "smoothing": lambda: native.quantize(x, recipe=Int8Recipe(torch.ones(4))),
        "row_scale": lambda: native.quantize(Accumulated(x.int(), torch.ones(3), weight)),
        "out_dtype": lambda: native.convert(x, torch.float16),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            call()


def test_the_reference_norm_and_activation_agree_with_torch():
    x = torch.randn(3, 40)
    weight = torch.rand(40)
    wanted = torch.nn.functional.rms_norm(x, (40,), weight, 1e-5)
    torch.testing.assert_close(reference.rms_norm(x, weight, 1e-5), wanted)
    torch.testing.assert_close(reference.act_and_mul(x, "silu"), x[:, :20] * torch.sigmoid(x[:, :20]) * x[:, 20:])
    h = reference.hadamard(64)
    torch.testing.assert_close(h @ h, torch.eye(64), atol=1e-6, rtol=0)
    torch.testing.assert_close(reference.rotate(reference.rotate(torch.ones(2, 32), 16), 16), torch.ones(2, 32))
