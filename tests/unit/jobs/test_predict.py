"""Intervals hold what they promise: over many simulated histories, nine outcomes of ten lie inside."""

from __future__ import annotations

import math
from random import Random

import pytest

from batchinfer.jobs.forecast import LENGTH_SPREAD, SPEED_SPREAD, Terms, Workload, forecast
from batchinfer.jobs.forecasts import Outcome, Past
from batchinfer.jobs.predict import PRIOR_WEIGHT, ROW_SPREAD, Observation, exactly, interval, intervals, predictive
from batchinfer.money import Price

TRIALS = 250


def binomial_bounds(number, share, sigmas=4.0):
    """How many of ``number`` may hold if each does with this probability: four standard errors either way."""
    middle, error = number * share, math.sqrt(number * share * (1 - share))
    return middle - sigmas * error, middle + sigmas * error


def simulated_job(random, center, spread, num_rows):
    """A job's mean of a quantity: its own level, and the mean of rows around it."""
    level = center * math.exp(random.gauss(0, spread))
    return Observation(level * math.exp(random.gauss(0, ROW_SPREAD / math.sqrt(num_rows))), num_rows), level


def spread_of(random, prior):
    """A spread as the prior has it: a scaled inverse chi-squared."""
    return prior * math.sqrt(PRIOR_WEIGHT / random.gammavariate(PRIOR_WEIGHT / 2, 2.0))


@pytest.mark.parametrize("num_past", [1, 2, 4, 16])
def test_nine_of_ten_jobs_come_out_inside_whatever_the_length_of_their_history(num_past):
    random = Random(num_past)
    covered = 0
    for _ in range(TRIALS):
        spread, center = spread_of(random, LENGTH_SPREAD), random.uniform(5, 500)
        past = [simulated_job(random, center, spread, random.randint(20, 5000))[0] for _ in range(num_past)]
        _, outcome = simulated_job(random, center, spread, 10**6)
        covered += interval(predictive(past, LENGTH_SPREAD)).covers(outcome)
    low, high = binomial_bounds(TRIALS, 0.9)
    assert low <= covered <= high


def outcome(random, rows, tokens_per_row, seconds_per_token, number=0):
    completion = round(rows * tokens_per_row)
    return Outcome(
        job_id=f"job_{number}", num_rows=rows, est_prompt_tokens=100 * rows, prompt_tokens=100 * rows, cached_tokens=0,
        completion_tokens=completion, device_seconds=(100 * rows + completion) * seconds_per_token, overhead_seconds=0.0,
        wall_seconds=1.0, cost_nanos=1, device="cpu",
    )  # fmt: skip


def test_cost_and_time_of_a_whole_forecast_are_covered_as_well():
    """Length and speed are both learnt, and multiplied: the product's interval must hold, too."""
    random, covered = Random(7), {"device_seconds": 0, "completion_tokens": 0}
    for _ in range(TRIALS):
        lengths, speeds = spread_of(random, LENGTH_SPREAD), spread_of(random, SPEED_SPREAD)
        center, pace = random.uniform(20, 400), random.uniform(1e-5, 1e-2)

        def job(rows, center=center, pace=pace, lengths=lengths, speeds=speeds):
            tokens = center * math.exp(random.gauss(0, lengths)) * math.exp(random.gauss(0, ROW_SPREAD / rows**0.5))
            return outcome(random, rows, tokens, pace * math.exp(random.gauss(0, speeds)))

        past = tuple(job(random.randint(100, 5000)) for _ in range(5))
        new = job(10_000)
        found = forecast(
            Workload(10_000, 10**6, 0, exactly(100 * 10_000)), Past(past, past), Terms(10**9, device="cpu")
        )
        covered["completion_tokens"] += found.completion_tokens.covers(new.completion_tokens)
        covered["device_seconds"] += found.device_seconds.covers(new.device_seconds)
    for number in covered.values():
        low, high = binomial_bounds(TRIALS, 0.9)
        # the product of two wide things is a little too wide, never too narrow
        assert low <= number <= max(high, TRIALS * 0.97)


def test_more_history_makes_a_narrower_interval():
    def width(number):
        found = interval(predictive([Observation(100.0, 1000)] * number, LENGTH_SPREAD))
        return math.log(found.high / found.low)

    assert width(1) > width(3) > width(20)


def test_without_history_the_limits_are_said_and_nothing_is_made_up():
    found = forecast(Workload(10, 50, 2, exactly(1000)), Past((), ()), Terms(10**9))
    assert (found.completion_tokens.low, found.completion_tokens.high) == (20, 500)
    assert found.cost_nanos is None
    assert found.seconds is None
    assert "limits" in found.length_basis


def test_prices_and_workers_are_multiplied_by_hand():
    past = tuple(outcome(None, 1000, 50.0, 0.001, number) for number in range(200))
    price = Price(2_000_000, 1_000_000, 4_000_000)
    terms = Terms(36 * 10**11, num_workers=4, price=price)
    found = forecast(Workload(100, 64, 0, exactly(10_000), cached_share=0.5), Past(past, past), terms)
    assert found.device_seconds.expected == pytest.approx(15.0, rel=0.05)
    assert found.seconds.expected == pytest.approx(15.0 / 4, rel=0.05)
    # 3,600 dollars an hour is a dollar a second
    assert found.cost_nanos.expected == pytest.approx(15.0 * 10**9, rel=0.05)
    # 5,000 tokens at 2, 5,000 cached at 1, 5,000 answers at 4 nano-dollars
    assert found.list_nanos.expected == pytest.approx(5000 * 2 + 5000 * 1 + 5000 * 4, rel=0.05)


def test_answers_never_exceed_their_limit():
    past = tuple(outcome(None, 1000, 200.0, 0.001) for _ in range(3))
    found = forecast(Workload(10, 64, 0, exactly(100)), Past(past, ()), Terms(1))
    assert found.completion_tokens.high == 640


def test_what_is_drawn_together_stays_together():
    def draw(random):
        value = random.random()
        return value, 2 * value

    one, other = intervals(draw)
    assert (other.low, other.expected, other.high) == (2 * one.low, 2 * one.expected, 2 * one.high)


def test_a_device_without_past_jobs_has_no_speed():
    past = Past((outcome(None, 10, 5.0, 0.1),), ())
    assert past.seconds_per_token("cpu")
    assert past.seconds_per_token("cuda") == []
