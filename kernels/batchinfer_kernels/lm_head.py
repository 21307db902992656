"""The language-model head: what is kept of logits that are never in memory.

The likeliest token of each row, its log-probability, the k largest logits; and of those rows that want them, the logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from batchinfer_kernels.gemm import tile_product
from batchinfer_kernels.jit import jit

BLOCK_M = 64
"""Whatever the number of rows, so that a row's sums are added in the same order in every batch."""
BLOCK_N = 128
BLOCK_K = {torch.float32: 32, torch.int8: 128}
"""64 for types of two bytes."""
MAX_TOP_K = 64


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """The vocabulary, ``w [vocab, K]``; INT8 has ``scale [vocab]`` (float32). ``bias [vocab]`` is added.

    Logits are multiplied by ``logits_scale``, then capped by ``softcap``.
    """

    w: torch.Tensor
    scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    logits_scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class HeadReduction:
    """What is kept of each row's logits."""

    best: torch.Tensor
    """The largest, float32 ``[M]``; NaN where any is NaN."""
    token: torch.Tensor
    """Its place, int32 ``[M]``: the lowest of equals; -1 where the largest is not finite."""
    logprob: torch.Tensor
    """Its log-probability, float32 ``[M]``; NaN where the largest is not finite."""
    top_values: torch.Tensor
    """The ``top_k`` largest, descending, float32 ``[M, top_k]``; NaN is never one of them."""
    top_tokens: torch.Tensor
    """Their places, int32 ``[M, top_k]``; -1 where there are no more above -inf."""

    def log_sum_exp(self) -> torch.Tensor:
        """Natural logarithm of the sum of exponentials, float32 ``[M]``."""
        return torch.where(self.logprob.isnan(), self.best, self.best - self.logprob)


# program (j, i) owns the scores of row tile i for vocabulary tile j, and keeps of each row the best, its id and the sum
# of exponentials relative to it; NaN is never the best, but makes the sum NaN
@jit(do_not_specialize=["m"])
def _lm_head_kernel(
    x_ptr: tl.tensor, x_stride: tl.tensor, x_scale_ptr: tl.tensor, w_ptr: tl.tensor, w_scale_ptr: tl.tensor, bias_ptr: tl.tensor,
    best_ptr: tl.tensor, id_ptr: tl.tensor, sum_ptr: tl.tensor, top_ptr: tl.tensor, top_id_ptr: tl.tensor, place_ptr: tl.tensor,
    logits_ptr: tl.tensor, m: tl.tensor, n: tl.tensor, k: tl.tensor, scale: tl.tensor, SOFTCAP: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    IS_EXACT: tl.constexpr,
) -> None:  # fmt: skip
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    words = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_word = rows < m, words < n
    acc = tile_product(
        x_ptr + rows.to(tl.int64)[:, None] * x_stride, is_row[:, None], w_ptr + words.to(tl.int64)[:, None] * k,
        is_word[:, None], 0, k, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, IS_EXACT,
    )  # fmt: skip
    scores = acc.to(tl.float32)
    if x_scale_ptr is not None:
        scores *= tl.load(x_scale_ptr + rows, mask=is_row, other=0.0)[:, None]
    if w_scale_ptr is not None:
        scores *= tl.load(w_scale_ptr + words, mask=is_word, other=0.0)[None, :]
    if bias_ptr is not None:
        scores += tl.load(bias_ptr + words, mask=is_word, other=0.0).to(tl.float32)[None, :]
    scores *= scale
    if SOFTCAP > 0.0:  # tanh(x) = 1 - 2 / (1 + e^2x)
        scores = SOFTCAP * (1.0 - 2.0 / (1.0 + tl.exp(scores * (2.0 / SOFTCAP))))
    if place_ptr is not None:
        place = tl.load(place_ptr + rows, mask=is_row, other=-1).to(tl.int64)
        tl.store(
            logits_ptr + place[:, None] * n + words[None, :], scores, mask=(place >= 0)[:, None] & is_word[None, :]
        )
    scores = tl.where(is_word[None, :], scores, float("-inf"))
    numbers = tl.where(tl.abs(scores) <= float("inf"), scores, float("-inf"))
    best, index = tl.max(numbers, axis=1, return_indices=True, return_indices_tie_break_left=True)
    safe = tl.where(tl.abs(best) < float("inf"), best, 0.0)
    total = tl.sum(tl.exp(scores - safe[:, None]), axis=1)
    at = rows.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(best_ptr + at, best, mask=is_row)
    tl.store(id_ptr + at, tl.program_id(0) * BLOCK_N + index, mask=is_row)
    tl.store(sum_ptr + at, total, mask=is_row)
    if TOP_K > 0:
        for rank in range(TOP_K):
            tl.store(top_ptr + at * TOP_K + rank, best, mask=is_row)
            is_there = best > float("-inf")
            tl.store(
                top_id_ptr + at * TOP_K + rank, tl.where(is_there, tl.program_id(0) * BLOCK_N + index, -1), mask=is_row
            )
            is_taken = tl.arange(0, BLOCK_N)[None, :] == index[:, None]
            numbers = tl.where(is_taken, float("-inf"), numbers)
            best, index = tl.max(numbers, axis=1, return_indices=True, return_indices_tie_break_left=True)


