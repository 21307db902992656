"""Norms, gated activations and quantisation of rows, against float32 torch."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.nn import functional

from batchinfer_kernels import act_and_mul, quantize, reference, rms_norm
from tests.triton.checks import assert_quantized, assert_rounded

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EXPLORE = settings(max_examples=12, deadline=None, phases=(Phase.explicit, Phase.generate), derandomize=True)
EPS = 1e-5


def rows(num_tokens: int, n: int, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_tokens, n, generator=generator) * 3).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [16, 576, 4096])
def test_rms_norm_is_torchs(dtype, n):
    x, weight = rows(3, n, dtype), rows(1, n, dtype, seed=1)[0]
    expected = functional.rms_norm(x.float(), (n,), weight.float(), EPS)
    assert_rounded(rms_norm.rms_norm(x, weight, EPS), expected)


def test_the_norms_oracle_is_torchs():
    x, weight = rows(3, 48), rows(1, 48, seed=1)[0]
    assert_rounded(rms_norm.rms_norm_reference(x, weight, EPS), functional.rms_norm(x, (48,), weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_adds_to_the_residual_and_norms_what_was_stored(dtype):
    """Gemma's weights are offsets from one."""
    x, weight, residual = rows(4, 96, dtype), rows(1, 96, seed=1)[0], rows(4, 96, dtype, seed=2)
    stored = (residual.float() + x.float()).to(dtype)
    out = rms_norm.rms_norm(x, weight, EPS, weight_offset=1.0, residual=residual)
    assert torch.equal(residual, stored)
    assert_rounded(out, functional.rms_norm(stored.float(), (96,), weight + 1, EPS))


def test_rms_norm_of_tiny_numbers_is_held_down_by_epsilon():
    x = torch.full((1, 32), 1e-4)
    expected = 1e-4 / (1e-8 + EPS) ** 0.5
    assert_rounded(rms_norm.rms_norm(x, torch.ones(32), EPS), torch.full((1, 32), expected))


def test_rms_norm_reads_rows_of_a_wider_matrix():
    wide = rows(4, 256)
    weight = rows(1, 64, seed=1)[0]
    out = rms_norm.rms_norm(wide[:, 64:128], weight, EPS)
    assert_rounded(out, functional.rms_norm(wide[:, 64:128], (64,), weight, EPS))


