"""A step's layers, and its head, as one call each: no return to Python and no waking of threads between the ops."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from batchinfer_kernels.cpu.kv_cache import KVShape
from batchinfer_kernels.cpu.library import (
    KINDS,
    CacheStruct,
    LayerStruct,
    LinearStruct,
    NormStruct,
    StepStruct,
)
from batchinfer_kernels.cpu.native_gemm import packed_struct
from batchinfer_kernels.cpu.native_rows import ACTIVATIONS
from batchinfer_kernels.cpu.operands import Accumulated
from batchinfer_kernels.cpu.packed import PRODUCTS
from batchinfer_kernels.cpu.pages import untouched_zeros
from batchinfer_kernels.cpu.pointers import address, cache_struct, reduction_struct, rope_struct

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchinfer_kernels.cpu.kv_cache import LayerKV
    from batchinfer_kernels.cpu.native import NativePlan
    from batchinfer_kernels.cpu.operands import Activations, Int8Rows, LogitsReduction
    from batchinfer_kernels.cpu.packed import Norm, PackedLayer, PackedProjection

PARTS = ("gemm", "attention", "elementwise")
"""``Part`` of ``decoder.cpp``."""
BLOCKS_FROM = 96
"""Tokens a thread from which on threads take blocks of a step through a layer alone; below, they share each product's columns."""
BLOCK = 256
"""Most tokens of a block: what lies between its ops stays in a core's own cache."""
BLOCK_STEP = 32
"""Rows that the products take at once."""


