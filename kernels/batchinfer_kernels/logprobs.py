"""Log-probabilities: of the tokens chosen, and of the likeliest ones beside them."""

from __future__ import annotations

import torch
import triton.language as tl

from batchinfer_kernels.jit import jit
from batchinfer_kernels.sampler import check_logits, peak_and_mass, stretch_of

BLOCK = 4096
"""Logits a program holds at once; a power of two."""


# one program owns one row: each pass over it finds the largest logit after the one found before; on a tie the lowest id
@jit()
def _token_logprobs_kernel(
    logits_ptr: tl.tensor, stride: tl.tensor, rows_ptr: tl.tensor, tokens_ptr: tl.tensor, chosen_ptr: tl.tensor, ids_ptr: tl.tensor,
    top_ptr: tl.tensor, n: tl.tensor, NUM_TOP: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    i = tl.program_id(0)
    row = i
    if rows_ptr is not None:
        row = tl.load(rows_ptr + i)
    row_ptr = logits_ptr + row.to(tl.int64) * stride
    peak, _, mass, is_finite = peak_and_mass(row_ptr, n, BLOCK)
    base = tl.where(is_finite, peak + tl.log(mass), float("nan"))
    token = tl.load(tokens_ptr + i)
    is_token = (token >= 0) & (token < n)
    chosen = tl.load(row_ptr + token, mask=is_token, other=float("nan")).to(tl.float32)
    tl.store(chosen_ptr + i, chosen - base)
    last, last_id = float("inf"), -1
    for k in range(NUM_TOP):
        best, best_id = float("-inf"), -1
        for start in range(0, n, BLOCK):
            x = stretch_of(row_ptr, start, n, BLOCK)
            at = start + tl.arange(0, BLOCK)
            x = tl.where((x < last) | ((x == last) & (at > last_id)), x, float("-inf"))
            highest, index = tl.max(x, axis=0, return_indices=True, return_indices_tie_break_left=True)
            best_id = tl.where(highest > best, start + index, best_id)
            best = tl.maximum(best, highest)
        tl.store(ids_ptr + i * NUM_TOP + k, tl.where(is_finite, best_id, -1))
        tl.store(top_ptr + i * NUM_TOP + k, best - base)
        last, last_id = best, best_id


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, num_top: int, *, rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the softmax of ``logits`` gives ``tokens [n]`` (float32 ``[n]``), and its ``num_top`` largest, likeliest first.

    ``rows [n]`` (int32) are the tokens' rows of ``logits [num_rows, vocab]``; without them token i is of row i. The largest
    come as ids (int32 ``[n, num_top]``, among equals the lowest first, -1 where nothing is above -inf) and log-probabilities
    (float32 ``[n, num_top]``). A row with NaN or without a finite largest logit gives NaN, and a token below 0 does.

    Reads each row ``num_top + 1`` times, from the cache after the first.
    """
    check_logits(logits)
    num_rows = len(tokens)
    if rows is None and num_rows != len(logits):
        raise ValueError(f"{num_rows} tokens for {len(logits)} rows of logits: say which rows they are of")
    chosen = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_rows, num_top, dtype=torch.int32, device=logits.device)
    top = torch.empty(num_rows, num_top, dtype=torch.float32, device=logits.device)
    if num_rows:
        _token_logprobs_kernel[(num_rows,)](
            logits, logits.stride(0), rows, tokens, chosen, ids, top, logits.shape[1], num_top, BLOCK, num_warps=8
        )
    return chosen, ids, top


def token_logprobs_reference(
    logits: torch.Tensor, tokens: torch.Tensor, num_top: int, *, rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`token_logprobs` in plain torch, for rows of finite numbers and -inf."""
    scores = torch.log_softmax(logits.double(), dim=1).float()
    scores = scores if rows is None else scores[rows.long()]
    top, ids = (x[:, :num_top] for x in scores.sort(dim=1, descending=True, stable=True))
    return scores.gather(1, tokens.long()[:, None])[:, 0], ids.masked_fill(top == float("-inf"), -1).int(), top
