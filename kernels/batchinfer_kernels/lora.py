"""Low-rank adapters: each row gets what its own adapter adds, ``y += (x @ A.T) @ B.T``, whichever adapters share the step.

Two launches for all adapters: the first multiplies by ``A`` (shrink), the second by ``B`` and adds (expand). Adapters stay
where they were loaded, each with a rank of its own, and are found by their addresses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from batchinfer_kernels.grouped_gemm import rows_of
from batchinfer_kernels.jit import jit
from batchinfer_kernels.target import LARGE_SHARED, target_arch

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK_M = 32
"""Whatever the number of rows, so that a row's sums are added in the same order in every batch."""
BLOCK_R = 32
RANK_MULTIPLE = 16
"""Ranks are filled up with zeros to multiples of it."""
MAX_SPLITS = 8
MIN_DEPTH = 512
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, slots=True)
class LoraRows:
    """The rows of a step that use adapters."""

    order: torch.Tensor
    """int32 ``[num_rows]``: rows of the step, those of one adapter together, none twice."""
    offsets: torch.Tensor
    """int32 ``[num_adapters + 1]``: adapter g has the places ``offsets[g] .. offsets[g + 1]`` of ``order``.

    Filled up with empty adapters to a power of two (:func:`padded_offsets`), since each number of them is compiled anew.
    """


@dataclass(frozen=True, slots=True)
class LoraTable:
    """The adapters of one projection, on the device; the tensors that it points to must stay alive while it is used."""

    downs: torch.Tensor
    """int64 ``[num_adapters]``: addresses of ``A [rank, K]``, contiguous."""
    ups: torch.Tensor
    """int64 ``[num_adapters]``: addresses of ``B [N, rank]``, contiguous."""
    ranks: torch.Tensor
    """int64 ``[num_adapters]``: multiples of 16; 0 where an adapter has nothing for this projection."""
    max_rank: int
    dtype: torch.dtype
    """Of all ``A`` and ``B``."""


def padded_offsets(counts: Sequence[int]) -> list[int]:
    """Offsets of adapters with so many rows each, for :attr:`LoraRows.offsets`."""
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + count)
    return offsets + [offsets[-1]] * (triton.next_power_of_2(max(1, len(counts))) - len(counts))


