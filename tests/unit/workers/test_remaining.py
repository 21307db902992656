"""Which rows are still to run, against plain Python sets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from batchinfer_workers.remaining import RemainingRows

START, END = 1_000, 1_040
rows = st.sets(st.integers(START, END - 1))


@given(st.one_of(st.none(), rows), rows, st.integers(0, 50))
def test_it_behaves_like_a_set(only, done, count):
    """Built from a range or some rows of it, rows taken out, cut to the first few: the same as with a set."""
    remaining = RemainingRows(START, END, only)
    remaining.discard(done)
    expected = sorted((set(range(START, END)) if only is None else only) - done)
    assert list(remaining) == expected
    assert len(remaining) == len(expected)
    remaining.keep_first(count)
    expected = expected[:count]
    assert list(remaining) == expected
    assert [row for row in range(START - 5, END + 5) if row in remaining] == expected
    first, end = remaining.bounds
    assert [row for row in range(first, end) if row not in remaining.skip] == expected
    assert (first, end) == ((expected[0], expected[-1] + 1) if expected else (first, first))


def test_rows_of_other_shards_are_ignored():
    remaining = RemainingRows(10, 12)
    remaining.discard([3, 10, 99])
    assert list(remaining) == [11]
