"""When a schedule is due: cron expressions in a time zone, through days that have 23 or 25 hours."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Self
from zoneinfo import ZoneInfo, available_timezones

from cronsim import CronSim, CronSimError

from batchinfer.errors import InvalidSpecError

if TYPE_CHECKING:
    from collections.abc import Iterator

SHORTHANDS = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
_FIELDS = 5


class Calendar:
    """Moments of a cron expression, as aware UTC times.

    A local time that a change of clocks leaves out is taken at the moment of the change; one that comes twice is taken
    once, the first time, unless hour or minute is a ``*`` (every hour is every hour, the repeated one too).
    """

    def __init__(self, cron: str, tz: str) -> None:
        """Use :meth:`parse` for what people wrote."""
        self.cron = cron
        self.tz = ZoneInfo(tz)
        self._expression = SHORTHANDS.get(cron, cron)

    @classmethod
    def parse(cls, cron: str, tz: str) -> Self:
        """Check both texts.

        Raises:
            InvalidSpecError: the expression is not five fields of cron or never comes true; no such time zone.
        """
        cron = " ".join(cron.split())
        if tz not in available_timezones():
            raise InvalidSpecError(f"no time zone {tz!r}; use a name such as Europe/Istanbul or UTC", param="tz")
        expression = SHORTHANDS.get(cron, cron)
        fault = f"cron {cron!r} is not five fields (minute hour day month weekday), such as '30 2 * * *'"
        if len(expression.split()) != _FIELDS or len(expression) > 200:
            raise InvalidSpecError(f"{fault}; or one of {', '.join(SHORTHANDS)}", param="cron")
        try:
            calendar = cls(cron, tz)
            calendar.after(datetime.now(UTC))
        except CronSimError as error:
            raise InvalidSpecError(f"{fault}: {str(error).lower()}", param="cron") from None
        except StopIteration:
            raise InvalidSpecError(f"cron {cron!r} names a day that never comes", param="cron") from None
        return calendar

    def after(self, moment: datetime) -> datetime:
        """The first moment strictly after ``moment``."""
        for found in CronSim(self._expression, moment.astimezone(self.tz)):
            # in a repeated hour the iterator starts from the clock's reading and may give what has passed
            if (at := found.astimezone(UTC)) > moment:
                return at
        raise StopIteration

    def before(self, moment: datetime) -> datetime:
        """The last moment strictly before ``moment``."""
        # the iterator's own way back does not retrace its way forward over a change of clocks: go back, then forward
        span = timedelta(hours=2)
        while True:
            start = moment - span
            if (found := self.after(start)) < moment:
                break
            span *= 4
        while (later := self.after(found)) < moment:
            found = later
        return found

    def between(self, first: datetime, last: datetime) -> Iterator[datetime]:
        """All moments of the closed interval, in order."""
        at = self.after(first - timedelta(microseconds=1))
        while at <= last:
            yield at
            at = self.after(at)

    def local(self, moment: datetime) -> datetime:
        """The moment as the zone's clocks show it."""
        return moment.astimezone(self.tz)


def jitter(schedule_id: str, logical_date: datetime, most_seconds: int) -> timedelta:
    """How long after its moment a run starts: the same for everybody who asks, below ``most_seconds``."""
    if not most_seconds:
        return timedelta()
    digest = hashlib.blake2b(f"{schedule_id}:{logical_date.isoformat()}".encode(), digest_size=8).digest()
    return timedelta(milliseconds=int.from_bytes(digest, "big") % (most_seconds * 1000))