def num_splits(k: int) -> int:
    """Programs that share the depth of a row's first product; it depends on nothing else."""
    return max(1, min(MAX_SPLITS, k // MIN_DEPTH))


# program (tile, split, j) owns the j-th 32 ranks of one tile of one adapter's rows, over a share of the depth
@jit()
def _shrink_kernel(
    x_ptr: tl.tensor, x_stride: tl.tensor, order_ptr: tl.tensor, offsets_ptr: tl.tensor, downs_ptr: tl.tensor,
    ranks_ptr: tl.tensor, y_ptr: tl.tensor, split_stride: tl.tensor, max_rank: tl.tensor, k: tl.tensor, NUM_ADAPTERS: tl.constexpr, KIND: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    adapter, row0, end = rows_of(tl.program_id(0), offsets_ptr, NUM_ADAPTERS, NUM_ADAPTERS, BLOCK_M)
    if adapter < NUM_ADAPTERS:
        rank = tl.multiple_of(tl.load(ranks_ptr + adapter), 16)
        ranks = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
        if tl.program_id(2) * BLOCK_R < rank:
            places = row0 + tl.arange(0, BLOCK_M)
            rows = tl.load(order_ptr + places, mask=places < end, other=0).to(tl.int64)
            down_ptr = tl.multiple_of(tl.load(downs_ptr + adapter).to(tl.pointer_type(KIND)), 16)
            share = tl.cdiv(tl.cdiv(k, BLOCK_K), SPLITS) * BLOCK_K
            begin = tl.program_id(1) * share
            depth = tl.arange(0, BLOCK_K)
            x_at = x_ptr + rows[:, None] * x_stride + depth[None, :]
            a_at = down_ptr + ranks.to(tl.int64)[:, None] * k + depth[None, :]
            acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
            for start in range(begin, tl.minimum(begin + share, k), BLOCK_K):
                is_deep = (start + depth < k)[None, :]
                x = tl.load(x_at + start, mask=(places < end)[:, None] & is_deep, other=0.0)
                a = tl.load(a_at + start, mask=(ranks < rank)[:, None] & is_deep, other=0.0)
                acc = tl.dot(x.to(KIND), tl.trans(a), acc=acc, input_precision="ieee")
            at = tl.program_id(1) * split_stride + places.to(tl.int64)[:, None] * max_rank + ranks[None, :]
            tl.store(y_ptr + at, acc, mask=(places < end)[:, None] & (ranks < rank)[None, :])


# program (tile, j) owns the j-th stretch of columns of one tile of one adapter's rows
@jit()
def _expand_kernel(
    y_ptr: tl.tensor, split_stride: tl.tensor, max_rank: tl.tensor, x_scale_ptr: tl.tensor, order_ptr: tl.tensor, offsets_ptr: tl.tensor,
    ups_ptr: tl.tensor, ranks_ptr: tl.tensor, out_ptr: tl.tensor, out_stride: tl.tensor, n: tl.tensor, NUM_ADAPTERS: tl.constexpr,
    KIND: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
) -> None:  # fmt: skip
    adapter, row0, end = rows_of(tl.program_id(0), offsets_ptr, NUM_ADAPTERS, NUM_ADAPTERS, BLOCK_M)
    if adapter < NUM_ADAPTERS:
        rank = tl.multiple_of(tl.load(ranks_ptr + adapter), 16)
        if rank > 0:
            places = row0 + tl.arange(0, BLOCK_M)
            is_row = places < end
            rows = tl.load(order_ptr + places, mask=is_row, other=0).to(tl.int64)
            up_ptr = tl.multiple_of(tl.load(ups_ptr + adapter).to(tl.pointer_type(KIND)), 16)
            columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
            is_column = columns < n
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for start in range(0, rank, BLOCK_R):
                ranks = start + tl.arange(0, BLOCK_R)
                inside = is_row[:, None] & (ranks < rank)[None, :]
                y = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
                for split in tl.static_range(SPLITS):
                    at = split * split_stride + places.to(tl.int64)[:, None] * max_rank + ranks[None, :]
                    y += tl.load(y_ptr + at, mask=inside, other=0.0)
                if x_scale_ptr is not None:
                    y *= tl.load(x_scale_ptr + rows, mask=is_row, other=0.0)[:, None]
                b = tl.load(
                    up_ptr + columns.to(tl.int64)[:, None] * rank + ranks[None, :],
                    mask=is_column[:, None] & (ranks < rank)[None, :], other=0.0,
                )  # fmt: skip
                acc = tl.dot(y.to(KIND), tl.trans(b), acc=acc, input_precision="ieee")
            out_at = out_ptr + rows[:, None] * out_stride + columns[None, :]
            inside = is_row[:, None] & is_column[None, :]
            total = tl.load(out_at, mask=inside, other=0.0).to(tl.float32) + acc
            tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=inside)


def _check(out: torch.Tensor, x: torch.Tensor, rows: LoraRows, table: LoraTable, x_scale: torch.Tensor | None) -> None:
    num_adapters = len(rows.offsets) - 1
    if num_adapters & (num_adapters - 1) or not num_adapters:
        raise ValueError(f"the offsets are of {num_adapters} adapters: fill them up to a power of two")
    for name, numbers in (("downs", table.downs), ("ups", table.ups), ("ranks", table.ranks)):
        if tuple(numbers.shape) != (num_adapters,) or numbers.dtype != torch.int64:
            raise ValueError(f"{name} must be int64 [{num_adapters}], got {numbers.dtype} {tuple(numbers.shape)}")
    if table.max_rank % RANK_MULTIPLE or x.shape[1] % 16 or x.stride(0) % 16 or x.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError(f"rank {table.max_rank}, K = {x.shape[1]} and the stride {x.stride(0)} of x: multiples of 16")
    if table.dtype not in TYPES or x.dtype not in (table.dtype, torch.int8):
        raise ValueError(f"x is {x.dtype}: it must be int8 or of the adapters' type, {table.dtype}")
    if (x.dtype == torch.int8) != (x_scale is not None) or len(out) != len(x):
        raise ValueError(f"x is {x.dtype} of {len(x)} rows, out has {len(out)}: int8 takes scales, other types none")


def lora_add(
    out: torch.Tensor, x: torch.Tensor, rows: LoraRows, table: LoraTable, *, x_scale: torch.Tensor | None = None
) -> None:
    """``out[r] += (x[r] @ A.T) @ B.T`` for each row r in ``rows.order``, with the ``A`` and ``B`` of its adapter.

    ``x [num_tokens, K]`` has the adapters' type, or is INT8 with ``x_scale [num_tokens]``; ``out [num_tokens, N]`` may
    have any float type. The first product is summed in float32 in a fixed number of shares of the depth, which are added
    in order and rounded to the adapters' type before the second one; a row's result does not depend on its neighbours.

    Sizes depend on the number of rows and of adapters and on the largest rank: a graph holds one combination of them.
    Moves, for each adapter with m rows of rank r, ``(K + N) * r`` numbers of weights a 32 rows, ``m * (K + 2 * N)`` of
    activations and ``8 * m * r`` bytes a share; ``2 * m * r * (K + N)`` operations.
    """
    _check(out, x, rows, table, x_scale)
    num_rows, num_adapters = len(rows.order), len(rows.offsets) - 1
    k, n, max_rank = x.shape[1], out.shape[1], table.max_rank
    if not num_rows or not max_rank:
        return
    splits = num_splits(k)
    y = torch.empty(splits, num_rows, max_rank, dtype=torch.float32, device=x.device)
    tiles = num_rows // BLOCK_M + min(num_adapters, num_rows)
    kind = TYPES[table.dtype]
    block_k, block_n = (64, 64) if table.dtype == torch.float32 else (128, 128)
    num_stages = 3 if target_arch() in LARGE_SHARED else 2
    _shrink_kernel[tiles, splits, triton.cdiv(max_rank, BLOCK_R)](
        x, x.stride(0), rows.order, rows.offsets, table.downs, table.ranks, y, y.stride(0), max_rank, k, num_adapters,
        kind, splits, BLOCK_M, BLOCK_R, block_k, num_warps=4, num_stages=num_stages,
    )  # fmt: skip
    _expand_kernel[tiles, triton.cdiv(n, block_n)](
        y, y.stride(0), max_rank, x_scale, rows.order, rows.offsets, table.ups, table.ranks, out, out.stride(0), n,
        num_adapters, kind, splits, BLOCK_M, block_n, BLOCK_R, num_warps=4, num_stages=1,
    )  # fmt: skip


def lora_add_reference(
    out: torch.Tensor,
    x: torch.Tensor,
    rows: LoraRows,
    adapters: Sequence[tuple[torch.Tensor, torch.Tensor] | None],
    *,
    x_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """What :func:`lora_add` makes of ``out``, in plain torch and float32; ``adapters`` are ``A`` and ``B`` of each."""
    out, offsets = out.float().clone(), rows.offsets.tolist()
    for g, adapter in enumerate(adapters):
        if adapter is None:
            continue
        down, up = adapter
        at = rows.order[offsets[g] : offsets[g + 1]].long()
        y = x[at].float() @ down.float().T
        y = y if x_scale is None else y * x_scale[at, None]
        out[at] += y.to(down.dtype).float() @ up.float().T
    return out
