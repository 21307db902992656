"""Row-wise ops in C++: norm, activation, quantisation, logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from batchinfer_kernels.cpu.library import KINDS, ReductionStruct, SinkStruct, SourceStruct
from batchinfer_kernels.cpu.operands import PLAIN_INT8, Accumulated, Int8Rows

if TYPE_CHECKING:
    import ctypes

    from batchinfer_kernels.cpu.operands import Activation, Activations, Int8Recipe, LogitsReduction

_FLOATS = (torch.float32, torch.bfloat16)
_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


def require(condition: bool, message: str) -> None:
    """Raise ValueError with the message unless the condition holds: C++ would read or write out of bounds."""
    if not condition:
        raise ValueError(message)


def address(tensor: torch.Tensor | None, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
    """Address of a contiguous CPU tensor of that shape and dtype; 0 of None."""
    if tensor is None:
        return 0
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; it must be contiguous {dtype} {list(shape)} on the CPU"
        )
    return tensor.data_ptr()


def source(x: Activations, name: str) -> tuple[SourceStruct, int, int]:
    """The C view of activations, with their rows and columns."""
    values = x.values if isinstance(x, Accumulated) else x
    require(values.dim() == 2, f"{name} has {values.dim()} dimensions; it must have 2")
    rows, columns = values.shape
    stride = values.stride(0)
    if (values.stride(1) != 1 and columns > 1) or values.device.type != "cpu":
        raise ValueError(f"{name} must lie on the CPU with unit stride along a row")
    if isinstance(x, Accumulated):
        require(values.dtype == torch.int32, f"{name}.values is {values.dtype}; it must be int32")
        row_scale = address(x.row_scale, f"{name}.row_scale", (rows,))
        column_scale = address(x.column_scale, f"{name}.column_scale", (columns,))
        bias = address(x.bias, f"{name}.bias", (columns,))
        return SourceStruct(values.data_ptr(), stride, row_scale, column_scale, bias, 2), rows, columns
    require(values.dtype in _FLOATS, f"{name} is {values.dtype}; it must be float32 or bfloat16")
    return SourceStruct(values.data_ptr(), stride, None, None, None, KINDS[values.dtype]), rows, columns


def _shape(x: Activations) -> tuple[int, int]:
    rows, columns = (x.values if isinstance(x, Accumulated) else x).shape
    return rows, columns


def out_dtype_of(x: Activations, out_dtype: torch.dtype | None) -> torch.dtype:
    """What a result is stored as when the caller left it open."""
    if out_dtype is None:
        return torch.float32 if isinstance(x, Accumulated) else x.dtype
    require(out_dtype in _FLOATS, f"out_dtype is {out_dtype}; it must be float32 or bfloat16")
    return out_dtype


def float_sink(rows: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, SinkStruct]:
    """A new matrix and its C view."""
    out = torch.empty(rows, columns, dtype=dtype)
    return out, SinkStruct(out.data_ptr(), None, None, KINDS[dtype], 0)


def int8_sink(rows: int, columns: int, recipe: Int8Recipe) -> tuple[Int8Rows, SinkStruct]:
    """New quantised rows and their C view."""
    recipe.check(columns)
    out = Int8Rows(torch.empty(rows, columns, dtype=torch.int8), torch.empty(rows))
    smoothing = address(recipe.smoothing, "smoothing", (columns,))
    return out, SinkStruct(out.values.data_ptr(), out.scales.data_ptr(), smoothing, KINDS[torch.int8], recipe.rotation)


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
        out, sink = float_sink(*_shape(x), out_dtype_of(x, out_dtype))
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
        out, sink = int8_sink(*_shape(x), recipe)
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
        require(kind in _FLOATS, f"residual is {kind}; it must be float32 or bfloat16")
        self._library.bi_rms_norm(
            struct,
            address(residual, "residual", (rows, columns), kind),
            KINDS[kind],
            address(weight, "weight", (columns,)),
            weight_offset,
            eps,
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
        require(columns % 2 == 0, f"gate_up has {columns} columns; it must be gate and up side by side")
        require(activation in _ACTIVATIONS, f"activation is {activation!r}; choose one of {', '.join(_ACTIVATIONS)}")
        self._library.bi_act_and_mul(
            struct, _ACTIVATIONS[activation], rows, columns // 2, sink, torch.get_num_threads()
        )

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
        require(rows == reduction.num_rows, f"logits has {rows} rows; the reduction has {reduction.num_rows}")
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


def reduction_struct(reduction: LogitsReduction) -> ReductionStruct:
    """The C view of a reduction; top-k and log-sum-exp are null where they are not wanted."""
    rows, k = reduction.num_rows, reduction.top_k
    return ReductionStruct(
        address(reduction.best, "best", (rows,)),
        address(reduction.best_index, "best_index", (rows,), torch.int64),
        address(reduction.peak, "peak", (rows,)),
        address(reduction.total, "total", (rows,)),
        address(reduction.top_values, "top_values", (rows, k)) if k else None,
        address(reduction.top_indices, "top_indices", (rows, k), torch.int64) if k else None,
        k,
    )
