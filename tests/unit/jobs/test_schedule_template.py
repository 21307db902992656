"""Variables in a schedule's paths, and what is not allowed there."""

from datetime import UTC, datetime

import pytest

from batchinfer.errors import InvalidSpecError
from batchinfer.jobs.cron import Calendar
from batchinfer.jobs.schedule_template import check_template, render, variables

CALENDAR = Calendar.parse("30 2 * * *", "Europe/Istanbul")
# 02:30 on the 29th in Istanbul
VALUES = variables(CALENDAR, datetime(2026, 3, 28, 23, 30, tzinfo=UTC), run_id="run_1", schedule="nightly")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://b/in/date={{ logical_date }}/*.parquet", "s3://b/in/date=2026-03-29/*.parquet"),
        ("{{ logical_date | ds }}", "2026-03-29"),
        ("{{ logical_date | ds_nodash }}", "20260329"),
        ("{{ logical_date | ts }}", "2026-03-29T02:30:00+03:00"),
        ("{{ logical_date | ts_nodash }}", "20260329T023000"),
        ("{{ previous_logical_date }}/{{ next_logical_date }}", "2026-03-28/2026-03-30"),
        ("{{ logical_date | days(-29) | ds }}", "2026-02-28"),
        ("{{ logical_date.strftime('%Y/%m/%d/%H') }}", "2026/03/29/02"),
        ("{{ logical_date.year }}-{{ run_id }}-{{ schedule }}", "2026-run_1-nightly"),
        ("/plain/path.parquet", "/plain/path.parquet"),
    ],
)
def test_rendering(text, expected):
    assert render(text, VALUES, "inputs") == expected


@pytest.mark.parametrize(
    "text",
    [
        "{{ logical_dat }}",
        "{{ logical_date",
        "{% for x in 'ab' %}{{ x }}{% endfor %}",
        "{{ 'a' * 1000000000 }}",
        "{{ ''.__class__ }}",
        "{{ logical_date._moment }}",
        "{{ logical_date.__init__.__globals__ }}",
        "{{ logical_date | upper }}",
        "{{ logical_date[0] }}",
        "{{ range(10) }}",
        "{% include 'x' %}",
        "x" * 5000,
    ],
)
def test_what_a_path_does_not_need_is_refused(text):
    with pytest.raises(InvalidSpecError) as error:
        check_template(text, "output")
    assert error.value.param == "output"


@pytest.mark.parametrize("text", ["{{ logical_date.strftime('%999999999d') }}", "{{ logical_date | days(99999999) }}"])
def test_what_fails_while_rendering_is_one_sentence(text):
    with pytest.raises(InvalidSpecError, match="inputs"):
        render(text, VALUES, "inputs")
