"""Norms, activations, quantisation and the embedding."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from batchinfer_kernels.act_and_mul import act_and_mul_quantize_reference
from batchinfer_kernels.embedding import embedding_reference
from batchinfer_kernels.quantize import quantize_rows_reference
from batchinfer_kernels.reference import act_and_mul
from batchinfer_kernels.rms_norm import rms_norm_quantize_reference, rms_norm_reference
from benchmarks.gpu.case import BF16, FLOATS, I32, NAMES, Call, Case, Work, num_bytes, op, quantized, randn, rounded

if TYPE_CHECKING:
    from benchmarks.gpu.case import Sizes

EPS = 1e-5
ROTATION = 64


def rows_cases(sizes: Sizes) -> list[Case]:
    """All of them, for a prefill step's tokens."""
    m, n, mlp = sizes.tokens, sizes.hidden, sizes.mlp
    found = []
    for dtype in FLOATS:
        kind = NAMES[dtype]
        found += [
            Case("rms_norm", f"{kind} {m} x {n}", dtype, partial(_norm, m, n, dtype, False)),
            Case("rms_norm", f"{kind} {m} x {n}, residual", dtype, partial(_norm, m, n, dtype, True)),
            Case("rms_norm_quantize", f"{kind} {m} x {n}, residual, rotation", dtype, partial(_norm_quantize, m, n, dtype)),
            Case("act_and_mul", f"{kind} silu {m} x {mlp}", dtype, partial(_act, m, mlp, dtype, "silu")),
            Case("act_and_mul_quantize", f"{kind} silu {m} x {mlp}, rotation", dtype,
                 partial(_act_quantize, m, mlp, dtype, "silu", ROTATION)),
            Case("quantize_rows", f"{kind} {m} x {n}", dtype, partial(_quantize, m, n, dtype, 0)),
            Case("embedding", f"{kind} {m} of {sizes.vocab} x {n}", dtype, partial(_embedding, m, n, sizes.vocab, dtype)),
        ]  # fmt: skip
    return [
        *found,
        Case("act_and_mul", f"bf16 gelu {m} x {mlp}", BF16, partial(_act, m, mlp, BF16, "gelu_tanh")),
        Case(
            "act_and_mul_quantize", f"bf16 gelu {m} x {mlp}", BF16, partial(_act_quantize, m, mlp, BF16, "gelu_tanh", 0)
        ),
        Case("quantize_rows", f"bf16 {m} x {n}, rotation", BF16, partial(_quantize, m, n, BF16, ROTATION)),
    ]


def _norm(m: int, n: int, dtype: torch.dtype, has_residual: bool, device: torch.device) -> Call:
    x, weight = randn(device, m, n, dtype=dtype), randn(device, n, dtype=dtype, seed=1)
    residual = randn(device, m, n, dtype=dtype, seed=2) if has_residual else None
    first = None if residual is None else residual.clone()

    def run() -> list[torch.Tensor]:
        out = op("rms_norm")(x, weight, EPS, 0.0, residual)
        return [out] if residual is None else [out, residual]

    def expected() -> list[torch.Tensor]:
        out = rms_norm_reference(x, weight, EPS, residual=first)
        return [out] if first is None else [out, first.float()]

    def torchs() -> torch.Tensor:
        kept = x if first is None else first.add_(x)
        return functional.rms_norm(kept, (n,), weight, EPS)

    work = Work(num_bytes(x, x, weight, residual, residual))
    return Call(run, expected, rounded(), work, ("rms_norm" if first is None else "add, rms_norm", torchs))


def _norm_quantize(m: int, n: int, dtype: torch.dtype, device: torch.device) -> Call:
    x, weight, residual = (randn(device, *shape, dtype=dtype, seed=i) for i, shape in enumerate(((m, n), (n,), (m, n))))
    first, smoothing = residual.clone(), randn(device, n, seed=3).abs() + 0.1

    def run() -> list[torch.Tensor]:
        return [*op("rms_norm_quantize")(x, weight, EPS, 0.0, residual, smoothing, ROTATION), residual]

    def expected() -> list[torch.Tensor]:
        options = {"residual": first, "smoothing": smoothing, "rotation": ROTATION}
        return [*rms_norm_quantize_reference(x, weight, EPS, **options), first]

    work = Work(num_bytes(x, residual, residual, weight, smoothing) + m * n + 4 * m)
    return Call(run, expected, quantized, work)


def _act(m: int, n: int, dtype: torch.dtype, activation: str, device: torch.device) -> Call:
    x = randn(device, m, 2 * n, dtype=dtype)

    def torchs() -> torch.Tensor:
        gate, up = x.chunk(2, dim=1)
        act = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
        return act * up

    work = Work(num_bytes(x) * 1.5)
    run, expected = partial(op("act_and_mul"), x, activation), partial(act_and_mul, x, activation)
    return Call(run, expected, rounded(), work, ("silu, mul" if activation == "silu" else "gelu, mul", torchs))


def _act_quantize(m: int, n: int, dtype: torch.dtype, activation: str, rotation: int, device: torch.device) -> Call:
    x = randn(device, m, 2 * n, dtype=dtype)
    run = partial(op("act_and_mul_quantize"), x, activation, None, rotation)
    expected = partial(act_and_mul_quantize_reference, x, activation, rotation=rotation)
    return Call(run, expected, quantized, Work(num_bytes(x) + m * n + 4 * m))


def _quantize(m: int, n: int, dtype: torch.dtype, rotation: int, device: torch.device) -> Call:
    x, smoothing = randn(device, m, n, dtype=dtype), randn(device, n, seed=3).abs() + 0.1
    run = partial(op("quantize_rows"), x, smoothing, rotation)
    expected = partial(quantize_rows_reference, x, smoothing=smoothing, rotation=rotation)
    return Call(run, expected, quantized, Work(num_bytes(x, smoothing) + m * n + 4 * m))


def _embedding(m: int, n: int, vocab: int, dtype: torch.dtype, device: torch.device) -> Call:
    table = randn(device, vocab, n, dtype=dtype)
    ids = torch.randint(0, vocab, (m,), dtype=I32, device=device)
    ids[0] = -1  # another rank's
    ids[1] = vocab
    run = partial(op("embedding"), ids, table, 2.0, 0)
    expected = partial(embedding_reference, ids, table, scale=2.0)
    known = ids.clamp(0, vocab - 1)
    work = Work(2 * m * n * table.element_size() + num_bytes(ids))
    return Call(run, expected, rounded(), work, ("embedding", partial(functional.embedding, known, table)))
