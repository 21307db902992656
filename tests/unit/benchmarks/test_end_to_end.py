"""The arithmetic of a job's cost over the bare engine."""

import pytest

from benchmarks.end_to_end import BARE, WHOLE, job_seconds, overhead_percent


def printed(**overhead):
    job = {"created_at": "2026-01-01T00:00:00+00:00", "finished_at": "2026-01-01T00:01:40.500000+00:00"}
    return {"job": job, "cost": {"overhead_usd": overhead}}


def test_a_jobs_time_is_from_submission_to_end_less_loading():
    """100.5 s, of which the model took 20.25 at a dollar a second; idle time is the job's own."""
    assert job_seconds(printed(load="20.250000000", idle="3.0")) == pytest.approx(80.25)
    assert job_seconds(printed()) == pytest.approx(100.5)


def test_overhead_compares_medians():
    seconds = {BARE: (90.0, 100.0, 200.0), WHOLE: (101.0, 103.0, 400.0)}
    results = [{"engine": name, "seconds": one} for name, values in seconds.items() for one in values]
    assert overhead_percent(results) == 3.0
