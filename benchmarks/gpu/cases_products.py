"""Matrix products: INT8, FP8, INT4, grouped over experts."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from batchinfer_kernels.fp8_gemm import FP8, fp8_gemm_reference
from batchinfer_kernels.grouped_gemm import combine_experts_reference, grouped_gemm_reference
from batchinfer_kernels.int4_gemm import int4_gemm_reference, pack_int4
from batchinfer_kernels.int8_gemm import int8_gemm_reference
from batchinfer_kernels.lora import LoraRows, lora_add_reference, padded_offsets
from batchinfer_kernels.reference import quantize_rows
from batchinfer_kernels.routing import Routing, route
from benchmarks.gpu.case import (
    BF16,
    F16,
    F32,
    FLOATS,
    I8,
    NAMES,
    Call,
    Case,
    UnsupportedError,
    Work,
    int8s,
    num_bytes,
    op,
    quantized,
    randn,
    rounded,
)

if TYPE_CHECKING:
    from benchmarks.gpu.case import Sizes

W8A8_GOAL = 0.7
W8A8_GOAL_ROWS = 2048
SUMS = {BF16: 1e-3, F16: 1e-3, F32: 1e-4}
"""Tolerance of sums' order, in root mean squares of the results: tensor cores keep a little less than float32."""
FP8_SUMS = 2e-2
"""On sm_90 the tensor cores add FP8 products in some 14 bits."""


def product_cases(sizes: Sizes) -> list[Case]:
    """The products of a decode step and of prefill steps, of a wide and of a deep matrix."""
    found = []
    wide, deep = (2 * sizes.mlp, sizes.hidden), (sizes.hidden, sizes.mlp)
    for m in (sizes.rows, *sizes.many):
        for n, k in (wide, deep):
            goal = W8A8_GOAL if m >= W8A8_GOAL_ROWS else None
            shape = f"{m} x {n} x {k}"
            found.append(Case("int8_gemm", f"w8a8 {shape}", I8, partial(_w8a8, m, n, k, False), goal))
            found.append(Case("fp8_gemm", f"fp8 {shape}", FP8, partial(_fp8, m, n, k)))
    m, (n, k) = sizes.many[0], deep
    found.append(Case("int8_gemm", f"w8a8 {m} x {n} x {k}, bias, residual", I8, partial(_w8a8, m, n, k, True)))
    between = 2 * sizes.rows  # few tiles and a deep product: where the tables divide it evenly over the SMs
    found.append(Case("int8_gemm", f"w8a8 {between} x {n} x {k}", I8, partial(_w8a8, between, n, k, False)))
    found.append(Case("int8_gemm", f"w8a8 {m} x {n} x {k}, bias, int8 result", I8, partial(_w8a8_int8, m, n, k)))
    for dtype in FLOATS:
        for m in (sizes.rows, sizes.many[0]):
            shape = f"{m} x {n} x {k}"
            found.append(Case("int8_gemm", f"w8a16 {NAMES[dtype]} {shape}", dtype, partial(_w8a16, m, n, k, dtype)))
            found.append(Case("int4_gemm", f"w4a16 {NAMES[dtype]} {shape}", dtype, partial(_int4, m, n, k, dtype)))
    for dtype in FLOATS:
        build = partial(_lora, sizes, dtype)
        found.append(Case("lora_add", f"{NAMES[dtype]} 4 adapters of 16, {sizes.rows} x {n} x {k}", dtype, build))
    return found + _expert_cases(sizes)


def _expert_cases(sizes: Sizes) -> list[Case]:
    num_experts, top_k, n, k = sizes.experts
    found = []
    for tokens in sizes.expert_tokens:
        shape = f"{num_experts} experts, {tokens} x {top_k} tokens"
        for dtype in (BF16, F16, F32, I8):
            for gather in (True, False):
                way = "gather" if gather else "scatter"
                build = partial(_grouped, sizes, tokens, dtype, gather)
                found.append(Case("grouped_gemm", f"{NAMES[dtype]} {way} {n} x {k}, {shape}", dtype, build))
    tokens = sizes.expert_tokens[-1]
    for dtype in FLOATS:
        build = partial(_combine, tokens, top_k, k, dtype)
        found.append(Case("combine_experts", f"{NAMES[dtype]} {tokens} x {top_k} x {k}", dtype, build))
    return found