def block_of(tokens: int, threads: int) -> int:
    """Tokens of a step's blocks, which are about as many for each thread; 0 if there are too few for blocks."""
    if tokens < threads * BLOCKS_FROM:
        return 0
    blocks = -(-tokens // (threads * BLOCK)) * threads
    return -(-tokens // (blocks * BLOCK_STEP)) * BLOCK_STEP


class Spent:
    """Nanoseconds of the parts of what ran."""

    def __init__(self) -> None:
        self._counters = (ctypes.c_int64 * len(PARTS))()

    @property
    def address(self) -> int:
        """Of the counters."""
        return ctypes.addressof(self._counters)

    def take(self) -> dict[str, int]:
        """By part, since it was last taken."""
        found = dict(zip(PARTS, self._counters, strict=True))
        ctypes.memset(self._counters, 0, ctypes.sizeof(self._counters))
        return found


class Buffers:
    """Room for a step's tokens, kept from step to step; it grows with the longest step seen."""

    def __init__(self, layers: Sequence[PackedLayer], query_dtype: torch.dtype) -> None:
        linears = [one for layer in layers for one in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        self.row_bytes = max(one.weights.num_summed * one.weights.dtype.itemsize for one in linears)
        self.columns = max(one.weights.padded_columns for layer in layers for one in (layer.qkv, layer.o, layer.down))
        self.gated_columns = max(layer.down.weights.num_summed for layer in layers)
        self._added = max(layer.down.weights.padded_columns for layer in layers)
        self._query = max(layer.num_heads * layer.head_dim for layer in layers)
        self._attended = max(layer.o.weights.num_summed for layer in layers)
        self._query_dtype = query_dtype
        self._room = self._tokens = 0

    def reserve(self, tokens: int, room: int) -> None:
        """Make room: for what is there once of all tokens, and for so many rows of what lies between ops."""
        if room > self._room:
            self._room = 0  # until all is there: memory may run out
            self.rows = untouched_zeros((room * self.row_bytes,), torch.uint8)
            self.product = untouched_zeros((room * self.columns,), torch.int32)
            self.gated = untouched_zeros((room * self.gated_columns,), torch.float32)
            self._room = room
        if tokens <= self._tokens:
            return
        self._tokens = 0
        self.row_scale = torch.empty(tokens)
        self.added = torch.empty(tokens * self._added, dtype=torch.int32)
        self.query = torch.empty(tokens * self._query, dtype=self._query_dtype)
        self.attended = torch.empty(tokens * self._attended, dtype=self._query_dtype)
        self._tokens = tokens


class NativeLayers:
    """The layers of a decoder. Answers to the byte as the ops do that it is made of."""

    def __init__(self, library: ctypes.CDLL, layers: Sequence[PackedLayer], query_dtype: torch.dtype) -> None:
        self._library = library
        self._layers = layers  # their tensors must live
        self._hidden = layers[0].attention_norm.weight.shape[0]
        self._structs = (LayerStruct * len(layers))(*[_layer_struct(layer, self._hidden) for layer in layers])
        self._query_dtype = query_dtype
        self._buffers = Buffers(layers, query_dtype)
        self._caches: tuple[LayerKV, ctypes.Array[CacheStruct]] | None = None
        self.spent = Spent()

    def __call__(
        self,
        residual: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        caches: Sequence[LayerKV],
        plan: NativePlan,
    ) -> Activations:
        """Run a step: ``residual`` float32 ``[T, hidden_size]`` is changed in place, ``positions`` and ``slots`` int64.

        What the last layer still has to add to it is returned, and is good until the next call.

        Raises:
            ValueError: a wrong shape, or a position or slot outside of its table.
        """
        tokens = len(residual)
        if plan.num_tokens > tokens:
            raise ValueError(f"residual has {tokens} rows; the plan has {plan.num_tokens} tokens")
        caches_of_layers = self._cache_structs(caches)
        plan.check_fits(caches[0])
        buffers = self._buffers
        threads = torch.get_num_threads()
        block = block_of(tokens, threads)
        buffers.reserve(tokens, threads * block or tokens)
        first = self._layers[0]
        attended = buffers.attended[: tokens * first.o.weights.num_summed].view(tokens, -1)
        attended[plan.num_tokens :].zero_()
        step = StepStruct(
            address(residual, "residual", (tokens, self._hidden)),
            tokens,
            self._hidden,
            address(positions, "positions", (tokens,), torch.int64),
            address(slots, "slots", (tokens,), torch.int64),
            plan.handle,
            plan.room_for(first.num_heads, caches[0].shape.v_head_dim),
            buffers.rows.data_ptr(),
            buffers.row_scale.data_ptr(),
            buffers.product.data_ptr(),
            buffers.gated.data_ptr(),
            buffers.added.data_ptr(),
            buffers.query.data_ptr(),
            attended.data_ptr(),
            self.spent.address,
            0,
            buffers.row_bytes,
            buffers.columns,
            buffers.gated_columns,
            block,
            KINDS[self._query_dtype],
        )
        self._library.bi_decoder_layers(self._structs, caches_of_layers, len(self._layers), step, threads)
        if step.outside:
            raise ValueError(f"{step.outside} positions or slots lie outside of the rope's table or the cache")
        return self._left(tokens)

    def _left(self, tokens: int) -> Activations:
        last = self._layers[-1].down
        width = last.weights.padded_columns
        product = self._buffers.added.view(PRODUCTS[last.weights.dtype])[: tokens * width].view(tokens, width)
        values = product[:, : last.weights.num_columns]
        if last.column_scale is not None:
            return Accumulated(values, self._buffers.row_scale[:tokens], last.column_scale, last.bias)
        return values if last.bias is None else values + last.bias

    def _cache_structs(self, caches: Sequence[LayerKV]) -> ctypes.Array[CacheStruct]:
        if self._caches is None or self._caches[0] is not caches[0]:
            _check_caches(caches, self._layers)
            self._caches = caches[0], (CacheStruct * len(caches))(*map(cache_struct, caches))
        return self._caches[1]


def _check_caches(caches: Sequence[LayerKV], layers: Sequence[PackedLayer]) -> None:
    if len(caches) != len(layers):
        raise ValueError(f"{len(caches)} caches for {len(layers)} layers")
    first = caches[0]
    for cache, layer in zip(caches, layers, strict=True):
        if cache.shape != KVShape(layer.num_kv_heads, layer.head_dim, layer.v_head_dim):
            raise ValueError(f"a cache holds {cache.shape}, which is not what its layer writes")
        if (cache.block_size, cache.num_blocks) != (first.block_size, first.num_blocks):
            raise ValueError("caches of one step must have blocks of the same size and number")


class NativeHead:
    """The head's product, slice after slice, and the reduction of its logits."""

    def __init__(self, library: ctypes.CDLL, slices: Sequence[PackedProjection]) -> None:
        self._library = library
        self._slices = slices  # their tensors must live
        self._structs = (LinearStruct * len(slices))(*map(_linear_struct, slices))
        self._columns = max(one.weights.padded_columns for one in slices)
        self._num_words = sum(one.weights.num_columns for one in slices)
        self._summed = slices[0].weights.num_summed
        self._dtype = slices[0].weights.dtype
        self._product = torch.empty(0, dtype=torch.int32)

    def __call__(
        self,
        x: torch.Tensor | Int8Rows,
        reduction: LogitsReduction,
        *,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        """Take the logits of rows ``x [num_rows, k]`` into the reduction, whose kept rows have all words."""
        values, scales = (x, None) if isinstance(x, torch.Tensor) else (x.values, x.scales)
        rows = reduction.num_rows
        if reduction.kept and reduction.logits.shape[1] < self._num_words:
            raise ValueError(
                f"the reduction keeps {reduction.logits.shape[1]} columns; there are {self._num_words} words"
            )
        if self._product.numel() < rows * self._columns:
            self._product = torch.empty(rows * self._columns, dtype=torch.int32)
        self._library.bi_decoder_head(
            self._structs,
            len(self._slices),
            address(values, "x", (rows, self._summed), self._dtype),
            address(scales, "scales", (rows,)),
            rows,
            self._product.data_ptr(),
            scale,
            softcap or 0.0,
            reduction_struct(reduction),
            torch.get_num_threads(),
        )


def _linear_struct(linear: PackedProjection) -> LinearStruct:
    columns = (linear.weights.num_columns,)
    recipe = linear.recipe
    if recipe is not None:
        recipe.check(linear.weights.num_summed)
    return LinearStruct(
        packed_struct(linear.weights),
        address(linear.column_scale, "column_scale", columns),
        address(linear.bias, "bias", columns),
        address(recipe.smoothing if recipe else None, "smoothing", (linear.weights.num_summed,)),
        recipe.rotation if recipe else 0,
    )


def _norm_struct(norm: Norm, hidden: int) -> NormStruct:
    return NormStruct(address(norm.weight, "norm", (hidden,)), norm.offset, norm.eps)


def _layer_struct(layer: PackedLayer, hidden: int) -> LayerStruct:
    layer.check(hidden)
    return LayerStruct(
        *map(_linear_struct, (layer.qkv, layer.o, layer.gate_up, layer.down)),
        _norm_struct(layer.attention_norm, hidden),
        _norm_struct(layer.mlp_norm, hidden),
        rope_struct(layer.rope, layer.head_dim),
        layer.rope.cos.shape[0],
        layer.num_heads,
        ACTIVATIONS[layer.activation],
        layer.window or 0,
        layer.scaling,
        layer.softcap or 0.0,
    )
