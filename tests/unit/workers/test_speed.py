"""The speed that ``run`` shows: tokens as they are generated, rows as they end, over the last half minute."""

from dataclasses import dataclass, field

import pytest

from batchinfer.types import Usage
from batchinfer_workers.embedded import SPEED_SECONDS, _Speed, poll_seconds


@dataclass
class Counts:
    total: int = 0


@dataclass
class Job:
    num_rows: int = 100
    counts: Counts = field(default_factory=Counts)
    usage: Usage = field(default_factory=Usage)
    cost_nanos: int = 0


def test_tokens_count_while_no_row_has_ended():
    """A row of a thousand tokens is progress long before its end."""
    now = iter([0.0, 10.0])
    speed = _Speed(clock=lambda: next(now))
    speed.measure(Job(), rows=0, tokens=0, generated=0)
    seen = speed.measure(Job(), rows=0, tokens=0, generated=500)
    assert (seen.tokens_per_second, seen.rows_done, seen.tokens, seen.eta_seconds) == (50.0, 0, 0, None)


def test_rows_of_a_burst_are_spread_over_the_window():
    """20 rows in 10 s leave 80 rows: 40 s."""
    now = iter([0.0, 5.0, 10.0])
    speed = _Speed(clock=lambda: next(now))
    speed.measure(Job(), rows=0, tokens=0, generated=0)
    speed.measure(Job(counts=Counts(15)), rows=5, tokens=50, generated=50)
    seen = speed.measure(Job(counts=Counts(15)), rows=5, tokens=50, generated=60)
    assert (seen.rows_per_second, seen.eta_seconds) == (2.0, pytest.approx(40.0))


def test_a_new_engine_begins_to_count_anew():
    """After a restart the engine's counter is lower: speed is never negative."""
    now = iter([0.0, 1.0, 2.0])
    speed = _Speed(clock=lambda: next(now))
    speed.measure(Job(), rows=0, tokens=0, generated=1000)
    assert speed.measure(Job(), rows=0, tokens=0, generated=10).tokens_per_second is None
    assert speed.measure(Job(), rows=0, tokens=0, generated=40).tokens_per_second == 30.0


def test_what_is_older_than_the_window_is_forgotten():
    now = iter([0.0, SPEED_SECONDS, SPEED_SECONDS + 1])
    speed = _Speed(clock=lambda: next(now))
    speed.measure(Job(), rows=0, tokens=0, generated=0)
    speed.measure(Job(), rows=0, tokens=0, generated=900)
    assert speed.measure(Job(), rows=0, tokens=0, generated=907).tokens_per_second == 7.0


def test_an_old_job_is_looked_at_less_often():
    """A job's end is seen within a fortieth of its time, and within a second."""
    assert [poll_seconds(age) for age in (0, 10, 20, 40, 10_000)] == [0.25, 0.25, 0.5, 1.0, 1.0]
