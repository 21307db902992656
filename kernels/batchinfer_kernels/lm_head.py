"""The greedy language-model head: the likeliest token and its log-probability, without logits in memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from batchinfer_kernels.jit import jit

BLOCK_M = 64
"""Whatever the number of rows, so that a row's sums are added in the same order in every batch."""
BLOCK_N = 128


# program (j, i) owns the scores of row tile i for vocabulary tile j, and keeps of each row the best, its id and the sum
# of exponentials relative to it
@jit(do_not_specialize=["m"])
def _lm_head_kernel(
    x_ptr: tl.tensor, x_stride: tl.tensor, w_ptr: tl.tensor, best_ptr: tl.tensor, id_ptr: tl.tensor, sum_ptr: tl.tensor,
    m: tl.tensor, n: tl.tensor, k: tl.tensor, scale: tl.tensor, SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    words = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    x_at = x_ptr + rows.to(tl.int64)[:, None] * x_stride + depth[None, :]
    w_at = w_ptr + words.to(tl.int64)[:, None] * k + depth[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, k, BLOCK_K):
        is_deep = (start + depth < k)[None, :]
        x = tl.load(x_at + start, mask=(rows < m)[:, None] & is_deep, other=0.0)
        w = tl.load(w_at + start, mask=(words < n)[:, None] & is_deep, other=0.0)
        acc = tl.dot(x, tl.trans(w), acc=acc, input_precision="ieee")
    scores = acc * scale
    if SOFTCAP > 0.0:  # tanh(x) = 1 - 2 / (1 + e^2x)
        scores = SOFTCAP * (1.0 - 2.0 / (1.0 + tl.exp(scores * (2.0 / SOFTCAP))))
    # NaN counts as infinite: the reduction below then finds no finite best
    scores = tl.where(tl.abs(scores) <= float("inf"), scores, float("inf"))
    scores = tl.where((words < n)[None, :], scores, float("-inf"))
    best, index = tl.max(scores, axis=1, return_indices=True, return_indices_tie_break_left=True)
    safe = tl.where(tl.abs(best) < float("inf"), best, 0.0)
    total = tl.sum(tl.exp(scores - safe[:, None]), axis=1)
    at = rows.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(best_ptr + at, best, mask=rows < m)
    tl.store(id_ptr + at, tl.program_id(0) * BLOCK_N + index, mask=rows < m)
    tl.store(sum_ptr + at, total, mask=rows < m)


# one program owns one row: the best of its tiles; on a tie the lowest id
@jit()
def _reduce_kernel(
    best_ptr: tl.tensor, id_ptr: tl.tensor, sum_ptr: tl.tensor, token_ptr: tl.tensor, logprob_ptr: tl.tensor,
    num_tiles: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, BLOCK)
    best = tl.load(best_ptr + row * num_tiles + tile, mask=tile < num_tiles, other=float("-inf"))
    total = tl.load(sum_ptr + row * num_tiles + tile, mask=tile < num_tiles, other=0.0)
    peak, index = tl.max(best, axis=0, return_indices=True, return_indices_tie_break_left=True)
    is_finite = tl.abs(peak) < float("inf")
    mass = tl.sum(total * tl.exp(best - tl.where(is_finite, peak, 0.0)), axis=0)
    token = tl.load(id_ptr + row * num_tiles + index)
    tl.store(token_ptr + row, tl.where(is_finite, token, -1))
    tl.store(logprob_ptr + row, tl.where(is_finite, -tl.log(mass), float("nan")))


def lm_head_argmax(
    x: torch.Tensor, w: torch.Tensor, *, scale: float = 1.0, softcap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best token of each row of ``softcap(scale * x @ w.T)``, int32 ``[M]``, and its log-probability, float32 ``[M]``.

    ``x [M, K]`` and ``w [vocab, K]`` have the same type. Among equal logits the lowest id wins. A row without a finite best
    logit gives token -1. Reads ``x`` once a vocabulary tile (from the cache) and ``w`` once; writes 12 bytes a row and tile.
    """
    (m, k), n = x.shape, w.shape[0]
    if x.dtype != w.dtype or w.shape[1] != k or not w.is_contiguous() or x.stride(1) != 1:
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} and w {tuple(w.shape)} {w.dtype} must have the same K and type")
    if k % 16 or x.stride(0) % 16:
        raise ValueError(f"K = {k} and the stride {x.stride(0)} of x must be multiples of 16")
    tokens = torch.empty(m, dtype=torch.int32, device=x.device)
    logprobs = torch.empty(m, dtype=torch.float32, device=x.device)
    if not m:
        return tokens, logprobs
    num_tiles = triton.cdiv(n, BLOCK_N)
    best, total = (torch.empty(m, num_tiles, dtype=torch.float32, device=x.device) for _ in range(2))
    ids = torch.empty(m, num_tiles, dtype=torch.int32, device=x.device)
    _lm_head_kernel[num_tiles, triton.cdiv(m, BLOCK_M)](
        x,
        x.stride(0),
        w,
        best,
        ids,
        total,
        m,
        n,
        k,
        scale,
        softcap or 0.0,
        BLOCK_M,
        BLOCK_N,
        64,
        num_warps=4,
        num_stages=3,
    )
    _reduce_kernel[(m,)](best, ids, total, tokens, logprobs, num_tiles, triton.next_power_of_2(num_tiles), num_warps=4)
    return tokens, logprobs


def lm_head_argmax_reference(
    x: torch.Tensor, w: torch.Tensor, *, scale: float = 1.0, softcap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`lm_head_argmax` in plain torch and float32."""
    logits = x.float() @ w.float().T * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    best, tokens = logits.max(dim=1)
    is_finite = best.isfinite()
    logprobs = best - torch.logsumexp(logits, dim=1)
    return torch.where(is_finite, tokens, -1).int(), torch.where(is_finite, logprobs, float("nan"))
