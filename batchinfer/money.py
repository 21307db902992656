"""Money is an integer number of nano-dollars (1 USD = 10**9), so that sums are exact."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Decimal

NANOS_PER_USD = 10**9
NS_PER_HOUR = 3600 * 10**9
TOKENS_PER_PRICE = 10**6


def usd_to_nanos(usd: Decimal | str | int) -> int:
    """Convert dollars to nano-dollars, rounding half to even.

    Takes no float on purpose: ``0.1`` is not a tenth.
    """
    return int((Decimal(usd) * NANOS_PER_USD).to_integral_value(rounding=ROUND_HALF_EVEN))


def nanos_to_usd(nanos: int) -> Decimal:
    """Convert nano-dollars to dollars, exactly, with nine digits after the point."""
    return Decimal(nanos).scaleb(-9)


def format_usd(nanos: int) -> str:
    """Write an amount for people: two digits from a dollar up, else as many as show two significant ones."""
    usd = nanos_to_usd(abs(nanos))
    sign = "-" if nanos < 0 else ""
    if nanos == 0 or usd >= 1:
        return f"{sign}${usd:,.2f}"
    digits = min(9, 1 - usd.adjusted())
    return f"{sign}${usd:.{max(2, digits)}f}"


class DeviceMeter:
    """Turns device time into money so that the parts sum exactly to the whole.

    Each charge is the difference of two roundings of the *running* total; hence after any number of charges the sum
    is ``total_ns * rate // NS_PER_HOUR``, to the nano-dollar.
    """

    def __init__(self, nanos_per_hour: int, total_ns: int = 0) -> None:
        self.nanos_per_hour = nanos_per_hour
        self.total_ns = total_ns

    @property
    def total_nanos(self) -> int:
        """Nano-dollars charged so far."""
        return self.total_ns * self.nanos_per_hour // NS_PER_HOUR

    def charge(self, device_ns: int) -> int:
        """Add device time in nanoseconds; return its price in nano-dollars."""
        before = self.total_nanos
        self.total_ns += device_ns
        return self.total_nanos - before


@dataclass(frozen=True, slots=True)
class Price:
    """A list price: nano-dollars per million tokens of each kind."""

    input_nanos: int
    cached_input_nanos: int
    output_nanos: int

    def cost(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> int:
        """List price of one row in nano-dollars, rounded down once."""
        total = (
            (prompt_tokens - cached_tokens) * self.input_nanos
            + cached_tokens * self.cached_input_nanos
            + completion_tokens * self.output_nanos
        )
        return total // TOKENS_PER_PRICE
