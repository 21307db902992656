"""The write of keys and values into the paged cache, quantised where the cache is INT8."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from batchinfer_kernels import reference
from batchinfer_kernels.jit import jit
from batchinfer_kernels.quantize import quantized, scale_of

if TYPE_CHECKING:
    import torch

    from batchinfer_kernels.paged_kv import PagedKV


@jit()
def cache_place(
    slot: tl.tensor, block_stride: tl.tensor, token_stride: tl.tensor, head_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, KV_HEADS_P: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Where a slot's heads lie: their numbers, which of them exist, their places in the cache and in the scales."""
    head = tl.arange(0, KV_HEADS_P)[:, None]
    is_head = (head < NUM_KV_HEADS) & (slot >= 0)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    at = block * block_stride + offset * token_stride + head * head_stride
    return head, is_head, at, (block * NUM_KV_HEADS + head) * BLOCK_SIZE + offset


@jit()
def write_value(
    source_ptr: tl.tensor,
    target_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    scale_at: tl.tensor,
    is_head: tl.tensor,
    HEAD_DIM: tl.constexpr,
) -> None:
    """Store heads ``[heads, HEAD_DIM]`` as they are, int8 with one scale a head where ``scale_ptr`` is given."""
    at = tl.arange(0, triton.next_power_of_2(HEAD_DIM))[None, :]
    inside = is_head & (at < HEAD_DIM)
    v = tl.load(source_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if scale_ptr is not None:
        limit = float("inf")
        peak = tl.max(tl.where(tl.abs(v) < limit, tl.abs(v), limit), axis=1)[:, None]
        tl.store(scale_ptr + scale_at, scale_of(peak), mask=is_head)
        v = quantized(v, peak)
    tl.store(target_ptr + at, v.to(target_ptr.dtype.element_ty), mask=inside)


# program (t, 0) owns token t's keys, (t, 1) its values
@jit()
def _kv_write_kernel(
    k_ptr: tl.tensor, k_stride: tl.tensor, v_ptr: tl.tensor, v_stride: tl.tensor, slots_ptr: tl.tensor, keys_ptr: tl.tensor,
    values_ptr: tl.tensor, key_scale_ptr: tl.tensor, value_scale_ptr: tl.tensor, block_stride: tl.tensor, token_stride: tl.tensor,
    head_stride: tl.tensor, BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, KV_HEADS_P: tl.constexpr,
    HEAD_DIM: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    head, is_head, at, scale_at = cache_place(
        slot, block_stride, token_stride, head_stride, BLOCK_SIZE, NUM_KV_HEADS, KV_HEADS_P
    )
    if tl.program_id(1) == 0:
        write_value(
            k_ptr + token * k_stride + head * HEAD_DIM, keys_ptr + at, key_scale_ptr, scale_at, is_head, HEAD_DIM
        )
    else:
        write_value(
            v_ptr + token * v_stride + head * HEAD_DIM, values_ptr + at, value_scale_ptr, scale_at, is_head, HEAD_DIM
        )


def kv_write(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, kv: PagedKV) -> None:
    """Write keys that have their rotation already, and values; ``[num_tokens, num_kv_heads, head_dim]``.

    ``slots [num_tokens]`` are ``block * block_size + offset``; a negative one writes nothing. No two may be equal.
    """
    for name, tensor in (("k", k), ("v", v)):
        if tuple(tensor.shape[1:]) != (kv.num_kv_heads, kv.head_dim) or tensor.stride()[1:] != (kv.head_dim, 1):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}: heads must lie together"
            )
    if len(k):
        heads_p = triton.next_power_of_2(kv.num_kv_heads)
        num_warps = min(4, max(1, heads_p * triton.next_power_of_2(kv.head_dim) // 256))
        _kv_write_kernel[(len(k), 2)](
            k, k.stride(0), v, v.stride(0), slots, kv.keys, kv.values, kv.key_scale, kv.value_scale,
            *kv.keys.stride()[:3], kv.block_size, kv.num_kv_heads, heads_p, kv.head_dim, num_warps=num_warps,
        )  # fmt: skip


def kv_write_reference(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, kv: PagedKV) -> None:
    """Write embedded ``k`` and ``v`` into the cache, in plain torch."""
    is_kept = slots >= 0
    slots = slots[is_kept].long()
    block, offset = slots // kv.block_size, slots % kv.block_size
    for source, cache, scales in ((k, kv.keys, kv.key_scale), (v, kv.values, kv.value_scale)):
        if scales is None:
            cache[block, offset] = source[is_kept].to(cache.dtype)
        else:
            cache[block, offset], scales[block, :, offset] = reference.quantize_rows(source[is_kept])
