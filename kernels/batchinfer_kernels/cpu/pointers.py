"""C views of tensors. What they check, C++ relies on: each fault found here would read or write out of bounds there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from batchinfer_kernels.cpu.kv_cache import TILE, kv_rotation
from batchinfer_kernels.cpu.library import (
    KINDS,
    BatchStruct,
    CacheStruct,
    ReductionStruct,
    RopeStruct,
    SinkStruct,
    SourceStruct,
)
from batchinfer_kernels.cpu.operands import Accumulated, Int8Rows

if TYPE_CHECKING:
    from batchinfer_kernels.cpu.kv_cache import LayerKV
    from batchinfer_kernels.cpu.operands import (
        Activations,
        AttentionBatch,
        Int8Recipe,
        LogitsReduction,
        RotaryEmbedding,
    )

FLOATS = (torch.float32, torch.bfloat16)
MAX_WORKSPACE_BYTES = 128 * 1024 * 1024
"""For states of shared prefixes and of contexts cut between threads; beyond it rows read their contexts alone."""


def address(tensor: torch.Tensor | None, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
    """Address of a contiguous CPU tensor of that shape and dtype; 0 of None."""
    if tensor is None:
        return 0
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous() or not tensor.is_cpu:
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; it must be contiguous {dtype} {list(shape)} on the CPU"
        )
    return tensor.data_ptr()


def source(x: Activations, name: str) -> tuple[SourceStruct, int, int]:
    """The C view of activations, with their rows and columns."""
    values = x.values if isinstance(x, Accumulated) else x
    if values.dim() != 2:
        raise ValueError(f"{name} has {values.dim()} dimensions; it must have 2")
    rows, columns = values.shape
    stride = values.stride(0)
    if (values.stride(1) != 1 and columns > 1) or not values.is_cpu:
        raise ValueError(f"{name} must lie on the CPU with unit stride along a row")
    if isinstance(x, Accumulated):
        if values.dtype != torch.int32:
            raise ValueError(f"{name}.values is {values.dtype}; it must be int32")
        row_scale = address(x.row_scale, f"{name}.row_scale", (rows,))
        column_scale = address(x.column_scale, f"{name}.column_scale", (columns,))
        bias = address(x.bias, f"{name}.bias", (columns,))
        return SourceStruct(values.data_ptr(), stride, row_scale, column_scale, bias, 2), rows, columns
    if values.dtype not in FLOATS:
        raise ValueError(f"{name} is {values.dtype}; it must be float32 or bfloat16")
    return SourceStruct(values.data_ptr(), stride, None, None, None, KINDS[values.dtype]), rows, columns


def shape_of(x: Activations) -> tuple[int, int]:
    """Rows and columns."""
    rows, columns = (x.values if isinstance(x, Accumulated) else x).shape
    return rows, columns


def out_dtype_of(x: Activations, out_dtype: torch.dtype | None) -> torch.dtype:
    """What a result is stored as when the caller left it open."""
    if out_dtype is None:
        return torch.float32 if isinstance(x, Accumulated) else x.dtype
    if out_dtype not in FLOATS:
        raise ValueError(f"out_dtype is {out_dtype}; it must be float32 or bfloat16")
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


def reduction_struct(reduction: LogitsReduction) -> ReductionStruct:
    """The C view of a reduction; top-k, log-sum-exp and whole rows are null where they are not wanted."""
    rows, k, kept = reduction.num_rows, reduction.top_k, len(reduction.kept)
    return ReductionStruct(
        address(reduction.best, "best", (rows,)),
        address(reduction.best_index, "best_index", (rows,), torch.int64),
        address(reduction.peak, "peak", (rows,)),
        address(reduction.total, "total", (rows,)),
        address(reduction.top_values, "top_values", (rows, k)) if k else None,
        address(reduction.top_indices, "top_indices", (rows, k), torch.int64) if k else None,
        address(reduction.has_nan, "has_nan", (rows,), torch.bool),
        address(reduction.place, "place", (rows,), torch.int64) if kept else None,
        address(reduction.logits, "logits", (kept, reduction.logits.shape[1])) if kept else None,
        reduction.logits.shape[1],
        k,
    )


def cache_struct(layer: LayerKV) -> CacheStruct:
    """The C view of a layer's cache, whose parts :class:`PagedKVCache` has laid beside each other."""
    shape = layer.shape
    parts = (layer.keys, layer.values, layer.key_scales, layer.value_scales)
    if not all(part is None or part[0].is_contiguous() for part in parts):
        raise ValueError("a block's keys, values or scales of a layer do not lie in one piece")
    # of one block no stride is used, and torch's may be any
    strides = {x.stride(0) * x.element_size() if len(x) > 1 else 0 for x in parts if x is not None}
    if len(strides) > 1:
        raise ValueError(
            f"blocks of a cache's parts are {sorted(strides)} bytes apart; they must lie beside each other"
        )
    return CacheStruct(
        *(None if part is None else part.data_ptr() for part in parts),
        strides.pop(),
        layer.num_blocks,
        KINDS[layer.dtype],
        layer.block_size,
        shape.num_kv_heads,
        shape.head_dim,
        shape.v_head_dim,
        kv_rotation(shape.head_dim),
        kv_rotation(shape.v_head_dim),
    )


def rope_struct(rope: RotaryEmbedding, head_dim: int) -> RopeStruct:
    """The C view of a rotary embedding for heads of ``head_dim``."""
    if rope.cos.dim() != 2 or 2 * rope.cos.shape[1] > head_dim:
        raise ValueError("rope.cos must be [positions, <= head_dim / 2]")
    table = (rope.cos.shape[0], rope.cos.shape[1])
    return RopeStruct(
        address(rope.cos, "rope.cos", table),
        address(rope.sin, "rope.sin", table),
        address(rope.q_norm, "rope.q_norm", (head_dim,)),
        address(rope.k_norm, "rope.k_norm", (head_dim,)),
        rope.norm_offset,
        rope.norm_eps,
        2 * table[1],
        int(rope.interleaved),
    )


def kept_floats(v_head_dim: int) -> int:
    """Numbers that are kept of a split and head: ``Attention.workspace`` of ``attention.h``."""
    return -(-v_head_dim // TILE) * TILE + 16


def batch_struct(batch: AttentionBatch, layer: LayerKV, num_heads: int, least_shared: torch.Tensor) -> BatchStruct:
    """The C view of a batch that attends with ``num_heads`` over caches like this layer's."""
    shape = layer.shape
    num_sequences, max_blocks = batch.block_tables.shape
    if num_heads % shape.num_kv_heads:
        raise ValueError(f"{num_heads} heads do not divide by {shape.num_kv_heads} KV heads")
    return BatchStruct(
        address(batch.query_start, "query_start", (num_sequences + 1,), torch.int32),
        address(batch.context_lens, "context_lens", (num_sequences,), torch.int32),
        address(batch.block_tables, "block_tables", (num_sequences, max_blocks), torch.int32),
        max_blocks,
        layer.num_blocks,
        MAX_WORKSPACE_BYTES // (4 * num_heads * kept_floats(shape.v_head_dim)),
        num_sequences,
        layer.block_size,
        num_heads // shape.num_kv_heads,
        shape.num_kv_heads,
        torch.get_num_threads(),
        len(least_shared),
        address(least_shared, "least_shared", (len(least_shared),), torch.int32),
    )
