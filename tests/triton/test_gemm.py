"""Scaled matrix products against exact integers and float32 torch."""

import dataclasses

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from batchinfer_kernels import fp8_gemm, int4_gemm, int8_gemm
from batchinfer_kernels.gemm_config import GemmConfig, clocks, gemm_config, shares_of
from tests.triton.checks import TOLERANCE, assert_rounded

EXPLORE = settings(max_examples=14, deadline=None, phases=(Phase.explicit, Phase.generate), derandomize=True)
F32, BF16 = torch.float32, torch.bfloat16
TINY = GemmConfig(16, 16, 32, 1, 4, 2, group_m=2)


def operands(m: int, n: int, k: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randint(-127, 128, (m, k), dtype=torch.int8, generator=generator),
        "w": torch.randint(-127, 128, (n, k), dtype=torch.int8, generator=generator),
        "a_scale": torch.rand(m, generator=generator) * 0.02,
        "w_scale": torch.rand(n, generator=generator) * 0.01,
    }


def extras(m: int, n: int, dtype: torch.dtype, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "bias": torch.randn(n, generator=generator).to(dtype),
        "residual": torch.randn(m, n, generator=generator).to(dtype),
    }


def test_the_oracle_sums_integers_exactly():
    given_operands = operands(3, 16, 4096)
    exact = given_operands["a"].long() @ given_operands["w"].long().T
    ones = {"a_scale": torch.ones(3), "w_scale": torch.ones(16)}
    assert torch.equal(int8_gemm.int8_gemm_reference(**(given_operands | ones)), exact.float())


@EXPLORE
@example(m=1, n=16, k=16, block_m=16, split_k=1, use_tma=False, with_extras=False, dtype=F32, seed=0)
@example(m=33, n=48, k=80, block_m=32, split_k=2, use_tma=False, with_extras=True, dtype=BF16, seed=1)
@given(
    m=st.integers(0, 40), n=st.sampled_from([16, 32, 48, 80]), k=st.sampled_from([16, 32, 64, 80, 144]),
    block_m=st.sampled_from([16, 32]), split_k=st.sampled_from([1, 2, 4]), use_tma=st.booleans(),
    with_extras=st.booleans(), dtype=st.sampled_from([F32, BF16, torch.float16]), seed=st.integers(0, 99),
)  # fmt: skip
def test_w8a8(m, n, k, block_m, split_k, use_tma, with_extras, dtype, seed):
    config = dataclasses.replace(TINY, block_m=block_m, split_k=split_k, use_tma=use_tma)
    options = operands(m, n, k, seed) | (extras(m, n, dtype, seed) if with_extras else {})
    out = int8_gemm.int8_gemm(**options, out_dtype=dtype, config=config)
    expected = int8_gemm.int8_gemm_reference(**options)
    if dtype == F32:
        assert torch.equal(out, expected)
    assert_rounded(out, expected, slack=1.01)


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 576, 576), (64, 192, 576), (130, 576, 192), (520, 1024, 256)])
def test_w8a8_in_the_configs_of_the_tables(arch, m, n, k):
    config = gemm_config(arch, m, n, k, torch.int8, is_exact=True)
    given_operands = operands(m, n, k)
    out = int8_gemm.int8_gemm(**given_operands, out_dtype=F32, config=config)
    assert torch.equal(out, int8_gemm.int8_gemm_reference(**given_operands))


def test_a_row_does_not_depend_on_its_batch_or_config():
    given_operands = operands(40, 64, 1024)
    whole = int8_gemm.int8_gemm(**given_operands)
    row = given_operands | {"a": given_operands["a"][7:8], "a_scale": given_operands["a_scale"][7:8]}
    for split_k in (1, 2, 4):
        assert torch.equal(int8_gemm.int8_gemm(**row, config=dataclasses.replace(TINY, split_k=split_k))[0], whole[7])


@EXPLORE
@example(m=5, n=48, k=144, programs=2, use_tma=False, with_extras=True, dtype=BF16, seed=0)
@example(m=33, n=32, k=64, programs=100, use_tma=True, with_extras=False, dtype=F32, seed=1)
@example(m=17, n=16, k=160, programs=4, use_tma=False, with_extras=True, dtype=F32, seed=2)
@given(
    m=st.integers(0, 40), n=st.sampled_from([16, 48, 80]), k=st.sampled_from([16, 64, 80, 144]),
    programs=st.integers(1, 13), use_tma=st.booleans(), with_extras=st.booleans(),
    dtype=st.sampled_from([F32, BF16]), seed=st.integers(0, 99),
)  # fmt: skip
def test_equal_shares_of_all_tiles_give_the_bits_of_one_program_a_tile(
    m, n, k, programs, use_tma, with_extras, dtype, seed
):
    """Shares that end in tiles, at their ends, hold several tiles, or are a part of one; fewer than programs."""
    config = dataclasses.replace(TINY, programs=programs, use_tma=use_tma)
    options = operands(m, n, k, seed) | (extras(m, n, dtype, seed) if with_extras else {})
    out = int8_gemm.int8_gemm(**options, out_dtype=dtype, config=config)
    assert torch.equal(out, int8_gemm.int8_gemm(**options, out_dtype=dtype, config=TINY))
    assert_rounded(out, int8_gemm.int8_gemm_reference(**options), slack=1.01)


