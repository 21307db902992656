"""Weights in the layout of this package's own products: what a tile or a register of the CPU takes at once lies together.

``[padded n / 16, k / K, K / P, 16 columns, P]`` with P = 4 and K = 64 of int8, P = 2 and K = 32 of bfloat16: a 32-bit
word holds the P numbers of a column that are summed first. ``csrc/gemm.h`` says the same in C++.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from batchinfer_kernels.cpu.pages import Arena

if TYPE_CHECKING:
    from batchinfer_kernels.cpu.operands import Activation, Int8Recipe, RotaryEmbedding

COLUMNS = 16
"""Of a tile."""
WORDS = 16
"""Of a tile's column, 32 bits each."""
COLUMN_MULTIPLE = 2 * COLUMNS
"""Columns are filled up with zeros to a multiple of it."""
PAIRS = {torch.int8: 4, torch.bfloat16: 2}
"""Numbers a word."""
PRODUCTS = {torch.int8: torch.int32, torch.bfloat16: torch.float32}
"""What products of a precision are: exact sums, or float32 ones."""
_ARENA = Arena()


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """int8 or bfloat16 weights ``[n, k]``, packed."""

    data: torch.Tensor
    """``[padded n / 16, k / K, 16, 16, P]``."""
    num_columns: int
    """``n``: the product's."""

    @staticmethod
    def fits(weight: torch.Tensor) -> bool:
        """Whether weights ``[n, k]`` can be packed: int8 or bfloat16, ``k`` a multiple of 64 or 32."""
        pair = PAIRS.get(weight.dtype, 0)
        return pair > 0 and weight.numel() > 0 and weight.shape[1] % (pair * WORDS) == 0

    @classmethod
    def of(cls, weight: torch.Tensor) -> PackedWeights:
        """Pack weights ``[n, k]``, strided as they may be.

        Raises:
            ValueError: their dtype or shape does not fit.
        """
        if not cls.fits(weight):
            raise ValueError(
                f"{weight.dtype} {list(weight.shape)} cannot be packed: int8 [n, 64 i], bfloat16 [n, 32 i]"
            )
        n, k = weight.shape
        pair = PAIRS[weight.dtype]
        filled = torch.nn.functional.pad(weight, (0, 0, 0, -n % COLUMN_MULTIPLE))
        tiles = filled.reshape(-1, COLUMNS, k // (pair * WORDS), WORDS, pair)
        return cls(_ARENA.copy(tiles.permute(0, 2, 3, 1, 4)), n)

    def unpack(self) -> torch.Tensor:
        """The weights ``[n, k]`` again."""
        return self.data.permute(0, 3, 1, 2, 4).reshape(-1, self.num_summed)[: self.num_columns]

    @property
    def num_summed(self) -> int:
        """``k``: numbers of a row that it is multiplied with."""
        _, tiles, words, _, pair = self.data.shape
        return tiles * words * pair

    @property
    def padded_columns(self) -> int:
        """``n`` filled up."""
        return self.data.shape[0] * COLUMNS

    @property
    def dtype(self) -> torch.dtype:
        """int8 or bfloat16."""
        return self.data.dtype


@dataclass(frozen=True, slots=True)
class PackedProjection:
    """A linear layer of packed weights. int8: rows are quantised by ``recipe`` and the product waits for its scales."""

    weights: PackedWeights
    column_scale: torch.Tensor | None = None
    """float32 ``[n]``, of int8."""
    bias: torch.Tensor | None = None
    """float32 ``[n]``."""
    recipe: Int8Recipe | None = None
    """Of int8."""


class Norm(Protocol):
    """RMS norm with ``weight + offset``."""

    @property
    def weight(self) -> torch.Tensor:
        """float32 ``[n]``."""

    @property
    def eps(self) -> float:
        """Added to the mean of squares."""

    @property
    def offset(self) -> float:
        """Added to the weights (Gemma: 1)."""


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """``x += o(attention(qkv(attention_norm(x))))``, then ``x += down(act(gate) * up)`` of ``gate_up(mlp_norm(x))``."""

    qkv: PackedProjection
    o: PackedProjection
    gate_up: PackedProjection
    down: PackedProjection
    attention_norm: Norm
    mlp_norm: Norm
    rope: RotaryEmbedding
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    activation: Activation
    scaling: float
    window: int | None
    softcap: float | None

    def check(self, hidden: int) -> None:
        """Raise ValueError if its parts do not fit each other and a residual of so many numbers."""
        q, k, v = (
            self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim, self.num_kv_heads * self.v_head_dim,
        )  # fmt: skip
        attended = self.num_heads * self.v_head_dim
        inner = self.down.weights.num_summed
        wanted = {
            "qkv": (q + k + v, hidden), "o": (hidden, attended), "gate_up": (2 * inner, hidden), "down": (hidden, inner),
        }  # fmt: skip
        for name, shape in wanted.items():
            weights = getattr(self, name).weights
            if (weights.num_columns, weights.num_summed) != shape:
                raise ValueError(f"{name} is {[weights.num_columns, weights.num_summed]}; it must be {list(shape)}")
