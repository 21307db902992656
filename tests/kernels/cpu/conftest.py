"""Every implementation of the CPU ops that this machine can run: each C++ variant its CPU has, and torch."""

import pytest
import torch

from batchinfer_kernels.cpu import TorchOps, native_ops
from batchinfer_kernels.cpu.variants import VARIANTS, best_variant, cpu_features

NATIVE = [variant for variant in VARIANTS if variant.needs <= cpu_features()]


@pytest.fixture(scope="session", params=NATIVE, ids=lambda variant: variant.name)
def native(request):
    return native_ops(request.param)


@pytest.fixture(scope="session", params=[*NATIVE, None], ids=lambda variant: variant.name if variant else "torch")
def ops(request):
    return TorchOps() if request.param is None else native_ops(request.param)


@pytest.fixture(scope="session")
def every_native():
    return [native_ops(variant) for variant in NATIVE]


@pytest.fixture(scope="session")
def best():
    return native_ops(best_variant(cpu_features()))


@pytest.fixture(autouse=True)
def _one_thread():
    """Tests run beside each other; those that are about threads ask for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
