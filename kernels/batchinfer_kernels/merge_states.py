"""Attention over several stretches of a context, merged by log-sum-exp into attention over all of it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from batchinfer_kernels.jit import jit

HEADS = 4
"""Heads a program merges."""


# program (i, j) owns HEADS heads of the i-th merge: a row of `merges` (token, first partial, count), or row i of every state
@jit(do_not_specialize=["num_states", "stride"])
def _merge_states_kernel(
    partial_ptr: tl.tensor, lse_ptr: tl.tensor, merges_ptr: tl.tensor, sinks_ptr: tl.tensor, out_ptr: tl.tensor, out_lse_ptr: tl.tensor,
    num_states: tl.tensor, stride: tl.tensor, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_P: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0)
    first = token
    if merges_ptr is not None:
        entry = merges_ptr + tl.program_id(0) * 3
        token, first, num_states = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    at = tl.arange(0, HEAD_DIM_P)[None, :]
    inside = (head[:, None] < NUM_HEADS) & (at < HEAD_DIM)
    peak = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    acc = tl.zeros((HEADS, HEAD_DIM_P), tl.float32)
    for state in range(num_states):
        row = (first + state * stride).to(tl.int64) * NUM_HEADS + head
        lse = tl.load(lse_ptr + row, mask=head < NUM_HEADS, other=float("-inf"))
        partial = tl.load(partial_ptr + row[:, None] * HEAD_DIM + at, mask=inside, other=0.0)
        higher = tl.maximum(peak, lse)
        safe = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf would be NaN
        kept, added = tl.exp(peak - safe), tl.exp(lse - safe)
        acc = acc * kept[:, None] + partial * added[:, None]
        total = total * kept + added
        peak = higher
    if sinks_ptr is not None:  # takes its share of the softmax and gives nothing
        sink = tl.load(sinks_ptr + head, mask=head < NUM_HEADS, other=0.0)
        higher = tl.maximum(peak, sink)
        kept = tl.exp(peak - higher)
        acc, total = acc * kept[:, None], total * kept + tl.exp(sink - higher)
        peak = higher
    acc = acc * tl.where(total > 0.0, 1.0 / total, 0.0)[:, None]
    row = token.to(tl.int64) * NUM_HEADS + head
    tl.store(out_ptr + row[:, None] * HEAD_DIM + at, acc.to(out_ptr.dtype.element_ty), mask=inside & (token >= 0))
    if out_lse_ptr is not None:
        lse = peak + tl.log(tl.where(total > 0.0, total, 1.0))
        tl.store(out_lse_ptr + row, lse, mask=head < NUM_HEADS)


def launch_merge(
    partials: torch.Tensor, lses: torch.Tensor, merges: torch.Tensor, sinks: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Merge the partials named by each row of ``merges`` (token, first partial, count) into ``out [token]``.

    ``partials [n, num_heads, head_dim]`` and ``lses [n, num_heads]`` are float32. A negative token writes nothing.
    """
    _launch(partials, lses, merges, sinks, out, None, grid=len(merges), num_states=0, stride=1)


def merge_states(outputs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge ``outputs [num_states, num_tokens, num_heads, head_dim]`` with ``lses [num_states, num_tokens, num_heads]``.

    All float32, natural logarithms; -inf marks a state in which a query saw nothing. The states are merged in order.
    Returns the merged output and its log-sum-exp.
    """
    num_states, num_tokens = outputs.shape[:2]
    out, lse = torch.empty_like(outputs[0]), torch.empty_like(lses[0])
    if num_tokens:
        _launch(outputs, lses, None, None, out, lse, grid=num_tokens, num_states=num_states, stride=num_tokens)
    return out, lse


def _launch(
    partials: torch.Tensor, lses: torch.Tensor, merges: torch.Tensor | None, sinks: torch.Tensor | None, out: torch.Tensor,
    out_lse: torch.Tensor | None, *, grid: int, num_states: int, stride: int,
) -> None:  # fmt: skip
    num_heads, head_dim = partials.shape[-2:]
    if not (partials.is_contiguous() and lses.is_contiguous()) or head_dim % 16:
        raise ValueError(f"states must be contiguous, and the head dimension {head_dim} a multiple of 16")
    _merge_states_kernel[(grid, triton.cdiv(num_heads, HEADS))](
        partials, lses, merges, sinks, out, out_lse, num_states, stride, num_heads, head_dim,
        triton.next_power_of_2(head_dim), HEADS, num_warps=1,
    )  # fmt: skip


def merge_states_reference(outputs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`merge_states` in plain torch."""
    lse = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - lse).nan_to_num(0.0)
    return (weights[..., None] * outputs).sum(dim=0), lse
