"""Moments of cron expressions in zones whose clocks change. All expected times are worked out by hand."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.errors import InvalidSpecError
from batchinfer.jobs.cron import Calendar, jitter


def utc(text):
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


# zone, cron, from (UTC), the next moments in UTC
SPRING_AND_FALL = [
    # 2026-03-29 02:00 CET -> 03:00 CEST: 02:30 is not there; it runs at the change, 01:00 UTC
    ("Europe/Berlin", "30 2 * * *", "2026-03-28T00:00", ["2026-03-28T01:30", "2026-03-29T01:00", "2026-03-30T00:30"]),
    # 2026-10-25 03:00 CEST -> 02:00 CET: 02:30 comes twice; it runs the first time only
    ("Europe/Berlin", "30 2 * * *", "2026-10-24T12:00", ["2026-10-25T00:30", "2026-10-26T01:30"]),
    # each hour is an hour: 24 + 1 of them in the long day
    ("Europe/Berlin", "0 * * * *", "2026-10-24T23:30", ["2026-10-25T00:00", "2026-10-25T01:00", "2026-10-25T02:00"]),
    # 2026-03-08 02:00 EST -> 03:00 EDT at 07:00 UTC
    ("America/New_York", "15 2 * * *", "2026-03-07T12:00", ["2026-03-08T07:00", "2026-03-09T06:15"]),
    ("America/New_York", "15 1 * * *", "2026-10-31T12:00", ["2026-11-01T05:15", "2026-11-02T06:15"]),
    # Lord Howe's clocks change by half an hour: 2026-10-04 02:00 (+10:30) -> 02:30 (+11), at 15:30 UTC the day before
    ("Australia/Lord_Howe", "10 2 * * *", "2026-10-03T00:00", ["2026-10-03T15:30", "2026-10-04T15:10"]),
    # Santiago's change at midnight: 2026-09-06 00:00 (-4) -> 01:00 (-3), at 04:00 UTC
    ("America/Santiago", "0 0 * * *", "2026-09-05T12:00", ["2026-09-06T04:00", "2026-09-07T03:00"]),
    # no change in Istanbul since 2016: always three hours ahead
    ("Europe/Istanbul", "30 2 * * *", "2026-03-28T00:00", ["2026-03-28T23:30", "2026-03-29T23:30", "2026-03-30T23:30"]),
    ("UTC", "@daily", "2026-12-31T12:00", ["2027-01-01T00:00", "2027-01-02T00:00"]),
    ("Asia/Kathmandu", "0 6 * * 1", "2026-06-01T00:15", ["2026-06-08T00:15"]),
]


@pytest.mark.parametrize(("zone", "cron", "start", "expected"), SPRING_AND_FALL)
def test_moments_around_changes_of_clocks(zone, cron, start, expected):
    calendar = Calendar.parse(cron, zone)
    at = utc(start)
    found = []
    for _ in expected:
        at = calendar.after(at)
        found.append(at)
    assert found == [utc(text) for text in expected]


@pytest.mark.parametrize(
    ("zone", "expected"), [("Europe/Berlin", 365), ("America/Santiago", 365), ("Australia/Lord_Howe", 365)]
)
@pytest.mark.parametrize("cron", ["30 2 * * *", "0 0 * * *", "10 2 * * *", "59 1 * * *"])
def test_a_daily_schedule_has_one_moment_each_day_of_a_year(zone, cron, expected):
    calendar = Calendar.parse(cron, zone)
    first = datetime(2026, 1, 1, tzinfo=calendar.tz)
    moments = list(calendar.between(first, datetime(2026, 12, 31, 23, 59, tzinfo=calendar.tz)))
    assert len(moments) == expected
    assert len({calendar.local(at).date() for at in moments}) == expected


@given(
    zone=st.sampled_from(["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "America/Santiago", "UTC"]),
    cron=st.sampled_from(["30 2 * * *", "*/20 * * * *", "0,30 1-3 * * *", "0 */6 * * *", "15 2 29 * 0"]),
    minute=st.integers(0, 366 * 24 * 60),
)
@settings(max_examples=150, deadline=None)
def test_from_wherever_one_starts_the_moments_are_the_same(zone, cron, minute):
    """Forwards strictly on, and back again to where one came from: what a restarted ticker must find."""
    calendar = Calendar.parse(cron, zone)
    start = utc("2026-01-01T00:00") + timedelta(minutes=minute, seconds=7)
    first = calendar.after(start)
    second = calendar.after(first)
    assert start < first < second
    assert calendar.after(second - timedelta(seconds=1)) == second
    assert calendar.before(second) == first
    assert calendar.before(first) <= start


@pytest.mark.parametrize("cron", ["", "* * * *", "61 * * * *", "0 0 30 2 *", "0 0 0 * * *", "daily", "* " * 400])
def test_nonsense_is_refused(cron):
    with pytest.raises(InvalidSpecError) as error:
        Calendar.parse(cron, "UTC")
    assert error.value.param == "cron"


def test_a_zone_must_exist():
    with pytest.raises(InvalidSpecError, match="Europe/Istanbul"):
        Calendar.parse("@daily", "../etc/passwd")


def test_jitter_is_bounded_and_the_same_for_all():
    date = utc("2026-01-01T00:00")
    found = {jitter("sch_1", date + timedelta(days=day), 600) for day in range(200)}
    assert all(timedelta() <= one < timedelta(minutes=10) for one in found)
    assert len(found) > 150
    assert jitter("sch_1", date, 600) == jitter("sch_1", date, 600) != jitter("sch_2", date, 600)
    assert jitter("sch_1", date, 0) == timedelta()
