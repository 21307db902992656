"""What several kernels' tests compare."""

import torch

from tests.triton import interpreter  # noqa: F401 -- sets TRITON_INTERPRET before a kernel module is imported

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Half a unit in the last place, relative: what rounding the right number may cost. Float32: a sum's order."""


def assert_rounded(actual: torch.Tensor, exact: torch.Tensor, *, slack: float = 1.0) -> None:
    """``actual`` is the float32 ``exact`` rounded to its own type; float32 sums in another order may differ a little."""
    tolerance = TOLERANCE[actual.dtype] * slack
    torch.testing.assert_close(actual.float(), exact, rtol=tolerance, atol=tolerance * 1e-2 + 1e-6, equal_nan=True)


def assert_quantized(actual: tuple[torch.Tensor, torch.Tensor], exact: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Same scales; same integers but for a few that a sum's order moved across a rounding boundary."""
    numbers, scale = actual
    expected, expected_scale = exact
    torch.testing.assert_close(scale, expected_scale, rtol=1e-5, atol=1e-30, equal_nan=True)
    off = (numbers.int() - expected.int()).abs()
    assert not (off > 1).any()
    assert int((off > 0).sum()) <= 1 + numbers.numel() // 1000
