"""How many blocks of KV cache a GPU has room for, beside the weights and the largest step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from batchinfer.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable

GIB = 1 << 30


class DeviceMemory(Protocol):
    """What a device says of its memory, in bytes."""

    def total(self) -> int:
        """All there is."""

    def free(self) -> int:
        """What no process has."""

    def reserved(self) -> int:
        """What this process has taken for tensors, used or not."""

    def allocated(self) -> int:
        """What this process's tensors take now."""

    def peak(self, run: Callable[[], object]) -> int:
        """Most that tensors took while something ran; what was reserved for it is given back."""


class CudaMemory:
    """Of a CUDA device; see :class:`DeviceMemory`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        """See :meth:`DeviceMemory.total`."""
        return torch.cuda.mem_get_info(self._device)[1]

    def free(self) -> int:
        """See :meth:`DeviceMemory.free`."""
        return torch.cuda.mem_get_info(self._device)[0]

    def reserved(self) -> int:
        """See :meth:`DeviceMemory.reserved`."""
        return torch.cuda.memory_reserved(self._device)

    def allocated(self) -> int:
        """See :meth:`DeviceMemory.allocated`."""
        return torch.cuda.memory_allocated(self._device)

    def peak(self, run: Callable[[], object]) -> int:
        """See :meth:`DeviceMemory.peak`."""
        torch.cuda.reset_peak_memory_stats(self._device)
        run()
        torch.cuda.synchronize(self._device)
        found = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.empty_cache()
        return found


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Bytes of a device, as measured before the KV cache is made."""

    total: int
    utilization: float
    """Share of ``total`` that the engine may take."""
    others: int
    """What is not this engine's tensors: other processes, CUDA itself."""
    weights: int
    step: int
    """What the largest step takes beside the weights."""
    graphs: int
    """What the captured graphs keep for themselves: the largest of them, since they share one pool."""

    @property
    def for_cache(self) -> int:
        """What is left for the KV cache; negative if nothing is."""
        return int(self.total * self.utilization) - self.others - self.weights - self.step - self.graphs

    def num_blocks(self, block_bytes: int, block_size: int, max_model_len: int) -> int:
        """Blocks that fit, one of them for padding; at least one sequence of ``max_model_len`` tokens.

        Raises:
            ModelError: not even that fits; with the numbers, and what to change.
        """
        fitting = self.for_cache // block_bytes - 1
        needed = -(-max_model_len // block_size)
        if fitting < needed:
            raise ModelError(self._shortage(block_bytes, block_size, max_model_len, max(0, fitting)))
        return fitting

    def _shortage(self, block_bytes: int, block_size: int, max_model_len: int, fitting: int) -> str:
        needed = (-(-max_model_len // block_size) + 1) * block_bytes
        longest = fitting * block_size
        shorter = f"lower max_model_len to at most {longest}, " if longest >= 2 else ""
        return (
            f"one sequence of max_model_len {max_model_len} needs {_gib(needed)} of KV cache, and "
            f"{_gib(max(0, self.for_cache))} are left: gpu_memory_utilization {self.utilization} of "
            f"{_gib(self.total)} is {_gib(int(self.total * self.utilization))}, of which the weights take "
            f"{_gib(self.weights)}, the largest step {_gib(self.step)}, CUDA graphs {_gib(self.graphs)}, and other "
            f"users of the GPU {_gib(self.others)}; {shorter}raise gpu_memory_utilization, lower "
            "max_num_batched_tokens, or set kv_cache_dtype int8"
        )


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def profile_memory(
    memory: DeviceMemory,
    utilization: float,
    largest_step: Callable[[], object],
    largest_graph: Callable[[], object] | None,
) -> MemoryProfile:
    """Run the largest step that there can be, and the largest that is captured, and see what they take.

    Raises:
        ModelError: the largest step does not fit.
    """
    weights = memory.allocated()
    others = max(0, memory.total() - memory.free() - memory.reserved())
    try:
        step = memory.peak(largest_step) - weights
        graphs = memory.peak(largest_graph) - weights if largest_graph is not None else 0
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"the largest step does not fit: the weights take {_gib(weights)} of {_gib(memory.total())}, other users "
            f"of the GPU {_gib(others)}; lower max_num_batched_tokens or max_num_seqs, or quantize the weights"
        ) from error
    return MemoryProfile(memory.total(), utilization, others, weights, step, graphs)
