"""The paged KV cache in the layout that the CPU kernels read, and how tokens get in and out of it.

A block holds ``block_size`` tokens of all layers in one piece of memory, so that a block that was never used costs none. A
layer's part has first its keys, KV head by KV head, then its values, as tiles of 16 tokens. With P = 2 for bfloat16 and
INT8 and 1 for float32:

- keys   ``[num_blocks, num_kv_heads, block_size / 16, head_dim / P, 16 tokens, P]``
- values ``[num_blocks, num_kv_heads, block_size / 16, 16 tokens / P, v_head_dim, P]``

so that a register of 32-bit words meets 16 tokens (keys) or 16 dimensions (values) at once and nothing is ever summed
across a register. Head dimensions are padded to multiples of 16 with zeros. ``csrc/layout.h`` says the same in C++.

INT8 has a scale for each token's key and value of each KV head, after the values. Heads are rotated by a Hadamard
matrix before they are rounded (:func:`kv_rotation`), which spreads large channels over their block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from batchinfer_kernels import reference
from batchinfer_kernels.cpu.pages import untouched_zeros

if TYPE_CHECKING:
    from collections.abc import Sequence

TILE = 16
"""Tokens that lie together; a block is a whole number of them."""
DTYPES = (torch.float32, torch.bfloat16, torch.int8)
WIDEST_ROTATION, LEAST_ROTATION = 64, 16


def kv_rotation(head_dim: int) -> int:
    """Block of the rotation of an INT8 head: the largest power of two up to 64 that divides it; 0 (none) below 16."""
    block = math.gcd(head_dim, WIDEST_ROTATION)
    return block if block >= LEAST_ROTATION else 0


@dataclass(frozen=True, slots=True)
class KVShape:
    """KV of one token in one layer; values may be narrower than keys (multi-head latent attention)."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int

    def bytes_per_block(self, block_size: int, dtype: torch.dtype) -> int:
        """Memory of a block, padding and scales included."""
        width = _padded(self.head_dim) + _padded(self.v_head_dim)
        scales = 2 * torch.float32.itemsize if dtype == torch.int8 else 0
        return self.num_kv_heads * (width * dtype.itemsize + scales) * block_size


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LayerKV:
    """One layer's cache."""

    keys: torch.Tensor
    """``[num_blocks, num_kv_heads, block_size / 16, head_dim / P, 16, P]``."""
    values: torch.Tensor
    """``[num_blocks, num_kv_heads, block_size / 16, 16 / P, v_head_dim, P]``."""
    shape: KVShape
    block_size: int
    key_scales: torch.Tensor | None = None
    """Of INT8: float32 ``[num_blocks, num_kv_heads, block_size]``; NaN for a head that held inf or NaN."""
    value_scales: torch.Tensor | None = None
    """Likewise."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache."""
        return self.keys.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """float32, bfloat16 or int8."""
        return self.keys.dtype

    def write(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store ``key [T, num_kv_heads, head_dim]`` and ``value [T, num_kv_heads, v_head_dim]`` at ``slots [T]``.

        A slot is ``block * block_size + offset``; -1 writes nothing. The ops have a faster way.
        """
        kept = slots >= 0
        slots, key, value = slots[kept], key[kept], value[kept]
        if self.key_scales is not None and self.value_scales is not None:
            key = _quantized(key, self.key_scales, slots)
            value = _quantized(value, self.value_scales, slots)
        block, tile, token = self._places(slots)
        pair = _pair(self.dtype)
        padded_key = _pad(key.to(self.dtype), self.keys.shape[3] * pair)
        self.keys[block, :, tile, :, token, :] = padded_key.reshape(*padded_key.shape[:2], self.keys.shape[3], pair)
        self.values[block, :, tile, token // pair, :, token % pair] = _pad(value.to(self.dtype), self.values.shape[4])

    def gather(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys ``[T, num_kv_heads, head_dim]`` and values ``[T, num_kv_heads, v_head_dim]`` at ``slots [T]``.

        INT8 comes as float32, rotated back.
        """
        block, tile, token = self._places(slots)
        pair = _pair(self.dtype)
        key = self.keys[block, :, tile, :, token, :].flatten(-2)
        value = self.values[block, :, tile, token // pair, :, token % pair]
        key, value = key[..., : self.shape.head_dim], value[..., : self.shape.v_head_dim]
        if self.key_scales is not None and self.value_scales is not None:
            return _restored(key, self.key_scales, slots), _restored(value, self.value_scales, slots)
        return key, value

    def context_slots(self, block_table: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Slots of a sequence's first tokens, int64 ``[num_tokens]``."""
        at = torch.arange(num_tokens)
        return block_table.long()[at // self.block_size] * self.block_size + at % self.block_size

    def _places(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        offset = slots % self.block_size
        return slots // self.block_size, offset // TILE, offset % TILE


class PagedKVCache:
    """The caches of all layers, in one piece of memory.

    Raises:
        ValueError: a block size that is no multiple of 16, or a dtype other than float32, bfloat16 and int8.
    """

    def __init__(self, shapes: Sequence[KVShape], num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        if block_size % TILE or block_size < TILE:
            raise ValueError(f"block_size is {block_size}; the CPU kernels need a multiple of {TILE}")
        if dtype not in DTYPES:
            raise ValueError(f"KV dtype is {dtype}; the CPU kernels have float32, bfloat16 and int8")
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.dtype = dtype
        sizes = [shape.bytes_per_block(block_size, dtype) for shape in shapes]
        # zeros: the kernels read the padding of a head
        self._pages = untouched_zeros((num_blocks, sum(sizes)), torch.uint8)
        ends = accumulate(sizes)
        self.layers = [
            _layer(self._pages[:, end - size : end], shape, block_size, dtype)
            for shape, size, end in zip(shapes, sizes, ends, strict=True)
        ]

    def layer(self, index: int) -> LayerKV:
        """One layer's cache."""
        return self.layers[index]

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks in every layer, block ``sources[i]`` to ``targets[i]``; no target may be a source too."""
        self._pages[list(targets)] = self._pages[list(sources)]


def _layer(pages: torch.Tensor, shape: KVShape, block_size: int, dtype: torch.dtype) -> LayerKV:
    """Views of one layer's part of all blocks, uint8 ``[num_blocks, bytes]``."""
    pair, tiles = _pair(dtype), block_size // TILE
    start = 0

    def part(kind: torch.dtype, *dims: int) -> torch.Tensor:
        nonlocal start
        end = start + shape.num_kv_heads * math.prod(dims) * kind.itemsize
        view = pages[:, start:end].view(kind)
        start = end
        return view.view(len(pages), shape.num_kv_heads, *dims)

    keys = part(dtype, tiles, _padded(shape.head_dim) // pair, TILE, pair)
    values = part(dtype, tiles, TILE // pair, _padded(shape.v_head_dim), pair)
    if dtype != torch.int8:
        return LayerKV(keys, values, shape, block_size)
    scales = [part(torch.float32, block_size) for _ in range(2)]
    return LayerKV(keys, values, shape, block_size, *scales)


def _quantized(heads: torch.Tensor, scales: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """int8 ``[T, num_kv_heads, dim]``; the scales are stored at the slots."""
    rotated = reference.rotate(heads.float(), kv_rotation(heads.shape[-1]))
    values, found = reference.quantize_rows(rotated.flatten(0, 1))
    size = scales.shape[2]
    scales[slots // size, :, slots % size] = found.view(heads.shape[:2])
    return values.view(heads.shape)


def _restored(heads: torch.Tensor, scales: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    size = scales.shape[2]
    values = heads.float() * scales[slots // size, :, slots % size].unsqueeze(-1)
    return reference.rotate(values, kv_rotation(heads.shape[-1]))


def _pair(dtype: torch.dtype) -> int:
    return 1 if dtype == torch.float32 else 2


def _padded(dim: int) -> int:
    return -(-dim // TILE) * TILE


def _pad(x: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, width - x.shape[-1]))
