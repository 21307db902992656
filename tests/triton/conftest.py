"""Kernels run in the strict interpreter; unwritten outputs show as NaN."""

import pytest
import torch

from tests.triton import interpreter

interpreter.install()


@pytest.fixture(autouse=True)
def fill_empty_tensors():
    """torch.empty gives NaN (or the largest integer), so that an output nobody wrote cannot look right."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
