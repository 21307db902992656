"""The strict interpreter against torch, and each of its refusals."""

import pytest
import torch
import triton.language as tl
from triton.runtime.errors import InterpreterError

from batchinfer_kernels.jit import jit

SPECIAL = [0.0, -0.0, 1.0, 1.00390625, 1.01171875, 3.3895e38, 3.4e38, 1e-40, -1e-40, float("inf"), float("-inf")]


@jit()
def cast_kernel(source, target, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(target + at, tl.load(source + at).to(target.dtype.element_ty))


@jit()
def dot_kernel(
    a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr
):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left = tl.load(a + m[:, None] * K + k[None, :])
    right = tl.load(b + k[:, None] * N + n[None, :])
    tl.store(out + m[:, None] * N + n[None, :], tl.dot(left, right, out_dtype=ACC, input_precision=PRECISION))


@jit()
def int8_dot_into_floats_kernel(a, out, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(a + at)
    tl.store(out + at, tl.dot(x, x, acc=tl.zeros((N, N), tl.float32), out_dtype=tl.float32))


@jit()
def add_kernel(a, b, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(a + at) + tl.load(b + at))


@jit()
def masked_kernel(source, out, n, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(source + at, mask=at < n))


@jit()
def single_lane_kernel(x_ptr, out_ptr):
    i = tl.arange(0, 1)
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask=i > 0, other=0.0))
    tl.store(out_ptr + 1 + i, tl.load(x_ptr + i, mask=i > 0, other=7.0))
    tl.store(out_ptr + 2 + i, tl.load(x_ptr + i, mask=i > 0))


@jit()
def load_at_kernel(source, neighbour, out, offset):
    tl.store(out, tl.load(source + offset))


@jit()
def store_kernel(out, stride):
    tl.store(out + tl.program_id(0) * stride, 1.0)


@jit()
def sum_kernel(source, out, N: tl.constexpr):
    tl.store(out, tl.sum(tl.load(source + tl.arange(0, N)), axis=0))


def numbers(dtype: torch.dtype, n: int = 256) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(n, generator=generator) * torch.exp(torch.randn(n, generator=generator) * 8)
    values[: len(SPECIAL)] = torch.tensor(SPECIAL)
    return values.to(dtype)


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.float16])
def test_casts_round_as_torch_does(source, target):
    values = numbers(source)
    out = torch.empty(256, dtype=target)
    cast_kernel[(1,)](values, out, 256)
    assert torch.equal(out, values.to(target))


@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.float16])
def test_nan_stays_nan(target):
    values = torch.full((16,), float("nan"))
    out = torch.zeros(16, dtype=target)
    cast_kernel[(1,)](values, out, 16)
    assert out.isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_floats_become_the_integers_they_truncate_to(dtype):
    values = torch.tensor([-127.0, -1.5, -0.5, 0.0, 0.99, 1.0, 100.25, 126.0], dtype=dtype)
    out = torch.empty(8, dtype=torch.int8)
    cast_kernel[(1,)](values, out, 8)
    assert torch.equal(out, values.to(torch.int8))


def test_integers_become_the_nearest_bfloat16():
    values = torch.arange(-512, 512, dtype=torch.int32)
    out = torch.empty(1024, dtype=torch.bfloat16)
    cast_kernel[(1,)](values, out, 1024)
    assert torch.equal(out, values.bfloat16())


