"""Splits a step's time over the rows that were in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def split_exactly(total: int, weights: Sequence[int]) -> list[int]:
    """Split a non-negative integer in proportion to positive weights, so that the parts sum to it.

    Largest remainder: each part is the exact share rounded down, and the units left go to the largest fractions,
    the earlier first among equals.
    """
    whole = sum(weights)
    shares = [divmod(total * weight, whole) for weight in weights]
    parts = [quotient for quotient, _ in shares]
    by_fraction = sorted(range(len(weights)), key=lambda i: -shares[i][1])
    for i in by_fraction[: total - sum(parts)]:
        parts[i] += 1
    return parts
