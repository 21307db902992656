"""Which tiles a scaled matrix product takes, and who computes them: by arithmetic alone, as no value of a tensor is known."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import triton

from batchinfer_kernels.target import GFX942, LARGE_SHARED

if TYPE_CHECKING:
    import torch

NUM_SMS = {80: 108, 86: 84, 89: 142, 90: 132, 100: 148, 120: 170, GFX942: 304}
"""Of the largest part of each architecture: A100, A40, L40S, H100 and H200, B200, RTX 5090, MI300X."""
RATES = {
    80: (4096, 13.4), 86: (2048, 4.8), 89: (2048, 2.4), 90: (8192, 19.9), 100: (16384, 29.1), 120: (2048, 4.4), GFX942: (4096, 8.3),
}  # fmt: skip
"""Of the same parts (H200 for 90): an SM's INT8 operations a clock, and its share of the memory's bytes a clock. Data sheets."""
PORT_BYTES, L2_BYTES, LAUNCH_CLOCKS = 64, 24, 3000
"""What an SM takes in a clock, alone; what of that the L2 gives to each where all ask; what a second kernel costs, which
waits for the first to end. The last two are assumptions, in no data sheet and not measured: the first GPU is to tell."""
LEAST_SAVED = 1 / 8
"""Equal shares must save so much of the clocks: the arithmetic leaves out what is a few percent."""
MAX_SPLIT_K = 8


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """Compile-time choices. ``split_k`` programs share an output tile; ``use_tma`` loads through tensor descriptors.

    ``programs``: 0, or so many take equal shares of all tiles' depths (stream-K), one after another in a tile's depth and
    from tile to tile; ``split_k`` is 1 then. Both ways add parts of a tile's sums, so both are for exact sums only.
    """

    block_m: int
    block_n: int
    block_k: int
    split_k: int
    num_warps: int
    num_stages: int
    use_tma: bool = False
    group_m: int = 8
    programs: int = 0


@functools.lru_cache(maxsize=4096)
def gemm_config(
    arch: int, m: int, n: int, k: int, dtype: torch.dtype, *, is_exact: bool, has_epilogue: bool = False
) -> GemmConfig:
    """The config of ``[m, k] @ [n, k].T`` with activations of ``dtype``; a residual or an INT8 result is an epilogue.

    Few rows (decode) wait for the weights: narrow tiles keep every SM loading, and where a narrow matrix gives too few of
    them, programs share the depth if the sums are exact. Many rows (prefill) want the largest tile that fits. Between them
    large tiles are too few for the SMs: where :func:`clocks` says that it pays, an SM each takes an equal share of them all.
    """
    wide = dtype.itemsize == 1
    if m > 64:
        plain = _large_config(arch, m, n, wide=wide, is_plain=not has_epilogue and (arch == 90 or not is_exact))
    else:
        plain = _small_config(arch, m, n, k, wide=wide, is_exact=is_exact)
    return _best_shared(arch, plain, m, n, k) if is_exact else plain


def _small_config(arch: int, m: int, n: int, k: int, *, wide: bool, is_exact: bool) -> GemmConfig:
    block_m = 16 if m <= 16 else 32 if m <= 32 else 64
    block_n, block_k = (64, 256) if wide else (64, 128)
    num_tiles, num_sms = triton.cdiv(n, block_n), num_sms_of(arch)
    split_k = 1
    while is_exact and split_k < MAX_SPLIT_K and num_tiles * split_k <= num_sms and k >= 4 * split_k * block_k:
        split_k *= 2
    return GemmConfig(block_m, block_n, block_k, split_k, 4, 2 if arch == GFX942 else 4)


def _large_config(arch: int, m: int, n: int, *, wide: bool, is_plain: bool) -> GemmConfig:
    """``is_plain``: neither an epilogue nor, where Triton has only mma.sync for int8, its operands need more registers."""
    block_k = 128 if wide else 64
    if arch < 90 or not wide:
        big = m >= 256 and n >= 256
        return GemmConfig(128 if big else 64, 128, block_k, 1, 8 if big else 4, 3 if arch in LARGE_SHARED else 2)
    block_n = 256 if m >= 512 and n >= 1024 and is_plain else 128
    return GemmConfig(128, block_n, block_k, 1, 8, 3, use_tma=arch in (90, 100))


def _best_shared(arch: int, plain: GemmConfig, m: int, n: int, k: int) -> GemmConfig:
    """``plain``, or its tiles (128 columns at most: partial sums are memory traffic) in equal shares, an SM each."""
    shared = replace(plain, block_n=min(plain.block_n, 128), split_k=1, programs=num_sms_of(arch))
    saved = 1 - clocks(arch, shared, m, n, k) / clocks(arch, plain, m, n, k)
    return shared if saved >= LEAST_SAVED else plain


def num_sms_of(arch: int) -> int:
    """SMs that the tables reckon with."""
    return NUM_SMS.get(arch, NUM_SMS[80])


def shares_of(config: GemmConfig, m: int, n: int, k: int) -> tuple[int, int]:
    """Steps of depth that each program takes, and the number of programs: of ``programs``, as many as have a share."""
    steps = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n) * triton.cdiv(k, config.block_k)
    share = triton.cdiv(steps, config.programs)
    return share, triton.cdiv(steps, share)


def clocks(arch: int, config: GemmConfig, m: int, n: int, k: int) -> float:
    """Clocks that an INT8 product takes at the least, by the slowest of three: a model, for comparing configs.

    The SM with the most steps computes and loads them one after another; the L2 gives each step's operands to some SM; the
    memory gives weights and rows once, and takes results. Partial sums are written and read through the L2 by a second
    kernel that waits for the first.
    """
    num_sms, (operations, memory_bytes) = num_sms_of(arch), RATES.get(arch, RATES[80])
    c = config
    tiles, depth = triton.cdiv(m, c.block_m) * triton.cdiv(n, c.block_n), triton.cdiv(k, c.block_k)
    if c.programs:
        share, programs = shares_of(c, m, n, k)
        busiest = share * triton.cdiv(programs, num_sms)
        cuts = 0 if share % depth == 0 else programs - 1
        partial_tiles = cuts + min(cuts, tiles)
    else:
        busiest = triton.cdiv(depth, c.split_k) * triton.cdiv(tiles * c.split_k, num_sms)
        partial_tiles = tiles * c.split_k if c.split_k > 1 else 0
    step_bytes = (c.block_m + c.block_n) * c.block_k
    step = max(2 * c.block_m * c.block_n * c.block_k / operations, step_bytes / PORT_BYTES)
    main: float = max(
        busiest * step,
        tiles * depth * step_bytes / (L2_BYTES * num_sms),
        (n * k + m * k + 2 * m * n) / (memory_bytes * num_sms),
    )
    if not partial_tiles:
        return main
    partial_bytes = 2 * 4 * c.block_m * c.block_n * partial_tiles
    return main + LAUNCH_CLOCKS + float(partial_bytes / (L2_BYTES * num_sms))