@pytest.mark.parametrize("value", [300.0, float("nan"), float("inf")])
def test_a_float_too_large_for_the_integer_is_refused(value):
    with pytest.raises(InterpreterError, match="cannot hold"):
        cast_kernel[(1,)](torch.full((16,), value), torch.empty(16, dtype=torch.int8), 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_dot_is_the_float32_product_of_its_operands(dtype):
    a, b = torch.randn(16, 32).to(dtype), torch.randn(32, 16).to(dtype)
    out = torch.empty(16, 16)
    dot_kernel[(1,)](a, b, out, 16, 16, 32, tl.float32, "ieee")
    torch.testing.assert_close(out, (a.double() @ b.double()).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("k", [32, 2048])
def test_an_integer_dot_is_exact(k):
    a = torch.randint(-127, 128, (16, k), dtype=torch.int8)
    b = torch.full((k, 16), 127, dtype=torch.int8)
    out = torch.empty(16, 16, dtype=torch.int32)
    dot_kernel[(1,)](a, b, out, 16, 16, k, tl.int32, "ieee")
    assert torch.equal(out.long(), a.long() @ b.long())


def test_an_integer_dot_that_adds_up_in_floats_is_refused():
    with pytest.raises(InterpreterError, match="int32"):
        int8_dot_into_floats_kernel[(1,)](torch.zeros(32, 32, dtype=torch.int8), torch.empty(32, 32), 32)


def test_a_float32_dot_that_would_use_tf32_is_refused():
    with pytest.raises(InterpreterError, match="tf32"):
        dot_kernel[(1,)](torch.randn(16, 16), torch.randn(16, 16), torch.empty(16, 16), 16, 16, 16, tl.float32, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_arithmetic_in_half_precision_is_refused(dtype):
    a = torch.ones(16, dtype=dtype)
    with pytest.raises(InterpreterError, match="cast to float32"):
        add_kernel[(1,)](a, a, torch.empty(16, dtype=dtype), 16)
    with pytest.raises(InterpreterError, match="cast to float32"):
        sum_kernel[(1,)](a, torch.empty(1, dtype=dtype), 16)


def test_int32_that_wraps_is_refused_and_int64_is_not():
    a = torch.full((16,), 2**30, dtype=torch.int32)
    with pytest.raises(InterpreterError, match="OverflowError"):
        add_kernel[(1,)](a, a, torch.empty(16, dtype=torch.int32), 16)
    out = torch.empty(16, dtype=torch.int64)
    add_kernel[(1,)](a.long(), a.long(), out, 16)
    assert (out == 2**31).all()


@pytest.mark.parametrize(
    ("dtype", "poison"),
    [(torch.float32, float("nan")), (torch.bfloat16, float("nan")), (torch.int32, 2**31 - 1), (torch.int8, 127)],
)
def test_masked_lanes_without_other_are_poison(dtype, poison):
    out = torch.zeros(16, dtype=dtype)
    masked_kernel[(1,)](torch.ones(16, dtype=dtype), out, 5, 16)
    assert torch.equal(out[:5], torch.ones(5, dtype=dtype))
    torch.testing.assert_close(out[5:], torch.full((11,), poison, dtype=dtype), equal_nan=True)


def test_a_single_masked_lane_keeps_the_zero_that_it_was_given():
    """The stock interpreter takes a zero that is alone for nothing."""
    out = torch.full((3,), 5.0)
    single_lane_kernel[(1,)](torch.ones(1), out)
    assert torch.equal(out[:2], torch.tensor([0.0, 7.0]))
    assert out[2].isnan()


@pytest.mark.parametrize("offset", [-1, 8, 9])
def test_an_access_outside_of_its_own_tensor_is_refused(offset):
    """Even where another argument of the launch lies."""
    memory = torch.zeros(24)
    with pytest.raises(InterpreterError, match="load out of bounds"):
        load_at_kernel[(1,)](memory[8:16], memory, torch.empty(1), offset)
    load_at_kernel[(1,)](memory[8:16], memory, torch.empty(1), 7)


def test_a_view_ends_where_its_last_element_does():
    view = torch.zeros(8, 8)[:, :4]
    load_at_kernel[(1,)](view, view, torch.empty(1), 7 * 8 + 3)
    with pytest.raises(InterpreterError, match="out of bounds"):
        load_at_kernel[(1,)](view, view, torch.empty(1), 7 * 8 + 4)


def test_programs_that_store_to_the_same_address_are_refused():
    store_kernel[(4,)](torch.empty(4), 1)
    with pytest.raises(RuntimeError, match="race"):
        store_kernel[(4,)](torch.empty(4), 0)
