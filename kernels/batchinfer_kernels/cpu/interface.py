"""The operations of the CPU backend, as the engine and the models see them.

Two classes give them: :class:`~batchinfer_kernels.cpu.native.NativeOps` (C++) and
:class:`~batchinfer_kernels.cpu.torch_ops.TorchOps` (anywhere). Tensors are on the CPU. Weights and tables are float32
and contiguous; activations are float32 or bfloat16, or a product that still wants its scales
(:class:`~batchinfer_kernels.cpu.operands.Accumulated`). Results are rounded once, at the end.

Native results are per row: a row's bytes do not depend on the rows beside it, on how a prompt was cut into chunks, or
on the number of threads. A wrong shape, dtype or layout raises ValueError before anything is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from batchinfer_kernels.cpu.operands import PLAIN_INT8

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from batchinfer_kernels.cpu.kv_cache import LayerKV
    from batchinfer_kernels.cpu.operands import (
        Activation,
        Activations,
        AttentionBatch,
        Int8Recipe,
        Int8Rows,
        LogitsReduction,
        RotaryEmbedding,
    )


class AttentionPlan(Protocol):
    """A batch with the work it causes: made once a step, used by every layer."""

    @property
    def num_tokens(self) -> int:
        """Query rows of the batch."""


class Ops(Protocol):
    """The operations; ``out_dtype`` is float32 or bfloat16, and None is the input's own (float32 of a product)."""

    @property
    def name(self) -> str:
        """Which implementation: a variant's name, or ``torch``."""

    def rms_norm(
        self,
        x: Activations,
        weight: torch.Tensor,
        eps: float,
        *,
        residual: torch.Tensor | None = None,
        weight_offset: float = 0.0,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """RMS norm of ``x [T, n]`` times ``weight + weight_offset``, ``[T, n]``.

        With ``residual`` (float32 or bfloat16 ``[T, n]``, contiguous), ``residual += x`` first, in place and in its own
        precision, and the sum is what gets normed.
        """

    def rms_norm_int8(
        self,
        x: Activations,
        weight: torch.Tensor,
        eps: float,
        *,
        residual: torch.Tensor | None = None,
        weight_offset: float = 0.0,
        recipe: Int8Recipe = PLAIN_INT8,
    ) -> Int8Rows:
        """As :meth:`rms_norm`, quantised."""

    def act_and_mul(
        self, gate_up: Activations, activation: Activation, *, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """``act(gate) * up`` of ``[T, 2 n]`` with the gate in the first half, ``[T, n]``."""

    def act_and_mul_int8(
        self, gate_up: Activations, activation: Activation, *, recipe: Int8Recipe = PLAIN_INT8
    ) -> Int8Rows:
        """As :meth:`act_and_mul`, quantised."""

    def convert(self, x: Activations, dtype: torch.dtype) -> torch.Tensor:
        """``x [T, n]`` with its scales applied, in ``dtype``."""

    def quantize(self, x: Activations, *, recipe: Int8Recipe = PLAIN_INT8) -> Int8Rows:
        """``x [T, n]`` quantised row by row."""

    def rope_and_kv_write(
        self,
        query: Activations,
        key: Activations,
        value: Activations,
        rope: RotaryEmbedding,
        *,
        positions: torch.Tensor,
        slots: torch.Tensor,
        layer: LayerKV,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Norm (if the rope has norms) and rotate queries and keys, write keys and values, return the queries.

        ``query [T, num_heads * head_dim]``, ``key [T, num_kv_heads * head_dim]`` and ``value [T, num_kv_heads *
        v_head_dim]`` may be column views of one merged projection. ``positions [T]`` and ``slots [T]`` are int64; slot
        -1 writes nothing. Returns ``[T, num_heads, head_dim]``.
        """

    def kv_write(self, key: Activations, value: Activations, slots: torch.Tensor, layer: LayerKV) -> None:
        """Write keys and values that have their rotation already; shapes as in :meth:`rope_and_kv_write`."""

    def plan_attention(
        self, batch: AttentionBatch, layer: LayerKV, num_heads: int, least_shared: Sequence[int] = ()
    ) -> AttentionPlan:
        """Find the work of a batch, prefixes that sequences share included (equal blocks at equal places).

        ``least_shared[i]`` is how many query tokens must share ``i + 1`` splits of 256 tokens so that they are read for
        all of them together; the last counts for longer ones too, and without any two are enough. Results are the same.
        Good for every layer of the same block size and block tables, whatever its window or number of heads.
        """

    def paged_attention(
        self,
        query: torch.Tensor,
        layer: LayerKV,
        plan: AttentionPlan,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Causal attention of ``query [T, num_heads, head_dim]`` over the cache, ``[T, num_heads, v_head_dim]``.

        ``window`` counts the tokens a query sees, itself included; ``sinks`` is float32 ``[num_heads]``. Rows beyond
        the plan's tokens are padding and get zeros.
        """

    def reduce_logits(
        self,
        reduction: LogitsReduction,
        logits: Activations,
        first_column: int,
        *,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        """Take ``logits [num_rows, columns]`` of the words from ``first_column`` on into the reduction.

        Values are multiplied by ``scale``, then capped, and copied for the rows that are kept. Log-sum-exp depends on how columns were sliced in its last
        bits, so keep the slices fixed.
        """
