"""Rotary embedding of queries and keys, their optional norms, and the write of keys and values into the paged cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from batchinfer_kernels import reference
from batchinfer_kernels.jit import jit
from batchinfer_kernels.kv_write import cache_place, kv_write_reference, write_value
from batchinfer_kernels.quantize import quantized, scale_of

if TYPE_CHECKING:
    from batchinfer_kernels.paged_kv import PagedKV


@dataclass(frozen=True, slots=True)
class Rope:
    """The tables and the form of a rotary embedding; llama3, yarn and the like are in the tables.

    ``cos`` and ``sin`` are float32 ``[num_positions, rotary_dim / 2]``; head dimensions beyond ``rotary_dim`` pass
    through. Pairs are (i, i + rotary_dim / 2), or (2i, 2i + 1) if ``interleaved``. ``q_norm`` and ``k_norm``
    ``[head_dim]``, where given, RMS-norm each head first, with weights ``norm + norm_offset``.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    norm_offset: float = 0.0
    norm_eps: float = 1e-6


@jit()
def _load_pairs(
    head_ptr: tl.tensor, is_head: tl.tensor, HALF: tl.constexpr, HALF_P: tl.constexpr, INTERLEAVED: tl.constexpr
) -> tl.tensor:
    """First and second numbers of the pairs of some heads, each ``[heads, HALF_P]``; ``head_ptr [heads, 1]``."""
    if INTERLEAVED:
        at = tl.arange(0, 2 * HALF_P)[None, :]
        both = tl.load(head_ptr + at, mask=is_head & (at < 2 * HALF), other=0.0)
        a, b = tl.split(tl.reshape(both, (both.shape[0], HALF_P, 2)))
    else:
        at = tl.arange(0, HALF_P)[None, :]
        inside = is_head & (at < HALF)
        a = tl.load(head_ptr + at, mask=inside, other=0.0)
        b = tl.load(head_ptr + HALF + at, mask=inside, other=0.0)
    return a.to(tl.float32), b.to(tl.float32)


@jit()
def _store_pairs(
    head_ptr: tl.tensor, a: tl.tensor, b: tl.tensor, is_head: tl.tensor,
    HALF: tl.constexpr, HALF_P: tl.constexpr, INTERLEAVED: tl.constexpr,
) -> None:  # fmt: skip
    if INTERLEAVED:
        at = tl.arange(0, 2 * HALF_P)[None, :]
        both = tl.reshape(tl.join(a, b), (a.shape[0], 2 * HALF_P))
        tl.store(head_ptr + at, both, mask=is_head & (at < 2 * HALF))
    else:
        at = tl.arange(0, HALF_P)[None, :]
        tl.store(head_ptr + at, a, mask=is_head & (at < HALF))
        tl.store(head_ptr + HALF + at, b, mask=is_head & (at < HALF))


@jit()
def _norm_factors(
    norm_ptr: tl.tensor, offset: tl.tensor, HALF: tl.constexpr, HALF_P: tl.constexpr, INTERLEAVED: tl.constexpr
) -> tl.tensor:
    """A norm's weights for the first and the second numbers of the pairs, ``[1, HALF_P]`` each."""
    at = tl.arange(0, HALF_P)[None, :]
    step = 2 if INTERLEAVED else 1
    second = 1 if INTERLEAVED else HALF
    a = tl.load(norm_ptr + at * step, mask=at < HALF, other=0.0).to(tl.float32) + offset
    b = tl.load(norm_ptr + second + at * step, mask=at < HALF, other=0.0).to(tl.float32) + offset
    return a, b


