"""What past jobs say of the next one: predictive distributions of per-row and per-token quantities, and intervals.

The model is hierarchical and small. The logarithm of a quantity (answer tokens a row, device time a token) varies from
job to job with an unknown spread, on which a scaled inverse chi-squared prior lies; within a job it is the mean of that
job's rows, whose own spread is known roughly. So one past job gives a wide interval, ten a narrow one, and the posterior
predictive is Student's t (Gelman et al., Bayesian Data Analysis, section 3.2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CONFIDENCE = 0.9
"""Share of jobs whose outcome should lie inside the interval."""
NUM_DRAWS = 2000
ROW_SPREAD = 0.8
"""Spread of single rows' logarithms within a job: a mean over n rows is known to this over the root of n."""
PRIOR_WEIGHT = 3.0
"""How many past jobs the prior's spread is worth."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An expected value, and the bounds within which it lies with the probability :data:`CONFIDENCE`."""

    low: float
    expected: float
    high: float

    def covers(self, value: float) -> bool:
        """Whether the value lies inside, bounds included."""
        return self.low <= value <= self.high

    def scaled(self, factor: float) -> Interval:
        """The interval of a multiple."""
        return Interval(self.low * factor, self.expected * factor, self.high * factor)


@dataclass(frozen=True, slots=True)
class Observation:
    """A past job's mean of a quantity above zero, and over how many rows."""

    value: float
    num_rows: int


def predictive(past: Sequence[Observation], prior_spread: float) -> Callable[[Random], float]:
    """A draw of the quantity in the next job. ``past`` has at least one observation; others than positive are left out.

    Raises:
        ValueError: none is positive.
    """
    logs = [math.log(one.value) for one in past if one.value > 0]
    if not logs:
        raise ValueError("there is nothing to learn from")
    number = len(logs)
    mean = math.fsum(logs) / number
    freedom = PRIOR_WEIGHT + number - 1
    squares = math.fsum((log - mean) ** 2 for log in logs)
    spread = (PRIOR_WEIGHT * prior_spread**2 + squares) / freedom
    noise = math.fsum(ROW_SPREAD**2 / one.num_rows for one in past if one.value > 0) / number**2
    scale = math.sqrt(spread * (1 + 1 / number) + noise)

    def draw(random: Random) -> float:
        # Student's t: a normal over the root of a chi-squared by its degrees of freedom
        chi = random.gammavariate(freedom / 2, 2.0)
        return math.exp(mean + scale * random.gauss() / math.sqrt(chi / freedom))

    return draw


def around(mean: float, error: float) -> Callable[[Random], float]:
    """A draw of something measured with a standard error; never below zero."""
    return lambda random: max(0.0, random.gauss(mean, error))


def exactly(value: float) -> Callable[[Random], float]:
    """A draw of something known."""
    return lambda _random: value


def interval(draw: Callable[[Random], float], *, confidence: float = CONFIDENCE, seed: int = 0) -> Interval:
    """The central interval of a draw, and its median, by :data:`NUM_DRAWS` draws; the same seed gives the same."""
    return intervals(lambda random: (draw(random),), confidence=confidence, seed=seed)[0]


def intervals(
    draw: Callable[[Random], tuple[float, ...]], *, confidence: float = CONFIDENCE, seed: int = 0
) -> list[Interval]:
    """The same for several quantities that are drawn together."""
    random = Random(seed)  # noqa: S311 -- no secret
    drawn = [draw(random) for _ in range(NUM_DRAWS)]
    tail = (1 - confidence) / 2
    found = []
    for values in zip(*drawn, strict=True):
        ordered = sorted(values)
        found.append(Interval(*(ordered[min(int(q * NUM_DRAWS), NUM_DRAWS - 1)] for q in (tail, 0.5, 1 - tail))))
    return found
