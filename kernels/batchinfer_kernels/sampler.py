"""Sampling on the GPU: temperature, top-k, top-p, min-p, and noise that depends on (seed, position, token) only."""

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

    ``temperature`` float32 (0: greedy), ``top_k`` int32 (0: all), ``top_p`` and ``min_p`` float32 (1 and 0: off), ``seed``
    int64 and ``position`` int32, the number of tokens the row has generated so far.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor


@jit()
def _row(row_ptr: tl.tensor, start: tl.tensor, n: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """A stretch of a row's logits in float32, -inf beyond its end."""
    at = start + tl.arange(0, BLOCK)
    return tl.load(row_ptr + at, mask=at < n, other=float("-inf")).to(tl.float32)


@jit()
def _ordered(x: tl.tensor) -> tl.tensor:
    """Integers in the order of the floats (int64, in the range of int32)."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@jit()
def _mass_from(
    row_ptr: tl.tensor,
    n: tl.tensor,
    floor: tl.tensor,
    peak: tl.tensor,
    temperature: tl.tensor,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """How many logits are at or above ``floor`` (an ordered integer), or their weights' sum, in a fixed order."""
    mass = 0.0
    for start in range(0, n, BLOCK):
        x = _row(row_ptr, start, n, BLOCK)
        is_in = _ordered(x) >= floor
        weight = tl.where(is_in, 1.0, 0.0) if COUNT else tl.where(is_in, tl.exp((x - peak) / temperature), 0.0)
        mass += tl.sum(weight, axis=0)
    return mass


@jit()
def _highest_floor(
    row_ptr: tl.tensor, n: tl.tensor, goal: tl.tensor, lowest: tl.tensor, peak: tl.tensor, temperature: tl.tensor, COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The highest floor whose mass reaches the goal, bit by bit; what is below ``lowest`` does not count."""
    floor = lowest * 0 - 2147483648
    for i in range(32):
        step = tl.full((), 1, tl.int64) << (31 - i)
        higher = floor + step
        reached = _mass_from(row_ptr, n, tl.maximum(higher, lowest), peak, temperature, COUNT, BLOCK) >= goal
        floor = tl.where(reached, higher, floor)
    return tl.maximum(floor, lowest)


# one program owns one row
@jit()
def _sample_kernel(
    logits_ptr: tl.tensor, stride: tl.tensor, temperature_ptr: tl.tensor, top_k_ptr: tl.tensor, top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor, seed_ptr: tl.tensor, position_ptr: tl.tensor, token_ptr: tl.tensor, logprob_ptr: tl.tensor, n: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * stride
    peak, total, broken = float("-inf"), 0.0, 0
    for start in range(0, n, BLOCK):
        x = _row(row_ptr, start, n, BLOCK)
        broken += tl.max(tl.where(tl.abs(x) <= float("inf"), 0, 1), axis=0)  # NaN compares false
        higher = tl.maximum(peak, tl.max(x, axis=0))
        safe = tl.where(tl.abs(higher) < float("inf"), higher, 0.0)
        total = total * tl.exp(tl.where(peak < higher, peak - safe, 0.0)) + tl.sum(tl.exp(x - safe), axis=0)
        peak = higher
    is_finite = (broken == 0) & (tl.abs(peak) < float("inf"))
    asked = tl.load(temperature_ptr + row)
    is_greedy = asked == 0.0
    temperature = tl.where(is_greedy, 1.0, tl.maximum(asked, 1e-30))
    floor = tl.full((), -2147483648, tl.int64)
    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    if (top_k > 0) & (top_k < n) & is_finite:
        floor = _highest_floor(row_ptr, n, top_k.to(tl.float32), floor, peak, temperature, True, BLOCK)
    if (top_p < 1.0) & is_finite:
        goal = _mass_from(row_ptr, n, floor, peak, temperature, False, BLOCK) * top_p
        floor = _highest_floor(row_ptr, n, goal, floor, peak, temperature, False, BLOCK)
    seed, position = tl.load(seed_ptr + row).to(tl.uint64, bitcast=True), tl.load(position_ptr + row)
    best, token, chosen = float("-inf"), -1, 0.0
    for start in range(0, n, BLOCK):
        x = _row(row_ptr, start, n, BLOCK)
        at = start + tl.arange(0, BLOCK)
        # words of Philox, 23 bits each, in the open interval (0, 1)
        word, _, _, _ = tl.philox(seed, at, at * 0 + position, at * 0, at * 0)
        uniform = ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
        relative = (x - peak) / temperature
        noisy = tl.where(is_greedy, relative, relative - tl.log(-tl.log(uniform)))
        is_kept = (_ordered(x) >= floor) & (tl.exp(relative) >= min_p) & (x > float("-inf"))
        noisy = tl.where(is_kept, noisy, float("-inf"))
        highest, index = tl.max(noisy, axis=0, return_indices=True, return_indices_tie_break_left=True)
        is_better = highest > best
        token = tl.where(is_better, start + index, token)
        best = tl.where(is_better, highest, best)
        chosen = tl.where(is_better, tl.sum(tl.where(tl.arange(0, BLOCK) == index, x, 0.0), axis=0), chosen)
    tl.store(token_ptr + row, tl.where(is_finite, token, -1))
    tl.store(logprob_ptr + row, tl.where(is_finite, chosen - peak - tl.log(total), float("nan")))


def sample(logits: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token a row from ``logits [num_rows, vocab]``: int32 ``[num_rows]``, and the logits' log-probability of it.

    Filters apply in the order of transformers: temperature, top-k, top-p, min-p; what ties with the last one kept is kept.
    The draw is ``argmax(logit / temperature + Gumbel noise)``. Log-probabilities are those of the unfiltered logits. A row
    with NaN or without a finite largest logit gives token -1 and NaN.

    A row is read twice, 33 times more for top-k and as often for top-p, from the cache.
    """
    num_rows, n = logits.shape
    if logits.stride(1) != 1 or logits.stride(0) % 16:
        raise ValueError(f"logits at strides {logits.stride()}: rows must be contiguous, at multiples of 16")
    tokens = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        _sample_kernel[(num_rows,)](
            logits, logits.stride(0), rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed, rows.position,
            tokens, logprobs, n, BLOCK, num_warps=8,
        )  # fmt: skip
    return tokens, logprobs


def kept_reference(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Which tokens of one row may be drawn, by sorting, in float64."""
    x = logits.double()
    weights = torch.exp((x - x.max()) / max(temperature, 1e-30))
    if 0 < top_k < len(x):
        weights = weights.where(x >= x.sort(descending=True).values[top_k - 1], 0.0)
    if top_p < 1:
        ordered = weights.sort(descending=True).values
        before = ordered.cumsum(0) - ordered
        weights = weights.where(weights >= ordered[int((before < top_p * weights.sum()).sum()) - 1], 0.0)
    return (weights > 0) & (weights >= min_p)