# one program owns one row: the best of its tiles; on a tie the lowest id
@jit()
def _reduce_kernel(
    best_ptr: tl.tensor, id_ptr: tl.tensor, sum_ptr: tl.tensor, peak_ptr: tl.tensor, token_ptr: tl.tensor,
    logprob_ptr: tl.tensor, num_tiles: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, BLOCK)
    best = tl.load(best_ptr + row * num_tiles + tile, mask=tile < num_tiles, other=float("-inf"))
    total = tl.load(sum_ptr + row * num_tiles + tile, mask=tile < num_tiles, other=0.0)
    peak, index = tl.max(best, axis=0, return_indices=True, return_indices_tie_break_left=True)
    is_finite = tl.abs(peak) < float("inf")
    safe = tl.where(is_finite, peak, 0.0)
    has_nan = tl.sum(tl.where(tl.abs(total) <= float("inf"), 0, 1), axis=0) > 0
    mass = tl.sum(total * tl.exp(best - safe), axis=0)
    token = tl.load(id_ptr + row * num_tiles + index)
    is_good = is_finite & (has_nan == 0)
    tl.store(peak_ptr + row, tl.where(has_nan, float("nan"), peak))
    tl.store(token_ptr + row, tl.where(is_good, token, -1))
    tl.store(logprob_ptr + row, tl.where(is_good, -tl.log(mass), float("nan")))


def _check(x: torch.Tensor, head: HeadWeights, x_scale: torch.Tensor | None, top_k: int) -> None:
    k, w = x.shape[1], head.w
    is_int8 = w.dtype == torch.int8
    if (x.dtype != w.dtype and not is_int8) or w.shape[1] != k or not w.is_contiguous() or x.stride(1) != 1:
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} and w {tuple(w.shape)} {w.dtype} must have the same K and type")
    if k % 16 or x.stride(0) % 16:
        raise ValueError(f"K = {k} and the stride {x.stride(0)} of x must be multiples of 16")
    if is_int8 != (head.scale is not None) or (x.dtype == torch.int8) != (x_scale is not None):
        raise ValueError(f"x is {x.dtype} and w is {w.dtype}: int8 takes scales, other types none")
    for name, tensor in (("scale", head.scale), ("bias", head.bias)):
        if tensor is not None and tuple(tensor.shape) != (len(w),):
            raise ValueError(f"the {name} of w must have {len(w)} numbers, got {tuple(tensor.shape)}")
    if not 0 <= top_k <= min(MAX_TOP_K, len(w)):
        raise ValueError(f"top_k is {top_k}: it must be between 0 and {min(MAX_TOP_K, len(w))}")


