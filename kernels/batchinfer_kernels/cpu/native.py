"""The ops in C++."""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from batchinfer_kernels.cpu.library import KINDS, AttentionStruct, CacheStruct, RopeStruct, SinkStruct, SourceStruct
from batchinfer_kernels.cpu.native_decoder import NativeHead, NativeLayers
from batchinfer_kernels.cpu.native_gemm import NativeProduct
from batchinfer_kernels.cpu.native_rows import NativeRowOps
from batchinfer_kernels.cpu.packed import PackedWeights
from batchinfer_kernels.cpu.pointers import (
    FLOATS,
    address,
    batch_struct,
    cache_struct,
    float_sink,
    kept_floats,
    out_dtype_of,
    rope_struct,
    source,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from batchinfer_kernels.cpu.interface import AttentionPlan
    from batchinfer_kernels.cpu.kv_cache import LayerKV
    from batchinfer_kernels.cpu.operands import Activations, AttentionBatch, RotaryEmbedding
    from batchinfer_kernels.cpu.packed import PackedLayer, PackedProjection

_FAULTS = {
    1: "query_start must ascend from 0",
    2: "context_lens counts fewer tokens than there are queries",
    3: "block_tables has too few blocks for context_lens",
    4: "block_tables names a block outside of the cache",
}


class NativePlan:
    """A batch and its work, held by the library; freed with this object."""

    def __init__(
        self,
        library: ctypes.CDLL,
        batch: AttentionBatch,
        layer: LayerKV,
        num_heads: int,
        least_shared: Sequence[int] = (),
    ) -> None:
        self._batch = batch  # the library reads its block tables
        self.block_size = layer.block_size
        self.num_blocks = layer.num_blocks
        table = torch.tensor(least_shared, dtype=torch.int32)  # lives until the plan is made
        struct = batch_struct(batch, layer, num_heads, table)
        fault = (ctypes.c_int32 * 2)()
        self.handle = library.bi_plan_create(struct, fault)
        if self.handle is None:
            raise ValueError(f"sequence {fault[1]} of the batch: {_FAULTS[fault[0]]}")
        weakref.finalize(self, library.bi_plan_free, self.handle)
        self.num_partials: int = library.bi_plan_num_partials(self.handle)
        self._num_tokens: int = library.bi_plan_num_tokens(self.handle)
        self._workspace = torch.empty(0)

    @property
    def num_tokens(self) -> int:
        """Query rows of the batch."""
        return self._num_tokens

    def check_fits(self, layer: LayerKV) -> None:
        """Raise ValueError if the plan was made for other blocks than this layer's."""
        if not (layer.block_size == self.block_size and layer.num_blocks == self.num_blocks):
            raise ValueError(f"the plan was made for {self.num_blocks} blocks of {self.block_size}, not for this layer")

    def room_for(self, num_heads: int, v_head_dim: int) -> int:
        """Address of a buffer for what is kept of splits, the same for every layer."""
        num_floats = self.num_partials * num_heads * kept_floats(v_head_dim)
        if self._workspace.numel() < num_floats:
            self._workspace = torch.empty(num_floats)
        return self._workspace.data_ptr()


class NativeOps(NativeRowOps):
    """The ops of a loaded library; see :class:`~batchinfer_kernels.cpu.interface.Ops`."""

    def __init__(self, library: ctypes.CDLL, name: str, *, packs: bool = False) -> None:
        """``packs``: whether products of packed weights are faster than torch's."""
        self._library = library
        self._name = name
        self._packs = packs
        # C views of what stays the same for a whole run: checking and building one takes 2-7 us, a tenth of some ops
        self._ropes: WeakKeyDictionary[RotaryEmbedding, tuple[int, RopeStruct]] = WeakKeyDictionary()
        self._caches: WeakKeyDictionary[LayerKV, CacheStruct] = WeakKeyDictionary()

    @property
    def name(self) -> str:
        """The variant's name."""
        return self._name

    def product(self, weight: torch.Tensor) -> NativeProduct | None:
        """The product with weights ``[n, k]``; None where torch's own is as good, or they cannot be packed."""
        if not (self._packs and PackedWeights.fits(weight)):
            return None
        return NativeProduct(self._library, PackedWeights.of(weight))

    def layers(self, layers: Sequence[PackedLayer], query_dtype: torch.dtype) -> NativeLayers:
        """Layers as one call a step; queries and what attention gives are in ``query_dtype``."""
        return NativeLayers(self._library, layers, query_dtype)

    def head(self, slices: Sequence[PackedProjection]) -> NativeHead:
        """A head in slices of its words, in order, as one call a step; all read the same rows."""
        return NativeHead(self._library, slices)

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
        """See :meth:`~batchinfer_kernels.cpu.interface.Ops.rope_and_kv_write`."""
        struct, tokens, width = source(query, "query")
        head_dim = layer.shape.head_dim
        if width % head_dim:
            raise ValueError(f"query has {width} columns; they must be heads of {head_dim}")
        out, sink = float_sink(tokens, width, out_dtype_of(query, out_dtype))
        write = self._writer(key, value, slots, layer, tokens)
        outside = write(
            struct,
            self._rope(rope, head_dim),
            address(positions, "positions", (tokens,), torch.int64),
            rope.cos.shape[0],
            width // head_dim,
            sink,
        )
        _require_inside(outside, tokens)
        return out.view(tokens, width // head_dim, head_dim)

    def _rope(self, rope: RotaryEmbedding, head_dim: int) -> RopeStruct:
        checked_for, struct = self._ropes.get(rope, (0, RopeStruct()))
        if checked_for != head_dim:
            struct = rope_struct(rope, head_dim)
            self._ropes[rope] = (head_dim, struct)
        return struct

    def _cache(self, layer: LayerKV) -> CacheStruct:
        struct = self._caches.get(layer)
        if struct is None:
            struct = self._caches[layer] = cache_struct(layer)
        return struct

    def kv_write(self, key: Activations, value: Activations, slots: torch.Tensor, layer: LayerKV) -> None:
        """See :meth:`~batchinfer_kernels.cpu.interface.Ops.kv_write`."""
        struct, tokens, _ = source(key, "key")
        write = self._writer(key, value, slots, layer, tokens)
        _require_inside(write(struct, RopeStruct(), 0, 0, 0, SinkStruct()), tokens)

    def _writer(
        self, key: Activations, value: Activations, slots: torch.Tensor, layer: LayerKV, tokens: int
    ) -> Callable[[SourceStruct, RopeStruct, int, int, int, SinkStruct], int]:
        """The C function with what all its callers give it; what is left to give: query, rope, positions, sink."""
        shape = layer.shape
        key_struct, *key_shape = source(key, "key")
        value_struct, *value_shape = source(value, "value")
        if not (
            key_shape == [tokens, shape.num_kv_heads * shape.head_dim]
            and value_shape == [tokens, shape.num_kv_heads * shape.v_head_dim]
        ):
            raise ValueError(
                f"key is {key_shape} and value {value_shape}; there are {tokens} tokens and the layer holds {shape}"
            )
        slots_address = address(slots, "slots", (tokens,), torch.int64)
        cache = self._cache(layer)

        def write(*arguments: SourceStruct | RopeStruct | SinkStruct | int) -> int:
            query, rope, positions, num_positions, num_heads, sink = arguments
            outside: int = self._library.bi_rope_and_kv_write(
                query, key_struct, value_struct, rope, positions, num_positions, slots_address, cache, tokens,
                num_heads, sink, torch.get_num_threads(),
            )  # fmt: skip
            return outside

        return write

    def plan_attention(
        self, batch: AttentionBatch, layer: LayerKV, num_heads: int, least_shared: Sequence[int] = ()
    ) -> NativePlan:
        """See :meth:`~batchinfer_kernels.cpu.interface.Ops.plan_attention`."""
        return NativePlan(self._library, batch, layer, num_heads, least_shared)

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
        """See :meth:`~batchinfer_kernels.cpu.interface.Ops.paged_attention`."""
        if not isinstance(plan, NativePlan):
            raise TypeError("the plan was not made by these ops")
        shape = layer.shape
        num_rows, num_heads, _ = query.shape
        _check_query(query, layer, plan)
        dtype = query.dtype if out_dtype is None else out_dtype
        if dtype not in FLOATS:
            raise ValueError(f"out_dtype is {dtype}; it must be float32 or bfloat16")
        if window is not None and window <= 0:
            raise ValueError(f"window is {window}; it must be positive")
        out = torch.empty(num_rows, num_heads, shape.v_head_dim, dtype=dtype)
        out[plan.num_tokens :].zero_()
        struct = AttentionStruct(
            query.data_ptr(),
            out.data_ptr(),
            address(sinks, "sinks", (num_heads,)),
            plan.room_for(num_heads, shape.v_head_dim),
            query.stride(0),
            KINDS[query.dtype],
            KINDS[dtype],
            num_heads,
            window or 0,
            scale,
            softcap or 0.0,
        )
        self._library.bi_attention(plan.handle, self._cache(layer), struct, torch.get_num_threads())
        return out


def _require_inside(outside: int, tokens: int) -> None:
    if outside:
        raise ValueError(f"{outside} of {tokens} positions or slots lie outside of the rope's table or the cache")


def _check_query(query: torch.Tensor, layer: LayerKV, plan: NativePlan) -> None:
    shape = layer.shape
    num_rows, num_heads, head_dim = query.shape
    if not (head_dim == shape.head_dim and num_heads % shape.num_kv_heads == 0 and num_rows >= plan.num_tokens):
        raise ValueError(f"query is {list(query.shape)}; the plan has {plan.num_tokens} tokens and the layer {shape}")
    if query.dtype not in FLOATS:
        raise ValueError(f"query is {query.dtype}; it must be float32 or bfloat16")
    if not (query.stride()[1:] == (head_dim, 1) or num_rows * num_heads * head_dim == 0):
        raise ValueError("a token's heads must lie side by side in query")
    plan.check_fits(layer)