def _unit(dtype: torch.dtype) -> str | None:
    """Float32 products are exact to the bit and take no matrix unit of the table."""
    return {BF16: "bf16", F16: "bf16", I8: "int8"}.get(dtype)


def _w8a8(m: int, n: int, k: int, has_extras: bool, device: torch.device) -> Call:
    a, w = int8s(device, m, k), int8s(device, n, k, seed=1)
    a_scale, w_scale = (torch.rand(size, device=device) * 1e-3 for size in (m, n))
    bias = randn(device, n, dtype=BF16) if has_extras else None
    residual = randn(device, m, n, dtype=BF16) if has_extras else None
    run = partial(op("int8_gemm"), a, w, w_scale, BF16, a_scale, bias, residual)
    expected = partial(int8_gemm_reference, a, w, w_scale, a_scale=a_scale, bias=bias, residual=residual)
    work = Work(num_bytes(a, w, a_scale, w_scale, bias, residual) + 2 * m * n, 2.0 * m * n * k, "int8")
    return Call(run, expected, rounded(), work, ("_int_mm", partial(torch._int_mm, a, w.t())))  # noqa: SLF001 -- torch has no other


def _w8a8_int8(m: int, n: int, k: int, device: torch.device) -> Call:
    """With results that the next product takes as they are, a scale a channel; some are beyond the range."""
    a, w = int8s(device, m, k), int8s(device, n, k, seed=1)
    a_scale, w_scale = (torch.rand(size, device=device) * 1e-3 for size in (m, n))
    bias = randn(device, n, dtype=BF16)
    out_scale = torch.full((n,), 0.01, device=device)
    run = partial(op("int8_gemm"), a, w, w_scale, I8, a_scale, bias, None, out_scale)
    expected = partial(int8_gemm_reference, a, w, w_scale, a_scale=a_scale, bias=bias, out_scale=out_scale)
    work = Work(num_bytes(a, w, a_scale, w_scale, bias, out_scale) + m * n, 2.0 * m * n * k, "int8")
    return Call(run, expected, quantized, work, ("_int_mm", partial(torch._int_mm, a, w.t())))  # noqa: SLF001 -- torch has no other


