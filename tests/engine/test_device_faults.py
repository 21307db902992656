"""What exceptions say of the device, in the words that torch, Triton, cuBLAS and the driver print."""

import builtins

import pytest
import torch

from batchinfer.engine.device_faults import DeviceFault, fault_of, first_sentence, free_device_memory

ADVICE = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect."
    "\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nDevice-side assertions were explicitly omitted for this error "
    "check; the error probably arose while initializing the DSA handlers."
)
OOM, POISONED, UNHEALTHY = DeviceFault.OUT_OF_MEMORY, DeviceFault.POISONED, DeviceFault.UNHEALTHY


@pytest.mark.parametrize(
    ("kind", "message", "fault"),
    [
        (torch.OutOfMemoryError, ("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.15 GiB of "
         "which 1.44 GiB is free. Including non-PyTorch memory, this process has 77.70 GiB memory in use."), OOM),
        (torch.OutOfMemoryError, "HIP out of memory. Tried to allocate 2.00 GiB.", OOM),
        (torch.AcceleratorError, f"CUDA error: out of memory{ADVICE}", OOM),
        (RuntimeError, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", OOM),
        (RuntimeError, "Triton Error [CUDA]: out of memory", OOM),
        (RuntimeError, ("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
         "allocate 4000000000000 bytes. Error code 12 (Cannot allocate memory)"), OOM),
        (MemoryError, "", OOM),
        (torch.AcceleratorError, f"CUDA error: device-side assert triggered{ADVICE}", POISONED),
        (torch.AcceleratorError, f"CUDA error: an illegal memory access was encountered{ADVICE}", POISONED),
        (torch.AcceleratorError, f"CUDA error: unspecified launch failure{ADVICE}", POISONED),
        (torch.AcceleratorError, f"CUDA error: misaligned address{ADVICE}", POISONED),
        (torch.AcceleratorError, f"CUDA error: something new{ADVICE}", POISONED),
        (RuntimeError, f"CUDA error: the launch timed out and was terminated{ADVICE}", POISONED),
        (RuntimeError, "Triton Error [CUDA]: an illegal memory access was encountered", POISONED),
        (RuntimeError, "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa, opb, m, n, k)`",
         POISONED),
        (torch.AcceleratorError, f"CUDA error: uncorrectable ECC error encountered{ADVICE}", UNHEALTHY),
        (torch.AcceleratorError, f"CUDA error: uncorrectable NVLink error detected during the execution{ADVICE}", UNHEALTHY),
        (torch.AcceleratorError, "CUDA error: CUDA-capable device(s) is/are busy or unavailable", UNHEALTHY),
        (torch.AcceleratorError, "CUDA error: no CUDA-capable device is detected", UNHEALTHY),
        (torch.AcceleratorError, "CUDA error: unknown error", UNHEALTHY),
        (torch.AcceleratorError, "CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error", UNHEALTHY),
        (RuntimeError, "No CUDA GPUs are available", UNHEALTHY),
        (RuntimeError, "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU", UNHEALTHY),
        (RuntimeError, ("CUDA unknown error - this may be due to an incorrectly set up environment, e.g. changing env variable "
         "CUDA_VISIBLE_DEVICES after program start. Setting the available devices to be zero."), UNHEALTHY),
        (RuntimeError, ('NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":838, please report a '
         "bug to PyTorch."), UNHEALTHY),
        (RuntimeError, "Failed to initialize NVML: Driver/library version mismatch", UNHEALTHY),
        (RuntimeError, ("Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.  Reboot the system to recover "
         "this GPU"), UNHEALTHY),
        *[(RuntimeError, f"NVRM: Xid (PCI:0000:3b:00): {number}, pid='<unknown>', name=<unknown>, see the manual", UNHEALTHY)
          for number in (48, 63, 64, 74, 79, 94, 95)],
        (RuntimeError, "NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, name=python, Ch 00000008, MMU Fault", None),
        (RuntimeError, "mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)", None),
        (RuntimeError, "out of resource: shared memory, Required: 262144, Hardware limit: 232448", None),
        (ValueError, "the prompt says: CUDA error: uncorrectable ECC error encountered", None),
        (KeyError, "CUDA out of memory", None),
    ],
)  # fmt: skip
def test_what_an_exception_says_of_the_device(kind, message, fault):
    assert fault_of(kind(message)) is fault


def test_a_cause_counts_and_the_worst_one():
    error = RuntimeError("the step failed")
    error.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    assert fault_of(error) is OOM
    error.__cause__.__cause__ = torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")
    assert fault_of(error) is UNHEALTHY
    error.__cause__.__cause__.__cause__ = error  # a circle ends
    assert fault_of(error) is UNHEALTHY


def test_the_sentence_that_people_see():
    assert (
        first_sentence(torch.AcceleratorError(f"CUDA error: misaligned address{ADVICE}"))
        == "CUDA error: misaligned address"
    )
    long = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 79.15 GiB")
    assert first_sentence(long) == "CUDA out of memory"
    assert first_sentence(builtins.MemoryError()) == "MemoryError"


def test_what_a_failed_step_held_is_let_go():
    """The frames of a traceback keep the step's tensors alive, so that a smaller one would fail as well."""
    freed = []

    class Held:
        def __del__(self):
            freed.append(True)

    def step():
        held = Held()
        raise torch.OutOfMemoryError(f"CUDA out of memory {held is not None}")

    try:
        step()
    except RuntimeError as error:
        assert not freed
        free_device_memory(error)
        assert freed
