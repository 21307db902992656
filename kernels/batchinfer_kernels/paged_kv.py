"""The paged cache of keys and values of one layer, as the GPU's kernels see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from typing import Self

BLOCK_SIZES = (16, 32, 64, 128)
"""Tokens a block. 64 or 128 let a kernel read one block number for each tile of keys."""


@dataclass(frozen=True, slots=True)
class PagedKV:
    """Keys and values ``[num_blocks, block_size, num_kv_heads, head_dim]``; any strides, the last one 1.

    INT8 caches have a float32 scale for each token and head, ``[num_blocks, num_kv_heads, block_size]``: those of one
    block and head lie together.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        """Raise ValueError where shapes or types do not fit."""
        if self.keys.shape != self.values.shape or self.keys.stride() != self.values.stride():
            raise ValueError(f"keys {tuple(self.keys.shape)} and values {tuple(self.values.shape)} must be alike")
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size {self.block_size} must be one of {BLOCK_SIZES}")
        if self.keys.stride(3) != 1 or any(stride % 16 for stride in self.keys.stride()[:3]):
            raise ValueError(f"keys at strides {self.keys.stride()}: the last must be 1, the others multiples of 16")
        if self.is_int8 != (self.key_scale is not None) or self.is_int8 != (self.value_scale is not None):
            raise ValueError(f"keys in {self.keys.dtype}: int8 keys and values need scales, others must have none")

    @classmethod
    def empty(
        cls,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Self:
        """A cache of zeros; ``dtype`` int8 brings scales."""
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        if dtype != torch.int8:
            return cls(keys, values)
        scales = [torch.zeros(num_blocks, num_kv_heads, block_size, device=device) for _ in range(2)]
        return cls(keys, values, *scales)

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self.keys.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.keys.shape[2]

    @property
    def head_dim(self) -> int:
        """Numbers a head."""
        return self.keys.shape[3]

    @property
    def is_int8(self) -> bool:
        """Whether numbers are INT8 with scales."""
        return self.keys.dtype == torch.int8

    def dequantized(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in float32, for oracles."""
        keys, values = self.keys.float(), self.values.float()
        if self.key_scale is not None and self.value_scale is not None:
            keys = keys * self.key_scale.transpose(1, 2).unsqueeze(-1)
            values = values * self.value_scale.transpose(1, 2).unsqueeze(-1)
        return keys, values
