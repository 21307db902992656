"""What an exception says of the device: too little memory, a context that is of no more use, or hardware that is not well.

Drivers and libraries say it in words alone, so the words decide; those that torch, Triton, cuBLAS, cuDNN, NVML and the
kernel's log use are in the tables below. Nothing here needs a device, or imports torch.
"""

from __future__ import annotations

import gc
import re
import sys
import traceback
from enum import StrEnum


class DeviceFault(StrEnum):
    """What went wrong, from the mildest to the worst."""

    OUT_OF_MEMORY = "out_of_memory"
    """A smaller step may pass."""
    POISONED = "poisoned"
    """The process can use the device no more, a new one can: a row may be to blame."""
    UNHEALTHY = "unhealthy"
    """The hardware or its driver failed: no row is to blame, and a new process may fail as well."""


XIDS = frozenset({48, 63, 64, 74, 79, 94, 95})
"""The driver's numbers for hardware: ECC errors of two bits, pages retired (63) or not (64), NVLink, a GPU that fell off the
bus, ECC errors contained (94) and not (95). Others, such as 13 and 31, are mostly a program's own."""
_XID = re.compile(r"\bxid\b\s*(?:\([^)]*\))?\s*:?\s*(\d{1,3})\b")

# the texts of cudaGetErrorString, and what torch, NVML and the driver put around them; lower case
_UNHEALTHY = (
    "uncorrectable ecc",
    "ecc error",
    "uncorrectable nvlink",
    "gpu is lost",
    "fallen off the bus",
    "device lost",
    "nvlink or a hardware error",
    "no cuda-capable device is detected",
    "device(s) is/are busy or unavailable",
    "no cuda gpus are available",
    "no hip gpus are available",
    "found no nvidia driver",
    "cuda driver initialization failed",
    "cuda unknown error",
    "cuda error: unknown error",
    "hip error: unknown error",
    "cuda error: initialization error",
    "cuda error: system not yet initialized",
    "system has unsupported display driver",
    "gpu requires reset",
    "requires device reset",
    "failed to initialize nvml",
    "driver/library version mismatch",
    "nvml_success == r",
    "nvmlinit",
)
_OUT_OF_MEMORY = (
    "cuda out of memory",
    "hip out of memory",
    "cuda error: out of memory",
    "hip error: out of memory",
    "triton error [cuda]: out of memory",
    "triton error [hip]: out of memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "can't allocate memory",
    "not enough memory: you tried to allocate",
)
_POISONED = (
    "device-side assert",
    "illegal memory access",
    "unspecified launch failure",
    "misaligned address",
    "illegal instruction",
    "illegal address",
    "invalid program counter",
    "hardware stack error",
    "operation not supported on global/shared address space",
    "launch timed out and was terminated",
    "context is destroyed",
    "cublas_status_execution_failed",
    "cublas_status_internal_error",
    "cublas_status_not_initialized",
    "cudnn_status_execution_failed",
    "cudnn_status_internal_error",
)


def fault_of(error: BaseException) -> DeviceFault | None:
    """What an exception says of the device; None if it says nothing: then only its row or the program is to blame.

    Of its causes the worst counts. Words count only in exceptions of the kinds that drivers and libraries raise: a row's
    own text may be quoted in others.
    """
    found = [_fault_of_one(one) for one in _chain(error)]
    order = list(DeviceFault)
    return max((fault for fault in found if fault is not None), key=order.index, default=None)


def _chain(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and one not in chain:
        chain.append(one)
        one = one.__cause__
    return chain


def _fault_of_one(error: BaseException) -> DeviceFault | None:
    if isinstance(error, MemoryError):
        return DeviceFault.OUT_OF_MEMORY
    if not isinstance(error, (RuntimeError, OSError)) and type(error).__module__.split(".")[0] not in {
        "pynvml",
        "triton",
    }:
        return None
    text = str(error).lower()
    if any(words in text for words in _UNHEALTHY) or any(int(number) in XIDS for number in _XID.findall(text)):
        return DeviceFault.UNHEALTHY
    kinds = {kind.__name__ for kind in type(error).__mro__ if kind.__module__.split(".")[0] == "torch"}
    if "OutOfMemoryError" in kinds or any(words in text for words in _OUT_OF_MEMORY):
        return DeviceFault.OUT_OF_MEMORY
    # torch raises it for whatever a device call returns: what is not known to pass is taken for the worse
    if "AcceleratorError" in kinds or any(words in text for words in _POISONED):
        return DeviceFault.POISONED
    return None


def first_sentence(error: BaseException) -> str:
    """An exception's words without the advice on debugging that torch puts behind them."""
    text = " ".join(str(error).split("\n", 1)[0].split())
    return re.split(r"(?<=[.!]) (?=[A-Z])", text)[0].rstrip(".") or type(error).__name__


def free_device_memory(error: BaseException) -> None:
    """Let go of what a failed step still holds: its frames' tensors, and blocks that torch keeps for itself."""
    for one in _chain(error):
        traceback.clear_frames(one.__traceback__)
    gc.collect()
    if (torch := sys.modules.get("torch")) is not None:
        torch.cuda.empty_cache()  # does nothing where CUDA is not in use