def lm_head_reduce(
    x: torch.Tensor,
    head: HeadWeights,
    *,
    x_scale: torch.Tensor | None = None,
    top_k: int = 0,
    place: torch.Tensor | None = None,
    logits: torch.Tensor | None = None,
) -> HeadReduction:
    """Best token, its log-probability and the ``top_k`` largest of the logits of ``x [M, K]``, which are not written.

    ``x`` has the type of the head's weights; those may be INT8 beside any ``x``, and INT8 rows have ``x_scale [M]``. Where
    ``place [M]`` (integers) is not negative, that row's logits go to row ``place`` of ``logits [rows, vocab]``, float32.
    Reads ``x`` once a vocabulary tile (from the cache) and ``w`` once, ``vocab * K`` numbers; writes ``12 + 8 * top_k``
    bytes a row and tile of 128 words, and the logits that were asked for; ``2 * M * vocab * K`` operations.
    """
    _check(x, head, x_scale, top_k)
    (m, k), n, device = x.shape, len(head.w), x.device
    if logits is not None and (logits.shape[1] != n or not logits.is_contiguous() or logits.dtype != torch.float32):
        raise ValueError(f"logits must be contiguous float32 [rows, {n}], got {tuple(logits.shape)} {logits.dtype}")
    if (place is None) != (logits is None) or (place is not None and tuple(place.shape) != (m,)):
        raise ValueError(f"logits and a place for each of {m} rows come together")
    best, logprob = (torch.empty(m, dtype=torch.float32, device=device) for _ in range(2))
    token = torch.empty(m, dtype=torch.int32, device=device)
    num_tiles = triton.cdiv(n, BLOCK_N)
    bests, totals = (torch.empty(m, num_tiles, dtype=torch.float32, device=device) for _ in range(2))
    tokens = torch.empty(m, num_tiles, dtype=torch.int32, device=device)
    tops = torch.empty(m, num_tiles * top_k, dtype=torch.float32, device=device)
    top_tokens = torch.empty(m, num_tiles * top_k, dtype=torch.int32, device=device)
    if m:
        block_k = BLOCK_K.get(x.dtype, 64)
        _lm_head_kernel[num_tiles, triton.cdiv(m, BLOCK_M)](
            x, x.stride(0), x_scale, head.w, head.scale, head.bias, bests, tokens, totals, tops, top_tokens, place, logits,
            m, n, k, head.logits_scale, head.softcap or 0.0, top_k, BLOCK_M, BLOCK_N, block_k, k % block_k == 0,
            x.dtype == torch.int8, num_warps=4, num_stages=3,
        )  # fmt: skip
        _reduce_kernel[(m,)](
            bests, tokens, totals, best, token, logprob, num_tiles, triton.next_power_of_2(num_tiles), num_warps=4
        )
    if top_k:
        # a stable sort keeps equal ones in the order of their places
        tops, order = (part[:, :top_k] for part in tops.sort(dim=1, descending=True, stable=True))
        top_tokens = top_tokens.gather(1, order)
    return HeadReduction(best, token, logprob, tops, top_tokens)


def lm_head_argmax(
    x: torch.Tensor, w: torch.Tensor, *, scale: float = 1.0, softcap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best token of each row of ``softcap(scale * x @ w.T)``, int32 ``[M]``, and its log-probability, float32 ``[M]``.

    ``x [M, K]`` and ``w [vocab, K]`` have the same type. Among equal logits the lowest id wins. A row without a finite best
    logit gives token -1. See :func:`lm_head_reduce`.
    """
    found = lm_head_reduce(x, HeadWeights(w, logits_scale=scale, softcap=softcap))
    return found.token, found.logprob


def lm_head_reduce_reference(
    x: torch.Tensor, head: HeadWeights, *, x_scale: torch.Tensor | None = None, top_k: int = 0
) -> tuple[HeadReduction, torch.Tensor]:
    """:func:`lm_head_reduce` in plain torch and float32, and all logits; products of INT8 are exact."""
    logits = (x.double() @ head.w.double().T).float() if x_scale is not None else x.float() @ head.w.float().T
    logits = logits if x_scale is None else logits * x_scale[:, None]
    logits = logits if head.scale is None else logits * head.scale
    logits = (logits if head.bias is None else logits + head.bias.float()) * head.logits_scale
    if head.softcap is not None:
        logits = torch.tanh(logits / head.softcap) * head.softcap
    numbers = logits.masked_fill(logits.isnan(), float("-inf"))
    best, token = numbers.max(dim=1)
    best = torch.where(logits.isnan().any(dim=1), float("nan"), best)
    is_finite = best.isfinite()
    logprob = torch.where(is_finite, best - torch.logsumexp(logits, dim=1), float("nan"))
    values, places = (part[:, :top_k] for part in numbers.sort(dim=1, descending=True, stable=True))
    tops = values, torch.where(values > float("-inf"), places, -1).int()
    return HeadReduction(best, torch.where(is_finite, token, -1).int(), logprob, *tops), logits


def lm_head_argmax_reference(
    x: torch.Tensor, w: torch.Tensor, *, scale: float = 1.0, softcap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`lm_head_argmax` in plain torch and float32."""
    found, _ = lm_head_reduce_reference(x, HeadWeights(w, logits_scale=scale, softcap=softcap))
    return found.token, found.logprob
