"""Products of rows with packed weights, in C++."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from batchinfer_kernels.cpu.library import KINDS, PackedStruct
from batchinfer_kernels.cpu.packed import PRODUCTS
from batchinfer_kernels.cpu.pointers import address

if TYPE_CHECKING:
    import ctypes

    from batchinfer_kernels.cpu.packed import PackedWeights


class NativeProduct:
    """Weights, and the library that multiplies them. A row's result does not depend on the rows beside it."""

    def __init__(self, library: ctypes.CDLL, weights: PackedWeights) -> None:
        self._library = library
        self._struct = packed_struct(weights)
        self.weights = weights

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows [T, k]`` in the weights' dtype, contiguous: int32 or float32 ``[T, n]``, a row's columns side by side.

        Raises:
            ValueError: rows of another shape, dtype or layout.
        """
        weights, count = self.weights, len(rows)
        out = torch.empty(count, weights.padded_columns, dtype=PRODUCTS[weights.dtype])
        self._library.bi_gemm(
            address(rows, "rows", (count, weights.num_summed), weights.dtype),
            count,
            self._struct,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out[:, : weights.num_columns]


def packed_struct(weights: PackedWeights) -> PackedStruct:
    """The C view of packed weights."""
    return PackedStruct(
        address(weights.data, "weights", tuple(weights.data.shape), weights.dtype),
        weights.num_columns,
        weights.num_summed,
        KINDS[weights.dtype],
    )
