"""A step's nanoseconds are split without losing one."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from batchinfer.engine.ingest import row_seed
from batchinfer.engine.metering import split_exactly


@given(total=st.integers(0, 10**15), weights=st.lists(st.integers(1, 10**6), min_size=1, max_size=100))
def test_shares_sum_to_the_whole_and_none_is_a_unit_off(total, weights):
    shares = split_exactly(total, weights)
    assert sum(shares) == total
    exact = [Fraction(total * weight, sum(weights)) for weight in weights]
    assert all(abs(share - e) < 1 for share, e in zip(shares, exact, strict=True))


def test_units_left_over_go_to_the_largest_remainders():
    """10 over 1:1:4 is 1.67, 1.67, 6.67: all have the same remainder, so the first two get the two units left."""
    assert split_exactly(10, [1, 1, 4]) == [2, 2, 6]
    assert split_exactly(10, [3, 5]) == [4, 6]  # 3.75 and 6.25


def test_an_unseeded_rows_seed_depends_on_engine_and_row_alone():
    assert row_seed(1, "row") == row_seed(1, "row")
    assert len({row_seed(engine, row) for engine in range(10) for row in "abcdefghij"}) == 100
    assert 0 <= row_seed(0, "\ud800") < 2**63
