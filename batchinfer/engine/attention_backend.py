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


def why_not_triton(layers: Sequence[LayerShape], block_size: int, device: torch.device) -> str | None:
    """Why the Triton kernels cannot serve here; None if they can."""
    try:
        from triton import knobs  # noqa: PLC0415 -- only CUDA builds of torch bring Triton

        from batchinfer.engine import triton_attention  # noqa: PLC0415 -- as above
    except ImportError:
        return "Triton is not installed: pip install 'batchinfer[gpu]'"
    if device.type != "cuda" and not knobs.runtime.interpret:
        return f"they run on a GPU and not on {device}, but in Triton's interpreter (TRITON_INTERPRET=1), which is for tests"
    return triton_attention.why_not_triton(layers, block_size)


def choose_backend(
    layers: Sequence[LayerShape],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    wanted: str = "auto",
    needs_compiler: bool = True,
) -> tuple[str, str | None]:
    """One of ``native``, ``triton`` and ``torch``, and why it is not the fastest that this device could have.

    Raises:
        ModelError: what is ``wanted`` cannot serve here.
    """
    reasons: dict[str, str | None] = {"torch": None}
    best = "triton" if device.type == "cuda" else "native"
    if "triton" in {wanted, best}:
        reasons["triton"] = why_not_triton(layers, block_size, device)
    if "native" in {wanted, best}:
        reasons["native"] = why_not_native(device, dtype, block_size, needs_compiler=needs_compiler)
    if wanted != "auto":
        if (reason := reasons[wanted]) is not None:
            raise ModelError(
                f"attention_backend {wanted} cannot serve: {reason}; use attention_backend auto",
                param="attention_backend",
            )
        return wanted, None
    return (best, None) if reasons[best] is None else ("torch", f"the {best} kernels are not used: {reasons[best]}")


def choose_attention(
    layers: Sequence[LayerShape],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    needs_compiler: bool = True,
    kv_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> AttentionBackend:
    """The fastest attention there is for this device, dtype and block size; the log says which, and why.

    Keys and values are kept in ``kv_dtype`` (None: ``dtype``). ``backend`` asks for one of
    :data:`~batchinfer.engine.config.ATTENTION_BACKENDS`.

    Raises:
        ModelError: ``kv_dtype`` is given, and only attention that has no other serves here; or ``backend`` cannot.
    """
    needs_compiler = needs_compiler and kv_dtype is None
    name, reason = choose_backend(layers, block_size, dtype, device, wanted=backend, needs_compiler=needs_compiler)
    if name == "triton":
        from batchinfer.engine.triton_attention import TritonAttention  # noqa: PLC0415 -- needs Triton

        _log.info("attention runs in Triton kernels on %s", device)
        return TritonAttention(layers, num_blocks, block_size, dtype, device, kv_dtype=kv_dtype)
    if name == "native":
        _log.info("attention runs in %s", is_available()[1])
        return NativeAttention(get_ops(), layers, num_blocks, block_size, dtype, kv_dtype=kv_dtype)
    if kv_dtype is not None:
        raise ModelError(
            f"kv_cache_dtype int8 needs kernels that cannot serve: {reason or 'attention_backend is torch'}; "
            "use kv_cache_dtype auto",
            param="kv_cache_dtype",
        )
    _log.info("attention runs in torch; %s", reason or "it was asked for")
    return TorchAttention(layers, num_blocks, block_size, dtype, device)


def bytes_per_block(
    layers: Sequence[LayerShape],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    kv_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> int:
    """Memory of a block in all layers, in ``kv_dtype`` (None: ``dtype``)."""
    name, _ = choose_backend(layers, block_size, dtype, device, wanted=backend, needs_compiler=kv_dtype is None)
    if name == "native" or (kv_dtype is not None and name != "triton"):
        return sum(kv_shape(layer).bytes_per_block(block_size, kv_dtype or dtype) for layer in layers)
    kept = kv_dtype or dtype
    # with INT8 a float32 scale for each token and head, of keys and of values
    scales = 2 * torch.float32.itemsize if kept == torch.int8 else 0
    return block_size * sum(kept.itemsize * layer.num_elements + scales * layer.num_kv_heads for layer in layers)
