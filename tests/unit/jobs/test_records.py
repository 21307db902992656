"""Counters and ids."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.jobs.ids import new_job_id
from batchinfer.jobs.records import RowCounts
from batchinfer.types import RowStatus

STATUSES = st.lists(st.sampled_from(RowStatus))


@given(STATUSES, STATUSES)
def test_counts_add_and_subtract_as_multisets_do(left, right):
    counts = RowCounts.of(left) + RowCounts.of(right)
    assert {k: v for k, v in counts.as_dict().items() if v} == Counter(map(str, left + right))
    assert counts.total == len(left) + len(right)
    assert counts - RowCounts.of(right) == RowCounts.of(left)
    assert all(counts[status] == (left + right).count(status) for status in RowStatus)


def test_an_unknown_status_is_refused():
    with pytest.raises(KeyError):
        RowCounts.of(["done"])


@given(st.lists(st.integers(0, 2**48 - 1), min_size=2, unique=True))
def test_job_ids_sort_by_time(times):
    ids = {time_ms: new_job_id(time_ms) for time_ms in times}
    assert sorted(times, key=ids.__getitem__) == sorted(times)


def test_job_ids_have_one_form_and_do_not_repeat():
    ids = {new_job_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(len(i) == 30 and i.startswith("job_") and i == i.lower() and i[4:].isalnum() for i in ids)
    # 48 bits of milliseconds are the first ten characters, padded by two zero bits: read them back
    assert (
        int(
            new_job_id(1_700_000_000_000)[4:14].translate(
                str.maketrans("abcdefghjkmnpqrstvwxyz", "abcdefghijklmnopqrstuv")
            ),
            32,
        )
        == 1_700_000_000_000
    )
