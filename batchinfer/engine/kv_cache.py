"""The tensors behind the block pool: keys and values of every layer, in blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from batchinfer_kernels.cpu import untouched_zeros

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class LayerShape:
    """KV of one token in one layer; values may be narrower than keys (multi-head latent attention)."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int

    @property
    def num_elements(self) -> int:
        """Numbers kept a token."""
        return self.num_kv_heads * (self.head_dim + self.v_head_dim)


class KVCache:
    """Per layer keys ``[num_blocks, block_size, num_kv_heads, head_dim]`` and values ``[..., v_head_dim]``."""

    def __init__(
        self, layers: Sequence[LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        # Zeros and not whatever was there: stale NaN could never be traced.
        def zeros(num_heads: int, dim: int) -> torch.Tensor:
            shape = num_blocks, block_size, num_heads, dim
            if device.type == "cpu":
                return untouched_zeros(shape, dtype)
            return torch.zeros(shape, dtype=dtype, device=device)

        self.keys = [zeros(s.num_kv_heads, s.head_dim) for s in layers]
        self.values = [zeros(s.num_kv_heads, s.v_head_dim) for s in layers]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values by slot: views ``[num_blocks * block_size, num_kv_heads, dim]``."""
        return self.keys[index].flatten(0, 1), self.values[index].flatten(0, 1)
