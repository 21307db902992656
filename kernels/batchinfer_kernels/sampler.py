"""Sampling on the GPU: the draw of the CPU's sampler, by integer weights and a number that depends on (seed, position).

A token's weight is ``round(2**40 * exp((logit - largest) / temperature))``: sums of integers do not depend on the order in
which a GPU adds. One number of Philox, times the weights' sum, falls into one token's share. The CPU's sampler says the
same in torch; where the two compute the last bit of an exponential differently, a share ends up to 1e-7 of the mass
elsewhere, and a draw that falls into that gap differs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl

from batchinfer_kernels.jit import jit

BLOCK = 4096
"""Logits a program holds at once; a power of two."""


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """What each row asks for; tensors ``[num_rows]``.

    ``temperature`` float32 (0: greedy), ``top_k`` int32 (0: all), ``top_p`` and ``min_p`` float64 (1 and 0: off), ``seed``
    int64 and ``position`` int32, the number of tokens the row has generated so far.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor


@jit()
def stretch_of(row_ptr: tl.tensor, start: tl.tensor, n: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """A stretch of a row's logits in float32, -inf beyond its end."""
    at = start + tl.arange(0, BLOCK)
    return tl.load(row_ptr + at, mask=at < n, other=float("-inf")).to(tl.float32)


@jit()
def peak_and_mass(row_ptr: tl.tensor, n: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """The largest logit, its first place, the sum of exponentials relative to it, and whether all of that is finite."""
    peak, place, total, broken = float("-inf"), 0, 0.0, 0
    for start in range(0, n, BLOCK):
        x = stretch_of(row_ptr, start, n, BLOCK)
        broken += tl.max(tl.where(tl.abs(x) <= float("inf"), 0, 1), axis=0)  # NaN compares false
        best, index = tl.max(x, axis=0, return_indices=True, return_indices_tie_break_left=True)
        place = tl.where(best > peak, start + index, place)
        higher = tl.maximum(peak, best)
        safe = tl.where(tl.abs(higher) < float("inf"), higher, 0.0)
        total = total * tl.exp(tl.where(peak < higher, peak - safe, 0.0)) + tl.sum(tl.exp(x - safe), axis=0)
        peak = higher
    return peak, place, total, (broken == 0) & (tl.abs(peak) < float("inf"))


@jit()
def _ordered(x: tl.tensor) -> tl.tensor:
    """Integers in the order of the floats (int64, in the range of int32)."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@jit()
def _from_ordered(order: tl.tensor) -> tl.tensor:
    """The float of an ordered integer."""
    bits = order.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit()
def _weight(relative: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """The integer weight of a logit that is ``relative`` to the largest."""
    share = tl.exp(tl.div_rn(relative, temperature)) * 1099511627776.0  # 2**40
    # from 2**23 on a float32 has no fraction; below, adding 2**23 rounds it away, to even
    return tl.where(share < 8388608.0, (share + 8388608.0) - 8388608.0, share).to(tl.int64)


@jit()
def _masses_from(
    row_ptr: tl.tensor, n: tl.tensor, floor: tl.tensor, step: tl.tensor, peak: tl.tensor, temperature: tl.tensor,
    COUNT: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """How many logits, or what weights, are at or above one, two and three steps over ``floor``."""
    first, second, third = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    for start in range(0, n, BLOCK):
        relative = stretch_of(row_ptr, start, n, BLOCK) - peak
        at = _ordered(relative)
        weight = (at * 0 + 1) if COUNT else _weight(relative, temperature)
        first += tl.sum(tl.where(at >= floor + step, weight, 0), axis=0)
        second += tl.sum(tl.where(at >= floor + 2 * step, weight, 0), axis=0)
        third += tl.sum(tl.where(at >= floor + 3 * step, weight, 0), axis=0)
    return first, second, third


@jit()
def _highest_floor(
    row_ptr: tl.tensor, n: tl.tensor, goal: tl.tensor, peak: tl.tensor, temperature: tl.tensor, COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The highest floor (an ordered integer) whose count or weight reaches ``goal`` (float64), two bits at a time."""
    floor = tl.full((), -2147483648, tl.int64)
    for i in range(16):
        step = tl.full((), 1, tl.int64) << (30 - 2 * i)
        first, second, third = _masses_from(row_ptr, n, floor, step, peak, temperature, COUNT, BLOCK)
        reached = (first.to(tl.float64) >= goal).to(tl.int64) + (second.to(tl.float64) >= goal).to(tl.int64)
        floor += step * (reached + (third.to(tl.float64) >= goal).to(tl.int64))
    return floor


@jit()
def _kept_weight(
    row_ptr: tl.tensor, start: tl.tensor, n: tl.tensor, peak: tl.tensor, temperature: tl.tensor, floor: tl.tensor, least: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Weights of a stretch, 0 where the filters leave a token out."""
    relative = stretch_of(row_ptr, start, n, BLOCK) - peak
    weight = _weight(relative, temperature)
    return tl.where((_ordered(relative) >= floor) & (weight >= least), weight, 0)


@jit()
def _total_weight(
    row_ptr: tl.tensor, n: tl.tensor, peak: tl.tensor, temperature: tl.tensor, floor: tl.tensor, least: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:  # fmt: skip
    total = tl.full((), 0, tl.int64)
    for start in range(0, n, BLOCK):
        total += tl.sum(_kept_weight(row_ptr, start, n, peak, temperature, floor, least, BLOCK), axis=0)
    return total


@jit()
def _draw(
    row_ptr: tl.tensor, n: tl.tensor, peak: tl.tensor, temperature: tl.tensor, floor: tl.tensor, least: tl.tensor, uniform: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The token into whose share of the weights ``uniform`` of [0, 1) falls."""
    total = _total_weight(row_ptr, n, peak, temperature, floor, least, BLOCK)
    target = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
    passed, before, found = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64), 0
    for start in range(0, n, BLOCK):
        share = tl.sum(_kept_weight(row_ptr, start, n, peak, temperature, floor, least, BLOCK), axis=0)
        is_here = (passed <= target) & (target < passed + share)
        before = tl.where(is_here, passed, before)
        found = tl.where(is_here, start, found)
        passed += share
    cumulative = before + tl.cumsum(_kept_weight(row_ptr, found, n, peak, temperature, floor, least, BLOCK), axis=0)
    return found + tl.sum((cumulative <= target).to(tl.int32), axis=0)


@jit()
def _uniform(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """53 random bits of (seed, position) as a float64 of [0, 1)."""
    high, low, _, _ = tl.philox(seed, position, position * 0, position * 0, position * 0)
    bits = (high.to(tl.int64) << 21) ^ (low.to(tl.int64) >> 11)
    return (bits & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16  # 2**-53


# one program owns one row
@jit()
def _sample_kernel(
    logits_ptr: tl.tensor, stride: tl.tensor, temperature_ptr: tl.tensor, top_k_ptr: tl.tensor, top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor, seed_ptr: tl.tensor, position_ptr: tl.tensor, token_ptr: tl.tensor, logprob_ptr: tl.tensor, n: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * stride
    peak, token, mass, is_finite = peak_and_mass(row_ptr, n, BLOCK)
    asked = tl.load(temperature_ptr + row)
    if (asked > 0.0) & is_finite:
        temperature = tl.maximum(asked, 1e-30)
        floor, least = tl.full((), -2147483648, tl.int64), tl.full((), 1, tl.int64)
        top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
        if (top_k > 0) & (top_k < n):
            floor = _highest_floor(row_ptr, n, top_k.to(tl.float64), peak, temperature, True, BLOCK)
        if top_p < 1.0:
            goal = _total_weight(row_ptr, n, peak, temperature, floor, least, BLOCK).to(tl.float64) * top_p
            last = _highest_floor(row_ptr, n, goal, peak, temperature, False, BLOCK)
            # what weighs as much as the last one kept is kept
            least = tl.maximum(least, _weight(_from_ordered(last), temperature))
        bound = tl.load(min_p_ptr + row) * 1099511627776.0
        whole = bound.to(tl.int64)
        least = tl.maximum(least, whole + (whole.to(tl.float64) < bound).to(tl.int64))
        uniform = _uniform(tl.load(seed_ptr + row).to(tl.uint64, bitcast=True), tl.load(position_ptr + row))
        token = _draw(row_ptr, n, peak, temperature, floor, least, uniform, BLOCK)
    chosen = tl.load(row_ptr + token).to(tl.float32)
    tl.store(token_ptr + row, tl.where(is_finite, token, -1))
    tl.store(logprob_ptr + row, tl.where(is_finite, chosen - peak - tl.log(mass), float("nan")))


def check_logits(logits: torch.Tensor) -> None:
    """Raise ValueError where a kernel could not load vectors of a row."""
    if logits.ndim != 2 or logits.stride(1) != 1 or logits.stride(0) % 16:
        raise ValueError(f"logits at strides {logits.stride()}: rows must be contiguous, at multiples of 16")


def sample(logits: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token a row from ``logits [num_rows, vocab]``: int32 ``[num_rows]``, and the logits' log-probability of it.

    Filters apply in the order of transformers: temperature, top-k, top-p, min-p; what ties with the last one kept is kept.
    Log-probabilities are those of the unfiltered logits. Greedy rows take the first of the largest. A row with NaN or
    without a finite largest logit gives token -1 and NaN.

    A greedy row is read once, a drawn one four times, and 16 times more for top-k and for top-p each, from the cache.
    """
    check_logits(logits)
    num_rows, n = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        _sample_kernel[(num_rows,)](
            logits, logits.stride(0), rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed, rows.position,
            tokens, logprobs, n, BLOCK, num_warps=8,
        )  # fmt: skip
    return tokens, logprobs