def test_shares_of_three_tiles_by_hand():
    """Three tiles of 5 steps: in shares of 4 they are 4 + 1, 3 + 2 and 2 + 3 steps, in shares of 3 3 + 2, 1 + 3 + 1, 2 + 3."""
    given_operands = operands(16, 48, 160)
    expected = int8_gemm.int8_gemm_reference(**given_operands)
    for programs, shares in ((4, (4, 4)), (7, (3, 5))):
        shared = dataclasses.replace(TINY, programs=programs)
        assert shares_of(shared, 16, 48, 160) == shares
        out = int8_gemm.int8_gemm(**given_operands, out_dtype=F32, config=shared)
        assert torch.equal(out, expected), programs


def test_equal_shares_in_the_tiles_of_the_table():
    """An H100's tiles, among 5 programs: a share is 4 steps, a tile 10."""
    given_operands = operands(100, 256, 1264)
    config = dataclasses.replace(gemm_config(90, 128, 4096, 14336, torch.int8, is_exact=True), programs=5)
    assert (config.block_m, config.block_n, config.block_k, config.use_tma) == (128, 128, 128, True)
    out = int8_gemm.int8_gemm(**given_operands, out_dtype=F32, config=config)
    assert torch.equal(out, int8_gemm.int8_gemm_reference(**given_operands))


def test_sums_that_round_are_not_divided():
    given_operands = operands(3, 16, 64)
    a = torch.zeros(3, 64)
    with pytest.raises(ValueError, match="sums that round"):
        int8_gemm.int8_gemm(
            a, given_operands["w"], given_operands["w_scale"], config=dataclasses.replace(TINY, programs=2)
        )


def test_the_clocks_of_a_down_projection_by_hand():
    """128 x 4096 x 14336 on an H200: 32 tiles of 128 x 128, 112 steps of 128 deep, each of 512 clocks (2 * 128**3 / 8192).

    A program a tile: 112 * 512. Equal shares: 3584 steps are 28 an SM, of which 128 programs have one; the L2 gives 3584 *
    32 KiB at 24 * 132 bytes a clock, and takes and gives 127 + 32 partial tiles of 64 KiB; the second kernel is 3000.
    """
    plain = GemmConfig(128, 128, 128, 1, 8, 3)
    shared = dataclasses.replace(plain, programs=132)
    assert shares_of(shared, 128, 4096, 14336) == (28, 128)
    assert clocks(90, plain, 128, 4096, 14336) == 112 * 512
    by_hand = 3584 * 32768 / 3168 + 3000 + 159 * 2 * 65536 / 3168
    assert clocks(90, shared, 128, 4096, 14336) == pytest.approx(by_hand)
    assert by_hand < 112 * 512 * 7 / 8
    # 16 rows wait for 25 MB of weights at 19.9 * 132 bytes a clock, however they are divided: the split adds its shares
    few = GemmConfig(16, 64, 256, 1, 4, 4)
    loads = (6144 * 4096 + 16 * 4096 + 2 * 16 * 6144) / (19.9 * 132)
    assert clocks(90, few, 16, 6144, 4096) == pytest.approx(max(loads, 96 * 16 * 80 * 256 / 3168))


@pytest.mark.parametrize(
    ("arch", "m", "n", "k", "is_shared"),
    [
        (90, 128, 4096, 14336, True),  # 32 tiles on 132 SMs, deep
        (90, 128, 4096, 4096, False),  # as few, but partial sums are as much traffic as weights
        (90, 16, 6144, 4096, False),  # waits for the memory
        (90, 2048, 4096, 14336, False),  # 256 tiles
        (80, 256, 2048, 8192, True),
        (80, 256, 28672, 4096, False),
    ],
)
def test_the_table_shares_where_the_arithmetic_says_so(arch, m, n, k, is_shared):
    config = gemm_config(arch, m, n, k, torch.int8, is_exact=True)
    assert bool(config.programs) == is_shared
    if is_shared:
        assert config.split_k == 1
    assert not gemm_config(arch, m, n, k, torch.bfloat16, is_exact=False).programs