# the numbers of some heads after norm and rotation: the pairs, and the rest that is not rotated
@jit()
def _embed(
    head_ptr: tl.tensor, is_head: tl.tensor, cos_ptr: tl.tensor, sin_ptr: tl.tensor, norm_ptr: tl.tensor, norm_offset: tl.tensor,
    norm_eps: tl.tensor, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, REST_P: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    a, b = _load_pairs(head_ptr, is_head, HALF, HALF_P, INTERLEAVED)
    at = tl.arange(0, HALF_P)[None, :]
    rest_at = 2 * HALF + tl.arange(0, REST_P)[None, :]
    rest = tl.load(head_ptr + rest_at, mask=is_head & (rest_at < HEAD_DIM), other=0.0).to(tl.float32)
    if norm_ptr is not None:
        squares = tl.sum(a * a + b * b, axis=1) + tl.sum(rest * rest, axis=1)
        factor = tl.rsqrt(squares / HEAD_DIM + norm_eps)[:, None]
        a_weight, b_weight = _norm_factors(norm_ptr, norm_offset, HALF, HALF_P, INTERLEAVED)
        a, b = a * factor * a_weight, b * factor * b_weight
        rest_weight = tl.load(norm_ptr + rest_at, mask=rest_at < HEAD_DIM, other=0.0).to(tl.float32) + norm_offset
        rest = rest * factor * rest_weight
    cos = tl.load(cos_ptr + at, mask=at < HALF, other=0.0)
    sin = tl.load(sin_ptr + at, mask=at < HALF, other=0.0)
    return a * cos - b * sin, b * cos + a * sin, rest


@jit()
def _write_heads(
    head_ptr: tl.tensor, scale_ptr: tl.tensor, a: tl.tensor, b: tl.tensor, rest: tl.tensor, is_head: tl.tensor,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, REST_P: tl.constexpr, INTERLEAVED: tl.constexpr,
) -> None:  # fmt: skip
    """Store heads in the type of ``head_ptr``, int8 with one scale a head where ``scale_ptr [heads, 1]`` is given."""
    rest_at = 2 * HALF + tl.arange(0, REST_P)[None, :]
    if scale_ptr is not None:
        limit = float("inf")
        peak = tl.max(tl.where(tl.abs(a) < limit, tl.abs(a), limit), axis=1)
        peak = tl.maximum(peak, tl.max(tl.where(tl.abs(b) < limit, tl.abs(b), limit), axis=1))
        peak = tl.maximum(peak, tl.max(tl.where(tl.abs(rest) < limit, tl.abs(rest), limit), axis=1))[:, None]
        tl.store(scale_ptr, scale_of(peak), mask=is_head)
        a, b, rest = quantized(a, peak), quantized(b, peak), quantized(rest, peak)
    kind = head_ptr.dtype.element_ty
    _store_pairs(head_ptr, a.to(kind), b.to(kind), is_head, HALF, HALF_P, INTERLEAVED)
    tl.store(head_ptr + rest_at, rest.to(kind), mask=is_head & (rest_at < HEAD_DIM))


@jit()
def _write_queries(
    q_ptr: tl.tensor, out_ptr: tl.tensor, cos_ptr: tl.tensor, sin_ptr: tl.tensor, norm_ptr: tl.tensor, norm_offset: tl.tensor,
    norm_eps: tl.tensor, NUM_HEADS: tl.constexpr, HEADS_P: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    HALF_P: tl.constexpr, REST_P: tl.constexpr, INTERLEAVED: tl.constexpr,
) -> None:  # fmt: skip
    head = tl.arange(0, HEADS_P)[:, None]
    is_head = head < NUM_HEADS
    at = head * HEAD_DIM
    a, b, rest = _embed(
        q_ptr + at,
        is_head,
        cos_ptr,
        sin_ptr,
        norm_ptr,
        norm_offset,
        norm_eps,
        HEAD_DIM,
        HALF,
        HALF_P,
        REST_P,
        INTERLEAVED,
    )
    _write_heads(out_ptr + at, None, a, b, rest, is_head, HEAD_DIM, HALF, HALF_P, REST_P, INTERLEAVED)


@jit()
def _write_keys_and_values(
    k_ptr: tl.tensor, v_ptr: tl.tensor, slot: tl.tensor, cos_ptr: tl.tensor, sin_ptr: tl.tensor, norm_ptr: tl.tensor,
    norm_offset: tl.tensor, norm_eps: tl.tensor, keys_ptr: tl.tensor, values_ptr: tl.tensor, key_scale_ptr: tl.tensor,
    value_scale_ptr: tl.tensor, block_stride: tl.tensor, token_stride: tl.tensor, head_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, KV_HEADS_P: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    HALF_P: tl.constexpr, REST_P: tl.constexpr, INTERLEAVED: tl.constexpr,
) -> None:  # fmt: skip
    head, is_head, at, scale_at = cache_place(
        slot, block_stride, token_stride, head_stride, BLOCK_SIZE, NUM_KV_HEADS, KV_HEADS_P
    )
    a, b, rest = _embed(
        k_ptr + head * HEAD_DIM, is_head, cos_ptr, sin_ptr, norm_ptr, norm_offset, norm_eps,
        HEAD_DIM, HALF, HALF_P, REST_P, INTERLEAVED,
    )  # fmt: skip
    key_scale = key_scale_ptr
    if key_scale_ptr is not None:
        key_scale = key_scale_ptr + scale_at
    _write_heads(keys_ptr + at, key_scale, a, b, rest, is_head, HEAD_DIM, HALF, HALF_P, REST_P, INTERLEAVED)
    write_value(v_ptr + head * HEAD_DIM, values_ptr + at, value_scale_ptr, scale_at, is_head, HEAD_DIM)


# program (token, 0) owns the token's queries, (token, 1) its keys and values
@jit()
def _rope_and_kv_write_kernel(
    q_ptr: tl.tensor, q_stride: tl.tensor, k_ptr: tl.tensor, k_stride: tl.tensor, v_ptr: tl.tensor, v_stride: tl.tensor, out_ptr: tl.tensor,
    cos_ptr: tl.tensor, sin_ptr: tl.tensor, q_norm_ptr: tl.tensor, k_norm_ptr: tl.tensor, norm_offset: tl.tensor, norm_eps: tl.tensor,
    positions_ptr: tl.tensor, slots_ptr: tl.tensor, keys_ptr: tl.tensor, values_ptr: tl.tensor, key_scale_ptr: tl.tensor,
    value_scale_ptr: tl.tensor, block_stride: tl.tensor, token_stride: tl.tensor, head_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEADS_P: tl.constexpr,
    KV_HEADS_P: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, REST_P: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos_ptr += position * HALF
    sin_ptr += position * HALF
    # the branches are functions: what they define has different shapes
    if tl.program_id(1) == 0:
        _write_queries(
            q_ptr + token * q_stride, out_ptr + token * NUM_HEADS * HEAD_DIM, cos_ptr, sin_ptr, q_norm_ptr, norm_offset,
            norm_eps, NUM_HEADS, HEADS_P, HEAD_DIM, HALF, HALF_P, REST_P, INTERLEAVED,
        )  # fmt: skip
    else:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        _write_keys_and_values(
            k_ptr + token * k_stride, v_ptr + token * v_stride, slot, cos_ptr, sin_ptr, k_norm_ptr, norm_offset, norm_eps,
            keys_ptr, values_ptr, key_scale_ptr, value_scale_ptr, block_stride, token_stride, head_stride,
            BLOCK_SIZE, NUM_KV_HEADS, KV_HEADS_P, HEAD_DIM, HALF, HALF_P, REST_P, INTERLEAVED,
        )  # fmt: skip


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rope: Rope, kv: PagedKV) -> None:
    for name, tensor, num_heads in (("q", q, q.shape[1]), ("k", k, kv.num_kv_heads), ("v", v, kv.num_kv_heads)):
        if tuple(tensor.shape) != (len(q), num_heads, kv.head_dim):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {(len(q), num_heads, kv.head_dim)}")
        if tensor.stride()[1:] != (kv.head_dim, 1) or tensor.stride(0) % 16:
            raise ValueError(
                f"{name} has strides {tensor.stride()}: heads must lie together, tokens at multiples of 16"
            )
    rotary_dim = 2 * rope.cos.shape[1]
    if kv.head_dim % 16 or rotary_dim % 16 or rotary_dim > kv.head_dim or rope.cos.shape != rope.sin.shape:
        raise ValueError(f"rotary dimension {rotary_dim} and head dimension {kv.head_dim} must be multiples of 16")


def rope_and_kv_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rope: Rope,
    kv: PagedKV,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Embed ``q [num_tokens, num_heads, head_dim]``, write embedded ``k`` and ``v`` into the cache, return the queries.

    Queries are in ``out_dtype``, by default the type of ``q``.
    ``k`` and ``v`` are ``[num_tokens, num_kv_heads, head_dim]``; all three may be views of one fused projection.
    ``positions [num_tokens]`` and ``slots [num_tokens]`` are integers; a slot is ``block * block_size + offset``, and a
    negative one writes nothing (padding). No two tokens may have the same slot. Reads and writes each number once.
    """
    _check(q, k, v, rope, kv)
    num_tokens, num_heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=out_dtype or q.dtype, device=q.device)
    if not num_tokens:
        return out
    half = rope.cos.shape[1]
    # with more warps than this a thread would load less than 8 bytes of a key at a time
    num_warps = min(4, max(1, triton.next_power_of_2(num_heads) * triton.next_power_of_2(head_dim) // 1024))
    _rope_and_kv_write_kernel[(num_tokens, 2)](
        q, q.stride(0), k, k.stride(0), v, v.stride(0), out, rope.cos, rope.sin, rope.q_norm, rope.k_norm,
        rope.norm_offset, rope.norm_eps, positions, slots, kv.keys, kv.values, kv.key_scale, kv.value_scale,
        *kv.keys.stride()[:3], kv.block_size, num_heads, kv.num_kv_heads, triton.next_power_of_2(num_heads),
        triton.next_power_of_2(kv.num_kv_heads), head_dim, half, triton.next_power_of_2(half),
        triton.next_power_of_2(max(1, head_dim - 2 * half)), rope.interleaved, num_warps=num_warps,
    )  # fmt: skip
    return out


def rope_reference(x: torch.Tensor, positions: torch.Tensor, rope: Rope, norm: torch.Tensor | None) -> torch.Tensor:
    """``x [num_tokens, num_heads, head_dim]`` normed and embedded, in float32 and plain torch."""
    if norm is not None:
        x = reference.rms_norm(x, norm, rope.norm_eps, weight_offset=rope.norm_offset)
    at = positions.long()
    return reference.rope(x, rope.cos[at], rope.sin[at], interleaved=rope.interleaved)


def rope_and_kv_write_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rope: Rope,
    kv: PagedKV,
) -> torch.Tensor:
    """:func:`rope_and_kv_write` in plain torch, queries in float32."""
    kv_write_reference(rope_reference(k, positions, rope, rope.k_norm), v, slots, kv)
    return rope_reference(q, positions, rope, rope.q_norm)
