"""Rows of an embedding table."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from batchinfer_kernels.jit import jit

BLOCK = 2048


# program (t, j) owns the j-th stretch of token t's row
@jit()
def _embedding_kernel(
    ids_ptr: tl.tensor, table_ptr: tl.tensor, out_ptr: tl.tensor, scale: tl.tensor, first_id: tl.tensor, num_ids: tl.tensor,
    n: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(ids_ptr + token).to(tl.int64) - first_id
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_here = (row >= 0) & (row < num_ids)
    x = tl.load(table_ptr + row * n + at, mask=(at < n) & is_here, other=0.0).to(tl.float32) * scale
    tl.store(out_ptr + token * n + at, x.to(out_ptr.dtype.element_ty), mask=at < n)


def embedding(ids: torch.Tensor, table: torch.Tensor, *, scale: float = 1.0, first_id: int = 0) -> torch.Tensor:
    """``table[ids - first_id] * scale``: ``ids [num_tokens]``, ``table [num_ids, n]`` -> ``[num_tokens, n]``.

    ``scale`` is Gemma's root of n. Ids outside of the table give zeros, so that tensor-parallel ranks, each with a part of
    the vocabulary, can add their results. Moves ``2 * num_tokens * n`` numbers.
    """
    num_ids, n = table.shape
    if not table.is_contiguous() or n % 16:
        raise ValueError(f"the table must be contiguous and its width {n} a multiple of 16")
    out = torch.empty(len(ids), n, dtype=table.dtype, device=table.device)
    if len(ids):
        block = min(BLOCK, triton.next_power_of_2(n))
        grid = (len(ids), triton.cdiv(n, block))
        _embedding_kernel[grid](ids, table, out, scale, first_id, num_ids, n, block, num_warps=max(1, block // 512))
    return out


def embedding_reference(
    ids: torch.Tensor, table: torch.Tensor, *, scale: float = 1.0, first_id: int = 0
) -> torch.Tensor:
    """:func:`embedding` in plain torch and float32."""
    rows = ids.long() - first_id
    is_here = (rows >= 0) & (rows < len(table))
    return table.float()[rows.clamp(0, len(table) - 1)] * is_here[:, None] * scale
