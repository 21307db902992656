"""Row-wise ops in C++: norm, activation, quantisation, logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from batchinfer_kernels.cpu.library import KINDS, NormStruct
from batchinfer_kernels.cpu.operands import PLAIN_INT8, Int8Rows
from batchinfer_kernels.cpu.pointers import (
    FLOATS,
    address,
    float_sink,
    int8_sink,
    out_dtype_of,
    reduction_struct,
    shape_of,
    source,
)

if TYPE_CHECKING:
    import ctypes

    from batchinfer_kernels.cpu.library import SinkStruct, SourceStruct
    from batchinfer_kernels.cpu.operands import Activation, Activations, Int8Recipe, LogitsReduction

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
"""Their numbers in C++."""


class NativeRowOps:
    """The part of :class:`~batchinfer_kernels.cpu.interface.Ops` that works row by row."""

    _library: ctypes.CDLL

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
        """See :meth:`~batchinfer_kernels.cpu.interface.Ops.rms_norm`."""
        out, sink = float_sink(*shape_of(x), out_dtype_of(x, out_dtype))
        self._rms_norm(x, weight, (eps, weight_offset), residual, sink)
        return out

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
        """See :meth:`~batchinfer_kernels.cpu.interface.Ops.rms_norm_int8`."""
        out, sink = int8_sink(*shape_of(x), recipe)
        self._rms_norm(x, weight, (eps, weight_offset), residual, sink)
        return out

    def _rms_norm(
        self,
        x: Activations,
        weight: torch.Tensor,
        constants: tuple[float, float],
        residual: torch.Tensor | None,
        sink: SinkStruct,
    ) -> None:
        eps, weight_offset = constants
        struct, rows, columns = source(x, "x")
        kind = torch.float32 if residual is None else residual.dtype
        if kind not in FLOATS:
            raise ValueError(f"residual is {kind}; it must be float32 or bfloat16")
        self._library.bi_rms_norm(
            struct,
            address(residual, "residual", (rows, columns), kind),
            KINDS[kind],
            NormStruct(address(weight, "weight", (columns,)), weight_offset, eps),
            rows,
            columns,
            sink,
            torch.get_num_threads(),
        )

    def act_and_mul(
        self, gate_up: Activations, activation: Activation, *, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """See :meth:`~batchinfer_kernels.cpu.interface.Ops.act_and_mul`."""
        struct, rows, columns = source(gate_up, "gate_up")
        out, sink = float_sink(rows, columns // 2, out_dtype_of(gate_up, out_dtype))
        self._act_and_mul(struct, rows, columns, activation, sink)
        return out

    def act_and_mul_int8(
        self, gate_up: Activations, activation: Activation, *, recipe: Int8Recipe = PLAIN_INT8
    ) -> Int8Rows:
        """See :meth:`~batchinfer_kernels.cpu.interface.Ops.act_and_mul_int8`."""
        struct, rows, columns = source(gate_up, "gate_up")
        out, sink = int8_sink(rows, columns // 2, recipe)
        self._act_and_mul(struct, rows, columns, activation, sink)
        return out

    def _act_and_mul(
        self, struct: SourceStruct, rows: int, columns: int, activation: Activation, sink: SinkStruct
    ) -> None:
        if columns % 2:
            raise ValueError(f"gate_up has {columns} columns; it must be gate and up side by side")
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation is {activation!r}; choose one of {', '.join(ACTIVATIONS)}")
        self._library.bi_act_and_mul(struct, ACTIVATIONS[activation], rows, columns // 2, sink, torch.get_num_threads())

    def convert(self, x: Activations, dtype: torch.dtype) -> torch.Tensor:
        """See :meth:`~batchinfer_kernels.cpu.interface.Ops.convert`."""
        struct, rows, columns = source(x, "x")
        out, sink = float_sink(rows, columns, out_dtype_of(x, dtype))
        self._library.bi_convert(struct, rows, columns, sink, torch.get_num_threads())
        return out

    def quantize(self, x: Activations, *, recipe: Int8Recipe = PLAIN_INT8) -> Int8Rows:
        """See :meth:`~batchinfer_kernels.cpu.interface.Ops.quantize`."""
        struct, rows, columns = source(x, "x")
        out, sink = int8_sink(rows, columns, recipe)
        self._library.bi_convert(struct, rows, columns, sink, torch.get_num_threads())
        return out

    def reduce_logits(
        self,
        reduction: LogitsReduction,
        logits: Activations,
        first_column: int,
        *,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        """See :meth:`~batchinfer_kernels.cpu.interface.Ops.reduce_logits`."""
        struct, rows, columns = source(logits, "logits")
        if rows != reduction.num_rows:
            raise ValueError(f"logits has {rows} rows; the reduction has {reduction.num_rows}")
        if reduction.kept and not 0 <= first_column <= reduction.logits.shape[1] - columns:
            raise ValueError(
                f"columns {first_column} to {first_column + columns} are outside of the {reduction.logits.shape[1]} kept"
            )
        self._library.bi_reduce_logits(
            struct,
            rows,
            columns,
            first_column,
            scale,
            softcap or 0.0,
            reduction_struct(reduction),
            torch.get_num_threads(),
        )