@EXPLORE
@given(
    num_tokens=st.integers(0, 4), width=st.integers(1, 12), rotation=st.sampled_from([0, 16, 64, 128, 512]),
    dtype=st.sampled_from(DTYPES), smooth=st.booleans(), with_residual=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_rms_norm_quantize(num_tokens, width, rotation, dtype, smooth, with_residual, seed):
    n = width * max(rotation, 16)
    x, weight = rows(num_tokens, n, dtype, seed), rows(1, n, dtype, seed + 1)[0]
    smoothing = rows(1, n, seed=seed + 2)[0].abs() + 0.1 if smooth else None
    residual = rows(num_tokens, n, dtype, seed + 3) if with_residual else None
    expected_residual = None if residual is None else residual.clone()
    options = {"smoothing": smoothing, "rotation": rotation, "weight_offset": 0.5}
    actual = rms_norm.rms_norm_quantize(x, weight, EPS, residual=residual, **options)
    expected = rms_norm.rms_norm_quantize_reference(x, weight, EPS, residual=expected_residual, **options)
    assert_quantized(actual, expected)
    assert residual is None or torch.equal(residual, expected_residual)


@pytest.mark.parametrize("rotation", [16, 32, 64, 128, 512])
def test_rotation_is_orthogonal_and_hadamard(rotation):
    """Rotating a unit vector spreads it evenly: every number of its block has the same size."""
    x = torch.zeros(2, rotation * 2)
    x[0, 3] = 1.0
    x[1, rotation + 1] = -5.0
    numbers, scale = quantize.quantize_rows(x, rotation=rotation)
    assert (numbers[0, :rotation].abs() == 127).all()
    assert (numbers[0, rotation:] == 0).all()
    assert (numbers[1, :rotation] == 0).all()
    assert (numbers[1, rotation:].abs() == 127).all()
    torch.testing.assert_close(scale * 127, torch.tensor([1.0, 5.0]) / rotation**0.5)


@pytest.mark.parametrize("rotation", [64, 512])
def test_rotation_keeps_float32s_precision(rotation):
    """Three bfloat16 parts make the product exact, so a number beside one 2**16 times larger is not lost."""
    x = rows(2, rotation)
    x[0] = 0.0
    x[0, 0], x[0, 1], x[0, rotation - 1] = 2.0**16, 1.0 + 2.0**-6, 0.75
    actual = quantize.quantize_rows(x, rotation=rotation)
    assert_quantized(actual, quantize.quantize_rows_reference(x, rotation=rotation))
    exact = (x.double() @ reference.hadamard(rotation).double()).abs().amax(dim=1)
    torch.testing.assert_close(actual[1].double() * 127, exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("n", [4096, 8192])
def test_the_recipes_rotation_at_production_widths(n):
    """Blocks of 512: each is several rows of a tile, which are rotated among each other; a wider row has wider ones."""
    x = rows(2, n)
    x[0, 700], x[1, n - 1] = 300.0, -200.0
    smoothing = rows(1, n, seed=1)[0].abs() + 0.1
    actual = quantize.quantize_rows(x, smoothing=smoothing, rotation=512)
    assert_quantized(actual, quantize.quantize_rows_reference(x, smoothing=smoothing, rotation=512))


def test_rows_are_gathered_and_smoothed_by_their_groups():
    """What experts read: a token's row once a choice, with the factors of the expert it goes to."""
    x, wide = rows(3, 64), rows(5, 128, seed=1)
    smoothing = rows(4, 64, seed=2).abs() + 0.1
    source, groups = torch.tensor([2, 0, 0, 1, 2], dtype=torch.int32), torch.tensor([0, 0, 2, 3, 3])
    options = {"smoothing": smoothing, "rotation": 16, "groups": groups}
    actual = quantize.quantize_rows(x, source=source, **options)
    assert_quantized(actual, quantize.quantize_rows_reference(x, source=source, **options))
    by_hand = quantize.quantize_rows_reference(x[1:2] * smoothing[3], rotation=16)
    assert_quantized((actual[0][3:4], actual[1][3:4]), by_hand)
    activated = act_and_mul.act_and_mul_quantize(wide, "silu", **options)
    assert_quantized(activated, act_and_mul.act_and_mul_quantize_reference(wide, "silu", **options))


def test_quantisation_rounds_half_to_even_and_reaches_127():
    x = torch.tensor([[127.0, -127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 63.49, 63.51, *[0.0] * 7]])
    numbers, scale = quantize.quantize_rows(x)
    assert numbers[0, :9].tolist() == [127, -127, 0, 2, 2, 0, -2, 63, 64]
    assert scale.tolist() == [1.0]


@pytest.mark.parametrize("rotation", [0, 16])
def test_zero_tiny_and_broken_rows(rotation):
    """Zeros and what is too small to divide by give scale 0; an infinity or NaN gives NaN, and no plausible numbers."""
    x = torch.zeros(4, 32)
    x[1] = 1e-35
    x[2, 5] = float("inf")
    x[3, 5] = float("nan")
    numbers, scale = quantize.quantize_rows(x, rotation=rotation)
    assert (numbers == 0).all()
    assert scale[:2].tolist() == [0.0, 0.0]
    assert scale[2:].isnan().all()
    assert_quantized((numbers, scale), quantize.quantize_rows_reference(x, rotation=rotation))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("n", [16, 176, 4112])
def test_act_and_mul(dtype, activation, n):
    x = rows(2, 2 * n, dtype)
    gate, up = x.float()[:, :n], x.float()[:, n:]
    act = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    assert_rounded(act_and_mul.act_and_mul(x, activation), act * up)


@EXPLORE
@given(
    num_tokens=st.integers(0, 3), width=st.integers(1, 9), rotation=st.sampled_from([0, 64, 256]),
    activation=st.sampled_from(["silu", "gelu_tanh"]), dtype=st.sampled_from(DTYPES), smooth=st.booleans(),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_act_and_mul_quantize(num_tokens, width, rotation, activation, dtype, smooth, seed):
    n = width * max(rotation, 16)
    x = rows(num_tokens, 2 * n, dtype, seed)
    options = {"smoothing": rows(1, n, seed=seed)[0].abs() + 0.1 if smooth else None, "rotation": rotation}
    actual = act_and_mul.act_and_mul_quantize(x, activation, **options)
    assert_quantized(actual, act_and_mul.act_and_mul_quantize_reference(x, activation, **options))


@pytest.mark.parametrize("rotation", [0, 64, 128])
def test_act_and_mul_quantize_sees_the_whole_of_a_long_row(rotation):
    """The largest number may lie in any chunk."""
    n = act_and_mul.CHUNK + 128
    x = rows(2, 2 * n)
    x[0, 3], x[1, n - 2] = 90.0, 90.0
    actual = act_and_mul.act_and_mul_quantize(x, "silu", rotation=rotation)
    assert_quantized(actual, act_and_mul.act_and_mul_quantize_reference(x, "silu", rotation=rotation))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rms_norm.rms_norm(torch.zeros(2, 24), torch.zeros(24), EPS), "multiples of 16"),
        (lambda: rms_norm.rms_norm(torch.zeros(2, 64)[:, ::2], torch.zeros(32), EPS), "contiguous"),
        (lambda: rms_norm.rms_norm(torch.zeros(2, 32), torch.zeros(32), EPS, residual=torch.zeros(2, 16)), "residual"),
        (lambda: quantize.quantize_rows(torch.zeros(2, 48), rotation=32), "rotation"),
        (lambda: quantize.quantize_rows(torch.zeros(2, 48), rotation=8), "rotation"),
        (lambda: quantize.quantize_rows(torch.zeros(2, 2048), rotation=1024), "rotation"),
        (lambda: quantize.quantize_rows(torch.zeros(2, 48), smoothing=torch.ones(3, 48)), "smoothing"),
        (lambda: quantize.quantize_rows(torch.zeros(2, 48), groups=torch.zeros(2)), "groups"),
        (lambda: act_and_mul.act_and_mul(torch.zeros(2, 48), "silu"), "multiple of 16"),
        (lambda: act_and_mul.act_and_mul(torch.zeros(2, 64), "relu"), "relu"),
    ],
)
def test_what_a_kernel_cannot_take_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
