"""Float weights to INT8 with a scale a row: to the nearest step, or so that errors cancel on calibrated rows."""

from __future__ import annotations

import torch

LEVELS = 127
BLOCK = 64
"""Columns whose errors are passed on among themselves before they reach the rest."""
MAX_ROWS = 8192
"""Rows rounded at a time, which bounds the memory it takes."""


def row_scales(weight: torch.Tensor) -> torch.Tensor:
    """Scale of each row of float32 ``weight [out, in]``; 0 of zeros."""
    return weight.abs().amax(dim=1) / LEVELS


def nearest(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 ``[out, in]`` and scales ``[out]``; a row of zeros has scale 0."""
    scale = row_scales(weight)
    divisor = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (weight / divisor.unsqueeze(1)).round_().to(torch.int8), scale


def compensated(weight: torch.Tensor, products: torch.Tensor, damping: float) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`nearest`, but each column's error is made up for by the columns that follow (GPTQ, arXiv 2210.17323).

    ``products [in, in]`` is the sum of outer products of the rows that the weights will be multiplied by; ``damping`` is
    the share of its mean diagonal that is added to it. Falls back to :func:`nearest` where it cannot be inverted.
    """
    order = torch.argsort(products.diagonal(), descending=True, stable=True)
    factor = _inverse_factor(products[order][:, order], damping)
    if factor is None:
        return nearest(weight)
    scale = row_scales(weight)
    rounded = torch.empty_like(weight, dtype=torch.int8)
    for first in range(0, len(weight), MAX_ROWS):
        part = slice(first, first + MAX_ROWS)
        rounded[part, order] = _compensate(weight[part][:, order].T.contiguous(), scale[part], factor).T
    return rounded, scale


def _inverse_factor(products: torch.Tensor, damping: float) -> torch.Tensor | None:
    """Upper Cholesky factor of the inverse, float32; None if there is none."""
    damped = products.double()
    damped.diagonal().add_(damping * damped.diagonal().mean())
    lower, failed = torch.linalg.cholesky_ex(damped)
    if int(failed):
        return None
    upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
    return None if int(failed) else upper.float()


def _compensate(columns: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """int8 of ``columns [in, out]``, which are used up."""
    divisor = torch.where(scale > 0, scale, torch.ones_like(scale))
    rounded = torch.empty_like(columns, dtype=torch.int8)
    for first in range(0, len(columns), BLOCK):
        block = columns[first : first + BLOCK]
        inner = factor[first : first + BLOCK, first : first + BLOCK]
        errors = torch.empty_like(block)
        for i in range(len(block)):
            steps = (block[i] / divisor).round_().clamp_(-LEVELS, LEVELS)
            rounded[first + i] = steps
            errors[i] = steps.mul_(divisor).neg_().add_(block[i]).div_(inner[i, i])
            block[i + 1 :].addr_(inner[i, i + 1 :], errors[i], alpha=-1)
        columns[first + BLOCK :].addmm_(factor[first : first + BLOCK, first + BLOCK :].T, errors, alpha=-1)
    return rounded