def _w8a16(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> Call:
    a, w, w_scale = randn(device, m, k, dtype=dtype), int8s(device, n, k), torch.rand(n, device=device) * 1e-3
    run = partial(op("int8_gemm"), a, w, w_scale, dtype)
    expected = partial(int8_gemm_reference, a, w, w_scale)
    work = Work(num_bytes(a, w, w_scale) + m * n * dtype.itemsize, 2.0 * m * n * k, _unit(dtype))
    plain = w.to(dtype)
    return Call(run, expected, rounded(sums=SUMS[dtype]), work, ("linear", partial(functional.linear, a, plain)))


def _lora(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Call:
    """A decode step's rows in turn over four adapters; what is timed adds again and again."""
    m, n, k, rank, count = sizes.rows, sizes.hidden, sizes.mlp, 16, 4
    x, first = randn(device, m, k, dtype=dtype), randn(device, m, n, dtype=dtype, seed=1)
    downs = [randn(device, rank, k, dtype=dtype, scale=k**-0.5, seed=2 + i) for i in range(count)]
    ups = [randn(device, n, rank, dtype=dtype, seed=9 + i) for i in range(count)]
    order = torch.tensor([row for i in range(count) for row in range(i, m, count)], dtype=torch.int32, device=device)
    offsets = padded_offsets([len(range(i, m, count)) for i in range(count)])
    rows = LoraRows(order, torch.tensor(offsets, dtype=torch.int32, device=device))
    addresses = [torch.tensor([each.data_ptr() for each in matrices], device=device) for matrices in (downs, ups)]
    ranks, out = torch.full((count,), rank, device=device), first.clone()

    def run() -> torch.Tensor:
        op("lora_add")(out, x, rows.order, rows.offsets, *addresses, ranks, rank, dtype)
        return out

    work = Work(num_bytes(x, *downs, *ups) + 2 * num_bytes(out), 2.0 * m * rank * (k + n), _unit(dtype))
    expected = partial(lora_add_reference, first, x, rows, list(zip(downs, ups, strict=True)))
    torchs = partial(functional.linear, x, downs[0])
    # what is rounded between the products may fall to either side
    return Call(run, expected, rounded(sums=10 * SUMS[dtype]), work, ("one adapter's first product", torchs))


def _fp8(m: int, n: int, k: int, device: torch.device) -> Call:
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 9):
        raise UnsupportedError("FP8 units came with sm_89")
    if torch.version.hip is not None:
        raise UnsupportedError("this GPU's FP8 has other numbers than e4m3fn")
    a, w = randn(device, m, k).to(FP8), randn(device, n, k, seed=1).to(FP8)
    a_scale, w_scale = (torch.rand(size, device=device) for size in (m, n))
    run = partial(op("fp8_gemm"), a, w, a_scale, w_scale, BF16)
    expected = partial(fp8_gemm_reference, a, w, a_scale, w_scale)
    work = Work(num_bytes(a, w, a_scale, w_scale) + 2 * m * n, 2.0 * m * n * k, "fp8")
    torchs = partial(
        torch._scaled_mm, a, w.t(), scale_a=a_scale[:, None], scale_b=w_scale[None, :], out_dtype=BF16  # noqa: SLF001 -- as above
    )  # fmt: skip
    return Call(run, expected, rounded(sums=FP8_SUMS), work, ("_scaled_mm", torchs))


def _int4(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> Call:
    a, plain = randn(device, m, k, dtype=dtype), randn(device, n, k, seed=1)
    w, scale = pack_int4(plain)
    plain = plain.to(dtype)
    run, expected = partial(op("int4_gemm"), a, w, scale), partial(int4_gemm_reference, a, w, scale)
    work = Work(num_bytes(a, w, scale) + m * n * dtype.itemsize, 2.0 * m * n * k, _unit(dtype))
    return Call(run, expected, rounded(sums=SUMS[dtype]), work, ("linear", partial(functional.linear, a, plain)))


def _routing(tokens: int, sizes: Sizes, device: torch.device) -> Routing:
    num_experts, top_k, _, _ = sizes.experts
    return route(randn(device, tokens, num_experts, seed=5), top_k)


def _grouped(sizes: Sizes, tokens: int, dtype: torch.dtype, gather: bool, device: torch.device) -> Call:
    """Gathered, as into the experts; or scattered, as out of them."""
    num_experts, top_k, n, k = sizes.experts
    sent = _routing(tokens, sizes, device)
    num_rows = tokens if gather else tokens * top_k
    plain_a, plain_w = randn(device, num_rows, k), randn(device, num_experts, n, k, seed=1)
    a_scale = w_scale = None
    if dtype == I8:
        (a, a_scale), (flat, scales) = quantize_rows(plain_a), quantize_rows(plain_w.flatten(0, 1))
        w, w_scale = flat.view_as(plain_w), scales.view(num_experts, n)
    else:
        a, w = plain_a.to(dtype), plain_w.to(dtype)
    del plain_w
    out_dtype = BF16 if dtype == I8 else dtype
    run = partial(
        op("grouped_gemm"),
        a,
        w,
        sent.weights,
        sent.order,
        sent.offsets,
        gather,
        not gather,
        out_dtype,
        a_scale,
        w_scale,
    )
    expected = partial(
        grouped_gemm_reference, a, w, sent, gather=gather, scatter=not gather, a_scale=a_scale, w_scale=w_scale
    )
    used = int((sent.offsets.diff() > 0).sum()) / num_experts
    moved = num_bytes(a, a_scale) + num_bytes(w, w_scale) * used + tokens * top_k * n * out_dtype.itemsize
    work = Work(moved, 2.0 * tokens * top_k * n * k, _unit(dtype))
    return Call(run, expected, rounded(sums=0.0 if dtype == I8 else SUMS[dtype]), work)


def _combine(tokens: int, top_k: int, n: int, dtype: torch.dtype, device: torch.device) -> Call:
    y, residual = randn(device, tokens * top_k, n, dtype=dtype), randn(device, tokens, n, dtype=dtype, seed=1)
    weights = torch.rand(tokens, top_k, device=device)
    run = partial(op("combine_experts"), y, weights, dtype, residual)
    expected = partial(combine_experts_reference, y, weights, residual=residual)

    def torchs() -> torch.Tensor:
        return torch.baddbmm(residual[:, None], weights.to(dtype)[:, None], y.view(tokens, top_k, n))

    return Call(run, expected, rounded(), Work(num_bytes(y, weights, residual, residual)), ("baddbmm", torchs))
