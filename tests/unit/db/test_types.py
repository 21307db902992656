"""Column types."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.dialects import postgresql, sqlite

from batchinfer.db.types import SafeText, UtcDateTime

DIALECTS = [sqlite.dialect(), postgresql.dialect()]
ZONES = st.sampled_from([UTC, timezone(timedelta(hours=5, minutes=30)), timezone(timedelta(hours=-8))])


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda d: d.name)
@given(moment=st.datetimes(datetime(1970, 1, 2), datetime(9999, 12, 30), timezones=ZONES))  # noqa: DTZ001 -- zones are given
def test_a_time_comes_back_as_the_same_moment_in_utc(dialect, moment):
    column = UtcDateTime()
    back = column.process_result_value(column.process_bind_param(moment, dialect), dialect)
    assert back == moment
    assert back.tzinfo is UTC


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda d: d.name)
def test_a_time_without_a_zone_is_refused(dialect):
    with pytest.raises(ValueError, match="no time zone"):
        UtcDateTime().process_bind_param(datetime(2026, 1, 1), dialect)  # noqa: DTZ001 -- the case at hand


@given(st.text(st.characters()))
def test_text_of_unknown_origin_can_always_be_stored(value):
    """Every character that UTF-8 has is kept; NUL and lone surrogates become U+FFFD, one for one."""
    stored = SafeText().process_bind_param(value, DIALECTS[0])
    stored.encode("utf-8")
    expected = "".join("\ufffd" if c == "\0" or "\ud800" <= c <= "\udfff" else c for c in value)
    assert stored == expected


def test_no_value_stays_none():
    assert SafeText().process_bind_param(None, DIALECTS[0]) is None
    assert UtcDateTime().process_bind_param(None, DIALECTS[0]) is None
    assert UtcDateTime().process_result_value(None, DIALECTS[0]) is None
