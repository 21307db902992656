"""The chance to finish in time: half where the time needed is the time left, and calibrated by simulation."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from random import Random

import pytest

from batchinfer.jobs.deadlines import DRIFT, chance_in_time
from batchinfer.jobs.predict import ROW_SPREAD
from batchinfer.jobs.records import JobRecord, RowCounts
from batchinfer.jobs.spec import JobSpec
from batchinfer.jobs.speed import Speed
from batchinfer.jobs.status import JobState
from batchinfer.types import Usage

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SPEC = JobSpec(inputs=("in.parquet",), model="m")
FIELDS = dict.fromkeys(JobRecord.__dataclass_fields__) | {
    "id": "job_1", "spec": SPEC, "state": JobState.IN_PROGRESS, "num_rows": 1000, "counts": RowCounts(succeeded=500),
    "usage": Usage(), "deadline_at": NOW + timedelta(seconds=100),
}  # fmt: skip
JOB = JobRecord(**FIELDS)


def at(eta):
    return Speed(1.0, 1.0, eta)


def test_half_where_time_needed_is_time_left():
    assert chance_in_time(JOB, at(100.0), None, NOW) == pytest.approx(0.5)
    assert chance_in_time(JOB, at(50.0), None, NOW) > 0.99
    assert chance_in_time(JOB, at(200.0), None, NOW) < 0.01


def test_few_rows_measured_say_less():
    early = replace(JOB, counts=RowCounts(succeeded=3))
    assert 0.5 < chance_in_time(early, at(80.0), None, NOW) < chance_in_time(JOB, at(80.0), None, NOW)


def test_before_it_runs_the_forecast_counts():
    waiting = replace(JOB, counts=RowCounts())
    predicted = {"seconds": {"low": 50.0, "expected": 100.0, "high": 200.0}}
    assert chance_in_time(waiting, Speed(), predicted, NOW) == pytest.approx(0.5)
    # half of the rows are done: half of the time is needed, and that is the lower end of a 90 % interval
    assert chance_in_time(JOB, Speed(), predicted, NOW) == pytest.approx(0.95)


def test_what_is_not_known_is_not_made_up():
    assert chance_in_time(JOB, Speed(), None, NOW) is None
    assert chance_in_time(JOB, Speed(), {"seconds": None}, NOW) is None
    assert chance_in_time(replace(JOB, deadline_at=None), at(1.0), None, NOW) is None
    assert chance_in_time(replace(JOB, finished_at=NOW), at(1.0), None, NOW) is None
    assert chance_in_time(replace(JOB, num_rows=None), Speed(), None, NOW) is None


def test_what_is_certain_is_certain():
    assert chance_in_time(replace(JOB, counts=RowCounts(succeeded=1000)), Speed(), None, NOW) == 1.0
    assert chance_in_time(JOB, at(1.0), None, NOW + timedelta(seconds=100)) == 0.0


def test_of_the_jobs_with_a_chance_of_seven_in_ten_seven_in_ten_are_in_time():
    """Jobs whose rows vary and whose speed drifts; those whose chance was near 0.7 are counted."""
    random, chances, in_time = Random(11), [], []
    while len(chances) < 600:
        done, remaining = random.randint(20, 400), random.randint(20, 400)
        # the true pace of the whole, what the measured rows said of it, and what the rest will say
        measured = math.exp(random.gauss(0, ROW_SPREAD / done**0.5))
        needed = remaining * math.exp(random.gauss(0, ROW_SPREAD / remaining**0.5)) * math.exp(random.gauss(0, DRIFT))
        left = remaining * random.uniform(0.8, 1.6)
        job = replace(
            JOB, num_rows=done + remaining, counts=RowCounts(succeeded=done), deadline_at=NOW + timedelta(seconds=left)
        )
        chance = chance_in_time(job, at(remaining * measured), None, NOW)
        if 0.6 <= chance <= 0.8:
            chances.append(chance)
            in_time.append(needed <= left)
    expected = sum(chances)
    error = math.sqrt(sum(c * (1 - c) for c in chances))
    # the time left was drawn without regard to the pace, which pulls the counted jobs a little towards the middle
    assert abs(sum(in_time) - expected) <= 4 * error + 0.02 * len(chances)
