"""A job's forecast beside its outcome."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from batchinfer.jobs.money_views import Compared, ForecastReport, IntervalView
from batchinfer.money import NANOS_PER_USD

if TYPE_CHECKING:
    from collections.abc import Mapping

    from batchinfer.jobs.forecasts import Outcome

_FIGURES = (
    ("prompt_tokens", "prompt_tokens", 1.0),
    ("completion_tokens", "completion_tokens", 1.0),
    ("device_seconds", "device_seconds", 1.0),
    ("cost_nanos", "cost_usd", 1.0 / NANOS_PER_USD),
)
"""Name in the database, name for people, factor."""


def forecast_report(job_id: str, predicted: Mapping[str, Any], outcome: Outcome | None) -> ForecastReport:
    """Put a forecast and an outcome side by side; figures that were not predicted are left out."""
    return ForecastReport(
        job_id=job_id,
        confidence=predicted["confidence"],
        length_basis=predicted["length_basis"],
        speed_basis=predicted["speed_basis"],
        figures=[
            _compared(shown, predicted[name], factor, None if outcome is None else _actual(outcome, name))
            for name, shown, factor in _FIGURES
            if predicted.get(name) is not None
        ],
    )


def _actual(outcome: Outcome, name: str) -> float:
    if name == "device_seconds":  # what was predicted has loading in it
        return outcome.device_seconds + outcome.overhead_seconds
    return float(getattr(outcome, name))


def _compared(what: Any, bounds: Mapping[str, float], factor: float, actual: float | None) -> Compared:
    low, expected, high = (bounds[name] * factor for name in ("low", "expected", "high"))
    value = None if actual is None else actual * factor
    return Compared(
        what=what,
        predicted=IntervalView(low=low, expected=expected, high=high),
        actual=value,
        error=None if value is None or not expected else round(value / expected - 1, 6),
        is_covered=None if value is None else low <= value <= high,
    )
