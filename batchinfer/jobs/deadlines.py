"""How likely a job finishes before its deadline: from its own speed while it runs, from its forecast before."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from batchinfer.jobs.predict import CONFIDENCE, ROW_SPREAD

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from batchinfer.jobs.records import JobRecord
    from batchinfer.jobs.speed import Speed

DRIFT = 0.15
"""Spread of the logarithm of a job's speed from one stretch of it to the next: other jobs come and go."""
_NORMAL = NormalDist()
_TAILS = 2 * _NORMAL.inv_cdf((1 + CONFIDENCE) / 2)
"""Width of the central interval of a normal, in standard deviations."""


def chance_in_time(job: JobRecord, speed: Speed, predicted: Mapping[str, Any] | None, now: datetime) -> float | None:
    """Probability of a job's last row ending before the deadline.

    None without a deadline, after the end, and where nothing is known of its speed. The time that is left over the time
    that is needed is taken as lognormal.
    """
    if job.deadline_at is None or job.finished_at is not None or job.num_rows is None:
        return None
    left = (job.deadline_at - now).total_seconds()
    remaining = job.num_rows - job.counts.total
    if remaining <= 0:
        return 1.0
    if left <= 0:
        return 0.0
    needed = _measured(job, speed, remaining) or _predicted(predicted, remaining / job.num_rows)
    if needed is None:
        return None
    seconds, spread = needed
    return _NORMAL.cdf(math.log(left / seconds) / spread)


def _measured(job: JobRecord, speed: Speed, remaining: int) -> tuple[float, float] | None:
    """Seconds still needed at the present speed, and their spread."""
    done = job.counts.total
    if not speed.eta_seconds or not done:
        return None
    # the rows that are left may be longer or shorter than those that were measured
    return speed.eta_seconds, math.sqrt(DRIFT**2 + ROW_SPREAD**2 / done + ROW_SPREAD**2 / remaining)


def _predicted(predicted: Mapping[str, Any] | None, share: float) -> tuple[float, float] | None:
    """The same from the forecast: the share of it that is left, begun now, on one worker."""
    seconds = None if predicted is None else predicted.get("seconds")
    if not seconds or not seconds["expected"] or not seconds["low"]:
        return None
    return seconds["expected"] * share, max(DRIFT, math.log(seconds["high"] / seconds["low"]) / _TAILS)
