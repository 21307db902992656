"""INT8: the two exact changes of a product, its rounding, and what a whole model loses by it."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.engine.config import EngineConfig
from batchinfer.errors import ModelError
from batchinfer.models.fused import int8_linear
from batchinfer.models.fused.calibration import Statistics
from batchinfer.models.fused.int8 import RECIPES, Scheme, smoothing_factors, w8a8, weight_only
from batchinfer.models.fused.int8_linear import Int8Linear
from batchinfer.models.fused.parts import ModulePart
from batchinfer.models.fused.rotation import rotate, rotation_block
from batchinfer.models.fused.rounding import compensated, nearest
from batchinfer.models.fused.spec import Projection
from batchinfer_kernels.cpu import Int8Recipe, get_ops
from tests.engine.small_decoder import logits_of, make_forward, small_model


def projection(*modules, scale=1.0):
    return Projection("some", [ModulePart(module) for module in modules], scale)


def seen(rows):
    statistics = Statistics(rows.shape[1], has_products=True)
    statistics.add(rows)
    return statistics


def linear(columns, rows, bias=False, seed=0):
    torch.manual_seed(seed)
    module = torch.nn.Linear(columns, rows, bias=bias)
    torch.nn.init.normal_(module.weight)
    return module


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 40), st.integers(1, 40), st.floats(1e-20, 1e20))
def test_weights_are_rounded_to_the_nearest_step(rows, columns, size):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) * size
    rounded, scale = nearest(weight)
    restored = rounded.double() * scale.double().unsqueeze(1)
    assert ((restored - weight.double()).abs() <= scale.double().unsqueeze(1) * 0.5001).all()
    assert (rounded.abs().amax(dim=1) == 127).all(), "the largest weight of a row uses the whole range"


def test_a_row_of_zeros_stays_zeros():
    rounded, scale = nearest(torch.zeros(2, 5))
    assert not rounded.any()
    assert not scale.any()


@pytest.mark.parametrize("width", [96, 128], ids=["torch", "packed"])
@pytest.mark.parametrize("by_columns", [False, True])
def test_how_weights_lie_in_memory_changes_no_byte(by_columns, width, monkeypatch):
    """Against the exact product of whole numbers; what is kept in a file is the same whichever way."""
    monkeypatch.setattr(int8_linear, "_reads_columns_faster", lambda *_shape: by_columns)
    monkeypatch.setattr(get_ops(), "_packs", True)
    ops, random = get_ops(), torch.Generator().manual_seed(1)
    weight = torch.randint(-127, 128, (width, 200), dtype=torch.int8, generator=random)
    whole = Int8Linear(ops, weight, torch.ones(200), None, Int8Recipe())
    rows = ops.quantize(torch.randn(7, width, generator=random))
    exact = rows.values.long() @ weight.long()
    for _ in range(2):
        assert torch.equal(whole(rows).values.long(), exact)
    kept = whole.tensors()["weight"]
    assert torch.equal(kept, weight)
    assert kept.is_contiguous()
    parts = whole.split(64)
    assert torch.equal(torch.cat([part(rows).values.long() for part in parts], dim=1), exact)


@pytest.mark.parametrize("shape", [(16, 16), (256, 512)])
def test_either_way_may_be_the_faster_one(shape):
    weight = torch.randint(-127, 128, shape, dtype=torch.int8)
    laid = int8_linear.laid_out(weight)
    assert torch.equal(laid, weight)
    assert laid.is_contiguous() or laid.t().is_contiguous()
    assert laid.is_contiguous() or shape[0] * shape[1] >= int8_linear.SMALL_PRODUCT


@pytest.mark.parametrize("rows", [1, 70])
def test_compensated_rounding_gives_a_smaller_error_of_the_product(rows):
    """On rows like those it saw, and on new ones of the same kind; to the nearest step where nothing was seen."""
    torch.manual_seed(2)
    mix = torch.randn(96, 96) * torch.linspace(0.1, 3, 96)
    weight, seen_rows, new = torch.randn(rows, 96), torch.randn(800, 96) @ mix, torch.randn(300, 96) @ mix
    rounded, scale = compensated(weight, seen_rows.T @ seen_rows, 0.01)
    plain, plain_scale = nearest(weight)
    assert torch.equal(scale, plain_scale)
    for x in (seen_rows, new):
        error, plain_error = (
            (x @ (w.float() * scale[:, None] - weight).T).square().mean().item() for w in (rounded, plain)
        )
        assert error < 0.5 * plain_error
    assert torch.equal(compensated(weight, torch.zeros(96, 96), 0.01)[0], plain)


def test_compensation_leaves_rows_of_zeros_alone():
    weight = torch.randn(3, 64)
    weight[1] = 0
    x = torch.randn(200, 64)
    rounded, scale = compensated(weight, x.T @ x, 0.05)
    assert not rounded[1].any()
    assert scale[1] == 0


@pytest.mark.parametrize("columns, block", [(576, 64), (1536, 64), (96, 32), (48, 16), (40, 0), (17, 0)])
def test_the_rotation_fits_the_columns_and_changes_no_product(columns, block):
    """Rows and weights rotated alike give the product they gave before."""
    assert rotation_block(columns, 64) == block
    torch.manual_seed(1)
    weight, x = torch.randn(7, columns), torch.randn(3, columns)
    assert torch.allclose(rotate(x, block) @ rotate(weight, block).T, x @ weight.T, atol=1e-4)
    if block:
        assert rotate(torch.eye(columns), block).abs().max() == pytest.approx(1 / math.sqrt(block))


def test_smoothing_evens_out_channels():
    """Powers of two, so that they round nothing; dead channels stay finite."""
    peak, weight = torch.tensor([100.0, 1.0, 0.0]), torch.tensor([[0.5, 2.0, 0.1], [1.0, -1.0, 0.0]])
    factor = smoothing_factors(peak, weight, 0.5)
    assert factor.isfinite().all()
    assert torch.equal(torch.exp2(torch.log2(factor).round()), factor)
    before, after = peak[0] / peak[1], (peak * factor)[0] / (peak * factor)[1]
    assert after <= before / 8, "a channel 100 times as large gives a root of that away"


@pytest.mark.parametrize("scheme", [Scheme(*s, None) for s in [(None, 0), (0.5, 0), (None, 64), (0.5, 64)]])
@pytest.mark.parametrize("bias", [False, True])
def test_a_w8a8_product_is_that_of_its_rounded_operands(scheme, bias):
    """Against the same operands rounded in float64 by the formula."""
    module, other = linear(128, 24, bias), linear(128, 9, bias, seed=1)
    x = torch.randn(11, 128) * torch.linspace(0.1, 30, 128)
    peak = x.abs().amax(dim=0)
    ours = w8a8(get_ops(), projection(module, other, scale=0.5), scheme, seen(x))
    result = ours(ours.convert(x)).dequantize()

    weight = torch.cat([module.weight, other.weight]).detach() * 0.5
    factor = torch.ones(128) if scheme.smoothing is None else smoothing_factors(peak, weight, scheme.smoothing)
    block = scheme.rotation
    rounded_x, x_scale = nearest(rotate(x * factor, block))
    rounded_w, w_scale = nearest(rotate(weight / factor, block))
    expected = (rounded_x.double() @ rounded_w.double().T) * x_scale.double()[:, None] * w_scale.double()
    if bias:
        expected += 0.5 * torch.cat([module.bias, other.bias]).detach().double()
    # a value on the edge between two steps may fall either way
    assert (result - expected).abs().max() < 0.01 * expected.abs().max()
    assert (result - expected).abs().median() < 1e-5 * expected.abs().max()
    exact = x @ torch.cat([module.weight, other.weight]).detach().T * 0.5
    if bias:
        exact = exact + 0.5 * torch.cat([module.bias, other.bias]).detach()
    assert (result - exact).abs().max() < 0.05 * exact.abs().max()


def test_weight_only_is_the_product_with_rounded_weights():
    module = linear(96, 40, bias=True)
    ours = weight_only(get_ops())(projection(module))
    x = torch.randn(5, 96).bfloat16()
    rounded, scale = nearest(module.weight.detach())
    expected = x.double() @ (rounded.double() * scale.double()[:, None]).T + module.bias.detach().double()
    assert (ours(ours.convert(x)) - expected).abs().max() < 0.01 * expected.abs().max()


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "olmo2", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize("quantization, share", [("int8", 0.12), ("int8-weight-only", 0.05)])
def test_a_quantised_model_stays_near_the_model(family, quantization, share):
    """Error against the float32 logits' spread; random weights have no outliers, so this bounds rounding alone."""
    reference = small_model(family)
    logits, sequences = logits_of(*make_forward(copy.deepcopy(reference), torch.float32, quantization=quantization))
    for ours, sequence in zip(logits, sequences, strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([sequence])).logits[0]
        # a row that is near two experts may go to the other one
        bound = 2 * share if family in {"mixtral", "qwen3_moe"} else share
        assert ((ours - expected).square().mean().sqrt() / expected.std()).item() < bound


def test_quantisation_is_refused_where_it_cannot_be_done():
    """Never silently in full precision: the error names the way out."""
    with pytest.raises(ModelError, match="use quantization none") as caught:
        make_forward(small_model("starcoder2"), torch.float32, quantization="int8")
    assert caught.value.param == "quantization"


def test_every_quantisation_of_the_config_has_a_recipe():
    for name in RECIPES:
        EngineConfig(model="any", quantization=name)
    assert RECIPES["int8"] == "w8a8-smoothquant0.5-hadamard512-gptq"