def test_a_row_of_zeros_is_the_bias_and_a_broken_row_is_nan():
    given_operands = operands(2, 16, 32) | {"bias": torch.arange(16.0)}
    given_operands["a"][0], given_operands["a_scale"] = 0, torch.tensor([0.0, float("nan")])
    out = int8_gemm.int8_gemm(**given_operands, out_dtype=F32, config=TINY)
    assert torch.equal(out[0], torch.arange(16.0))
    assert out[1].isnan().all()


def test_a_sum_at_the_end_of_int32_is_exact():
    """It is rounded once, when it becomes a float; sums kept in float32 would be rounded at each tile."""
    k = 2**17
    a = torch.full((1, k), 127, dtype=torch.int8)
    w = torch.randint(100, 128, (16, k), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    w[0] = 127
    config = dataclasses.replace(TINY, block_k=4096)
    out = int8_gemm.int8_gemm(a, w, torch.ones(16), a_scale=torch.ones(1), out_dtype=F32, config=config)
    assert torch.equal(out[0], (127 * w.long().sum(dim=1)).float())


def out_scale_for(exact: torch.Tensor, *, is_channels: bool) -> torch.Tensor:
    """A scale that two thirds of the numbers fit; the rest is held at the ends of INT8's range."""
    found = exact.abs().quantile(0.66, dim=0) if is_channels else exact.abs().flatten().quantile(0.66).reshape(1)
    return (found / 127).clamp(min=1e-6)


@EXPLORE
@example(m=3, n=48, k=80, split_k=1, is_channels=True, with_extras=True, dtype=BF16, seed=1)
@example(m=33, n=48, k=64, split_k=2, is_channels=False, with_extras=True, dtype=F32, seed=2)
@given(
    m=st.integers(1, 40), n=st.sampled_from([16, 48]), k=st.sampled_from([16, 64, 80]), split_k=st.sampled_from([1, 2]),
    is_channels=st.booleans(), with_extras=st.booleans(), dtype=st.sampled_from([F32, BF16]), seed=st.integers(0, 99),
)  # fmt: skip
def test_int8_results_are_torchs_fake_quantisation(m, n, k, split_k, is_channels, with_extras, dtype, seed):
    """After bias and residual, with a scale for all or one a channel; the oracle of the kernel says the same."""
    options = operands(m, n, k, seed) | (extras(m, n, dtype, seed) if with_extras else {})
    exact = int8_gemm.int8_gemm_reference(**options)
    scale = out_scale_for(exact, is_channels=is_channels)
    config = dataclasses.replace(TINY, split_k=split_k)
    out = int8_gemm.int8_gemm(**options, out_dtype=torch.int8, out_scale=scale, config=config)
    torchs = torch.fake_quantize_per_channel_affine(exact, scale.expand(n), torch.zeros(n), 1, -127, 127) / scale
    assert torch.equal(out, torchs.round().to(torch.int8))
    assert torch.equal(out, int8_gemm.int8_gemm_reference(**options, out_scale=scale))


def test_int8_results_round_to_even_and_have_no_nan():
    """Halves and a residual by hand; a broken row is zeros, a sum beyond the range is held, a channel of scale 0 is 0."""
    a = torch.tensor([[1, 0], [0, 127], [1, 1], [1, 1]], dtype=torch.int8).repeat_interleave(8, dim=1)
    w = torch.zeros(16, 16, dtype=torch.int8)
    w[:, 0] = torch.tensor([1, 3, 5, -1, -3, -5, 7, 0, *range(8)])
    w[:, 8] = 100
    a_scale = torch.tensor([1.0, 1.0, float("nan"), float("inf")])
    out_scale = torch.full((16,), 2.0)
    out_scale[6] = 0.0
    residual = torch.zeros(4, 16)
    residual[0, 7] = 8.0
    out = int8_gemm.int8_gemm(
        a, w, torch.ones(16), a_scale=a_scale, residual=residual, out_dtype=torch.int8, out_scale=out_scale, config=TINY
    )
    assert out[0, :8].tolist() == [0, 2, 2, 0, -2, -2, 0, 4], "halves go to the even neighbour"
    assert out[1].tolist() == [0 if column == 6 else 127 for column in range(16)]
    assert not out[2].any()
    assert out[3].tolist() == out[1].tolist()


@EXPLORE
@given(
    m=st.integers(0, 40), n=st.sampled_from([16, 48]), k=st.sampled_from([16, 80, 128]), with_extras=st.booleans(),
    dtype=st.sampled_from([F32, BF16, torch.float16]), seed=st.integers(0, 99),
)  # fmt: skip
def test_w8a16(m, n, k, with_extras, dtype, seed):
    given_operands = operands(m, n, k, seed)
    a = torch.randn(m, k, generator=torch.Generator().manual_seed(seed)).to(dtype)
    options = extras(m, n, dtype, seed) if with_extras else {}
    weights = (given_operands["w"], given_operands["w_scale"])
    out = int8_gemm.int8_gemm(a, *weights, out_dtype=dtype, config=TINY, **options)
    assert_rounded(out, int8_gemm.int8_gemm_reference(a, *weights, **options), slack=2.0)


@pytest.mark.parametrize("m", [3, 130])
def test_fp8(m):
    generator = torch.Generator().manual_seed(m)
    a, w = ((torch.randn(rows, 144, generator=generator) * 20).to(fp8_gemm.FP8) for rows in (m, 80))
    scales = torch.rand(m, generator=generator), torch.rand(80, generator=generator)
    for arch in (90, 100):
        config = gemm_config(arch, m, 80, 144, fp8_gemm.FP8, is_exact=False)
        out = fp8_gemm.fp8_gemm(a, w, *scales, **extras(m, 80, BF16), config=config)
        assert_rounded(out, fp8_gemm.fp8_gemm_reference(a, w, *scales, **extras(m, 80, BF16)), slack=2.0)


def test_int4_packing_keeps_weights_within_half_a_step():
    weights = torch.randn(16, 256, generator=torch.Generator().manual_seed(0))
    weights[3, 128:] = 0
    packed, scale = int4_gemm.pack_int4(weights)
    steps = scale.T.repeat_interleave(128, dim=1)
    assert packed.shape == (16, 128)
    assert ((int4_gemm.unpack_int4(packed, scale) - weights).abs() <= steps / 2 + 1e-6).all()


@EXPLORE
@given(
    m=st.integers(0, 40), n=st.sampled_from([16, 48, 80]), groups=st.integers(1, 3), with_bias=st.booleans(),
    dtype=st.sampled_from([F32, BF16, torch.float16]), seed=st.integers(0, 99),
)  # fmt: skip
def test_int4(m, n, groups, with_bias, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(m, 128 * groups, generator=generator).to(dtype)
    w = torch.randint(0, 256, (n, 64 * groups), dtype=torch.uint8, generator=generator)
    scale = torch.rand(groups, n, generator=generator)
    bias = torch.randn(n, generator=generator).to(dtype) if with_bias else None
    config = int4_gemm.Int4Config(16, 32, 4, 2)
    out = int4_gemm.int4_gemm(a, w, scale, bias=bias, config=config)
    torch.testing.assert_close(
        out.float(), int4_gemm.int4_gemm_reference(a, w, scale, bias=bias), rtol=TOLERANCE[dtype] * 2, atol=1e-3
    )


@pytest.mark.parametrize(("arch", "m"), [(80, 20), (90, 70)])
def test_int4_in_the_configs_of_the_table(arch, m):
    generator = torch.Generator().manual_seed(m)
    a = torch.randn(m, 256, generator=generator).bfloat16()
    packed = int4_gemm.pack_int4(torch.randn(144, 256, generator=generator))
    out = int4_gemm.int4_gemm(a, *packed, config=int4_gemm.int4_config(arch, m))
    assert_rounded(out, int4_gemm.int4_gemm_reference(a, *packed), slack=2.0)


@pytest.mark.parametrize(
    "shapes", [((2, 128), (16, 32), (1, 16)), ((2, 64), (16, 32), (1, 16)), ((2, 128), (16, 64), (2, 16))]
)
def test_int4_shapes_that_do_not_fit_are_refused(shapes):
    a, w, scale = shapes
    with pytest.raises(ValueError, match="must be"):
        int4_gemm.int4_gemm(torch.zeros(a), torch.zeros(w, dtype=torch.uint8), torch.zeros(scale))


def test_rows_of_a_wider_matrix():
    given_operands = operands(5, 16, 64)
    wide = torch.zeros(5, 128, dtype=torch.int8)
    wide[:, 64:] = given_operands["a"]
    out = int8_gemm.int8_gemm(**(given_operands | {"a": wide[:, 64:]}), out_dtype=F32, config=TINY)
    assert torch.equal(out, int8_gemm.int8_gemm_reference(**given_operands))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w": torch.zeros(16, 48, dtype=torch.int8)}, "same K"),
        ({"a": torch.zeros(2, 24, dtype=torch.int8), "w": torch.zeros(16, 24, dtype=torch.int8)}, "multiples of 16"),
        ({"w_scale": torch.zeros(8)}, "16 numbers"),
        ({"a_scale": None}, "int8 takes scales"),
        ({"residual": torch.zeros(16, 2)}, "residual"),
        ({"out_dtype": torch.int8}, "take a scale"),
        ({"out_scale": torch.ones(1)}, "take no scale"),
        ({"out_dtype": torch.int8, "out_scale": torch.ones(8)}, "one number or 16"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        int8_gemm.int8_gemm(**(operands(2, 16, 32) | change))
