"""What the ops take and give besides tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class Accumulated:
    """The int32 result of an INT8 product before its scales: the op that reads it applies them on the way.

    Stands for ``values * row_scale[:, None] * column_scale + bias``.
    """

    values: torch.Tensor
    """int32 ``[rows, n]``; rows may be strided."""
    row_scale: torch.Tensor
    """float32 ``[rows]``: of the activations."""
    column_scale: torch.Tensor
    """float32 ``[n]``: of the weights."""
    bias: torch.Tensor | None = None
    """float32 ``[n]``."""

    def columns(self, start: int, stop: int) -> Accumulated:
        """A view of some columns (a projection out of a merged one)."""
        bias = None if self.bias is None else self.bias[start:stop]
        return Accumulated(self.values[:, start:stop], self.row_scale, self.column_scale[start:stop], bias)

    def dequantize(self) -> torch.Tensor:
        """As float32 ``[rows, n]``."""
        scaled = self.values.float() * self.row_scale.unsqueeze(1) * self.column_scale
        return scaled if self.bias is None else scaled + self.bias


Activations: TypeAlias = torch.Tensor | Accumulated
"""float32 or bfloat16 ``[rows, n]`` with unit stride along a row, or a product that still wants its scales."""


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """Rows quantised each with its own scale: about ``values * scales[:, None]``."""

    values: torch.Tensor
    """int8 ``[rows, n]``."""
    scales: torch.Tensor
    """float32 ``[rows]``; 0 for a row of zeros, NaN for a row that held inf or NaN."""


@dataclass(frozen=True, slots=True)
class Int8Recipe:
    """What happens to a row before it is rounded to INT8."""

    smoothing: torch.Tensor | None = None
    """float32 ``[n]``: factors an element (SmoothQuant; the weights hold their inverse)."""
    rotation: int = 0
    """Block of the Hadamard rotation, a power of two that divides ``n`` (the weights are rotated alike); 0: none."""

    def check(self, columns: int) -> None:
        """Raise ValueError if rows of so many numbers cannot be rotated."""
        block = self.rotation
        if block < 0 or block & (block - 1) or (block and columns % block):
            raise ValueError(f"rotation is {block}; it must be a power of two that divides {columns}")


PLAIN_INT8 = Int8Recipe()


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class RotaryEmbedding:
    """Tables of a rotary embedding, and the norm a head gets before it (Qwen3, Gemma 3)."""

    cos: torch.Tensor
    """float32 ``[num_positions, rotary_dim / 2]``, attention scaling included."""
    sin: torch.Tensor
    """float32 ``[num_positions, rotary_dim / 2]``."""
    interleaved: bool = False
    """Pairs ``(2i, 2i + 1)`` instead of ``(i, i + rotary_dim / 2)``."""
    q_norm: torch.Tensor | None = None
    """float32 ``[head_dim]``."""
    k_norm: torch.Tensor | None = None
    """float32 ``[head_dim]``."""
    norm_offset: float = 0.0
    """Added to the norms' weights (Gemma: 1)."""
    norm_eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """A packed batch: sequence ``i`` has the query rows ``query_start[i] .. query_start[i + 1]``.

    They are the last of its ``context_lens[i]`` tokens, whose keys and values are in the cache already. Tokens
    ``j * block_size ..`` of it lie in block ``block_tables[i, j]``; entries past its context are not read.
    """

    query_start: torch.Tensor
    """int32 ``[num_sequences + 1]``, ascending from 0."""
    context_lens: torch.Tensor
    """int32 ``[num_sequences]``."""
    block_tables: torch.Tensor
    """int32 ``[num_sequences, max_blocks]``."""

    @staticmethod
    def of(
        query_lens: Sequence[int], context_lens: Sequence[int], block_tables: Sequence[Sequence[int]]
    ) -> AttentionBatch:
        """Build from plain lists; block tables may be of any lengths."""
        starts = [0]
        for length in query_lens:
            starts.append(starts[-1] + length)
        widest = max(map(len, block_tables), default=0)
        padded = [[*table, *[0] * (widest - len(table))] for table in block_tables]
        return AttentionBatch(
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(context_lens, dtype=torch.int32),
            torch.tensor(padded, dtype=torch.int32).view(len(block_tables), widest),
        )


class LogitsReduction:
    """What is kept of logits that come in slices of columns: argmax, and on request log-sum-exp, the top k and whole rows.

    Columns must come in ascending order, each once. Ties go to the lower index. A row in which nothing is above -inf
    keeps index -1; NaN is never the largest, but sets ``has_nan`` and makes ``log_sum_exp`` NaN.
    """

    def __init__(
        self,
        num_rows: int,
        *,
        top_k: int = 0,
        log_sum_exp: bool = False,
        kept: Sequence[int] = (),
        num_columns: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        """``kept`` are the rows whose logits are wanted as they are, each once; ``num_columns`` is how many they have."""
        self.num_rows = num_rows
        self.top_k = top_k
        self.kept = tuple(kept)
        self.logits = torch.empty(len(self.kept), num_columns, device=device)
        """Logits of the kept rows in their order, scaled and capped, float32 ``[len(kept), num_columns]``."""
        self.place = _places(num_rows, self.kept, torch.device(device))
        """Where in ``logits`` a row is kept, int64 ``[num_rows]``; -1 if it is not."""
        self.has_nan = torch.zeros(num_rows, dtype=torch.bool, device=device)
        """Whether a row holds NaN, bool ``[num_rows]``."""
        self.best = torch.full((num_rows,), float("-inf"), device=device)
        """The largest logit of each row, float32 ``[num_rows]``."""
        self.best_index = torch.full((num_rows,), -1, dtype=torch.int64, device=device)
        """Its column, int64 ``[num_rows]``."""
        self.top_values = torch.full((num_rows, top_k), float("-inf"), device=device)
        """The ``top_k`` largest logits, descending, float32 ``[num_rows, top_k]``."""
        self.top_indices = torch.full((num_rows, top_k), -1, dtype=torch.int64, device=device)
        """Their columns."""
        self.peak = torch.full((num_rows,), float("-inf"), device=device) if log_sum_exp else None
        self.total = torch.zeros(num_rows, device=device) if log_sum_exp else None

    def log_sum_exp(self) -> torch.Tensor:
        """Natural logarithm of the sum of exponentials, float32 ``[num_rows]``.

        Raises:
            ValueError: the reduction was made without it.
        """
        if self.peak is None or self.total is None:
            raise ValueError("this reduction keeps no log-sum-exp; create it with log_sum_exp=True")
        return self.peak + torch.log(self.total)


def _places(num_rows: int, kept: Sequence[int], device: torch.device) -> torch.Tensor:
    """Where each row is kept, int64; the host waits for no device, and where all rows are kept nothing is sent to it."""
    if kept == tuple(range(num_rows)):
        return torch.arange(num_rows, device=device)
    places = torch.full((num_rows,), -1, dtype=torch.int64, pin_memory=device.type == "cuda")
    places[list(kept)] = torch.arange(len(kept))
    return places.to(device, non_blocking=True)
