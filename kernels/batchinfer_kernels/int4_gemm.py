"""INT4 linears (W4A16): weights of four bits, a scale for each channel and 128 numbers of its depth."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from batchinfer_kernels.jit import jit
from batchinfer_kernels.target import LARGE_SHARED, target_arch

GROUP = 128
"""Numbers along K that share a scale, and the depth of a tile."""
ZERO = 8
"""The stored value of a weight of zero: weights are -8 .. 7."""


@dataclass(frozen=True, slots=True)
class Int4Config:
    """Compile-time choices."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def int4_config(arch: int, m: int) -> Int4Config:
    """Few rows wait for the weights, half a byte each; many rows want a larger tile."""
    num_stages = 4 if arch in LARGE_SHARED else 2
    if m <= 64:
        return Int4Config(16 if m <= 16 else 32 if m <= 32 else 64, 64, 4, num_stages)
    return Int4Config(64, 128, 8, 3 if num_stages == 4 else 2)


# program (j, i) owns the tile of rows i and columns j
@jit(do_not_specialize=["m"])
def _int4_gemm_kernel(
    a_ptr: tl.tensor, a_stride: tl.tensor, w_ptr: tl.tensor, scale_ptr: tl.tensor, bias_ptr: tl.tensor, out_ptr: tl.tensor,
    m: tl.tensor, n: tl.tensor, k: tl.tensor, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
) -> None:  # fmt: skip
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = rows < m, columns < n
    a_at = a_ptr + rows.to(tl.int64)[:, None] * a_stride + tl.arange(0, GROUP)[None, :]
    w_at = w_ptr + columns.to(tl.int64)[:, None] * (k // 2) + tl.arange(0, GROUP // 2)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for group in range(k // GROUP):
        a = tl.load(a_at + group * GROUP, mask=is_row[:, None], other=0.0)
        pairs = tl.load(w_at + group * (GROUP // 2), mask=is_column[:, None], other=0).to(tl.int32)
        both = tl.join((pairs & 15) - 8, (pairs >> 4) - 8)  # the low half is the even place
        w = tl.reshape(both, (BLOCK_N, GROUP)).to(a.dtype)
        # scales lie group by group, so that a tile's are together
        scale = tl.load(scale_ptr + group * n + columns, mask=is_column, other=0.0)
        acc += tl.dot(a, tl.trans(w), input_precision="ieee") * scale[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    at = rows[:, None].to(tl.int64) * n + columns[None, :]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def int4_gemm(
    a: torch.Tensor,
    w: torch.Tensor,
    scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    config: Int4Config | None = None,
) -> torch.Tensor:
    """``a [M, K]`` (bfloat16, float16 or float32) times INT4 weights: ``[M, N]`` in the type of ``a``.

    ``w [N, K / 2]`` is uint8, two weights a byte, each plus 8, the even place in the low half; ``scale [K / 128, N]`` is
    float32 (see :func:`pack_int4`). Moves ``N * K / 2`` bytes of weights.
    """
    (m, k), n = a.shape, w.shape[0]
    if w.dtype != torch.uint8 or w.shape[1] * 2 != k or not w.is_contiguous() or k % GROUP:
        raise ValueError(f"w {tuple(w.shape)} {w.dtype} must be uint8 [N, {k} / 2], and K a multiple of {GROUP}")
    if tuple(scale.shape) != (k // GROUP, n) or not scale.is_contiguous() or n % 16:
        raise ValueError(f"scale {tuple(scale.shape)} must be [{k // GROUP}, {n}], and N a multiple of 16")
    if a.stride(1) != 1 or a.stride(0) % 16:
        raise ValueError(f"a at strides {a.stride()}: rows must be contiguous, at multiples of 16")
    out = torch.empty(m, n, dtype=a.dtype, device=a.device)
    if m:
        c = config or int4_config(target_arch(), m)
        _int4_gemm_kernel[triton.cdiv(n, c.block_n), triton.cdiv(m, c.block_m)](
            a, a.stride(0), w, scale, bias, out, m, n, k, c.block_m, c.block_n, GROUP,
            num_warps=c.num_warps, num_stages=c.num_stages,
        )  # fmt: skip
    return out


def pack_int4(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise ``weights [N, K]``: packed uint8 ``[N, K / 2]`` and scales ``[K / 128, N]``; a group of zeros has scale 0."""
    n, k = weights.shape
    groups = weights.float().view(n, k // GROUP, GROUP)
    scale = groups.abs().amax(dim=2) / 7
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    stored = ((groups * inverse[:, :, None]).round().clamp(-8, 7) + ZERO).to(torch.uint8).view(n, k)
    return stored[:, ::2] | stored[:, 1::2] << 4, scale.T.contiguous()


def unpack_int4(w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The weights ``[N, K]`` in float32 that :func:`int4_gemm` multiplies by."""
    n = len(w)
    numbers = torch.stack((w & 15, w >> 4), dim=2).view(n, -1).float() - ZERO
    return numbers * scale.T.repeat_interleave(GROUP, dim=1)


def int4_gemm_reference(
    a: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, *, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """:func:`int4_gemm` in plain torch and float32."""
    out = a.float() @ unpack_int4(w, scale).T
    return out if bias is None else out + bias.float()
