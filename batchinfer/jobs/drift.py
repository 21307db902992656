"""How far answers drift from the reference precision: sums over compared rows, in a few kilobytes however many."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Mapping

DRIFT_WARNING = "DRIFT"
"""How the warning of a job begins whose drift is above its threshold."""
MAX_DIFFERENCES = 20
"""Places that are kept, those with the largest divergence."""
_SUMS = ("rows", "tokens", "same", "kl_sum", "loss", "reference_loss")
_BUCKETS_A_DECADE = 50
_LEAST_KL = 1e-9


class Drift:
    """What was found so far. Divergences are Kullback-Leibler, in nats a token."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = dict.fromkeys(_SUMS, 0)
        self._kl_max = 0.0
        self._counts: dict[str, int] = {}
        self._differences: list[dict[str, Any]] = []

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read what :meth:`to_dict` gave; an empty mapping is nothing found yet."""
        drift = cls()
        if data:
            drift._add(data, data["differences"])
        return drift

    def add_row(self, row_index: int, found: Mapping[str, Any]) -> None:
        """Take in what the reference engine says of a row."""
        self._add({**found, "rows": 1}, [{"row_index": row_index, **place} for place in found["differences"]])

    def add(self, other: Drift) -> None:
        """Take in what was found elsewhere."""
        data = other.to_dict()
        self._add(data, data["differences"])

    def _add(self, data: Mapping[str, Any], differences: list[dict[str, Any]]) -> None:
        for name in _SUMS:
            self._sums[name] += data[name]
        self._kl_max = max(self._kl_max, data["kl_max"])
        for bucket, count in data["kl_counts"].items():
            self._counts[bucket] = self._counts.get(bucket, 0) + count
        found = sorted([*self._differences, *differences], key=lambda place: -place["kl"])
        self._differences = found[:MAX_DIFFERENCES]

    @property
    def num_rows(self) -> int:
        """Rows compared."""
        return int(self._sums["rows"])

    @property
    def num_tokens(self) -> int:
        """Tokens compared."""
        return int(self._sums["tokens"])

    @property
    def kl_mean(self) -> float:
        """Mean divergence a token; 0 if nothing was compared."""
        return self._sums["kl_sum"] / self.num_tokens if self.num_tokens else 0.0

    @property
    def kl_p99(self) -> float:
        """The divergence that 99 % of the tokens stay below, to 5 %."""
        left = math.ceil(0.99 * self.num_tokens)
        for bucket in sorted(self._counts, key=int):
            left -= self._counts[bucket]
            if left <= 0:
                return min(self._kl_max, _LEAST_KL * 10 ** ((int(bucket) + 1) / _BUCKETS_A_DECADE))
        return 0.0

    def to_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        return {**self._sums, "kl_max": self._kl_max, "kl_counts": self._counts, "differences": self._differences}

    def figures(self) -> dict[str, Any]:
        """What people read. ``agreement`` is the share of tokens whose likeliest successor is the same."""
        tokens = self.num_tokens or 1
        return {
            "rows_compared": self.num_rows,
            "tokens_compared": self.num_tokens,
            "kl_mean": self.kl_mean,
            "kl_p99": self.kl_p99,
            "kl_max": self._kl_max,
            "agreement": self._sums["same"] / tokens,
            "perplexity": math.exp(min(700.0, self._sums["loss"] / tokens)),
            "reference_perplexity": math.exp(min(700.0, self._sums["reference_loss"] / tokens)),
            "differences": self._differences,
        }
