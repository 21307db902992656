"""From rows, tokens and what past jobs say to time and cost: the one place where these are multiplied."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from batchinfer.jobs.predict import CONFIDENCE, Interval, around, exactly, intervals, predictive
from batchinfer.money import NS_PER_HOUR

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from batchinfer.jobs.forecasts import Past
    from batchinfer.jobs.predict import Observation
    from batchinfer.jobs.records import JobRecord
    from batchinfer.money import Price

LENGTH_SPREAD = 0.3
"""Prior spread, between jobs of one spec, of the logarithm of answer tokens a row."""
SPEED_SPREAD = 0.2
"""The same of device time a token."""
RATIO_SPREAD = 0.2
"""The same of prompt tokens over the planner's guess."""

UNKNOWN_RATIO_ERROR = 0.3
"""Standard error of the planner's guess of prompt tokens, where no job of the model has run."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What is known of a job before it runs. ``prompt_tokens`` draws all prompts' tokens."""

    num_rows: int
    max_tokens: int
    """Most answer tokens a row."""
    min_tokens: int
    prompt_tokens: Callable[[Random], float]
    cached_share: float = 0.0
    """Share of the prompt tokens that comes from the prefix cache; counts for the list price."""


@dataclass(frozen=True, slots=True)
class Terms:
    """On what, for how much: ``nanos_per_hour`` of a worker, so many workers, on which kind of device (None: any)."""

    nanos_per_hour: int
    num_workers: int = 1
    device: str | None = None
    price: Price | None = None


@dataclass(frozen=True, slots=True)
class Forecast:
    """What to expect. None where nothing is known: no job of the model has run on the device."""

    num_rows: int
    confidence: float
    prompt_tokens: Interval
    completion_tokens: Interval
    list_nanos: Interval | None
    device_seconds: Interval | None
    seconds: Interval | None
    cost_nanos: Interval | None
    length_basis: str
    speed_basis: str

    def as_json(self) -> dict[str, Any]:
        """For the database; intervals as objects."""
        return asdict(self)


def forecast(work: Workload, past: Past, terms: Terms) -> Forecast:
    """Predict. Where no job of the spec has run, the interval of the answers is all that their limits allow."""
    if work.min_tokens != work.max_tokens and not past.completion_tokens():
        least, most = (
            forecast(replace(work, min_tokens=n, max_tokens=n), past, terms) for n in (work.min_tokens, work.max_tokens)
        )
        return _joined(least, most)
    tokens_per_row, length_basis = _length(work, past.completion_tokens())
    speeds = past.seconds_per_token(terms.device)
    seconds_per_token = predictive(speeds, SPEED_SPREAD) if speeds else None
    load = past.overhead_seconds()

    def draw(random: Random) -> tuple[float, ...]:
        prompts = work.prompt_tokens(random)
        # no row exceeds its limit, so their mean does not
        answers = work.num_rows * min(float(work.max_tokens), max(float(work.min_tokens), tokens_per_row(random)))
        device = (prompts + answers) * seconds_per_token(random) + load if seconds_per_token else 0.0
        return prompts, answers, _list(work, terms.price, prompts, answers), device

    prompts, answers, listed, device = intervals(draw)
    is_known = seconds_per_token is not None
    per_second = terms.nanos_per_hour * 10**9 / NS_PER_HOUR
    return Forecast(
        num_rows=work.num_rows,
        confidence=CONFIDENCE,
        prompt_tokens=prompts,
        completion_tokens=answers,
        list_nanos=listed if terms.price else None,
        device_seconds=device if is_known else None,
        seconds=device.scaled(1 / terms.num_workers) if is_known else None,
        cost_nanos=device.scaled(per_second) if is_known else None,
        length_basis=length_basis,
        speed_basis=f"{len(speeds)} past job{'s' * (len(speeds) != 1)}" if is_known else "unknown",
    )


def forecast_plan(job: JobRecord, est_prompt_tokens: int, past: Past, terms: Terms) -> dict[str, Any]:
    """What to expect of a job that was just planned, whose prompts' tokens were only guessed from their bytes."""
    ratios = past.prompt_ratio()
    ratio = predictive(ratios, RATIO_SPREAD) if ratios else around(1.0, UNKNOWN_RATIO_ERROR)
    params = job.spec.sampling_params()
    work = Workload(
        num_rows=job.num_rows or 0,
        max_tokens=params.max_tokens * params.num_sequences,
        min_tokens=params.min_tokens * params.num_sequences,
        prompt_tokens=lambda random: est_prompt_tokens * ratio(random),
        cached_share=past.cached_share(),
    )
    return {"est_prompt_tokens": est_prompt_tokens, **forecast(work, past, terms).as_json()}


def _length(work: Workload, past: list[Observation]) -> tuple[Callable[[Random], float], str]:
    """Answer tokens a row, and what that rests on."""
    if work.max_tokens == work.min_tokens:
        return exactly(work.max_tokens), "min_tokens equals max_tokens"
    return predictive(past, LENGTH_SPREAD), f"{len(past)} past job{'s' * (len(past) != 1)} of this spec"


def _joined(least: Forecast, most: Forecast) -> Forecast:
    """From the least to the most: the middle is no more likely than anything else."""

    def join(one: Interval | None, other: Interval | None) -> Interval | None:
        return one and other and Interval(one.low, (one.expected + other.expected) / 2, other.high)

    answers = join(least.completion_tokens, most.completion_tokens)
    assert answers is not None
    return replace(
        least,
        completion_tokens=answers,
        list_nanos=join(least.list_nanos, most.list_nanos),
        device_seconds=join(least.device_seconds, most.device_seconds),
        seconds=join(least.seconds, most.seconds),
        cost_nanos=join(least.cost_nanos, most.cost_nanos),
        length_basis="the limits: no job of this spec has run",
    )


def _list(work: Workload, price: Price | None, prompts: float, answers: float) -> float:
    return price.cost(int(prompts), int(prompts * work.cached_share), int(answers)) if price else 0.0
