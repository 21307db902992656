"""Money: integer nano-dollars whose parts sum exactly to the whole."""

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.money import NS_PER_HOUR, DeviceMeter, Price, format_usd, nanos_to_usd, usd_to_nanos


@given(
    rate=st.integers(0, 100 * 10**9),
    shares=st.lists(st.integers(0, 10**13), max_size=50),
)
def test_charges_sum_exactly_to_the_price_of_the_total_time(rate, shares):
    """However the time is cut, the parts add up to the whole, rounded down once."""
    meter = DeviceMeter(rate)
    charged = [meter.charge(share) for share in shares]
    exact = Fraction(sum(shares) * rate, NS_PER_HOUR)
    assert sum(charged) == exact.numerator // exact.denominator == meter.total_nanos
    assert all(amount >= 0 for amount in charged)


@given(nanos=st.integers(-(10**18), 10**18))
def test_dollars_and_nano_dollars_convert_without_loss(nanos):
    assert usd_to_nanos(nanos_to_usd(nanos)) == nanos


def test_an_hour_costs_the_hourly_rate():
    assert DeviceMeter(usd_to_nanos("2.50")).charge(3600 * 10**9) == 2_500_000_000


def test_cached_tokens_are_charged_at_their_own_price():
    """$3 / $0.30 / $15 a million: 900 fresh at 3, 100 cached at 0.3 and 10 out at 15 micro-dollars a token."""
    price = Price(usd_to_nanos(3), usd_to_nanos("0.30"), usd_to_nanos(15))
    assert nanos_to_usd(price.cost(1000, 100, 10)) == Decimal("0.002880000")


@pytest.mark.parametrize(
    ("nanos", "text"),
    [
        (0, "$0.00"),
        (12_345_678_900_000, "$12,345.68"),
        (1_000_000_000, "$1.00"),
        (250_000_000, "$0.25"),
        (1_234_000, "$0.0012"),
        (7, "$0.000000007"),
        (-250_000_000, "-$0.25"),
    ],
)
def test_amounts_are_written_so_that_small_ones_do_not_vanish(nanos, text):
    assert format_usd(nanos) == text
