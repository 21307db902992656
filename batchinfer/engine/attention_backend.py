"""Which attention a runner uses: the C++ kernels where they can, torch everywhere else."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

import torch

from batchinfer.engine.attention import BatchContext
from batchinfer.engine.attention_groups import group_spans
from batchinfer.engine.kv_cache import KVCache
from batchinfer.engine.native_attention import BLOCK_MULTIPLE, DTYPES, NativeAttention, kv_shape
from batchinfer.errors import ModelError
from batchinfer_kernels.cpu import get_ops, is_available

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchinfer.engine.attention import PagedContext
    from batchinfer.engine.attention_groups import Span
    from batchinfer.engine.kv_cache import LayerShape

_log = logging.getLogger(__name__)


class AttentionBackend(Protocol):
    """Keeps the KV cache, and makes the context of each step."""

    @property
    def name(self) -> str:
        """Which implementation, for people: a kernel variant or ``torch``."""

    def context(self, spans: Sequence[Span], num_rows: int) -> PagedContext:
        """Context of a step whose packed tokens are padded to ``num_rows``."""


class TorchAttention:
    """The reference of :mod:`batchinfer.engine.attention`: any device, dtype and block size."""

    name = "torch"

    def __init__(
        self, layers: Sequence[LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._kv_cache = KVCache(layers, num_blocks, block_size, dtype, device)
        self._block_size = block_size
        self._device = device

    def context(self, spans: Sequence[Span], num_rows: int) -> BatchContext:
        """See :meth:`AttentionBackend.context`; rows without a slot are padding here."""
        del num_rows
        size = self._block_size
        slots = [s.block_table[p // size] * size + p % size for s in spans for p in range(s.start, s.context)]
        row = torch.tensor(slots, dtype=torch.int64, device=self._device)
        return BatchContext(self._kv_cache, row, group_spans(spans, size, self._device))


def why_not_native(
    device: torch.device, dtype: torch.dtype, block_size: int, *, needs_compiler: bool = True
) -> str | None:
    """Why the CPU kernels cannot serve here; None if they can. Compiles them at first use.

    Without ``needs_compiler`` their torch twins will do, which are slow and can all they can.
    """
    if device.type != "cpu":
        return f"they run on the CPU and not on {device}"
    if dtype not in DTYPES:
        return f"they have no {dtype}"
    if block_size % BLOCK_MULTIPLE:
        return f"block_size {block_size} is no multiple of {BLOCK_MULTIPLE}"
    is_native, reason = is_available()
    return None if is_native or not needs_compiler else reason


def choose_attention(
    layers: Sequence[LayerShape],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    needs_compiler: bool = True,
    kv_dtype: torch.dtype | None = None,
) -> AttentionBackend:
    """The fastest attention there is for this device, dtype and block size; the log says which, and why.

    Keys and values are kept in ``kv_dtype`` (None: ``dtype``).

    Raises:
        ModelError: ``kv_dtype`` is given, and only attention that has no other serves here.
    """
    needs_compiler = needs_compiler and kv_dtype is None
    if (reason := why_not_native(device, dtype, block_size, needs_compiler=needs_compiler)) is not None:
        if kv_dtype is not None:
            raise ModelError(
                f"kv_cache_dtype int8 needs the CPU kernels, which cannot serve: {reason}; use kv_cache_dtype auto",
                param="kv_cache_dtype",
            )
        _log.info("attention runs in torch; the CPU kernels are not used: %s", reason)
        return TorchAttention(layers, num_blocks, block_size, dtype, device)
    _log.info("attention runs in %s", is_available()[1])
    return NativeAttention(get_ops(), layers, num_blocks, block_size, dtype, kv_dtype=kv_dtype)


def bytes_per_block(
    layers: Sequence[LayerShape],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    kv_dtype: torch.dtype | None = None,
) -> int:
    """Memory of a block in all layers, in ``kv_dtype`` (None: ``dtype``)."""
    if kv_dtype is not None:
        return sum(kv_shape(layer).bytes_per_block(block_size, kv_dtype) for layer in layers)
    if why_not_native(device, dtype, block_size) is None:
        return sum(kv_shape(layer).bytes_per_block(block_size, dtype) for layer in layers)
    return block_size * dtype.itemsize * sum(layer.num_elements for layer in layers)
