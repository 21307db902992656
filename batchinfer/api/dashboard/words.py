"""Numbers, times and states as people read them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from markupsafe import Markup

from batchinfer.money import NANOS_PER_USD, format_usd, usd_to_nanos

if TYPE_CHECKING:
    from decimal import Decimal

NOTHING = "—"
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_TONES = {
    "completed": "good",
    "succeeded": "good",
    "committed": "good",
    "delivered": "good",
    "done": "good",
    "alive": "good",
    "in_progress": "busy",
    "running": "busy",
    "finalizing": "busy",
    "validating": "wait",
    "queued": "wait",
    "waiting": "wait",
    "pending": "wait",
    "paused": "held",
    "budget_exhausted": "held",
    "partial": "held",
    "released": "held",
    "skipped": "held",
    "filtered": "held",
    "cancelling": "held",
    "cancelled": "held",
    "expired": "held",
}


def usd(amount: Decimal | None) -> str:
    """``$0.0012`` of dollars."""
    return NOTHING if amount is None else format_usd(usd_to_nanos(amount))


def nanos(amount: int | None) -> str:
    """The same of nano-dollars."""
    return NOTHING if amount is None else format_usd(amount)


def nanos_of(amount: float) -> str:
    """The same of a chart's value."""
    return format_usd(round(amount))


def count(value: float | None) -> str:
    """``1,234`` or ``12.5``; large ones as ``1.2 M``."""
    if value is None:
        return NOTHING
    for size, letter in ((1e9, " G"), (1e6, " M")):
        if abs(value) >= 10 * size:
            return f"{value / size:,.1f}{letter}"
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 100 else f"{value:,.1f}"


def percent(share: float | None) -> str:
    """``42 %`` of 0.42; 100 % only where all of it is meant."""
    if share is None:
        return NOTHING
    shown = round(100 * share)
    return f"{min(shown, 99) if share < 1 else shown} %"


def duration(seconds: float | None) -> str:
    """The two largest units: ``2 h 5 min``."""
    if seconds is None:
        return NOTHING
    if seconds < 10:
        return f"{seconds:.1f} s"
    left = round(seconds)
    parts: list[str] = []
    for size, name in _UNITS:
        number, left = divmod(left, size)
        if number or parts:
            parts.append(f"{number} {name}")
    return " ".join(part for part in parts[:2] if not part.startswith("0 "))


def figure(value: float | None, what: str) -> str:
    """A figure of a forecast, in its unit."""
    if value is None:
        return NOTHING
    if what == "cost_usd":
        return format_usd(round(value * NANOS_PER_USD))
    return duration(value) if what == "device_seconds" else count(round(value))


def figure_name(what: str) -> str:
    """``Cost`` of ``cost_usd``."""
    return words(what.removesuffix("_usd").replace("device_seconds", "device_time")).capitalize()


def ago(moment: datetime | None, now: datetime) -> str:
    """``3 min ago``, or ``in 3 min``."""
    if moment is None:
        return NOTHING
    seconds = (now - moment).total_seconds()
    if abs(seconds) < 1:
        return "now"
    text = duration(float(round(abs(seconds)))).removesuffix(".0 s") if abs(seconds) < 10 else duration(abs(seconds))
    text = f"{text} s" if text.isdecimal() else text
    return f"{text} ago" if seconds > 0 else f"in {text}"


def moment(value: datetime | None) -> Markup:
    """A time element in UTC."""
    if value is None:
        return Markup(NOTHING)  # noqa: S704 -- a constant
    value = value.astimezone(UTC)
    return Markup('<time datetime="{}">{}</time>').format(value.isoformat(), value.strftime("%Y-%m-%d %H:%M:%S"))


def tone(state: object) -> str:
    """The class of a state's colour."""
    return _TONES.get(str(state), "bad")


def words(state: object) -> str:
    """``in progress`` of ``in_progress``."""
    return str(state).replace("_", " ")


def short(text: str | None, length: int = 48) -> str:
    """The end of a long path, which tells more than its beginning."""
    if text is None:
        return NOTHING
    return text if len(text) <= length else f"…{text[1 - length :]}"
