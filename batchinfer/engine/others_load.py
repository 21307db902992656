"""What the rest of the machine did while something was measured."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable


def busy_seconds() -> float:
    """CPU time of the whole machine that was not idle, of all cores together, where the system tells it."""
    times = psutil.cpu_times()._asdict()
    # guests are within user and nice; steal is time that neighbours of a virtual machine took
    return float(sum(times.get(kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq", "steal")))


class OthersLoad:
    """The share of the machine that other processes than those of ``own`` took while a block ran.

    Use as a context manager; ``percent`` is of all cores, ``seconds`` what the block took. The clocks are arguments so
    that the arithmetic can be tested; ``own`` is this process's CPU time unless the block runs elsewhere.
    """

    def __init__(
        self,
        *,
        cores: int | None = None,
        wall: Callable[[], float] = time.monotonic,
        busy: Callable[[], float] = busy_seconds,
        own: Callable[[], float] = time.process_time,
    ) -> None:
        self.percent = self.seconds = 0.0
        self._cores = cores or psutil.cpu_count() or 1
        self._clocks = (wall, busy, own)

    def __enter__(self) -> Self:
        self._start = self._read()
        return self

    def __exit__(self, *_error: object) -> None:
        self.seconds, busy, own = (after - before for before, after in zip(self._start, self._read(), strict=True))
        # the counters tick in hundredths of a second, so a short block can come out slightly below zero
        share = (busy - own) / max(self.seconds * self._cores, 1e-9)
        self.percent = round(100 * min(1.0, max(0.0, share)), 1)

    def _read(self) -> tuple[float, ...]:
        return tuple(clock() for clock in self._clocks)
